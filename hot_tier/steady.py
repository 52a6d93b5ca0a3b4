"""Looking at segments while compaction replaces them.

* A replaced segment's path names another file from then on, and a look-up takes several steps: what
  it found counts only if no replacement came in between; else it looks again.
* `LogState.replacements` is odd while files are being renamed, under the log's lock, and rises by
  two for each replacement. Renames and the sync of the folder take milliseconds; a look-up that
  meets them waits, if it may.
* A file that was opened before remains the same file: slices that were handed out stay good.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hot_tier.log_state import LogState
from record_format.errors import CorruptDataError, OffsetTrimmed, UnknownSegment

T = TypeVar("T")


def steady(state: LogState, look_up: Callable[[], T], *, waits: bool = True) -> T:
    """What `look_up` gives, or raises, while no replacement is under way. BlockingIOError if it may
    not wait for one to end.
    """
    while True:
        before = state.replacements
        if before % 2:
            if not waits:
                raise BlockingIOError(errno.EAGAIN, "segments are being replaced")
            with state.lock:
                continue
        try:
            found = look_up()
        except (CorruptDataError, OffsetTrimmed, UnknownSegment, FileNotFoundError):
            if state.replacements == before:
                raise
        else:
            if state.replacements == before:
                return found


@contextmanager
def replacing(state: LogState) -> Iterator[None]:
    """Files are renamed within it; under the log's lock."""
    state.replacements += 1
    try:
        yield
    finally:
        state.replacements += 1
