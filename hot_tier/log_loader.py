"""What opening a log does with each state that a stop, a crash or a bad disk may have left.

| found | done |
|---|---|
| clean stop | nothing is checked but the tail of the last segment, from its last index entry on |
| clean stop, but the tail is not whole batches | as after a crash |
| segment wholly below the recovery point | trusted to its length |
| segment that ends exactly there | what its seal did may not have been synced: indexes are |
| | rebuilt, and what follows its last record (preallocated space) is cut off |
| segment above it, or the last | every batch checked (whole, CRC, offsets rise), indexes rebuilt |
| first bad byte above what is known to be flushed | the file is cut there, later segments go |
| first bad byte below that | refused (CorruptBatch): they had been flushed |
| segment above it that ends before the next begins (and no compaction, | later segments go |
| or no record after it) | |
| two segments that overlap | refused (CorruptDataError) |
| log ends below the recovery point | the point is lowered: `broker` decides whether it may be |
| index missing, short, unordered, garbage | rebuilt; below the recovery point at its first use |
| `.txnindex` empty, short, unordered, garbage | rebuilt from the batches at the open |
| snapshot missing or bad | an older one, and a longer replay; where the log begins, or none is |
| | left, the other tier's; rebuilt for an upload |
| `leader-epoch-checkpoint` missing or bad | rebuilt from the batches |
| the log had gone offline | what is above the recovery point is rewritten before it is flushed |

What is rebuilt if bad is also rebuilt if the disk cannot read it. A `.log` that it cannot read
takes the log offline.

Recovery flushes all that it keeps, and the folder, before anything is served. It runs before the
log is shared; no lock is taken.
"""

from __future__ import annotations

from hot_tier.clean_open import open_clean
from hot_tier.file_names import OFFLINE_MARKER
from hot_tier.index_rebuild import rebuild_transactions
from hot_tier.leader_epochs import LeaderEpochs
from hot_tier.log_folder import LogFolder
from hot_tier.log_state import Flushed, LogState, Segments
from hot_tier.producer_snapshots import load_newest
from hot_tier.recovery import OpenRequest, Recovery, RecoveryReport
from hot_tier.roll import create_segment
from hot_tier.segment import Segment, SegmentEnd
from hot_tier.transaction_index import read_entries
from record_format.errors import CorruptIndex, CorruptSnapshot


def load_log(state: LogState, folder: LogFolder, request: OpenRequest) -> RecoveryReport:
    """Fill `state` from the folder. Raises CorruptDataError (refused by name), OSError."""
    report = RecoveryReport(clean=request.clean)
    state.unmirrored = folder.unmirrored
    epochs_were_lost = not _load_epochs(state)
    if not folder.log_sizes:
        _start_empty(state, folder, request)
        return report
    _list_segments(state, folder)
    opened = request.clean and not folder.went_offline and open_clean(state, folder)
    if not opened:
        report.clean = False
        Recovery(state, folder, request, report).run()
    _check_transaction_indexes(state, folder)
    if epochs_were_lost and state.log_end_offset > state.segments.bases[0]:
        _epochs_from_batches(state)
    _settle(state, folder, request, report)
    return report


def _load_epochs(state: LogState) -> bool:
    """False if there is no good file, so that the batches have to tell."""
    try:
        state.epochs = LeaderEpochs.load(state.folder, disk=state.disk)
    except (FileNotFoundError, CorruptSnapshot):
        state.epochs = LeaderEpochs(state.folder, disk=state.disk)
    return bool(state.epochs.entries)


def _start_empty(state: LogState, folder: LogFolder, request: OpenRequest) -> None:
    start = max(request.start_offset, request.log_start_offset or 0)
    state.producers = load_newest(state, folder.snapshots, at_most=start, at_least=start)
    state.active = create_segment(state, start)
    state.segments = Segments.of((state.active.segment,))
    state.epochs.cut_end(start)
    state.epochs.save()
    state.log_start_offset = start if request.log_start_offset is None else request.log_start_offset
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


def _check_transaction_indexes(state: LogState, folder: LogFolder) -> None:
    """As Kafka does, at each open: a reader of committed records has nothing else to rely on."""
    for segment in state.segments.items:
        if segment.has_transactions and not _has_good_transactions(segment):
            rebuild_transactions(state, segment, folder.snapshots)


def _has_good_transactions(segment: Segment) -> bool:
    try:
        return bool(read_entries(segment))  # with nothing to say there is no file
    except CorruptIndex:
        return False


def _settle(
    state: LogState, folder: LogFolder, request: OpenRequest, report: RecoveryReport
) -> None:
    """What has to be done however the log was opened: offsets, epochs, snapshots, the last sync."""
    end_offset = state.log_end_offset
    entries = state.epochs.entries
    state.epochs.cut_end(end_offset)
    if state.epochs.entries != entries or not report.clean:
        state.epochs.save()
    state.leader_epoch = state.epochs.latest or 0
    first = state.segments.bases[0]
    start = first if request.log_start_offset is None else request.log_start_offset
    state.log_start_offset = start
    folder.drop_stray_snapshots(end_offset=end_offset)
    segment = state.active.segment
    state.flushed = Flushed(end_offset, segment.base_offset, segment.end.size_bytes)
    if folder.went_offline:
        state.disk.unlink(state.folder / OFFLINE_MARKER)


def _epochs_from_batches(state: LogState) -> None:
    state.epochs.cut_end(0)  # recovery noted those of the segments that it checked alone
    for segment in state.segments.items:
        for header in segment.headers(state.files):
            state.epochs.note(header.leader_epoch, header.base_offset)
    state.epochs.save()
