"""Batches on their way to the broker, each appended once; used by both producers.

Rules that keep it honest:

* Every batch carries the producer's identity and a sequence, so that it may be sent again after a
  lost answer and is appended once (`exchange` does so).
* If it remains unknown whether a batch was appended, its records fail with `AnswerLost`, and the
  identity is given up: a sequence is never reused for other records.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from record_format.batch import MAX_SEQUENCE
from record_format.encode import encode_batch
from record_format.errors import (
    OutOfOrderSequence,
    ProducerFenced,
    RequestError,
    TierlogError,
    TooLarge,
)
from tierlog.client import calls
from tierlog.client.answers import Produced, ProducerIdentity
from tierlog.client.batching import Batching, Pending, Told, TopicPartition
from tierlog.client.exchange import (
    ENDLESS,
    AnswerLost,
    BrokerUnreachable,
    RetryPolicy,
    Steps,
    exchange,
)

log = logging.getLogger(__name__)


class Sender:
    """Sends a producer's batches, and knows what comes next in each partition."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._identity: ProducerIdentity | None = None
        self._next: dict[TopicPartition, int] = {}
        self._was_answered: bool | None = None  # when a batch was sent last; None: none was

    def deliver(self, pending: Pending[Any], policy: RetryPolicy, *, now_ms: int) -> Steps[None]:
        """Send one batch and settle its deliveries; never raises what they can report."""
        try:
            answer = yield from self._append(pending, policy, now_ms=now_ms)
        except TierlogError as error:
            if isinstance(error, TooLarge) and _changed_nothing(error) and len(pending) > 1:
                for part in _parts(pending, error):
                    yield from self.deliver(part, policy, now_ms=now_ms)
            else:
                self._fail(pending, error)
            return
        self._was_answered = True
        following = self._sequence(pending) + len(pending)
        self._next[pending.place] = following & MAX_SEQUENCE
        (result,) = answer.results
        pending.settle(result.base_offset)

    def _append(
        self, pending: Pending[Any], policy: RetryPolicy, *, now_ms: int
    ) -> Steps[Produced]:
        timeout_s = self._batching.delivery_timeout_s
        left_s = timeout_s - (now_ms - pending.due_ms) / 1000
        if left_s > 0:
            attempts = ENDLESS if self._was_answered else policy.attempts
            policy = replace(policy, attempts=attempts, deadline_s=left_s)
        elif self._was_answered is False:
            raise BrokerUnreachable(
                f"not tried: it waited {timeout_s:g} s for a request that failed"
            )
        if self._identity is None:
            self._identity = yield from exchange(calls.init_producer(), policy)
        topic, partition = pending.place
        batch = _encode(pending, self._identity, self._sequence(pending), self._batching.codec)
        acks = self._batching.acks
        call = calls.produce_batches(topic, batch, partition=partition, acks=acks)
        return (yield from exchange(call, policy))

    def _sequence(self, pending: Pending[Any]) -> int:
        return self._next.get(pending.place, 0)

    def _fail(self, pending: Pending[Any], error: TierlogError) -> None:
        self._was_answered = isinstance(error, RequestError)
        was_sent = self._identity is not None
        if not _changed_nothing(error):
            self._identity = None
            self._next.clear()
        if was_sent and isinstance(error.__cause__, AnswerLost):
            error = AnswerLost(f"{error}; a copy of it may have been appended")
        # For those who never look at their futures.
        log.warning("a batch of %d for %s-%d failed: %s", len(pending), *pending.place, error)
        pending.fail(error)


def _parts(pending: Pending[Told], error: TooLarge) -> Iterator[Pending[Told]]:
    """A batch that a topic takes in parts only, as Kafka's producer cuts it: in order."""
    records = len(pending)
    count = min(records, max(0, error.size_bytes) // max(1, error.limit_bytes) + 2)
    for start, end in itertools.pairwise(records * part // count for part in range(count + 1)):
        yield pending.part(start, end)


def _encode(pending: Pending[Any], identity: ProducerIdentity, sequence: int, codec: int) -> bytes:
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
        )
    )


def _changed_nothing(error: TierlogError) -> bool:
    """A refusal of this request alone; not one that says that the sequence is lost, nor one of a
    repeat: the first copy may have been appended.
    """
    lost = isinstance(error, (OutOfOrderSequence, ProducerFenced))
    lost = lost or isinstance(error.__cause__, AnswerLost)
    return isinstance(error, RequestError) and not lost
