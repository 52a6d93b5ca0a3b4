"""What one write will do to a log: the bytes and index entries of its segment, the producers, the
transactions that end.

* Memory changes only after the bytes were written, and then all of it. After a failed write the
  segment is as it was, or the log is offline.
* Nothing is checked here: a leader's appends and a follower's each have their own border.

Used under the log's lock.
"""

from __future__ import annotations

from tierlog.hot_tier.log_state import Ended, LogState
from tierlog.hot_tier.producer_state import Producer, aborted_by, after_batch, after_marker
from tierlog.hot_tier.roll import disk_error
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.index_layouts import AbortedTxn


class PlannedRecords:
    """See the module. `write` is the segment's part."""

    __slots__ = ("_aborted", "_ended", "_now_ms", "_producers", "_state", "write")

    def __init__(self, state: LogState, *, now_ms: int) -> None:
        """`now_ms` is from the log's monotonic clock."""
        self._state, self._now_ms = state, now_ms
        self.write = state.active.begin_write()
        self._producers: dict[int, Producer] = {}  # as they will be after the write
        self._aborted: list[AbortedTxn] = []
        self._ended: list[Ended] = []

    def find_producer(self, producer_id: int) -> Producer | None:
        return self._producers.get(producer_id) or self._state.producers.get(producer_id)

    def note_producer(self, header: BatchHeader, marker: EndMarker | None) -> None:
        """The producer's next batch, with its final offsets; `marker`: it ends a transaction."""
        known = self.find_producer(header.producer_id)
        if marker is None:
            self._producers[header.producer_id] = after_batch(known, header)
            return
        self._producers[header.producer_id] = after_marker(known, header, marker)
        if known is None or not known.is_in_transaction:
            return
        self._ended.append(Ended(known.transaction_first_offset, header.last_offset))
        others = self._first_unstable_beside(header.producer_id)
        if (aborted := aborted_by(marker, header, known, still_open=others)) is not None:
            self._aborted.append(aborted)

    def _first_unstable_beside(self, producer_id: int) -> int | None:
        """The first offset of the oldest transaction of another producer, after the write."""
        known = self._state.producers.open_transactions.keys() | self._producers.keys()
        others = map(self.find_producer, known - {producer_id})
        return min(
            (one.transaction_first_offset for one in others if one and one.is_in_transaction),
            default=None,
        )

    def write_records(self) -> TierlogError | None:
        """Write what is planned, and make memory match; or the error, and nothing has changed."""
        state, write = self._state, self.write
        try:
            state.active.write_planned(write, now_ms=self._now_ms)
        except OSError as error:
            return self._on_write_failure(error)
        state.appended_bytes += write.end.size_bytes - write.start.size_bytes
        state.appended_records += write.end.next_offset - write.start.next_offset
        if self._ended:
            state.active.segment.add_aborted(self._aborted)  # before its records are stable
            state.add_ended(self._ended)
        for producer in self._producers.values():
            state.producers.put_producer(producer)
        return None

    def _on_write_failure(self, error: OSError) -> TierlogError:
        failure = disk_error(self._state, error)
        if self._state.offline is None:
            try:
                self._state.active.drop_tail()
            except OSError as worse:
                failure = self._state.go_offline(worse)
        return failure
