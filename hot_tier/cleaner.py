"""One round of compaction, which keeps the last record of each key (Kafka's Cleaner).

* `find_cleanable`: clean is everything below the checkpoint, where the last round ended. Dirty is
  everything from there to the first offset that must not be cleaned yet: the active segment, open
  transactions, records above the high watermark, and records younger than
  `min.compaction.lag.ms`. The dirty part ends at a segment boundary; a round reads all of it.
* First the keys of the dirty part are put into a table; if it fills up, the round ends there and
  the next one continues. Then every segment up to there is rewritten, in groups, without superseded
  records; each new segment replaces its group at once.
* Records keep their offsets. Repeating a round after a crash or a stop does no harm: the checkpoint
  advances only when all groups were replaced.
* If nothing of a segment would remain, the header of its last batch does, so no segment is empty. A
  single segment in which nothing changes is left alone.
* The header of each producer's last batch below the high watermark stays: what is above may be
  lost, and a batch that is repeated has to be known then.
* Records of aborted transactions go. A marker stays until nothing is left of its transaction; an
  aborted transaction of which something is left goes into the new transaction index.
* Every batch is verified before it is used: its checksum, and its base offset, which decides which
  record of a key is the last. A corrupt batch ends the round with its file and position.
* Reads and appends continue; only the swap holds the log's lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import NamedTuple

from tierlog.hot_tier.batch_walk import CheckedBatch, check_in_order, checked_batches
from tierlog.hot_tier.log_folder import LOG, OFFSET_INDEX, TIME_INDEX
from tierlog.hot_tier.log_reader import aborted_transactions, largest_timestamp, with_index_rebuild
from tierlog.hot_tier.log_state import LogState, read_consistently
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.producer_state import Producer
from tierlog.hot_tier.reaper import Reaper
from tierlog.hot_tier.roll import disk_error
from tierlog.hot_tier.segment import MAX_SEGMENT_BYTES, Segment, age_timestamp
from tierlog.hot_tier.segment_lookup import SegmentLookup
from tierlog.hot_tier.segment_swap import CleanedSegment, new_cleaned_segment, swap
from tierlog.record_format.batch import BatchHeader, Buffer
from tierlog.record_format.compaction import (
    BatchRetention,
    BatchRetentionResult,
    Compacted,
    KeyTable,
    TombstonePolicy,
    compact_batch,
    emptied,
)
from tierlog.record_format.decode import ABORT, COMMIT, control_type, decode_batch, expand
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptBatch,
    OffsetTrimmed,
    TierlogError,
    eio_as,
)
from tierlog.record_format.index_layouts import AbortedTxn


class CleanedTransactions:
    def __init__(self) -> None:
        self._upcoming: list[tuple[int, AbortedTxn]] = []  # a heap by first offset
        self._known: set[AbortedTxn] = set()
        self._aborted: dict[int, AbortedTxn] = {}
        self._seen_aborted: set[int] = set()  # aborted, with at least one batch seen
        self._committed: set[int] = set()
        self.kept: list[AbortedTxn] = []

    def add_aborted(self, aborted: Iterable[AbortedTxn]) -> None:
        """Add aborted transactions of the batches to come; repeated ones are ignored."""
        for transaction in aborted:
            if transaction not in self._known:
                self._known.add(transaction)
                heapq.heappush(self._upcoming, (transaction.first_offset, transaction))

    def can_discard(self, buf: Buffer, header: BatchHeader) -> bool:
        """Whether the batch's records are no longer needed."""
        while self._upcoming and self._upcoming[0][0] <= header.last_offset:
            transaction = heapq.heappop(self._upcoming)[1]
            self._aborted.setdefault(transaction.producer_id, transaction)
        if header.is_control:
            return self._can_discard_marker(buf, header)
        if not header.is_transactional:
            return False
        if header.producer_id in self._aborted:
            self._seen_aborted.add(header.producer_id)
            return True
        self._committed.add(header.producer_id)
        return False

    def _can_discard_marker(self, buf: Buffer, header: BatchHeader) -> bool:
        records = decode_batch(buf, header)
        if not records:
            return True  # an earlier round emptied it
        kind, producer_id = control_type(records[0].key), header.producer_id
        if kind == ABORT:
            transaction = self._aborted.pop(producer_id, None)
            if transaction is None or producer_id not in self._seen_aborted:
                return True
            self._seen_aborted.discard(producer_id)
            self.kept.append(transaction)
            return False
        if kind == COMMIT:
            has_records = producer_id in self._committed
            self._committed.discard(producer_id)
            return not has_records
        return False


