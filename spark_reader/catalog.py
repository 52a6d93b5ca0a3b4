"""What there is to read, asked of the broker and the bucket: partitions, their ends and segments.

Rules that keep it honest:

* Where a log begins and ends comes from the same description as its topic's id: from one look, and
  about one topic. The manifest is newer. What it has beyond that end is not read; what has left the
  disk meanwhile is still served by the broker. So there is no gap between hot and cold.
* For a pinned partition only its manifest version counts, not the broker's end or log start: the
  same read twice gives the same rows. The broker is asked for what is beyond that version only if
  an ending offset is given as a number, which is just as fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from cold_tier.open_transactions import aborted_transactions
from manifest.keys import PartitionKeys
from manifest.pins import Pins
from manifest.state import Manifest, SegmentEntry
from manifest.store import ManifestStore, StoreOptions
from record_format.clock import wall_clock_ms
from record_format.errors import (
    MissingObject,
    UnknownManifestVersion,
    UnknownTopicOrPartition,
)
from record_format.index_layouts import AbortedTxn
from spark_reader import cold_index
from spark_reader.access import Connections
from spark_reader.bounds import AtTime
from spark_reader.option_values import InvalidOption
from spark_reader.options import NO_LIMITS, ReadOptions
from spark_reader.plan import ChunkPiece
from spark_reader.side_by_side import ahead, in_parallel
from spark_reader.stream_offsets import StreamOffsets
from spark_reader.topics import TopicFacts, Topics


@dataclass(frozen=True, kw_only=True)
class PartitionFacts:
    """A partition as this read finds it: readable are [log_start_offset, end_offset).

    What is below `cold_end_offset` is in the bucket, the rest comes from the broker: `tail_bytes`,
    if that is known without asking for its segments.
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
    tail_bytes: int | None = None


class _AtBroker(NamedTuple):
    log_start_offset: int
    end_offset: int
    tail_bytes: int | None = None


