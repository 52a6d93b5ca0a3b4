"""Taking a partition over from another folder: what of the local log may stay, and the claim.

| the local log                                   | becomes                                        |
|-------------------------------------------------|------------------------------------------------|
| holds records past the point where the          | those go to `<partition>.diverged-<epoch>/`:   |
| histories part, or within a gap of the manifest | never served, uploaded or deleted; reported    |
| ends below the manifest's end                   | begins at the manifest's end                   |
| reaches past the manifest's end                 | has a border of segments there                 |
| is of a restore                                 | begins at the manifest's end plus the gap      |

* `<data>/tierlog/take-over.json` names the partitions that are under way, durably, before a file is
  touched; a partition leaves it when its claim is in the bucket. Every step may be repeated.
* The claim is committed on top of the very end that the local log was brought in line with: where
  another owner was faster, everything is looked at anew. So it needs the store, and a start that
  takes over does not begin without it.
* `plan_parting` is pure; the rest of this file acts on what it says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from broker.cold_log import ColdLog
from broker.data_folder import DataFolder
from hot_tier import parting
from hot_tier.durable_file import sync_folder, write_durably
from hot_tier.log import PartitionLog
from manifest.epochs import assign, parting_offset, recorded_pairs
from manifest.state import EpochStart, Manifest
from record_format import sealed_json, typed_json
from record_format.errors import (
    ConfigurationError,
    ManifestConflict,
    StoreUnavailable,
)

log = structlog.get_logger(__name__)

ATTEMPTS = 16
KIND = "take-over"
NO_MANIFEST = ("", -1)

Reopen = Callable[[int, int], PartitionLog]
"""Open the log as after a crash: (the recovery point at most, the log start at least)."""


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """One partition that is being taken over.

    `gap`: how many offsets to leave out. `whole_tail_of`: the (owner, epoch) of the manifest under
    which the local log is known to hold everything that was ever acknowledged, so that nothing is
    left out as long as that one is in force.
    """

    gap: int = 0
    whole_tail_of: tuple[str, int] | None = None

    def gap_over(self, manifest: Manifest | None) -> int:
        in_force = (manifest.owner, manifest.leader_epoch) if manifest else NO_MANIFEST
        return 0 if self.whole_tail_of == in_force else self.gap


class TakeOvers:
    """The partitions under way. Thread-safe; each change is durable when the call returns."""

    def __init__(self, folder: DataFolder) -> None:
        self._path = marker_path(folder.path)
        self._lock = threading.Lock()
        self._pending: dict[str, Pending] = {}
        if self._path.exists():
            document = sealed_json.unseal(self._path.read_bytes(), kind=KIND, file=str(self._path))
            self._pending = typed_json.decode(document, dict[str, Pending])

    def get(self, name: str) -> Pending | None:
        return self._pending.get(name)

    def add(self, name: str, pending: Pending) -> Pending:
        with self._lock:
            self._save({**self._pending, name: pending})
        return pending

    def remove(self, names: Sequence[str]) -> None:
        with self._lock:
            kept = {name: one for name, one in self._pending.items() if name not in names}
            if kept != self._pending:
                self._save(kept)

    def _save(self, pending: dict[str, Pending]) -> None:
        write_marker(self._path, pending)
        self._pending = pending


def marker_path(data_dir: Path) -> Path:
    return data_dir / "tierlog" / "take-over.json"


def write_marker(path: Path, pending: Mapping[str, Pending]) -> None:
    if pending:
        write_durably(path, sealed_json.seal(msgspec.json.encode(pending), kind=KIND))
    elif path.exists():
        path.unlink()
        sync_folder(path.parent)


# --- the decision ---------------------------------------------------------------------------------


class LocalLog(NamedTuple):
    """`history`: the epochs that this folder knows of, its own and those it saw in force.

    `recorded`: the (owner, epoch) pairs that it took or saw in force, also those under which
    nothing was written. `ranges`: [base, next) of its segments that hold something.
    """

    history: tuple[EpochStart, ...]
    recorded: frozenset[tuple[str, int]]
    ranges: tuple[tuple[int, int], ...]
    end_offset: int


class Parting(NamedTuple):
    """From `diverged_from` on the local log is set aside; then it begins at `start_at`, or stays,
    with a border at `split_at`. None: nothing of the kind.
    """

    diverged_from: int | None
    start_at: int | None
    split_at: int | None


def plan_parting(local: LocalLog, manifest: Manifest | None, *, gap: int) -> Parting:
    """What becomes of the local log under this manifest."""
    end = manifest.end_offset if manifest else 0
    kept_end = _same_until(local, manifest) if manifest else local.end_offset
    if gap:
        # Above the end somebody else may have acknowledged other records under these offsets.
        kept_end = min(kept_end, end)
    holds_more = any(next_offset > kept_end for _, next_offset in local.ranges)
    start = end + gap if gap else end
    behind = kept_end < start
    straddled = any(base < end < next_offset for base, next_offset in local.ranges)
    return Parting(
        diverged_from=kept_end if holds_more else None,
        start_at=start if behind else None,
        split_at=end if straddled and not behind else None,
    )


def _same_until(local: LocalLog, manifest: Manifest) -> int:
    """Below this offset the local records are those of the manifest's history."""
    same_until = local.end_offset
    if (manifest.owner, manifest.leader_epoch) not in local.recorded:
        # The other log reached at least to where its last epoch began.
        remote_end = max(manifest.end_offset, manifest.epochs[-1].start_offset)
        same_until = parting_offset(
            local.history, manifest.epochs, local_end=local.end_offset, remote_end=remote_end
        )
    for gap in manifest.gaps:
        if any(
            base < gap.end_offset and gap.start_offset < next_offset
            for base, next_offset in local.ranges
        ):
            same_until = min(same_until, gap.start_offset)
    return same_until


