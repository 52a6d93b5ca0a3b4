"""File operations on a log that nobody has open: splitting it in two, as a take-over does with
records that diverged from the bucket; looking at what recovery would do.

* The log must be opened with recovery afterwards, which rebuilds indexes, epochs and producers from
  the segments that are left.
* A new file is complete and synced before the old one is truncated, so every step may be repeated
  after a crash. `finish_interrupted_split` completes a split before the log is opened.
* `split_at` deletes only indexes, which are rebuilt. `replace_with_empty` is for logs whose records
  are in the other tier.
* `OverlayDisk` writes to a folder of symbolic links that is opened like the log, and leaves the
  original files unchanged. Links are renamed and unlinked like files; a file that is written in
  place is copied first. A `.log` is never copied: writes to it and truncations are dropped, because
  nobody reads a log past the end that its owner knows. Nothing is synced.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

from tierlog.host.disk import Disk
from tierlog.host.durable_file import REAL_DISK, copy_durably, write_durably
from tierlog.host.file_slice import OpenFile
from tierlog.hot_tier.batch_walk import CheckedBatch, end_offset_of, headers_of
from tierlog.hot_tier.log_folder import (
    LEADER_EPOCHS,
    LOG,
    OFFSET_INDEX,
    PARTITION_METADATA,
    SNAPSHOT,
    TIME_INDEX,
    TRANSACTION_INDEX,
    LogFolder,
    path_of,
    segment_files,
)
from tierlog.hot_tier.open_files import FileReader, Pread, zero_filling_pread
from tierlog.hot_tier.salvage import LostRange, SalvageScan
from tierlog.record_format.batch import BatchHeader, Buffer
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET


def base_offsets(folder: Path) -> list[int]:
    """The base offsets of the segments, in order; none if there is no folder."""
    found = segment_files(folder) if folder.is_dir() else ()
    return [name.offset for name, _ in found if name.suffix == LOG and not name.stage]


def split_at(folder: Path, offset: int) -> int:
    """Split the segment that contains `offset`, so that a segment begins at `offset` or with the
    batch that contains it. Returns the base offset of the segment that was split, or `offset` if no
    split was needed. Raises CorruptBatch, OSError.
    """
    bases = [base for base in base_offsets(folder) if base < offset]
    if not bases:
        return offset
    old = path_of(folder, bases[-1], LOG)
    first = first_batch_at(old, offset)
    if first is None or first.position == 0:
        return offset
    begins = min(first.base_offset, offset)  # compaction may have removed the batch at `offset`
    copy_tail(old, first.position, path_of(folder, begins, LOG), pread=os.pread)
    _cut(folder, bases[-1], first.position)
    return bases[-1]


def end_offset(folder: Path) -> int:
    """Next offset after the last whole batch, or the base offset of the last segment; 0 without
    one.
    """
    bases = base_offsets(folder)
    if not bases:
        return 0
    log = path_of(folder, bases[-1], LOG)
    return end_offset_of(log, bases[-1], pread=zero_filling_pread(os.pread))


def reached_offset(folder: Path) -> int:
    """As `end_offset`, but after the last whole batch behind corrupt bytes."""
    reached = end_offset(folder)
    for base in base_offsets(folder)[-1:]:
        log = path_of(folder, base, LOG)
        for piece in _sound_pieces(log, base):
            if not isinstance(piece, LostRange):
                reached = max(reached, piece.header.next_offset)
    return reached


def first_batch_at(log: Path, offset: int) -> BatchHeader | None:
    """The batch of a `.log` that contains `offset`, or the first above it. Raises CorruptBatch."""
    with closing(headers_of(log)) as headers:
        return next((header for header in headers if header.last_offset >= offset), None)


def locate_cut(log: Path, offset: int, *, base_offset: int) -> tuple[int, int]:
    """Where to cut a `.log` at `offset`, which is above its base offset: the position (the end of
    the file if nothing is at or above `offset`), and the offset at which the part after the cut
    begins.

    Corrupt bytes, or a corrupt base offset, do not hide the batches after them. Those after the
    last batch below `offset` belong to the part after the cut; whoever opens it deals with them.
    """
    try:
        headers = _gapless_headers(log, base_offset)
        first = next((header for header in headers if header.last_offset >= offset), None)
        position = first.position if first is not None else log.stat().st_size
    except CorruptBatch:
        first, position = _first_batch_skipping_corruption(log, offset, base_offset=base_offset)
    if first is not None and first.base_offset <= offset:
        return first.position, first.base_offset
    return position, offset  # compaction may have removed the offsets between


def _gapless_headers(log: Path, base_offset: int) -> Iterator[BatchHeader]:
    """Raises CorruptBatch also at a gap: what comes after it may be a batch whose own base offset,
    which no checksum covers, is wrong.
    """
    next_offset = base_offset
    for header in headers_of(log, pread=zero_filling_pread(os.pread)):
        if header.base_offset != next_offset:
            raise CorruptBatch("leaves a gap", position=header.position)
        next_offset = header.next_offset
        yield header


def _first_batch_skipping_corruption(
    log: Path, offset: int, *, base_offset: int
) -> tuple[BatchHeader | None, int]:
    """As `first_batch_at`; also returns the position where the batches below `offset` end."""
    position = 0
    for piece in _sound_pieces(log, base_offset):
        if isinstance(piece, LostRange):
            continue
        if piece.header.last_offset >= offset:
            return piece.header, position
        position = piece.header.end_position
    return None, position


def _sound_pieces(log: Path, base_offset: int) -> Iterator[CheckedBatch | LostRange]:
    with closing(FileReader(OpenFile(log), zero_filling_pread(os.pread))) as reader:
        yield from SalvageScan(
            reader,
            size_bytes=log.stat().st_size,
            start_offset=base_offset,
            end_offset=base_offset + MAX_RELATIVE_OFFSET + 1,
            reaches_end=False,
        )


def finish_interrupted_split(folder: Path) -> None:
    """Truncate a segment that overlaps the next one, which an interrupted split created."""
    for base, following in pairwise(base_offsets(folder)):
        try:
            for header in headers_of(path_of(folder, base, LOG)):
                if header.base_offset >= following:
                    _cut(folder, base, header.position)
                    break
        except CorruptBatch:
            continue  # recovery deals with it


def move_segments(folder: Path, offset: int, target: Path) -> None:
    """Move the segments from `offset` on, which must be a base offset, to the folder `target`.

    The last one is moved first, so that a crash leaves a log without a gap.
    """
    target.mkdir(exist_ok=True)
    REAL_DISK.sync_folder(target.parent)
    for kept in (PARTITION_METADATA, LEADER_EPOCHS):
        source, copied = folder / kept, target / kept
        if source.exists() and not copied.exists():
            write_durably(copied, source.read_bytes())
    for name, path in reversed(segment_files(folder)):
        # The producers before `offset` belong to what stays.
        if name.offset > offset or (name.offset == offset and name.suffix != SNAPSHOT):
            REAL_DISK.rename(path, target / path.name)
    REAL_DISK.sync_folder(target)
    REAL_DISK.sync_folder(folder)


def replace_with_empty(folder: Path, offset: int, *, snapshot: bytes | None) -> None:
    """Remove every segment and create an empty one at `offset`, with this producer snapshot."""
    for _, path in segment_files(folder):
        REAL_DISK.unlink(path)
    if snapshot:
        write_durably(path_of(folder, offset, SNAPSHOT), snapshot)
    write_durably(path_of(folder, offset, LOG), b"")


def copy_tail(source: Path, position: int, target: Path, *, pread: Pread) -> None:
    """Copy the bytes from `position` on, read by `pread`, to the file `target`, which appears
    complete or not at all.
    """
    copy_durably(source, target, start=position, pread=pread)


def _cut(folder: Path, base_offset: int, position: int) -> None:
    for suffix in (OFFSET_INDEX, TIME_INDEX, TRANSACTION_INDEX):
        REAL_DISK.unlink(path_of(folder, base_offset, suffix))
    fd = REAL_DISK.open(path_of(folder, base_offset, LOG), os.O_RDWR)
    try:
        REAL_DISK.truncate(fd, position)
        REAL_DISK.sync_bytes(fd)
    finally:
        os.close(fd)
    REAL_DISK.sync_folder(folder)


def link_files(source: Path, target: Path) -> None:
    """Create the folder `target` with a link to each file of `source`."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".tmp":  # overwritten or removed by the open
            (target / path.name).symlink_to(path.resolve())


@contextmanager
def with_swaps_finished(folder: Path) -> Iterator[Path]:
    """An overlay of a closed log's folder as the next open would leave it, with an interrupted swap
    finished. Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix="tierlog-log-") as made:
        place = Path(made) / folder.name
        link_files(folder, place)
        LogFolder.open(place, disk=OverlayDisk())
        yield place


class OverlayDisk(Disk):
    """Copies a link's target before the first write in place; see the module."""

    def open(self, path: Path, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and path.is_symlink():
            if path.suffix == LOG:
                return super().open(path, os.O_RDONLY)
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        return super().open(path, flags)

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        if _is_read_only(fd):
            return sum(map(len, buffers))
        return super().write_at(fd, buffers, position)

    def truncate(self, fd: int, size_bytes: int) -> None:
        if not _is_read_only(fd):
            super().truncate(fd, size_bytes)

    def reserve(self, fd: int, size_bytes: int) -> None:
        if not _is_read_only(fd):
            super().reserve(fd, size_bytes)

    def sync_bytes(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


def _is_read_only(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
