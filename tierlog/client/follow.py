"""Whose turn it is, among the partitions that one reader reads.

* A reader that ends takes one partition after the other; for an end that is not written yet it
  waits in the broker.
* A follower that was answered once asks on, for as long as the broker is not there: see `policy`.
* A follower of one partition waits in the broker for news. One of several goes round; only where
  all are up to date does a turn wait, so that a round, and so news, takes `ROUND_MS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from tierlog.client.answers import FetchedBatches
from tierlog.client.cursor import PartitionCursor
from tierlog.client.exchange import RetryPolicy, Steps, exchange

FOLLOW_WAIT_MS: Final = 10_000
ROUND_MS: Final = 500
ENDLESS: Final = 2**63


class Turn(NamedTuple):
    """Whose turn, and how to ask; the answer goes to `cursor.take`."""

    cursor: PartitionCursor
    steps: Steps[FetchedBatches]


class Turns:
    """The order in which cursors are asked; `next_turn` gives None when all are done."""

    def __init__(self, cursors: Sequence[PartitionCursor], retries: RetryPolicy) -> None:
        self._queue = deque(cursors)
        self._retries = retries

    @property
    def policy(self) -> RetryPolicy:
        """For all that a reader of these asks. One try alone stays one."""
        patient = any(one.follow and one.is_answered for one in self._queue)
        return self._retries.at_least(ENDLESS if patient and self._retries.attempts > 1 else 1)

    def next_turn(self) -> Turn | None:
        while self._queue and self._queue[0].done:
            self._queue.popleft()
        if not self._queue:
            return None
        cursor = self._queue[0]
        if cursor.follow:
            self._queue.rotate(-1)
        call = cursor.next_call(wait_ms=self._patience(cursor))
        return Turn(cursor, exchange(call, self.policy))

    def _patience(self, cursor: PartitionCursor) -> int:
        asked = self._queue if cursor.follow else [cursor]
        if not all(one.at_end for one in asked):
            return 0
        if len(asked) == 1:
            return cursor.limits.wait_ms or FOLLOW_WAIT_MS
        return max(ROUND_MS // len(self._queue), 10)
