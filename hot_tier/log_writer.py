"""The writes of one log: several appends in one write, and flushes.

* Each append is checked against the log as it will be after the ones before it: expected offset,
  producer sequences, the need to roll.
* Offsets and the leader epoch are stamped into the producers' bytes in place; nothing is copied.
* Memory changes only after the write. If the write fails, all its appends fail, and so does every
  outcome that depended on them: duplicates of them, and sequences or expected offsets that were
  rejected because of them.
* When a flush returns, everything appended before is on the medium. Its order: bytes and indexes of
  sealed segments, bytes of the active one, the folder's names; only then do the recovery point and
  the high watermark advance. It waits for the disk outside the log's lock: appends, rolls and reads
  continue, and are not part of it.
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
from tierlog.hot_tier.producer_state import (
    Producer,
    ProducerBatch,
    after_batch,
    check_sequence,
    find_duplicate_request,
    offset_count,
)
from tierlog.hot_tier.roll import disk_error, roll
from tierlog.record_format.batch import BatchHeader, stamp, stamp_log_append_time
from tierlog.record_format.errors import (
    InvalidRecord,
    OffsetMismatch,
    OutOfOrderSequence,
    ProducerFenced,
    TierlogError,
)
from tierlog.record_format.produced import ProducedBatches


class Acks(IntEnum):
    """When a write is acknowledged, with Kafka's numbers."""

    ALL = -1
    NONE = 0
    LEADER = 1


class Append(NamedTuple):
    """Batches that are appended together or not at all.

    `expected_offset`: append only if the log ends exactly there.
    """

    batches: ProducedBatches
    expected_offset: int | None = None


class AppendResult(NamedTuple):
    """Where the batches are. `duplicate`: an earlier request appended them."""

    base_offset: int
    last_offset: int
    log_append_time: int | None
    duplicate: bool
    log_start_offset: int


