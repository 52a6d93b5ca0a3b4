"""What there is to read, asked of the broker and the bucket: topics, partitions and their ends.

Rules that keep it honest:

* With a broker, it says which topics there are and under which id: the bucket may lack the newest
  commits. Without one the bucket's topic objects do.
* The manifest is loaded before the broker's offsets are asked: what moves to the bucket in between
  the broker serves all the same, and so hot and cold leave no gap between them.
* Of a pinned partition nothing but its manifest version counts, neither the broker's end nor its
  log start: the same read twice gives the same rows. The broker is asked for what lies beyond that
  version only where an ending offset says so by number, which is as fixed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from manifest.keys import PartitionKeys
from manifest.pins import Pins
from manifest.state import Manifest, SegmentEntry
from manifest.store import ManifestStore, StoreOptions
from manifest.topic_objects import TopicObject, TopicObjects, restorable
from record_format.errors import MissingObject, UnknownManifestVersion, UnknownTopic
from record_format.index_layouts import AbortedTxn
from spark_reader import cold_index
from spark_reader.access import Connections
from spark_reader.bounds import AtTime
from spark_reader.option_values import InvalidOption
from spark_reader.options import NO_LIMITS, ReadOptions, TopicChoice
from spark_reader.stream_offsets import StreamOffsets
from tierlog.client.answers import Offsets, PartitionDescription

PARALLEL: Final = 16

T = TypeVar("T")
R = TypeVar("R")


class TopicFacts(NamedTuple):
    """`partitions`: their numbers; a topic adopted from a Kafka folder may lack some.

    `described`: those that the broker has, and that are sound.
    """

    name: str
    topic_id: str
    partitions: tuple[int, ...]
    described: Mapping[int, PartitionDescription] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class PartitionFacts:
    """A partition as this read finds it: readable are [log_start_offset, end_offset).

    What lies below `cold_end_offset` is in the bucket, the rest is the broker's.
    """

    topic: str
    topic_id: str
    partition: int
    log_start_offset: int
    end_offset: int
    cold_end_offset: int
    manifest: Manifest | None
    is_pinned: bool = False
    gaps: tuple[tuple[int, int], ...] = ()


class Catalog:
    """One look at the world; nothing is kept from one query to the next."""

    def __init__(self, options: ReadOptions, *, patient: bool = False) -> None:
        self._options = options
        self._connections = Connections(options.access, patient)
        self._with_broker = options.tier == "all"

    # --- topics -----------------------------------------------------------------------------------

    def chosen(self, *, may_be_gone: Container[str] = frozenset()) -> list[tuple[TopicFacts, int]]:
        """The partitions that the options choose. Raises UnknownTopic, InvalidOption."""
        choice = self._options.choice
        chosen: list[tuple[TopicFacts, int]] = []
        for topic in self._topics(choice, may_be_gone):
            numbers = topic.partitions
            if choice.partitions is not None:
                numbers = choice.partitions[topic.name]
                _check_partitions("assign", topic, numbers)
            chosen += [(topic, number) for number in numbers]
        return chosen

    def _topics(self, choice: TopicChoice, may_be_gone: Container[str]) -> list[TopicFacts]:
        if choice.pattern is not None:
            names = [name for name in self._names() if choice.pattern.fullmatch(name)]
            may_be_gone = names  # since they were listed: no option names them
        else:
            names = list(choice.topics or choice.partitions or ())

        def look(name: str) -> TopicFacts | None:
            try:
                return self._topic(name)
            except UnknownTopic:
                if name in may_be_gone:
                    return None
                raise

        return [topic for topic in in_parallel(look, names) if topic is not None]

    def _names(self) -> list[str]:
        """All topics but internal ones."""
        if self._with_broker:
            return [one.name for one in self._connections.broker.list_topics()]
        return [name for name in sorted(self._stored_topics()) if not name.startswith("__")]

    def _topic(self, name: str) -> TopicFacts:
        if self._with_broker:
            topic = self._connections.broker.describe_topic(name)
            described = {one.partition: one for one in topic.partitions}
            return TopicFacts(topic.name, topic.topic_id, tuple(topic.numbers), described)
        stored = self._stored_topics(name)
        if name not in stored:
            raise UnknownTopic(name)
        return _facts_of(stored[name])

    def _stored_topics(self, name: str | None = None) -> dict[str, TopicObject]:
        objects = TopicObjects(self._connections.store)
        ids = objects.scan() if name is None else [(name, one) for one in objects.ids(name)]
        loaded = in_parallel(lambda pair: objects.load(*pair), ids)
        return restorable([topic for topic in loaded if topic is not None]).topics

    def _check_named(self, chosen: list[tuple[TopicFacts, int]]) -> None:
        """What an option says of a partition that is not read was meant for another."""
        by_name = {topic.name: topic for topic, _ in chosen}
        read = {(topic.name, partition) for topic, partition in chosen}
        options = self._options
        named = {
            "startingOffsets or startingOffsetsByTimestamp": options.starting.named(),
            "endingOffsets or endingOffsetsByTimestamp": options.ending.named(),
            "manifestVersion": [(t, p) for t, of in options.manifest_versions.items() for p in of],
        }
        for option, pairs in named.items():
            for name, partition in pairs:
                if name not in by_name:
                    raise InvalidOption(f"option {option}: topic {name!r} is not one that is read")
                _check_partitions(option, by_name[name], (partition,))
                if (name, partition) not in read:
                    raise InvalidOption(f"option {option}: {name}-{partition} is not one assigned")

    # --- partitions -------------------------------------------------------------------------------

    def partitions(self) -> list[PartitionFacts]:
        """The facts of every chosen partition. Raises InvalidOption where options name others."""
        chosen = self.chosen()
        self._check_named(chosen)
        return self._facts(chosen)

    def partitions_of_stream(self, begun: StreamOffsets | None) -> list[PartitionFacts]:
        """The same once a stream is under way: where it began, and on what, is of no matter.

        A topic that it has read may be gone; where `begun` is None, any. Of a partition that it has
        read to the end no more is asked than its topic: a stream that waits looks very often.
        """
        choice = self._options.choice
        if begun is None:
            return self._facts(self.chosen(may_be_gone=choice.topics or choice.partitions or ()))

        def look(pair: tuple[TopicFacts, int]) -> PartitionFacts:
            place = begun.place(pair[0].topic_id, (pair[0].name, pair[1]))
            return _read_to_its_end(*pair, place=place) or self._partition(*pair)

        return in_parallel(look, self.chosen(may_be_gone=begun.topic_ids))

    def _facts(self, chosen: list[tuple[TopicFacts, int]]) -> list[PartitionFacts]:
        return in_parallel(lambda pair: self._partition(*pair), chosen)

    def _partition(self, topic: TopicFacts, partition: int) -> PartitionFacts:
        manifest, is_pinned = None, False
        if self._connections.has_store:
            manifest, is_pinned = self._manifest(topic, partition)
        start, cold_end = _cold_range(manifest)
        if manifest is not None and self._options.isolation == "read_committed":
            # How a transaction ended that is open there only the tail knows: the broker's to read.
            # It may have begun below the log start, which was trimmed since.
            stable = self._cold_stable_end(manifest, self._manifests(topic, partition))
            cold_end = max(start, stable)
        end = cold_end
        if self._with_broker and is_pinned:
            end = self._pinned_end(topic, partition, cold_end)
        elif self._with_broker:
            offsets = self._connections.broker.offsets(topic.name, partition)
            start = max(start, offsets.log_start_offset)
            end = max(start, self._readable_end(offsets))
            cold_end = max(start, cold_end)
        return PartitionFacts(
            topic=topic.name,
            topic_id=topic.topic_id,
            partition=partition,
            log_start_offset=start,
            end_offset=end,
            cold_end_offset=cold_end,
            manifest=manifest,
            is_pinned=is_pinned,
            gaps=self._gaps(topic, partition, manifest),
        )

    def _gaps(
        self, topic: TopicFacts, partition: int, manifest: Manifest | None
    ) -> tuple[tuple[int, int], ...]:
        """Without a store the broker knows them; limits alone need them, and a request is dear."""
        if manifest is not None:
            return tuple((gap.start_offset, gap.end_offset) for gap in manifest.gaps)
        if self._connections.has_store or self._options.trigger == NO_LIMITS:
            return ()
        with suppress(UnknownManifestVersion):
            return self._connections.broker.manifest(topic.name, partition).gaps
        return ()

    def _pinned_end(self, topic: TopicFacts, partition: int, cold_end: int) -> int:
        wanted = self._options.ending.place(topic.name, partition)
        if isinstance(wanted, AtTime) or wanted <= cold_end:
            return cold_end
        offsets = self._connections.broker.offsets(topic.name, partition)
        return max(cold_end, min(wanted, self._readable_end(offsets)))

    def _readable_end(self, offsets: Offsets) -> int:
        if self._options.isolation == "read_committed":
            return min(offsets.high_watermark, offsets.last_stable_offset)
        return offsets.high_watermark

    def _cold_stable_end(self, manifest: Manifest, manifests: ManifestStore) -> int:
        """The bucket's own last stable offset: where the oldest open transaction begins."""
        last = list(manifests.iter_entries(manifest, from_offset=_last_offset(manifest)))
        if not last:
            return manifest.end_offset
        store = self._connections.store
        begun = cold_index.first_open_transaction(store, cold_index.read_index(store, last[-1]))
        return manifest.end_offset if begun is None else min(begun, manifest.end_offset)

    def _manifest(self, topic: TopicFacts, partition: int) -> tuple[Manifest | None, bool]:
        """The manifest to read by, and whether an option fixed it."""
        manifests = self._manifests(topic, partition)
        version = self._options.manifest_versions.get(topic.name, {}).get(partition)
        if self._options.pin is not None:
            version = self._pinned_version(manifests)
        if version is not None:
            return manifests.load_version(version), True
        return manifests.load(), False

    def _pinned_version(self, manifests: ManifestStore) -> int:
        wanted = self._options.pin
        now_ms = _wall_ms()
        for pin in Pins(manifests, clock=_wall_ms).all():
            if pin.name == wanted and pin.is_active(now_ms):
                return pin.version
        keys = manifests.keys
        raise InvalidOption(f"option pin: {keys} has no pin {wanted!r}")

    def _manifests(self, topic: TopicFacts | PartitionFacts, partition: int) -> ManifestStore:
        name = topic.name if isinstance(topic, TopicFacts) else topic.topic
        keys = PartitionKeys(name, topic.topic_id, partition)
        return ManifestStore(self._connections.store, keys, StoreOptions(clock=_wall_ms))

    # --- segments ---------------------------------------------------------------------------------

    def entries(self, facts: PartitionFacts, *, start: int, end: int) -> Iterator[SegmentEntry]:
        """Segments in the bucket that may hold offsets of [start, end)."""
        if facts.manifest is None:
            return
        manifests = self._manifests(facts, facts.partition)
        for entry in manifests.iter_entries(facts.manifest, from_offset=start):
            if entry.base_offset >= end:
                return
            yield entry

    def indexes(
        self, entries: Iterable[SegmentEntry], *, missing: Callable[[MissingObject], None]
    ) -> list[cold_index.SegmentIndex]:
        """Those that there are; `missing` is told of each other one."""
        store = self._connections.store

        def read(entry: SegmentEntry) -> cold_index.SegmentIndex | MissingObject:
            try:
                return cold_index.read_index(store, entry)
            except MissingObject as error:
                return error

        found = in_parallel(read, entries)
        for one in found:
            if isinstance(one, MissingObject):
                missing(one)
        return [one for one in found if not isinstance(one, MissingObject)]

    def aborted(self, indexes: Iterable[cold_index.SegmentIndex]) -> list[AbortedTxn]:
        store = self._connections.store
        found = in_parallel(lambda one: cold_index.aborted_transactions(store, one), indexes)
        return [transaction for one in found for transaction in one]

    def first_at_time(self, facts: PartitionFacts, timestamp: int) -> int | None:
        """The first readable record at or after `timestamp`; None where all are older."""
        if self._with_broker and not facts.is_pinned:
            found = self._connections.broker.offset_for_timestamp(
                facts.topic, facts.partition, timestamp
            )
            offset = None if found is None else found.offset
        else:
            offset = cold_index.first_at_time(
                self._connections.store,
                self.entries(facts, start=facts.log_start_offset, end=facts.end_offset),
                timestamp=timestamp,
                log_start_offset=facts.log_start_offset,
            )
        return None if offset is None or offset >= facts.end_offset else offset

    def tail_sizes(
        self, facts: PartitionFacts, *, start: int, end: int
    ) -> Iterator[tuple[int, int, int]]:
        """(base offset, end offset, bytes) of what the broker has of [start, end)."""
        segments = self._connections.broker.segments(
            facts.topic, facts.partition, from_offset=start
        )
        for segment in segments:
            if segment.base_offset >= end:
                return
            yield segment.base_offset, segment.last_offset + 1, segment.size_bytes


