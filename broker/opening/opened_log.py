"""A log on its way to being served, which `log_opener` leads: wanted (`Wanted`), specified
(`LogSpec`), opened (`OpenedLog`), and given a new leader epoch (`AllocatedEpochs`, `epochs.json`).

* An epoch is durable before the first append under it: one file and one fsync for all logs that
  are opened together.
* It is above every epoch of the log, of the bucket when last seen, and of this folder.
* `AllocatedEpochs` is thread-safe: a repair may open a log at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from tierlog.broker.bucket.cold_log import ColdLog
from tierlog.broker.data_folder.data_folder import (
    DataFolder,
    Document,
    format_topic_id_partition,
    parse_topic_id_partition,
)
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.opening.take_over import TakeOver
from tierlog.host.disk import Disk
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_state import no_producer_snapshot, not_uploaded
from tierlog.hot_tier.open_files import OpenFiles
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.manifest.state import MAX_EPOCHS, EpochStart


class Wanted(NamedTuple):
    """A partition to open or create. `recovery_point`, `log_start_offset`: by the checkpoints;
    compaction never comes further than the recovery point. `flushed_end`: what a repair found in
    place of the recovery point and the bucket's end; `may_cut_from`: the loss from there on was
    accepted. `at_start`: of the broker, when a log must exist, and may be taken over. `is_replica`:
    one of several (`broker.replicas`).
    """

    record: TopicRecord
    number: int
    recovery_point: int | None = None
    log_start_offset: int | None = None
    flushed_end: int | None = None
    may_cut_from: int | None = None
    at_start: bool = False
    is_replica: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSpec:
    """How to open a log. A take-over opens it again after it changed the files.

    `checkpoint`: the recovery point as it was saved. `request.flushed_end`: below it everything is
    known to have been flushed; `request.log_start_offset`: None if neither the checkpoint nor the
    bucket has one.
    """

    folder: Path
    record: TopicRecord
    number: int
    at_start: bool
    is_replica: bool
    cold: ColdLog | None
    checkpoint: int
    request: OpenRequest
    clock: Callable[[], int]
    disk: Disk
    open_files: OpenFiles

    def __str__(self) -> str:
        return f"{self.record.name}-{self.number}"

    @property
    def name(self) -> str:
        """Topic id and partition, as files below `tierlog/` name the partition."""
        return format_topic_id_partition(self.record.topic_id, self.number)

    @property
    def cold_end(self) -> int:
        """Where the bucket ends; 0 without one."""
        return self.request.start_offset

    def open(self) -> PartitionLog:
        return self._open(self.request)

    def open_for_take_over(self, log_start_offset: int | None) -> PartitionLog:
        """Open the log of a partition that is being taken over. `log_start_offset`: the bucket's;
        it counts where the log has none of its own, because an earlier attempt may have left a
        first segment that begins above it.
        """
        own = self.request.log_start_offset
        start = own if own is not None else log_start_offset
        return self._open(
            replace(self.request, flushed_end=self.checkpoint, log_start_offset=start)
        )

    def reopen(self, recovery_point: int, log_start_offset: int | None) -> PartitionLog:
        """Open the log again as after a crash, with these bounds: the recovery point is at most,
        the log start at least the one given.
        """
        starts = (self.request.log_start_offset, log_start_offset)
        return self._open(
            replace(
                self.request,
                clean=False,
                recovery_point=min(self.request.recovery_point, recovery_point),
                flushed_end=self.checkpoint,
                log_start_offset=max((at for at in starts if at is not None), default=None),
            )
        )

    def _open(self, request: OpenRequest) -> PartitionLog:
        cold = self.cold
        return PartitionLog.open(
            self.folder,
            topic=self.record.name,
            partition=self.number,
            topic_id=self.record.topic_id,
            config=LogConfig.parse(self.record.config),
            clock=self.clock,
            request=request,
            disk=self.disk,
            open_files=self.open_files,
            fetch_producer_snapshot=cold.reads.producers_before if cold else no_producer_snapshot,
            uploaded_crc32c=cold.reads.uploaded_crc32c if cold else not_uploaded,
        )


class OpenedLog:
    """A log that is about to get an epoch and an owner; then a `Partition` serves it.
    `take_over` is None if the partition is this folder's own.
    """

    __slots__ = ("cold", "log", "take_over")

    def __init__(self, log: PartitionLog, cold: ColdLog | None, take_over: TakeOver | None) -> None:
        self.log, self.cold, self.take_over = log, cold, take_over

    @property
    def name(self) -> str:
        return format_topic_id_partition(self.log.topic_id, self.log.partition)

    @property
    def next_offset(self) -> int:
        """Where the new epoch begins."""
        if self.take_over is not None:
            return self.take_over.next_offset(self.log)
        return self.log.log_end_offset

    @property
    def epoch_in_force(self) -> int:
        """The epoch last seen in the bucket; -1 if none was."""
        manifest = self.cold.manifest if self.cold else None
        if self.take_over is not None:
            manifest = self.take_over.manifest
        return manifest.leader_epoch if manifest else -1

    def kept_epochs(self, history: tuple[EpochStart, ...]) -> tuple[EpochStart, ...]:
        """Those of this folder's own epochs that the bucket does not know yet."""
        if self.take_over is not None:
            return self.take_over.kept_epochs
        return tuple(entry for entry in history if entry.epoch > self.epoch_in_force)

    def commit_take_over(self) -> bool:
        assert self.take_over is not None
        return self.take_over.commit_take_over(self.log)

    def reload_manifest(self) -> None:
        assert self.take_over is not None
        self.take_over.reload()
        self.log = self.take_over.align(self.log)


