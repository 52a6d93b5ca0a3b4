"""What an open does with each state that a stop, a crash or a bad disk may have left.

| found | done |
|---|---|
| clean stop | nothing is checked but the tail of the last segment, from its last index entry on |
| clean stop, but the tail is no whole batch | as after a crash |
| segment wholly below the recovery point | trusted to its length |
| segment that ends exactly there | its indexes are made anew: their trim may not have been synced |
| segment above it, or the last | every batch checked (whole, CRC, offsets rise), indexes rebuilt |
| first bad byte at or above the recovery point | the file is cut there, later segments go |
| first bad byte below the recovery point | refused (CorruptBatch): flushed bytes; `repair` cuts |
| segment above it that ends before the next begins (and no compaction) | later segments go |
| two segments that overlap | refused (CorruptDataError) |
| log ends below the recovery point | the point is lowered, and the report says so |
| index missing, short, unordered, garbage | rebuilt; below the recovery point at its first use |
| snapshot missing or bad | an older one, or none, and a longer replay |
| `leader-epoch-checkpoint` missing or bad | made anew from the batches |
| the log had gone offline | what is above the recovery point is written anew before it is flushed |

Recovery flushes all that it keeps, and the folder, before anything is served. It runs before the
log is shared; no lock is taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from hot_tier.active_segment import ActiveSegment, IndexPlan
from hot_tier.batch_walk import CheckedBatch, checked_batches, headers_from
from hot_tier.epochs import LeaderEpochs
from hot_tier.file_names import LOG, OFFLINE_MARKER, OFFSET_INDEX, TIME_INDEX
from hot_tier.index_file import ReadAt, floor_entry
from hot_tier.index_rebuild import rebuild_indexes, write_indexes
from hot_tier.log_folder import LogFolder
from hot_tier.log_state import Flushed, LogState, Segments
from hot_tier.producer_snapshots import (
    READ_BACK_BYTES,
    load_newest,
    read_back,
    write_snapshot,
)
from hot_tier.producer_state import ProducerStates
from hot_tier.roll import create_segment
from hot_tier.segment import (
    MAX_RELATIVE_OFFSET,
    OFFSET_ENTRY,
    TIME_ENTRY,
    LargestTimestamp,
    Segment,
    SegmentEnd,
    reader_of,
)
from hot_tier.transaction_index import write_entries
from record_format.batch import BatchHeader, parse_header
from record_format.control import end_marker_of
from record_format.errors import CorruptBatch, CorruptDataError, CorruptIndex, CorruptSnapshot
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
    tidied: list[str] = field(default_factory=list)
    rewritten_bytes: int = 0
    recovery_point_was_ahead: bool = False


@dataclass(frozen=True)
class OpenRequest:
    """What the data folder's checkpoints say of a log."""

    clean: bool
    recovery_point: int
    log_start_offset: int | None
    start_offset: int
    repair: bool


def open_log(state: LogState, folder: LogFolder, request: OpenRequest) -> RecoveryReport:
    """Fill `state` from the folder. Raises CorruptDataError (refused by name), OSError."""
    report = RecoveryReport(clean=request.clean, tidied=folder.tidied)
    _load_epochs(state)
    if not folder.log_sizes:
        _start_empty(state, request)
        return report
    _list_segments(state, folder)
    opened = request.clean and not folder.went_offline and _open_clean(state, folder)
    if not opened:
        report.clean = False
        _Recovery(state, folder, request, report).run()
    _settle(state, folder, request, report)
    return report


def _load_epochs(state: LogState) -> None:
    try:
        state.epochs = LeaderEpochs.load(state.folder, disk=state.disk)
    except (FileNotFoundError, CorruptSnapshot):
        state.epochs = LeaderEpochs(state.folder, disk=state.disk)


def _start_empty(state: LogState, request: OpenRequest) -> None:
    start = max(request.start_offset, request.log_start_offset or 0)
    state.active = create_segment(state, start)
    state.segments = Segments.of((state.active.segment,))
    state.epochs.cut_end(start)
    state.epochs.save()
    state.log_start_offset = start if request.log_start_offset is None else request.log_start_offset
    state.producers.end_offset = start
    state.leader_epoch = state.epochs.latest or 0
    state.disk.sync_folder(state.folder)
    state.folder_changed = False
    state.flushed = Flushed(start, start, 0)


def _list_segments(state: LogState, folder: LogFolder) -> None:
    bases = sorted(folder.log_sizes)
    items = []
    for number, base_offset in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else base_offset
        end = SegmentEnd(folder.log_sizes[base_offset], following)
        segment = Segment(state.folder, base_offset, end)
        segment.has_transactions = base_offset in folder.transaction_indexes
        items.append(segment)
    state.segments = Segments.of(tuple(items))


