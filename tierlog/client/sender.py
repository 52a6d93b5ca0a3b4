"""Chooses the partition of a record that has none, as Kafka's clients do, and sends a producer's
batches to the broker, each appended once; used by both producers.

Rules that keep it honest:

* Every batch carries the producer's identity and a sequence, so that `exchange` may retry it after
  a lost response, and it is appended once.
* If it remains unknown whether a batch was appended, its records fail with `AnswerLost` and the
  identity is abandoned: a sequence is never reused for other records. Batches of other partitions
  that are in flight keep the identity that they were encoded with.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import randrange
from typing import Any, Final, Generic, NamedTuple

from tierlog.client import calls
from tierlog.client.batching import (
    Accumulator,
    Batching,
    FutureT,
    PendingBatch,
    PreparedRecord,
    TopicPartition,
)
from tierlog.client.exchange import (
    UNLIMITED_ATTEMPTS,
    AnswerLost,
    BrokerUnreachable,
    RetryPolicy,
    Steps,
    exchange,
)
from tierlog.client.problems import AppendWarning
from tierlog.client.responses import (
    METADATA_MAX_AGE_MS,
    ProduceResponse,
    ProducerIdentity,
    TopicDescription,
    shown_warnings,
)
from tierlog.record_format.batch import MAX_SEQUENCE
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import (
    OutOfOrderSequence,
    ProducerFenced,
    RequestError,
    TierlogError,
    TooLarge,
    UnknownTopicOrPartition,
)
from tierlog.record_format.topic_rules import partition_for_key


class _Partitions(NamedTuple):
    partition_count: int
    available_partitions: Sequence[int]
    refresh_ms: int


class Partitioner:
    """Kafka's rule: by murmur2 of the key; without a key, one partition until a batch is full.

    A topic is described again every `METADATA_MAX_AGE_MS`: it may have grown, and a key has to go
    where all other producers send it. `first`: chooses the first partition, given their number;
    random as in KIP-480, since producers that send only a few records would all fill partition 0.
    """

    def __init__(self, *, batch_bytes: int, first: Callable[[int], int] = randrange) -> None:
        self._first: Final = first
        self._topics: dict[str, _Partitions] = {}
        self._sticky: dict[str, tuple[int, int]] = {}
        self._batch_bytes: Final = batch_bytes

    def claim_refresh(self, topic: str, *, now_ms: int) -> bool:
        """Whether the caller has to describe the topic. Once it is known, only one of several
        concurrent callers has to.
        """
        known = self._topics.get(topic)
        if known is None or now_ms < known.refresh_ms:
            return known is None
        self._topics[topic] = known._replace(refresh_ms=now_ms + METADATA_MAX_AGE_MS)
        return True

    def update(self, topic: TopicDescription, *, now_ms: int) -> None:
        self._topics[topic.name] = _Partitions(
            topic.partition_count, topic.available_partitions, now_ms + METADATA_MAX_AGE_MS
        )

    def expire(self, topic: str) -> None:
        """Describe the topic again for its next record, since the broker does not know it, or one
        of its partitions: it was deleted, or re-created with fewer.
        """
        if (known := self._topics.get(topic)) is not None:
            self._topics[topic] = known._replace(refresh_ms=0)

    def describe(self, topic: str, policy: RetryPolicy, *, now_ms: int) -> Steps[None]:
        """If the broker does not respond, what is known of the topic is kept."""
        try:
            described = yield from exchange(calls.describe_topic(topic), policy)
        except TierlogError as error:
            if topic in self._topics and not isinstance(error, RequestError):
                return
            self.expire(topic)
            raise
        self.update(described, now_ms=now_ms)

    def choose(self, topic: str, record: PreparedRecord) -> int:
        known = self._topics[topic]
        if record.key is not None:
            return partition_for_key(record.key, known.partition_count)
        turn, held = self._sticky.get(topic) or (self._first(len(known.available_partitions)), 0)
        if held >= self._batch_bytes:
            turn, held = turn + 1, 0
        self._sticky[topic] = (turn, held + record.size_bytes)
        return known.available_partitions[turn % len(known.available_partitions)]


log = logging.getLogger(__name__)


class _Session(NamedTuple):
    """An identity from the broker, and the next sequence of each partition under it."""

    identity: ProducerIdentity
    next_sequences: dict[TopicPartition, int]


class Within(NamedTuple):
    """The transaction that a producer's batches are in: its id, and who produces in it."""

    transactional_id: str
    identity: ProducerIdentity


