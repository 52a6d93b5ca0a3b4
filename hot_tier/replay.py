"""Producer state out of the batches of a log, as appending them had made it."""

from __future__ import annotations

from hot_tier.batch_walk import headers_from
from hot_tier.log_state import LogState
from hot_tier.producer_state import ProducerStates
from record_format.batch import BatchHeader, parse_header
from record_format.control import end_marker_of
from record_format.index_layouts import AbortedTxn


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
