"""The transactions of this broker: finds an id's state, carries out decisions, and keeps time.

* One lock for all ids; it is held for microseconds, and nobody waits under it. A log asks under its
  own lock whether it takes part (`check_takes_part`), so no log is written to under this one but by
  queueing the coordinator's own records.
* What a client is told was flushed before. One change of an id at a time: others are told to come
  again (CONCURRENT_TRANSACTIONS).
* A decided transaction is carried out until it is complete, whatever fails meanwhile: markers that
  could not be written are tried again, after a restart too. A partition that is gone needs none.
* One timer an id at most: a transaction that is in progress for too long is aborted.

--- records: TransactionLogKey and TransactionLogValue (version 1, as Kafka 4 writes) in
`__transaction_state`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import structlog

from tierlog.broker.data_folder.data_folder import TopicPartition
from tierlog.broker.group_coordinator.coordinator import error_of
from tierlog.broker.transaction_coordinator.transaction import (
    V2,
    ProducerEpoch,
    State,
    Transaction,
    add_partitions,
    check_takes_part,
    complete_transaction,
    end_transaction,
    fence_producer,
    from_record,
    init_producer,
    to_record,
)
from tierlog.host.threads import failed
from tierlog.hot_tier.producer_state import new_producer_id
from tierlog.record_format.errors import (
    CorruptDataError,
    ProducerFenced,
    Throttled,
    TierlogError,
    TransactionRefused,
)
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import TransactionLogKey, TransactionLogValue
from tierlog.record_format.kafka_messages.source import MessageError

log = structlog.get_logger(__name__)

NONE: Final = "NONE"
CONCURRENT: Final = "CONCURRENT_TRANSACTIONS"
TRANSACTIONAL_IDS_MAX: Final = 100_000
_VALUE_VERSION: Final = 1
_RETRY_MS: Final = 100  # a change is about to be written
_MARKER_RETRY_MS: Final = 1_000
_IDLE: Final = frozenset((State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT))


class Outcome(NamedTuple):
    """`reason`: Kafka's name of the error, or NONE; `cause`: the error that it stands for, if there
    is one. `producer`: to go on with.
    """

    reason: str = NONE
    producer: ProducerEpoch = ProducerEpoch(-1, -1)
    cause: BaseException | None = None


Reply = Callable[[Outcome], None]


class Logs(Protocol):
    """What the coordinator writes. Neither waits; both may raise what an append raises."""

    def append_state(
        self, transactional_id: str, key: bytes, value: bytes | None
    ) -> Future[Any]: ...

    def append_together(self, states: Mapping[str, tuple[bytes, bytes]]) -> Future[Any]:
        """All of them or none. Raises TransactionRefused if they are too many, or not in one
        partition.
        """
        ...

    def append_marker(
        self,
        transactional_id: str,
        place: TopicPartition,
        producer: ProducerEpoch,
        *,
        commit: bool,
    ) -> Future[Any] | None:
        """None: there is no such partition any more."""
        ...


class _Entry:
    """`pending`: what is being written. `armed_ms`: when the timer calls. `waiters`: who wants to
    know when it is settled.
    """

    __slots__ = ("armed_ms", "now", "pending", "waiters")

    def __init__(self, now: Transaction) -> None:
        self.now = now
        self.pending: Transaction | None = None
        self.armed_ms: int | None = None
        self.waiters: list[Callable[[], None]] = []

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being written, neither a state nor markers."""
        return self.pending is None and not self.now.state.is_decided