class Sender:
    """Sends a producer's batches, several at a time if they are of different partitions. `within`:
    all of them in one transaction, and none after the first that failed.
    """

    def __init__(
        self,
        batching: Batching,
        partitioner: Partitioner,
        clock: Callable[[], int],
        within: Within | None = None,
    ) -> None:
        self._batching, self._partitioner, self._clock = batching, partitioner, clock
        self._within = within
        self._session = None if within is None else _Session(within.identity, {})
        self.first_failure: TierlogError | None = None
        self._last_got_response: bool | None = None  # None before the first
        self._last_failed_ms = 0

    def deliver(self, pending: PendingBatch[Any], policy: RetryPolicy) -> Steps[None]:
        """Send one batch and resolve its futures; errors are reported by these, not raised."""
        if self._within is not None and self.first_failure is not None:
            pending.fail(self.first_failure)
            return
        session = self._session
        try:
            if session is None:
                session = yield from self._begin_session(pending, policy)
            response = yield from self._append(pending, session, policy)
        except TierlogError as error:
            if isinstance(error, TooLarge) and _leaves_sequence_valid(error) and len(pending) > 1:
                for part in _split(pending, error):
                    yield from self.deliver(part, policy)
            else:
                self._fail(pending, session, error)
            return
        self._last_got_response = True
        (result,) = response.results
        pending.complete(result.base_offset)
        try:
            shown_warnings(response)
        except AppendWarning as warning:  # by a filter: what is appended has not failed
            log.warning("%s", warning)

    def _begin_session(self, pending: PendingBatch[Any], policy: RetryPolicy) -> Steps[_Session]:
        init = calls.init_producer()
        identity = yield from exchange(init, self._limited(policy, pending))
        self._last_got_response = True
        if self._session is None:  # not if another batch began one at the same time
            self._session = _Session(identity, {})
        return self._session

    def _append(
        self, pending: PendingBatch[Any], session: _Session, policy: RetryPolicy
    ) -> Steps[ProduceResponse]:
        topic, partition = pending.topic_partition
        sequence = session.next_sequences.get(pending.topic_partition, 0)
        within, batching = self._within, self._batching
        batch = _encode(
            pending, session.identity, sequence, batching.codec, transactional=within is not None
        )
        call = calls.produce_batches(
            topic,
            batch,
            partition=partition,
            acks=batching.acks,
            transactional_id=None if within is None else within.transactional_id,
        )
        response = yield from exchange(call, self._limited(policy, pending))
        next_sequence = (sequence + len(pending)) & MAX_SEQUENCE
        session.next_sequences[pending.topic_partition] = next_sequence
        return response

    def _limited(self, policy: RetryPolicy, pending: PendingBatch[Any]) -> RetryPolicy:
        """For what is left of the batch's delivery timeout. Raises BrokerUnreachable if it was over
        while an earlier batch was retried in vain, not if the process was stopped meanwhile.
        """
        timeout_s = self._batching.delivery_timeout_s
        left_s = timeout_s - (self._clock() - pending.due_ms) / 1000
        if left_s > 0:
            attempts = UNLIMITED_ATTEMPTS if self._last_got_response else policy.attempts
            return replace(policy, attempts=attempts, deadline_s=left_s)
        if self._last_got_response is False and pending.due_ms <= self._last_failed_ms:
            raise BrokerUnreachable(
                f"not sent: it waited {timeout_s:g} s for an earlier batch, which failed"
            )
        return policy

    def _fail(
        self, pending: PendingBatch[Any], session: _Session | None, error: TierlogError
    ) -> None:
        self._last_got_response = isinstance(error, RequestError)
        self._last_failed_ms = self._clock()
        if isinstance(error, UnknownTopicOrPartition):
            self._partitioner.expire(pending.topic_partition[0])
        if session is self._session and not _leaves_sequence_valid(error):
            self._session = None
        if session is not None and isinstance(error.__cause__, AnswerLost):
            error = AnswerLost(f"{error}; an earlier attempt may have been appended")
        self.first_failure = self.first_failure or error
        # For callers that ignore their futures.
        log.warning(
            "a batch of %d records for %s-%d failed: %s",
            len(pending),
            *pending.topic_partition,
            error,
        )
        pending.fail(error)


