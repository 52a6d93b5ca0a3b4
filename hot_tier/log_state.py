"""The state of one open log, shared by the modules that append, roll, flush, read and delete.

* `lock` guards every change. Readers take no lock: `segments` and each segment's `end` are
  immutable values that are replaced as a whole.
* `flushed` advances only after a successful sync; its offset is the recovery point. The high
  watermark is the same in a log that is not replicated, and `committed` in one that is (see
  `replica_log`). Once `offline` is set, nothing changes any more.
* After a swap a segment's path names another file, and a look-up takes several steps: its result is
  valid only if no swap happened meanwhile, otherwise it is repeated (`read_consistently`, a
  sequence lock). `swap_sequence` is odd while files are renamed, under the log's lock, which takes
  milliseconds, and increases by two with each swap.
* An open descriptor keeps naming the same file, so slices that were handed out stay valid.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar
from zlib import crc32

from tierlog.host.disk import ClosedDisk, Disk
from tierlog.host.file_slice import HoldsFiles
from tierlog.host.waiting import Wait
from tierlog.hot_tier.active_segment import ActiveSegment
from tierlog.hot_tier.leader_epochs import LeaderEpochs
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_folder import OFFLINE_MARKER
from tierlog.hot_tier.open_files import OpenFiles
from tierlog.hot_tier.producer_state import ProducerStates
from tierlog.hot_tier.segment import Segment
from tierlog.record_format.errors import (
    CorruptDataError,
    LeaderChanged,
    LogOfflineError,
    OffsetPastEnd,
    OffsetTrimmed,
    UnknownSegment,
)

Clock = Callable[[], int]
FetchProducerSnapshot = Callable[[int], bytes | None]
"""Fetches the producer snapshot at an offset from the other tier; None if it has none."""


def no_producer_snapshot(_offset: int) -> bytes | None:
    """For a log without another tier."""
    return None


UploadedCrc32c = Callable[[int, int], int | None]
"""The checksum, in the other tier, of the `.log` with that base offset and size; None if there is
none. Never waits for the store.
"""


def not_uploaded(_base_offset: int, _size_bytes: int) -> int | None:
    """For a log without another tier."""
    return None


T = TypeVar("T")


class Segments(NamedTuple):
    """The segments of a log by base offset; the last one is active. Immutable."""

    bases: tuple[int, ...]
    items: tuple[Segment, ...]

    @staticmethod
    def of(items: tuple[Segment, ...]) -> Segments:
        return Segments(tuple(segment.base_offset for segment in items), items)

    def number_of(self, offset: int) -> int:
        """Index of the segment that contains `offset`; -1 if it is below the first."""
        return bisect_right(self.bases, offset) - 1

    def with_added(self, segment: Segment) -> Segments:
        return Segments((*self.bases, segment.base_offset), (*self.items, segment))

    def from_number(self, number: int) -> Segments:
        return Segments(self.bases[number:], self.items[number:])


class MaxTimestamps(NamedTuple):
    """The running maximum of the sealed segments' largest timestamps, for these segments."""

    segments: Segments
    maxima: tuple[int, ...]


class Flushed(NamedTuple):
    """How far the log is flushed: the offset, its segment, and the position in that segment."""

    offset: int
    base_offset: int
    position: int


class Ended(NamedTuple):
    """A transaction whose end is in the log, but perhaps not below the high watermark."""

    first_offset: int
    marker_offset: int


class Offsets(NamedTuple):
    """The offsets that bound a log. No transaction is open below `last_stable_offset`, which never
    exceeds the high watermark.
    """

    log_start_offset: int
    local_log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    log_end_offset: int
    leader_epoch: int

    def trimmed(self, detail: str) -> OffsetTrimmed:
        return OffsetTrimmed(
            detail, log_start_offset=self.log_start_offset, high_watermark=self.high_watermark
        )

    def past_end(self, detail: str) -> OffsetPastEnd:
        return OffsetPastEnd(
            detail, log_start_offset=self.log_start_offset, high_watermark=self.high_watermark
        )