class TransactionCoordinator:
    """Thread-safe. `call_after` is the timer: (milliseconds, callback). `now_ms`: wall clock.
    `late_count`: transactions that were aborted as they took too long, since the start.
    """

    def __init__(
        self,
        logs: Logs,
        *,
        max_timeout_ms: int,
        call_after: Callable[[int, Callable[[], None]], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._logs, self._max_timeout_ms = logs, max_timeout_ms
        self._call_after, self._now_ms = call_after, now_ms
        self._lock = threading.RLock()  # a record may be durable before its append returns
        self._entries: dict[str, _Entry] = {}
        self._is_closed = False
        self.late_count = 0

    # --- producers' calls -------------------------------------------------------------------------
    # Each calls `reply` once, perhaps before it returns.

    def init_producer(
        self,
        transactional_id: str,
        *,
        timeout_ms: int,
        expected: ProducerEpoch | None,
        reply: Reply,
    ) -> None:
        if not 0 < timeout_ms <= self._max_timeout_ms:
            reply(Outcome("INVALID_TRANSACTION_TIMEOUT"))
            return

        def change(found: Transaction) -> Transaction:
            return init_producer(
                found,
                timeout_ms=timeout_ms,
                expected=expected,
                new_id=new_producer_id(),
                now_ms=self._now_ms(),
            )

        def told(outcome: Outcome, written: Transaction) -> Outcome:
            # What was in progress is being aborted: the client asks again until that is done.
            return outcome if written.state is State.EMPTY else Outcome(CONCURRENT)

        with self._lock:
            is_new = transactional_id not in self._entries
            if is_new and len(self._entries) >= TRANSACTIONAL_IDS_MAX:
                full = Throttled(f"there are {TRANSACTIONAL_IDS_MAX} transactional ids already")
                reply(Outcome("COORDINATOR_NOT_AVAILABLE", cause=full))
                return
            if is_new:
                first = Transaction(transactional_id, new_producer_id())
                self._entries[transactional_id] = _Entry(first)
            self._change(transactional_id, change, reply, told)

    def add_partitions(
        self,
        transactional_id: str,
        producer: ProducerEpoch,
        partitions: Iterable[TopicPartition],
        *,
        version: int,
        reply: Reply,
    ) -> None:
        """They are in the producer's transaction, which begins with the first."""
        added = frozenset(partitions)

        def change(found: Transaction) -> Transaction:
            return add_partitions(found, producer, added, version=version, now_ms=self._now_ms())

        self._change(transactional_id, change, reply)

    def check_takes_part(
        self, transactional_id: str, producer: ProducerEpoch, place: TopicPartition
    ) -> None:
        """Raises TransactionRefused."""
        with self._lock:
            check_takes_part(self._entry(transactional_id).now, producer, place)

    def end_transaction(
        self,
        transactional_id: str,
        producer: ProducerEpoch,
        *,
        commit: bool,
        version: int,
        reply: Reply,
    ) -> None:
        """It is decided when `reply` is called; the markers follow."""

        def change(found: Transaction) -> Transaction:
            return end_transaction(
                found,
                producer,
                commit=commit,
                version=version,
                new_id=new_producer_id(),
                now_ms=self._now_ms(),
            )

        def told(_: Outcome, written: Transaction) -> Outcome:
            return Outcome(producer=_goes_on_with(written))

        self._change(transactional_id, change, reply, told)

    def commit_together(self, parts: Mapping[str, ProducerEpoch], *, reply: Reply) -> None:
        """Commit the transactions in progress of several ids by one decision: all or none. The
        producer in the reply is the first's. For clients of V2.
        """
        with self._lock:
            try:
                entries = [self._entry(name) for name in parts]
                if any(entry.pending is not None for entry in entries):
                    raise TransactionRefused(CONCURRENT, "a state is being written")
                changes = [
                    end_transaction(
                        entry.now,
                        producer,
                        commit=True,
                        version=V2,
                        new_id=new_producer_id(),
                        now_ms=self._now_ms(),
                    )
                    for entry, producer in zip(entries, parts.values(), strict=True)
                ]
                pairs = list(zip(entries, changes, strict=True))
                repeated = [changed is entry.now for entry, changed in pairs]
                if any(repeated) and not all(repeated):
                    detail = "some of these transactions have been committed before, others not"
                    raise TransactionRefused("INVALID_TXN_STATE", detail)
                if not all(repeated):
                    self._write_together(pairs, reply)
                    return
            except TransactionRefused as refusal:
                reply(Outcome(refusal.reason, cause=refusal))
                return
            reply(Outcome(producer=_goes_on_with(changes[0])))

    def _write_together(self, pairs: list[tuple[_Entry, Transaction]], reply: Reply) -> None:
        """Called under the lock. Raises TransactionRefused."""
        states = {
            changed.transactional_id: (
                key_of(changed.transactional_id),
                codec.encode_versioned(to_record(changed), _VALUE_VERSION),
            )
            for _, changed in pairs
        }

        def written(future: Future[Any]) -> None:
            (first, changed), *others = pairs
            for other, ended in others:
                self._written(other, ended, lambda _: None, future)
            next_producer = _goes_on_with(changed)
            self._written(
                first,
                changed,
                lambda it: reply(it._replace(producer=next_producer) if it.reason == NONE else it),
                future,
            )

        try:
            future = self._logs.append_together(states)
        except TransactionRefused:
            raise
        except (TierlogError, OSError) as error:
            future = failed(error)
        for entry, changed in pairs:
            entry.pending = changed
        future.add_done_callback(written)

    def when_settled(
        self, transactional_id: str, callback: Callable[[], None]
    ) -> Callable[[], None]:
        """Call once, from any thread, when nothing of this id is being written, neither its state
        nor markers; at once, if that is so. Returns a function that cancels the wait.
        """
        with self._lock:
            entry = self._entries.get(transactional_id)
            if entry is not None and not entry.is_settled:
                entry.waiters.append(callback)
                return partial(self._stop_waiting, entry, callback)
        callback()
        return _nothing

    def _stop_waiting(self, entry: _Entry, callback: Callable[[], None]) -> None:
        with self._lock:
            if callback in entry.waiters:
                entry.waiters.remove(callback)

    # --- what it shows ----------------------------------------------------------------------------

    def describe(self, transactional_id: str) -> Transaction | None:
        with self._lock:
            entry = self._entries.get(transactional_id)
            return None if entry is None or entry.now.epoch < 0 else entry.now

    def transactions(self) -> list[Transaction]:
        with self._lock:
            return [one.now for one in self._entries.values() if one.now.epoch >= 0]

    # --- the log ----------------------------------------------------------------------------------

    def load(self, values: Mapping[str, bytes]) -> None:
        """Take over what the log says, at a start, and carry out what was decided. A record that
        cannot be read is skipped.
        """
        for transactional_id, data in values.items():
            try:
                value = codec.decode_versioned(TransactionLogValue, data)
                found = from_record(transactional_id, value)
            except (MessageError, CorruptDataError) as error:
                log.warning("a transaction cannot be read", id=transactional_id, error=str(error))
                continue
            with self._lock:
                entry = self._entries[transactional_id] = _Entry(found)
            self._go_on(entry)

    def forget_ids(self, is_gone: Callable[[str], bool]) -> None:
        """Another broker's log has them now; it carries out what was decided."""
        with self._lock:
            entries = [self._entries.pop(name) for name in list(filter(is_gone, self._entries))]
            waiters = [callback for entry in entries for callback in entry.waiters]
            for entry in entries:
                entry.armed_ms, entry.waiters = None, []
        for callback in waiters:
            callback()

    def _is_ours(self, entry: _Entry) -> bool:
        return self._entries.get(entry.now.transactional_id) is entry

    def expire(self, *, idle_ms: int) -> None:
        """Forget the ids that nobody has used for so long, durably."""
        until_ms = self._now_ms() - idle_ms
        with self._lock:
            for transactional_id, entry in list(self._entries.items()):
                found = entry.now
                is_idle = found.state in _IDLE and entry.pending is None
                if is_idle and found.epoch >= 0 and found.update_ms <= until_ms:
                    self._forget(transactional_id, entry)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    # --- changes ----------------------------------------------------------------------------------

    def _entry(self, transactional_id: str) -> _Entry:
        entry = self._entries.get(transactional_id)
        if entry is None:
            raise TransactionRefused(
                "INVALID_PRODUCER_ID_MAPPING", f"there is no transactional id {transactional_id!r}"
            )
        return entry

    def _change(
        self,
        transactional_id: str,
        change: Callable[[Transaction], Transaction],
        reply: Reply,
        told: Callable[[Outcome, Transaction], Outcome] = lambda outcome, _: outcome,
    ) -> None:
        with self._lock:
            try:
                entry = self._entry(transactional_id)
                if entry.pending is not None:
                    raise TransactionRefused(CONCURRENT, "its state is being written")
                changed = change(entry.now)
            except TransactionRefused as refusal:
                reply(Outcome(refusal.reason, cause=refusal))
                return
            if changed is entry.now:
                reply(told(Outcome(producer=changed.producer), changed))
                return

            def answer(outcome: Outcome) -> None:
                reply(told(outcome, changed) if outcome.reason == NONE else outcome)

            self._write(entry, changed, answer)

    def _write(self, entry: _Entry, changed: Transaction, reply: Reply) -> None:
        """Called under the lock."""
        entry.pending = changed
        written = partial(self._written, entry, changed, reply)
        try:
            data = codec.encode_versioned(to_record(changed), _VALUE_VERSION)
            key = key_of(changed.transactional_id)
            future = self._logs.append_state(changed.transactional_id, key, data)
        except (TierlogError, OSError) as error:
            written(failed(error))
        else:
            future.add_done_callback(written)

    def _written(
        self, entry: _Entry, changed: Transaction, reply: Reply, future: Future[Any]
    ) -> None:
        cause = future.exception()
        with self._lock:
            entry.pending = None
            if cause is None:
                entry.now = changed
            elif entry.now.epoch < 0 and self._is_ours(entry):
                self._entries.pop(changed.transactional_id, None)  # it was never written
        if cause is not None:
            log.warning(
                "a transaction was not written", id=changed.transactional_id, error=str(cause)
            )
            reply(Outcome(error_of(cause), cause=cause))
        else:
            reply(Outcome(producer=changed.producer))
            self._go_on(entry)
        self._call_waiters(entry)

    def _call_waiters(self, entry: _Entry) -> None:
        with self._lock:
            if not entry.is_settled:
                return
            waiters, entry.waiters = entry.waiters, []
        for callback in waiters:
            callback()

    def _forget(self, transactional_id: str, entry: _Entry) -> None:
        def forgotten(future: Future[Any]) -> None:
            with self._lock:
                entry.pending = None
                if future.exception() is None and self._is_ours(entry):
                    del self._entries[transactional_id]
            self._call_waiters(entry)

        entry.pending = entry.now  # nobody changes it meanwhile
        try:
            key = key_of(transactional_id)
            self._logs.append_state(transactional_id, key, None).add_done_callback(forgotten)
        except (TierlogError, OSError) as error:
            forgotten(failed(error))

    # --- what follows from a state ----------------------------------------------------------------

    def _go_on(self, entry: _Entry) -> None:
        if not self._is_ours(entry):
            return
        found = entry.now
        if found.state.is_decided:
            self._write_markers(entry, found, found.partitions)
        elif found.state is State.ONGOING:
            self._arm(entry, found.deadline_ms)

    def _write_markers(
        self, entry: _Entry, decided: Transaction, places: frozenset[TopicPartition]
    ) -> None:
        """Write markers of `places`; those that cannot be written are tried again."""
        if not self._is_ours(entry):
            return
        waiting, unwritten = itertools.count(1), set[TopicPartition]()

        def done(place: TopicPartition | None, future: Future[Any] | None) -> None:
            if place is not None and future is not None and not _is_written(future):
                unwritten.add(place)
            if next(waiting) == len(places) + 1:  # `next` is atomic: one thread sees the last
                self._markers_written(entry, decided, frozenset(unwritten))

        for place in places:
            marker = self._append_marker(place, decided)
            if marker is None:
                done(None, None)
            else:
                marker.add_done_callback(partial(done, place))
        done(None, None)

    def _append_marker(self, place: TopicPartition, decided: Transaction) -> Future[Any] | None:
        try:
            commit = decided.state is State.PREPARE_COMMIT
            return self._logs.append_marker(
                decided.transactional_id, place, decided.producer, commit=commit
            )
        except (TierlogError, OSError) as error:
            return failed(error)

    def _markers_written(
        self, entry: _Entry, decided: Transaction, unwritten: frozenset[TopicPartition]
    ) -> None:
        if unwritten:
            again = partial(self._write_markers, entry, decided, unwritten)
            self._later(_MARKER_RETRY_MS, again)
            return
        if not self._is_ours(entry):
            return

        def completed(outcome: Outcome) -> None:
            if outcome.reason != NONE:
                self._later(
                    _MARKER_RETRY_MS, partial(self._markers_written, entry, decided, unwritten)
                )

        with self._lock:
            self._write(entry, complete_transaction(decided, now_ms=self._now_ms()), completed)

    # --- time -------------------------------------------------------------------------------------

    def _arm(self, entry: _Entry, due_ms: int) -> None:
        with self._lock:
            if entry.armed_ms is None or due_ms < entry.armed_ms:
                entry.armed_ms = due_ms
                delay_ms = max(0, due_ms - self._now_ms())
                self._later(delay_ms, partial(self._look_at_time, entry, due_ms))

    def _look_at_time(self, entry: _Entry, armed_ms: int) -> None:
        with self._lock:
            if entry.armed_ms != armed_ms or not self._is_ours(entry):
                return  # another callback came since, or another coordinator
            entry.armed_ms = None
            found, now_ms = entry.now, self._now_ms()
            if found.state is not State.ONGOING:
                return
            if entry.pending is not None or now_ms < found.deadline_ms:
                self._arm(entry, max(found.deadline_ms, now_ms + _RETRY_MS))
                return
            log.info("a transaction took too long", id=found.transactional_id)
            self._write(
                entry, fence_producer(found, now_ms=now_ms), partial(self._timed_out, entry)
            )

    def _timed_out(self, entry: _Entry, outcome: Outcome) -> None:
        if outcome.reason != NONE:
            self._arm(entry, self._now_ms() + _MARKER_RETRY_MS)
            return
        with self._lock:
            self.late_count += 1

    def _later(self, delay_ms: int, callback: Callable[[], None]) -> None:
        if not self._is_closed:
            self._call_after(delay_ms, callback)


def _is_written(future: Future[Any]) -> bool:
    """A log that knows a later epoch of the producer has nothing of this transaction to end."""
    cause = future.exception()
    if cause is not None:
        log.warning("a transaction's marker was not written", error=str(cause))
    return cause is None or isinstance(cause, ProducerFenced)


def _goes_on_with(written: Transaction) -> ProducerEpoch:
    """The producer of the next transaction, whose last one ended so."""
    return ProducerEpoch(written.next_id, 0) if written.next_id >= 0 else written.producer


def _nothing() -> None:
    """Cancels a wait that is over."""


def key_of(transactional_id: str) -> bytes:
    return codec.encode_record_key(TransactionLogKey(transactional_id=transactional_id))
