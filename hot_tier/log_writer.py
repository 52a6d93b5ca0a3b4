"""The writes of one log: several appends in one write, and flushes.

* Each append is checked against the log as it will be after the ones before it: expected offset,
  producer sequences, the need to roll.
* Offsets and the leader epoch are stamped into the producers' bytes in place; nothing is copied.
* Memory changes only after the write. If the write fails, all its appends fail, and so does every
  outcome that depended on them: duplicates of them, and sequences or expected offsets that were
  rejected because of them.
* When a flush returns, everything appended before is on the medium. Its order: bytes and indexes of
  sealed segments, bytes of the active one, the folder's names; only then does the recovery point
  advance, and with it the high watermark, unless the log is replicated. It waits for the disk
  outside the log's lock: appends, rolls and reads continue, and are not part of it.
* A failed sync is never retried: the kernel may have dropped the pages that it could not write and
  report success the next time. The log goes offline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from tierlog.hot_tier.active_segment import ActiveSegment
from tierlog.hot_tier.log_state import Flushed, LogState
from tierlog.hot_tier.planned_records import PlannedRecords
from tierlog.hot_tier.producer_state import (
    Producer,
    ProducerBatch,
    Verify,
    after_batch,
    check_marker,
    check_sequence,
    check_transaction,
    find_duplicate_request,
    offset_count,
)
from tierlog.hot_tier.roll import disk_error, roll
from tierlog.record_format.batch import BatchHeader, stamp, stamp_log_append_time
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import (
    InvalidRecord,
    OffsetMismatch,
    OutOfOrderSequence,
    ProducerFenced,
    TierlogError,
    TransactionRefused,
)
from tierlog.record_format.produced import ProducedBatches


class Acks(IntEnum):
    """When a write is acknowledged, with Kafka's numbers."""

    ALL = -1
    NONE = 0
    LEADER = 1


class Append(NamedTuple):
    """Batches that are appended together or not at all.

    `expected_offset`: append only if the log ends exactly there. `marker`: the one batch is this
    end of its producer's transaction. `verify`: for batches that begin a transaction here.
    """

    batches: ProducedBatches
    expected_offset: int | None = None
    marker: EndMarker | None = None
    verify: Verify | None = None


class AppendResult(NamedTuple):
    """Where the batches are. `duplicate`: an earlier request appended them."""

    base_offset: int
    last_offset: int
    log_append_time: int | None
    duplicate: bool
    log_start_offset: int


Outcome = AppendResult | TierlogError
# Refusals that follow from appends before them, which may not have been written yet.
_DEPENDENT = (OffsetMismatch, OutOfOrderSequence, ProducerFenced, TransactionRefused)


class _Target(NamedTuple):
    flushed: Flushed
    sealed: tuple[ActiveSegment, ...]
    active: ActiveSegment
    folder: bool


