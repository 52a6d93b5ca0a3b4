"""The disk cache: chunks of cold segments as files on local disk, within a size limit.

    <folder>/<segment's unique>/<chunk number>    a complete chunk whose CRC was verified on arrival
    <folder>/.filling/<random>                    a chunk being downloaded; deleted at start-up

* A file appears by rename once its length and CRC are verified, and is never rewritten or
  truncated: a reader that has it open keeps all of it, even after it is unlinked.
* Space is reserved before a fill. Cached, reserved, and unlinked-but-open bytes together stay
  within the limit, or belong to a single chunk. If readers hold too much of it, a fill waits, and
  finally raises Throttled.
* A file left by an earlier process is untrusted: its size and CRC are verified before its first
  byte is served. The same holds for a file that a reader reports as corrupt
  (`OpenFile.report_corrupt`), since disks decay. A file that cannot be read is a miss.
* No file is opened, verified or unlinked under the lock.
* Files deleted by someone else are misses, even if the whole folder is gone. A file that cannot be
  unlinked, as on a disk that became read-only, stays cached.
* The descriptors of the most recently read chunks stay open: opening and closing a file costs more
  than finding a batch in it.

Thread-safe. `chunk_fills` decides which chunks are downloaded, and `eviction` which are evicted.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from tierlog.cold_tier.eviction import EvictionPolicy
from tierlog.cold_tier.ranged_reader import ChunkKey, ChunkRef, maybe_unlink
from tierlog.host.file_slice import OpenFile
from tierlog.host.waiting import Wait
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    FILE_LIMIT_ERRNOS,
    ConfigurationError,
    Throttled,
    disk_full_error,
)

FILLING: Final = ".filling"
RENAME_ATTEMPTS: Final = 20
CHECK_BYTES: Final = 1 << 20
KEPT_OPEN_MAX: Final = 256


class ChunkCacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """`lingering_bytes` belong to files that are unlinked but still open."""

    chunks: int
    cached_bytes: int
    reserved_bytes: int
    lingering_bytes: int
    limit_bytes: int
    hits: int
    misses: int
    evicted_chunks: int


class _Entry:
    """A chunk's file. Guarded by the cache's lock."""

    __slots__ = ("opened", "readers", "removed", "reported_corrupt", "size_bytes", "verified")

    def __init__(self, size_bytes: int, *, verified: bool) -> None:
        self.size_bytes, self.verified = size_bytes, verified
        self.readers, self.removed = 0, False
        self.reported_corrupt = False  # set by a reader without the lock
        self.opened: OpenFile | None = None  # the descriptor, if it is kept open


class _ChunkFile(OpenFile):
    """One reader's handle on a chunk's file, which tells the cache when it is closed. Handles share
    a descriptor.
    """

    __slots__ = ("_entry", "_opened", "_release")

    def __init__(self, opened: OpenFile, entry: _Entry, release: Callable[[_Entry], None]) -> None:
        """It becomes the holder of `opened`."""
        self._hold(opened.fd, opened.name)
        self._opened, self._entry, self._release = opened, entry, release

    def report_corrupt(self) -> None:
        self._entry.reported_corrupt = True

    def _close_last(self) -> None:
        self.fd = -1
        self._opened.close()
        self._release(self._entry)


Victims: TypeAlias = list[tuple[ChunkKey, _Entry]]


class ChunkCache:
    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._space = threading.Condition()
        self._entries: dict[ChunkKey, _Entry] = {}
        self._eviction = EvictionPolicy(limit_bytes)
        self._kept_open: OrderedDict[ChunkKey, _Entry] = OrderedDict()
        self._cached = self._reserved = self._lingering = 0
        self._changes = 0  # counts what may have made room
        self._hits = self._misses = self._evicted = 0
        try:
            shutil.rmtree(folder / FILLING, ignore_errors=True)
            (folder / FILLING).mkdir(parents=True)
            self._load_existing()
        except OSError as error:
            raise ConfigurationError(f"chunk cache {folder}: {error.strerror}") from error

    # --- looking up -------------------------------------------------------------------------------

    def lookup(self, chunk: ChunkRef, wait: Wait = Wait.WAIT) -> OpenFile | None:
        """The chunk's file, which the caller closes; None on a miss. Raises WouldBlock, which does
        not count as a miss, unless it is cached and this process has verified it.
        """
        key = chunk.key
        with self._space:
            entry = self._entries.get(key)
            if entry is not None and entry.reported_corrupt:
                self._require_verification(key, entry)
            if entry is None or not entry.verified:
                wait.before("a chunk is fetched or verified")
            if entry is None:
                self._misses += 1
                return None
            entry.readers += 1  # from here on it is not evicted
            if entry.opened is not None:
                self._hits += 1
                self._eviction.touch(key)
                self._kept_open.move_to_end(key)
                return self._handle(entry, entry.opened.share())
        try:
            return self._open_entry(chunk, key, entry)
        except BaseException:
            self._release(entry)
            raise

    def _open_entry(self, chunk: ChunkRef, key: ChunkKey, entry: _Entry) -> OpenFile | None:
        opened = self._open_verified(chunk, entry)
        with self._space:
            is_cached = self._entries.get(key) is entry
            if opened is None:
                if is_cached:
                    self._remove(key)
                self._count_off(entry)
                self._misses += 1
                return None
            entry.verified = True
            self._hits += 1
            if is_cached:
                self._eviction.touch(key)
                self._keep_open(key, entry, opened)
            return self._handle(entry, opened)

    def mark_read(self, chunk: ChunkRef) -> None:
        """Note that a reader received the chunk directly from its fill."""
        with self._space:
            if chunk.key in self._entries:
                self._eviction.touch(chunk.key)

    def __contains__(self, chunk: ChunkRef) -> bool:
        with self._space:
            return chunk.key in self._entries

    def usage(self) -> ChunkCacheReport:
        with self._space:
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
        """Reserve space, evicting chunks if necessary. A chunk larger than the limit may occupy the
        cache alone; otherwise it could never be read.

        Raises Throttled if readers hold too much of the cache for longer than `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        limit_bytes = max(self._limit_bytes, size_bytes)
        while True:
            with self._space:
                victims = self._maybe_evict(limit_bytes - size_bytes)
                fits = self._used() + size_bytes <= limit_bytes
                if fits:
                    self._reserved += size_bytes
                seen = self._changes
            self._unlink(victims)
            if fits:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Throttled(
                    f"the chunk cache ({self._limit_bytes} bytes) is full of chunks in use"
                )
            with self._space:
                if self._changes == seen:
                    self._space.wait(left_s)

    def unreserve(self, size_bytes: int) -> None:
        with self._space:
            self._reserved -= size_bytes
            self._note_change()

    def new_temp_path(self) -> Path:
        """A new path to download a chunk to. Raises DiskFull."""
        folder = self._folder / FILLING
        try:  # each time: an operator who needs space may delete the cache while it is in use
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_full_error(f"chunk cache {folder}", error) from error
        return folder / secrets.token_hex(12)

    def publish(self, chunk: ChunkRef, temp: Path) -> OpenFile:
        """Move a downloaded file, whose space was reserved, into the cache; the caller closes it.
        Raises DiskFull.
        """
        key, opened = chunk.key, None
        entry = _Entry(chunk.size_bytes, verified=True)
        entry.readers = 1
        try:
            opened = OpenFile(temp)
            self._rename(temp, self._path(key))
        except OSError as error:
            if opened is not None:
                opened.close()
            maybe_unlink(temp)
            self.unreserve(chunk.size_bytes)
            raise disk_full_error(f"chunk cache {self._folder}", error) from error
        with self._space:
            self._reserved -= chunk.size_bytes
            if key in self._entries:
                self._remove(key)
            self._insert(key, entry)
            self._note_change()
            return self._handle(entry, opened)

    def _release(self, entry: _Entry) -> None:
        with self._space:
            self._count_off(entry)

    # --- freeing disk space -----------------------------------------------------------------------

    def shrink(self, by_bytes: int) -> int:
        """Evict about `by_bytes` because the disk is nearly full. Returns the bytes evicted."""
        with self._space:
            victims = self._evict(max(0, self._used() - by_bytes))
        return self._unlink(victims)

    # --- called with the lock held, except for those that touch the disk --------------------------

    def _handle(self, entry: _Entry, opened: OpenFile) -> _ChunkFile:
        """A handle for a reader that is already counted in `entry`."""
        return _ChunkFile(opened, entry, self._release)

    def _keep_open(self, key: ChunkKey, entry: _Entry, opened: OpenFile) -> None:
        if entry.opened is not None:  # another reader has opened it meanwhile
            return
        entry.opened = opened.share()
        self._kept_open[key] = entry
        if len(self._kept_open) > KEPT_OPEN_MAX:
            self._close_kept(next(iter(self._kept_open)))

    def _close_kept(self, key: ChunkKey) -> None:
        entry = self._kept_open.pop(key, None)
        if entry is not None and entry.opened is not None:
            entry.opened.close()
            entry.opened = None

    def _require_verification(self, key: ChunkKey, entry: _Entry) -> None:
        entry.reported_corrupt = entry.verified = False
        self._close_kept(key)

    def _open_verified(self, chunk: ChunkRef, entry: _Entry) -> OpenFile | None:
        try:
            opened = OpenFile(self._name(chunk.key))
        except OSError as error:
            if error.errno in FILE_LIMIT_ERRNOS:
                raise
            return None
        if entry.size_bytes == chunk.size_bytes and (entry.verified or _matches(opened, chunk)):
            return opened
        opened.close()
        maybe_unlink(opened.path)
        return None

    def _rename(self, temp: Path, path: Path) -> None:
        for _ in range(RENAME_ATTEMPTS):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temp.rename(path)
            except (FileNotFoundError, FileExistsError):
                continue  # the segment's last chunk was evicted, and its folder removed
            return
        raise FileNotFoundError(errno.ENOENT, "the folder is repeatedly deleted", str(path))

    def _insert(self, key: ChunkKey, entry: _Entry, *, is_new: bool = True) -> None:
        self._entries[key] = entry
        self._cached += entry.size_bytes
        self._eviction.add_chunk(key, entry.size_bytes, is_new=is_new)

    def _maybe_evict(self, target: int) -> Victims:
        """As `_evict`, but evicts nothing if evicting everything would not reach `target`."""
        return self._evict(target) if self._used() - self._cached <= target else []

    def _evict(self, target: int) -> Victims:
        """Remove chunks that no reader has open until at most `target` bytes are used."""
        victims: Victims = []
        while self._used() > target:
            key = self._eviction.victim(self._is_evictable)
            if key is None:
                break
            victims.append((key, self._entries[key]))
            self._remove(key)
            self._evicted += 1
        return victims

    def _is_evictable(self, key: ChunkKey) -> bool:
        """Unlinking an open file frees no space."""
        return not self._entries[key].readers

    def _remove(self, key: ChunkKey) -> None:
        entry = self._entries.pop(key)
        self._eviction.remove(key)
        self._close_kept(key)
        self._cached -= entry.size_bytes
        entry.removed = True
        if entry.readers:
            self._lingering += entry.size_bytes

    def _count_off(self, entry: _Entry) -> None:
        """A reader has closed its handle."""
        entry.readers -= 1
        if entry.removed and not entry.readers:
            self._lingering -= entry.size_bytes
        self._note_change()

    def _note_change(self) -> None:
        self._changes += 1
        self._space.notify_all()

    def _used(self) -> int:
        return self._cached + self._reserved + self._lingering

    def _path(self, key: ChunkKey) -> Path:
        return Path(self._name(key))

    def _name(self, key: ChunkKey) -> str:
        """As `_path`, for lookups: building a Path costs more than opening the file."""
        return f"{self._folder}/{key[0]}/{key[1]}"

    def _unlink(self, victims: Victims) -> int:
        """Returns the bytes freed. Called without the lock. If a chunk was cached again meanwhile,
        its file is unlinked too, and its next lookup is a miss.
        """
        freed_bytes = 0
        for key, entry in victims:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
            except OSError:
                self._put_back(key, entry)
                continue
            freed_bytes += entry.size_bytes
            with suppress(OSError):  # the folder holds other chunks
                path.parent.rmdir()
        return freed_bytes

    def _put_back(self, key: ChunkKey, entry: _Entry) -> None:
        with self._space:
            if key not in self._entries:
                entry.removed = False
                self._insert(key, entry, is_new=False)
                self._evicted -= 1

    def _load_existing(self) -> None:
        """Load the chunks of an earlier process, unverified, and evict any above the limit."""
        for folder in self._folder.iterdir():
            if folder.name == FILLING or not folder.is_dir():
                continue
            for file in folder.iterdir():
                if file.name.isdecimal():
                    entry = _Entry(file.stat().st_size, verified=False)
                    self._insert((folder.name, int(file.name)), entry, is_new=False)
                else:
                    file.unlink()
        with self._space:
            victims = self._maybe_evict(self._limit_bytes)
        self._unlink(victims)


def _matches(file: OpenFile, chunk: ChunkRef) -> bool:
    if os.fstat(file.fd).st_size != chunk.size_bytes:
        return False
    crc = 0
    try:
        for position in range(0, chunk.size_bytes, CHECK_BYTES):
            crc = crc32c_of(os.pread(file.fd, CHECK_BYTES, position), crc)
    except OSError:
        return False
    return crc == chunk.crc32c
