"""From what the options ask to offsets that there are: pure except for looking up times.

Rules that keep it honest:

* A range that was asked for by number and is not there is data loss: an error, or a warning if
  `failOnDataLoss` is false. `earliest`, `latest` and times never are.
* A gap that a restore left is not a loss: nothing was ever there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from record_format.errors import TierlogError
from spark_reader.bounds import EARLIEST, LATEST, AtTime, Bounds, NoMatch, OffsetSpec
from spark_reader.catalog import PartitionFacts
from spark_reader.option_values import InvalidOption

TimeLookup = Callable[[PartitionFacts, int], int | None]
Warn = Callable[[str], None]


class DataLoss(TierlogError):
    """Records that were asked for are gone: `failOnDataLoss` is true, or others would be wrong."""


class OffsetRange(NamedTuple):
    """[start_offset, end_offset) of a partition."""

    facts: PartitionFacts
    start_offset: int
    end_offset: int


class LossPolicy(NamedTuple):
    """What happens to rows that are gone."""

    fail: bool
    warn: Warn

    def report(self, what: str) -> None:
        """Raise DataLoss, or say so and go on."""
        if self.fail:
            raise DataLoss(f"{what}; option failOnDataLoss=false reads what is left")
        self.warn(what)


def resolve(
    facts: PartitionFacts,
    starting: Bounds,
    ending: Bounds,
    *,
    first_at_time: TimeLookup,
    loss: LossPolicy,
) -> OffsetRange:
    """The offsets to read of one partition. Raises DataLoss, InvalidOption."""
    start = resolve_start(facts, starting, first_at_time=first_at_time)
    end = _offset(facts, ending.place(facts.topic, facts.partition), first_at_time)
    end = facts.end_offset if end is None else end
    return OffsetRange(facts, *within(facts, start, end, loss=loss))


def resolve_start(facts: PartitionFacts, starting: Bounds, *, first_at_time: TimeLookup) -> int:
    """The offset to start at, not yet compared with what there is."""
    place = starting.place(facts.topic, facts.partition)
    start = _offset(facts, place, first_at_time)
    if start is not None:
        return start
    if starting.no_match is NoMatch.ERROR:
        assert isinstance(place, AtTime)
        raise InvalidOption(
            f"{facts.topic}-{facts.partition} has no record at or after {place.timestamp}; option "
            "startingOffsetsByTimestampStrategy=latest starts at the end then"
        )
    return facts.end_offset


def within(facts: PartitionFacts, start: int, end: int, *, loss: LossPolicy) -> tuple[int, int]:
    """The part of [start, end) that there is; what there is not goes by `loss`."""
    name = f"{facts.topic}-{facts.partition}"
    if start < facts.log_start_offset:
        loss.report(f"{name}: offsets {start} to {facts.log_start_offset} are gone")
        start = facts.log_start_offset
    if end > facts.end_offset or start > facts.end_offset:
        loss.report(f"{name}: ends at {facts.end_offset}, before offset {max(start, end)}")
        end = min(end, facts.end_offset)
    return min(start, facts.end_offset), max(end, min(start, facts.end_offset))


def _offset(facts: PartitionFacts, place: OffsetSpec, first_at_time: TimeLookup) -> int | None:
    """None if no record is as new as the time."""
    if isinstance(place, AtTime):
        return first_at_time(facts, place.timestamp)
    return {EARLIEST: facts.log_start_offset, LATEST: facts.end_offset}.get(place, place)
