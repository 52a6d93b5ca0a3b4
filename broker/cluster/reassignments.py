"""What an administrator asks for and does not wait for: other brokers for a partition (KIP-455).

* Of a partition that has a set of replicas, what there is to be is in the set (`replication.
  reassigning`): any broker takes the order to its leader, and whoever leads goes on with it.
* One that has none is handed over to one other broker, by the broker that was asked. A hand-over
  that fails is tried again for a while; then the partition stays where it is. Nothing of it
  outlives a restart. To have several replicas it first gets a set (`first_sets`), which it keeps:
  back to one replica it has a set of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

import structlog

from tierlog.broker.cluster.moves import Moves
from tierlog.broker.cluster.placement import Move
from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.membership.leaders import Leaders
from tierlog.broker.membership.peers import Reassigned
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.replica_moves import ReplicaMoves
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topic_replicas import check_replicas
from tierlog.host.threads import Threads
from tierlog.record_format.errors import (
    LeaderUnknown,
    NoReassignment,
    RetriableError,
    TierlogError,
)

log = structlog.get_logger(__name__)

ATTEMPTS: Final = 10
ASK_AGAIN_S: Final = 1.0


class Ongoing(NamedTuple):
    """Of one partition; all are node ids."""

    replicas: Sequence[int]
    adding: Sequence[int]
    removing: Sequence[int]


class Reassignments:
    """Thread-safe. `replicas`: those of this broker; `may_have`: the brokers that may be given
    more; `look`: ask all brokers what they lead now; `begin_set` of a partition that has none, and
    returns what serves it then.
    """

    def __init__(
        self,
        moves: Moves,
        leaders: Leaders,
        topics: LiveTopics,
        *,
        replicas: ReplicaMoves,
        may_have: Callable[[], Collection[int]],
        look: Callable[[], None],
        begin_set: Callable[[Partition], Partition],
    ) -> None:
        self._moves, self._leaders, self._topics = moves, leaders, topics
        self._replicas, self._may_have, self._look = replicas, may_have, look
        self._begin_set = begin_set
        self._threads = Threads(1, name="reassign")
        self._lock = threading.Lock()
        self._targets: dict[TopicIdPartition, int] = {}
        self._is_stopping = threading.Event()

    def stop(self) -> None:
        self._is_stopping.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def list_ongoing(self) -> dict[TopicIdPartition, Ongoing]:
        """Of all partitions of topics that there are, also while nobody leads them."""
        self._look()
        found = {
            place: Ongoing(led.replicas, led.adding, led.removing)
            for place, led in self._leaders.changing().items()
        }
        for place, target in self._targets.copy().items():
            leader = self._leaders.find_leader(place)
            now = [leader.node_id] if leader is not None and leader.node_id != target else []
            found[place] = Ongoing([target, *now], [target], now)
        live = {topic.record.topic_id for topic in self._topics}
        return {place: one for place, one in found.items() if place[0] in live}

    def begin(self, place: TopicIdPartition, node_ids: Sequence[int]) -> None:
        """A later one replaces one that goes on. Raises InvalidReplicaAssignment, and what
        `Moves.reassign` does.
        """
        self.check(place, node_ids)
        if len(node_ids) == 1 and not self._has_set(place):
            self._begin_move(place, node_ids[0])
            return
        with self._lock:
            self._targets.pop(place, None)
        self._order(place, node_ids)

    def _has_set(self, place: TopicIdPartition) -> bool:
        """As its leader said last."""
        leader = self._leaders.find_leader(place)
        if leader is None:
            return self._topics.find_by_id(place[0]).record.is_replicated
        return bool(leader.replicas)

    def cancel(self, place: TopicIdPartition) -> None:
        """A hand-over that has begun arrives. Raises NoReassignment, and what `Moves.reassign`
        does.
        """
        with self._lock:
            if self._targets.pop(place, None) is not None:
                return
        if place not in self.list_ongoing():
            raise _no_reassignment(place)
        self._order(place, [])

    def _order(self, place: TopicIdPartition, node_ids: Sequence[int]) -> None:
        """Its leader may be changing, or be changing the set."""
        for left in reversed(range(ATTEMPTS)):
            try:
                now = self._moves.reassign(place, node_ids)
                self._leaders.put_replicas(
                    now.leader,
                    place,
                    replicas=now.replicas,
                    adding=now.adding,
                    removing=now.removing,
                )
                return
            except RetriableError:
                if not left or self._is_stopping.wait(ASK_AGAIN_S):
                    raise
                self._look()

    def reassign_here(self, partition: Partition, node_ids: Sequence[int]) -> Reassigned:
        """Of a partition that this broker leads; none: end the reassignment that there is. Raises
        InvalidReplicaAssignment, NoReassignment, LeaderUnknown, StoreUnavailable, and what
        `FirstSets.begin_set` does.
        """
        place = partition.topic_id, partition.number
        if node_ids:
            self.check(place, node_ids)
        if partition.term is None and len(node_ids) <= 1:
            return self._reassign_only(place, node_ids)
        if partition.term is None:
            partition = self._begin_set(partition)
        shown = self._replicas.reassign(partition, node_ids)
        assert shown.leader is not None, "it is led here"
        return Reassigned(
            leader=shown.leader,
            replicas=shown.replicas,
            adding=list(shown.adding),
            removing=list(shown.removing),
        )

    def _reassign_only(self, place: TopicIdPartition, node_ids: Sequence[int]) -> Reassigned:
        me = self._replicas.node_id
        if node_ids:
            self._begin_move(place, node_ids[0])
        elif self._targets.pop(place, None) is None:
            raise _no_reassignment(place)
        target = self._targets.get(place, me)
        moves = target != me
        return Reassigned(
            leader=me,
            replicas=[target, me] if moves else [me],
            adding=[target] if moves else [],
            removing=[me] if moves else [],
        )

    def check(self, place: TopicIdPartition, node_ids: Sequence[int]) -> None:
        """Whether these brokers may have the replicas. Raises InvalidReplicaAssignment."""
        leader = self._leaders.find_leader(place)
        has = () if leader is None else (*leader.replicas, leader.node_id)
        check_replicas([node_ids], living={*self._may_have(), *has}, factor=None)

    # --- handing over ---------------------------------------------------------------------------

    def _begin_move(self, place: TopicIdPartition, node_id: int) -> None:
        with self._lock:
            is_new = place not in self._targets
            self._targets[place] = node_id
        if is_new:
            self._threads.submit(self._run, place)

    def _run(self, place: TopicIdPartition) -> None:
        error = ""
        try:
            for _ in range(ATTEMPTS):
                if self._is_done(place) or self._is_stopping.wait(ASK_AGAIN_S):
                    return
        except TierlogError as raised:
            error = str(raised)
        log.warning("a partition stays where it is", partition=place, error=error)
        with self._lock:
            self._targets.pop(place, None)

    def _is_done(self, place: TopicIdPartition) -> bool:
        """Then it is ordered no more. Another order may have come meanwhile."""
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
        with self._lock:
            if self._targets.get(place) == target:
                del self._targets[place]
            return place not in self._targets


def _no_reassignment(place: TopicIdPartition) -> NoReassignment:
    return NoReassignment(f"partition {place[1]}: no reassignment is in progress")
