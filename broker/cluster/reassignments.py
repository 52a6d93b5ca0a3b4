"""Moves that an administrator asks for and does not wait for, as Kafka's reassignments are.

* They are carried out one after another, by the broker that was asked. One that fails is tried
  again for a while; then the partition stays where it is.
* Nothing of it outlives a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from tierlog.broker.cluster.leaders import Leaders
from tierlog.broker.cluster.moves import Moves
from tierlog.broker.cluster.placement import Move
from tierlog.broker.data_folder import TopicIdPartition
from tierlog.host.threads import Threads
from tierlog.record_format.errors import LeaderUnknown, RetriableError, TierlogError

log = structlog.get_logger(__name__)

ATTEMPTS: Final = 10
ASK_AGAIN_S: Final = 1.0


class Reassignments:
    """Thread-safe. `look`: ask all brokers what they lead now."""

    def __init__(self, moves: Moves, leaders: Leaders, *, look: Callable[[], None]) -> None:
        self._moves, self._leaders, self._look = moves, leaders, look
        self._threads = Threads(1, name="reassign")
        self._lock = threading.Lock()
        self._targets: dict[TopicIdPartition, int] = {}
        self._is_stopping = threading.Event()

    def stop(self) -> None:
        self._is_stopping.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def in_progress(self) -> dict[TopicIdPartition, int]:
        """The node id that each is on its way to."""
        return self._targets.copy()

    def begin(self, place: TopicIdPartition, node_id: int) -> None:
        """A later one replaces one that has not begun to move."""
        with self._lock:
            is_new = place not in self._targets
            self._targets[place] = node_id
        if is_new:
            self._threads.submit(self._run, place)

    def cancel(self, place: TopicIdPartition) -> bool:
        """Whether there was one. What has begun to move arrives."""
        with self._lock:
            return self._targets.pop(place, None) is not None

    def _run(self, place: TopicIdPartition) -> None:
        try:
            for _ in range(ATTEMPTS):
                if self._is_done(place) or self._is_stopping.wait(ASK_AGAIN_S):
                    return
            log.warning("a partition stays where it is", partition=place)
        except TierlogError as error:
            log.warning("a partition stays where it is", partition=place, error=str(error))
        finally:
            with self._lock:
                self._targets.pop(place, None)

    def _is_done(self, place: TopicIdPartition) -> bool:
        target = self._targets.get(place)
        if target is None:
            return True
        try:
            leader = self._leaders.find_leader(place)
            if leader is None:
                raise LeaderUnknown("no broker is known to lead it")
            if leader.node_id != target:
                self._moves.run_moves([Move(place, leader.node_id, target)])
                self._look()  # so that nobody is shown the old leader once this is over
        except RetriableError as error:
            log.info("a partition is not moved yet", partition=place, error=str(error))
            return False
        return True
