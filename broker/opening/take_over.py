"""Takes a partition over from another folder: reconciles the local log, then commits the claim.

* `<data>/tierlog/take-over.json` durably names the partitions being taken over before any file is
  touched; a partition is removed from it once its claim is in the bucket. Every step is repeatable.
* The claim is committed on top of exactly the end that the local log was reconciled with. If
  another owner was faster, the manifest is reloaded and everything starts over. A take-over
  therefore needs the store, and a start with `--take-over` fails without it.
* No local record is removed before the manifest in force names it. After the commit that names the
  tail, the manifest is reloaded, as at a start after a crash: it is then our own, and needs no gap.

`plan_take_over`, which is pure, decides what happens to the local log:

| the local log                                   | action                                         |
|-------------------------------------------------|------------------------------------------------|
| holds records past the point where the          | they move to `tierlog/diverged/`:              |
| histories diverge, or within a manifest gap     | never served, uploaded or deleted; reported    |
| ends below the manifest's end                   | restarts at the manifest's end                 |
| extends past the manifest's end                 | is split into segments there                   |

Another owner may have acknowledged records that it never uploaded. To keep their offsets from being
assigned again, the log continues `gap` offsets above all that it or this folder is known to have
reached, above a recorded gap that begins where the bucket ends:

| kept of the local log                           | action                                         |
|-------------------------------------------------|------------------------------------------------|
| nothing past the manifest's end                 | restarts above the gap                         |
| records past it that belong to both histories   | they are uploaded; one commit holds the claim, |
|                                                 | the records and the gap; then the log restarts |
|                                                 | above the gap                                  |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from tierlog.broker.bucket.cold_log import ColdLog
from tierlog.broker.data_folder.data_folder import (
    DataFolder,
    Document,
    diverged_folder,
    parse_topic_id_partition,
    topic_id_of,
    with_suffix,
)
from tierlog.host.durable_file import REAL_DISK
from tierlog.host.medium import make_folders
from tierlog.hot_tier import closed_log
from tierlog.hot_tier.log import PartitionLog
from tierlog.manifest.state import EpochStart, Manifest, append_epoch, divergence_offset
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    ManifestConflict,
    StoreUnavailable,
)
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)


class LocalLog(NamedTuple):
    """`history`: the epochs that this folder knows, its own and those that it saw in force.

    `recorded`: the (owner, epoch) pairs that it claimed or saw in force, including those under
    which nothing was written. `ranges`: [base, next) of its non-empty segments. `flushed_end`: the
    log is known to have reached it.
    """

    history: tuple[EpochStart, ...]
    recorded: frozenset[tuple[str, int]]
    ranges: tuple[tuple[int, int], ...]
    end_offset: int
    log_start_offset: int = 0
    flushed_end: int = 0


class TakeOverPlan(NamedTuple):
    """The steps, in order; None means the step is not needed.

    `diverged_from`: set the local log aside from there. `start_at`: restart the log empty, there.
    `split_at`: keep the log, with a segment boundary there. `resume_at`: upload what is kept past
    the manifest's end, then continue there.
    """

    diverged_from: int | None = None
    start_at: int | None = None
    split_at: int | None = None
    resume_at: int | None = None


def plan_take_over(local: LocalLog, manifest: Manifest | None, *, gap: int) -> TakeOverPlan:
    """The plan under this manifest; `gap` is the number of offsets to skip."""
    end = manifest.end_offset if manifest else 0
    kept_end = _same_until(local, manifest) if manifest else local.end_offset
    start = end
    if gap:
        kept_end = _held_until(local, end, kept_end) if manifest else 0
        start = max(_reached(manifest), kept_end, local.flushed_end) + gap
    has_tail = kept_end > end
    behind = not has_tail and kept_end < start
    holds_more = any(next_offset > kept_end for _, next_offset in local.ranges)
    straddled = any(base < end < next_offset for base, next_offset in local.ranges)
    return TakeOverPlan(
        diverged_from=kept_end if holds_more else None,
        start_at=start if behind else None,
        split_at=end if straddled and not behind else None,
        resume_at=start if gap and has_tail else None,
    )


def _reached(manifest: Manifest | None) -> int:
    """A lower bound of the other log's end: its last epoch began there."""
    return max(manifest.end_offset, manifest.epochs[-1].start_offset) if manifest else 0


def _held_until(local: LocalLog, end: int, same_until: int) -> int:
    """The offset up to which, even past the manifest's end, the local log has every record that
    both histories share.

    An earlier attempt may have emptied it, and a trim may have gone past the manifest's end.
    """
    start = held = max(end, local.log_start_offset)
    for base, next_offset in local.ranges:
        if base <= held:
            held = max(held, next_offset)
    held = min(held, same_until)
    return held if held > start else min(end, same_until)