class Catalog:
    """One look at the state; nothing is kept from one query to the next."""

    def __init__(self, options: ReadOptions, *, patient: bool = False) -> None:
        self._options = options
        self._connections = Connections(options.access, patient)
        self._topics = Topics(options, self._connections)
        self._with_broker = options.tier == "all"

    # --- partitions -------------------------------------------------------------------------------

    def partitions(self) -> list[PartitionFacts]:
        """The facts of every chosen partition. Raises InvalidOption where options name others."""
        chosen = self._topics.chosen()
        self._topics.check_named(chosen)
        return self._facts(chosen)

    def partitions_of_stream(self, begun: StreamOffsets | None) -> list[PartitionFacts]:
        """The same once a stream is running: where it began, and on what, no longer matters.

        A topic that it has read may be gone; where `begun` is None, any. For a partition that it
        has read to the end, only the topic is asked about: a waiting stream looks very often.
        """
        choice = self._options.choice
        if begun is None:
            may_be_gone = choice.topics or choice.partitions or ()
            return self._facts(self._topics.chosen(may_be_gone=may_be_gone))

        def look(pair: tuple[TopicFacts, int]) -> PartitionFacts:
            place = begun.place(pair[0].topic_id, (pair[0].name, pair[1]))
            return _read_to_its_end(*pair, place=place) or self._partition(*pair)

        return in_parallel(look, self._topics.chosen(may_be_gone=begun.topic_ids))

    def _facts(self, chosen: list[tuple[TopicFacts, int]]) -> list[PartitionFacts]:
        return in_parallel(lambda pair: self._partition(*pair), chosen)

    def _partition(self, topic: TopicFacts, partition: int) -> PartitionFacts:
        manifest, is_pinned = None, False
        if self._connections.has_store:
            manifest, is_pinned = self._manifest(topic, partition)
            if manifest is None:
                self._check_store(topic, partition)
        start, cold_end = _cold_range(manifest)
        if manifest is not None and self._options.isolation == "read_committed":
            # How a transaction ended that is open there only the tail knows: the broker's to read.
            # It may have begun below the log start, which was trimmed since.
            stable = self._cold_stable_end(manifest, self._manifests(topic, partition))
            cold_end = max(start, stable)
        end, tail_bytes = cold_end, None
        if self._with_broker and is_pinned:
            end = self._pinned_end(topic, partition, cold_end)
        elif self._with_broker:
            now = self._at_broker(topic, partition, cold_end=cold_end)
            start = max(start, now.log_start_offset)
            end, tail_bytes = max(start, now.end_offset), now.tail_bytes
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
            gaps=self._gaps(topic, partition, manifest, end=end),
            tail_bytes=tail_bytes,
        )

    def _gaps(
        self, topic: TopicFacts, partition: int, manifest: Manifest | None, *, end: int
    ) -> tuple[tuple[int, int], ...]:
        """Without a store the broker knows them; limits alone need them, and a request is dear. It
        is for no segments: their list may be long, and in part in the bucket.
        """
        if manifest is not None:
            return tuple((gap.start_offset, gap.end_offset) for gap in manifest.gaps)
        if self._connections.has_store or self._options.trigger == NO_LIMITS:
            return ()
        with suppress(UnknownManifestVersion):
            return self._connections.broker.manifest(topic.name, partition, from_offset=end).gaps
        return ()

    def _pinned_end(self, topic: TopicFacts, partition: int, cold_end: int) -> int:
        wanted = self._options.ending.place(topic.name, partition)
        if isinstance(wanted, AtTime) or wanted <= cold_end:
            return cold_end
        now = self._at_broker(topic, partition, cold_end=cold_end)
        return max(cold_end, min(wanted, now.end_offset))

    def _at_broker(self, topic: TopicFacts, partition: int, *, cold_end: int) -> _AtBroker:
        """A description has no last stable offset; of a partition that it lacks the broker says
        why.
        """
        told = topic.described.get(partition)
        if told is not None and self._options.isolation == "read_uncommitted":
            tail_bytes = told.offload_lag_bytes
            if cold_end <= told.log_start_offset:
                tail_bytes = told.hot_bytes + told.cold_bytes
            return _AtBroker(told.log_start_offset, told.high_watermark, tail_bytes)
        offsets = self._connections.broker.offsets(topic.name, partition)
        end = offsets.high_watermark
        if self._options.isolation == "read_committed":
            end = min(end, offsets.last_stable_offset)
        return _AtBroker(offsets.log_start_offset, end)

    def _cold_stable_end(self, manifest: Manifest, manifests: ManifestStore) -> int:
        """The bucket's own last stable offset: where the oldest open transaction begins."""
        last = list(manifests.iter_entries(manifest, from_offset=_last_offset(manifest)))
        if not last:
            return manifest.end_offset
        begun = cold_index.first_open_transaction(self._connections.indexes, last[-1])
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

    def _check_store(self, topic: TopicFacts, partition: int) -> None:
        """Refuse a store without a manifest of what the broker has in its own: all of that would
        come through the broker unnoticed. Not where the topic was deleted since it was described.
        """
        told = topic.described.get(partition)
        if told is None or not told.cold_bytes:
            return
        broker = self._connections.broker
        with suppress(UnknownTopicOrPartition):
            if broker.describe_topic(topic.name).topic_id == topic.topic_id:
                raise InvalidOption(
                    f"option store: {self._connections.store.url} has no manifest of "
                    f"{topic.name}-{partition}; the broker's store is "
                    f"{broker.storage_report().get('store')}, with {told.cold_bytes} bytes of it"
                )

    def _pinned_version(self, manifests: ManifestStore) -> int:
        wanted = self._options.pin
        now_ms = wall_clock_ms()
        for pin in Pins(manifests, clock=wall_clock_ms).all():
            if pin.name == wanted and pin.is_active(now_ms):
                return pin.version
        keys = manifests.keys
        raise InvalidOption(f"option pin: {keys} has no pin {wanted!r}")

    def _manifests(self, topic: TopicFacts | PartitionFacts, partition: int) -> ManifestStore:
        name = topic.name if isinstance(topic, TopicFacts) else topic.topic
        keys = PartitionKeys(name, topic.topic_id, partition)
        return ManifestStore(self._connections.store, keys, StoreOptions(clock=wall_clock_ms))

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

    def chunks(
        self, entries: Iterable[SegmentEntry], *, missing: Callable[[MissingObject], None]
    ) -> list[ChunkPiece]:
        """Those of the segments whose index is there; `missing` is called for each of the
        others.
        """

        def read(entry: SegmentEntry) -> list[ChunkPiece] | MissingObject:
            try:
                return list(cold_index.pieces(self._connections.indexes, entry))
            except MissingObject as error:
                return error

        found: list[ChunkPiece] = []
        for one in ahead(read, entries):
            if isinstance(one, MissingObject):
                missing(one)
            else:
                found += one
        return found

    def aborted(
        self, facts: PartitionFacts, *, start_offset: int, end_offset: int
    ) -> list[AbortedTxn]:
        """The transactions with records in [start_offset, end_offset). Raises MissingObject.

        The marker of one may lie in a later segment than its records, also behind
        `cold_end_offset`: that is where another one begins which is open still.
        """
        assert facts.manifest is not None, "without one nothing is cold"
        read, cold_end = self._connections.indexes.transactions, facts.manifest.end_offset
        within = list(self.entries(facts, start=start_offset, end=end_offset))
        behind = self.entries(facts, start=within[-1].next_offset, end=cold_end)
        with closing(ahead(read, within)) as first:
            return aborted_transactions(
                chain(first, map(read, behind)), start_offset=start_offset, end_offset=end_offset
            )

    def first_at_time(self, facts: PartitionFacts, timestamp: int) -> int | None:
        """The first readable record at or after `timestamp`; None if all are older."""
        if self._with_broker and not facts.is_pinned:
            found = self._connections.broker.offset_for_timestamp(
                facts.topic, facts.partition, timestamp
            )
            offset = None if found is None else found.offset
        else:
            offset = cold_index.offset_for_timestamp(
                self._connections.store,
                self._connections.indexes,
                self.entries(facts, start=facts.log_start_offset, end=facts.end_offset),
                timestamp=timestamp,
                log_start_offset=facts.log_start_offset,
            )
        return None if offset is None or offset >= facts.end_offset else offset

    def tail_sizes(
        self, facts: PartitionFacts, *, start: int, end: int
    ) -> Iterator[tuple[int, int, int]]:
        """(base offset, end offset, bytes) of what the broker has of [start, end).

        Of a topic that is gone nothing: whoever reads it finds that it is.
        """
        segments = self._connections.broker.segments(
            facts.topic, facts.partition, from_offset=start
        )
        with suppress(UnknownTopicOrPartition):
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
