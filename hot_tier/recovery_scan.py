"""Recovering a log after a crash; the table in `recovery` lists the cases.

Every batch above the recovery point is verified, the file is truncated at the first bad byte or
refused, and the indexes are rebuilt.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tierlog.host.disk import write_all
from tierlog.hot_tier.batch_walk import CheckedBatch
from tierlog.hot_tier.border_check import BatchesInOrder, PlacedRun
from tierlog.hot_tier.derived_files import (
    DeferredProducers,
    apply_batch,
    load_newest,
    rebuild_transactions,
    replay,
    write_entries,
    write_indexes,
    write_snapshot,
)
from tierlog.hot_tier.log_folder import LOG, OFFSET_INDEX, TIME_INDEX, LogFolder
from tierlog.hot_tier.log_state import OpeningLog, Segments
from tierlog.hot_tier.roll import open_active, resume_active
from tierlog.hot_tier.segment import Segment, SegmentEnd
from tierlog.hot_tier.torn_tail import BadBytes, CutFiles, NextSegment, Place
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.errors import CorruptBatch, CorruptDataError
from tierlog.record_format.index_builder import IndexBuilder
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET, AbortedTxn

REWRITE_CHUNK_BYTES: Final = 1 << 20


@dataclass
class RecoveryReport:
    """What opening a log changed or checked; the broker logs it."""

    clean: bool
    checked_bytes: int = 0
    truncated_file: str = ""
    truncated_position: int = 0
    truncated_bytes: int = 0
    truncate_reason: str = ""
    removed_segments: list[int] = field(default_factory=list)
    rewritten_bytes: int = 0
    cut_files: list[Path] = field(default_factory=list)  # see `torn_tail`


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """What is known about a log before it is opened.

    `clean`: the last process to have it open closed it. `recovery_point`: everything below it was
    flushed and is not checked. `flushed_end`: everything below it was flushed too, so that records
    missing below it were lost, not just unflushed at a crash. `log_start_offset`: None if unknown;
    the log then starts at its first segment. `start_offset`: where a new, empty log begins.
    `may_cut_from`: somebody accepted that whole batches from this offset on are lost.
    """

    clean: bool
    recovery_point: int = 0
    flushed_end: int = 0
    log_start_offset: int | None = None
    start_offset: int = 0
    may_cut_from: int | None = None


class Recovery:
    """One run over the segments that have to be checked."""

    def __init__(
        self, state: OpeningLog, folder: LogFolder, request: OpenRequest, report: RecoveryReport
    ) -> None:
        self._state, self._folder, self._report = state, folder, report
        self._recovery_point = request.recovery_point
        self._flushed_end = max(request.recovery_point, request.flushed_end)
        self._may_cut_from = request.may_cut_from
        self._rewrite = folder.went_offline
        self._deferred = DeferredProducers(state)
        self._cuts = CutFiles(state.folder, folder.cuts, disk=state.disk)

    def recover(self) -> None:
        state = self._state
        items = state.segments.items
        first = sum(segment.end.next_offset <= self._recovery_point for segment in items[:-1])
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
        state.epochs.truncate_from_end(items[first].base_offset)
        self._recover_all(items[first:])
        self._report.cut_files = self._cuts.paths
        state.disk.sync_folder(state.folder)

    def _finish_seal(self, segment: Segment) -> None:
        """For a segment that ends at the recovery point, trimming its indexes and truncating
        preallocated space may not have been synced, or may not have happened at all.
        """
        builder = IndexBuilder(
            segment.base_offset, interval_bytes=self._state.config.index_interval_bytes
        )
        position, next_offset = 0, segment.base_offset
        try:
            for header in segment.headers(self._state.files):
                builder.index_batch(header, position=header.position)
                position, next_offset = header.end_position, header.next_offset
        except CorruptBatch as bad:
            if next_offset < segment.end.next_offset:
                raise
            self._truncate(segment, position, reason=bad.detail)
            segment.end = SegmentEnd(position, next_offset)
        self._sync_log(segment)
        builder.add_time_entry()
        write_indexes(self._state, segment, builder)
        rebuild_transactions(self._state, segment, self._folder.snapshots)

    def _recover_all(self, items: tuple[Segment, ...]) -> None:
        for number, segment in enumerate(items):
            is_last = number == len(items) - 1
            if number:
                self._write_snapshot(segment.base_offset)
            limit = None if is_last else items[number + 1].base_offset
            builder, truncated = self._check(segment, limit)
            if is_last or truncated:
                self._activate(segment, builder)
                return
            write_indexes(self._state, segment, builder)
            self._sync_log(segment)

    def _write_snapshot(self, offset: int) -> None:
        """Also replaces an existing one, which may not have been synced."""
        write_snapshot(self._state, offset, sync=True)
        self._folder.snapshots.add(offset)

    def _check(self, segment: Segment, limit: int | None) -> tuple[IndexBuilder, bool]:
        """Verify every batch; returns the index entries and whether the file was truncated."""
        state = self._state
        builder = IndexBuilder(
            segment.base_offset, interval_bytes=state.config.index_interval_bytes
        )
        aborted: list[AbortedTxn] = []
        position, next_offset, reason = 0, segment.base_offset, ""
        size_bytes = segment.end.size_bytes
        try:
            with closing(segment.log_reader(state.files)) as log:
                for piece in BatchesInOrder(segment, log, size_bytes=size_bytes, limit=limit):
                    if isinstance(piece, PlacedRun):
                        self._add_run(builder, piece)
                        position, next_offset = piece.end_position, piece.run.next_offset
                        continue
                    header = piece.header
                    self._check_overlap(segment, header, limit)
                    if (abort := self._add(builder, piece)) is not None:
                        aborted.append(abort)
                    position, next_offset = header.end_position, header.next_offset
        except CorruptBatch as bad:
            reason = bad.detail
        self._deferred.apply_deferred()
        if not reason and limit is not None and next_offset < limit and self._flushed_end < limit:
            reason = f"the segment ends at offset {next_offset - 1}, but the next begins at {limit}"
        self._report.checked_bytes += position
        if reason:
            epoch = state.epochs.latest
            place = Place(position, next_offset, 0 if epoch is None else epoch)
            self._truncate_tail(segment, place, limit=limit, reason=reason)
        # A complete segment ends where the next begins, even if compaction removed its last batch.
        end_offset = next_offset if reason or limit is None else limit
        segment.end = SegmentEnd(position, end_offset)
        write_entries(segment, aborted, disk=state.disk)
        if limit is not None and not reason:
            builder.add_time_entry()
        segment.largest, segment.unchecked_below = builder.largest, segment.base_offset
        return builder, bool(reason)

    def _add_run(self, builder: IndexBuilder, placed: PlacedRun) -> None:
        run = placed.run
        builder.index_run(run, position=placed.position)
        self._state.epochs.assign_in_memory(run.leader_epoch, run.base_offset)
        self._deferred.defer(run)

    def _add(self, builder: IndexBuilder, checked: CheckedBatch) -> AbortedTxn | None:
        header = checked.header
        data = b""
        if header.is_control:
            data = checked.chunk[checked.start : checked.start + header.size_bytes]
        self._deferred.apply_deferred()
        # Before the batch is indexed: its marker may be invalid.
        aborted = apply_batch(self._state.producers, header, data)
        builder.index_batch(header, position=header.position)
        self._state.epochs.assign_in_memory(header.leader_epoch, header.base_offset)
        return aborted

    def _check_overlap(self, segment: Segment, header: BatchHeader, limit: int | None) -> None:
        if limit is not None and header.last_offset >= limit:
            raise CorruptDataError(
                f"ends at offset {header.last_offset}, but another segment begins at {limit}; "
                "move one of the two files away, or restore the partition from the bucket "
                "(`tierlog storage restore`)",
                file=str(segment.path(LOG)),
                position=header.position,
            )

    def _truncate_tail(
        self, segment: Segment, place: Place, *, limit: int | None, reason: str
    ) -> None:
        self._check_may_cut(segment, place, limit=limit, reason=reason)
        self._drop_after(segment)
        self._cuts.keep_tail(segment.path(LOG), place)
        self._truncate(segment, place.position, reason=reason)

    def _check_may_cut(
        self, segment: Segment, place: Place, *, limit: int | None, reason: str
    ) -> None:
        if place.next_offset < self._flushed_end:
            why = f"everything below offset {self._flushed_end} was flushed, so a"
        elif self._is_accepted(place) or not self._is_damage(segment, place, limit):
            return
        else:
            why = "whole batches that continue the log follow, so a"
        raise CorruptBatch(
            f"{reason}; {why} crash does not explain this, and truncating here would lose records: "
            "`tierlog storage repair` shows the options",
            file=str(segment.path(LOG)),
            position=place.position,
            offset=place.next_offset,
        )

    def _is_accepted(self, place: Place) -> bool:
        return self._may_cut_from is not None and place.next_offset >= self._may_cut_from

    def _is_damage(self, segment: Segment, place: Place, limit: int | None) -> bool:
        files, following = self._state.files, None
        end_offset = segment.base_offset + MAX_RELATIVE_OFFSET + 1 if limit is None else limit
        with ExitStack() as opened:
            log = opened.enter_context(closing(segment.log_reader(files)))
            if limit is not None:
                later = self._state.segments.items[self._state.segments.number_of(limit)]
                next_log = opened.enter_context(closing(later.log_reader(files)))
                following = NextSegment(next_log, later.end.size_bytes, limit)
            end = segment.end.size_bytes
            bad = BadBytes(log, place, end=end, end_offset=end_offset, following=following)
            return bad.damaged_until() is not None

    def _truncate(self, segment: Segment, position: int, *, reason: str) -> None:
        path, report = segment.path(LOG), self._report
        report.truncated_file, report.truncated_position = str(path), position
        report.truncate_reason = reason
        report.truncated_bytes += segment.end.size_bytes - position
        fd = self._state.disk.open(path, os.O_RDWR)
        try:
            self._state.disk.truncate(fd, position)
        finally:
            os.close(fd)

    def _drop_after(self, segment: Segment) -> None:
        """Remove the segments after one that is truncated: the log cannot continue there."""
        state, report = self._state, self._report
        kept = state.segments.number_of(segment.base_offset) + 1
        for later in reversed(state.segments.items[kept:]):  # a crash leaves no hole
            report.removed_segments.insert(0, later.base_offset)
            report.truncated_bytes += later.end.size_bytes
            self._folder.remove_segment(later.base_offset, keep_log=self._cuts.keep_segment)
            state.files.invalidate(later.name(LOG))  # a new segment may get the name
        state.segments = Segments.of(state.segments.items[:kept])

    def _activate(self, segment: Segment, builder: IndexBuilder) -> None:
        state = self._state
        for suffix in (OFFSET_INDEX, TIME_INDEX):
            state.disk.unlink(segment.path(suffix))
        active = open_active(state, segment, bytes_since_entry=builder.bytes_since_entry)
        state.active = active
        active.add_entries(builder.offset_entries, builder.time_entries)
        resume_active(state, active)
        self._sync_log(segment)

    def _sync_log(self, segment: Segment) -> None:
        """Sync the bytes; rewrite them first if the page cache cannot be trusted."""
        fd = self._state.disk.open(segment.path(LOG), os.O_RDWR)
        try:
            if self._rewrite:
                self._rewrite_bytes(fd, segment.end.size_bytes)
            self._state.disk.sync_bytes(fd)
        finally:
            os.close(fd)

    def _rewrite_bytes(self, fd: int, size_bytes: int) -> None:
        """Write the same bytes to the same positions, so that pages that a failed sync left clean
        become dirty again.
        """
        for position in range(0, size_bytes, REWRITE_CHUNK_BYTES):
            data = os.pread(fd, min(REWRITE_CHUNK_BYTES, size_bytes - position), position)
            write_all(self._state.disk, fd, [data], position)
            self._report.rewritten_bytes += len(data)
