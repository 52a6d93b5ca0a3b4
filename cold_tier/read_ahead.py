"""How far to read ahead of whom: pure bookkeeping, no I/O.

* A read that begins where an earlier one of the same partition ended is sequential: the window
  doubles with each such read, up to the limit. Any other read has no window: random readers cost
  nothing more.
* Who reads is not known and need not be: two readers at one place share what is read ahead.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

WINDOW_MAX: Final = 6
STREAMS_MAX: Final = 4096


class ReadAhead:
    def __init__(self, *, window_max: int = WINDOW_MAX, streams_max: int = STREAMS_MAX) -> None:
        self._window_max, self._streams_max = window_max, streams_max
        self._lock = threading.Lock()
        self._windows: OrderedDict[tuple[str, int], int] = OrderedDict()

    def window(self, folder: str, offset: int) -> int:
        """How many chunks to read ahead of a read that begins at `offset`."""
        with self._lock:
            return self._windows.get((folder, offset), 0)

    def note(self, folder: str, next_offset: int, *, window: int) -> None:
        """A read with this window ended at `next_offset`."""
        with self._lock:
            self._windows[folder, next_offset] = min(self._window_max, max(1, window * 2))
            self._windows.move_to_end((folder, next_offset))
            if len(self._windows) > self._streams_max:
                self._windows.popitem(last=False)
