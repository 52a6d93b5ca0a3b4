"""The unit of work that Spark sends to an executor, for batches and streams alike: picklable,
small, and without secrets in its repr.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.datasource import InputPartition

from tierlog.spark_reader.plan import Split


class SplitPartition(InputPartition):  # type: ignore[misc]
    """The splits of a task."""

    def __init__(self, splits: Sequence[Split]) -> None:
        super().__init__(None)
        self.splits = splits

    def __repr__(self) -> str:
        return ", ".join(
            f"{split.topic}-{split.partition}[{split.start_offset}, {split.end_offset})"
            for split in self.splits
        )