def _settle(
    state: LogState, folder: LogFolder, request: OpenRequest, report: RecoveryReport
) -> None:
    """What is the same however the log was opened: offsets, epochs, snapshots, the last sync."""
    end_offset = state.log_end_offset
    entries = state.epochs.entries
    if not entries and state.segments.items[0].end.size_bytes:
        _epochs_from_batches(state)
    state.epochs.cut_end(end_offset)
    if state.epochs.entries != entries or not report.clean:
        state.epochs.save()
    state.leader_epoch = state.epochs.latest or 0
    first = state.segments.bases[0]
    start = first if request.log_start_offset is None else request.log_start_offset
    state.log_start_offset = start
    folder.drop_stray_snapshots(end_offset=end_offset)
    report.recovery_point_was_ahead = request.recovery_point > end_offset
    segment = state.active.segment
    state.flushed = Flushed(end_offset, segment.base_offset, segment.end.size_bytes)
    if folder.went_offline:
        state.disk.unlink(state.folder / OFFLINE_MARKER)


def _epochs_from_batches(state: LogState) -> None:
    for segment in state.segments.items:
        read_at = segment.log_reader(state.files)
        for header in headers_from(read_at, 0, end=segment.end.size_bytes):
            state.epochs.note(header.leader_epoch, header.base_offset)


# --- after a clean stop ---------------------------------------------------------------------------


class TailFacts:
    """What the last segment's index files and its tail say; enough to append to it."""

    def __init__(self, state: LogState, segment: Segment) -> None:
        size_bytes = segment.end.size_bytes
        self.offset_image = _index_image(segment, OFFSET_INDEX, OFFSET_ENTRY.size)
        time_image = _index_image(segment, TIME_INDEX, TIME_ENTRY.size)
        relative, position = -1, 0
        if self.offset_image:
            relative, position = OFFSET_ENTRY.unpack(self.offset_image[-OFFSET_ENTRY.size :])
        # The last entry of a closed time index goes with no offset entry; rebuilding would not make
        # it.
        count = len(time_image) // TIME_ENTRY.size
        kept = floor_entry(time_image, TIME_ENTRY, column=1, target=relative, count=count) + 1
        self.time_image = time_image[: kept * TIME_ENTRY.size]
        self.bytes_since_entry = size_bytes - position
        self.next_offset = segment.base_offset
        self.largest = LargestTimestamp(-1, segment.base_offset)
        if kept:
            timestamp, offset = TIME_ENTRY.unpack(self.time_image[-TIME_ENTRY.size :])
            self.largest = LargestTimestamp(timestamp, segment.base_offset + offset)
        self._walk(state, segment, position, expected=relative if self.offset_image else None)

    def _walk(
        self, state: LogState, segment: Segment, position: int, *, expected: int | None
    ) -> None:
        read_at = segment.log_reader(state.files)
        for header in headers_from(read_at, position, end=segment.end.size_bytes):
            if expected is not None and header.last_offset != segment.base_offset + expected:
                raise CorruptIndex("does not fit the log", file=str(segment.path(OFFSET_INDEX)))
            if header.base_offset < self.next_offset:
                raise CorruptBatch("offsets do not rise", position=header.position)
            expected = None
            self.next_offset = header.next_offset
            if header.max_timestamp > self.largest.timestamp:
                self.largest = LargestTimestamp(header.max_timestamp, header.last_offset)


def _index_image(segment: Segment, suffix: str, entry_size: int) -> bytes:
    path = segment.path(suffix)
    data = path.read_bytes()
    if len(data) % entry_size:
        raise CorruptIndex(f"{len(data)} bytes are not whole entries", file=str(path))
    return data


def _open_clean(state: LogState, folder: LogFolder) -> bool:
    """Open without checks; False where the tail is not what a clean stop leaves."""
    segment = state.segments.items[-1]
    try:
        facts = TailFacts(state, segment)
    except (CorruptDataError, FileNotFoundError):
        return False
    segment.end = SegmentEnd(segment.end.size_bytes, facts.next_offset)
    segment.largest = facts.largest
    state.active = ActiveSegment(
        segment,
        config=state.config,
        jitter_ms=state.jitter_ms(),
        now_ms=state.clock(),
        disk=state.disk,
        offset_image=facts.offset_image,
        time_image=facts.time_image,
        bytes_since_entry=facts.bytes_since_entry,
    )
    state.active.first_timestamp = _first_timestamp(state, segment)
    _load_producers(state, folder, end_offset=facts.next_offset)
    return True


def _first_timestamp(state: LogState, segment: Segment) -> int | None:
    read_at = segment.log_reader(state.files)
    for header in headers_from(read_at, 0, end=segment.end.size_bytes):
        return header.max_timestamp
    return None


