"""Copies what the disk of a lost broker still has above the bucket's end, batch by batch.

| the old folder's log                                        | action                             |
|-------------------------------------------------------------|------------------------------------|
| is missing, or has another topic id                         | none; a gap separates the offsets  |
| belongs to a folder that does not know the manifest's epoch | none: another owner came after it  |
| begins above the bucket's end and its own log start         | none: there is a hole              |
| is corrupt below its recovery point                         | copy as it is, with the gap: to be |
|                                                             | repaired after the first start     |
| ends below the bucket's end or its own checkpoints, or was  | copy, with a gap above: more may   |
| truncated at a corrupt byte                                 | have been acknowledged             |
| is still to be continued above a gap: the folder was itself | copy, with the gap above           |
| restored, and never started                                 |                                    |
| is complete, or of a partition that nobody ever claimed in  | copy from the bucket's end on; no  |
| the bucket, and was truncated above its checkpoints         | gap is needed                      |

* A partition without a manifest has had no other owner. Its log is truncated as by the old folder's
  own next start; a gap above the rest is impossible, because no manifest has the records below it.
* A topic without remote storage gets no gap: the checkpoints are copied too, and the first start
  refuses a log that ends below them.
* The old folder may also have newer state of topics: a topic that was not published yet is restored
  from it, and so are unpublished partitions, configuration and deletions, unless another owner
  wrote to the bucket since.

* The old folder is locked and only read; it cannot be used while a broker has it open. Whatever its
  next start would clean up, such as an interrupted compaction, is cleaned up in an overlay.
* The copy is recovered as after a crash: every batch is checked (CRC, order, length), and the log
  is truncated at the first corrupt one above the recovery point. Corruption below it is left to a
  repair, which needs the new folder, and does not keep other partitions from being restored. What
  the old disk cannot read is copied as zeros, and so counts as corrupt.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from tierlog.broker.bucket.cold_reads import uses_bucket
from tierlog.broker.data_folder.bucket_state import BucketState
from tierlog.broker.data_folder.data_folder import (
    CLEANER_CHECKPOINT,
    COMPACTION_REACHED,
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
    folder_lock,
    format_topic_id_partition,
    read_checkpoint,
)
from tierlog.broker.data_folder.topic_registry import TopicRegistry
from tierlog.broker.opening.opened_log import EPOCHS
from tierlog.broker.opening.take_over import TAKE_OVERS
from tierlog.broker.partition.checkpoints import TRUNCATIONS
from tierlog.host.durable_file import write_durably
from tierlog.hot_tier import closed_log
from tierlog.hot_tier.derived_files import snapshot_before
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_folder import LOG, SNAPSHOT, path_of
from tierlog.hot_tier.open_files import zero_filling_pread
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.state import EpochStart, Manifest
from tierlog.manifest.store import ManifestStore
from tierlog.record_format import checkpoint_files
from tierlog.record_format.errors import ConfigurationError, CorruptDataError, CorruptSnapshot


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """[start, end) was copied. `epochs`: the old folder's epochs that the bucket does not know yet.
    `whole`: no acknowledged record is missing, so that no gap is needed. `damaged`: bytes that had
    been flushed are corrupt.
    """

    whole: bool
    detail: str
    start_offset: int = 0
    end_offset: int = 0
    epochs: tuple[EpochStart, ...] = ()
    damaged: bool = False


class TailTarget(NamedTuple):
    """The partition that the tail is copied to."""

    folder: Path
    keys: PartitionKeys
    config: LogConfig
    clock: Callable[[], int]


class OldFolder:
    """The data folder of a lost broker; locked until `close`.

    `truncations`: those that groups have not followed yet.

    By topic id, `unpublished`: topics whose present state is not in the bucket yet; `deleted`:
    topics whose deletion is incomplete.
    """

    def __init__(self, path: Path, *, cluster_id: str) -> None:
        properties = path / "meta.properties"
        if not properties.exists():
            raise ConfigurationError(f"--tail {path}: not a broker's data folder")
        found = checkpoint_files.parse_properties(properties.read_bytes(), file=str(properties))
        if (its_id := found.get("cluster.id")) != cluster_id:
            raise ConfigurationError(
                f"--tail {path}: belongs to cluster {its_id}, the bucket to {cluster_id}"
            )
        self.path = path
        self._open = ExitStack()
        self._open.enter_context(folder_lock(path))
        self._epochs = EPOCHS.read_document(path) or {}
        self._take_overs = TAKE_OVERS.read_document(path) or {}
        self.truncations = TRUNCATIONS.read_document(path) or {}
        self._recovery_points = read_checkpoint(path / RECOVERY_POINTS)
        self._log_starts = read_checkpoint(path / LOG_STARTS)
        marks = (read_checkpoint(path / name) for name in (CLEANER_CHECKPOINT, COMPACTION_REACHED))
        self._compaction = tuple(marks)
        try:
            self._high_watermarks = read_checkpoint(path / HIGH_WATERMARKS)
        except CorruptSnapshot:  # they only confirm the recovery points
            self._high_watermarks = {}
        topics = TopicRegistry(path)
        self.unpublished = {topic.topic_id: topic for topic in topics.live() if topic.dirty}
        self.deleted = {topic.topic_id: topic for topic in topics.deleted()}

    def close(self) -> None:
        self._open.close()

    def partition_folder(self, keys: PartitionKeys) -> Path:
        return self.path / str(keys)

    def _has_partition(self, keys: PartitionKeys) -> bool:
        """Whether the partition's folder exists and belongs to this topic."""
        metadata = self.partition_folder(keys) / "partition.metadata"
        if not metadata.exists():
            return False
        found = checkpoint_files.parse_partition_metadata(metadata.read_bytes(), file=str(metadata))
        return checkpoint_files.format_topic_id(found) == keys.topic_id

    def why_ignored(self, keys: PartitionKeys, manifest: Manifest | None) -> str:
        """Why the partition is not taken from the old folder; empty if it is."""
        if not self._has_partition(keys):
            return "the old folder does not have the partition"
        if manifest is not None and not self.bucket_state(keys).knows(manifest):
            return (
                f"another owner came after it: it does not know epoch {manifest.leader_epoch} "
                f"of owner {manifest.owner}"
            )
        return ""

    def own_epochs(self, keys: PartitionKeys) -> tuple[EpochStart, ...]:
        return self._epochs.get(format_topic_id_partition(keys.topic_id, keys.partition), ())

    def is_newest_of(self, manifests: ManifestStore, manifest: Manifest | None) -> bool:
        """Whether no other folder can have changed the partition since."""
        if manifest is None:
            return True
        state = self.bucket_state(manifests.keys)
        return state.knows(manifest) and not manifests.is_stale_copy(state.manifest, manifest)

    def bucket_state(self, keys: PartitionKeys) -> BucketState:
        return BucketState(self.path, keys)

    def owes_gap(self, keys: PartitionKeys, manifest: Manifest | None) -> bool:
        """Whether the folder was still to skip offsets, because others may have been assigned."""
        pending = self._take_overs.get(format_topic_id_partition(keys.topic_id, keys.partition))
        return pending is not None and pending.gap_over(manifest) > 0

    def recovery_point(self, keys: PartitionKeys) -> int:
        place = (keys.topic, keys.partition)
        return self._recovery_points.get(place, self.cleaned_before(keys))

    def log_start(self, keys: PartitionKeys) -> int | None:
        return self._log_starts.get((keys.topic, keys.partition))

    def cleaned_before(self, keys: PartitionKeys) -> int:
        return max(marks.get((keys.topic, keys.partition), 0) for marks in self._compaction)

    def reached(self, keys: PartitionKeys) -> int:
        """A lower bound of the end of the flushed records."""
        high_watermark = self._high_watermarks.get((keys.topic, keys.partition), 0)
        return max(self.recovery_point(keys), high_watermark)


