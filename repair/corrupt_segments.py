"""Repairs sealed segments of an open log that are corrupt, or differ from the bucket.

| the segment                           | step                                                     |
|---------------------------------------|----------------------------------------------------------|
| is sound in the bucket                | `set-aside`: delete it and all before it locally; the    |
|                                       | bucket is read, and compaction fetches them back         |
| is in the bucket, but it or one       | `none`                                                   |
| before it is corrupt there too        |                                                          |
| is not in the bucket                  | `drop-batches`: the corrupt ones, only if that loss was  |
|                                       | accepted; their offsets are skipped, as are those of a   |
|                                       | file that was lost after it                              |

* A corrupt segment that is not in the bucket blocks the upload of all after it. Therefore the next
  segment to be uploaded is always read; the others only by a deep check.
* Without a bucket (`NO_BUCKET`) no segment is in it.
* Whatever can be read of the files is copied to `tierlog/damaged/`, durably, before any change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from tierlog.broker.holes import Holes
from tierlog.broker.partition import Partition
from tierlog.hot_tier.salvage import LostRange
from tierlog.hot_tier.sealed_segments import Gap, SegmentView
from tierlog.manifest.state import first_at
from tierlog.record_format.errors import UnknownSegment
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.repair.local_check import is_corrupt, is_lost
from tierlog.repair.local_repair import copy_segment, unused_path
from tierlog.repair.repair_step import ACCEPT_LOSS, Action, RepairStep, spans_of

log = structlog.get_logger(__name__)


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
        views = [view for view in self._partition.log.segments() if view.sealed]
        waiting = [view for view in views if view.last_offset >= cold_end_offset]
        for view in views if deep else waiting[:1]:
            is_waiting = view.last_offset >= cold_end_offset
            if is_lost(self._partition, view):
                yield self._missing(view) if is_waiting else self._set_aside(view, bucket)
                continue
            if not is_waiting:
                if is_corrupt(self._partition, view, bucket.entry_at(view.base_offset)):
                    yield self._set_aside(view, bucket)
            elif lost := self._lost(view.base_offset, cold_end_offset):
                yield self._drop_batches(view, lost)

    def hole_at(self, offset: int) -> Gap | None:
        """The hole that begins at or below `offset` and ends above it, or None."""
        views = [view for view in self._partition.log.segments() if view.sealed]
        view = next((one for one in views if one.last_offset >= offset), None)
        gap = self._holes.find(self._partition, view.base_offset) if view is not None else None
        return gap if gap is not None and gap.next_offset <= offset else None

    def _lost(self, base_offset: int, cold_end_offset: int) -> list[LostRange]:
        reaches_end = self._is_hole_of_the_log(base_offset, cold_end_offset)
        return self._partition.log.sealed.salvage(
            base_offset, reaches_end=reaches_end
        ).lost_ranges()

    def _is_hole_of_the_log(self, base_offset: int, cold_end_offset: int) -> bool:
        """Whether there is a hole after the segment that needs no gap in the manifest."""
        gap = self._holes.find(self._partition, base_offset)
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
        start = self._partition.log.log_start_offset
        for view in self._partition.log.segments():
            if view.base_offset > last.base_offset:
                break
            if view.last_offset < max(start, view.base_offset) or bucket.has(view):
                continue
            gap = self._partition.log.sealed.gap_after(view.base_offset)
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
        opened = self._partition.log
        aside = unused_path(self._aside / f"{self._partition}-{step.base_offset}")
        with opened.sealed.lock:
            try:
                copy_segment(opened.folder, step.base_offset, aside)
                if step.action is Action.SET_ASIDE:
                    opened.writer.flush()  # an unflushed segment is not deleted
                    opened.delete_local(step.last_offset + 1)
                else:
                    reaches_end = self._is_hole_of_the_log(
                        step.base_offset, self._partition.cold_end_offset
                    )
                    opened.sealed.salvage(step.base_offset, reaches_end=reaches_end).rewrite()
            except (UnknownSegment, FileNotFoundError):
                return step  # deleted by retention meanwhile
        done = step.mark_done()
        log.warning(
            "segment repaired", partition=str(self._partition), step=done.action, detail=done.detail
        )
        return done
