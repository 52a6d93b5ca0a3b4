"""The open files of a log for callers that must not block: whatever would need the disk raises
BlockingIOError, and a thread that may block repeats the call.

On systems that cannot tell what is in the page cache, every read raises it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hot_tier.file_names import LOG
from hot_tier.index_cache import IndexCache
from hot_tier.log_state import LogState
from record_format.file_slice import OpenFile
from record_format.page_cache import pread_nowait


class NonBlockingFiles:
    """Replaces `OpenFiles` in a look-up."""

    pread: Final = staticmethod(pread_nowait)

    def __init__(self, state: LogState) -> None:
        self._state = state

    @property
    def indexes(self) -> IndexCache:
        return self._state.files.indexes

    def open(self, path: Path | str) -> OpenFile:
        """A file that is already open, or the active segment's, which is opened: it was just
        written.

        Raises BlockingIOError for any other.
        """
        files = self._state.files
        file = files.get(path)
        if file is None:
            if path != self._state.active.segment.name(LOG):
                raise BlockingIOError(f"{path} is not open")
            file = files.open(path)
        return file
