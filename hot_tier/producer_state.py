"""What the log remembers of each idempotent producer, to recognise duplicates and reject sequence
gaps.

* A producer's entry holds its epoch and its last five batches (Kafka keeps five: a client has at
  most five requests in flight). A batch with the same first and last sequence in the same epoch is
  a duplicate; one that does not follow the last is out of order; a lower epoch is fenced.
* `check_sequence`, `check_transaction`, `check_marker` and `find_duplicate_request` change nothing.
  `apply_data_batch` and `apply_marker` do not validate, because they also replay the log.
* The first offset of each producer's open transaction is kept here too; the smallest is the last
  stable offset.
* A transaction begins in a log only if its coordinator says, at that moment, that the log takes
  part in it (`Verify`): a batch that was late would begin one that nobody ends (KIP-890).
* A producer expires after `producer.id.expiration.ms` without a batch, by a monotonic clock: if it
  expired too soon, a duplicate would be appended. (Kafka uses the records' timestamps; a producer
  of old events would expire at once.)

Not thread-safe: guarded by the log's lock.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from tierlog.record_format.batch import MAX_SEQUENCE, NO_SEQUENCE, BatchHeader
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import OutOfOrderSequence, ProducerFenced, TransactionRefused
from tierlog.record_format.index_layouts import AbortedTxn

REMEMBERED_BATCHES: Final = 5
NO_TRANSACTION: Final = -1
NO_COORDINATOR: Final = -1
ALONE: Final = 0  # the coordinator epoch of a broker alone: nothing fences it
_FIRST_PRODUCER_ID: Final = 2**32
_END_PRODUCER_ID: Final = 2**53  # JSON readers that use doubles are exact below it


Verify = Callable[[BatchHeader], None]
"""Raises TransactionRefused if the producer's transaction is not in progress here. Called under the
log's lock: it does not wait."""


def new_producer_id() -> int:
    """Producer ids are random, so no counter can be lost with a disk."""
    return _FIRST_PRODUCER_ID + secrets.randbelow(_END_PRODUCER_ID - _FIRST_PRODUCER_ID)


class ProducerBatch(NamedTuple):
    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int

    @property
    def first_offset(self) -> int:
        return self.last_offset - self.offset_delta

    @property
    def first_sequence(self) -> int:
        return (self.last_sequence - self.offset_delta) & MAX_SEQUENCE


class Producer(NamedTuple):
    """One producer, oldest batch first. Immutable."""

    producer_id: int
    epoch: int
    batches: tuple[ProducerBatch, ...]
    coordinator_epoch: int
    transaction_first_offset: int
    last_timestamp: int

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def is_in_transaction(self) -> bool:
        return self.transaction_first_offset != NO_TRANSACTION


def check_sequence(producer: Producer | None, header: BatchHeader) -> ProducerBatch | None:
    """The earlier copy of this batch, or None if it is new and in order.

    Raises ProducerFenced, OutOfOrderSequence. An unknown producer may start at any sequence: its
    records may all have expired (as in Kafka). What a coordinator writes for a producer has none.
    """
    if producer is None:
        return None
    _check_epoch(producer, header)
    if header.base_sequence == NO_SEQUENCE:
        return None
    if header.producer_epoch > producer.epoch:
        if header.base_sequence != 0:
            raise _out_of_order(header, expected=0)
        return None
    if copy := _copy_of(producer, header):
        return copy
    expected = (producer.last_sequence + 1) & MAX_SEQUENCE  # after -1 comes 0
    if producer.epoch >= 0 and header.base_sequence != expected:
        raise _out_of_order(header, expected=expected)
    return None


def _check_epoch(producer: Producer, header: BatchHeader) -> None:
    if header.producer_epoch < producer.epoch:
        raise ProducerFenced(
            f"producer {header.producer_id} has epoch {producer.epoch}, "
            f"but the batch has epoch {header.producer_epoch}"
        )


def check_transaction(
    producer: Producer | None, header: BatchHeader, verify: Verify | None
) -> None:
    """Whether a new batch may be in its producer's transaction, or in none. Raises
    TransactionRefused.
    """
    if producer is None or not producer.is_in_transaction:
        if not header.is_transactional:
            return
    elif not header.is_transactional:
        raise _invalid_transaction(header, "is in a transaction, but the batch is not")
    elif producer.epoch == header.producer_epoch:
        return
    if verify is None:
        raise _invalid_transaction(header, "has begun no transaction")
    verify(header)


def _invalid_transaction(header: BatchHeader, problem: str) -> TransactionRefused:
    return TransactionRefused("INVALID_TXN_STATE", f"producer {header.producer_id} {problem}")


def check_marker(producer: Producer | None, header: BatchHeader, marker: EndMarker) -> None:
    """Raises ProducerFenced; TransactionRefused for a coordinator that another has replaced."""
    if producer is None:
        return
    _check_epoch(producer, header)
    if ALONE != marker.coordinator_epoch < producer.coordinator_epoch:
        raise TransactionRefused(
            "TRANSACTION_COORDINATOR_FENCED",
            f"producer {header.producer_id}: coordinator epoch {marker.coordinator_epoch} is below "
            f"{producer.coordinator_epoch}",
        )


def _copy_of(producer: Producer, header: BatchHeader) -> ProducerBatch | None:
    for batch in reversed(producer.batches):
        same_first = batch.first_sequence == header.base_sequence
        if same_first and batch.last_sequence == header.last_sequence:
            return batch
    return None


