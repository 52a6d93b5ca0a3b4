"""Chunks of cold segments as files on local disk: what is there, what there is room for, what goes.

    <folder>/<segment's unique>/<chunk number>    a whole chunk whose CRC was right when it came
    <folder>/.filling/<random>                    on its way; swept at the start

* A file appears by rename once its length and CRC are right, and is never written again or
  truncated: whoever has it open keeps it whole, even after it was unlinked.
* Room is reserved before a fill. Cached, reserved, and unlinked-but-open bytes together stay within
  the limit, or are a single chunk; if readers hold too much of it, a fill waits, and is finally
  Throttled.
* A file that an earlier process left is only a guess: its size and CRC are checked again before its
  first byte is served. So is one whose bytes a reader reports as bad (`OpenFile.doubt`): disks rot.
  What the disk cannot read is a miss.
* No file is opened, checked or unlinked under the lock.
* Whatever somebody else deletes is a miss, even the whole folder.
* The descriptors of the chunks that were read last stay open: opening and closing a file costs more
  than finding a batch in it.

Thread-safe. `chunk_fills` decides who fills, and how many at once; `eviction`, which chunk goes.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from crc32c import crc32c as crc32c_of

from cold_tier.eviction import EvictionOrder
from cold_tier.ranged_reader import ChunkKey, ChunkRef
from record_format.errors import OUT_OF_FILES, ConfigurationError, Throttled, disk_refusal
from record_format.file_slice import OpenFile

FILLING: Final = ".filling"
RENAME_ATTEMPTS: Final = 20
CHECK_BYTES: Final = 1 << 20
KEPT_OPEN_MAX: Final = 256


class ChunkCacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """`lingering_bytes`: unlinked, but still open in some reader's hands."""

    chunks: int
    cached_bytes: int
    reserved_bytes: int
    lingering_bytes: int
    limit_bytes: int
    hits: int
    misses: int
    evicted_chunks: int


