"""Rebuilding producer state from the batches of a log."""

from __future__ import annotations

from tierlog.hot_tier.batch_walk import batch_of
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.producer_state import REMEMBERED_BATCHES, ProducerStates
from tierlog.record_format.batch import BatchHeader, parse_header
from tierlog.record_format.control import end_marker_of
from tierlog.record_format.header_run import HeaderRun
from tierlog.record_format.index_layouts import AbortedTxn


def replay(state: LogState, states: ProducerStates, *, end_offset: int) -> list[AbortedTxn]:
    """Apply the batches in [states.end_offset, end_offset) by their headers; returns the
    transactions that they abort. Raises CorruptBatch.
    """
    segments, aborted = state.segments, []
    number = max(segments.number_of(states.end_offset), 0)
    for segment in segments.items[number:]:
        if segment.base_offset >= end_offset:
            break
        log = segment.log_reader(state.files)
        for header in segment.headers(state.files):
            if states.end_offset <= header.base_offset < end_offset:
                data = batch_of(log, header) if header.is_control else b""
                if (abort := apply_batch(states, header, data)) is not None:
                    aborted.append(abort)
    states.end_offset = max(states.end_offset, end_offset)
    return aborted


def apply_batch(states: ProducerStates, header: BatchHeader, data: bytes) -> AbortedTxn | None:
    """Apply one batch; `data` is its bytes if it is a control batch. Returns the transaction that
    it aborts.
    """
    if not header.is_control:
        states.apply_data_batch(header)
        return None
    marker = end_marker_of(data, parse_header(data))
    if marker is None:
        states.end_offset = header.next_offset
        return None
    return states.apply_marker(header, marker)


class DeferredProducers:
    """Producers from runs of batches, applied late: only the last batches of each producer matter,
    whatever came before.
    """

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._headers: dict[int, list[bytes]] = {}

    def add(self, run: HeaderRun) -> None:
        headers = self._headers
        for producer_id, newer in run.remembered.items():
            older = headers.get(producer_id)
            if older and len(newer) < REMEMBERED_BATCHES:
                newer = [*older, *newer][-REMEMBERED_BATCHES:]
            headers[producer_id] = newer
        self._state.producers.end_offset = run.next_offset

    def apply(self) -> None:
        """Apply them; required before any other change to the states."""
        states = self._state.producers
        end_offset = states.end_offset
        for own in self._headers.values():
            for header in own:
                states.apply_data_batch(parse_header(header))
        states.end_offset = end_offset
        self._headers.clear()
