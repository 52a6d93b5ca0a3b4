"""Which requested offsets exist, and what happens about those that do not. Pure.

* A requested range of offsets that does not exist is data loss: an error, or a warning if
  `failOnDataLoss` is false. `earliest`, `latest` and timestamps never cause data loss.
* A gap that a restore left is not data loss, unless the range ends inside it: the log had been
  longer than what was restored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from tierlog.record_format.errors import TierlogError
from tierlog.spark_reader.catalog import PartitionFacts
from tierlog.spark_reader.plan import Gaps, first_lost, skip_gap

Warn = Callable[[str], None]


class DataLoss(TierlogError):
    """Requested records are gone and `failOnDataLoss` is true, or other rows would be wrong."""


class OffsetRange(NamedTuple):
    """[start_offset, end_offset) of a partition."""

    facts: PartitionFacts
    start_offset: int
    end_offset: int


def log_to_stderr(text: str) -> None:
    """A `Warn`: Spark collects the standard error of its Python processes."""
    print(f"tierlog: {text}", file=sys.stderr, flush=True)


class DataLossPolicy(NamedTuple):
    """`failOnDataLoss`: whether rows that are gone are an error or a warning."""

    fail: bool
    warn: Warn

    def report(self, what: str) -> None:
        """Raise DataLoss, or warn."""
        if self.fail:
            raise DataLoss(f"{what}; option failOnDataLoss=false reads what remains")
        self.warn(what)


def clamp(facts: PartitionFacts, start: int, end: int, *, loss: DataLossPolicy) -> tuple[int, int]:
    """The part of [start, end) that exists; `loss` decides about the rest."""
    name = f"{facts.topic}-{facts.partition}"
    if skip_gap(start, facts.gaps) < facts.log_start_offset:
        loss.report(f"{name}: offsets {start} to {facts.log_start_offset} are gone")
    if end > facts.end_offset or start > facts.end_offset:
        loss.report(f"{name}: ends at {facts.end_offset}, before offset {max(start, end)}")
        end = min(end, facts.end_offset)
    report_if_lost(name, start, end, facts.gaps, loss=loss)
    start = max(start, facts.log_start_offset)
    return min(start, facts.end_offset), max(end, min(start, facts.end_offset))


def report_if_lost(name: str, start: int, end: int, gaps: Gaps, *, loss: DataLossPolicy) -> None:
    """Report what of [start, end) is gone if it ends inside a gap."""
    if (lost := first_lost(start, end, gaps)) is not None:
        loss.report(f"{name}: offsets {lost} to {end} are gone: they were not restored")