class Cleanable(NamedTuple):
    """[first_dirty_offset, end_offset) is dirty and may be cleaned now."""

    first_dirty_offset: int
    end_offset: int
    clean_bytes: int
    dirty_bytes: int
    oldest_dirty_ms: int | None

    @property
    def dirty_ratio(self) -> float:
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0

    def is_due(self, *, min_dirty_ratio: float, max_lag_ms: int, now_ms: int) -> bool:
        """Whether the dirty ratio calls for a round, or `max.compaction.lag.ms` is over."""
        oldest = self.oldest_dirty_ms
        overdue = oldest is not None and oldest < now_ms - max_lag_ms
        # > as in Kafka: with a ratio of 0, nothing is due while nothing is dirty
        return self.dirty_bytes > 0 and (overdue or self.dirty_ratio > min_dirty_ratio)


def find_cleanable(state: LogState, checkpoint: int | None, *, now_ms: int) -> Cleanable:
    """`checkpoint`: where the last round ended; None if there was none.

    A checkpoint outside this log is ignored: cleaning again does no harm.
    """
    items = state.segments.items
    start = state.local_log_start_offset
    first_dirty = checkpoint if checkpoint is not None else start
    if not start <= first_dirty <= items[-1].base_offset:
        first_dirty = start
    sealed = items[:-1]
    dirty = [segment for segment in sealed if segment.end.next_offset > first_dirty]
    ready = _ready(state, dirty, now_ms=now_ms)
    clean_bytes = sum(
        segment.end.size_bytes for segment in sealed if segment.end.next_offset <= first_dirty
    )
    return Cleanable(
        first_dirty_offset=first_dirty,
        end_offset=ready[-1].end.next_offset if ready else first_dirty,
        clean_bytes=clean_bytes,
        dirty_bytes=sum(segment.end.size_bytes for segment in ready),
        oldest_dirty_ms=_oldest_ms(state, ready),
    )


def _ready(state: LogState, dirty: Sequence[Segment], *, now_ms: int) -> list[Segment]:
    unstable, stable = state.first_unstable_offset(), state.high_watermark
    if unstable is not None:
        stable = min(stable, unstable)
    lag_ms = state.config.min_compaction_lag_ms
    ready: list[Segment] = []
    for segment in dirty:
        too_young = lag_ms > 0 and _newest_ms(state, segment) > now_ms - lag_ms
        if too_young or segment.end.next_offset > stable:
            break
        ready.append(segment)
    return ready


def _newest_ms(state: LogState, segment: Segment) -> int:
    largest = largest_timestamp(state, segment)
    return age_timestamp(largest, folder=segment.folder, base_offset=segment.base_offset)


def _oldest_ms(state: LogState, ready: Sequence[Segment]) -> int | None:
    """The smallest first timestamp of the segments; only needed if a maximum lag is set."""
    if state.config.max_compaction_lag_ms == 2**63 - 1:
        return None
    firsts = (_first_timestamp(state, segment) for segment in ready)
    return min((first for first in firsts if first is not None and first > 0), default=None)


def _first_timestamp(state: LogState, segment: Segment) -> int | None:
    return with_index_rebuild(state, segment, lambda: segment.first_timestamp(state.files))


class GroupLimits(NamedTuple):
    segment_bytes: int
    index_bytes: int
    borders: frozenset[int]  # offsets that no group may span


def group_segments(segments: Sequence[Segment], limits: GroupLimits) -> list[tuple[Segment, ...]]:
    """Consecutive segments that are merged into one each, within the limits of a segment's size, an
    index's size, and 31 bits of relative offset.
    """
    groups: list[list[Segment]] = []
    sizes = (0, 0, 0)
    for segment in segments:
        more = _sizes_of(segment)
        together = tuple(a + b for a, b in zip(sizes, more, strict=True))
        fits = (
            together[0] <= limits.segment_bytes
            and max(together[1:]) <= limits.index_bytes
            and segment.base_offset not in limits.borders
        )
        if groups and fits and segment.end.next_offset - 1 - groups[-1][0].base_offset < 2**31:
            groups[-1].append(segment)
            sizes = together  # type: ignore[assignment]
        else:
            groups.append([segment])
            sizes = more
    return [tuple(group) for group in groups]


def _sizes_of(segment: Segment) -> tuple[int, int, int]:
    return (segment.end.size_bytes, _size_of(segment, OFFSET_INDEX), _size_of(segment, TIME_INDEX))


def _size_of(segment: Segment, suffix: str) -> int:
    try:
        return segment.path(suffix).stat().st_size
    except FileNotFoundError:
        return 0  # it will be rebuilt


class CleanedRound(NamedTuple):
    """`end_offset`: the log is clean below it. `complete`: the whole dirty part was cleaned."""

    end_offset: int
    complete: bool
    read_bytes: int
    written_bytes: int


def _no_borders() -> AbstractContextManager[frozenset[int]]:
    return nullcontext(frozenset())


