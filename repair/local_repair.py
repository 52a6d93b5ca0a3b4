"""Repairs what is on local disk. Corrupt data is set aside, never deleted.

Of a log that cannot be opened (`LocalRepair`):

| the corrupt segment            | step                                                           |
|--------------------------------|----------------------------------------------------------------|
| the bucket has all its offsets | `set-aside`: move it and all segments before it; the bucket is |
|                                | read instead                                                   |
| the bucket lacks some of them  | `cut`: truncate at the corrupt byte; the offsets after it are  |
|                                | lost, so this requires that the loss is accepted               |

Of an open log, sealed segments that are corrupt, or differ from the bucket (`CorruptSegments`):

| the segment                           | step                                                     |
|---------------------------------------|----------------------------------------------------------|
| is sound in the bucket                | `set-aside`: delete it and all before it locally; the    |
|                                       | bucket is read, and compaction fetches them back         |
| is in the bucket, but it or one       | `none`                                                   |
| before it is corrupt there too        |                                                          |
| is not in the bucket                  | `drop-batches`: the corrupt ones, only if that loss was  |
|                                       | accepted; their offsets are skipped, as are those of a   |
|                                       | file that was lost after it                              |

* Data is set aside as Kafka's files in `tierlog/damaged/<topic>-<partition>-<offset>/` in the data
  folder, durably, before any change; for a cut, and of an open log, these are copies.
* Damage that names no batch (overlapping segments, a disk that cannot be read) is reported but not
  repaired: its own message says what to do.
* A corrupt segment that is not in the bucket blocks the upload of all after it. Therefore the next
  segment to be uploaded is always read; the others only by a deep check.
* Without a bucket (`NO_BUCKET`) no segment is in it.
"""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from tierlog.broker.data_folder.data_folder import DataFolder, with_suffix
from tierlog.broker.partition.damaged_partition import DamagedPartition
from tierlog.broker.partition.holes import Holes
from tierlog.broker.partition.partition import Partition
from tierlog.host.durable_file import REAL_DISK
from tierlog.hot_tier.closed_log import base_offsets, reached_offset
from tierlog.hot_tier.log_folder import LOG, parse_file_name, segment_files
from tierlog.hot_tier.open_files import zero_filling_pread
from tierlog.hot_tier.salvage import LostRange
from tierlog.hot_tier.sealed_segments import Gap, SegmentView
from tierlog.manifest.state import first_at
from tierlog.record_format.errors import CorruptDataError, UnknownSegment
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.repair.local_check import is_corrupt

log = structlog.get_logger(__name__)


COPY_BYTES: Final = 1 << 20


ACCEPT_LOSS: Final = "; requires --accept-loss"  # suffix of a step that loses records, until done


class Action(StrEnum):
    MAKE_INDEXES = "make-indexes"
    UPLOAD_AGAIN = "upload-again"
    DROP = "drop"
    WRITE_TOPIC = "write-topic"
    COLLECT = "collect"
    SET_ASIDE = "set-aside"
    CUT = "cut"
    DROP_BATCHES = "drop-batches"
    NONE = "none"


# What a running broker may carry out: every record is as readable afterwards as before.
LOSSLESS: Final = frozenset(
    (
        Action.MAKE_INDEXES,
        Action.UPLOAD_AGAIN,
        Action.WRITE_TOPIC,
        Action.COLLECT,
        Action.SET_ASIDE,
    )
)


class RepairStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`done` is set once the step was carried out."""

    action: Action
    partition: int
    detail: str
    object_key: str | None = None
    base_offset: int | None = None
    last_offset: int | None = None
    done: bool = False

    def mark_done(self) -> RepairStep:
        detail = self.detail.removesuffix(ACCEPT_LOSS)
        return msgspec.structs.replace(self, done=True, detail=detail)


def spans_of(lost: Iterable[LostRange]) -> str:
    """The offset ranges, as text."""
    spans = (f"{one.start_offset} to {one.end_offset - 1}" for one in lost if one.spans_offsets)
    return ", ".join(spans) or "none"


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


class InBucket(NamedTuple):
    """`entries`: oldest first. `bad`: base offsets of entries in which a check found problems."""

    end_offset: int
    entries: Sequence[SegmentEntry]
    bad: frozenset[int]

    def has(self, view: SegmentView) -> bool:
        """Whether there are entries that overlap the segment, and all of them are sound."""
        number = bisect_right(self.entries, view.last_offset, key=attrgetter("base_offset"))
        there = []
        while number and self.entries[number - 1].last_offset >= view.base_offset:
            number -= 1
            there.append(self.entries[number].base_offset)
        return bool(there) and self.bad.isdisjoint(there)

    def entry_at(self, base_offset: int) -> SegmentEntry | None:
        entry = first_at(self.entries, base_offset)
        return entry if entry is not None and entry.base_offset == base_offset else None


NO_BUCKET: Final = InBucket(0, (), frozenset())


class CorruptSegments:
    """Repairs one partition. `aside`: the folder in which each segment gets a folder."""

    ACTIONS: Final = frozenset({Action.SET_ASIDE, Action.DROP_BATCHES})

    def __init__(self, partition: Partition, aside: Path, holes: Holes) -> None:
        self._partition, self._aside, self._holes = partition, aside, holes

    def plan(self, bucket: InBucket, *, deep: bool) -> Iterator[RepairStep]:
        """The steps that `apply` would take. Changes nothing. Raises UnknownSegment, OSError."""
        cold_end_offset = bucket.end_offset
        views = [view for view in self._partition.local_segments() if view.sealed]
        waiting = [view for view in views if view.last_offset >= cold_end_offset]
        for view in views if deep else waiting[:1]:
            is_waiting = view.last_offset >= cold_end_offset
            if self._partition.upkeep.is_lost(view):
                yield self._missing(view) if is_waiting else self._set_aside(view, bucket)
                continue
            if not is_waiting:
                if is_corrupt(self._partition, view, bucket.entry_at(view.base_offset)):
                    yield self._set_aside(view, bucket)
            elif lost := self._lost(view.base_offset, cold_end_offset):
                yield self._drop_batches(view, lost)

    def hole_at(self, offset: int) -> Gap | None:
        """The hole that begins at or below `offset` and ends above it, or None."""
        views = [view for view in self._partition.local_segments() if view.sealed]
        view = next((one for one in views if one.last_offset >= offset), None)
        gap = self._holes.find_hole(self._partition, view.base_offset) if view is not None else None
        return gap if gap is not None and gap.next_offset <= offset else None

    def _lost(self, base_offset: int, cold_end_offset: int) -> list[LostRange]:
        reaches_end = self._is_hole_of_the_log(base_offset, cold_end_offset)
        return self._partition.upkeep.salvage(base_offset, reaches_end=reaches_end).lost_ranges()

    def _is_hole_of_the_log(self, base_offset: int, cold_end_offset: int) -> bool:
        """Whether there is a hole after the segment that needs no gap in the manifest."""
        gap = self._holes.find_hole(self._partition, base_offset)
        return gap is not None and gap.next_offset > cold_end_offset

    def _drop_batches(self, view: SegmentView, lost: Sequence[LostRange]) -> RepairStep:
        bad_bytes = sum(one.size_bytes for one in lost)
        what = f"{bad_bytes} bytes are corrupt, from position {lost[0].position} on"
        if not bad_bytes:
            what = "the file after it is missing"
        return self._step(
            Action.DROP_BATCHES,
            view,
            f"{view.path}: {what}, and it is not in the bucket: offsets {spans_of(lost)} are "
            f"lost, all others are kept{ACCEPT_LOSS}",
        )

    def _missing(self, view: SegmentView) -> RepairStep:
        detail = f"{view.path} is missing: put it back, or restart the broker and repair again"
        return self._step(Action.NONE, view, detail)

    def _set_aside(self, view: SegmentView, bucket: InBucket) -> RepairStep:
        if not bucket.has(view):
            detail = f"{view.path} is corrupt, and so is the bucket's copy"
            return self._step(Action.NONE, view, detail)
        kept = self._kept_by(view, bucket)
        if kept is not None:
            detail = (
                f"{view.path} is corrupt; the bucket has it, but not all of {kept.path.name}, "
                "which would be deleted with it: repair that first"
            )
            return self._step(Action.NONE, view, detail)
        detail = f"{view.path} is corrupt; the bucket has all of it, and is read instead"
        return self._step(Action.SET_ASIDE, view, detail)

    def _kept_by(self, last: SegmentView, bucket: InBucket) -> SegmentView | None:
        """The first segment up to `last` that must stay on disk: it is not in the bucket, or
        corrupt there. Segments below the log start, or emptied by compaction, need not stay.
        """
        start = self._partition.log_start_offset
        for view in self._partition.local_segments():
            if view.base_offset > last.base_offset:
                break
            if view.last_offset < max(start, view.base_offset) or bucket.has(view):
                continue
            gap = self._partition.upkeep.gap_after(view.base_offset)
            if gap is None or gap.next_offset > start:  # its last record, not its last offset
                return view
        return None

    def _step(self, action: Action, view: SegmentView, detail: str) -> RepairStep:
        return RepairStep(
            action=action,
            partition=self._partition.number,
            detail=detail,
            base_offset=view.base_offset,
            last_offset=view.last_offset,
        )

    def apply(self, step: RepairStep, *, accept_loss: bool) -> RepairStep:
        """Raises Throttled (a compaction), DiskFull, LogOfflineError, CorruptIndex, OSError."""
        assert step.base_offset is not None, "a segment's step has its offsets"
        assert step.last_offset is not None, "a segment's step has its offsets"
        if step.action is Action.DROP_BATCHES and not accept_loss:
            return step
        partition, upkeep = self._partition, self._partition.upkeep
        aside = unused_path(self._aside / f"{self._partition}-{step.base_offset}")
        with upkeep.files_held():
            try:
                copy_segment(partition.folder, step.base_offset, aside)
                if step.action is Action.SET_ASIDE:
                    upkeep.delete_flushed(step.last_offset + 1)
                else:
                    reaches_end = self._is_hole_of_the_log(
                        step.base_offset, partition.cold_end_offset
                    )
                    upkeep.salvage(step.base_offset, reaches_end=reaches_end).rewrite()
            except (UnknownSegment, FileNotFoundError):
                return step  # deleted by retention meanwhile
        done = step.mark_done()
        log.warning(
            "segment repaired", partition=str(self._partition), step=done.action, detail=done.detail
        )
        return done
