"""Whose turn it is, among the partitions that one reader reads.

* A reader that ends takes one partition after another; for an end that is not written yet it waits
  in the broker.
* A follower that was answered once keeps asking, however long the broker is gone: see `policy`.
* A follower of one partition waits in the broker for news. A follower of several goes round; a turn
  waits only if all are up to date, so that a round, and so the delay of news, takes `ROUND_MS`.
* A follower of a whole topic checks every `TOPIC_KNOWN_MS` whether it has grown, and reads added
  partitions from their beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple

from record_format.errors import OffsetOutOfRange, UnknownGroup
from tierlog.client import calls, group_calls
from tierlog.client.answers import TOPIC_KNOWN_MS, FetchedBatches, TopicDescription
from tierlog.client.calls import Start
from tierlog.client.cursor import PartitionCursor
from tierlog.client.exchange import ENDLESS, Call, RetryPolicy, Steps, exchange
from tierlog.client.group_calls import GroupPlace
from tierlog.client.records import ConsumedRecord

FOLLOW_WAIT_MS: Final = 10_000
ROUND_MS: Final = 500


def begin(
    first: PartitionCursor,
    partitions: Iterable[int] | None,
    offset: Start | Mapping[int, Start],
    *,
    place: GroupPlace | None,
    retries: RetryPolicy,
) -> Steps[Turns]:
    """A reader of the partitions, None for all, each as `first`; of those that `place` knows, from
    there on.
    """
    asked = partitions
    if asked is None or place is not None:
        topic = yield from exchange(calls.describe_topic(first.topic), retries)
        first.check(topic.topic_id)
        asked = topic.damaged_last if asked is None else asked
        if place is not None:
            try:
                known = (yield from exchange(group_calls.group(place.name), retries)).offsets
            except UnknownGroup:
                known = ()
            offset = place.starts(known, topic, offset)
    return Turns(first.spread(asked, offset), retries, whole_topic=partitions is None)


class Turn(NamedTuple):
    """How to ask, and what takes the answer; without a `cursor` it is not about a partition."""

    steps: Steps[Any]
    take: Callable[[Any], list[ConsumedRecord]]
    cursor: PartitionCursor | None = None


class Turns:
    """The order in which cursors are asked; `next_turn` gives None when all are done.

    `whole_topic`: of the cursors' topic, which may grow.
    """

    def __init__(
        self, cursors: Sequence[PartitionCursor], retries: RetryPolicy, *, whole_topic: bool
    ) -> None:
        self._queue = deque(cursors)
        self._retries = retries
        self._first = cursors[0] if cursors and whole_topic and cursors[0].follow else None
        self._looked_s: float | None = None

    @property
    def policy(self) -> RetryPolicy:
        """For everything that a reader of these asks. A policy of one attempt stays at one."""
        patient = any(one.follow and one.is_answered for one in self._queue)
        if not patient or self._retries.attempts == 1:
            return self._retries
        return replace(self._retries, attempts=ENDLESS, deadline_s=inf)

    def next_turn(self, now_s: float) -> Turn | None:
        if (look := self._look(now_s)) is not None:
            return look
        while self._queue and self._queue[0].done:
            self._queue.popleft()
        if not self._queue:
            return None
        cursor = self._queue[0]
        if cursor.follow:
            self._queue.rotate(-1)
        call = cursor.next_call(wait_ms=self._patience(cursor))
        return Turn(self._ask(cursor, call, self.policy), partial(self._take, cursor), cursor)

    def _ask(
        self, cursor: PartitionCursor, call: Call[FetchedBatches], policy: RetryPolicy
    ) -> Steps[FetchedBatches]:
        try:
            return (yield from exchange(call, policy))
        except OffsetOutOfRange:
            if cursor.topic_id is not None:  # it may be another topic's by now, and a shorter one
                topic = yield from exchange(calls.describe_topic(cursor.topic), policy)
                cursor.check(topic.topic_id)
            raise

    def _take(self, cursor: PartitionCursor, fetched: FetchedBatches) -> list[ConsumedRecord]:
        is_first = cursor.topic_id is None
        records = cursor.take(fetched)
        if is_first:  # the topic was not described, and all are partitions of the one that answered
            for other in self._queue:
                other.check(fetched.topic_id)
        return records

    def _look(self, now_s: float) -> Turn | None:
        if self._looked_s is None:
            self._looked_s = now_s
        if self._first is None or (now_s - self._looked_s) * 1000 < TOPIC_KNOWN_MS:
            return None
        self._looked_s = now_s
        return Turn(exchange(calls.describe_topic(self._first.topic), self.policy), self._grow)

    def _grow(self, topic: TopicDescription) -> list[ConsumedRecord]:
        assert self._first is not None, "nobody else looks"
        self._first.check(topic.topic_id)
        known = {one.partition for one in self._queue}
        begun = PartitionCursor(
            topic.name, topic_id=topic.topic_id, follow=True, limits=self._first.limits
        )
        self._queue.extend(begun.spread([n for n in topic.numbers if n not in known], "earliest"))
        return []

    def _patience(self, cursor: PartitionCursor) -> int:
        asked = self._queue if cursor.follow else [cursor]
        if not all(one.at_end for one in asked):
            return 0
        if len(asked) == 1:
            return cursor.limits.wait_ms or FOLLOW_WAIT_MS
        return max(ROUND_MS // len(self._queue), 10)