Outcome = AppendResult | TierlogError


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
        self._flush_lock = threading.Lock()

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        """Append in order with as few writes as possible; returns one outcome per append and raises
        nothing.

        Errors: OffsetMismatch, OutOfOrderSequence, ProducerFenced, InvalidRecord, DiskFull (nothing
        was appended); LogOfflineError (the records may exist after a restart).
        """
        with self.state.lock:
            try:
                group = _Group(self.state)
                for append in appends:
                    group.take(append)
                group.write_appends()
            except Exception as bug:
                self.state.go_offline(bug)
                raise
        return group.outcomes

    def flush(self) -> int:
        """Flush everything appended so far to the medium; returns the new high watermark.

        Raises LogOfflineError, and keeps raising it after the first failure.
        """
        before = self.state.flushed.offset
        with self._flush_lock:
            target = self._target()
            try:
                self._sync(target)
            except OSError as error:
                with self.state.lock:
                    raise self.state.go_offline(error) from error
            high_watermark = self._advance(target)
        if high_watermark != before:
            for callback in tuple(self.on_high_watermark):
                callback(high_watermark)
        return high_watermark

    def close(self) -> None:
        """Close the log's files once a flush in progress no longer needs them."""
        with self._flush_lock:
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
        self._pending = state.active.begin_write()
        self._unwritten: list[int] = []  # outcomes that depend on the pending write, by index
        self._producers: dict[int, Producer] = {}  # as they will be after the write
        self.outcomes: list[Outcome] = []

    def take(self, append: Append) -> None:
        try:
            self._state.check_open()
            self.outcomes.append(self._planned(append))
        except (OffsetMismatch, OutOfOrderSequence, ProducerFenced) as refusal:
            self._unwritten.append(len(self.outcomes))
            self.outcomes.append(refusal)
        except TierlogError as refusal:
            self.outcomes.append(refusal)

    def _planned(self, append: Append) -> AppendResult:
        batches, expected_offset = append
        headers = batches.headers
        if not headers:
            raise InvalidRecord("the request has no records")
        if len(headers) > 1 or headers[0].producer_id >= 0:
            duplicate = self._check_producers(headers)
            if duplicate:
                return self._duplicate(duplicate)
        base_offset = self._pending.end.next_offset
        if expected_offset not in (None, base_offset):
            raise OffsetMismatch(expected_offset=expected_offset or 0, log_end_offset=base_offset)
        self._roll_if_due(batches)
        self._begin_epoch(base_offset)
        self._pending.plan_batch(
            batches.body, self._stamp(batches), min_timestamps=self._min_timestamps(batches)
        )
        self._unwritten.append(len(self.outcomes))
        last_offset = self._pending.end.next_offset - 1
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

    def _check_producers(self, headers: Sequence[BatchHeader]) -> ProducerBatch | None:
        """The earlier append of the same batches, if any. Raises ProducerFenced,
        OutOfOrderSequence.
        """
        if len(headers) > 1 and (
            run := find_duplicate_request(self._producer(headers[-1].producer_id), headers)
        ):
            return run
        first, last, copies = None, None, 0
        seen: dict[int, Producer] = {}
        for header in headers:
            if header.producer_id < 0:
                continue
            known = seen.get(header.producer_id) or self._producer(header.producer_id)
            last = check_sequence(known, header)
            if last:
                first, copies = first or last, copies + 1
            else:
                seen[header.producer_id] = after_batch(known, header)
        if not first or not last or copies < len(headers):
            if copies:
                raise OutOfOrderSequence("some batches of the request were already appended")
            return None
        return last._replace(offset_delta=last.last_offset - first.first_offset)

    def _producer(self, producer_id: int) -> Producer | None:
        return self._producers.get(producer_id) or self._state.producers.get(producer_id)

    def _roll_if_due(self, batches: ProducedBatches) -> None:
        body, headers = batches.body, batches.headers
        must_roll = self._pending.must_roll(
            size_bytes=len(body),
            max_timestamp=self._max_timestamp(headers),
            last_offset=self._pending.end.next_offset + offset_count(headers) - 1,
            now_ms=self._now_ms,
        )
        if must_roll:
            failure = self.write_appends()
            try:
                if failure:
                    raise failure
                roll(self._state)
            finally:  # the plan was written or failed; never reuse it
                self._pending = self._state.active.begin_write()

    def _max_timestamp(self, headers: Sequence[BatchHeader]) -> int:
        if self._log_append_time is not None:
            return self._log_append_time
        if len(headers) == 1:
            return headers[0].max_timestamp
        return max(header.max_timestamp for header in headers)

    def _stamp(self, batches: ProducedBatches) -> list[BatchHeader]:
        """Assign offsets, epoch and, with LogAppendTime, the timestamp, in the bytes and in the
        headers.
        """
        body, leader_epoch = batches.body, self._state.leader_epoch
        offset, stamped = self._pending.end.next_offset, []
        for header in batches.headers:
            stamp(body, header.position, base_offset=offset, leader_epoch=leader_epoch)
            if self._log_append_time is not None:
                header = stamp_log_append_time(body, header, timestamp=self._log_append_time)
            header = header.assigned(offset, leader_epoch=leader_epoch)
            if header.producer_id >= 0:
                known = self._producer(header.producer_id)
                entry = after_batch(known, header)
                self._producers[header.producer_id] = entry
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
        failure = self._write_pending() if self._pending.buffers else None
        if failure:
            for number in self._unwritten:
                self.outcomes[number] = failure
        self._unwritten.clear()
        self._producers.clear()
        return failure

    def _write_pending(self) -> TierlogError | None:
        try:
            self._state.active.write_planned(self._pending, now_ms=self._now_ms)
        except OSError as error:
            return self._on_write_failure(error)
        self._state.appended_bytes += self._pending.end.size_bytes - self._pending.start.size_bytes
        for producer in self._producers.values():
            self._state.producers.put_producer(producer)
        return None

    def _on_write_failure(self, error: OSError) -> TierlogError:
        failure = disk_error(self._state, error)
        if self._state.offline is None:
            try:
                self._state.active.drop_tail()
            except OSError as worse:
                failure = self._state.go_offline(worse)
        return failure
