"""Memory as a broker finds it after a day: all of it in use, by files that nobody reads.

* Without this a file's pages come from memory that is free. On a virtual machine that gives free
  memory back to its host such a page costs ten times as much as one that is taken from an old file,
  or as one that a file just deleted left behind: the same write is fast or slow by what ran before
  it, and who writes more pays more.
* This process, and with it the servers it starts, is limited to `LIMIT_BYTES` (cgroup v1), and the
  page cache filled up to there. Where that cannot be done, nothing is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LIMIT_BYTES: Final = 8 << 30
_CONTROLLER: Final = Path("/sys/fs/cgroup/memory")
_READ_BYTES: Final = 1 << 20


@contextmanager
def limited(folder: Path) -> Iterator[bool]:
    """Whether it is. `folder` is on the disk that is measured."""
    group = _CONTROLLER / f"tierlog-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:  # not root, or a cgroup v2
        yield False
        return
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        _fill(folder / "holes")
        yield True
    finally:
        for pid in (group / "cgroup.procs").read_text().split():  # Spark's JVM stays for the next
            (_CONTROLLER / "cgroup.procs").write_text(pid)
        group.rmdir()


def _fill(path: Path) -> None:
    """Read a file that is all holes: its pages cost memory, and no disk."""
    memory = bytearray(_READ_BYTES)
    with path.open("w+b", buffering=0) as file:
        file.truncate(LIMIT_BYTES)
        while file.readinto(memory):
            pass