@dataclass(kw_only=True, eq=False)
class LogSetting:
    """Where a log lives, and what it is given. `name`: topic and partition."""

    folder: Path
    name: str
    topic_id: str
    config: LogConfig
    clock: Clock
    monotonic_clock: Clock
    disk: Disk
    files: OpenFiles
    fetch_producer_snapshot: FetchProducerSnapshot = no_producer_snapshot
    uploaded_crc32c: UploadedCrc32c = not_uploaded

    def jitter_ms(self, base_offset: int) -> int:
        """How much earlier than `segment.ms` this segment is rolled, so that many partitions do not
        all roll at once.
        """
        limit_ms = min(self.config.segment_jitter_ms, self.config.effective_segment_ms)
        if limit_ms <= 0:
            return 0
        # A hash: a `random.Random` would take 2.5 KiB per partition.
        return crc32(f"{self.topic_id}-{self.name}-{base_offset}".encode()) % limit_ms

    def mark_offline(self, error: Exception) -> str:
        """Let the next start distrust the page cache; returns why."""
        reason = "the disk failed" if isinstance(error, OSError) else "a write failed unexpectedly"
        with suppress(OSError):  # if this fails too, a restart reads the disk anyway
            (self.folder / OFFLINE_MARKER).touch()
        return f"{self.name}: {reason}: {error}"

    def go_offline(self, error: Exception) -> LogOfflineError:
        return offline_error(self.mark_offline(error))


def offline_error(why: str) -> LogOfflineError:
    return LogOfflineError(f"{why}; the log stays offline until a restart")


class OpeningLog(LogSetting):
    """A log on its way from the folder to a `LogState`; only the loader and recovery have it."""

    def __init__(
        self, setting: LogSetting, segments: tuple[Segment, ...], epochs: LeaderEpochs
    ) -> None:
        super().__init__(**vars(setting))
        self.segments, self.epochs = Segments.of(segments), epochs
        self.producers = ProducerStates(self.monotonic_clock)
        self.active: ActiveSegment | None = None

    @property
    def log_end_offset(self) -> int:
        return self.segments.items[-1].end.next_offset

    def close_files(self) -> None:
        if self.active is not None:
            self.active.close()


