"""Prefetches the chunks that a reader will need next, including those of following segments.

* The chunk that is needed now is requested first, so that no speculative request delays it.
* All chunks that this read itself needs are requested together; how much further to go is decided
  by `ReadAhead`.
* Errors are not reported here: the reader will encounter them.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

from tierlog.cold_tier.chunk_fills import ChunkFills
from tierlog.cold_tier.segment_indexes import SegmentIndex, SegmentIndexes
from tierlog.host.threads import Threads
from tierlog.host.waiting import WouldBlock
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.segment_entry import SegmentEntry

SEGMENTS_AHEAD: Final = 2
TASKS_AHEAD: Final = 32
WINDOW_MAX: Final = 6
STREAMS_MAX: Final = 4096

ChunkId = tuple[str, int]
"""The log's key, and the chunk's number in it."""


class ReadAheadState(NamedTuple):
    """`window`: how many chunks to read ahead of `chunk`; `is_complete`: all were requested."""

    window: int = 0
    chunk: ChunkId | None = None
    is_complete: bool = False


NOT_SEQUENTIAL: Final = ReadAheadState()


class ReadAhead:
    """The windows of sequential readers: bookkeeping without I/O.

    * A read that starts where an earlier read of the same partition ended is sequential: its window
      doubles with each chunk that it enters, up to the limit. Any other read has no window, so
      random reads cause no extra requests.
    * Once the whole window has been requested, nothing more is until the reader enters another
      chunk, so that small reads do not repeat the same requests.
    * Readers are not identified: two readers at the same position share what is read ahead.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: OrderedDict[tuple[str, int], ReadAheadState] = OrderedDict()

    def state_at(self, folder: str, offset: int, *, chunk: ChunkId) -> ReadAheadState:
        """The state for a read that starts at `offset`, which lies in `chunk`."""
        known = self._states.get((folder, offset))
        if known is None:
            return NOT_SEQUENTIAL
        if known.chunk == chunk:
            return known
        return ReadAheadState(min(WINDOW_MAX, max(1, known.window * 2)), chunk)

    def record(self, folder: str, next_offset: int, state: ReadAheadState) -> None:
        """Record that a read ended at `next_offset` in this state."""
        with self._lock:
            self._states[folder, next_offset] = state
            self._states.move_to_end((folder, next_offset))
            if len(self._states) > STREAMS_MAX:
                self._states.popitem(last=False)


class Prefetcher:
    def __init__(self, fills: ChunkFills, indexes: SegmentIndexes) -> None:
        self._fills, self._indexes = fills, indexes
        self._read_ahead = ReadAhead()
        self._pool = Threads(SEGMENTS_AHEAD, name="cold-ahead")
        self._slots = threading.BoundedSemaphore(TASKS_AHEAD)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(
        self,
        segment: SegmentEntry,
        index: SegmentIndex,
        offset: int,
        *,
        max_bytes: int,
        following: Iterable[SegmentEntry],
    ) -> ReadAheadState:
        """Start to fetch what a read of `max_bytes` from `offset` needs. Returns the state to pass
        to `finish`.
        """
        number = index.table.index_of(offset)
        current = (segment.log_key, number)
        state = self._read_ahead.state_at(_folder_of(segment.log_key), offset, chunk=current)
        window, needed = state.window, _chunks_needed(index, number, max_bytes=max_bytes)
        if needed <= window and (not window or state.is_complete):
            return state
        end = min(number + 1 + max(window, needed), len(index.chunks))
        requested = [self._fills.prefetch(chunk) for chunk in index.chunks[number:end]]
        beyond = number + 1 + window - end
        if beyond > 0:
            requested.append(self._prefetch_beyond(following, beyond))
        return ReadAheadState(window, current, is_complete=all(requested))

    def finish(self, segment: SegmentEntry, next_offset: int, state: ReadAheadState) -> None:
        """Note that the read ended at `next_offset`."""
        self._read_ahead.record(_folder_of(segment.log_key), next_offset, state)

    def _prefetch_beyond(self, following: Iterable[SegmentEntry], chunks: int) -> bool:
        if not self._slots.acquire(blocking=False):
            return False
        try:
            self._pool.submit(self._fetch_beyond, iter(following), chunks)
        except RuntimeError:  # which a pool that was shut down raises
            self._slots.release()
            return False
        return True

    def _fetch_beyond(self, following: Iterator[SegmentEntry], chunks: int) -> None:
        try:
            with suppress(TierlogError, WouldBlock):
                for segment in islice(following, SEGMENTS_AHEAD):
                    index = self._indexes.load_index(segment)
                    for chunk in index.chunks[:chunks]:
                        self._fills.prefetch(chunk)
                    chunks -= len(index.chunks)
                    if chunks <= 0:
                        return
        finally:
            self._slots.release()


def _folder_of(log_key: str) -> str:
    """The partition's segments folder, which sequential reads have in common."""
    return log_key.rpartition("/")[0]


def _chunks_needed(index: SegmentIndex, number: int, *, max_bytes: int) -> int:
    """How many chunks after this one the read continues to: until it has half of `max_bytes`."""
    chunks = index.chunks
    size_bytes = count = 0
    while number + count < len(chunks) - 1:
        size_bytes += chunks[number + count].size_bytes
        if size_bytes * 2 > max_bytes:
            break
        count += 1
    return count