def _split(pending: PendingBatch[FutureT], error: TooLarge) -> Iterator[PendingBatch[FutureT]]:
    """Split a batch that is too large for its topic, in order, as Kafka's producer does."""
    records = len(pending)
    count = min(records, max(0, error.size_bytes) // max(1, error.limit_bytes) + 2)
    for start, end in itertools.pairwise(records * part // count for part in range(count + 1)):
        yield pending.slice(start, end)


def _encode(
    pending: PendingBatch[Any],
    identity: ProducerIdentity,
    sequence: int,
    codec: int,
    *,
    transactional: bool,
) -> bytes:
    return bytes(
        encode_batch(
            pending.values,
            timestamps=pending.timestamps,
            keys=pending.keys,
            headers=pending.headers,
            codec=codec,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=sequence,
            transactional=transactional,
        )
    )


def _leaves_sequence_valid(error: TierlogError) -> bool:
    """Whether the broker refused this request only, and its sequence can be used again: not if the
    sequence is lost, nor if a retry was refused, since an earlier attempt may have been appended.
    """
    lost = isinstance(error, (OutOfOrderSequence, ProducerFenced))
    lost = lost or isinstance(error.__cause__, AnswerLost)
    return isinstance(error, RequestError) and not lost


class ProducerCore(Generic[FutureT]):
    """What both producers have: what is buffered, how it is sent, and whether it still can be."""

    def __init__(
        self,
        client: Any,
        batching: Batching | None,
        clock: Callable[[], int],
        new_factory: Callable[[], Callable[[], FutureT]],
        within: Within | None,
    ) -> None:
        self._client = client
        self._batching = batching or Batching()
        self._clock = clock
        self._accumulator = Accumulator(self._batching, new_factory)
        self._partitioner = Partitioner(batch_bytes=self._batching.batch_bytes)
        self._sender = Sender(self._batching, self._partitioner, clock, within)
        self._flushing = 0
        self._idle = 0  # threads or tasks that wait for a batch
        self._closed = False
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._client!r}>"

    @property
    def first_failure(self) -> BaseException | None:
        """Why a record was not appended; None if none failed."""
        return self._failure or self._sender.first_failure

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the producer failed; create a new one") from self._failure
        if self._closed:
            raise RuntimeError("the producer is closed")

    def _describe(self, topic: str, now_ms: int) -> Steps[None]:
        return self._partitioner.describe(topic, self._client.retries, now_ms=now_ms)

    def _deliver(self, pending: PendingBatch[FutureT]) -> Steps[None]:
        return self._sender.deliver(pending, self._client.retries)

    def _take_due(self, now_ms: int) -> PendingBatch[FutureT] | None:
        flushing = self._flushing > 0 or self._closed  # closing leaves nothing behind
        return self._accumulator.take_due(now_ms=now_ms, flushing=flushing)

    def _is_ending(self) -> bool:
        return self._closed or self._failure is not None