def _same_until(local: LocalLog, manifest: Manifest) -> int:
    """The offset below which the local records are those of the manifest's history."""
    same_until = local.end_offset
    if (manifest.owner, manifest.leader_epoch) not in local.recorded:
        same_until = divergence_offset(
            local.history,
            manifest.epochs,
            local_end=local.end_offset,
            remote_end=_reached(manifest),
        )
    for gap in manifest.gaps:
        if any(
            base < gap.end_offset and gap.start_offset < next_offset
            for base, next_offset in local.ranges
        ):
            same_until = min(same_until, gap.start_offset)
    return same_until


def history_of(copy: Manifest | None, own: Sequence[EpochStart]) -> tuple[EpochStart, ...]:
    """The epochs of the last manifest seen in force, and those that this folder began since."""
    history = copy.epochs if copy else ()
    for start in own:
        if not history or start.epoch > history[-1].epoch:
            history = append_epoch(history, start)
    return history


ATTEMPTS = 16


NO_MANIFEST = ("", -1)


Reopen = Callable[[int, int | None], PartitionLog]
"""Open the log as after a crash: (upper bound of the recovery point, lower bound of the log
start)."""


class PendingTakeOver(msgspec.Struct, frozen=True, kw_only=True):
    """`gap`: how many offsets to skip above the last that another owner may have assigned.
    `whole_tail_of`: the (owner, epoch) of the manifest under which the local log is known to hold
    everything that was ever acknowledged: nothing is skipped while that manifest is in force.
    """

    gap: int = 0
    whole_tail_of: tuple[str, int] | None = None

    def gap_over(self, manifest: Manifest | None) -> int:
        in_force = (manifest.owner, manifest.leader_epoch) if manifest else NO_MANIFEST
        return 0 if self.whole_tail_of == in_force else self.gap


TAKE_OVERS: Final = Document("take-over.json", "take-over", dict[str, PendingTakeOver])


class PendingTakeOvers:
    """`take-over.json`. Thread-safe; each change is durable when the call returns."""

    def __init__(self, folder: DataFolder) -> None:
        self._data_dir = folder.path
        self._lock = threading.Lock()
        self._pending = TAKE_OVERS.read_document(folder.path) or {}

    def get(self, name: str) -> PendingTakeOver | None:
        return self._pending.get(name)

    def add_pending(self, name: str, pending: PendingTakeOver) -> None:
        with self._lock:
            self._save({**self._pending, name: pending})

    def remove(self, names: Sequence[str]) -> None:
        with self._lock:
            kept = {name: one for name, one in self._pending.items() if name not in names}
            if kept != self._pending:
                self._save(kept)

    def forget_all_but(self, topic_ids: Collection[str]) -> None:
        """Forget topics that no longer exist, such as one that was deleted while damaged."""
        gone = [
            name for name in self._pending if parse_topic_id_partition(name)[0] not in topic_ids
        ]
        self.remove(gone)

    def _save(self, pending: dict[str, PendingTakeOver]) -> None:
        write_take_overs(self._data_dir, pending)
        self._pending = pending


def write_take_overs(data_dir: Path, pending: dict[str, PendingTakeOver]) -> None:
    """Replace the file, or remove it if nothing is pending."""
    if pending:
        TAKE_OVERS.write_document(data_dir, pending)
    elif (path := TAKE_OVERS.path(data_dir)).exists():
        path.unlink()
        REAL_DISK.sync_folder(path.parent)


