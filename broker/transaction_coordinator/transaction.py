"""One transactional id: what may happen to it. Pure: values in, values out, or TransactionRefused.

| | Empty, CompleteX | Ongoing | PrepareX |
|---|---|---|---|
| `init_producer` | Empty, epoch + 1 | PrepareAbort, epoch + 1: ask again | CONCURRENT_… |
| `add_partitions` | Ongoing | Ongoing, with more | CONCURRENT_… |
| `end_transaction` | a repetition; V2: an empty abort | PrepareX | CONCURRENT_… |
| `complete_transaction` | | | CompleteX |
| `fence_producer`: it took too long | | PrepareAbort, epoch + 1 | |

* A decision is the PrepareX record: once that is durable, the markers are written until all are.
* V1 keeps the producer's epoch over a transaction's end; V2 raises it with each (KIP-890), so that
  what is late of one transaction cannot enter the next. Then the markers have the raised epoch, and
  a repeated end is known by `last_epoch`.
* A producer id whose epochs are used up is followed by a new one. The last epoch is never given to
  a client, so that it can still be fenced.
* Times are the wall clock's, since they are in the records.

The rules are those of Kafka's TransactionCoordinator and TransactionMetadata.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from tierlog.broker.data_folder.data_folder import TopicPartition
from tierlog.record_format.errors import CorruptDataError, TransactionRefused
from tierlog.record_format.kafka_messages.messages import TransactionLogValue

NO_PRODUCER: Final = -1
NO_EPOCH: Final = -1
NO_TIME: Final = -1
LAST_EPOCH: Final = 2**15 - 1
V1: Final = 0  # as a record says it
V2: Final = 2


class State(IntEnum):
    """As in the records; `shown` as Kafka's tools do."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5

    @property
    def shown(self) -> str:
        return self.name.title().replace("_", "")

    @property
    def is_decided(self) -> bool:
        """Whether markers are to be written."""
        return self in (State.PREPARE_COMMIT, State.PREPARE_ABORT)


class ProducerEpoch(NamedTuple):
    producer_id: int
    epoch: int


class Transaction(NamedTuple):
    """`last_epoch`: the client's before the last change that it asked for; a repetition has it.
    `version`: of the client that began or ended the transaction.
    """

    transactional_id: str
    producer_id: int
    epoch: int = NO_EPOCH
    timeout_ms: int = 0
    state: State = State.EMPTY
    partitions: frozenset[TopicPartition] = frozenset()
    start_ms: int = NO_TIME
    update_ms: int = NO_TIME
    last_epoch: int = NO_EPOCH
    previous_id: int = NO_PRODUCER
    next_id: int = NO_PRODUCER
    version: int = V1

    @property
    def producer(self) -> ProducerEpoch:
        return ProducerEpoch(self.producer_id, self.epoch)

    @property
    def is_open(self) -> bool:
        """Whether its logs wait for its end."""
        return self.state is State.ONGOING or self.state.is_decided

    @property
    def by_topic(self) -> dict[str, list[int]]:
        """The numbers of its partitions, in order."""
        found: dict[str, list[int]] = {}
        for topic, number in sorted(self.partitions):
            found.setdefault(topic, []).append(number)
        return found

    @property
    def is_exhausted(self) -> bool:
        return self.epoch >= LAST_EPOCH - 1

    @property
    def deadline_ms(self) -> int:
        return self.start_ms + self.timeout_ms


def _refused(found: Transaction, reason: str, detail: str) -> TransactionRefused:
    return TransactionRefused(reason, f"transactional id {found.transactional_id!r}: {detail}")


def _concurrent(found: Transaction) -> TransactionRefused:
    detail = f"its last transaction is in {found.state.shown}"
    return _refused(found, "CONCURRENT_TRANSACTIONS", detail)


def _fenced(found: Transaction, epoch: int) -> TransactionRefused:
    return _refused(found, "PRODUCER_FENCED", f"epoch {epoch} is not {found.epoch}")


def _other_producer(found: Transaction, producer_id: int) -> TransactionRefused:
    detail = f"its producer id is {found.producer_id}, not {producer_id}"
    return _refused(found, "INVALID_PRODUCER_ID_MAPPING", detail)


