"""One partition's log on local disk: the interface of this package.

* Appends, rolls and deletions are serialized by the log's lock. Reads take no lock. A flush waits
  for the disk outside the lock.
* The high watermark is the flushed offset; in a replicated log, what all replicas in sync have
  flushed (see `replica_log`). Readers see nothing above it, so nothing that was read can be lost in
  a crash.
* After a failed write or sync the log is offline until it is opened again. Reads continue.
* A deleted segment is renamed at once and unlinked later by `reap`, so that reads in progress
  succeed.

This module makes no retention or offload decisions, keeps no checkpoints (the data folder has them
for all partitions), and starts no threads.
"""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path

from tierlog.host.clock import monotonic_ms
from tierlog.host.disk import Disk
from tierlog.host.durable_file import REAL_DISK
from tierlog.host.file_slice import OpenFile, TierRead
from tierlog.host.waiting import Wait
from tierlog.hot_tier import log_reader
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_folder import LogFolder
from tierlog.hot_tier.log_state import (
    Clock,
    FetchProducerSnapshot,
    LogSetting,
    LogState,
    Offsets,
    UploadedCrc32c,
    no_producer_snapshot,
    not_uploaded,
    offline_error,
    read_consistently,
)
from tierlog.hot_tier.log_writer import LogWriter
from tierlog.hot_tier.open_files import OpenFiles
from tierlog.hot_tier.producer_state import Producer
from tierlog.hot_tier.reaper import Reaper
from tierlog.hot_tier.recovery import load_log
from tierlog.hot_tier.recovery_scan import OpenRequest, RecoveryReport
from tierlog.hot_tier.replica_log import ReplicaLog
from tierlog.hot_tier.roll import disk_error, roll, seal_last, truncate_fully_and_start_at
from tierlog.hot_tier.sealed_segments import (
    OpenedSegment,
    SealedSegments,
    SegmentStats,
    SegmentView,
    stats_of,
    view_bytes_below,
    views_of,
)
from tierlog.record_format.checkpoint_files import EpochEntry
from tierlog.record_format.errors import ConfigurationError
from tierlog.record_format.index_layouts import AbortedTxn

PERMISSION_ERRNOS = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))


def _load(setting: LogSetting, request: OpenRequest) -> tuple[LogState, RecoveryReport]:
    try:
        found = LogFolder.open(setting.folder, disk=setting.disk)
        found.check_topic_id(setting.topic_id)
        return load_log(setting, found, request)
    except OSError as error:
        if error.errno in PERMISSION_ERRNOS:
            place = error.filename or setting.folder
            raise ConfigurationError(f"{place}: {error.strerror}") from error
        raise disk_error(setting, error) from error


