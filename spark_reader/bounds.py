"""Where a read begins and ends according to the options, before anything is known about the log.

* The meaning is that of Spark's Kafka source: one time for all takes precedence over times by
  partition, and those over offsets; -2 is the earliest, -1 the latest; a time is the first record
  at or after it; a map may name only some partitions, the others take the default.
* Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

EARLIEST: Final = -2
LATEST: Final = -1

ByPartition = Mapping[str, Mapping[int, int]]


class AtTime(NamedTuple):
    """The first record at or after a time (ms)."""

    timestamp: int


OffsetSpec = int | AtTime
"""An offset, EARLIEST, LATEST, or a time."""


class NoMatch(StrEnum):
    """What a starting time past the last record does."""

    ERROR = "error"
    LATEST = "latest"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """One end of a read. `timestamp` is for all partitions, `timestamps` for those it names."""

    default: int
    offsets: ByPartition = field(default_factory=dict)
    timestamp: int | None = None
    timestamps: ByPartition = field(default_factory=dict)
    no_match: NoMatch = NoMatch.ERROR

    def place(self, topic: str, partition: int) -> OffsetSpec:
        if self.timestamp is not None:
            return AtTime(self.timestamp)
        timestamp = self.timestamps.get(topic, {}).get(partition)
        if timestamp is not None:
            return AtTime(timestamp)
        return self.offsets.get(topic, {}).get(partition, self.default)

    def named(self) -> list[tuple[str, int]]:
        """Every topic and partition that a map names."""
        maps = (self.offsets, self.timestamps)
        return [(topic, number) for one in maps for topic in one for number in one[topic]]


def is_backwards(start: OffsetSpec, end: OffsetSpec) -> bool:
    """Whether a range is known to end before it starts, without looking anything up."""
    if isinstance(start, AtTime) or isinstance(end, AtTime):
        return isinstance(start, AtTime) and isinstance(end, AtTime) and start > end
    return start > end >= 0