def find_duplicate_request(
    producer: Producer | None, headers: Sequence[BatchHeader]
) -> ProducerBatch | None:
    """The earlier copy of a request's batches as one, if they are consecutive batches of one
    producer and the last of them is remembered. The others may not be, after a restart or if there
    are many.
    """
    if producer is None or headers[-1].producer_epoch != producer.epoch:
        return None
    if not all(_follows(header, following) for header, following in pairwise(headers)):
        return None
    last = _copy_of(producer, headers[-1])
    if last is None:
        return None
    first = _copy_of(producer, headers[0])
    first_offset = first.first_offset if first else last.last_offset - offset_count(headers) + 1
    return last._replace(offset_delta=last.last_offset - first_offset)


def offset_count(headers: Sequence[BatchHeader]) -> int:
    """How many offsets the batches use."""
    if len(headers) == 1:
        return headers[0].last_offset_delta + 1
    return sum(header.last_offset_delta + 1 for header in headers)


def _follows(header: BatchHeader, following: BatchHeader) -> bool:
    producer = (header.producer_id, header.producer_epoch)
    return (
        producer == (following.producer_id, following.producer_epoch)
        and (header.last_sequence + 1) & MAX_SEQUENCE == following.base_sequence
    )


def _out_of_order(header: BatchHeader, *, expected: int) -> OutOfOrderSequence:
    return OutOfOrderSequence(
        f"producer {header.producer_id} (epoch {header.producer_epoch}) sent sequence "
        f"{header.base_sequence}, but {expected} was expected"
    )


def after_batch(producer: Producer | None, header: BatchHeader) -> Producer:
    """The producer after one of its data batches was appended. `header` has the assigned offset."""
    batch = ProducerBatch(
        header.last_sequence, header.last_offset, header.last_offset_delta, header.max_timestamp
    )
    older: tuple[ProducerBatch, ...] = ()
    first_offset, coordinator_epoch = NO_TRANSACTION, NO_COORDINATOR
    if producer is not None:
        first_offset = producer.transaction_first_offset
        coordinator_epoch = producer.coordinator_epoch
        if producer.epoch == header.producer_epoch:
            older = producer.batches[-(REMEMBERED_BATCHES - 1) :]
    if header.is_transactional and first_offset == NO_TRANSACTION:
        first_offset = header.base_offset
    return Producer(
        producer_id=header.producer_id,
        epoch=header.producer_epoch,
        batches=(*older, batch),
        coordinator_epoch=coordinator_epoch,
        transaction_first_offset=first_offset,
        last_timestamp=header.max_timestamp,
    )


def after_marker(producer: Producer | None, header: BatchHeader, marker: EndMarker) -> Producer:
    """The producer after the end of its transaction was appended. `header` has the assigned
    offset.
    """
    same_epoch = producer is not None and producer.epoch == header.producer_epoch
    return Producer(
        producer_id=header.producer_id,
        epoch=header.producer_epoch,
        batches=producer.batches if producer and same_epoch else (),
        coordinator_epoch=marker.coordinator_epoch,
        transaction_first_offset=NO_TRANSACTION,
        last_timestamp=header.max_timestamp,
    )


def aborted_by(
    marker: EndMarker, header: BatchHeader, ended: Producer | None, *, still_open: int | None
) -> AbortedTxn | None:
    """The transaction of `ended` that the marker aborts, if it had a record. `still_open`: the
    first offset of the oldest other open transaction.
    """
    if marker.committed or ended is None or not ended.is_in_transaction:
        return None
    stable = header.next_offset if still_open is None else still_open
    return AbortedTxn(
        header.producer_id, ended.transaction_first_offset, header.last_offset, stable
    )


class ProducerStates:
    """All producers of one log."""

    __slots__ = ("_clock", "_producers", "_seen_ms", "end_offset", "open_transactions")

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._producers: dict[int, Producer] = {}
        self._seen_ms: dict[int, int] = {}  # time of the last `put`
        self.end_offset = 0  # for replay: batches below it are applied
        self.open_transactions: dict[int, int] = {}  # producer id -> first offset

    def __len__(self) -> int:
        return len(self._producers)

    def __iter__(self) -> Iterator[Producer]:
        return iter(self._producers.values())

    def get(self, producer_id: int) -> Producer | None:
        return self._producers.get(producer_id)

    def put_producer(self, producer: Producer) -> None:
        self._producers[producer.producer_id] = producer
        self._seen_ms[producer.producer_id] = self._clock()
        if producer.transaction_first_offset != NO_TRANSACTION:
            self.open_transactions[producer.producer_id] = producer.transaction_first_offset
        elif self.open_transactions:
            self.open_transactions.pop(producer.producer_id, None)

    def apply_data_batch(self, header: BatchHeader) -> None:
        """Apply a data batch that is in the log."""
        if header.producer_id >= 0:
            known = self._producers.get(header.producer_id)
            self.put_producer(after_batch(known, header))
        self.end_offset = header.next_offset

    def apply_marker(self, header: BatchHeader, marker: EndMarker) -> AbortedTxn | None:
        """Apply a commit or abort marker; returns the aborted transaction, if it had a record."""
        self.end_offset = header.next_offset
        known = self._producers.get(header.producer_id)
        self.put_producer(after_marker(known, header, marker))
        return aborted_by(marker, header, known, still_open=self.first_unstable_offset())

    def first_unstable_offset(self) -> int | None:
        """First offset of the oldest open transaction. The only method that may be called without
        the lock: it iterates over a copy, which is made atomically.
        """
        return min(tuple(self.open_transactions.values()), default=None)

    def expire(self, *, idle_ms: int) -> int:
        """Forget producers idle for `idle_ms`, except those in a transaction; returns how many."""
        until_ms = self._clock() - idle_ms
        idle = [
            producer_id
            for producer_id, seen_ms in self._seen_ms.items()
            if seen_ms <= until_ms and producer_id not in self.open_transactions
        ]
        for producer_id in idle:
            del self._producers[producer_id], self._seen_ms[producer_id]
        return len(idle)
