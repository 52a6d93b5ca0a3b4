"""What lies behind the first bad bytes of a log, and where the bytes go that recovery cuts.

| behind the bad bytes                         | they are               | recovery                |
|----------------------------------------------|------------------------|-------------------------|
| nothing that continues the log               | the torn last write    | cuts                    |
| whole batches that continue it, and the bad  | a hole: a power failure| cuts: the batches after |
| bytes hold zeros where a sector was not      | lost pages before      | it waited for the same  |
| written                                      | later ones             | flush, so nobody was    |
|                                              |                        | told of them            |
| whole batches that continue it               | damage to whole batches| refuses                 |

* Batches continue the log if they check, their offsets and epochs rise from those before the bad
  bytes, and they lead to the end of the file. A record's value may hold a batch: what lies within
  the length that the bad batch claims counts only if that length is shown to be wrong.
* Zeros are no hole if one flipped bit explains the checksum: a value may be zeros too.
* What is cut is kept beside the log as `<20-digit offset>.log.cut`, once, until somebody deletes
  it; at most `KEPT_MAX_BYTES` a folder. A full disk keeps nothing: a start must not need room.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Final, NamedTuple

from tierlog.host.disk import Disk, is_disk_full
from tierlog.host.durable_file import copy_durably
from tierlog.hot_tier.batch_walk import LogBytes, checked_batches
from tierlog.hot_tier.log_folder import CUT, path_of
from tierlog.record_format.batch import CRC_START, HEADER_SIZE, LOG_OVERHEAD, MAGIC, parse_header
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptBatch

SEARCH_BYTES: Final = 1 << 20
MAGIC_POSITION: Final = 16
SECTOR_BYTES: Final = 512
HOLE_BYTES: Final = 64  # zeros up to the end of a sector
HOLE_MIN_BYTES: Final = MAGIC_POSITION + 1  # no batch begins with as many zeros
FLIP_MAX_BYTES: Final = 8 << 20  # searched for a flipped bit
KEPT_MAX_BYTES: Final = 1 << 30


class Place(NamedTuple):
    """The first bad byte: after it `next_offset` was expected, of `epoch` or a later one."""

    position: int
    next_offset: int
    epoch: int


class NextSegment(NamedTuple):
    log: LogBytes
    size_bytes: int
    base_offset: int


class BadBytes:
    """The bytes of a `.log` from `place` on. The file ends at `end`; its offsets are below
    `end_offset`. Raises OSError.
    """

    def __init__(
        self,
        log: LogBytes,
        place: Place,
        *,
        end: int,
        end_offset: int,
        following: NextSegment | None,
    ) -> None:
        self._log, self._place, self._end, self._end_offset = log, place, end, end_offset
        self._following = following
        self._walked: set[int] = set()
        head = log.read(min(HEADER_SIZE, end - place.position), place.position)
        self._head = head if len(head) == HEADER_SIZE else b""
        length = int.from_bytes(self._head[8:LOG_OVERHEAD], "big", signed=True)
        self._claimed_end = place.position + LOG_OVERHEAD + length
        self._last_offset: int | None = None  # None: the header is not one
        with suppress(CorruptBatch):
            self._last_offset = parse_header(self._head).last_offset

    def damaged_until(self) -> int | None:
        """Where batches continue the log after damage; None if the log may be cut."""
        for at in self._candidates():
            if self._continues(at) and self._may_end(at):
                return None if self._is_hole(at) else at
        return None

    def _may_end(self, at: int) -> bool:
        """Whether the bad batch may end there, before the end that it claims."""
        is_within = self._last_offset is not None and at < self._claimed_end
        return not (is_within and self._difference(at))

    def _candidates(self) -> Iterator[int]:
        start, claimed = self._place.position, self._claimed_end
        if not self._head:
            return
        if start + HEADER_SIZE <= claimed <= self._end:
            yield claimed
        first, last = self._place.next_offset + 1, self._end_offset - 1
        places = batch_places(self._log, start + 1, end=self._end, first=first, last=last)
        yield from (at for at in chain(places, (self._end,)) if at != claimed)

    def _continues(self, at: int) -> bool:
        if at == self._end:
            return self._next_segment_continues()
        low, epoch = self._place.next_offset + 1, self._place.epoch
        end = at
        try:
            for batch in checked_batches(self._log, start=at, end=self._end):
                header = batch.header
                if header.position in self._walked:
                    return False
                self._walked.add(header.position)
                if header.base_offset < low or header.last_offset >= self._end_offset:
                    return False
                if header.leader_epoch < epoch:
                    return False
                if self._is_next(at, header.base_offset):
                    return True
                low, epoch, end = header.next_offset, header.leader_epoch, header.end_position
        except CorruptBatch:
            return end > at and self._is_zero_from(end)  # preallocated
        return end > at

    def _is_next(self, at: int, base_offset: int) -> bool:
        """Whether the bad batch's own length and offsets lead to that batch."""
        return at == self._claimed_end and base_offset - 1 == self._last_offset

    def _next_segment_continues(self) -> bool:
        if self._following is None:
            return False
        log, size_bytes, base_offset = self._following
        if self._last_offset not in (None, base_offset - 1):
            return False
        with suppress(CorruptBatch):
            first = next(checked_batches(log, end=size_bytes), None)
            return first is not None and first.header.base_offset >= base_offset
        return False

    def _is_zero_from(self, position: int) -> bool:
        return not any(any(piece) for piece in self._pieces(position, self._end))

    def _pieces(self, position: int, end: int) -> Iterator[bytes]:
        """Each ends at a sector."""
        while position < end:
            stop = min(end, position - position % SEARCH_BYTES + SEARCH_BYTES)
            piece = self._log.read(stop - position, position)
            if not piece:
                return
            yield piece
            position = stop

    # --- hole or damage ---------------------------------------------------------------------------

    def _is_hole(self, end: int) -> bool:
        return self._has_unwritten_sector(end) and not self._is_one_flip(end)

    def _has_unwritten_sector(self, end: int) -> bool:
        position = self._place.position
        for piece in self._pieces(position, end):
            first = SECTOR_BYTES - position % SECTOR_BYTES
            for stop in (*range(first, len(piece), SECTOR_BYTES), len(piece)):
                tail = piece[max(0, stop - HOLE_BYTES) : stop]
                if len(tail) >= HOLE_MIN_BYTES and not any(tail):
                    return True
            position += len(piece)
        return False

    def _is_one_flip(self, end: int) -> bool:
        """Whether [position, end) is a batch that has its checksum but for one bit."""
        difference, size_bytes = self._difference(end), end - self._place.position - CRC_START
        if size_bytes > FLIP_MAX_BYTES:
            return False
        return difference.bit_count() <= 1 or _is_flip(difference, size_bytes)

    def _difference(self, end: int) -> int:
        """The bits in which the stored checksum differs from that of a batch up to `end`."""
        crc = 0
        for piece in self._pieces(self._place.position + CRC_START, end):
            crc = crc32c_of(piece, crc)
        return crc ^ int.from_bytes(self._head[CRC_START - 4 : CRC_START], "big")


