"""Queries the broker and the bucket for what can be read: partitions, their offsets and segments.

* A log's start and end come from the same topic description as the topic's id, so they are
  consistent and of one topic. The manifest is loaded after it. Its offsets past that end are not
  read, and segments that left the local disk meanwhile are still served by the broker: so there is
  no gap between the tiers.
* A pinned partition is read by its manifest version alone, not by the broker's offsets, so that the
  same read returns the same rows. The broker serves offsets past that version only if an ending
  offset is given as a number, which is just as fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from tierlog.client.responses import PartitionDescription
from tierlog.cold_tier.aborted_transactions import aborted_transactions
from tierlog.host.clock import wall_clock_ms
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.pins import Pins
from tierlog.manifest.state import Manifest
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.record_format.errors import (
    Forbidden,
    InvalidOption,
    MissingObject,
    UnknownManifestVersion,
    UnknownTopicOrPartition,
)
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.key_filter import hash_key
from tierlog.record_format.record_walk import RowFilter
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.spark_reader import cold_index
from tierlog.spark_reader.access import Connections, map_ahead, parallel_map
from tierlog.spark_reader.option_values import AtTime
from tierlog.spark_reader.options import NO_LIMITS, ReadOptions
from tierlog.spark_reader.splits import ChunkPiece, Gaps, PartitionFacts
from tierlog.spark_reader.stream_offsets import StreamOffsets
from tierlog.spark_reader.topics import TopicFacts, Topics

Missing = Callable[[MissingObject], None]


class _BrokerOffsets(NamedTuple):
    log_start_offset: int
    end_offset: int
    tail_bytes: int | None = None


class Catalog:
    """Looks up the state of the log; caches nothing between queries."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._connections = Connections(options.access)
        self._topics = Topics(options, self._connections)
        self._with_broker = options.tier == "all"
        self._is_committed = options.isolation == "read_committed"

    def topics(self) -> list[TopicFacts]:
        """Every chosen topic."""
        return list({topic.name: topic for topic, _ in self._topics.chosen()}.values())

    # --- partitions -------------------------------------------------------------------------------

    def partitions(self) -> list[PartitionFacts]:
        """Every chosen partition. Raises InvalidOption if options name others."""
        chosen = self._topics.chosen()
        self._topics.check_named(chosen)
        return parallel_map(lambda pair: self._partition(*pair), chosen)

    def partitions_of_stream(self, begun: StreamOffsets | None) -> list[PartitionFacts]:
        """The same for a running stream, for which the starting options no longer matter.

        Topics that it has read may be gone; if `begun` is None, any may be. A partition of which it
        has read what is in the bucket needs only the topic description, and under `read_committed`
        its last stable offset: a stream polls very often.
        """

        def look(pair: tuple[TopicFacts, int]) -> PartitionFacts:
            topic, partition = pair
            described, next_offset = _described(topic, partition), None
            if begun is not None:
                next_offset = begun.next_offset(topic.topic_id, (topic.name, partition))
            if described is None or next_offset is None or next_offset < described.cold_end_offset:
                return self._partition(topic, partition)
            if self._is_committed and next_offset < described.end_offset:
                stable = self._connections.broker.offsets(topic.name, partition).last_stable_offset
                return replace(described, end_offset=min(described.end_offset, stable))
            return described  # no gap follows

        may_be_gone = self._options.choice.named if begun is None else begun.topic_ids
        return parallel_map(look, self._topics.chosen(may_be_gone=may_be_gone))

    def described_partitions_of_stream(self, begun: StreamOffsets) -> list[PartitionFacts] | None:
        """The same by the topic descriptions alone, which do not tell gaps and open transactions;
        None if they do not tell all else.
        """
        chosen = self._topics.chosen(may_be_gone=begun.topic_ids)
        found = [facts for pair in chosen if (facts := _described(*pair)) is not None]
        return found if len(found) == len(chosen) else None

    def _partition(self, topic: TopicFacts, partition: int) -> PartitionFacts:
        manifest, is_pinned = None, False
        if self._connections.has_store:
            manifests = self._manifests(topic.name, topic.topic_id, partition)
            manifest, is_pinned = self._manifest(manifests)
            if manifest is None and self._with_broker:
                self._check_store(topic, partition)
            elif manifest is None:
                manifests.check_never_existed()  # or it would read as empty
        start, cold_end = 0, 0
        if manifest is not None:
            start, cold_end = manifest.log_start_offset, manifest.end_offset
        if manifest is not None and self._is_committed:
            # Only the tail, which the broker serves, tells how a transaction ended that is open at
            # the manifest's end. It may have begun below the log start, which was trimmed since.
            cold_end = max(start, self._cold_stable_end(manifest, manifests))
        end, tail_bytes = cold_end, None
        if self._with_broker and is_pinned:
            end = self._pinned_end(topic, partition, cold_end)
        elif self._with_broker:
            now = self._broker_offsets(topic, partition, cold_end=cold_end)
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
    ) -> Gaps:
        """The gaps that restores left. Without a store they take a request, which is made here only
        if trigger limits need them.
        """
        if manifest is not None:
            return tuple((gap.start_offset, gap.end_offset) for gap in manifest.gaps)
        if self._connections.has_store or self._options.trigger == NO_LIMITS:
            return ()
        return self._gaps_of_broker(topic.name, partition, end=end)

    def with_gaps(self, facts: PartitionFacts) -> PartitionFacts:
        """The same facts, with the gaps if they were not looked up."""
        if facts.gaps or self._connections.has_store:
            return facts
        gaps = self._gaps_of_broker(facts.topic, facts.partition, end=facts.end_offset)
        return replace(facts, gaps=gaps)

    def _gaps_of_broker(self, topic: str, partition: int, *, end: int) -> Gaps:
        """Requests no segments: their list may be long, and partly in the bucket. None of a topic
        that is gone, which the task that reads it will report.
        """
        with suppress(UnknownManifestVersion, UnknownTopicOrPartition):
            return self._connections.broker.manifest(topic, partition, from_offset=end).gaps
        return ()

    def _pinned_end(self, topic: TopicFacts, partition: int, cold_end: int) -> int:
        wanted = self._options.ending.spec_for(topic.name, partition)
        if isinstance(wanted, AtTime) or wanted <= cold_end:
            return cold_end
        now = self._broker_offsets(topic, partition, cold_end=cold_end)
        return max(cold_end, min(wanted, now.end_offset))

    def _broker_offsets(
        self, topic: TopicFacts, partition: int, *, cold_end: int
    ) -> _BrokerOffsets:
        """From the topic description if possible. It has no last stable offset; and if it lacks the
        partition, the request raises the reason.
        """
        described = topic.described.get(partition)
        if described is not None and not self._is_committed:
            tail_bytes = _tail_bytes(described, cold_end=cold_end)
            return _BrokerOffsets(described.log_start_offset, described.high_watermark, tail_bytes)
        offsets = self._connections.broker.offsets(topic.name, partition)
        end = offsets.high_watermark
        if self._is_committed:
            end = min(end, offsets.last_stable_offset)
        return _BrokerOffsets(offsets.log_start_offset, end)

    def _cold_stable_end(self, manifest: Manifest, manifests: ManifestStore) -> int:
        """The bucket's own last stable offset: the first offset of the oldest open transaction."""
        last = list(manifests.iter_entries(manifest, from_offset=_last_offset(manifest)))
        if not last:
            return manifest.end_offset
        open_since = cold_index.first_open_transaction(self._connections.indexes, last[-1])
        return manifest.end_offset if open_since is None else min(open_since, manifest.end_offset)

    def _manifest(self, manifests: ManifestStore) -> tuple[Manifest | None, bool]:
        """The manifest to read, and whether an option pins its version."""
        topic, _, partition = manifests.keys
        version = self._options.manifest_versions.get(topic, {}).get(partition)
        if self._options.pin is not None:
            version = self._pinned_version(manifests)
        if version is not None:
            return manifests.load_version(version), True
        return manifests.load_manifest(), False

    def _check_store(self, topic: TopicFacts, partition: int) -> None:
        """Raise InvalidOption if the store has no manifest of a partition that the broker has
        offloaded: all of it would be read through the broker unnoticed. Not if the topic was
        deleted since it was described.
        """
        described = topic.described.get(partition)
        if described is None or not described.cold_bytes:
            return
        broker = self._connections.broker
        with suppress(UnknownTopicOrPartition):
            if broker.describe_topic(topic.name).topic_id == topic.topic_id:
                url = "another"
                with suppress(Forbidden):  # a token for some topics only
                    url = str(broker.storage_report().get("store"))
                raise InvalidOption(
                    f"option store: {self._connections.store.url} has no manifest of "
                    f"{topic.name}-{partition}; the broker's store is {url}, which holds "
                    f"{described.cold_bytes} bytes of it"
                )

    def _pinned_version(self, manifests: ManifestStore) -> int:
        wanted = self._options.pin
        now_ms = wall_clock_ms()
        for pin in Pins(manifests, clock=wall_clock_ms).all_pins():
            if pin.name == wanted and pin.is_active(now_ms):
                return pin.version
        keys = manifests.keys
        raise InvalidOption(f"option pin: {keys} has no pin {wanted!r}")

    def _manifests(self, topic: str, topic_id: str, partition: int) -> ManifestStore:
        keys, store = PartitionKeys(topic, topic_id, partition), self._connections.store
        options = StoreOptions(clock=wall_clock_ms)
        return ManifestStore(store, keys, options, cache=self._connections.pages)

    # --- segments ---------------------------------------------------------------------------------

    def cold_entries(
        self, facts: PartitionFacts, *, start: int, end: int
    ) -> Iterator[SegmentEntry]:
        """The segments in the bucket that may hold offsets in [start, end)."""
        if facts.manifest is None:
            return
        manifests = self._manifests(facts.topic, facts.topic_id, facts.partition)
        for entry in manifests.iter_entries(facts.manifest, from_offset=start):
            if entry.base_offset >= end:
                return
            yield entry

    def needs_no_request(self, facts: PartitionFacts, row_filter: RowFilter) -> bool:
        """Whether a read of it is planned from what is in memory."""
        manifest = facts.manifest
        if manifest is None or manifest.pages or facts.end_offset > facts.cold_end_offset:
            return False
        return all(self._has_index(one, row_filter) for one in manifest.segments)

    def _has_index(self, entry: SegmentEntry, row_filter: RowFilter) -> bool:
        indexes = self._connections.indexes
        return indexes.has_index(entry) and (
            indexes.has_spans(entry) or not cold_index.is_cut(entry, row_filter)
        )

    def count_rows(self, entry: SegmentEntry, row_filter: RowFilter) -> int | None:
        """How many rows a segment has, if the filter wants them all and what is in memory tells."""
        return cold_index.count_rows(self._connections.indexes, entry, row_filter)

    def chunks(
        self,
        entries: Iterable[SegmentEntry],
        row_filter: RowFilter,
        *,
        keys: Collection[bytes] | None = None,
        missing: Missing,
    ) -> list[ChunkPiece]:
        """What of these segments may have matching rows, and one of the keys. `missing` is called
        for a segment without an index.
        """
        hashes = None if keys is None else list(map(hash_key, keys))
        indexes = self._connections.indexes

        def load(entry: SegmentEntry) -> list[ChunkPiece] | MissingObject:
            try:
                return list(cold_index.chunk_pieces(indexes, entry, row_filter, hashes))
            except MissingObject as error:
                return error

        wanted = list(entries)
        # What is in memory needs no thread.
        absent = [
            one for one in wanted if hashes is not None or not self._has_index(one, row_filter)
        ]
        loaded = dict(zip(absent, parallel_map(load, absent), strict=True))
        found: list[ChunkPiece] = []
        for entry in wanted:
            result = loaded[entry] if entry in loaded else load(entry)
            if isinstance(result, MissingObject):
                missing(result)
            else:
                found += result
        return found

    def aborted(
        self, facts: PartitionFacts, *, start_offset: int, end_offset: int
    ) -> list[AbortedTxn]:
        """Aborted transactions with records in [start_offset, end_offset). Raises MissingObject.

        A transaction's marker may be in a later segment than its records, even past
        `cold_end_offset`, which is where another transaction begins that is still open.
        """
        assert facts.manifest is not None, "without a manifest nothing is cold"
        read, cold_end = self._connections.indexes.transactions, facts.manifest.end_offset
        in_range = list(self.cold_entries(facts, start=start_offset, end=end_offset))
        later = self.cold_entries(facts, start=in_range[-1].next_offset, end=cold_end)
        with closing(map_ahead(read, in_range)) as first:
            return aborted_transactions(
                chain(first, map(read, later)), start_offset=start_offset, end_offset=end_offset
            )

    def first_at_time(
        self, facts: PartitionFacts, timestamp: int, *, missing: Missing
    ) -> int | None:
        """Offset of the first readable record at or after `timestamp`; None if all are older.
        `missing` is called for a segment of the bucket that has lost an object.
        """
        offset = None
        if facts.is_pinned or not self._with_broker:
            offset = cold_index.first_offset(
                self._connections.store,
                self._connections.indexes,
                self.cold_entries(facts, start=facts.log_start_offset, end=facts.end_offset),
                RowFilter(start_offset=facts.log_start_offset, start_timestamp=timestamp),
                missing=missing,
            )
        reads_tail = facts.end_offset > facts.cold_end_offset
        if offset is None and self._with_broker and (reads_tail or not facts.is_pinned):
            found = self._connections.broker.offset_for_timestamp(
                facts.topic, facts.partition, timestamp
            )
            offset = None if found is None else found.offset
        return None if offset is None or offset >= facts.end_offset else offset

    def tail_sizes(
        self, facts: PartitionFacts, *, start: int, end: int
    ) -> Iterator[tuple[int, int, int]]:
        """(base offset, end offset, bytes) of the broker's segments in [start, end).

        Empty for a topic that is gone, which the task that reads it will report.
        """
        segments = self._connections.broker.segments(
            facts.topic, facts.partition, from_offset=start
        )
        with suppress(UnknownTopicOrPartition):
            for segment in segments:
                if segment.base_offset >= end:
                    return
                yield segment.base_offset, segment.last_offset + 1, segment.size_bytes


def _last_offset(manifest: Manifest) -> int:
    """The last segment's last offset; the end offset if there are no segments."""
    if manifest.segments:
        return manifest.segments[-1].last_offset
    return manifest.pages[-1].last_offset if manifest.pages else manifest.end_offset


def _described(topic: TopicFacts, partition: int) -> PartitionFacts | None:
    """A partition by the topic's description alone, without a manifest; None if that lacks it."""
    described = topic.described.get(partition)
    if described is None:
        return None
    start = described.log_start_offset
    cold_end = max(start, described.cold_end_offset)
    return PartitionFacts(
        topic=topic.name,
        topic_id=topic.topic_id,
        partition=partition,
        log_start_offset=start,
        end_offset=max(start, described.high_watermark),
        cold_end_offset=cold_end,
        manifest=None,
        tail_bytes=_tail_bytes(described, cold_end=cold_end),
    )


def _tail_bytes(described: PartitionDescription, *, cold_end: int) -> int:
    """The bytes from `cold_end` on: all of them, or those that the bucket lacks."""
    if cold_end <= described.log_start_offset:
        return described.hot_bytes + described.cold_bytes
    return described.offload_lag_bytes