def _load_producers(state: LogState, folder: LogFolder, *, end_offset: int) -> None:
    """The newest snapshot, what came after it, and the batches that it could not hold."""
    state.producers = load_newest(
        state, folder.snapshots, at_most=end_offset, at_least=state.segments.bases[0]
    )
    replay(state, state.producers, end_offset=end_offset)
    if len(state.producers):
        segment = state.segments.items[-1]
        start = max(0, segment.end.size_bytes - READ_BACK_BYTES)
        assert segment.offsets is not None
        entry = segment.offsets.floor(column=1, target=start)
        read_at = segment.log_reader(state.files)
        position = entry[1] if entry else 0
        read_back(state.producers, headers_from(read_at, position, end=segment.end.size_bytes))


def replay(state: LogState, states: ProducerStates, *, end_offset: int) -> None:
    """Take in the batches in [states.end_offset, end_offset) by their headers."""
    segments = state.segments
    number = max(segments.number_of(states.end_offset), 0)
    for segment in segments.items[number:]:
        if segment.base_offset >= end_offset:
            break
        read_at = segment.log_reader(state.files)
        for header in headers_from(read_at, 0, end=segment.end.size_bytes):
            if states.end_offset <= header.base_offset < end_offset:
                data = read_at(header.size_bytes, header.position) if header.is_control else b""
                take_batch(states, header, data, now_ms=state.clock())
    states.end_offset = max(states.end_offset, end_offset)


def take_batch(
    states: ProducerStates, header: BatchHeader, data: bytes, *, now_ms: int
) -> AbortedTxn | None:
    """Take in one batch; `data` is its bytes where it is a control batch. An abort is given
    back.
    """
    if not header.is_control:
        states.take_data_batch(header, now_ms=now_ms)
        return None
    marker = end_marker_of(data, parse_header(data))
    if marker is None:
        states.end_offset = header.next_offset
        return None
    done = states.take_marker(header, coordinator_epoch=marker.coordinator_epoch, now_ms=now_ms)
    return AbortedTxn(*done) if done and not marker.committed else None


# --- after a crash --------------------------------------------------------------------------------