def _is_flip(difference: int, size_bytes: int) -> bool:
    """Whether one bit of as many bytes changes their CRC-32C so: the difference is taken back, byte
    by byte, to that of a bit in the last one.
    """
    table = [crc32c_of(bytes([byte])) ^ crc32c_of(b"\0") for byte in range(256)]
    last = {table[1 << bit] for bit in range(8)}
    by_high_byte = {value >> 24: byte for byte, value in enumerate(table)}
    for _ in range(size_bytes):
        if difference in last:
            return True
        byte = by_high_byte[difference >> 24]
        difference = ((difference ^ table[byte]) << 8) | byte
    return False


def batch_places(log: LogBytes, position: int, *, end: int, first: int, last: int) -> Iterator[int]:
    """Positions whose bytes look like the magic of a batch and a base offset in [first, last]. The
    magic is searched for: base offsets begin with zeros, and so does preallocated space.
    """
    low, high = first.to_bytes(8, "big"), last.to_bytes(8, "big")
    while position + HEADER_SIZE <= end:
        window = log.read(min(SEARCH_BYTES, end - position), position)
        stop = len(window) - HEADER_SIZE + 1
        if stop <= 0:
            return  # the file was cut: it is shorter than the segment was
        magic_at = window.find(MAGIC, MAGIC_POSITION, stop + MAGIC_POSITION)
        while magic_at >= 0:
            at = magic_at - MAGIC_POSITION
            if low <= window[at : at + 8] <= high:
                yield position + at
            magic_at = window.find(MAGIC, magic_at + 1, stop + MAGIC_POSITION)
        position += stop


class CutFiles:
    """The files of one folder that hold what recovery cut; `paths`: those that were there."""

    def __init__(self, folder: Path, names: list[str], *, disk: Disk) -> None:
        self._folder, self._disk = folder, disk
        self.paths = [folder / name for name in sorted(names)]

    def keep_tail(self, log: Path, place: Place) -> None:
        """Keep the bytes of a `.log` from `place` on, durably, but for preallocated space."""
        start, end = place.position, _content_end(log, place.position)
        if start == end or not self._has_room(end - start):
            return
        target = self._target(place.next_offset, like=(log, start, end))
        if target is None:
            return  # by a recovery that was interrupted
        try:
            copy_durably(log, target, start=start, end=end, disk=self._disk)
        except OSError as error:
            if not is_disk_full(error):
                raise
            self._disk.unlink(target.with_name(target.name + ".tmp"))
        else:
            self.paths.append(target)

    def keep_segment(self, log: Path, base_offset: int) -> None:
        """Rename a whole `.log`."""
        if self._has_room(log.stat().st_size):
            target = self._target(base_offset, like=None)
            assert target is not None, "it is compared with none"
            self._disk.rename(log, target)
            self.paths.append(target)

    def _has_room(self, size_bytes: int) -> bool:
        kept = sum(path.stat().st_size for path in self.paths if path.exists())
        return 0 < size_bytes <= KEPT_MAX_BYTES - kept

    def _target(self, offset: int, *, like: tuple[Path, int, int] | None) -> Path | None:
        """A path that nothing has; None if there is a file with those bytes of another."""
        path = path_of(self._folder, offset, CUT)
        for number in count(2):
            if not path.exists():
                return path
            if like is not None and _holds(path, *like):
                return None
            path = path_of(self._folder, offset, f"{CUT}.{number}")
        raise AssertionError("numbers do not end")


def _content_end(log: Path, position: int) -> int:
    """Where the sectors of zeros at the end of the file begin; `position` if nothing is left."""
    with log.open("rb", buffering=0) as file:
        end = size_bytes = file.seek(0, os.SEEK_END)
        while end > position:
            start = max(position, end - SEARCH_BYTES)
            kept = os.pread(file.fileno(), end - start, start).rstrip(b"\0")
            if kept:
                end = start + len(kept)
                return min(size_bytes, end + -end % SECTOR_BYTES)
            end = start
    return position


def _holds(path: Path, log: Path, start: int, end: int) -> bool:
    """Whether the file `path` has the bytes [start, end) of a `.log`."""
    if path.stat().st_size != end - start:
        return False
    with path.open("rb") as kept, log.open("rb") as file:
        file.seek(start)
        return all(
            kept.read(SEARCH_BYTES) == file.read(min(SEARCH_BYTES, end - at))
            for at in range(start, end, SEARCH_BYTES)
        )
