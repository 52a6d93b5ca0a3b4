"""Chooses the partition of a record that has none, as Kafka's clients do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import randrange
from typing import Final, NamedTuple

from tierlog.client.batching import PreparedRecord
from tierlog.client.responses import METADATA_MAX_AGE_MS, TopicDescription
from tierlog.record_format.errors import RequestError, TierlogError
from tierlog.record_format.murmur2 import partition_for_key


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

    def keep_or_raise(self, topic: str, error: TierlogError) -> None:
        """The topic could not be described: keep what is known of it, else raise `error`."""
        if topic not in self._topics or isinstance(error, RequestError):
            self.expire(topic)
            raise error

    def choose(self, topic: str, record: PreparedRecord) -> int:
        known = self._topics[topic]
        if record.key is not None:
            return partition_for_key(record.key, known.partition_count)
        turn, held = self._sticky.get(topic) or (self._first(len(known.available_partitions)), 0)
        if held >= self._batch_bytes:
            turn, held = turn + 1, 0
        self._sticky[topic] = (turn, held + record.size_bytes)
        return known.available_partitions[turn % len(known.available_partitions)]