class LogWriter:
    """Appends to one log, and flushes it, one flush at a time. Thread-safe."""

    def __init__(self, state: LogState) -> None:
        self.state = state
        self.on_high_watermark: list[Callable[[int], None]] = []
        self.on_flushed: list[Callable[[int], None]] = []  # given the recovery point
        self.on_appended: list[Callable[[int], None]] = []  # given the log end
        self.flush_lock = threading.Lock()  # held by a flush, also while it waits for the disk

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        """Append in order with as few writes as possible; returns one outcome per append and raises
        nothing.

        Errors: OffsetMismatch, OutOfOrderSequence, ProducerFenced, TransactionRefused,
        InvalidRecord, DiskFull (nothing was appended); LeaderChanged; LogOfflineError (the records
        may exist after a restart).
        """
        with self.state.lock:
            if self.state.is_follower:
                return [self.state.leads_no_more() for _ in appends]
            try:
                group = _Group(self.state)
                for append in appends:
                    group.take(append)
                group.write_appends()
            except Exception as bug:
                self.state.go_offline(bug)
                raise
        if self.on_appended:
            self.tell_appended()
        return group.outcomes

    def tell_appended(self) -> None:
        """Called without the log's lock."""
        log_end_offset = self.state.log_end_offset
        for callback in tuple(self.on_appended):
            callback(log_end_offset)

    def tell_high_watermark(self, offset: int) -> None:
        """Called without the log's lock."""
        for callback in tuple(self.on_high_watermark):
            callback(offset)

    def flush(self) -> int:
        """Flush everything appended so far to the medium; returns the new recovery point.

        Raises LogOfflineError, and keeps raising it after the first failure.
        """
        before = self.state.flushed.offset
        with self.flush_lock:
            target = self._target()
            try:
                self._sync(target)
            except OSError as error:
                with self.state.lock:
                    raise self.state.go_offline(error) from error
            flushed = self._advance(target)
        if flushed != before:
            if self.state.committed is None:
                self.tell_high_watermark(flushed)
            if self.on_flushed:
                for callback in tuple(self.on_flushed):
                    callback(flushed)
        return flushed

    def close(self) -> None:
        """Close the log's files once a flush in progress no longer needs them."""
        with self.flush_lock:
            self.state.close()

    def _target(self) -> _Target:
        state = self.state
        with state.lock:
            state.check_online()
            segment = state.active.segment
            end = segment.end
            flushed = Flushed(end.next_offset, segment.base_offset, end.size_bytes)
            target = _Target(flushed, tuple(state.unflushed), state.active, state.folder_changed)
            state.folder_changed = False
            return target

    def _sync(self, target: _Target) -> None:
        for sealed in target.sealed:
            sealed.sync_all()
        if target.flushed.offset != self.state.flushed.offset:
            target.active.sync_log()
        if target.folder:
            self.state.disk.sync_folder(self.state.folder)

    def _advance(self, target: _Target) -> int:
        state = self.state
        with state.lock:
            # Even if another failure took the log offline meanwhile, these bytes are durable.
            state.flushed = target.flushed
            state.unflushed = state.unflushed[len(target.sealed) :]
        for sealed in target.sealed:
            sealed.close()
        return target.flushed.offset