# --- InitProducerId -------------------------------------------------------------------------------


def init_producer(
    found: Transaction,
    *,
    timeout_ms: int,
    expected: ProducerEpoch | None,
    new_id: int,
    now_ms: int,
) -> Transaction:
    """A client begins with this id. `expected`: it goes on after an error, as this producer
    (KIP-360). `new_id`: used once the epochs are used up.
    """
    if expected is not None and not _may_continue(found, expected):
        raise _fenced(found, expected.epoch)
    if found.state.is_decided:
        raise _concurrent(found)
    if found.state is State.ONGOING:
        return fence_producer(found, now_ms=now_ms)
    empty = found._replace(
        state=State.EMPTY,
        partitions=frozenset(),
        timeout_ms=timeout_ms,
        start_ms=NO_TIME,
        update_ms=now_ms,
        previous_id=found.producer_id if found.epoch >= 0 else NO_PRODUCER,
    )
    if found.is_exhausted and (expected is None or expected.epoch == found.epoch):
        last = NO_EPOCH if expected is None else found.epoch
        return empty._replace(producer_id=new_id, epoch=0, last_epoch=last)
    if expected is None:
        return empty._replace(epoch=found.epoch + 1, last_epoch=NO_EPOCH)
    if found.epoch in (NO_EPOCH, expected.epoch):
        return empty._replace(epoch=found.epoch + 1, last_epoch=found.epoch)
    if expected.epoch == found.last_epoch:
        return empty
    raise _fenced(found, expected.epoch)


def _may_continue(found: Transaction, expected: ProducerEpoch) -> bool:
    return (
        found.epoch == NO_EPOCH
        or expected.producer_id == found.producer_id
        or (expected.producer_id == found.previous_id and expected.epoch >= LAST_EPOCH - 1)
    )


def fence_producer(found: Transaction, *, now_ms: int) -> Transaction:
    """Abort what is in progress. Its producer is told by the epoch."""
    assert found.state is State.ONGOING, "nothing else needs to be aborted"
    return found._replace(
        state=State.PREPARE_ABORT,
        epoch=min(found.epoch + 1, LAST_EPOCH),
        last_epoch=NO_EPOCH,
        update_ms=now_ms,
        version=V1,  # or its producer's own end would be taken for a repetition
    )


# --- while it is in progress ----------------------------------------------------------------------


def add_partitions(
    found: Transaction,
    producer: ProducerEpoch,
    partitions: Iterable[TopicPartition],
    *,
    version: int,
    now_ms: int,
) -> Transaction:
    """`found` itself if it has all of them."""
    _check_producer(found, producer)
    if found.state.is_decided:
        raise _concurrent(found)
    is_ongoing = found.state is State.ONGOING
    added = (found.partitions if is_ongoing else frozenset()).union(partitions)
    if is_ongoing and added == found.partitions:
        return found
    return found._replace(
        state=State.ONGOING,
        partitions=added,
        start_ms=found.start_ms if is_ongoing else now_ms,
        update_ms=now_ms,
        version=version,
    )


def check_takes_part(found: Transaction, producer: ProducerEpoch, place: TopicPartition) -> None:
    """Whether a partition is in the producer's transaction, which is in progress."""
    _check_producer(found, producer)
    if found.state.is_decided:
        raise _concurrent(found)
    if found.state is not State.ONGOING or place not in found.partitions:
        detail = f"{place[0]}-{place[1]} is not in a transaction in progress"
        raise _refused(found, "TRANSACTION_ABORTABLE", detail)


def _check_producer(found: Transaction, producer: ProducerEpoch) -> None:
    if found.producer_id != producer.producer_id:
        raise _other_producer(found, producer.producer_id)
    if found.epoch != producer.epoch:
        raise _fenced(found, producer.epoch)


# --- its end --------------------------------------------------------------------------------------


