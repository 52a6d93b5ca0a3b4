"""Reads partitions that other brokers lead, as far as they are in the bucket: with the reads that
their leaders have, through this broker's own chunk cache.

* What a manifest names is part of the log for good; a manifest that is out of date only names less.
  It is read when somebody asks for what it may name, never otherwise: at rest nothing is requested.
* Whoever can ask the leader does (`told`): then log start and high watermark are exact. Otherwise
  the log starts where the bucket says, by a manifest that is `MANIFEST_MAX_AGE_S` old at most, and
  ends at an unknown offset (`is_end_known`).
* Whatever cannot be answered from the bucket is refused as any call on the partition (NotLeader,
  LeaderUnknown): it goes on to the leader. So does a read that fails while there is one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.bucket.cold_reads import ColdReads
from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.membership.leaders import Leaders
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.tiered_reads import (
    EmptyHotTier,
    Fetched,
    ReportingDefunct,
    TieredReads,
)
from tierlog.host.file_slice import FileSlice
from tierlog.host.waiting import Wait
from tierlog.hot_tier.log_state import Offsets
from tierlog.manifest.state import Manifest
from tierlog.record_format.errors import (
    CorruptDataError,
    RetriableError,
    TierlogError,
)
from tierlog.record_format.segment_entry import SegmentEntry

MANIFEST_MAX_AGE_S: Final = 10.0  # of one that is read by
ENTRIES_MAX: Final = 20_000  # in memory, of all manifests: some 20 MB
MAX_OFFSET: Final = 2**63 - 1


class Told(NamedTuple):
    """What a partition's leader says of it."""

    log_start_offset: int
    high_watermark: int


class _Kept(NamedTuple):
    """`reads`: None if the partition has no manifest."""

    reads: ColdReads | None
    loaded_s: float

    @property
    def manifest(self) -> Manifest | None:
        return self.reads.manifest if self.reads is not None else None

    @property
    def end_offset(self) -> int:
        return self.manifest.end_offset if self.manifest is not None else 0

    @property
    def version(self) -> int:
        return self.manifest.version if self.manifest is not None else 0

    @property
    def entries(self) -> int:
        """What it takes of `ENTRIES_MAX`."""
        manifest = self.manifest
        return 1 if manifest is None else 1 + len(manifest.segments) + len(manifest.pages)