class CleanerHooks(NamedTuple):
    """`stopping`: polled during the round; once it is true, nothing more is changed.

    `swapping`: entered around each swap; yields the offsets that no group may span (where the
    bucket ends, and where its gaps end). `may_forget`: whether tombstones and markers past their
    horizon may be removed. They may not while the bucket may still have what they delete or end.
    """

    stopping: Callable[[], bool] = lambda: False
    swapping: Callable[[], AbstractContextManager[frozenset[int]]] = _no_borders
    may_forget: bool = True


class Interrupted(TierlogError):
    """The round ended early; nothing is lost, and the checkpoint stays."""


class _Start(NamedTuple):
    """A segment's `.log`, which it holds open, and the position of a batch."""

    log: FileReader
    position: int

    def close(self) -> None:
        self.log.close()


class Cleaner:
    """One round over one log."""

    def __init__(
        self, state: LogState, reaper: Reaper, table: KeyTable, hooks: CleanerHooks
    ) -> None:
        self._state, self._reaper, self._table, self._hooks = state, reaper, table, hooks
        self._read_bytes = self._written_bytes = 0
        self._tombstones = TombstonePolicy(
            state.clock(), state.config.delete_retention_ms, may_drop=hooks.may_forget
        )
        self._transactions = CleanedTransactions()
        self._producers: dict[int, Producer] = {}
        self._high_watermark = 0

    def clean_round(self, cleanable: Cleanable) -> CleanedRound:
        """Clean up to `cleanable.end_offset`, or as far as the table reaches.

        Raises Interrupted, CorruptBatch, ConfigurationError (the table cannot hold the keys of a
        single batch), Throttled (a repair is in progress), DiskFull, LogOfflineError.
        """
        first_dirty, end_offset = cleanable.first_dirty_offset, cleanable.end_offset
        self._fill_table(first_dirty, end_offset)
        reached = self._table.latest_offset + 1
        if reached <= first_dirty:
            raise Interrupted  # retention or a trim deleted all of it
        segments = self._state.segments.items[:-1]
        wanted = [segment for segment in segments if segment.base_offset < reached]
        with self._hooks.swapping() as borders:
            pass
        config = self._state.config
        limits = GroupLimits(
            min(config.segment_bytes, MAX_SEGMENT_BYTES), config.segment_index_bytes, borders
        )
        for group in group_segments(wanted, limits):
            self._clean_group(group, upper_bound=end_offset)
        return CleanedRound(reached, reached >= end_offset, self._read_bytes, self._written_bytes)

    # --- the keys of the dirty part ---------------------------------------------------------------

    def _fill_table(self, first_dirty: int, end_offset: int) -> None:
        table = self._table
        table.clear(start_offset=first_dirty)
        transactions = CleanedTransactions()
        transactions.add_aborted(self._aborted(first_dirty, end_offset))
        for segment in self._state.segments.items[:-1]:
            if segment.end.next_offset <= first_dirty or segment.base_offset >= end_offset:
                continue
            for checked in self._batches(segment, from_offset=first_dirty):
                header = checked.header_in_chunk()
                try:
                    gone = transactions.can_discard(checked.chunk, header) or header.is_control
                    has_keys = not gone and header.record_count > 0
                    if has_keys and not table.add_batch_keys(expand(checked.chunk, header), header):
                        self._check_filled(first_dirty)
                        return
                except CorruptBatch as bad:
                    raise checked.with_location(bad, file=segment.name(LOG)) from None
                table.latest_offset = max(table.latest_offset, header.last_offset)
            table.latest_offset = segment.end.next_offset - 1

    def _check_filled(self, first_dirty: int) -> None:
        if self._table.latest_offset < first_dirty:
            raise ConfigurationError(
                f"{self._state.name}: log.cleaner.dedupe.buffer is too small for one batch"
            )

    def _batches(self, segment: Segment, *, from_offset: int = 0) -> Iterator[CheckedBatch]:
        start = self._find_start(segment, from_offset)
        log, (size_bytes, end_offset) = start.log, segment.end
        next_offset = segment.base_offset
        try:
            with closing(start), eio_as(CorruptBatch, file=log.name):
                for checked in checked_batches(log, start=start.position, end=size_bytes):
                    if self._hooks.stopping():
                        raise Interrupted
                    header = checked.header
                    check_in_order(header, next_offset=next_offset, end_offset=end_offset)
                    next_offset = header.next_offset
                    self._read_bytes += header.size_bytes
                    yield checked
        except CorruptBatch as bad:
            raise bad.with_location(file=log.name, offset=next_offset) from bad.__cause__

    def _find_start(self, segment: Segment, from_offset: int) -> _Start:
        files = self._state.files

        def look_up() -> _Start:
            if segment not in self._state.segments.items:
                raise Interrupted  # deleted, or replaced by a repair
            if from_offset <= segment.base_offset:
                return _Start(segment.log_reader(files), 0)
            with closing(SegmentLookup(segment, files)) as lookup:
                found = lookup.find_offset(from_offset)
            position = found.position if found else segment.end.size_bytes
            return _Start(segment.log_reader(files), position)

        try:
            return read_consistently(
                self._state, lambda: with_index_rebuild(self._state, segment, look_up)
            )
        except OffsetTrimmed:
            raise Interrupted from None  # deleted since

    def _aborted(self, offset: int, end_offset: int) -> list[AbortedTxn]:
        try:
            return aborted_transactions(self._state, offset, end_offset=end_offset)
        except OffsetTrimmed:
            raise Interrupted from None  # retention or a trim deleted a segment

    # --- the segments -----------------------------------------------------------------------------

    def _clean_group(self, group: tuple[Segment, ...], *, upper_bound: int) -> None:
        if not any(segment.end.size_bytes for segment in group):
            return
        try:
            with new_cleaned_segment(self._state, group[0].base_offset) as cleaned:
                self._replace(group, cleaned, upper_bound=upper_bound)
        except FileNotFoundError as error:
            raise Interrupted from error  # retention or a trim deleted a segment
        except OSError as error:
            raise disk_error(self._state, error) from error

    def _replace(
        self, group: tuple[Segment, ...], cleaned: CleanedSegment, *, upper_bound: int
    ) -> None:
        with self._state.lock:
            self._high_watermark = self._state.high_watermark
            self._producers = {one.producer_id: one for one in self._state.producers}
        changed = self._clean_into(cleaned, group, upper_bound=upper_bound)
        aborted, self._transactions.kept = self._transactions.kept, []
        if not changed and len(group) == 1:
            return
        modified_ns = max(segment.path(LOG).stat().st_mtime_ns for segment in group)
        end_offset = group[-1].end.next_offset
        cleaned.finish(next_offset=end_offset, aborted=aborted, modified_ns=modified_ns)
        self._written_bytes += cleaned.size_bytes
        self._swap(group, cleaned)

    def _swap(self, group: tuple[Segment, ...], cleaned: CleanedSegment) -> None:
        with self._hooks.swapping() as borders:
            start, end = group[0].end.next_offset, group[-1].end.next_offset
            across = any(start <= border < end for border in borders)
            if across or not swap(self._state, self._reaper, group, cleaned):
                raise Interrupted

    def _clean_into(
        self, cleaned: CleanedSegment, group: tuple[Segment, ...], *, upper_bound: int
    ) -> bool:
        """Write what is retained; returns whether the bytes differ from before."""
        changed, last = False, None
        for segment in group:
            base_offset, end = segment.base_offset, segment.end
            self._transactions.add_aborted(self._aborted(base_offset, end.next_offset))
            for checked in self._batches(segment):
                last = checked.header_in_chunk()
                try:
                    kept = self._clean_batch(checked, last, upper_bound=upper_bound)
                except CorruptBatch as bad:
                    raise checked.with_location(bad, file=segment.name(LOG)) from None
                changed |= kept is None or kept.header is not last
                if kept is not None:
                    cleaned.add_batch(kept.header, kept.body)
        if not cleaned.size_bytes and last is not None:
            cleaned.add_batch(*emptied(last))
            changed = cleaned.size_bytes != sum(segment.end.size_bytes for segment in group)
        return changed

    def _clean_batch(
        self, checked: CheckedBatch, header: BatchHeader, *, upper_bound: int
    ) -> Compacted | None:
        discard = self._transactions.can_discard(checked.chunk, header)
        drop = discard
        if header.is_control:
            horizon = header.base_timestamp if header.has_delete_horizon else None
            drop = discard and horizon is not None and self._tombstones.is_past(horizon)
        if self._is_last_of_producer(header) or header.next_offset == upper_bound:
            retention = BatchRetention.RETAIN_EMPTY
        else:
            retention = BatchRetention.DELETE if drop else BatchRetention.DELETE_EMPTY
        verdict = BatchRetentionResult(
            retention, drop, marker_of_empty_txn=discard and header.is_control
        )
        return compact_batch(
            checked.chunk, header, verdict, table=self._table, policy=self._tombstones
        )

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        producer = self._producers.get(header.producer_id)
        if producer is None:
            return False
        if producer.batches:
            offsets = [one.last_offset for one in producer.batches]
            kept = [one for one in offsets if one < self._high_watermark]
            return header.last_offset == kept[-1] if kept else header.last_offset < offsets[0]
        return header.is_control and header.producer_epoch == producer.epoch
