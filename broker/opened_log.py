"""A log that was opened and is about to get an epoch and an owner; then a `Partition` serves it."""

from __future__ import annotations

from broker.cold_log import ColdLog
from broker.data_folder import format_topic_id_partition
from broker.ownership.take_over import TakeOver
from hot_tier.log import PartitionLog
from manifest.state import EpochStart


class OpenedLog:
    """`take_over` is None if the partition is this folder's own."""

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
        return self.take_over.commit(self.log)

    def reload_manifest(self) -> None:
        assert self.take_over is not None
        self.take_over.reload()
        self.log = self.take_over.align(self.log)
