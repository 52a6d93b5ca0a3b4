"""What goes from the plan to an executor, for batches and streams alike.

Rule: picklable, small, and without a secret in its repr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyspark.sql.datasource import InputPartition

from spark_reader.plan import Split


class SplitPartition(InputPartition):  # type: ignore[misc]
    """The splits of a task, as Spark carries them."""

    def __init__(self, splits: Sequence[Split]) -> None:
        super().__init__(None)
        self.splits = splits

    def __repr__(self) -> str:
        return ", ".join(
            f"{split.topic}-{split.partition}[{split.start_offset}, {split.end_offset})"
            for split in self.splits
        )


def say(text: str) -> None:
    """To the log of the Python worker, which is its standard error."""
    print(f"tierlog: {text}", file=sys.stderr, flush=True)