class _Group:
    """The appends of one call."""

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._now_ms = state.monotonic_clock()
        self._log_append_time = state.clock() if state.config.log_append_time else None
        self._plan_anew()
        self._unwritten: list[int] = []  # outcomes that depend on the pending write, by index
        self.outcomes: list[Outcome] = []

    def take(self, append: Append) -> None:
        try:
            self._state.check_open()
            self.outcomes.append(self._planned(append))
        except _DEPENDENT as refusal:
            self._unwritten.append(len(self.outcomes))
            self.outcomes.append(refusal)
        except TierlogError as refusal:
            self.outcomes.append(refusal)

    def _planned(self, append: Append) -> AppendResult:
        batches, expected_offset, marker, verify = append
        headers = batches.headers
        if not headers:
            raise InvalidRecord("the request has no records")
        if marker is not None:
            check_marker(self._records.find_producer(headers[0].producer_id), headers[0], marker)
        elif len(headers) > 1 or headers[0].producer_id >= 0:
            duplicate = self._check_producers(headers, verify)
            if duplicate:
                return self._duplicate(duplicate)
        base_offset = self._write.end.next_offset
        if expected_offset not in (None, base_offset):
            raise OffsetMismatch(expected_offset=expected_offset or 0, log_end_offset=base_offset)
        self._roll_if_due(batches)
        self._begin_epoch(base_offset)
        self._write.plan_batch(
            batches.body, self._stamp(batches, marker), min_timestamps=self._min_timestamps(batches)
        )
        self._unwritten.append(len(self.outcomes))
        last_offset = self._write.end.next_offset - 1
        return AppendResult(
            base_offset, last_offset, self._log_append_time, False, self._state.log_start_offset
        )

    def _duplicate(self, earlier: ProducerBatch) -> AppendResult:
        if earlier.last_offset >= self._state.log_end_offset:  # the original is not written yet
            self._unwritten.append(len(self.outcomes))
        return AppendResult(
            earlier.first_offset,
            earlier.last_offset,
            None if self._log_append_time is None else earlier.timestamp,
            duplicate=True,
            log_start_offset=self._state.log_start_offset,
        )

    def _begin_epoch(self, start_offset: int) -> None:
        """The epoch checkpoint is on the medium before the first record of an epoch."""
        try:
            self._state.epochs.assign(self._state.leader_epoch, start_offset)
        except OSError as error:
            raise disk_error(self._state, error) from error

    def _check_producers(
        self, headers: Sequence[BatchHeader], verify: Verify | None
    ) -> ProducerBatch | None:
        """The earlier append of the same batches, if any. Raises ProducerFenced,
        OutOfOrderSequence, TransactionRefused.
        """
        find_producer = self._records.find_producer
        if len(headers) > 1 and (
            run := find_duplicate_request(find_producer(headers[-1].producer_id), headers)
        ):
            return run
        first, last, copies = None, None, 0
        seen: dict[int, Producer] = {}
        for header in headers:
            if header.producer_id < 0:
                continue
            known = seen.get(header.producer_id) or find_producer(header.producer_id)
            last = check_sequence(known, header)
            if last:
                first, copies = first or last, copies + 1
            else:
                check_transaction(known, header, verify)
                seen[header.producer_id] = after_batch(known, header)
        if not first or not last or copies < len(headers):
            if copies:
                raise OutOfOrderSequence("some batches of the request were already appended")
            return None
        return last._replace(offset_delta=last.last_offset - first.first_offset)

    def _roll_if_due(self, batches: ProducedBatches) -> None:
        body, headers = batches.body, batches.headers
        must_roll = self._write.must_roll(
            size_bytes=len(body),
            max_timestamp=self._max_timestamp(headers),
            last_offset=self._write.end.next_offset + offset_count(headers) - 1,
            now_ms=self._now_ms,
        )
        if must_roll:
            failure = self.write_appends()
            try:
                if failure:
                    raise failure
                roll(self._state)
            finally:  # the plan was written or failed; never reuse it
                self._plan_anew()

    def _max_timestamp(self, headers: Sequence[BatchHeader]) -> int:
        if self._log_append_time is not None:
            return self._log_append_time
        if len(headers) == 1:
            return headers[0].max_timestamp
        return max(header.max_timestamp for header in headers)

    def _stamp(self, batches: ProducedBatches, marker: EndMarker | None) -> list[BatchHeader]:
        """Assign offsets, epoch and, with LogAppendTime, the timestamp, in the bytes and in the
        headers.
        """
        body, leader_epoch = batches.body, self._state.leader_epoch
        offset, stamped = self._write.end.next_offset, []
        for header in batches.headers:
            stamp(body, header.position, base_offset=offset, leader_epoch=leader_epoch)
            if self._log_append_time is not None:
                header = stamp_log_append_time(body, header, timestamp=self._log_append_time)
            header = header.assigned(offset, leader_epoch=leader_epoch)
            if header.producer_id >= 0:
                self._records.note_producer(header, marker)
            stamped.append(header)
            offset = header.next_offset
        return stamped

    def _min_timestamps(self, batches: ProducedBatches) -> Sequence[int | None]:
        if self._log_append_time is not None:
            return [self._log_append_time] * len(batches.headers)
        return batches.min_timestamps

    def write_appends(self) -> TierlogError | None:
        """Write what is pending; if that fails, the error becomes the outcome of its appends.

        Nothing may be added to this plan afterwards.
        """
        failure = self._records.write_records() if self._write.buffers else None
        if failure:
            for number in self._unwritten:
                self.outcomes[number] = failure
        self._unwritten.clear()
        return failure

    def _plan_anew(self) -> None:
        self._records = PlannedRecords(self._state, now_ms=self._now_ms)
        self._write = self._records.write
