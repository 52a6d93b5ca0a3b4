"""Lock-free reads of segments while compaction replaces them: a sequence lock.

* After a swap, a segment's path names another file, and a look-up takes several steps. Its result
  is valid only if no swap happened meanwhile; otherwise the look-up is retried.
* `LogState.swap_sequence` is odd while files are being renamed, under the log's lock, and increases
  by two with each swap. Renames and the sync of the folder take milliseconds; a look-up that starts
  during them waits, or raises WouldBlock.
* An open descriptor keeps naming the same file, so slices that were handed out stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tierlog.host.waiting import Wait
from tierlog.hot_tier.log_state import LogState
from tierlog.record_format.errors import CorruptDataError, OffsetTrimmed, UnknownSegment

T = TypeVar("T")


def read_consistently(state: LogState, look_up: Callable[[], T], wait: Wait = Wait.WAIT) -> T:
    """The result of `look_up`, or its error, from a run that no swap overlapped.

    Raises WouldBlock if a swap is in progress and the caller never waits.
    """
    while True:
        before = state.swap_sequence
        if before % 2:
            wait.before("segments are replaced")
            with state.lock:
                continue
        try:
            found = look_up()
        except (CorruptDataError, OffsetTrimmed, UnknownSegment, FileNotFoundError):
            if state.swap_sequence == before:
                raise
        else:
            if state.swap_sequence == before:
                return found


@contextmanager
def replacing_segments(state: LogState) -> Iterator[None]:
    """The write side: files are renamed inside the block, under the log's lock."""
    state.swap_sequence += 1
    try:
        yield
    finally:
        state.swap_sequence += 1
