"""The read-ahead window of sequential readers: pure bookkeeping, no I/O.

* A read that starts where an earlier read of the same partition ended is sequential: its window
  doubles with each chunk that it enters, up to the limit. Any other read has no window, so random
  reads cause no extra requests.
* Once the whole window has been requested, nothing more is until the reader enters another chunk,
  so that small reads do not repeat the same requests.
* Readers are not identified: two readers at the same position share what is read ahead.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, NamedTuple

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
