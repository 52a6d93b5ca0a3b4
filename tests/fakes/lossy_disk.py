"""A disk that remembers what was synced, so that a crash can lose what was not.

* A file's bytes are safe as they were at its last `sync_bytes`; of the writes and truncations
  since, a crash keeps any, each whole or cut at a sector, in order.
* A folder's names are safe as they were at its last `sync_folder`; of the changes since, a crash
  keeps the first few, as a journaling file system does.
* `before_call` gets the name of each call that changes anything: a crash may come there.
* What is changed other than by this disk (folders that are made, moved and removed, files that
  nothing relies on) is safe at once.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

from tierlog.host.disk import Disk
from tierlog.record_format.batch import Buffer

SECTOR = 512


class Content:
    """Bytes, then zeros up to `size_bytes`: preallocated space may be large."""

    def __init__(self, data: bytes, size_bytes: int) -> None:
        self.data, self.size_bytes = bytearray(data), size_bytes

    @classmethod
    def of(cls, path: Path) -> tuple[int, Content]:
        """The file's inode, and what is in it."""
        fd = os.open(path, os.O_RDONLY)
        try:
            stat, end = os.fstat(fd), 0
            with suppress(OSError):  # at a hole up to the end
                while end < stat.st_size:
                    end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
            return stat.st_ino, cls(os.pread(fd, end, 0).rstrip(b"\0"), stat.st_size)
        finally:
            os.close(fd)

    def is_like(self, other: Content) -> bool:
        zeros = b"\0"
        return self.size_bytes == other.size_bytes and (
            self.data.rstrip(zeros) == other.data.rstrip(zeros)
        )

    def copy(self) -> Content:
        return Content(self.data, self.size_bytes)

    def write(self, data: bytes, position: int) -> None:
        self.data[len(self.data) :] = bytes(max(0, position - len(self.data)))
        self.data[position : position + len(data)] = data
        self.size_bytes = max(self.size_bytes, len(self.data))

    def truncate(self, size_bytes: int) -> None:
        del self.data[size_bytes:]
        self.size_bytes = size_bytes

    def save(self, path: Path) -> None:
        path.write_bytes(self.data)
        os.truncate(path, self.size_bytes)