class ColdPartitions:
    """Thread-safe."""

    def __init__(
        self, bucket: Bucket, leaders: Leaders, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket, self._leaders, self._clock = bucket, leaders, clock
        self._kept: OrderedDict[TopicIdPartition, _Kept] = OrderedDict()
        self._entries = 0
        self._changed = threading.Condition()
        self._loading: set[TopicIdPartition] = set()

    def may_have(self, record: TopicRecord, number: int, offset: int) -> bool:
        """Whether this offset may be in the bucket, by what the leader said last: one that is gone
        may have uploaded all that it had since. No request.
        """
        leader = self._leaders.find_leader((record.topic_id, number))
        if leader is not None:
            return offset < leader.cold_end_offset
        return offset < (self.heard_end(record, number) or MAX_OFFSET)

    def heard_end(self, record: TopicRecord, number: int) -> int:
        """Where the log ended when its leader was last heard; 0 if nobody was."""
        place = record.topic_id, number
        leader = self._leaders.find_leader(place) or self._leaders.find_gone_leader(place)
        return leader.log_end_offset if leader is not None else 0

    def find_reads(
        self, record: TopicRecord, number: int, offset: int, wait: Wait = Wait.WAIT
    ) -> ColdReads | None:
        """The reads of the partition, by a manifest that is not out of date for this offset; None
        if it does not name it. Raises StoreUnavailable, CorruptDataError, ManifestConflict,
        WouldBlock.
        """
        place = record.topic_id, number
        kept = self._find_kept(place, offset)
        if kept is None:
            wait.before("a manifest is read")
            with self._one_load(place):
                kept = self._find_kept(place, offset) or self._load(record, number)
        return kept.reads if offset < kept.end_offset else None

    def _find_kept(self, place: TopicIdPartition, offset: int) -> _Kept | None:
        """None also if it is out of date."""
        with self._changed:
            kept = self._kept.get(place)
            if kept is None or self._clock() - kept.loaded_s > MANIFEST_MAX_AGE_S:
                return None
            self._kept.move_to_end(place)
        leader = self._leaders.find_leader(place)
        is_behind = leader is not None and kept.end_offset <= offset < leader.cold_end_offset
        return None if is_behind else kept

    def _load(self, record: TopicRecord, number: int) -> _Kept:
        place, now_s = (record.topic_id, number), self._clock()
        before = self._kept.get(place)
        at_least = before.version if before is not None else 0
        reads = self._bucket.load_cold_reads(record, number, at_least=at_least)
        kept = _Kept(reads, now_s)
        self._keep(place, kept)
        return kept

    @contextmanager
    def _one_load(self, place: TopicIdPartition) -> Iterator[None]:
        """One at a time for a partition: whoever comes second finds what the first has read."""
        with self._changed:
            self._changed.wait_for(lambda: place not in self._loading)
            self._loading.add(place)
        try:
            yield
        finally:
            with self._changed:
                self._loading.discard(place)
                self._changed.notify_all()

    def _keep(self, place: TopicIdPartition, kept: _Kept) -> None:
        with self._changed:
            before = self._kept.pop(place, None)
            self._entries += kept.entries - (before.entries if before is not None else 0)
            self._kept[place] = kept
            while self._entries > ENTRIES_MAX and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._entries -= dropped.entries


class ColdPartition:
    """What is in the bucket of a partition that another broker leads, for one request: a
    `Readable`. `told`: by the leader, which does not answer if it is None; `heard_end` is where the
    log ended before. `refuse` makes the error for what only its leader can answer. Thread-safe;
    blocks as `Partition` does.
    """

    is_defunct: Final = False

    def __init__(
        self,
        record: TopicRecord,
        number: int,
        reads: ColdReads,
        *,
        told: Told | None,
        heard_end: int,
        refuse: Callable[[], TierlogError],
    ) -> None:
        assert reads.manifest is not None, "the partition has one"
        self.topic, self.topic_id, self.number = record.name, record.topic_id, number
        self._cold, self._refuse, manifest = reads, refuse, reads.manifest
        self.is_end_known = told is not None
        self._cold_end, self._epoch = manifest.end_offset, manifest.leader_epoch
        starts = manifest.log_start_offset, told.log_start_offset if told is not None else 0
        ends = manifest.end_offset, told.high_watermark if told is not None else heard_end
        self.log_start_offset, self.high_watermark = max(starts), max(ends)

    def __str__(self) -> str:
        return f"{self.topic}-{self.number}"

    def confirm_end(self, wait: Wait) -> None:
        """What is above the end that is known is refused before it is read."""

    def check_leadership(self) -> None:
        pass

    def check_exists(self) -> None:
        pass

    def reporting_defunct(self) -> ReportingDefunct:
        return ReportingDefunct(self)

    def offsets(self) -> Offsets:
        return self._offsets(stable_end=self._cold_end, high_watermark=self.high_watermark)

    def _offsets(self, *, stable_end: int, high_watermark: int) -> Offsets:
        return Offsets(
            log_start_offset=self.log_start_offset,
            local_log_start_offset=self._cold_end,
            last_stable_offset=stable_end,
            high_watermark=high_watermark,
            log_end_offset=high_watermark,
            leader_epoch=self._epoch,
        )

    def _reads_below(self, stable_end: int) -> TieredReads:
        offsets = self._offsets(stable_end=stable_end, high_watermark=self._cold_end)
        return TieredReads(EmptyHotTier(offsets), self._cold, served=self)

    # --- records ----------------------------------------------------------------------------------

    def read(
        self, offset: int, *, max_bytes: int, committed: bool = False, wait: Wait = Wait.WAIT
    ) -> Fetched:
        """As `TieredReads.read`; refused unless the offset is in the bucket."""
        if offset < self.log_start_offset:
            start = self.log_start_offset
            raise self.offsets().trimmed(f"offset {offset} is below the log start {start}")
        with self._or_refused():
            end = self._cold.stable_end(wait) if committed else self._cold_end
            if end is None or offset >= end:
                raise self._refuse()
            found = self._reads_below(end).read(
                offset, max_bytes=max_bytes, committed=committed, wait=wait
            )
        if not found.slices:
            raise self._refuse()
        end_offset = self.high_watermark if self.is_end_known else MAX_OFFSET
        return found._replace(end_offset=end_offset, high_watermark=self.high_watermark)

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int]:
        """As `TieredReads.offset_for_timestamp`; refused if no record in the bucket is as late."""
        with self._or_refused():
            found = self._reads_below(self._cold_end).offset_for_timestamp(timestamp)
        if found is None:
            raise self._refuse()
        return found

    def led_here(self) -> Partition:
        """Only its leader knows when more comes."""
        raise self._refuse()

    # --- segments ---------------------------------------------------------------------------------

    def open_local_segment(self, _base_offset: int, _wait: Wait) -> None:
        return None

    def find_cold_entry(self, offset: int, wait: Wait) -> SegmentEntry:
        """The segment that begins at `offset`; refused if the bucket has none."""
        with self._or_refused():
            found = self._cold.find_entry(offset, wait)
        if found is None or found.base_offset != offset:
            raise self._refuse()
        return found

    def cold_bytes(
        self, entry: SegmentEntry, *, start: int, end: int, wait: Wait
    ) -> Iterator[FileSlice]:
        """Bytes [start, end) of a segment's log; each chunk is fetched when it is requested."""
        slices = self._cold.byte_range(entry, start=start, end=end, wait=wait)
        while True:
            with self._or_refused():
                piece = next(slices, None)
            if piece is None:
                return
            yield piece

    @contextmanager
    def _or_refused(self) -> Iterator[None]:
        """The leader may have on its disk what the bucket does not give."""
        try:
            yield
        except (RetriableError, CorruptDataError) as error:
            if self.is_end_known:
                raise self._refuse() from error
            raise
