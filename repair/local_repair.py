"""Repairs a local log that cannot be opened. Corrupt data is set aside, never deleted.

| the corrupt segment            | step                                                           |
|--------------------------------|----------------------------------------------------------------|
| the bucket has all its offsets | `set-aside`: move it and all segments before it; the bucket is |
|                                | read instead                                                   |
| the bucket lacks some of them  | `cut`: truncate at the corrupt byte; the offsets after it are  |
|                                | lost, so this requires that the loss is accepted               |

* Data is set aside as Kafka's files in `tierlog/damaged/<topic>-<partition>-<offset>/` in the data
  folder; for a cut these are copies, synced before anything is truncated.
* Damage that names no batch (overlapping segments, a disk that cannot be read) is reported but not
  repaired: its own message says what to do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Final, NamedTuple

from tierlog.broker.damaged_partition import DamagedPartition
from tierlog.broker.data_folder import DataFolder, with_suffix
from tierlog.host.durable_file import REAL_DISK
from tierlog.hot_tier.closed_log import base_offsets, reached_offset
from tierlog.hot_tier.log_folder import LOG, parse_file_name, segment_files
from tierlog.hot_tier.open_files import zero_filling_pread
from tierlog.record_format.errors import CorruptDataError
from tierlog.repair.repair_step import ACCEPT_LOSS, Action, RepairStep

COPY_BYTES: Final = 1 << 20


class LocalRepair:
    """The repair of one damaged log. `cold_end_offset`: where the bucket's records end."""

    def __init__(
        self, folder: DataFolder, damaged: DamagedPartition, *, cold_end_offset: int
    ) -> None:
        self._log_folder = folder.partition_folder(damaged.topic, damaged.number)
        self._damaged, self._fault = damaged, locate(damaged)
        self._cold_end_offset = cold_end_offset
        self._aside = folder.damaged
        if self._fault is not None:
            self._aside = unused_path(self._aside / f"{damaged}-{self._fault.bad_offset}")
        self.step = self._plan()

    def _plan(self) -> RepairStep:
        fault, reason, cold_end_offset = self._fault, self._damaged.reason, self._cold_end_offset
        action, detail = Action.NONE, str(reason)
        aside = f"set aside in {self._aside.name}"
        if fault is not None and is_covered(fault, cold_end_offset=cold_end_offset):
            action = Action.SET_ASIDE
            detail = f"offsets up to {fault.next_offset} are {aside} and read from the bucket"
        elif fault is not None:
            action = Action.CUT
            lost = self._lost(fault, cold_end_offset)
            detail = f"{lost}; the remaining bytes are {aside}{ACCEPT_LOSS}"
        return RepairStep(
            action=action,
            partition=self._damaged.number,
            detail=detail,
            base_offset=fault.base_offset if fault else None,
        )

    def _lost(self, fault: LocalFault, cold_end_offset: int) -> str:
        if cold_end_offset > fault.bad_offset:
            return f"offsets from the bucket's end {cold_end_offset} on are lost"
        end = self._damaged.recovery_point
        lost = (
            f"offsets from {fault.bad_offset} on ({end} had been flushed) are lost: the bucket "
            f"ends at {cold_end_offset}"
        )
        reached = reached_offset(self._log_folder) if self._log_folder.is_dir() else 0
        if reached > fault.bad_offset + 1:
            lost += f", and whole batches up to offset {reached - 1} go with the corrupt one"
        return lost

    def is_allowed(self, *, accept_loss: bool) -> bool:
        return self.step.action is Action.SET_ASIDE or (
            self.step.action is Action.CUT and accept_loss
        )

    def prepare(self) -> int:
        """Set the corrupt data aside. Returns the offset from which on the log may be truncated."""
        assert self._fault is not None, "only a located fault is repaired"
        if self.step.action is Action.SET_ASIDE:
            set_aside_from_start(self._log_folder, self._fault, self._aside)
            return max(self._damaged.recovery_point or 0, self._cold_end_offset)
        if self._log_folder.is_dir():  # otherwise nothing is left
            copy_to_end(self._log_folder, self._fault, self._aside)
        return self._fault.bad_offset


class LocalFault(NamedTuple):
    """A segment that is corrupt from `bad_offset` on. `next_offset`: where the next one begins."""

    base_offset: int
    next_offset: int | None
    bad_offset: int


def locate(damaged: DamagedPartition) -> LocalFault | None:
    """Where the log is corrupt; None if its error names no batch of a segment."""
    reason = damaged.reason
    if not isinstance(reason, CorruptDataError) or reason.offset is None:
        return None
    path = Path(reason.file)
    name = parse_file_name(path.name)
    if name is None or name.suffix != LOG:
        return None
    later = [base for base in base_offsets(path.parent) if base > name.offset]
    return LocalFault(name.offset, min(later, default=None), reason.offset)


def is_covered(fault: LocalFault, *, cold_end_offset: int) -> bool:
    """Whether the bucket has every offset of the corrupt segment."""
    return fault.next_offset is not None and fault.next_offset <= cold_end_offset


def set_aside_from_start(folder: Path, fault: LocalFault, aside: Path) -> None:
    """Move the corrupt segment and all segments before it out of the log."""
    aside.mkdir(parents=True, exist_ok=True)
    for name, path in segment_files(folder):
        if name.offset <= fault.base_offset:
            path.rename(aside / path.name)
    _sync_folders(folder, aside)


def copy_to_end(folder: Path, fault: LocalFault, aside: Path) -> None:
    """Copy the corrupt segment and all after it, durably; the log itself is unchanged."""
    _copy(folder, aside, lambda offset: offset >= fault.base_offset)


def copy_segment(folder: Path, base_offset: int, aside: Path) -> None:
    """Copy the files of one segment, durably."""
    _copy(folder, aside, lambda offset: offset == base_offset)


def unused_path(folder: Path) -> Path:
    """The path, or the first free one with a number: never overwrite an earlier repair's files."""
    suffixes = chain([""], (f".{number}" for number in count(2)))
    paths = (with_suffix(folder, suffix) for suffix in suffixes)
    return next(path for path in paths if not path.exists())


def _copy(folder: Path, aside: Path, is_wanted: Callable[[int], bool]) -> None:
    aside.mkdir(parents=True, exist_ok=True)
    for name, path in segment_files(folder):
        if is_wanted(name.offset):
            copied = aside / path.name
            _copy_file(path, copied)
            REAL_DISK.sync_file(copied)
    _sync_folders(folder, aside)


def _copy_file(path: Path, copied: Path) -> None:
    """Copy everything that the disk can read."""
    read = zero_filling_pread(os.pread)
    with path.open("rb") as source, copied.open("wb") as target:
        for position in range(0, path.stat().st_size, COPY_BYTES):
            target.write(read(source.fileno(), COPY_BYTES, position))
    shutil.copystat(path, copied)


def _sync_folders(folder: Path, aside: Path) -> None:
    for place in (aside, aside.parent, aside.parent.parent, folder):
        REAL_DISK.sync_folder(place)
