"""One partition's log on local disk: what the broker sees of this room.

* Appends, rolls and deletions happen one at a time, under the log's lock; reads take no lock; a
  flush blocking for the disk outside it.
* The high watermark is what has been flushed. Nobody is shown more, so nothing that was shown can
  vanish.
* After a failed write or sync the log is offline until it is opened again. Reads go on.
* A segment that is deleted gets another name at once and is unlinked by `reap` a little later: a
  read in progress still succeeds.

What it does not do: it decides nothing about retention or offload, keeps no checkpoints (the data
folder has them for all partitions), and starts no thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from hot_tier import log_reader
from hot_tier.append import Append
from hot_tier.appender import Outcome, append_all
from hot_tier.disk import Disk
from hot_tier.durable_file import REAL_DISK
from hot_tier.file_names import SNAPSHOT, path_of
from hot_tier.flusher import Flusher
from hot_tier.log_config import LogConfig
from hot_tier.log_folder import LogFolder
from hot_tier.log_loader import load_log
from hot_tier.log_state import Clock, FetchProducerSnapshot, LogState, Offsets, no_producer_snapshot
from hot_tier.nonblocking_files import NonBlockingFiles
from hot_tier.open_files import OpenFiles
from hot_tier.producer_snapshots import write_snapshot
from hot_tier.reaper import Reaper
from hot_tier.recovery import OpenRequest, RecoveryReport
from hot_tier.roll import disk_error, roll
from hot_tier.sealed_segments import SealedSegments
from hot_tier.segment_views import SegmentStats, SegmentView, stats_of, views_of
from hot_tier.seqlock import read_consistently
from hot_tier.truncate_fully import truncate_fully_and_start_at
from record_format.checkpoint_files import EpochEntry
from record_format.clock import monotonic_ms
from record_format.errors import ConfigurationError
from record_format.file_slice import TierRead
from record_format.index_layouts import AbortedTxn

NOT_ALLOWED = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
UNFLUSHED_SEGMENTS_MAX = 16  # each of them keeps a descriptor


class PartitionLog:
    """See the module. Thread-safe. Made by `open`."""

    def __init__(
        self,
        state: LogState,
        *,
        topic: str,
        partition: int,
        topic_id: str,
        recovery: RecoveryReport,
    ) -> None:
        self.topic, self.partition, self.topic_id = topic, partition, topic_id
        self.recovery = recovery
        self.on_high_watermark: list[Callable[[int], None]] = []
        self._state = state
        self._flusher = Flusher(state)
        self._reaper = Reaper(state)
        self.sealed = SealedSegments(state, self._reaper)
        self._nonblocking_files = NonBlockingFiles(state)

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
        clean: bool,
        recovery_point: int = 0,
        flushed_end: int = 0,
        log_start_offset: int | None = None,
        start_offset: int = 0,
        jitter_seed: int | str | None = None,
        disk: Disk = REAL_DISK,
        open_files: OpenFiles | None = None,
        monotonic_clock: Clock = monotonic_ms,
        fetch_producer_snapshot: FetchProducerSnapshot = no_producer_snapshot,
    ) -> PartitionLog:
        """Open the folder, recover it after an unclean stop, or make it.

        `clean`: the process that had it open closed it. `recovery_point`: below it everything was
        flushed, and is not checked. `flushed_end`: up to there, too, everything was flushed: what
        is missing below it was lost, not merely unflushed at a crash. `log_start_offset`: None if
        it is not known; the log then starts at its first segment. `start_offset`: where a new,
        empty log begins. `open_files` may be shared by many logs. `fetch_producer_snapshot` is
        called if the folder has no good snapshot for the start of the log.

        Raises CorruptDataError (refused by name), ConfigurationError (another topic's folder, or
        one that may not be written), DiskFull, LogOfflineError (the disk failed).
        """
        state = LogState(
            folder=folder,
            name=f"{topic}-{partition}",
            config=config,
            clock=clock,
            monotonic_clock=monotonic_clock,
            disk=disk,
            files=open_files or OpenFiles(),
            jitter_seed=jitter_seed,
            fetch_producer_snapshot=fetch_producer_snapshot,
        )
        state.files.invalidate_folder(folder)  # whatever was there belonged to another log
        flushed_end = max(recovery_point, flushed_end)
        request = OpenRequest(clean, recovery_point, flushed_end, log_start_offset, start_offset)
        with ExitStack() as opened:
            opened.callback(state.close_files)
            try:
                found = LogFolder.open(folder, disk=disk)
                found.check_topic_id(topic_id)
                report = load_log(state, found, request)
            except OSError as error:
                if error.errno in NOT_ALLOWED:
                    place = error.filename or folder
                    raise ConfigurationError(f"{place}: {error.strerror}") from error
                raise disk_error(state, error) from error
            log = cls(state, topic=topic, partition=partition, topic_id=topic_id, recovery=report)
            if state.log_start_offset > state.log_end_offset:
                log.truncate_fully_and_start_at(state.log_start_offset)
            opened.pop_all()
        return log

    def __str__(self) -> str:
        return self._state.name

    # --- facts ------------------------------------------------------------------------------------

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
        return self._state.flushed.offset

    @property
    def recovery_point(self) -> int:
        return self._state.flushed.offset

    @property
    def leader_epoch(self) -> int:
        return self._state.leader_epoch

    @property
    def epochs(self) -> tuple[EpochEntry, ...]:
        """(epoch, start offset) of the epochs that local records were appended in."""
        return self._state.epochs.entries

    @property
    def size_bytes(self) -> int:
        return sum(segment.end.size_bytes for segment in self._state.segments.items)

    @property
    def active_base_offset(self) -> int:
        return self._state.segments.bases[-1]

    def flushed_bytes(self, view: SegmentView) -> int:
        """How much of a segment is below the high watermark; one that was active in `view` may have
        been sealed since.
        """
        flushed = self._state.flushed
        if view.last_offset < flushed.offset:  # asked first: compaction may have made it shorter
            return view.size_bytes
        return flushed.position if flushed.base_offset == view.base_offset else 0

    @property
    def active_ms(self) -> int:
        """For how long the active segment has had records; 0 while it is empty."""
        first_ms = self._state.active.segment.first_append_ms
        return 0 if first_ms is None else self._state.monotonic_clock() - first_ms

    @property
    def wants_flush(self) -> bool:
        """Whether so many sealed segments wait for a flush that one is due, whatever `flush.ms`
        says.
        """
        return len(self._state.unflushed) >= UNFLUSHED_SEGMENTS_MAX

    @property
    def offline(self) -> bool:
        return self._state.offline is not None

    # --- writing ----------------------------------------------------------------------------------

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        """Append in order with as few writes as possible; one outcome for each. Raises nothing.

        Refusals: OffsetMismatch, OutOfOrderSequence, ProducerFenced, InvalidRecord (nothing
        changed); DiskFull (nothing changed); LogOfflineError (the records may be there after a
        restart).
        """
        with self._state.lock:
            try:
                return append_all(self._state, appends)
            except Exception as bug:
                self._state.go_offline(bug)
                raise

    def flush(self) -> int:
        """Put everything appended so far on the medium; the new high watermark.

        Raises LogOfflineError, for ever once it has.
        """
        before = self.high_watermark
        high_watermark = self._flusher.flush()
        if high_watermark != before:
            for callback in tuple(self.on_high_watermark):
                callback(high_watermark)
        return high_watermark

    def roll(self) -> bool:
        """Seal the active segment unless it is empty, and flush.

        Raises DiskFull, LogOfflineError (also where it was closed).
        """
        with self._state.lock:
            before = self._state.active
            roll(self._state)
            rolled = self._state.active is not before
        if rolled:
            self.flush()
        return rolled

    def maybe_roll(self) -> bool:
        """Roll a segment whose first record came `offload.max.lag.ms` ago."""
        lag_ms = self._state.config.offload_max_lag_ms
        if lag_ms < 0 or self.active_ms < lag_ms or self.offline:
            return False
        return self.roll()

    def bump_epoch(self, epoch: int) -> None:
        """Stamp records with this epoch from now on; it goes on record with the first of them."""
        with self._state.lock:
            assert epoch >= self._state.leader_epoch, "leader epochs rise"
            self._state.leader_epoch = epoch

    def update_config(self, config: LogConfig) -> None:
        """Takes effect with the next append; preallocated files keep their size until the next
        roll.
        """
        with self._state.lock:
            self._state.config = config
            self._state.active.config = config

    def expire_producers(self, *, idle_ms: int) -> int:
        """Forget idempotent producers that were idle for so long; how many."""
        with self._state.lock:
            return self._state.producers.expire(idle_ms=idle_ms)

    # --- reading ----------------------------------------------------------------------------------

    def read(
        self, offset: int, *, max_bytes: int, end_offset: int | None = None, blocking: bool = True
    ) -> TierRead:
        """Whole batches from that of `offset` on, below `end_offset` (the high watermark by
        default).

        At least one batch, if there is one. Raises OffsetTrimmed (not on local disk),
        OffsetPastEnd, CorruptDataError; BlockingIOError if it may not wait for the disk and would
        have to. What is found may still have to be read: only the way to it is in memory.
        """
        end = self.high_watermark if end_offset is None else end_offset
        files = self._state.files if blocking else self._nonblocking_files
        return read_consistently(
            self._state,
            lambda: log_reader.read(
                self._state, offset, max_bytes=max_bytes, end_offset=end, files=files
            ),
            blocking=blocking,
        )

    def offset_for_timestamp(
        self, timestamp: int, *, end_offset: int | None = None
    ) -> tuple[int, int] | None:
        """(offset, timestamp) of the first local record at or after `timestamp`; None past the
        end.
        """
        end = self.high_watermark if end_offset is None else end_offset
        return read_consistently(
            self._state,
            lambda: log_reader.offset_for_timestamp(self._state, timestamp, end_offset=end),
        )

    def aborted_transactions(
        self, offset: int, end_offset: int, *, blocking: bool = True
    ) -> list[AbortedTxn]:
        """Aborted transactions with records in [offset, end_offset). BlockingIOError if it may
        not wait for the disk and would have to.
        """
        return read_consistently(
            self._state,
            lambda: log_reader.aborted_transactions(
                self._state, offset, end_offset=end_offset, blocking=blocking
            ),
            blocking=blocking,
        )

    def segments(self) -> list[SegmentView]:
        """The local segments, oldest first; the last is active."""
        return read_consistently(self._state, lambda: views_of(self._state))

    def segment_stats(self, base_offset: int) -> SegmentStats:
        """True counts and time range of a segment; reads it whole where they are not known yet."""
        return read_consistently(self._state, lambda: stats_of(self._state, base_offset))

    # --- making it shorter ------------------------------------------------------------------------

    def delete_local(self, before_offset: int) -> list[int]:
        """Delete sealed segments that end at or below `before_offset`; their base offsets.

        The log start stays: what is deleted here may be in the other tier.
        """
        return self._reaper.delete_before(before_offset)

    def trim(self, before_offset: int) -> int:
        """Move the log start up to `before_offset` (Kafka's DeleteRecords); the log start.

        The caller has already put it into the log-start checkpoint. Files go with `delete_local`.
        Raises OffsetPastEnd above the high watermark, LogOfflineError if the log was closed.
        """
        with self._state.lock:
            self._state.check_shut()
            if before_offset > self.high_watermark:
                raise self.offsets.past_end(
                    f"{self}: offset {before_offset} is above the high watermark"
                )
            self._state.log_start_offset = max(before_offset, self._state.log_start_offset)
            return self._state.log_start_offset

    def reap(self, *, at_once: bool = False) -> int:
        """Unlink deleted files whose `file.delete.delay.ms` is over; how many segments.

        Raises OSError where some cannot go; they wait for the next call.
        """
        return self._reaper.reap(at_once=at_once)

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Remove everything local and continue at `offset`. Only while nobody is served."""
        truncate_fully_and_start_at(self._state, offset)

    def close(self) -> bool:
        """Flush, write the producer snapshot, trim the indexes; True if that makes a clean
        stop.
        """
        with self._state.lock:
            if self._state.closed:
                return not self.offline
            self._state.closed = True
        try:
            return self._close_clean()
        finally:
            self._flusher.shut_down()

    def _close_clean(self) -> bool:
        if self.offline:
            return False
        state = self._state
        self.flush()
        with state.lock:
            try:
                state.active.seal()
                # Synced before it has its name: an empty segment's takes the place of the only one.
                snapshot = write_snapshot(state, state.log_end_offset, sync=True)
                state.active.sync_all()
                state.disk.sync_folder(state.folder)
            except OSError as error:
                raise disk_error(state, error) from error
        assert snapshot == path_of(state.folder, state.log_end_offset, SNAPSHOT)
        return True