def take_tail(
    old: OldFolder,
    target: TailTarget,
    manifest: Manifest | None,
    manifests: ManifestStore,
    *,
    source: Path,
    snapshot: bytes | None,
) -> Tail:
    """Copy what the old folder has from the manifest's end on, unless `why_ignored`. Raises
    CorruptDataError for files of the old folder outside of the log.

    `source`: the partition's old folder, cleaned up. `snapshot`: the bucket's producer snapshot at
    the manifest's end; without one, the old folder's is used.
    """
    bases = closed_log.base_offsets(source)
    end_offset = manifest.end_offset if manifest else (bases[0] if bases else 0)
    if not bases or bases[0] > max(end_offset, old.log_start(target.keys) or 0):
        return Tail(whole=False, detail=f"its log does not reach back to offset {end_offset}")
    in_force = manifest.leader_epoch if manifest else -1
    epochs = tuple(start for start in old.own_epochs(target.keys) if start.epoch > in_force)
    _copy(source, target, end_offset, snapshot=snapshot)
    try:
        copied = _recovered(old, target, end_offset)
    except CorruptDataError as bad:
        return Tail(
            whole=False,
            damaged=True,
            detail=f"copied as it is, to be repaired after the first start: {bad}",
            start_offset=end_offset,
            end_offset=end_offset,
            epochs=epochs,
        )
    ends = copied.log_end_offset
    if ends == end_offset:  # nothing was copied
        ends = closed_log.end_offset(source)
    cut = copied.recovery.truncate_reason
    missing = (cut if manifest else "") or _why_incomplete(old, manifests, manifest, ends)
    why = missing or cut
    taken = f"{copied.log_end_offset - end_offset} offsets copied"
    gap = "a gap" if missing and uses_bucket(target.config, manifest) else "no gap"
    return Tail(
        whole=not missing,
        detail=f"{taken}; {gap} follows: {why}" if why else taken,
        start_offset=end_offset,
        end_offset=copied.log_end_offset,
        epochs=epochs,
    )


