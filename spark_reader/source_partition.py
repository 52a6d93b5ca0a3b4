"""What goes from the plan to an executor, for batches and streams alike.

Rule: picklable, small, and without a secret in its repr.
"""

from __future__ import annotations

import sys

from pyspark.sql.datasource import InputPartition

from spark_reader.plan import Split


class SplitPartition(InputPartition):  # type: ignore[misc]
    """A split, as Spark carries it."""

    def __init__(self, split: Split) -> None:
        super().__init__(None)
        self.split = split

    def __repr__(self) -> str:
        split = self.split
        return f"{split.topic}-{split.partition}[{split.start_offset}, {split.end_offset})"


def say(text: str) -> None:
    """To the log of the Python worker, which is its standard error."""
    print(f"tierlog: {text}", file=sys.stderr, flush=True)
