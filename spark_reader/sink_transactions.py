"""What makes a sink exactly once: a transaction for each attempt of a task, and one decision.

* An attempt has the transactional id `<transactionalId>/<partition>/<attempt>`. Spark hands the
  driver the messages of one attempt of each task, and those are committed together, all or none. Of
  others nothing is ever committed: they are aborted by the task that fails, by the next attempt
  that begins with the id, or by the broker after the time-out.
* Which of a query's epochs is committed is an offset of the group `<transactionalId>` (the epoch +
  1, with the query's id as metadata), in the same decision. An epoch that Spark runs again, since
  it ended before it wrote its own checkpoint, is recognised, and its rows are aborted.
* The driver begins with `<transactionalId>` before it looks: a driver of the same query that still
  runs elsewhere is fenced, or has committed, and is seen.
* A batch write has no epoch: a frame that is written again is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from tierlog.record_format.errors import TierlogError, UnknownGroup
from tierlog.spark_reader.sink_batches import TopicPartition

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.sender import Within

QUERY_ID: Final = "sql.streaming.queryId"  # a property that Spark gives to a stream's tasks


@dataclass(frozen=True)
class Transactional:
    """The options. `timeout_ms`: from a task's first row to the epoch's commit."""

    transactional_id: str
    timeout_ms: int


@dataclass(frozen=True)
class Written(WriterCommitMessage):  # type: ignore[misc]
    """What an attempt has in its transaction. `place`: a partition that it wrote to."""

    within: Within
    place: TopicPartition
    query_id: str


def begin_attempt(broker: Client, options: Transactional) -> Within:
    task = TaskContext.get()
    assert task is not None, "a sink writes in a task"
    name = f"{options.transactional_id}/{task.partitionId()}/{task.attemptNumber()}"
    return _begin(broker, name, options.timeout_ms)


def _begin(broker: Client, name: str, timeout_ms: int) -> Within:
    from tierlog.client.sender import Within

    return Within(name, broker.begin_transactions(name, timeout_ms=timeout_ms))


def written(within: Within, place: TopicPartition) -> Written:
    task = TaskContext.get()
    query_id = None if task is None else task.getLocalProperty(QUERY_ID)
    return Written(within, place, query_id or "")


def abort_attempts(broker: Client, attempts: Sequence[Within]) -> None:
    """As far as the broker answers; it aborts the others after their time-out."""
    from tierlog.client.transactions import end_transaction

    for within in attempts:
        with suppress(TierlogError):
            broker.call(end_transaction(within, commit=False))


def commit_job(broker: Client, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Commit a batch write, which has no epoch."""
    attempts = [one.within for one in _of_transactions(messages)]
    if attempts:
        _commit(broker, attempts[0], attempts[1:])


def commit_epoch(
    broker: Client,
    options: Transactional,
    messages: Sequence[WriterCommitMessage | None],
    epoch: int,
) -> None:
    """Commit an epoch's rows, unless that is done already."""
    from tierlog.client.group_calls import OffsetCommit
    from tierlog.client.transactions import commit_offsets_within

    found = _of_transactions(messages)
    if not found:
        return
    attempts, first = [one.within for one in found], found[0]
    driver = _begin(broker, options.transactional_id, options.timeout_ms)
    if _is_committed(broker, options.transactional_id, first.query_id, epoch):
        abort_attempts(broker, attempts)
        return
    row = OffsetCommit(*first.place, epoch + 1, metadata=first.query_id)
    broker.call(commit_offsets_within(driver, options.transactional_id, [row]))
    _commit(broker, driver, attempts)


def _commit(broker: Client, first: Within, others: Sequence[Within]) -> None:
    from tierlog.client.transactions import end_transaction

    broker.call(end_transaction(first, commit=True, together=others))


def _of_transactions(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    """Without those of tasks that had no rows, or failed."""
    return [one for one in messages if isinstance(one, Written)]


def _is_committed(broker: Client, group: str, query_id: str, epoch: int) -> bool:
    try:
        offsets = broker.group(group).offsets
    except UnknownGroup:
        return False
    return any(one.metadata == query_id and one.offset > epoch for one in offsets)


def abort_messages(broker: Client, messages: Sequence[WriterCommitMessage | None]) -> None:
    abort_attempts(broker, [one.within for one in _of_transactions(messages)])
