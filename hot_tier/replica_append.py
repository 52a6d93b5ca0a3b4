"""What a follower appends: its leader's batches, byte for byte.

* The border is here: whole batches of version 2 with their checksums, offsets that begin at the
  log's end and rise (compaction may have left holes), leader epochs that do not go back, markers
  that can be read. What is not right raises CorruptBatch, and nothing changes.
* Nothing is stamped, and nothing decided: the follower rolls where its leader did (`roll_at`), and
  refuses no sequence.
* An epoch is in the checkpoint, durably, before its first record.
* The leader's segments may end in offsets that compaction left without a batch. Here a batch
  without records takes their place, as compaction itself leaves them: a gap between two segments
  would look like lost records to recovery.
* An empty log may begin at a log start in the middle of a batch. It begins with that batch instead,
  as Kafka's follower does (UnexpectedAppendOffsetException).
"""

from __future__ import annotations

from collections.abc import Sequence

from tierlog.hot_tier.batch_walk import check_in_order
from tierlog.hot_tier.log_state import FetchProducerSnapshot, LogState
from tierlog.hot_tier.planned_records import PlannedRecords
from tierlog.hot_tier.roll import disk_error, roll, truncate_fully_and_start_at
from tierlog.hot_tier.segment import MAX_SEGMENT_BYTES
from tierlog.record_format.batch import BatchHeader, Buffer, check_crc, parse_header
from tierlog.record_format.compaction import empty_batch
from tierlog.record_format.decode import EndMarker, end_marker_of
from tierlog.record_format.errors import CorruptBatch, InvalidBatch, TierlogError
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET


def append_replicated(
    state: LogState, body: memoryview, producers_at: FetchProducerSnapshot
) -> int:
    """Append whole batches as the leader has them; returns the log's end. They are not flushed. If
    the log is empty, no flush may run.

    Raises CorruptBatch (nothing was appended), DiskFull (nor then), LogOfflineError, and what
    `producers_at` raises: no answer does not mean that there are none.
    """
    try:
        headers = _checked_headers(body)
        markers = [_marker_of(body, header) for header in headers]
    except CorruptBatch as bad:
        raise bad.with_location(file=f"{state.name}, from its leader") from None
    with state.lock:
        _check_follows(state)
        if headers:
            _maybe_begin_with(state, headers[0], producers_at)
            _append_whole(state, body, headers, markers)
        return state.log_end_offset


def roll_at(state: LogState, base_offset: int) -> None:
    """Begin a segment where the leader's begins. No effect if the log is beyond: it was filled by
    another leader, whose segments began elsewhere. Raises DiskFull, LogOfflineError.
    """
    with state.lock:
        _check_follows(state)
        if base_offset < state.log_end_offset:
            return
        while (end := state.log_end_offset) < base_offset:
            _fill_hole(state, end, min(base_offset, end + MAX_RELATIVE_OFFSET))
        roll(state)


def _maybe_begin_with(
    state: LogState, first: BatchHeader, producers_at: FetchProducerSnapshot
) -> None:
    end = state.log_end_offset
    if state.is_empty and first.base_offset < end < first.next_offset:
        assert state.committed is not None, "only a replicated log has a leader"
        producers = producers_at(first.base_offset)
        state.committed = min(state.committed, first.base_offset)  # it has none of it yet
        truncate_fully_and_start_at(state, first.base_offset, producers)


def _check_follows(state: LogState) -> None:
    state.check_open()
    assert state.is_follower, "a leader's log has no other leader"


def _checked_headers(body: memoryview) -> list[BatchHeader]:
    headers, position = [], 0
    while position < len(body):
        header = parse_header(body, position)
        check_crc(body, header)
        headers.append(header)
        position = header.end_position
    return headers


def _marker_of(body: memoryview, header: BatchHeader) -> EndMarker | None:
    if not header.is_control:
        return None
    try:
        return end_marker_of(bytes(body[header.position : header.end_position]), header.at(0))
    except InvalidBatch as bad:
        raise CorruptBatch(str(bad), position=header.position, offset=header.base_offset) from None


def _append_whole(
    state: LogState,
    body: Buffer,
    headers: Sequence[BatchHeader],
    markers: Sequence[EndMarker | None],
) -> None:
    _check_continues(state, headers)
    try:
        failure = _write(state, body, headers, markers)
    except TierlogError:
        raise
    except Exception as bug:
        state.go_offline(bug)
        raise
    if failure is not None:
        raise failure


def _check_continues(state: LogState, headers: Sequence[BatchHeader]) -> None:
    """Raise CorruptBatch unless the batches continue the active segment."""
    segment = state.active.segment
    next_offset, latest = segment.end.next_offset, state.epochs.latest
    epoch = -1 if latest is None else latest
    end_offset = segment.base_offset + MAX_RELATIVE_OFFSET + 1
    try:
        for header in headers:
            check_in_order(header, next_offset=next_offset, end_offset=end_offset)
            if header.leader_epoch < epoch:
                raise CorruptBatch(
                    f"leader epoch {header.leader_epoch} follows {epoch}", position=header.position
                )
            next_offset, epoch = header.next_offset, header.leader_epoch
        if segment.end.size_bytes + headers[-1].end_position > MAX_SEGMENT_BYTES:
            raise CorruptBatch(f"more than {MAX_SEGMENT_BYTES} bytes are no segment")
    except CorruptBatch as bad:
        raise bad.with_location(file=f"{state.name}, from its leader", offset=next_offset) from None


def _write(
    state: LogState,
    body: Buffer,
    headers: Sequence[BatchHeader],
    markers: Sequence[EndMarker | None],
) -> TierlogError | None:
    records = PlannedRecords(state, now_ms=state.monotonic_clock())
    for header, marker in zip(headers, markers, strict=True):
        if marker is not None or (header.producer_id >= 0 and not header.is_control):
            records.note_producer(header, marker)
    # The leader has the records' least times, and whoever needs them here can read them.
    records.write.plan_batch(body, headers, min_timestamps=[None] * len(headers))
    try:
        for header in headers:
            if header.leader_epoch >= 0:
                state.epochs.assign(header.leader_epoch, header.base_offset)
    except OSError as error:
        failure: TierlogError | None = disk_error(state, error)
    else:
        failure = records.write_records()
    if failure is not None:
        state.epochs.truncate_from_end(state.log_end_offset)  # the next change writes them
        return failure
    state.leader_epoch = max(state.leader_epoch, headers[-1].leader_epoch)
    return None


def _fill_hole(state: LogState, start_offset: int, end_offset: int) -> None:
    if end_offset - 1 > state.active.segment.base_offset + MAX_RELATIVE_OFFSET:
        roll(state)
    epoch = state.epochs.latest
    filler = empty_batch(start_offset, end_offset, leader_epoch=-1 if epoch is None else epoch)
    _append_whole(state, filler.body, [filler.header], [None])