EPOCHS: Final = Document("epochs.json", "epochs", dict[str, tuple[EpochStart, ...]])


class AllocatedEpochs:
    """By topic id and partition."""

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._epochs = EPOCHS.read_document(folder.path) or {}
        self._lock = threading.Lock()  # for changes

    def of(self, name: str) -> tuple[EpochStart, ...]:
        """The epochs that the bucket may not know yet, oldest first."""
        return self._epochs.get(name, ())

    def prepare(self, cold: ColdLog, name: str) -> None:
        """Prepare the claim of a log that is open already, under the epoch that it has."""
        cold.ownership.prepare(self._folder.owner, self.of(name), take_over=False)

    def allocate(self, opened: Sequence[OpenedLog]) -> None:
        """Start the next epoch of each log and prepare its claim; durable when this returns. May be
        repeated after an error. Raises OSError.
        """
        owner = self._folder.owner
        with self._lock:
            epochs = dict(self._epochs)
            for one in opened:
                history = epochs.get(one.name, ())
                own = (entry.epoch for entry in history)
                last = max([one.log.leader_epoch, one.epoch_in_force, *own])
                start = EpochStart(last + 1, one.next_offset, owner)
                # Includes epochs under which nothing was written: one may be in force in the bucket
                # through a claim whose process died before it was recorded here.
                epochs[one.name] = (*one.kept_epochs(history), start)[-MAX_EPOCHS:]
                one.log.bump_epoch(start.epoch)
            self._save(epochs)
            for one in opened:
                if one.cold is not None:
                    is_take_over = one.take_over is not None
                    one.cold.ownership.prepare(owner, epochs[one.name], take_over=is_take_over)

    def forget_all_but(self, topic_ids: Collection[str]) -> None:
        """Forget topics that no longer exist, here or in the bucket."""
        with self._lock:
            kept = {
                name: history
                for name, history in self._epochs.items()
                if parse_topic_id_partition(name)[0] in topic_ids
            }
            if len(kept) != len(self._epochs):
                self._save(kept)

    def _save(self, epochs: dict[str, tuple[EpochStart, ...]]) -> None:
        EPOCHS.write_document(self._folder.path, epochs, write=self._folder.write)
        self._epochs = epochs
