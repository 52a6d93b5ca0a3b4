"""What a replicated log does beyond a log that stands alone. It is the log of a leader or of a
follower, and who leads is decided elsewhere (docs/cluster.md).

* `replicate` makes a log a follower's. `begin_term` and `end_term` bracket the time in which this
  broker leads: only within it are records appended that no other replica has.
* The high watermark is given (`commit_up_to`). It never goes back, and is never above what is
  flushed here: what every replica in sync has flushed, this one has too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from tierlog.host.file_slice import FileSlice, close_all
from tierlog.host.waiting import Wait
from tierlog.hot_tier import replica_append
from tierlog.hot_tier.cut import begin_anew_at, cut_log
from tierlog.hot_tier.log_reader import slice_of_segment
from tierlog.hot_tier.log_state import (
    FetchProducerSnapshot,
    LogState,
    no_producer_snapshot,
    read_consistently,
)
from tierlog.hot_tier.log_writer import LogWriter
from tierlog.hot_tier.roll import roll


class ReplicaRead(NamedTuple):
    """Whole batches of one segment, up to `end_offset`, for a follower. It rolls at
    `segment_base_offset` first, also if there are none: then the log goes on there.
    """

    slices: tuple[FileSlice, ...]
    segment_base_offset: int
    end_offset: int

    def close(self) -> None:
        close_all(self.slices)


class ReplicaLog:
    """The replica's side of one log. Thread-safe. `PartitionLog` has its methods as its own."""

    def __init__(self, state: LogState, writer: LogWriter) -> None:
        self._state, self._writer = state, writer

    def replicate(self, committed: int) -> None:
        """From now on it is a follower's log. Everything below `committed` is committed, and so is
        what lies below the log's start: only that is deleted.
        """
        state = self._state
        with state.lock:
            assert committed <= state.flushed.offset, "what is committed is flushed"
            assert state.committed is None, "it is replicated already"
            state.committed = max(committed, state.local_log_start_offset)
            state.is_follower = True

    def commit_up_to(self, offset: int) -> None:
        """Raise the high watermark to `offset`; no effect if it is there already."""
        state = self._state
        with state.lock:
            assert state.committed is not None, "the high watermark is that of a replicated log"
            assert offset <= state.flushed.offset, "what is committed is flushed"
            if offset <= state.committed:
                return
            state.committed = offset
            state.ended = tuple(one for one in state.ended if one.marker_offset >= offset)
        self._writer.tell_high_watermark(offset)

    def begin_term(self, epoch: int) -> None:
        """Lead under `epoch`: begin a segment (R11), and accept what only a leader appends. Nothing
        is cut (R8). Raises DiskFull (it does not lead then), LogOfflineError.
        """
        state = self._state
        with state.lock:
            assert state.committed is not None, "only a replicated log has terms"
            assert state.is_follower, "the last term has ended"
            assert epoch > state.leader_epoch, "a new leader has a new epoch"
            roll(state)
            state.leader_epoch, state.is_follower = epoch, False

    def end_term(self) -> None:
        """Lead no more. Returns after the last append of the term: later ones fail with
        LeaderChanged.
        """
        with self._state.lock:
            self._state.is_follower = True

    # --- a leader's side --------------------------------------------------------------------------

    def read_for_replica(
        self, offset: int, *, max_bytes: int, end_offset: int | None = None, wait: Wait = Wait.WAIT
    ) -> ReplicaRead:
        """The batches from `offset` up to `end_offset` (default: the log's end, flushed or not), of
        one segment: at least one if there is one. Raises OffsetTrimmed (below the first local
        segment; the log start does not matter), OffsetPastEnd, CorruptDataError, WouldBlock.
        """
        read = partial(_read, self._state, offset, end_offset, max_bytes=max_bytes, wait=wait)
        return read_consistently(self._state, read, wait)

    # --- a follower's side ------------------------------------------------------------------------

    def append_replicated(
        self, body: memoryview, producers_at: FetchProducerSnapshot = no_producer_snapshot
    ) -> int:
        """As `replica_append` says."""
        with self._writer.flush_lock if self._state.is_empty else nullcontext():
            end_offset = replica_append.append_replicated(self._state, body, producers_at)
        if self._writer.on_appended:
            self._writer.tell_appended()
        return end_offset

    def roll_at(self, base_offset: int) -> None:
        """As `replica_append` says."""
        replica_append.roll_at(self._state, base_offset)

    def cut(self, offset: int, save_recovery_point: Callable[[], None]) -> None:
        """As `cut_log` says."""
        with self._writer.flush_lock:
            cut_log(self._state, offset, save_recovery_point)

    def begin_anew_at(
        self, offset: int, producers: bytes | None, save_recovery_point: Callable[[], None]
    ) -> None:
        """As `cut.begin_anew_at` says."""
        with self._writer.flush_lock:
            begin_anew_at(self._state, offset, producers, save_recovery_point)


def _read(
    state: LogState, offset: int, end_offset: int | None, *, max_bytes: int, wait: Wait
) -> ReplicaRead:
    segments = state.segments
    end_offset = state.log_end_offset if end_offset is None else end_offset
    number = segments.number_of(offset)
    if number < 0:
        raise state.offsets.trimmed(f"offset {offset} is below the first local segment")
    if offset > end_offset:
        raise state.offsets.past_end(f"offset {offset} is above the log end {end_offset}")
    for segment in segments.items[number:]:
        found = slice_of_segment(
            state, segment, offset, max_bytes=max_bytes, end_offset=end_offset, wait=wait
        )
        if found is not None:
            return ReplicaRead((found[0],), segment.base_offset, found[1])
    return ReplicaRead((), segments.bases[-1], end_offset)