def _why_incomplete(
    old: OldFolder, manifests: ManifestStore, manifest: Manifest | None, ends: int
) -> str:
    """Why acknowledged records may be missing from a log that ends at `ends`; empty if none can
    be.
    """
    keys = manifests.keys
    reached = max(manifest.end_offset if manifest else 0, old.reached(keys))
    if ends < reached:
        return f"it ends at offset {ends}, but had {reached}"
    seen = old.bucket_state(keys).manifest
    if manifest is not None and manifests.is_stale_copy(seen, manifest):
        return "it is an older copy: the bucket has been written to since"
    if old.owes_gap(keys, manifest):
        return "it was restored itself with a gap to follow, and not started since"
    return ""


def _copy(source: Path, target: TailTarget, end_offset: int, *, snapshot: bytes | None) -> None:
    """Copy the segments that extend past the end; of the one that contains it, the batches from
    there on. An empty segment is copied too: after a power failure it shows that records are
    missing before the next one.
    """
    target.folder.mkdir()
    bases = closed_log.base_offsets(source)
    for base, following in zip(bases, [*bases[1:], None], strict=True):
        if following is not None and following <= end_offset:
            continue
        log = path_of(source, base, LOG).resolve()  # an error names the file on the old disk
        position, begins = 0, base
        if base < end_offset:
            position, begins = closed_log.locate_cut(log, end_offset, base_offset=base)
        to = path_of(target.folder, begins, LOG)
        closed_log.copy_tail(log, position, to, pread=zero_filling_pread(os.pread))
    begins = closed_log.base_offsets(target.folder)[0]
    if not snapshot or begins > end_offset:  # trims, and retention, leave the bucket empty
        with suppress(CorruptDataError):
            snapshot = snapshot_before(source, begins)
    if snapshot:
        write_durably(path_of(target.folder, begins, SNAPSHOT), snapshot)


def _recovered(old: OldFolder, target: TailTarget, end_offset: int) -> PartitionLog:
    """The copy, after its recovery checked every batch; closed again."""
    flushed_end = old.recovery_point(target.keys)
    opened = PartitionLog.open(
        target.folder,
        topic=target.keys.topic,
        partition=target.keys.partition,
        topic_id=target.keys.topic_id,
        config=target.config,
        clock=target.clock,
        request=OpenRequest(clean=False, flushed_end=flushed_end, start_offset=end_offset),
    )
    opened.close()
    return opened