class _Recovery:
    """One run over the segments that have to be checked."""

    def __init__(
        self, state: LogState, folder: LogFolder, request: OpenRequest, report: RecoveryReport
    ) -> None:
        self._state, self._folder, self._report = state, folder, report
        self._recovery_point, self._repair = request.recovery_point, request.repair
        self._rewrite = folder.went_offline

    def run(self) -> None:
        state = self._state
        items = state.segments.items
        first = next(
            (n for n, one in enumerate(items[:-1]) if one.end.next_offset > self._recovery_point),
            len(items) - 1,
        )
        if first and items[first - 1].end.next_offset == self._recovery_point:
            rebuild_indexes(state, items[first - 1])
        state.producers = load_newest(
            state,
            self._folder.snapshots,
            at_most=items[first].base_offset,
            at_least=state.segments.bases[0],
        )
        replay(state, state.producers, end_offset=items[first].base_offset)
        state.epochs.cut_end(items[first].base_offset)
        self._recover_all(items[first:])
        state.disk.sync_folder(state.folder)

    def _recover_all(self, items: tuple[Segment, ...]) -> None:
        for number, segment in enumerate(items):
            is_last = number == len(items) - 1
            if number and segment.base_offset not in self._folder.snapshots:
                write_snapshot(self._state, segment.base_offset)
                self._folder.snapshots.add(segment.base_offset)
            limit = None if is_last else items[number + 1].base_offset
            plan, cut = self._check(segment, limit)
            if is_last or cut:
                self._drop(items[number + 1 :])
                self._activate(segment, plan)
                return
            write_indexes(self._state, segment, plan)
            self._sync_log(segment)

    def _check(self, segment: Segment, limit: int | None) -> tuple[IndexPlan, bool]:
        """Check every batch; the indexes that they make, and whether the file was cut."""
        state = self._state
        plan = IndexPlan(segment.base_offset, interval_bytes=state.config.index_interval_bytes)
        aborted: list[AbortedTxn] = []
        position, next_offset, reason = 0, segment.base_offset, ""
        read_at = reader_of(state.files, segment.path(LOG))
        try:
            for checked in _batches_in_order(segment, read_at):
                header = checked.header
                self._check_overlap(segment, header, limit)
                abort = self._take(plan, checked)
                if abort:
                    aborted.append(abort)
                position, next_offset = header.position + header.size_bytes, header.next_offset
        except CorruptBatch as bad:
            reason = bad.detail
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

    def _take(self, plan: IndexPlan, checked: CheckedBatch) -> AbortedTxn | None:
        header = checked.header
        plan.take(
            position=header.position,
            size_bytes=header.size_bytes,
            last_offset=header.last_offset,
            max_timestamp=header.max_timestamp,
        )
        self._state.epochs.note(header.leader_epoch, header.base_offset)
        data = b""
        if header.is_control:
            data = checked.chunk[checked.start : checked.start + header.size_bytes]
        return take_batch(self._state.producers, header, data, now_ms=self._state.clock())

    def _tail_is_lost(self, next_offset: int, limit: int) -> bool:
        """Whether a segment lacks its end: a crash can keep a later file and lose an earlier one's.

        Compaction leaves such gaps too, but only in what it flushed.
        """
        flushed = limit <= self._recovery_point or self._state.config.compacts
        return next_offset < limit and not flushed

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
        if next_offset < self._recovery_point and not self._repair:
            raise CorruptBatch(
                f"{reason}; everything below offset {self._recovery_point} had been flushed, so "
                "this is not what a crash leaves, and cutting here would lose records: "
                "`tierlog storage repair` shows what can be done",
                file=str(path),
                position=position,
                offset=next_offset,
            )
        report = self._report
        report.cut_file, report.cut_position, report.cut_reason = str(path), position, reason
        report.cut_bytes += segment.end.size_bytes - position
        fd = self._state.disk.open(path, os.O_RDWR)
        try:
            self._state.disk.truncate(fd, position)
        finally:
            os.close(fd)

    def _drop(self, items: tuple[Segment, ...]) -> None:
        """Remove the segments behind a cut: what they continue is gone."""
        for segment in items:
            self._report.removed_segments.append(segment.base_offset)
            self._report.cut_bytes += segment.end.size_bytes
            self._folder.remove_segment(segment.base_offset)
        state = self._state
        kept = tuple(one for one in state.segments.items if one not in items)
        state.segments = Segments.of(kept)

    def _activate(self, segment: Segment, plan: IndexPlan) -> None:
        state = self._state
        for suffix in (OFFSET_INDEX, TIME_INDEX):
            state.disk.unlink(segment.path(suffix))
        offset_image = b"".join(OFFSET_ENTRY.pack(*entry) for entry in plan.offset_entries)
        time_image = b"".join(TIME_ENTRY.pack(*entry) for entry in plan.time_entries)
        state.active = ActiveSegment(
            segment,
            config=state.config,
            jitter_ms=state.jitter_ms(),
            now_ms=state.clock(),
            disk=state.disk,
            bytes_since_entry=plan.bytes_since_entry,
        )
        state.active.restore_indexes(offset_image, time_image)
        state.active.first_timestamp = _first_timestamp(state, segment)
        self._sync_log(segment)

    def _sync_log(self, segment: Segment) -> None:
        """Flush the bytes; write them anew first where the page cache is not to be trusted."""
        fd = self._state.disk.open(segment.path(LOG), os.O_RDWR)
        try:
            if self._rewrite:
                self._rewrite_bytes(fd, segment.end.size_bytes)
            self._state.disk.sync_bytes(fd)
        finally:
            os.close(fd)

    def _rewrite_bytes(self, fd: int, size_bytes: int) -> None:
        """The same bytes at the same places: pages that a failed sync left clean are dirty
        again.
        """
        for position in range(0, size_bytes, REWRITE_CHUNK_BYTES):
            data = os.pread(fd, min(REWRITE_CHUNK_BYTES, size_bytes - position), position)
            self._state.disk.write_at(fd, [data], position)
            self._report.rewritten_bytes += len(data)


def _batches_in_order(segment: Segment, read_at: ReadAt) -> Iterator[CheckedBatch]:
    """The good batches of a file from its start. Raises CorruptBatch behind the last of them.

    The base offset has no checksum: a batch that leaves a gap is believed only once the next one
    goes on behind it. Where the next goes on before the gap, the one with the gap is bad.
    """
    held: CheckedBatch | None = None
    next_offset, leaves_gap = segment.base_offset, False
    problem: CorruptBatch | None = None
    try:
        for checked in checked_batches(read_at, end=segment.end.size_bytes):
            header = checked.header
            if header.base_offset < next_offset:
                problem = CorruptBatch(f"offset {header.base_offset} comes after {next_offset - 1}")
                held = None if leaves_gap else held
                break
            if header.last_offset - segment.base_offset > MAX_RELATIVE_OFFSET:
                problem = CorruptBatch(f"offset {header.last_offset} does not fit the segment")
                break
            if held:
                yield held
            held, leaves_gap = checked, header.base_offset > next_offset
            next_offset = header.next_offset
    except CorruptBatch as bad:
        problem = bad
    if held:
        yield held
    if problem:
        raise problem