class PartitionLog:
    """One log. Thread-safe. Created by `open`."""

    def __init__(
        self, state: LogState, *, topic: str, partition: int, recovery: RecoveryReport
    ) -> None:
        self.topic, self.partition, self.topic_id = topic, partition, state.topic_id
        self.recovery = recovery
        self._state = state
        self.writer = LogWriter(state)
        self._reaper = Reaper(state)
        self.sealed = SealedSegments(state, self._reaper)
        replica = ReplicaLog(state, self.writer)
        self.replicate, self.commit_up_to = replica.replicate, replica.commit_up_to
        self.begin_term, self.end_term = replica.begin_term, replica.end_term
        self.append_replicated, self.roll_at = replica.append_replicated, replica.roll_at
        self.read_for_replica, self.cut = replica.read_for_replica, replica.cut
        self.begin_anew_at = replica.begin_anew_at

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        topic: str,
        partition: int,
        topic_id: str,
        config: LogConfig,
        clock: Clock,
        request: OpenRequest,
        disk: Disk = REAL_DISK,
        open_files: OpenFiles | None = None,
        monotonic_clock: Clock = monotonic_ms,
        fetch_producer_snapshot: FetchProducerSnapshot = no_producer_snapshot,
        uploaded_crc32c: UploadedCrc32c = not_uploaded,
    ) -> PartitionLog:
        """Open the log in `folder`, recovering it after an unclean stop, or create it.

        `open_files` may be shared by many logs. `fetch_producer_snapshot` is called if the folder
        has no valid snapshot for the start of the log; `uploaded_crc32c` when a segment is checked.

        Raises CorruptDataError, ConfigurationError (another topic's folder, or one that is not
        writable), DiskFull, LogOfflineError (the disk failed).
        """
        setting = LogSetting(
            folder=folder,
            name=f"{topic}-{partition}",
            topic_id=topic_id,
            config=config,
            clock=clock,
            monotonic_clock=monotonic_clock,
            disk=disk,
            files=open_files or OpenFiles(),
            fetch_producer_snapshot=fetch_producer_snapshot,
            uploaded_crc32c=uploaded_crc32c,
        )
        setting.files.invalidate_folder(folder)  # they may be of an earlier log there
        with ExitStack() as on_failure:
            on_failure.callback(setting.files.invalidate_folder, folder)
            state, report = _load(setting, request)
            on_failure.callback(state.close_files)
            log = cls(state, topic=topic, partition=partition, recovery=report)
            if state.log_start_offset > state.log_end_offset:
                start = state.log_start_offset
                log.truncate_fully_and_start_at(start, fetch_producer_snapshot(start))
            on_failure.pop_all()
        return log

    def __str__(self) -> str:
        return self._state.name

    # --- properties -------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self._state.folder

    @property
    def config(self) -> LogConfig:
        return self._state.config

    @property
    def offsets(self) -> Offsets:
        return self._state.offsets

    @property
    def log_start_offset(self) -> int:
        return self._state.log_start_offset

    @property
    def local_log_start_offset(self) -> int:
        return self._state.local_log_start_offset

    @property
    def first_local_offset(self) -> int:
        """Base offset of the first local segment, which may hold records below the log start."""
        return self._state.segments.bases[0]

    @property
    def base_offsets(self) -> tuple[int, ...]:
        return self._state.segments.bases

    @property
    def log_end_offset(self) -> int:
        return self._state.log_end_offset

    @property
    def high_watermark(self) -> int:
        return self._state.high_watermark

    @property
    def flushed_end(self) -> int:
        """The recovery point: everything below it is on the medium."""
        return self._state.flushed.offset

    @property
    def leader_epoch(self) -> int:
        return self._state.leader_epoch

    @property
    def epochs(self) -> tuple[EpochEntry, ...]:
        """(epoch, start offset) of each epoch that has local records."""
        return self._state.epochs.entries

    @property
    def appended_bytes(self) -> int:
        """Since the log was opened."""
        return self._state.appended_bytes

    @property
    def appended_records(self) -> int:
        """Since the log was opened."""
        return self._state.appended_records

    @property
    def size_bytes(self) -> int:
        return sum(segment.end.size_bytes for segment in self._state.segments.items)

    @property
    def active_base_offset(self) -> int:
        return self._state.segments.bases[-1]

    def readable_bytes(self, view: SegmentView) -> int:
        """How many bytes of a segment are below the high watermark. A segment that is active in
        `view` may have been sealed since.
        """
        return view_bytes_below(self._state, view, self.high_watermark)

    @property
    def active_ms(self) -> int:
        """How long the active segment has had records; 0 while it is empty."""
        first_ms = self._state.active.segment.first_append_ms
        return 0 if first_ms is None else self._state.monotonic_clock() - first_ms

    @property
    def offline(self) -> bool:
        return self._state.offline is not None

    def raise_if_offline(self) -> None:
        """Raises LogOfflineError; not for a log that was closed."""
        if self._state.offline is not None:
            raise offline_error(self._state.offline)

    # --- writing ----------------------------------------------------------------------------------

    def roll(self) -> bool:
        """Seal the active segment, unless it is empty, and flush. Returns whether it rolled.

        Raises DiskFull, LogOfflineError (also if the log is closed).
        """
        with self._state.lock:
            before = self._state.active
            roll(self._state)
            rolled = self._state.active is not before
        if rolled:
            self.writer.flush()
        return rolled

    def maybe_roll(self) -> bool:
        """Roll the active segment if its first record is older than `offload.max.lag.ms`."""
        lag_ms = self._state.config.offload_max_lag_ms
        if lag_ms < 0 or self.active_ms < lag_ms or self.offline:
            return False
        return self.roll()

    def bump_epoch(self, epoch: int) -> None:
        """Use this leader epoch from now on; its first record puts it into the epoch checkpoint."""
        with self._state.lock:
            assert epoch >= self._state.leader_epoch, "leader epochs never decrease"
            self._state.leader_epoch = epoch

    def update_config(self, config: LogConfig) -> None:
        """Takes effect with the next append; preallocated files keep their size until the next
        roll.
        """
        with self._state.lock:
            self._state.config = config
            self._state.active.config = config

    def expire_producers(self, *, idle_ms: int) -> int:
        """Forget idempotent producers that have been idle for `idle_ms`; returns how many."""
        with self._state.lock:
            return self._state.producers.expire(idle_ms=idle_ms)

    # --- reading ----------------------------------------------------------------------------------

    def read_hot(
        self,
        offset: int,
        *,
        max_bytes: int,
        end_offset: int | None = None,
        wait: Wait = Wait.WAIT,
    ) -> TierRead:
        """Whole batches below `end_offset` (default: the high watermark), starting with the one
        that contains `offset`.

        Returns at least one batch if there is one. Raises OffsetTrimmed (not on local disk),
        OffsetPastEnd, CorruptDataError, and WouldBlock if locating the batches needs the disk;
        reading the returned slices may still need it.
        """
        end = self.high_watermark if end_offset is None else end_offset
        return read_consistently(
            self._state,
            lambda: log_reader.read_slices(
                self._state, offset, max_bytes=max_bytes, end_offset=end, wait=wait
            ),
            wait,
        )

    def offset_for_timestamp(
        self, timestamp: int, *, end_offset: int | None = None
    ) -> tuple[int, int] | None:
        """(offset, timestamp) of the first local record at or after `timestamp`; None if there is
        none.
        """
        end = self.high_watermark if end_offset is None else end_offset
        return read_consistently(
            self._state,
            lambda: log_reader.offset_for_timestamp(self._state, timestamp, end_offset=end),
        )

    def max_timestamp(self) -> int:
        """The greatest timestamp of all local records; -1 if none has one."""
        return read_consistently(self._state, lambda: log_reader.max_timestamp(self._state))

    def producers(self) -> list[Producer]:
        """The idempotent producers that are remembered."""
        with self._state.lock:
            return list(self._state.producers)

    def aborted_transactions(
        self, offset: int, end_offset: int, wait: Wait = Wait.WAIT
    ) -> list[AbortedTxn]:
        """Aborted transactions with records in [offset, end_offset). Raises WouldBlock if that
        needs the disk.
        """
        return read_consistently(
            self._state,
            lambda: log_reader.aborted_transactions(
                self._state, offset, end_offset=end_offset, wait=wait
            ),
            wait,
        )

    def segments(self) -> list[SegmentView]:
        """The local segments, oldest first; the last is active."""
        return read_consistently(self._state, lambda: views_of(self._state))

    def segment_stats(self, base_offset: int) -> SegmentStats:
        """Record count and time range of a segment; reads all of it if they are not known yet."""
        return read_consistently(self._state, lambda: stats_of(self._state, base_offset))

    def open_active(self, base_offset: int) -> OpenedSegment | None:
        """The active segment's bytes below the high watermark; None if it does not begin there."""
        view = self.segments()[-1]
        file = OpenFile(view.path)
        if view.base_offset != base_offset or self.active_base_offset != base_offset:
            file.close()
            return None  # it may be another file by now
        end_offset = self.high_watermark
        size_bytes = view_bytes_below(self._state, view, end_offset)
        return OpenedSegment(size_bytes, None, file, end_offset)

    # --- deleting --------------------------------------------------------------------------------

    def delete_local(self, before_offset: int) -> list[int]:
        """Delete sealed segments that end at or below `before_offset`; returns their base offsets.

        The log start does not move: the other tier may have what is deleted here.
        """
        return self._reaper.delete_before(before_offset)

    def trim(self, before_offset: int) -> int:
        """Advance the log start to `before_offset` (Kafka's DeleteRecords); returns the log start.

        The caller has already written it to the log-start checkpoint. `delete_local` deletes the
        files. Raises OffsetPastEnd above the high watermark, LogOfflineError if the log was closed.
        """
        with self._state.lock:
            self._state.check_not_closed()
            if before_offset > self.high_watermark:
                raise self.offsets.past_end(
                    f"{self}: offset {before_offset} is above the high watermark"
                )
            self._state.log_start_offset = max(before_offset, self._state.log_start_offset)
            return self._state.log_start_offset

    def reap(self, *, at_once: bool = False) -> int:
        """Unlink deleted files whose `file.delete.delay.ms` is over (`at_once`: all); returns how
        many segments.

        Raises OSError if some could not be unlinked; the next call retries them.
        """
        return self._reaper.reap(at_once=at_once)

    def truncate_fully_and_start_at(self, offset: int, producers: bytes | None) -> None:
        """Remove all local segments and continue at `offset`, as `roll` says."""
        with self.writer.flush_lock:
            truncate_fully_and_start_at(self._state, offset, producers)

    def close(self) -> bool:
        """Flush, write the producer snapshot and trim the indexes; returns whether this was a clean
        shutdown.
        """
        with self._state.lock:
            if self._state.closing:
                return not self.offline
            self._state.closing = True
        try:
            return self._close_clean()
        finally:
            self.writer.close()

    def abandon(self) -> None:
        """Close the files without flushing: the log is about to be deleted, or nothing was appended
        since it was opened.
        """
        with self._state.lock:
            self._state.closing = True
        self.writer.close()

    def _close_clean(self) -> bool:
        if self.offline:
            return False
        self.writer.flush()
        seal_last(self._state)
        return True