def end_transaction(
    found: Transaction,
    producer: ProducerEpoch,
    *,
    commit: bool,
    version: int,
    new_id: int,
    now_ms: int,
) -> Transaction:
    """`found` itself if this repeats the call that ended it."""
    state = found.state
    if _is_repeated(found, producer, version):
        if state not in _ENDED[commit]:
            raise _not_in_progress(found)
        if state.is_decided:
            raise _concurrent(found)
        return found
    _check_producer(found, producer)
    if state.is_decided:
        raise _concurrent(found)
    if state is not State.ONGOING and (commit or version < V2):
        raise _not_in_progress(found)
    ended = found._replace(
        state=State.PREPARE_COMMIT if commit else State.PREPARE_ABORT,
        start_ms=found.start_ms if state is State.ONGOING else now_ms,
        partitions=found.partitions if state is State.ONGOING else frozenset(),
        update_ms=now_ms,
        version=version,
    )
    if version < V2:
        return ended
    next_id = new_id if found.is_exhausted else NO_PRODUCER
    return ended._replace(epoch=found.epoch + 1, last_epoch=found.epoch, next_id=next_id)


def _not_in_progress(found: Transaction) -> TransactionRefused:
    return _refused(found, "INVALID_TXN_STATE", f"it is in {found.state.shown}")


_ENDED: Final = {
    True: (State.PREPARE_COMMIT, State.COMPLETE_COMMIT),
    False: (State.PREPARE_ABORT, State.COMPLETE_ABORT),
}


def _is_repeated(found: Transaction, producer: ProducerEpoch, version: int) -> bool:
    """Whether the transaction is ended already, and by this call. With V1 the epoch does not tell
    the end of an empty transaction from that.
    """
    if found.state in (State.EMPTY, State.ONGOING):
        return False
    if version < V2:
        return found.producer == producer
    was = found.previous_id if found.epoch == 0 else found.producer_id
    return found.version >= V2 and ProducerEpoch(was, found.last_epoch) == producer


def complete_transaction(found: Transaction, *, now_ms: int) -> Transaction:
    """All its markers are durable."""
    assert found.state.is_decided, "markers follow a decision"
    is_commit = found.state is State.PREPARE_COMMIT
    done = found._replace(
        state=State.COMPLETE_COMMIT if is_commit else State.COMPLETE_ABORT,
        partitions=frozenset(),
        update_ms=now_ms,
        previous_id=found.producer_id,
        next_id=NO_PRODUCER,
    )
    if found.next_id == NO_PRODUCER:
        return done
    return done._replace(producer_id=found.next_id, epoch=0)


# --- records --------------------------------------------------------------------------------------


def to_record(found: Transaction) -> TransactionLogValue:
    return TransactionLogValue(
        producer_id=found.producer_id,
        previous_producer_id=found.previous_id,
        next_producer_id=found.next_id,
        producer_epoch=found.epoch,
        transaction_timeout_ms=found.timeout_ms,
        transaction_status=found.state,
        transaction_partitions=[
            TransactionLogValue.PartitionsSchema(topic=topic, partition_ids=numbers)
            for topic, numbers in found.by_topic.items()
        ],
        transaction_last_update_timestamp_ms=found.update_ms,
        transaction_start_timestamp_ms=found.start_ms,
        client_transaction_version=found.version,
    )


def from_record(transactional_id: str, value: TransactionLogValue) -> Transaction:
    """Raises CorruptDataError. The client's last epoch is not in a record: of V2 it follows."""
    try:
        state = State(value.transaction_status)
    except ValueError:
        detail = f"transactional id {transactional_id!r}: status {value.transaction_status}"
        raise CorruptDataError(detail) from None
    version, epoch = value.client_transaction_version, value.producer_epoch
    is_ended = version >= V2 and state not in (State.EMPTY, State.ONGOING)
    last_epoch = LAST_EPOCH - 1 if epoch == 0 else epoch - 1
    return Transaction(
        transactional_id=transactional_id,
        producer_id=value.producer_id,
        epoch=epoch,
        timeout_ms=value.transaction_timeout_ms,
        state=state,
        partitions=frozenset(
            (topic.topic, number)
            for topic in value.transaction_partitions or ()
            for number in topic.partition_ids
        ),
        start_ms=value.transaction_start_timestamp_ms,
        update_ms=value.transaction_last_update_timestamp_ms,
        last_epoch=last_epoch if is_ended else NO_EPOCH,
        previous_id=value.previous_producer_id,
        next_id=value.next_producer_id,
        version=version,
    )
