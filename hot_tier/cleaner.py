"""One round of compaction, which keeps the last record of each key (Kafka's Cleaner).

* First the keys of the dirty part are put into a table; if it fills up, the round ends there and
  the next one continues. Then every segment up to there is rewritten, in groups, without superseded
  records; each new segment replaces its group at once.
* Records keep their offsets. Repeating a round after a crash or a stop does no harm: the checkpoint
  advances only when all groups were replaced.
* If nothing of a segment would remain, the header of its last batch does, so no segment is empty. A
  single segment in which nothing changes is left alone.
* Every batch is verified before it is used: its checksum, and its base offset, which no checksum
  covers but which decides which record of a key is the last. A corrupt batch ends the round with
  its file and position.
* Reads and appends continue; only the swap holds the log's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from tierlog.hot_tier.batch_walk import CheckedBatch, check_in_order, checked_batches
from tierlog.hot_tier.cleanable import Cleanable, GroupLimits, group_segments
from tierlog.hot_tier.cleaned_segment import CleanedSegment, new_cleaned_segment
from tierlog.hot_tier.cleaned_transactions import CleanedTransactions
from tierlog.hot_tier.file_names import LOG
from tierlog.hot_tier.log_reader import aborted_transactions, with_index_rebuild
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.producer_state import Producer
from tierlog.hot_tier.reaper import Reaper
from tierlog.hot_tier.roll import disk_error
from tierlog.hot_tier.segment import MAX_SEGMENT_BYTES, Segment
from tierlog.hot_tier.segment_lookup import SegmentLookup
from tierlog.hot_tier.segment_swap import swap
from tierlog.hot_tier.seqlock import read_consistently
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.batch_compaction import (
    BatchRetention,
    BatchRetentionResult,
    Compacted,
    KeyTable,
    TombstonePolicy,
    compact_batch,
    emptied,
)
from tierlog.record_format.decode import expand
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptBatch,
    OffsetTrimmed,
    TierlogError,
    eio_as,
)
from tierlog.record_format.index_layouts import AbortedTxn


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

    def run(self, cleanable: Cleanable) -> CleanedRound:
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
                    if has_keys and not table.add(expand(checked.chunk, header), header):
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
        log, start = self._find_start(segment, from_offset)
        size_bytes, end_offset = segment.end
        next_offset = segment.base_offset
        try:
            with eio_as(CorruptBatch, file=log.name):
                for checked in checked_batches(log, start=start, end=size_bytes):
                    if self._hooks.stopping():
                        raise Interrupted
                    header = checked.header
                    check_in_order(header, next_offset=next_offset, end_offset=end_offset)
                    next_offset = header.next_offset
                    self._read_bytes += header.size_bytes
                    yield checked
        except CorruptBatch as bad:
            raise bad.with_location(file=log.name, offset=next_offset) from bad.__cause__

    def _find_start(self, segment: Segment, from_offset: int) -> tuple[FileReader, int]:
        """The segment's `.log`, and the position of the batch that contains `from_offset`."""
        files = self._state.files

        def look_up() -> tuple[FileReader, int]:
            if segment not in self._state.segments.items:
                raise Interrupted  # deleted, or replaced by a repair
            if from_offset <= segment.base_offset:
                return segment.log_reader(files), 0
            lookup = SegmentLookup(segment, files)
            found = lookup.find_offset(from_offset)
            return lookup.log, found.position if found else segment.end.size_bytes

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
                    cleaned.add(kept.header, kept.body)
        if not cleaned.size_bytes and last is not None:
            cleaned.add(*emptied(last))
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
            return header.last_offset == producer.batches[-1].last_offset
        return header.is_control and header.producer_epoch == producer.epoch
