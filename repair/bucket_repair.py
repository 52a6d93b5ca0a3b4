"""Repairs what a verification found: makes a plan and, on request, applies it.

| `.log`  | `.indexes` | records on local disk    | step                                          |
|---------|------------|--------------------------|-----------------------------------------------|
| good    | bad        |                          | `make-indexes` from the log object            |
| bad     | any        | the manifest's CRC-32C   | `upload-again`, under a new name              |
| bad     | any        | compacted since          | `none`: the compacted segment replaces it     |
| bad     | any        | missing or different     | `drop-batches`: the corrupt ones; the others  |
|         |            |                          | are uploaded again                            |
| missing | any        | missing or different     | `drop`: the offsets become a gap              |
|         |            | begin above the bucket's | `drop`: the offsets in between become a gap   |
|         |            | end                      |                                               |

A bad manifest, page or pin is reported (`none`), but not repaired. Corrupt local segments have
their own table (`local_repair`).

* Only the owner repairs: steps are commits under its epoch.
* A segment is uploaded again only if its bytes have the manifest's CRC-32C, or its batches have
  theirs: repair never changes a record. Nothing is overwritten; replaced objects are deleted after
  `gc.grace.ms`.
* Each step is one commit and may be repeated; a step whose segment was deleted meanwhile does
  nothing.
* Data that might still be readable in some other way is dropped only if that loss was accepted.
  Before anything is dropped it is read once more in full: the fault may have been temporary.
* The sound batches of a corrupt `.log` object are found as those of a segment on disk are, by the
  rules of `hot_tier.salvage`. Each pass downloads it again: a plan needs no local disk space.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.rebuilt_segment import (
    indexes_of,
    object_pieces,
    rebuilt_segment,
    snapshot_before,
    verified_pieces,
    with_producers_of,
)
from tierlog.cold_tier.index_bundle import ParsedBundle
from tierlog.cold_tier.ranged_reader import WHOLE_PIECE_BYTES, read_range
from tierlog.cold_tier.segment_check import check_segment
from tierlog.hot_tier.batch_walk import CheckedBatch
from tierlog.hot_tier.open_files import SECTOR_BYTES
from tierlog.hot_tier.salvage import LostRange, SalvageScan, fill_lost_ranges
from tierlog.manifest import transitions
from tierlog.manifest.garbage import GarbagePlan, GarbagePolicy
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.state import Manifest
from tierlog.manifest.transitions import record_gap
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    CorruptObject,
    OffsetTrimmed,
    UnknownSegment,
    eio_as,
)
from tierlog.record_format.findings import Problem, ProblemKind
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.repair.local_repair import (
    ACCEPT_LOSS,
    Action,
    CorruptSegments,
    InBucket,
    RepairStep,
    spans_of,
)
from tierlog.repair.verify import CheckOptions, check_partition

log = structlog.get_logger(__name__)

WHOLE_LOG_KINDS = frozenset(
    {
        ProblemKind.OBJECT_MISSING,
        ProblemKind.OBJECT_SIZE,
        ProblemKind.OBJECT_CHECKSUM,
        ProblemKind.CHUNK_CORRUPT,
        ProblemKind.BATCH_CORRUPT,
    }
)


class PlannedStep(NamedTuple):
    step: RepairStep
    entry: SegmentEntry | None = None
    before: SegmentEntry | None = None
    loses: bool = False
    """Whether it gives up data that might still be readable."""
    salvage: ObjectSalvage | None = None
    """The salvage of an object that exists but is corrupt."""


class BucketRepair:
    """Repairs one partition. `scratch`: an exclusive folder on the local disk."""

    def __init__(
        self,
        partition: Partition,
        store: ObjectStore,
        *,
        scratch: Path,
        corrupt: CorruptSegments,
        policy: GarbagePolicy,
        clock: Callable[[], int],
    ) -> None:
        assert partition.has_bucket, "without a bucket there is nothing to repair"
        self._corrupt = corrupt
        self._partition, self._upkeep, self._store = partition, partition.upkeep, store
        self._scratch, self._policy, self._clock = scratch, policy, clock

    def plan(self, *, deep: bool) -> list[PlannedStep]:
        """The steps that `apply` would take. Changes nothing."""
        seen, one = self._partition.manifest, self._partition
        keys = PartitionKeys(one.topic, one.topic_id, one.number)
        options = CheckOptions(clock=self._clock, deep=deep, at_least=seen.version if seen else 0)
        found, manifest, entries = check_partition(self._store, keys, options)
        by_base: dict[int, list[Problem]] = {}
        planned = []
        for problem in found.problems:
            if problem.base_offset is None:
                planned.append(PlannedStep(self._unrepaired(problem)))
            else:
                by_base.setdefault(problem.base_offset, []).append(problem)
        before: SegmentEntry | None = None
        for entry in entries:
            if problems := by_base.get(entry.base_offset):
                planned.append(self._planned(entry, problems, before))
            before = entry
        if manifest is not None and (hole := self._hole(manifest)) is not None:
            planned.append(PlannedStep(hole))
        end_offset = manifest.end_offset if manifest else 0
        bucket = InBucket(end_offset, entries, frozenset(by_base))
        planned += [PlannedStep(one) for one in self._corrupt.plan(bucket, deep=deep)]
        if manifest is not None:
            garbage = self._upkeep.collection_plan(self._policy, manifest)
            planned += [PlannedStep(one) for one in self._collection(garbage)]
        return planned

    def _hole(self, manifest: Manifest) -> RepairStep | None:
        """The step for a hole between the bucket's end and the next local segment. Nothing after it
        is uploaded before the hole becomes a gap.
        """
        next_local = self._partition.first_local_offset
        # Read afterwards: it has every segment that left the disk since `manifest` was loaded.
        seen = self._partition.manifest
        end_offset = max(manifest.end_offset, seen.end_offset if seen else 0)
        start = max(end_offset, self._partition.log_start_offset)
        if start >= next_local:
            gap = self._corrupt.hole_at(start)
            if gap is None:
                return None
            next_local = gap.base_offset
        last_offset = next_local - 1
        return RepairStep(
            action=Action.DROP,
            partition=self._partition.number,
            detail=f"offsets {start} to {last_offset} are in neither tier: they are lost",
            base_offset=start,
            last_offset=last_offset,
        )

    def _unrepaired(self, problem: Problem) -> RepairStep:
        remedy = "restore the object from a copy, if there is one"
        if problem.kind is ProblemKind.PIN_BROKEN:
            remedy += ", or unpin it"
        return RepairStep(
            action=Action.NONE,
            partition=problem.partition,
            detail=f"{problem.kind}: {problem.detail}; {remedy}",
            object_key=problem.object_key,
        )

    def _planned(
        self, entry: SegmentEntry, problems: list[Problem], before: SegmentEntry | None
    ) -> PlannedStep:
        log_key, loses, salvage = self._store.full_key(entry.log_key), False, None
        kinds = ", ".join(sorted({problem.kind for problem in problems}))
        if not self._is_log_bad(entry, problems):
            action, detail = Action.MAKE_INDEXES, f"{kinds}: its .log object is good"
        elif self._is_local(entry):
            action, detail = Action.UPLOAD_AGAIN, f"{kinds}: the local log has the same bytes"
        elif not self._partition.is_mirrored:
            action, detail = (
                Action.NONE,
                f"{kinds}: the compacted local segment will replace it",
            )
        elif (salvage := self._salvage(entry, problems)) and salvage.has_good_batches:
            action, loses = Action.DROP_BATCHES, True
            detail = f"{kinds}: offsets {spans_of(salvage.lost)} are lost, all others are kept"
        else:
            action, loses = Action.DROP, salvage is not None
            spans = f"offsets {entry.base_offset} to {entry.last_offset}"
            detail = f"{kinds}: {spans} ({entry.record_count} records) are lost"
        step = RepairStep(
            action=action,
            partition=self._partition.number,
            detail=detail + ACCEPT_LOSS if loses else detail,
            object_key=log_key,
            base_offset=entry.base_offset,
            last_offset=entry.last_offset,
        )
        return PlannedStep(step, entry, before, loses, salvage)

    def _salvage(self, entry: SegmentEntry, problems: list[Problem]) -> ObjectSalvage | None:
        """None if the object is missing."""
        is_gone = ProblemKind.OBJECT_MISSING in self._kinds_of_log(entry, problems)
        stat = None if is_gone else self._store.head(entry.log_key)
        return ObjectSalvage(self._store, entry, size_bytes=stat.size_bytes) if stat else None

    def _is_log_bad(self, entry: SegmentEntry, problems: list[Problem]) -> bool:
        return not WHOLE_LOG_KINDS.isdisjoint(self._kinds_of_log(entry, problems))

    def _kinds_of_log(self, entry: SegmentEntry, problems: list[Problem]) -> set[ProblemKind]:
        log_key = self._store.full_key(entry.log_key)
        return {problem.kind for problem in problems if problem.object_key == log_key}

    def _collection(self, garbage: GarbagePlan) -> Iterator[RepairStep]:
        if garbage.objects or garbage.orphans:
            yield RepairStep(
                action=Action.COLLECT,
                partition=self._partition.number,
                detail=f"{len(garbage.objects)} dropped objects and {len(garbage.orphans)} orphans",
            )

    # --- applying it ------------------------------------------------------------------------------

    def apply(self, planned: PlannedStep, *, accept_loss: bool) -> RepairStep:
        """Carry out one step. If the data differs from the plan, the step is not done and says why.

        Raises FencedError, StoreUnavailable, LogOfflineError.
        """
        try:
            if planned.entry is None and planned.step.action in CorruptSegments.ACTIONS:
                return self._corrupt.apply(planned.step, accept_loss=accept_loss)
            if planned.loses and not accept_loss:
                return planned.step
            return self._apply(planned)
        except CorruptDataError as bad:
            log.error("not repaired", partition=str(self._partition), error=str(bad))
            return msgspec.structs.replace(planned.step, detail=str(bad))

    def _apply(self, planned: PlannedStep) -> RepairStep:
        step, entry = planned.step, planned.entry
        if step.action is Action.NONE:
            return step
        if step.action is Action.COLLECT:
            try:
                self._upkeep.collect_garbage(self._policy)
            except ConfigurationError as error:  # an object that may not be deleted
                return msgspec.structs.replace(step, detail=str(error))
        elif entry is None:
            assert step.last_offset is not None, "the step of a hole has its last offset"
            end_offset = step.last_offset + 1
            self._upkeep.commit_repair(
                lambda manifest, _: record_gap(manifest, end_offset=end_offset)
            )
        elif step.action in {Action.DROP, Action.DROP_BATCHES}:
            again = check_segment(self._store, entry, partition=step.partition, deep=True)
            if not self._is_log_bad(entry, again.problems):
                return msgspec.structs.replace(
                    step, detail="the store returns it intact again: nothing is lost"
                )
            if step.action is Action.DROP:
                self._upkeep.commit_repair(
                    lambda manifest, pages: transitions.drop_lost_segment(
                        manifest, entry, pages=pages, now_ms=self._clock()
                    )
                )
            else:
                self._upload_salvaged(planned, entry)
        else:
            local = step.action is Action.UPLOAD_AGAIN
            pieces = (
                verified_pieces(self._upkeep.local_pieces(entry), entry)
                if local
                else object_pieces(self._store, entry)
            )
            self._upload_again(transitions.replace_objects, planned, entry, pieces)
        done = step.mark_done()
        log.info("repaired", partition=str(self._partition), step=done.action, detail=done.detail)
        return done

    def _upload_salvaged(self, planned: PlannedStep, entry: SegmentEntry) -> None:
        assert planned.salvage is not None, "corrupt batches were found by reading the object"
        pieces, bundle = planned.salvage.batches(), indexes_of(self._store, entry)
        self._upload_again(transitions.replace_with_readable, planned, entry, pieces, bundle=bundle)

    def _upload_again(
        self,
        repair: Callable[..., Manifest],
        planned: PlannedStep,
        entry: SegmentEntry,
        pieces: Iterable[bytes],
        *,
        bundle: ParsedBundle | None = None,
    ) -> None:
        """Upload both objects under a new name, with indexes rebuilt from the log. `bundle`: the
        producer and transaction state to keep instead of the rebuilt one.
        """
        snapshot = snapshot_before(self._store, entry, planned.before)
        with rebuilt_segment(
            self._scratch, self._partition, entry, pieces, clock=self._clock, snapshot=snapshot
        ) as rebuilt:
            files = with_producers_of(rebuilt.files, bundle) if bundle else rebuilt.files
            self._upkeep.replace_objects(
                files,
                entry,
                lambda manifest, new, pages: repair(
                    manifest, entry, new, pages=pages, now_ms=self._clock()
                ),
            )

    # --- reading the local copy -------------------------------------------------------------------

    def _is_local(self, entry: SegmentEntry) -> bool:
        """Whether the local log has exactly the bytes of the manifest's CRC-32C."""
        try:
            with eio_as(CorruptDataError, file=str(self._partition.folder)):
                for _ in verified_pieces(self._upkeep.local_pieces(entry), entry):
                    pass
        except (UnknownSegment, OffsetTrimmed, CorruptDataError):
            return False
        return True