class TakeOver:
    """One partition's take-over. `flushed_end`: the folder's log is known to have reached it."""

    def __init__(
        self,
        cold: ColdLog,
        pending: PendingTakeOver,
        own: tuple[EpochStart, ...],
        *,
        owner: str,
        flushed_end: int,
        reopen: Reopen,
    ) -> None:
        self._flushed_end = flushed_end
        self._cold, self._pending, self._own, self._reopen = cold, pending, own, reopen
        self._owner = owner
        self._recorded = cold.ownership.recorded
        self.manifest: Manifest | None = None
        self.is_foreign = False
        self.gap = 0
        self.resume_at: int | None = None

    def is_ours(self) -> bool:
        """Whether the claim of an earlier attempt is in force: the manifest has its gap."""
        manifest = self.manifest
        return manifest is not None and manifest.owner == self._owner and not self.is_foreign

    @property
    def is_of_a_copy(self) -> bool:
        """Whether the owner in force is another folder, of which this one is a copy. The lock of
        this one does not keep a broker off that one, which may have acknowledged records since.
        """
        return self.manifest is not None and self.manifest.owner != self._owner

    def _is_of_another(self, manifest: Manifest) -> bool:
        """Whether the owner or epoch is one that this folder never recorded, or the folder is an
        older copy of the owner's.
        """
        is_known = (manifest.owner, manifest.leader_epoch) in self._recorded
        return not is_known or self._cold.ownership.is_older_than(manifest)

    def reload(self) -> None:
        """Load the manifest in force and determine whether it `is_foreign`. Raises
        ConfigurationError if the store does not respond.
        """
        try:
            newest = self._cold.load_newest()
            self.is_foreign = newest is not None and self._is_of_another(newest)
            self.manifest = newest
        except StoreUnavailable as error:
            raise ConfigurationError(
                f"{self._cold}: cannot be taken over: the store does not respond: {error}"
            ) from error
        self.gap = 0 if self.is_ours() else self._pending.gap_over(self.manifest)

    def align(self, opened: PartitionLog) -> PartitionLog:
        """Reconcile the local log with the loaded manifest; the log may be reopened."""
        if opened.log_end_offset < self._flushed_end and not self.is_ours():
            self.gap = self._pending.gap  # the tail was complete, but is no longer
        ranges = tuple(
            (view.base_offset, view.last_offset + 1)
            for view in opened.segments()
            if view.last_offset >= view.base_offset
        )
        local = LocalLog(
            history_of(self._cold.manifest, self._own),
            self._recorded,
            ranges,
            opened.log_end_offset,
            opened.log_start_offset,
            self._flushed_end,
        )
        plan = plan_take_over(local, self.manifest, gap=self.gap)
        self.resume_at = plan.resume_at
        if plan[:3] in ((None, None, None), (None, local.end_offset, None)):
            return self._trimmed(opened)
        folder, epoch = opened.folder, opened.leader_epoch
        opened.close()
        recovery_point = opened.log_end_offset
        if plan.diverged_from is not None:
            recovery_point = min(recovery_point, self._set_aside(folder, plan.diverged_from, epoch))
        if plan.start_at is not None:
            snapshot = self._cold.reads.producers_at_end(self.manifest)
            closed_log.replace_with_empty(folder, plan.start_at, snapshot=snapshot)
            log.info("log restarted empty", partition=str(self._cold), offset=plan.start_at)
        elif plan.split_at is not None:
            recovery_point = min(recovery_point, closed_log.split_at(folder, plan.split_at))
        return self._reopen(recovery_point, self.log_start_offset)

    @property
    def log_start_offset(self) -> int | None:
        """A lower bound of the local log start; None if nothing is in the bucket."""
        return self.manifest.log_start_offset if self.manifest else None

    def _trimmed(self, opened: PartitionLog) -> PartitionLog:
        if self.manifest is not None:
            opened.trim(min(self.manifest.log_start_offset, opened.high_watermark))
        return opened

    def _set_aside(self, folder: Path, offset: int, epoch: int) -> int:
        """Move the records from `offset` on out of the partition; the rest's recovery point."""
        recovery_point = closed_log.split_at(folder, offset)
        target = _folder_for(folder, epoch)
        make_folders(target.parent)
        closed_log.move_segments(folder, offset, target)
        log.warning(
            "diverged records set aside: another owner had taken this partition over",
            partition=str(self._cold),
            epoch=epoch,
            offset=offset,
            folder=str(target),
        )
        return recovery_point

    def next_offset(self, opened: PartitionLog) -> int:
        """The first offset to be assigned after the claim."""
        return opened.log_end_offset if self.resume_at is None else self.resume_at

    def commit_take_over(self, opened: PartitionLog) -> bool:
        """Claim the partition. Returns False if the manifest has to be reloaded: the bucket has
        moved on, or it now has the tail, which may be removed here.
        """
        tail = self._uploaded_tail(opened) if self.resume_at is not None else []
        try:
            taken = self._cold.ownership.take_over(
                self.manifest,
                log_start_offset=opened.log_start_offset,
                tail=tail,
                gap_end=self.next_offset(opened) if self.gap else 0,
            )
        except ManifestConflict as moved:
            log.warning("take-over restarted", partition=str(self._cold), reason=str(moved))
            return False
        self._recorded |= {(taken.owner, taken.leader_epoch)}
        return self.resume_at is None

    def _uploaded_tail(self, opened: PartitionLog) -> list[SegmentEntry]:
        """Upload what the local log has past the manifest's end; no manifest names it yet."""
        assert self.manifest is not None, "a tail extends what is in the bucket"
        opened.roll()
        end = self.manifest.end_offset
        return [
            self._cold.upload_files(opened.sealed.prepare_upload(view.base_offset))
            for view in opened.segments()
            if view.last_offset >= max(end, view.base_offset)
        ]

    @property
    def kept_epochs(self) -> tuple[EpochStart, ...]:
        """The epochs of this folder under which the remaining records were written."""
        if self.manifest is None:
            return () if self.gap else self._own
        if self.gap or self.is_foreign:
            return ()
        return tuple(start for start in self._own if start.epoch > self.manifest.leader_epoch)


def _folder_for(folder: Path, epoch: int) -> Path:
    """The folder for that epoch, or the next free one: an earlier topic of the same name may have
    records set aside under it, which are never overwritten.
    """
    own = topic_id_of([folder])
    beside = diverged_folder(folder.parent) / folder.name
    paths = (with_suffix(beside, f"-{number}") for number in count(epoch))
    return next(path for path in paths if _may_hold(path, own))


def _may_hold(path: Path, topic_id: str | None) -> bool:
    """Whether the path is free, or holds records of that topic."""
    try:
        return topic_id_of([path]) in (topic_id, None)
    except CorruptDataError:
        return False
