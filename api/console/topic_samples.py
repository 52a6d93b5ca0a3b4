"""What the charts of a topic show: as `samples`, of each topic that is in use.

* Bounded: `TOPICS` rings of `RING` samples, eight bytes a number. A topic gets one when something
  is produced to it or read from it, or when its charts are looked at; then the one that was not in
  use for longest goes.
* What was produced is what its logs grew by since they were opened: a produce pays nothing for its
  chart, and a partition that another broker hands over is no peak in it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from tierlog.api.console.rates import RING, new_pairs, rate
from tierlog.broker.group_coordinator.groups import OffsetState
from tierlog.broker.reports import TopicStorage
from tierlog.broker.topics.topics import Topic

TOPICS: Final = 100


class TopicSample(NamedTuple):
    """Totals, and what is now. `lag`: of the group that is furthest behind, in records."""

    at_ms: int
    produced_records: int
    read_records: int
    produced_bytes: int
    read_bytes: int
    hot_bytes: int
    cold_bytes: int
    lag: int


class Read(NamedTuple):
    """By topic, since the start."""

    records: Mapping[str, int]
    size_bytes: Mapping[str, int]


class TopicSeries(msgspec.Struct):
    """Columns of equal length; each rate is since the previous sample."""

    at_ms: list[int]
    produced_records_per_s: list[float]
    read_records_per_s: list[float]
    produced_bytes_per_s: list[float]
    read_bytes_per_s: list[float]
    hot_bytes: list[int]
    cold_bytes: list[int]
    lag: list[int]


def topic_series(samples: list[TopicSample], *, after_ms: int) -> TopicSeries:
    pairs = new_pairs(samples, after_ms=after_ms)

    def rates(name: str) -> list[float]:
        return [rate(one, two, name) for one, two in pairs]

    return TopicSeries(
        at_ms=[two.at_ms for _, two in pairs],
        produced_records_per_s=rates("produced_records"),
        read_records_per_s=rates("read_records"),
        produced_bytes_per_s=rates("produced_bytes"),
        read_bytes_per_s=rates("read_bytes"),
        hot_bytes=[two.hot_bytes for _, two in pairs],
        cold_bytes=[two.cold_bytes for _, two in pairs],
        lag=[two.lag for _, two in pairs],
    )


class TopicRing:
    """The newest samples of one topic, the oldest first."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def samples(self) -> list[TopicSample]:
        numbers, width = self._numbers, len(TopicSample._fields)
        rows = range(0, len(numbers), width)
        return [TopicSample(*numbers[at : at + width]) for at in rows][-RING:]

    @property
    def last(self) -> TopicSample | None:
        width = len(TopicSample._fields)
        return TopicSample(*self._numbers[-width:]) if self._numbers else None

    def add_sample(self, sample: TopicSample) -> None:
        if (last := self.last) is not None and last.at_ms > sample.at_ms:
            del self._numbers[:]  # the clock was set back
        self._numbers.extend(sample)
        most = RING * len(sample)
        if len(self._numbers) >= 2 * most:  # the front of an array is cut off by moving the rest
            del self._numbers[:-most]


class TopicRings:
    """Used only on the event loop."""

    def __init__(self, most: int = TOPICS) -> None:
        self._most = most
        self._rings: OrderedDict[str, TopicRing] = OrderedDict()
        self._before: Mapping[str, TopicSample] = {}

    def add_samples(self, samples: Mapping[str, TopicSample]) -> None:
        """A sample of every topic; those that are gone lose their rings."""
        for topic, sample in samples.items():
            before = self._before.get(topic, sample)
            if (before.produced_records, before.read_records) != sample[1:3]:
                self._use(topic)
            if (ring := self._rings.get(topic)) is not None:
                ring.add_sample(sample)
        for topic in self._rings.keys() - samples.keys():
            del self._rings[topic]
        self._before = samples

    def look_at(self, topic: str) -> list[TopicSample]:
        return self._use(topic).samples()

    def _use(self, topic: str) -> TopicRing:
        ring = self._rings.get(topic)
        if ring is None:
            ring = self._rings[topic] = TopicRing()
            if topic in self._before:
                ring.add_sample(self._before[topic])
        self._rings.move_to_end(topic)
        if len(self._rings) > self._most:
            self._rings.popitem(last=False)
        return ring


def sample_topics(
    topics: Iterable[Topic],
    stored: Iterable[TopicStorage],
    lags: Mapping[str, int],
    *,
    at_ms: int,
    read: Read,
) -> dict[str, TopicSample]:
    parts = {one.record.name: list(one.partitions.values()) for one in topics}
    return {
        one.topic: TopicSample(
            at_ms=at_ms,
            produced_records=sum(part.appended_records for part in parts.get(one.topic, ())),
            read_records=read.records.get(one.topic, 0),
            produced_bytes=sum(part.appended_bytes for part in parts.get(one.topic, ())),
            read_bytes=read.size_bytes.get(one.topic, 0),
            hot_bytes=one.hot_bytes,
            cold_bytes=one.cold_bytes,
            lag=lags.get(one.topic, 0),
        )
        for one in stored
    }


def lags_of(groups: Iterable[tuple[str, list[OffsetState]]]) -> dict[str, int]:
    """By topic, the most that a group is behind."""
    most: dict[str, int] = {}
    for _, offsets in groups:
        of_group: dict[str, int] = {}
        for one in offsets:
            of_group[one.topic] = of_group.get(one.topic, 0) + one.lag
        for topic, lag in of_group.items():
            most[topic] = max(lag, most.get(topic, 0))
    return most