class LogState(LogSetting):
    """See the module. Made by `recovery`, with all that it has."""

    def __init__(
        self, setting: LogSetting, opened: OpeningLog, *, log_start_offset: int, unmirrored: bool
    ) -> None:
        """All of `opened` is flushed."""
        super().__init__(**vars(setting))
        assert opened.active is not None, "every log has an active segment"
        self.lock = threading.RLock()
        self.segments, self.active = opened.segments, opened.active
        self.epochs, self.producers = opened.epochs, opened.producers
        self.leader_epoch = opened.epochs.latest or 0
        self.log_start_offset = log_start_offset
        last = opened.active.segment
        self.flushed = Flushed(last.end.next_offset, last.base_offset, last.end.size_bytes)
        self.committed: int | None = None  # None: the log is not replicated
        self.is_follower = False  # its records come from a leader
        self.ended: tuple[Ended, ...] = ()  # of a replicated log: above `committed`
        self.unflushed: list[ActiveSegment] = []  # sealed, but not synced yet
        self.folder_changed = False  # it has names that are not synced yet
        self.offline: str | None = None
        self.appended_bytes = self.appended_records = 0  # since it was opened
        self.swap_sequence = 0  # see `read_consistently`
        self.unmirrored = unmirrored  # see `segment_swap`
        self.check_lock = threading.Lock()  # see `border_check`
        self.rewrite_lock = threading.Lock()  # see `segment_swap`
        self.closing = False  # nothing new may start
        self.closed = False  # files are closed, and their names may belong to another log
        self.max_timestamps_so_far: MaxTimestamps | None = None

    @property
    def offsets(self) -> Offsets:
        """Consistent without the lock: each offset is read before those that are never below it."""
        log_start = self.log_start_offset
        local_start = self.segments.bases[0]
        last_stable = high_watermark = self.high_watermark
        if self.producers.open_transactions or self.ended:
            unstable = self.first_unstable_offset()
            if unstable is not None and unstable < high_watermark:
                last_stable = max(unstable, log_start)  # it may begin below the log start
        return Offsets(
            log_start,
            local_start if local_start > log_start else log_start,
            last_stable,
            high_watermark,
            self.log_end_offset,
            self.leader_epoch,
        )

    @property
    def high_watermark(self) -> int:
        committed = self.committed
        return self.flushed.offset if committed is None else committed

    def add_ended(self, ended: Sequence[Ended]) -> None:
        """These transactions end in the log now. Called before they are closed in `producers`."""
        if self.committed is not None:
            self.ended = (*self.ended, *ended)

    def first_unstable_offset(self) -> int | None:
        """Where the oldest transaction begins that is open, or whose end is not committed yet.
        Callable without the lock.
        """
        unstable = self.producers.first_unstable_offset()
        if not self.ended:  # read second: an end is added here before the transaction is closed
            return unstable
        firsts = [one.first_offset for one in self.ended]
        return min(firsts if unstable is None else [unstable, *firsts], default=None)

    @property
    def log_end_offset(self) -> int:
        return self.segments.items[-1].end.next_offset

    @property
    def local_log_start_offset(self) -> int:
        return max(self.segments.bases[0], self.log_start_offset)

    @property
    def is_empty(self) -> bool:
        """Whether there is no batch, whatever the log start."""
        return self.segments.bases[0] == self.log_end_offset

    def go_offline(self, error: Exception) -> LogOfflineError:
        """Refuse writes until the next start; returns the error to raise. Also called for our own
        bugs: memory may no longer match the disk.
        """
        if self.closed:
            return self._closed_error()
        if self.offline is None:
            self.offline = self.mark_offline(error)
        return offline_error(self.offline)

    def _closed_error(self) -> LogOfflineError:
        return LogOfflineError(f"{self.name}: the log was closed")

    def close(self) -> None:
        """Close the files. A late background task that still holds this log can no longer change
        the disk.
        """
        with self.lock:
            self.closed = True
            self.close_files()
            self.disk = ClosedDisk()
            self.files.invalidate_folder(self.folder)

    def close_files(self) -> None:
        """Close the files that are open for writing."""
        for segment in (self.active, *self.unflushed):
            segment.close()

    def check_not_closed(self) -> None:
        if self.closed:
            raise self._closed_error()

    def check_open(self) -> None:
        """Raise if nothing new may start: nobody would flush what is written after a close has
        begun.
        """
        if self.closing:
            raise self._closed_error()
        self.check_online()

    def leads_no_more(self) -> LeaderChanged:
        """The error for an append to a follower's log."""
        return LeaderChanged(f"{self.name}: this broker does not lead it")

    def check_online(self) -> None:
        self.check_not_closed()
        if self.offline is not None:
            raise offline_error(self.offline)


def read_consistently(state: LogState, look_up: Callable[[], T], wait: Wait = Wait.WAIT) -> T:
    """The result of `look_up`, or its error, from a run that no swap overlapped.

    Raises WouldBlock if a swap is in progress and the caller never waits.
    """
    while True:
        before = state.swap_sequence
        if before % 2:
            wait.before("segments are replaced")
            with state.lock:
                continue
        try:
            found = look_up()
        except (CorruptDataError, OffsetTrimmed, UnknownSegment, FileNotFoundError):
            if state.swap_sequence == before:
                raise
        else:
            if state.swap_sequence == before:
                return found
            if isinstance(found, HoldsFiles):
                found.close()


@contextmanager
def replacing_segments(state: LogState) -> Iterator[None]:
    """The write side: files are renamed inside the block, under the log's lock."""
    state.swap_sequence += 1
    try:
        yield
    finally:
        state.swap_sequence += 1