class Change(NamedTuple):
    """Bytes written at a position, or (data None) a truncation to it."""

    position: int
    data: bytes | None

    def apply(self, content: Content) -> None:
        if self.data is None:
            content.truncate(self.position)
        else:
            content.write(self.data, self.position)

    def cut(self, random: Random) -> Change:
        if self.data is None:
            return self
        sectors = random.randint(0, len(self.data) // SECTOR)
        return self._replace(data=self.data[: sectors * SECTOR])


class File:
    """`safe`: at the last sync; `now`: with the `changes` since."""

    def __init__(self, content: Content) -> None:
        self.safe, self.now = content, content.copy()
        self.changes: list[Change] = []

    def change(self, change: Change) -> None:
        change.apply(self.now)
        self.changes.append(change)

    def sync(self) -> None:
        self.safe, self.changes = self.now.copy(), []

    def copy(self) -> File:
        copied = File(self.safe.copy())
        copied.now, copied.changes = self.now.copy(), list(self.changes)
        return copied

    def after_crash(self, random: Random) -> Content:
        content = self.safe.copy()
        likely = random.choice((0.0, 0.5, 0.9, 1.0))
        for change in self.changes:
            if random.random() < likely:
                kept = change.cut(random) if random.random() < 0.2 else change
                kept.apply(content)
        return content


class Named(NamedTuple):
    """A changed name in a folder, and the file that it had before."""

    name: str
    before: File | None


class LossyDisk(Disk):
    """Records all changes made through it, wherever they are. Thread-safe."""

    def __init__(self) -> None:
        # Outside of the lock: a simulation lets others work meanwhile, and waits for them.
        self.before_call: Callable[[str], None] = lambda call: None
        self._lock = threading.RLock()
        self._files: dict[int, File] = {}  # by inode
        self._names: dict[int, list[Named]] = {}  # not synced yet, by the folder's inode

    # --- the calls --------------------------------------------------------------------------------

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return super().open(path, flags)
        if flags & os.O_CREAT:
            self.before_call("open")
        with self._lock:
            before = self._file_of(path)
            fd = super().open(path, flags)
            if before is None:
                self._files[os.fstat(fd).st_ino] = File(Content(b"", 0))
                self._record_name(path, None)
            elif flags & os.O_TRUNC:
                before.change(Change(0, None))
            return fd

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        self.before_call("write_at")
        with self._lock:
            data = b"".join(bytes(buffer) for buffer in buffers)
            written = super().write_at(fd, [data], position)
            self._at(fd).change(Change(position, data[:written]))
            return written

    def truncate(self, fd: int, size_bytes: int) -> None:
        self.before_call("truncate")
        with self._lock:
            super().truncate(fd, size_bytes)
            self._at(fd).change(Change(size_bytes, None))

    def reserve(self, fd: int, size_bytes: int) -> None:
        with self._lock:
            super().reserve(fd, size_bytes)
            if size_bytes > self._at(fd).now.size_bytes:
                self._at(fd).change(Change(size_bytes, None))

    def sync_bytes(self, fd: int) -> None:
        self.before_call("sync_bytes")
        with self._lock:
            file = self._files.get(os.fstat(fd).st_ino)
            if file is not None:
                file.sync()

    def sync_folder(self, path: Path) -> None:
        self.before_call("sync_folder")
        with self._lock:
            self._names.pop(path.stat().st_ino, None)

    def rename(self, source: Path, target: Path) -> None:
        self.before_call("rename")
        with self._lock:
            moved, replaced = self._file_of(source), self._file_of(target)
            super().rename(source, target)
            self._record_name(target, replaced)
            self._record_name(source, moved)

    def unlink(self, path: Path) -> None:
        self.before_call("unlink")
        with self._lock:
            gone = self._file_of(path)
            super().unlink(path)
            if gone is not None:
                self._record_name(path, gone)

    def _at(self, fd: int) -> File:
        return self._files[os.fstat(fd).st_ino]

    def _file_of(self, path: Path) -> File | None:
        """None if nothing is there."""
        try:
            inode, found = Content.of(path)
        except FileNotFoundError:
            return None
        file = self._files.get(inode)
        if file is None or not file.now.is_like(found):  # an inode may be reused
            file = self._files[inode] = File(found)
        return file

    def _record_name(self, path: Path, before: File | None) -> None:
        self._names.setdefault(path.parent.stat().st_ino, []).append(Named(path.name, before))

    # --- the crash --------------------------------------------------------------------------------

    def crash_into(self, folder: Path, random: Random, *, of: Path) -> None:
        """Make `folder` what a machine might find in place of `of` after losing power here."""
        with self._lock:
            self._copy(of, folder, random)

    def keep_into(self, folder: Path, *, of: Path) -> None:
        """Make `folder` what a process that died here leaves in place of `of`: everything it did,
        none of it safer than before.
        """
        with self._lock:
            shutil.copytree(of, folder)
            for path in (folder, *folder.rglob("*")):
                with suppress(FileNotFoundError):  # removed meanwhile, not through this disk
                    was, now = (of / path.relative_to(folder)).stat().st_ino, path.stat().st_ino
                    if path.is_dir():
                        self._names[now] = list(self._names.get(was, []))
                    elif was in self._files:
                        self._files[now] = self._files[was].copy()

    def _copy(self, source: Path, target: Path, random: Random) -> None:
        target.mkdir(parents=True)
        files: dict[str, File] = {}
        for path in sorted(source.iterdir()):
            if path.is_dir():
                self._copy(path, target / path.name, random)
            elif (file := self._file_of(path)) is not None:
                files[path.name] = file
        unsynced = self._names.get(source.stat().st_ino, [])
        for name, before in reversed(unsynced[random.randint(0, len(unsynced)) :]):
            if before is None:
                files.pop(name, None)
            else:
                files[name] = before
        for name, file in files.items():
            file.after_crash(random).save(target / name)
            if (source / name).exists():
                stat = (source / name).stat()
                os.utime(target / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