class ObjectSalvage:
    """The object of `entry`, of which the store has `size_bytes`. Reads all of it. Raises
    StoreUnavailable, MissingObject, CorruptObject.
    """

    def __init__(self, store: ObjectStore, entry: SegmentEntry, *, size_bytes: int) -> None:
        self._store, self._entry = store, entry
        self._size_bytes = min(size_bytes, entry.size_bytes)
        self.lost: list[LostRange] = []
        self._epochs: list[tuple[int, int]] = []  # (first offset, epoch) of the good batches
        for piece in self._pieces():
            if isinstance(piece, LostRange):
                self.lost.append(piece)
            elif not self._epochs or piece.header.leader_epoch != self._epochs[-1][1]:
                self._epochs.append((piece.header.base_offset, piece.header.leader_epoch))

    @property
    def has_good_batches(self) -> bool:
        return bool(self._epochs)

    def batches(self) -> Iterator[bytes]:
        """The log's batches; empty batches replace the lost ones. Raises CorruptDataError at the
        end if other bytes were corrupt this time.
        """
        for batch in fill_lost_ranges(self._as_before(), epoch_of=self._epoch_of):
            yield bytes(batch.body)

    def _as_before(self) -> Iterator[CheckedBatch | LostRange]:
        lost = []
        for piece in self._pieces():
            if isinstance(piece, LostRange):
                lost.append(piece)
            yield piece
        if lost != self.lost:
            raise CorruptDataError("reads differently each time", file=self._entry.log_key)

    def _epoch_of(self, offset: int) -> int:
        """The epoch of the sound batch before the offset, or else of the first."""
        number = bisect_right(self._epochs, offset, key=lambda epoch: epoch[0])
        return self._epochs[max(0, number - 1)][1]

    def _pieces(self) -> SalvageScan:
        return SalvageScan(
            _ObjectBytes(self._store, self._entry.log_key, self._size_bytes),
            size_bytes=self._size_bytes,
            start_offset=self._entry.base_offset,
            end_offset=self._entry.next_offset,
            reaches_end=self._size_bytes < self._entry.size_bytes,
        )


class _ObjectBytes:
    """Reads the object; caches the last piece. What a folder's disk cannot read is zeros."""

    def __init__(self, store: ObjectStore, key: str, size_bytes: int) -> None:
        self._store, self.name, self._size_bytes = store, key, size_bytes
        self._piece, self._start = b"", 0

    def read(self, size_bytes: int, position: int) -> bytes:
        end = min(position + size_bytes, self._size_bytes)
        if not self._start <= position <= end <= self._start + len(self._piece):
            until = min(max(end, position + WHOLE_PIECE_BYTES), self._size_bytes)
            self._piece, self._start = self._read(position, until), position
        return self._piece[position - self._start : end - self._start]

    def _read(self, start: int, end: int) -> bytes:
        try:
            return read_range(self._store, self.name, start, end)
        except CorruptObject:
            if end - start <= SECTOR_BYTES:
                return bytes(end - start)
            middle = (start + end) // 2
            return self._read(start, middle) + self._read(middle, end)
