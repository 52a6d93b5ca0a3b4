"""Opens the logs of a data folder, each under a new leader epoch, and discards those of deleted
topics.

* An epoch is durable before the first append under it: one file, one fsync, for all that are opened
  together.
* A log that ends below what the bucket holds starts at the bucket's end: no offset is given twice.
* The log start is what the checkpoint says, for one that is not in it what the bucket says, and
  only for a log that is nowhere but here where its first segment begins.
* A folder that Kafka wrote and that no topic names is adopted. What is Kafka's own business stays
  as it is: its brokers' internal topics, and folders on their way out or in (`-delete`, `-future`,
  `-stray`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

import structlog

from broker.bucket import Bucket
from broker.cold_log import ColdLog
from broker.data_folder import LOG_STARTS, RECOVERY_POINTS, DataFolder, new_id
from broker.partition import Partition
from broker.settings import BrokerSettings
from broker.topic_registry import TopicRecord, TopicRegistry
from hot_tier.durable_file import sync_folder
from hot_tier.group_commit import FlushTimer, GroupCommit
from hot_tier.log import PartitionLog
from hot_tier.log_config import LogConfig
from hot_tier.open_files import OpenFiles
from manifest.epochs import assign
from manifest.state import EpochStart
from record_format import checkpoint_files

log = structlog.get_logger(__name__)

_PARTITION_FOLDER: Final = re.compile(r"(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<partition>\d{1,9})\Z")
_KAFKAS_OWN: Final = frozenset(
    {"__cluster_metadata", "__transaction_state", "__remote_log_metadata", "__share_group_state"}
)
_KEPT_WHOLE: Final = {"retention.ms": -1, "retention.bytes": -1}

Wanted = tuple[TopicRecord, int]


class LogOpener:
    def __init__(
        self,
        folder: DataFolder,
        settings: BrokerSettings,
        bucket: Bucket | None,
        executor: Executor,
        *,
        clock: Callable[[], int],
        check_room: Callable[[], None],
    ) -> None:
        self._folder, self._settings, self._bucket = folder, settings, bucket
        self._executor, self._clock = executor, clock
        self._check_room = check_room
        self._timer = FlushTimer()
        self._files = OpenFiles()
        self._recovery_points = folder.read_checkpoint(RECOVERY_POINTS)
        self._log_starts = folder.read_checkpoint(LOG_STARTS)
        self._epochs = folder.read_epochs()

    def forget_checkpoints(self) -> None:
        """What the start did not use is of topics that are gone; a new one may get such a name."""
        self._recovery_points.clear()
        self._log_starts.clear()

    def close_timer(self) -> None:
        self._timer.close()

    def open_partitions(self, wanted: Iterable[Wanted]) -> list[Partition]:
        """Open or make them, side by side, and give each its epoch; in the order of `wanted`."""
        opened = list(self._executor.map(self._open, wanted))
        self._begin_epochs(opened)
        return [
            Partition(
                log_,
                GroupCommit(log_, self._executor, self._timer),
                cold,
                check_room=self._check_room,
            )
            for log_, cold in opened
        ]

    def _open(self, wanted: Wanted) -> tuple[PartitionLog, ColdLog | None]:
        record, number = wanted
        config = LogConfig.parse(record.config)
        cold = None
        if self._bucket is not None and config.remote_storage_enable:
            cold = self._bucket.cold_log(record, number)
        cold_end = cold.end_offset if cold else 0
        place = (record.name, number)
        opened = PartitionLog.open(
            self._folder.partition_folder(*place),
            topic=record.name,
            partition=number,
            topic_id=record.topic_id,
            config=config,
            clock=self._clock,
            clean=self._folder.was_clean,
            recovery_point=self._recovery_points.pop(place, 0),
            log_start_offset=self._log_start(place, cold),
            start_offset=cold_end,
            jitter_seed=f"{record.topic_id}-{number}",
            open_files=self._files,
        )
        if opened.log_end_offset < cold_end:
            log.warning("log starts at the bucket's end", partition=f"{place}", offset=cold_end)
            opened.start_at(cold_end)
        return opened, cold

    def _log_start(self, place: tuple[str, int], cold: ColdLog | None) -> int | None:
        checkpointed = self._log_starts.pop(place, None)
        in_bucket = cold.manifest.log_start_offset if cold and cold.manifest else None
        known = [start for start in (checkpointed, in_bucket) if start is not None]
        return max(known) if known else None

    # --- epochs -----------------------------------------------------------------------------------

    def _begin_epochs(self, opened: Iterable[tuple[PartitionLog, ColdLog | None]]) -> None:
        """Take the next epoch of each log; durable before this returns."""
        epochs = dict(self._epochs)
        for log_, cold in opened:
            name = f"{log_.topic_id}-{log_.partition}"
            history = epochs.get(name, ())
            in_force = cold.manifest.leader_epoch if cold and cold.manifest else -1
            last = max([log_.leader_epoch, in_force, *(entry.epoch for entry in history)])
            start = EpochStart(last + 1, log_.log_end_offset, self._folder.owner)
            kept = tuple(entry for entry in history if entry.epoch > in_force)
            epochs[name] = assign(kept, start)
            log_.bump_epoch(start.epoch)
            if cold is not None:
                cold.prepare_claim(
                    self._folder.owner, epochs[name], take_over=self._settings.take_over
                )
        self._folder.write_epochs(epochs)
        self._epochs = epochs

    # --- folders that no topic names --------------------------------------------------------------

    def adopt_found_folders(self, registry: TopicRegistry) -> None:
        """Make topics of the partition folders that Kafka left here."""
        known = {record.name for record in registry.live()} | {r.name for r in registry.deleted()}
        found: dict[str, dict[int, Path]] = {}
        for path in sorted(self._folder.path.iterdir()):
            match = _PARTITION_FOLDER.match(path.name)
            if match and path.is_dir() and match["topic"] not in known | _KAFKAS_OWN:
                found.setdefault(match["topic"], {})[int(match["partition"])] = path
        for topic, folders in found.items():
            registry.put(self._adopted(topic, folders))
            log.info("topic adopted", topic=topic, partitions=sorted(folders))

    def _adopted(self, topic: str, folders: Mapping[int, Path]) -> TopicRecord:
        count = max(folders) + 1
        return TopicRecord(
            name=topic,
            topic_id=_topic_id_of(folders.values()) or new_id(),
            partitions=count,
            config=dict(_KEPT_WHOLE),
            created_ms=self._clock(),
            absent=tuple(number for number in range(count) if number not in folders),
        )

    # --- deleted topics ---------------------------------------------------------------------------

    def set_aside(self, record: TopicRecord) -> list[Path]:
        """Rename a deleted topic's folders out of the way of a new one of its name.

        The new name is Kafka's (`<topic>-<p>.<id>-delete`), which its brokers and ours leave alone.
        """
        aside = []
        for number in range(record.partitions):
            path = self._folder.partition_folder(record.name, number)
            gone = path.with_name(f"{path.name}.{record.topic_id}-delete"[-255:])
            if path.exists() and _topic_id_of([path]) in (record.topic_id, None):
                path.rename(gone)
            if gone.exists():
                aside.append(gone)
        sync_folder(self._folder.path)
        return aside

    def remove(self, record: TopicRecord) -> None:
        """Delete what a deleted topic left on disk; again after a crash half way."""
        for path in self.set_aside(record):
            shutil.rmtree(path)


def _topic_id_of(folders: Iterable[Path]) -> str | None:
    for folder in folders:
        path = folder / "partition.metadata"
        if path.exists():
            topic_id = checkpoint_files.parse_partition_metadata(path.read_bytes(), file=str(path))
            return checkpoint_files.format_topic_id(topic_id)
    return None