def history_of(copy: Manifest | None, own: Sequence[EpochStart]) -> tuple[EpochStart, ...]:
    """The last manifest seen in force, and what this folder began since."""
    history = copy.epochs if copy else ()
    for start in own:
        if not history or start.epoch > history[-1].epoch:
            history = assign(history, start)
    return history


# --- acting on it ---------------------------------------------------------------------------------


class TakeOver:
    """One partition's take-over."""

    def __init__(
        self,
        cold: ColdLog,
        pending: Pending,
        own: tuple[EpochStart, ...],
        *,
        owner: str,
        reopen: Reopen,
    ) -> None:
        self._cold, self._pending, self._own, self._reopen = cold, pending, own, reopen
        self._owner = owner
        self._recorded = recorded_pairs(cold.manifest, own)
        self.manifest: Manifest | None = None
        self.gap = 0

    def is_done(self) -> bool:
        """Whether an earlier start committed the claim, and died before it noted that."""
        manifest = self.manifest
        mine = {start.epoch for start in self._own if start.owner == self._owner}
        return (
            manifest is not None and manifest.owner == self._owner and manifest.leader_epoch in mine
        )

    def is_foreign(self) -> bool:
        """Whether the manifest in force is of an owner or epoch that this folder never recorded."""
        manifest = self.manifest
        if manifest is None:
            return False
        return (manifest.owner, manifest.leader_epoch) not in self._recorded

    def look(self) -> None:
        """Load the manifest in force. Raises ConfigurationError where the store does not answer."""
        try:
            self.manifest = self._cold.load_newest()
        except StoreUnavailable as error:
            raise ConfigurationError(
                f"{self._cold}: is to be taken over, and the store does not answer: {error}"
            ) from error
        self.gap = self._pending.gap_over(self.manifest)

    def align(self, opened: PartitionLog) -> PartitionLog:
        """Bring the local log in line with the manifest looked at; it may be opened anew."""
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
        )
        plan = plan_parting(local, self.manifest, gap=self.gap)
        if plan in (Parting(None, None, None), Parting(None, local.end_offset, None)):
            return self._trimmed(opened)
        folder, epoch = opened.folder, opened.leader_epoch
        opened.close()
        border = opened.log_end_offset
        if plan.diverged_from is not None:
            border = min(border, self._set_aside(folder, plan.diverged_from, epoch))
        if plan.start_at is not None:
            snapshot = self._cold.producers_at_end(self.manifest)
            parting.start_empty(folder, plan.start_at, snapshot=snapshot)
            log.info("log begins anew", partition=str(self._cold), offset=plan.start_at)
        elif plan.split_at is not None:
            border = min(border, parting.split_at(folder, plan.split_at))
        return self._reopen(border, self.manifest.log_start_offset if self.manifest else 0)

    def _trimmed(self, opened: PartitionLog) -> PartitionLog:
        if self.manifest is not None:
            opened.trim(min(self.manifest.log_start_offset, opened.high_watermark))
        return opened

    def _set_aside(self, folder: Path, offset: int, epoch: int) -> int:
        """Records from `offset` on leave the partition; the border that was cut."""
        border = parting.split_at(folder, offset)
        target = folder.with_name(f"{folder.name}.diverged-{epoch}")
        parting.move_from(folder, offset, target)
        log.warning(
            "records set apart: another owner took this partition over",
            partition=str(self._cold),
            epoch=epoch,
            offset=offset,
            folder=str(target),
        )
        return border

    def commit(self, opened: PartitionLog) -> bool:
        """Claim the partition; False where the bucket has moved on since it was looked at."""
        end = opened.log_end_offset
        try:
            self._cold.take_over(
                self.manifest,
                log_start_offset=opened.log_start_offset,
                gap_end=end if self.gap else 0,
            )
        except ManifestConflict as moved:
            log.warning("take-over begins again", partition=str(self._cold), reason=str(moved))
            return False
        return True

    @property
    def kept_epochs(self) -> tuple[EpochStart, ...]:
        """Of this folder's own, those under which the records that stay were written."""
        if self.manifest is None:
            return () if self.gap else self._own
        if self.gap or self.is_foreign():
            return ()
        return tuple(start for start in self._own if start.epoch > self.manifest.leader_epoch)