def _cold_range(manifest: Manifest | None) -> tuple[int, int]:
    return (manifest.log_start_offset, manifest.end_offset) if manifest else (0, 0)


def _last_offset(manifest: Manifest) -> int:
    """The last segment's; past the end where there is none."""
    if manifest.segments:
        return manifest.segments[-1].last_offset
    return manifest.pages[-1].last_offset if manifest.pages else manifest.end_offset


def _read_to_its_end(
    topic: TopicFacts, partition: int, *, place: int | None
) -> PartitionFacts | None:
    """A partition that has nothing from `place` on, as its broker alone knows it.

    Nothing is open there either: of two isolation levels both end at the high watermark.
    """
    told = topic.described.get(partition)
    end = 0 if told is None else max(told.log_start_offset, told.high_watermark)
    if told is None or place is None or place < end:
        return None
    return PartitionFacts(
        topic=topic.name,
        topic_id=topic.topic_id,
        partition=partition,
        log_start_offset=told.log_start_offset,
        end_offset=end,
        cold_end_offset=end,
        manifest=None,
    )


def _facts_of(topic: TopicObject) -> TopicFacts:
    return TopicFacts(topic.name, topic.topic_id, tuple(range(topic.partitions)))


def _check_partitions(option: str, topic: TopicFacts, numbers: Iterable[int]) -> None:
    for number in numbers:
        if number not in topic.partitions:
            raise InvalidOption(
                f"option {option}: there is no {topic.name}-{number}; "
                f"the topic has {len(topic.partitions)} partitions"
            )


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def in_parallel(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`work` of each item, in their order; `PARALLEL` of them wait for the network together."""
    listed = list(items)
    if len(listed) < 2:
        return list(map(work, listed))
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="tierlog-plan") as pool:
        return list(pool.map(work, listed))
