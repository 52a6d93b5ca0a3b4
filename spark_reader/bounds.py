"""The start and end of a read as the options specify them, independent of the log. No I/O.

The semantics are those of Spark's Kafka source: a timestamp for all partitions takes precedence
over timestamps by partition, and those over offsets; -2 is the earliest offset, -1 the latest; a
timestamp means the first record at or after it; a map may name only some partitions, and the others
use the default.
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

    def __str__(self) -> str:
        return f"time {self.timestamp}"


OffsetSpec = int | AtTime
"""An offset, EARLIEST, LATEST, or a time."""


class NoMatch(StrEnum):
    """What happens if no record is at or after the starting timestamp."""

    ERROR = "error"
    LATEST = "latest"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """One end of a read. `timestamp` is for all partitions, `timestamps` for those in the map."""

    default: int
    offsets: ByPartition = field(default_factory=dict)
    timestamp: int | None = None
    timestamps: ByPartition = field(default_factory=dict)
    no_match: NoMatch = NoMatch.ERROR

    def spec_for(self, topic: str, partition: int) -> OffsetSpec:
        if self.timestamp is not None:
            return AtTime(self.timestamp)
        timestamp = self.timestamps.get(topic, {}).get(partition)
        if timestamp is not None:
            return AtTime(timestamp)
        return self.offsets.get(topic, {}).get(partition, self.default)

    def named(self) -> list[tuple[str, int]]:
        """The topics and partitions named in the maps."""
        maps = (self.offsets, self.timestamps)
        return [
            (topic, number) for by_topic in maps for topic in by_topic for number in by_topic[topic]
        ]


def is_backwards(start: OffsetSpec, end: OffsetSpec) -> bool:
    """Whether a range is known to end before it starts, without looking up anything."""
    if isinstance(start, AtTime) or isinstance(end, AtTime):
        return isinstance(start, AtTime) and isinstance(end, AtTime) and start > end
    return start > end >= 0
