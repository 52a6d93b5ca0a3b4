"""Which partition a record without one goes to, chosen as Kafka's clients do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import randrange
from typing import Final, NamedTuple

from record_format.errors import RequestError, TierlogError
from record_format.murmur2 import partition_for_key
from tierlog.client.answers import TOPIC_KNOWN_MS, TopicDescription
from tierlog.client.batching import Outgoing


class _Shape(NamedTuple):
    spread: int
    takers: Sequence[int]
    due_ms: int


class Partitioner:
    """Kafka's rule: by murmur2 of the key; without one the same partition until a batch is full.

    A topic is asked about again after `TOPIC_KNOWN_MS`: it may have grown, and a key has to go
    where everybody else sends it. `first`: the partition to begin with, out of so many; random, as
    in KIP-480, or partition 0 would get everything from producers that send only a few records.
    """

    def __init__(self, *, batch_bytes: int, first: Callable[[int], int] = randrange) -> None:
        self._first: Final = first
        self._shapes: dict[str, _Shape] = {}
        self._sticky: dict[str, tuple[int, int]] = {}
        self._batch_bytes: Final = batch_bytes

    def claims_look(self, topic: str, *, now_ms: int) -> bool:
        """Whether to ask for the topic's partitions; only one of many callers does, if some are
        known.
        """
        shape = self._shapes.get(topic)
        if shape is None or now_ms < shape.due_ms:
            return shape is None
        self._shapes[topic] = shape._replace(due_ms=now_ms + TOPIC_KNOWN_MS)
        return True

    def learn(self, topic: TopicDescription, *, now_ms: int) -> None:
        self._shapes[topic.name] = _Shape(topic.spread, topic.takers, now_ms + TOPIC_KNOWN_MS)

    def keep(self, topic: str, error: TierlogError) -> None:
        """They could not be asked for: use what is known, if anything is; else raises `error`."""
        if topic not in self._shapes or isinstance(error, RequestError):
            raise error

    def choose(self, topic: str, record: Outgoing) -> int:
        shape = self._shapes[topic]
        if record.key is not None:
            return partition_for_key(record.key, shape.spread)
        turn, held = self._sticky.get(topic) or (self._first(len(shape.takers)), 0)
        if held >= self._batch_bytes:
            turn, held = turn + 1, 0
        self._sticky[topic] = (turn, held + record.size_bytes)
        return shape.takers[turn % len(shape.takers)]
