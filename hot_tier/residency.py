"""Whether bytes can be read without waiting for a disk. Where the system cannot tell the answer is
no: the caller then reads on a thread that may wait.
"""

from __future__ import annotations

from typing import Final

from hot_tier.file_names import LOG
from hot_tier.log_state import LogState
from record_format.file_slice import OpenFile
from record_format.page_cache import pread_nowait

PROBE_BYTES: Final = 1


def is_resident(state: LogState, offset: int, *, max_bytes: int = 1) -> bool:
    """Whether a read needs no disk: the index of its one segment is in memory, the file open, and
    the pages of the headers where it begins and ends are in the cache.
    """
    segments = state.segments
    number = segments.number_of(offset)
    if number < 0:
        return False
    segment, is_last = segments.items[number], number == len(segments.items) - 1
    size_bytes, next_offset = segment.end
    if offset >= next_offset:
        return is_last  # nothing to read
    known, entry = segment.known_offset_entry(
        state.files, column=0, target=segment.relative(offset)
    )
    file = state.files.opened(segment.name(LOG))
    if not known or (file is None and not is_last):
        return False
    file = file or state.files.open(segment.name(LOG))
    position = entry[1] if entry else 0
    if not bytes_are_resident(file, position, min(size_bytes - position, PROBE_BYTES)):
        return False
    stop = position + max_bytes
    if stop >= size_bytes:
        return is_last  # the read may go on in the next segment
    return bytes_are_resident(file, stop, PROBE_BYTES)


def bytes_are_resident(file: OpenFile, position: int, size_bytes: int) -> bool:
    """Whether all of them can be had without waiting; they are read to find out."""
    try:
        return len(pread_nowait(file.fd, size_bytes, position)) == size_bytes
    except OSError:
        return False
