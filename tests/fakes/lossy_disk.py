"""A disk that remembers what was synced, so that a crash can lose what was not.

* A file's bytes are safe as they were at its last `sync_bytes`; of the writes and truncations
  since, a crash keeps any, each whole or cut at a sector, in order.
* A folder's names are safe as they were at its last `sync_folder`; of the changes since, a crash
  keeps the first few, as a journaling file system does.
* `before_call` is called before each call that changes anything: a crash may come there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from hot_tier.disk import Buffer, Disk

SECTOR = 512


class Change(NamedTuple):
    """Bytes written at a position, or (data None) a truncation to it."""

    position: int
    data: bytes | None


class Named(NamedTuple):
    """A name that came to a file (by its inode), or (inode None) went."""

    name: str
    inode: int | None


class LossyDisk(Disk):
    """Watches one folder. What lies in it at the start counts as safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.before_call: Callable[[], None] = lambda: None
        self._kept_open: list[int] = []  # so that no inode is used again
        self._safe_bytes: dict[int, bytes] = {}
        self._changes: dict[int, list[Change]] = {}
        self._safe_names: dict[str, int] = {}
        self._names: list[Named] = []
        for path in folder.iterdir() if folder.is_dir() else ():
            fd = os.open(path, os.O_RDONLY)
            self._kept_open.append(fd)
            inode = os.fstat(fd).st_ino
            self._safe_names[path.name] = inode
            self._safe_bytes[inode] = path.read_bytes()

    def close(self) -> None:
        for fd in self._kept_open:
            os.close(fd)
        self._kept_open.clear()

    # --- the calls --------------------------------------------------------------------------------

    def open(self, path: Path, flags: int) -> int:
        self.before_call()
        is_new = not path.exists()
        fd = super().open(path, flags)
        inode = os.fstat(fd).st_ino
        if is_new:
            self._kept_open.append(os.dup(fd))
            self._names.append(Named(path.name, inode))
        elif flags & os.O_TRUNC:
            self._note(fd, Change(0, None))
        return fd

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        self.before_call()
        data = b"".join(bytes(buffer) for buffer in buffers)
        written = super().write_at(fd, [data], position)
        self._note(fd, Change(position, data[:written]))
        return written

    def truncate(self, fd: int, size_bytes: int) -> None:
        self.before_call()
        super().truncate(fd, size_bytes)
        self._note(fd, Change(size_bytes, None))

    def sync_bytes(self, fd: int) -> None:
        self.before_call()
        inode = os.fstat(fd).st_ino
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            self._safe_bytes[inode] = file.read()
        self._changes.pop(inode, None)

    def sync_folder(self, path: Path) -> None:
        self.before_call()
        if path == self._folder:
            self._keep_names(len(self._names))

    def rename(self, source: Path, target: Path) -> None:
        self.before_call()
        inode = source.stat().st_ino
        super().rename(source, target)
        self._names += [Named(target.name, inode), Named(source.name, None)]

    def unlink(self, path: Path) -> None:
        self.before_call()
        if path.exists():
            super().unlink(path)
            self._names.append(Named(path.name, None))

    def _note(self, fd: int, change: Change) -> None:
        self._changes.setdefault(os.fstat(fd).st_ino, []).append(change)

    def _keep_names(self, count: int) -> None:
        for named in self._names[:count]:
            if named.inode is None:
                self._safe_names.pop(named.name, None)
            else:
                self._safe_names[named.name] = named.inode
        del self._names[:count]

    # --- the crash --------------------------------------------------------------------------------

    def crash_into(self, folder: Path, random: Random) -> None:
        """Make `folder` what a machine that lost its power here might find."""
        self._keep_names(random.randint(0, len(self._names)))
        folder.mkdir(parents=True)
        for name, inode in self._safe_names.items():
            (folder / name).write_bytes(self._after_crash(inode, random))
        self.close()

    def as_it_is(self) -> LossyDisk:
        """To crash, while this one goes on."""
        copy = LossyDisk(self._folder / "nothing lies here")
        copy._safe_bytes, copy._safe_names = dict(self._safe_bytes), dict(self._safe_names)
        copy._changes = {inode: list(changes) for inode, changes in self._changes.items()}
        copy._names = list(self._names)
        return copy

    def _after_crash(self, inode: int, random: Random) -> bytes:
        data = bytearray(self._safe_bytes.get(inode, b""))
        likely = random.choice((0.0, 0.5, 0.9, 1.0))
        for position, new in self._changes.get(inode, ()):
            if random.random() >= likely:
                continue
            if new is None:
                data[position:] = bytes(max(0, position - len(data)))
                continue
            if random.random() < 0.2:
                new = new[: random.randint(0, len(new) // SECTOR) * SECTOR]
            data[len(data) :] = bytes(max(0, position - len(data)))
            data[position : position + len(new)] = new
        return bytes(data)
