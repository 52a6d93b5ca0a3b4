"""How far to read ahead, and for which reader: pure bookkeeping, no I/O.

* A read that begins where an earlier one of the same partition ended is sequential: the window
  doubles with each chunk that such a reader comes to, up to the limit. Any other read has no
  window: random readers cost nothing more.
* What was asked for ahead is settled until the reader comes to another chunk: a reader that reads
  in small pieces does not ask for the same guesses each time.
* Readers are not identified and need not be: two readers at one place share what is read ahead.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, NamedTuple

WINDOW_MAX: Final = 6
STREAMS_MAX: Final = 4096

ChunkId = tuple[str, int]
"""Key of the log, and number."""


class Ahead(NamedTuple):
    """How many chunks to read ahead of a reader in `chunk`; `settled`: all of that is begun."""

    window: int = 0
    chunk: ChunkId | None = None
    settled: bool = False


NOT_SEQUENTIAL: Final = Ahead()


class ReadAhead:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._aheads: OrderedDict[tuple[str, int], Ahead] = OrderedDict()

    def before(self, folder: str, offset: int, *, chunk: ChunkId) -> Ahead:
        """For a read that begins at `offset`, in `chunk`; settled if nothing is left to do."""
        known = self._aheads.get((folder, offset))
        if known is None:
            return NOT_SEQUENTIAL
        if known.chunk == chunk:
            return known
        return Ahead(min(WINDOW_MAX, max(1, known.window * 2)), chunk)

    def note(self, folder: str, next_offset: int, *, done: Ahead) -> None:
        """A read that was read ahead of like this ended at `next_offset`."""
        with self._lock:
            self._aheads[folder, next_offset] = done
            self._aheads.move_to_end((folder, next_offset))
            if len(self._aheads) > STREAMS_MAX:
                self._aheads.popitem(last=False)