class _Ticket:
    """What the open files of one chunk count for. Guarded by the cache's lock."""

    __slots__ = ("doubted", "gone", "open", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes, self.open, self.gone = size_bytes, 0, False
        self.doubted = False  # by a reader, without the lock


class _ChunkFile(OpenFile):
    """A reader's hold on an open chunk: tells the cache when it was let go.

    Each lookup makes its own, of one descriptor that closes with the last that refers to it.
    """

    __slots__ = ("_closed", "_opened", "_ticket")

    def __init__(self, opened: OpenFile, ticket: _Ticket, closed: deque[_Ticket]) -> None:
        self.fd, self.name = opened.fd, opened.name
        self._opened, self._ticket, self._closed = opened, ticket, closed

    def doubt(self) -> None:
        self._ticket.doubted = True

    def __del__(self) -> None:
        # No lock here: this may run inside any allocation, under any lock.
        self._closed.append(self._ticket)


class _Entry:
    __slots__ = ("opened", "ticket", "verified")

    def __init__(self, size_bytes: int, *, verified: bool) -> None:
        self.ticket, self.verified = _Ticket(size_bytes), verified
        self.opened: OpenFile | None = None  # where it is kept open

    @property
    def size_bytes(self) -> int:
        return self.ticket.size_bytes


class ChunkCache:
    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._room = threading.Condition()
        self._entries: dict[ChunkKey, _Entry] = {}
        self._order = EvictionOrder(limit_bytes)
        self._kept_open: OrderedDict[ChunkKey, _Entry] = OrderedDict()
        self._cached = self._reserved = self._lingering = 0
        self._closed: deque[_Ticket] = deque()
        self._hits = self._misses = self._evicted = 0
        try:
            shutil.rmtree(folder / FILLING, ignore_errors=True)
            (folder / FILLING).mkdir(parents=True)
            self._adopt()
        except OSError as error:
            raise ConfigurationError(f"chunk cache {folder}: {error.strerror}") from error

    # --- looking up -------------------------------------------------------------------------------

    def lookup(self, chunk: ChunkRef, *, checked_only: bool = False) -> OpenFile | None:
        """The chunk's file, open, or None: a miss.

        `checked_only` never reads the file: None, which is not counted as a miss, if this process
        has not checked its bytes.
        """
        key = chunk.key
        with self._room:
            if self._closed:
                self._settle_closed()
            entry = self._entries.get(key)
            if entry is not None and entry.ticket.doubted:
                self._distrust(key, entry)
            if checked_only and (entry is None or not entry.verified):
                return None
            if entry is None:
                self._misses += 1
                return None
            entry.ticket.open += 1  # from here on it is not evicted
            if entry.opened is not None:
                self._hits += 1
                self._order.touch(key)
                self._kept_open.move_to_end(key)
                return self._hold(entry, entry.opened)
        try:
            return self._opened_now(chunk, key, entry)
        except BaseException:
            self._closed.append(entry.ticket)
            raise

    def _opened_now(self, chunk: ChunkRef, key: ChunkKey, entry: _Entry) -> OpenFile | None:
        opened = self._open(chunk, entry)
        with self._room:
            there = self._entries.get(key) is entry
            if opened is None:
                self._closed.append(entry.ticket)
                if there:
                    self._forget(key)
                self._misses += 1
                return None
            entry.verified = True
            self._hits += 1
            closing = None
            if there:
                self._order.touch(key)
                closing = self._keep_open(key, entry, opened)
            hold = self._hold(entry, opened)
        del closing  # without the lock
        return hold

    def mark_read(self, chunk: ChunkRef) -> None:
        """A reader has got the chunk from its fill."""
        with self._room:
            if chunk.key in self._entries:
                self._order.touch(chunk.key)

    def has(self, chunk: ChunkRef) -> bool:
        with self._room:
            return chunk.key in self._entries

    def usage(self) -> ChunkCacheReport:
        with self._room:
            self._settle_closed()
            return ChunkCacheReport(
                chunks=len(self._entries),
                cached_bytes=self._cached,
                reserved_bytes=self._reserved,
                lingering_bytes=self._lingering,
                limit_bytes=self._limit_bytes,
                hits=self._hits,
                misses=self._misses,
                evicted_chunks=self._evicted,
            )

    # --- filling ----------------------------------------------------------------------------------

    def reserve(self, size_bytes: int, *, wait_s: float = 0.0) -> None:
        """Make room. A chunk that is larger than the limit may have all of it alone: else nobody
        could ever read it.

        Raises Throttled where readers hold too much of it for longer than `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        limit_bytes = max(self._limit_bytes, size_bytes)
        while True:
            with self._room:
                victims = self._make_room(limit_bytes - size_bytes)
                enough = self._taken() + size_bytes <= limit_bytes
                if enough:
                    self._reserved += size_bytes
            self._unlink(victims)
            if enough:
                return
            if time.monotonic() >= deadline:
                raise Throttled(
                    f"the chunk cache ({self._limit_bytes} bytes) is full of chunks in use"
                )
            with self._room:
                self._room.wait(0.05)  # a file that is closed cannot notify: look again

    def unreserve(self, size_bytes: int) -> None:
        with self._room:
            self._reserved -= size_bytes
            self._room.notify_all()

    def new_temp(self) -> Path:
        """A name for a file to be filled. Raises DiskFull."""
        folder = self._folder / FILLING
        try:  # each time: whoever needs room may delete a cache while it is used
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_refusal(f"chunk cache {folder}", error) from error
        return folder / secrets.token_hex(12)

    def publish(self, chunk: ChunkRef, temp: Path) -> OpenFile:
        """Give a filled file, for which room was reserved, its name. Raises DiskFull."""
        key = chunk.key
        try:
            entry = _Entry(chunk.size_bytes, verified=True)
            entry.ticket.open = 1
            hold = self._hold(entry, OpenFile(temp))
            self._rename(temp, self._path(key))
        except OSError as error:
            temp.unlink(missing_ok=True)
            self.unreserve(chunk.size_bytes)
            raise disk_refusal(f"chunk cache {self._folder}", error) from error
        with self._room:
            self._reserved -= chunk.size_bytes
            if key in self._entries:
                self._forget(key)
            self._insert(key, entry)
            self._room.notify_all()
        return hold

    # --- giving up room ---------------------------------------------------------------------------

    def shrink(self, by_bytes: int) -> int:
        """Evict about this many bytes, because the disk is short of space; how many were
        evicted.
        """
        with self._room:
            self._settle_closed()
            before = self._cached
            victims = self._evict(max(0, self._taken() - by_bytes))
            freed = before - self._cached
        self._unlink(victims)
        return freed

    # --- below: all with the lock held, except for what touches the disk --------------------------

    def _hold(self, entry: _Entry, opened: OpenFile) -> _ChunkFile:
        """For one reader, who was counted in the entry's ticket."""
        return _ChunkFile(opened, entry.ticket, self._closed)

    def _keep_open(self, key: ChunkKey, entry: _Entry, opened: OpenFile) -> OpenFile | None:
        """What is closed for it, to be let go without the lock."""
        entry.opened = opened
        self._kept_open[key] = entry
        if len(self._kept_open) <= KEPT_OPEN_MAX:
            return None
        _, other = self._kept_open.popitem(last=False)
        closing, other.opened = other.opened, None
        return closing

    def _distrust(self, key: ChunkKey, entry: _Entry) -> None:
        entry.ticket.doubted = entry.verified = False
        entry.opened = None
        self._kept_open.pop(key, None)

    def _open(self, chunk: ChunkRef, entry: _Entry) -> OpenFile | None:
        try:
            opened = OpenFile(self._name(chunk.key))
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                raise
            return None
        if entry.size_bytes == chunk.size_bytes and (entry.verified or _is_right(opened, chunk)):
            return opened
        opened.path.unlink(missing_ok=True)
        return None

    def _rename(self, temp: Path, path: Path) -> None:
        for _ in range(RENAME_ATTEMPTS):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temp.rename(path)
            except (FileNotFoundError, FileExistsError):
                continue  # the last chunk of the segment was evicted, and its folder with it
            return
        raise FileNotFoundError(errno.ENOENT, "its folder keeps being deleted", str(path))

    def _insert(self, key: ChunkKey, entry: _Entry, *, filled: bool = True) -> None:
        self._entries[key] = entry
        self._cached += entry.size_bytes
        self._order.add(key, entry.size_bytes, filled=filled)

    def _make_room(self, wanted: int) -> list[ChunkKey]:
        """As `_evict`, where that leads there: none goes where all together would not do."""
        self._settle_closed()
        return self._evict(wanted) if self._taken() - self._cached <= wanted else []

    def _evict(self, wanted: int) -> list[ChunkKey]:
        """Forget chunks until no more than `wanted` is taken; none that a reader has open."""
        victims: list[ChunkKey] = []
        while self._taken() > wanted:
            key = self._order.victim(self._is_closed)
            if key is None:
                break
            self._forget(key)
            self._evicted += 1
            victims.append(key)
        return victims

    def _is_closed(self, key: ChunkKey) -> bool:
        """To unlink an open file gives no room back."""
        return not self._entries[key].ticket.open

    def _forget(self, key: ChunkKey) -> None:
        entry = self._entries.pop(key)
        self._order.remove(key)
        self._kept_open.pop(key, None)
        self._cached -= entry.size_bytes
        entry.ticket.gone = True
        if entry.ticket.open:
            self._lingering += entry.size_bytes

    def _settle_closed(self) -> None:
        while self._closed:
            ticket = self._closed.popleft()
            ticket.open -= 1
            if ticket.gone and not ticket.open:
                self._lingering -= ticket.size_bytes

    def _taken(self) -> int:
        return self._cached + self._reserved + self._lingering

    def _path(self, key: ChunkKey) -> Path:
        return Path(self._name(key))

    def _name(self, key: ChunkKey) -> str:
        """As `_path`, for every lookup: to make a Path costs more than to open the file."""
        return f"{self._folder}/{key[0]}/{key[1]}"

    def _unlink(self, keys: Iterable[ChunkKey]) -> None:
        """Without the lock. A chunk that was filled again meanwhile loses its file: then a miss."""
        for key in keys:
            path = self._path(key)
            path.unlink(missing_ok=True)
            try:
                path.parent.rmdir()
            except OSError:
                continue  # other chunks are in it

    def _adopt(self) -> None:
        """Take over what an earlier process left, unverified; surplus goes."""
        for folder in self._folder.iterdir():
            if folder.name == FILLING or not folder.is_dir():
                continue
            for file in folder.iterdir():
                if file.name.isdecimal():
                    entry = _Entry(file.stat().st_size, verified=False)
                    self._insert((folder.name, int(file.name)), entry, filled=False)
                else:
                    file.unlink()
        with self._room:
            victims = self._make_room(self._limit_bytes)
        self._unlink(victims)


def _is_right(file: OpenFile, chunk: ChunkRef) -> bool:
    if os.fstat(file.fd).st_size != chunk.size_bytes:
        return False
    crc = 0
    try:
        for position in range(0, chunk.size_bytes, CHECK_BYTES):
            crc = crc32c_of(os.pread(file.fd, CHECK_BYTES, position), crc)
    except OSError:
        return False
    return crc == chunk.crc32c
