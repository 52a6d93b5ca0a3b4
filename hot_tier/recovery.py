"""Opening a log after a crash; the table in `opening` says what is decided when.

Every batch above the recovery point is checked, the file is cut at the first bad byte or refused,
and the indexes are rebuilt.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from hot_tier.batch_walk import CheckedBatch, checked_batches
from hot_tier.disk import write_all
from hot_tier.file_names import LOG, OFFSET_INDEX, TIME_INDEX
from hot_tier.index_builder import IndexBuilder
from hot_tier.index_rebuild import write_indexes
from hot_tier.log_folder import LogFolder
from hot_tier.log_state import LogState, Segments
from hot_tier.producer_snapshots import load_newest, write_snapshot
from hot_tier.recovery_walk import BatchesInOrder, PlacedRun
from hot_tier.replay import LateProducers, replay, take_batch
from hot_tier.roll import open_active, resume_active
from hot_tier.segment import Segment, SegmentEnd
from hot_tier.transaction_index import write_entries
from record_format.batch import BatchHeader
from record_format.errors import CorruptBatch, CorruptDataError
from record_format.index_layouts import AbortedTxn

REWRITE_CHUNK_BYTES: Final = 1 << 20


@dataclass
class RecoveryReport:
    """What an open did beyond opening; for the broker's log."""

    clean: bool
    checked_bytes: int = 0
    cut_file: str = ""
    cut_position: int = 0
    cut_bytes: int = 0
    cut_reason: str = ""
    removed_segments: list[int] = field(default_factory=list)
    rewritten_bytes: int = 0


@dataclass(frozen=True)
class OpenRequest:
    """What the data folder's checkpoints say of a log."""

    clean: bool
    recovery_point: int
    flushed_end: int
    log_start_offset: int | None
    start_offset: int


