"""Whether bytes can be read without waiting for a disk.

Linux answers with preadv2(RWF_NOWAIT). Where that is not to be had the answer is no: the caller
then reads on a thread that may wait.
"""

from __future__ import annotations

import os
from typing import Final

from hot_tier.file_names import LOG
from hot_tier.log_state import LogState
from record_format.file_slice import OpenFile

PROBE_BYTES: Final = 1
NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)


def is_resident(state: LogState, offset: int) -> bool:
    """For the active segment: its index is in memory, and the page of the batch is in the cache."""
    segment = state.segments.items[-1]
    offsets = segment.offsets
    if offset < segment.base_offset or offsets is None:
        return False
    size_bytes, next_offset = segment.end
    if offset >= next_offset:
        return True  # nothing to read
    entry = offsets.floor(column=0, target=offset - segment.base_offset)
    file = state.files.open(segment.path(LOG))
    position = entry[1] if entry else 0
    return bytes_are_resident(file, position, min(size_bytes - position, PROBE_BYTES))


def bytes_are_resident(file: OpenFile, position: int, size_bytes: int) -> bool:
    """Whether preadv2 gives all of them without waiting; they are read to find out."""
    if not NOWAIT:
        return False
    buffer = bytearray(size_bytes)
    try:
        return os.preadv(file.fd, [buffer], position, NOWAIT) == size_bytes
    except OSError:  # EAGAIN: not in the cache; EOPNOTSUPP: a file system that cannot tell
        return False