class Recovery:
    """One run over the segments that have to be checked."""

    def __init__(
        self, state: LogState, folder: LogFolder, request: OpenRequest, report: RecoveryReport
    ) -> None:
        self._state, self._folder, self._report = state, folder, report
        self._recovery_point, self._flushed_end = request.recovery_point, request.flushed_end
        self._rewrite = folder.went_offline
        self._late = LateProducers(state)

    def run(self) -> None:
        state = self._state
        items = state.segments.items
        first = next(
            (n for n, one in enumerate(items[:-1]) if one.end.next_offset > self._recovery_point),
            len(items) - 1,
        )
        if first and items[first - 1].end.next_offset == self._recovery_point:
            self._finish_seal(items[first - 1])
        state.producers = load_newest(
            state,
            self._folder.snapshots,
            at_most=items[first].base_offset,
            at_least=state.segments.bases[0],
        )
        replay(state, state.producers, end_offset=items[first].base_offset)
        if first:
            self._write_snapshot(items[first].base_offset)
        state.epochs.cut_end(items[first].base_offset)
        self._recover_all(items[first:])
        state.disk.sync_folder(state.folder)

    def _finish_seal(self, segment: Segment) -> None:
        """If a segment ends at the recovery point, trimming its indexes and cutting off what was
        preallocated after its records may not have been synced, or may not have happened at all.
        """
        plan = IndexBuilder(
            segment.base_offset, interval_bytes=self._state.config.index_interval_bytes
        )
        position, next_offset = 0, segment.base_offset
        try:
            for header in segment.headers(self._state.files):
                plan.take(header, position=header.position)
                position, next_offset = header.end_position, header.next_offset
        except CorruptBatch as bad:
            if next_offset < segment.end.next_offset:
                raise
            self._truncate(segment, position, reason=bad.detail)
            segment.end = SegmentEnd(position, next_offset)
        self._sync_log(segment)
        plan.add_time_entry()
        write_indexes(self._state, segment, plan)

    def _recover_all(self, items: tuple[Segment, ...]) -> None:
        for number, segment in enumerate(items):
            is_last = number == len(items) - 1
            if number:
                self._write_snapshot(segment.base_offset)
            limit = None if is_last else items[number + 1].base_offset
            plan, cut = self._check(segment, limit)
            if is_last or cut:
                self._drop(items[number + 1 :])
                self._activate(segment, plan)
                return
            write_indexes(self._state, segment, plan)
            self._sync_log(segment)

    def _write_snapshot(self, offset: int) -> None:
        """Replaces one that is there, too: nobody knows whether it was synced."""
        write_snapshot(self._state, offset, sync=True)
        self._folder.snapshots.add(offset)

    def _check(self, segment: Segment, limit: int | None) -> tuple[IndexBuilder, bool]:
        """Check every batch; gives their indexes, and whether the file was cut."""
        state = self._state
        plan = IndexBuilder(segment.base_offset, interval_bytes=state.config.index_interval_bytes)
        aborted: list[AbortedTxn] = []
        position, next_offset, reason = 0, segment.base_offset, ""
        log = segment.log_reader(state.files)
        try:
            for piece in BatchesInOrder(segment, log, limit=limit):
                if isinstance(piece, PlacedRun):
                    self._take_run(plan, piece)
                    position, next_offset = piece.end_position, piece.run.next_offset
                    continue
                header = piece.header
                self._check_overlap(segment, header, limit)
                if (abort := self._take(plan, piece)) is not None:
                    aborted.append(abort)
                position, next_offset = header.end_position, header.next_offset
        except CorruptBatch as bad:
            reason = bad.detail
        self._late.take_in()
        if not reason and limit is not None and self._tail_is_lost(next_offset, limit):
            reason = f"the segment ends in offset {next_offset - 1}, the next begins at {limit}"
        self._report.checked_bytes += position
        if reason:
            self._cut(segment, position, next_offset=next_offset, reason=reason)
        # A whole segment ends where the next begins, though compaction may have taken its last
        # records.
        end_offset = next_offset if reason or limit is None else limit
        segment.end = SegmentEnd(position, end_offset)
        write_entries(segment, aborted, disk=state.disk)
        if limit is not None and not reason:
            plan.add_time_entry()
        segment.largest = plan.largest
        return plan, bool(reason)

    def _take_run(self, plan: IndexBuilder, placed: PlacedRun) -> None:
        run = placed.run
        plan.take_run(run, position=placed.position)
        self._state.epochs.note(run.leader_epoch, run.base_offset)
        self._late.note(run)

    def _take(self, plan: IndexBuilder, checked: CheckedBatch) -> AbortedTxn | None:
        header = checked.header
        plan.take(header, position=header.position)
        self._state.epochs.note(header.leader_epoch, header.base_offset)
        data = b""
        if header.is_control:
            data = checked.chunk[checked.start : checked.start + header.size_bytes]
        self._late.take_in()
        return take_batch(self._state.producers, header, data)

    def _tail_is_lost(self, next_offset: int, limit: int) -> bool:
        """Whether a segment lacks its end: a crash can keep a later file and lose the end of an
        earlier one.

        Compaction leaves such gaps too, but only in what was flushed, and never at the log's end.
        """
        if next_offset >= limit or limit <= self._flushed_end:
            return False
        return not self._state.config.compacts or not self._has_records_from(limit)

    def _has_records_from(self, offset: int) -> bool:
        items = self._state.segments.items
        return any(self._has_records(one) for one in items if one.base_offset >= offset)

    def _has_records(self, segment: Segment) -> bool:
        """Whether it begins with a good batch."""
        log = segment.log_reader(self._state.files)
        with suppress(CorruptBatch):
            return next(checked_batches(log, end=segment.end.size_bytes), None) is not None
        return False

    def _check_overlap(self, segment: Segment, header: BatchHeader, limit: int | None) -> None:
        if limit is not None and header.last_offset >= limit:
            raise CorruptDataError(
                f"ends in offset {header.last_offset}, but another segment begins at {limit}; "
                "move one of the two away, or restore the partition from the bucket "
                "(`tierlog storage restore`)",
                file=str(segment.path(LOG)),
                position=header.position,
            )

    def _cut(self, segment: Segment, position: int, *, next_offset: int, reason: str) -> None:
        path = segment.path(LOG)
        if next_offset < self._flushed_end:
            raise CorruptBatch(
                f"{reason}; everything below offset {self._flushed_end} had been flushed, so "
                "this is not what a crash leaves, and cutting here would lose records: "
                "`tierlog storage repair` shows what can be done",
                file=str(path),
                position=position,
                offset=next_offset,
            )
        self._truncate(segment, position, reason=reason)

    def _truncate(self, segment: Segment, position: int, *, reason: str) -> None:
        path, report = segment.path(LOG), self._report
        report.cut_file, report.cut_position, report.cut_reason = str(path), position, reason
        report.cut_bytes += segment.end.size_bytes - position
        fd = self._state.disk.open(path, os.O_RDWR)
        try:
            self._state.disk.truncate(fd, position)
        finally:
            os.close(fd)

    def _drop(self, items: tuple[Segment, ...]) -> None:
        """Remove the segments after a cut: what they continue is gone."""
        for segment in items:
            self._report.removed_segments.append(segment.base_offset)
            self._report.cut_bytes += segment.end.size_bytes
            self._folder.remove_segment(segment.base_offset)
            self._state.files.invalidate(segment.name(LOG))  # another may get the name
        state = self._state
        kept = tuple(one for one in state.segments.items if one not in items)
        state.segments = Segments.of(kept)

    def _activate(self, segment: Segment, plan: IndexBuilder) -> None:
        state = self._state
        for suffix in (OFFSET_INDEX, TIME_INDEX):
            state.disk.unlink(segment.path(suffix))
        state.active = open_active(state, segment, bytes_since_entry=plan.bytes_since_entry)
        state.active.restore_indexes(*plan.images())
        resume_active(state)
        self._sync_log(segment)

    def _sync_log(self, segment: Segment) -> None:
        """Flush the bytes; rewrite them first if the page cache cannot be trusted."""
        fd = self._state.disk.open(segment.path(LOG), os.O_RDWR)
        try:
            if self._rewrite:
                self._rewrite_bytes(fd, segment.end.size_bytes)
            self._state.disk.sync_bytes(fd)
        finally:
            os.close(fd)

    def _rewrite_bytes(self, fd: int, size_bytes: int) -> None:
        """Write the same bytes to the same places: pages that a failed sync left clean become dirty
        again.
        """
        for position in range(0, size_bytes, REWRITE_CHUNK_BYTES):
            data = os.pread(fd, min(REWRITE_CHUNK_BYTES, size_bytes - position), position)
            write_all(self._state.disk, fd, [data], position)
            self._report.rewritten_bytes += len(data)
