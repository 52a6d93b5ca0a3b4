"""Which partitions are to change their brokers, and the moving: the balance, a drain, a stop.

* What each broker leads is asked of all before a plan is made; one that did not answer takes no
  part in a balance.
* A move is carried out by the leader, which may be another broker, and which refuses what is out of
  date. Nothing here decides who leads.
* A drained broker moves its own partitions: an order that outlives restarts needs no one else. Its
  replicas it has others have, a few at a time, and keeps each until another is in sync.
* Where a partition's replicas are is only balanced when somebody asks: that copies what is local.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import structlog

from tierlog.broker.cluster.news import News
from tierlog.broker.cluster.placement import (
    Led,
    Move,
    balance,
    balance_replicas,
    drain,
    drain_replicas,
)
from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.membership.leaders import Leaders
from tierlog.broker.membership.members import Members
from tierlog.broker.membership.peers import Peers, Reassigned
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.host.deferred_errors import DeferredErrors
from tierlog.record_format.errors import (
    BrokerInUse,
    LeaderUnknown,
    TierlogError,
)

log = structlog.get_logger(__name__)

DRAINED_AT_ONCE: Final = 8  # replicas that others are copying


class HandsOver(Protocol):
    def __call__(self, topic: str, number: int, *, node_id: int) -> Any: ...


class Reassigns(Protocol):
    def __call__(self, topic: str, number: int, replicas: Sequence[int]) -> Reassigned: ...


class Moves:
    """Thread-safe. `may_lead`: the brokers that may be given more; `hand_over`, `reassign`: move a
    partition that this broker leads, and have others have its replicas; `prefer`: hand over where
    another replica is the preferred one. `interval_ms`: of the balance; 0: there is none.
    """

    def __init__(
        self,
        members: Members,
        leaders: Leaders,
        news: News,
        peers: Peers,
        topics: LiveTopics,
        *,
        may_lead: Callable[[], Led],
        hand_over: HandsOver,
        reassign: Reassigns,
        prefer: Callable[[], None],
        interval_ms: int,
    ) -> None:
        self._members, self._leaders, self._news = members, leaders, news
        self._peers, self._topics = peers, topics
        self._may_lead, self._hand_over, self._reassign = may_lead, hand_over, reassign
        self._prefer = prefer
        self._interval_s = interval_ms / 1000
        self._balance_again_s = time.monotonic() + self._interval_s
        self._stopping = threading.Event()

    def plan_balance(self) -> list[Move]:
        self._news.read_reports()
        zones = {one: zone for one, zone in self._zones().items() if one in self._may_lead()}
        return [*self._balanced(), *balance_replicas(self._sets(), zones)]

    def _sets(self) -> dict[TopicIdPartition, tuple[int, ...]]:
        """The replicas that there are to be."""
        return {
            place: tuple(one for one in led.replicas if one not in led.removing)
            for place, led in self._leaders.sets().items()
        }

    def _zones(self) -> dict[int, str]:
        return {one.node_id: one.zone for one in self._members.members()}

    def _balanced(self) -> list[Move]:
        told = self._leaders.count_led()
        led = {one: self._alone(led) for one, led in self._may_lead().items() if one in told}
        return balance(led)

    def _alone(self, places: Iterable[TopicIdPartition]) -> list[TopicIdPartition]:
        """Without those that have a set of replicas: which of them leads is its."""
        sets = self._leaders.sets()
        return [one for one in places if one not in sets]

    def count_imbalance(self) -> int:
        """How many partitions a balance would move, as far as is known without asking."""
        return len(self._balanced())

    def plan_drain(self, node_id: int) -> list[Move]:
        self._news.read_reports()
        led = {**self._may_lead(), node_id: self._leaders.led_by(node_id)}
        alone = {one: self._alone(places) for one, places in led.items()}
        replicas = drain_replicas(node_id, self._sets(), self._zones(), may_have=self._may_lead())
        return [*drain(node_id, alone), *replicas]

    def run_moves(self, moves: Iterable[Move]) -> int:
        """Carry moves out, one after another, wherever their leaders are; how many succeeded.
        Raises the first error once all were tried.
        """
        done, failures = 0, DeferredErrors(TierlogError)
        for move in moves:
            if self._stopping.is_set():
                break
            with failures:
                self._run_move(move)
                done += 1
        failures.raise_first()
        return done

    def move_leader(self, place: TopicIdPartition, *, source: int, target: int) -> None:
        """Raises what a hand-over does."""
        self._run_move(Move(place, source, target))

    def reassign(self, place: TopicIdPartition, replicas: Sequence[int]) -> Reassigned:
        """Have these brokers have the replicas, or none: end the reassignment that there is. Raises
        LeaderUnknown, and what `Cluster.reassign` and `Peers.reassign` do.
        """
        name, leader = self.name_of(place), self._leaders.find_leader(place)
        if leader is None:
            raise LeaderUnknown(f"no broker is known to lead {name}-{place[1]}", retry_after_s=1)
        if leader.node_id == self._members.me.node_id:
            return self._reassign(name, place[1], replicas)
        url = self._members.find_member(leader.node_id).url
        return self._peers.reassign(url, topic=name, partition=place[1], replicas=replicas)

    def _run_move(self, move: Move) -> None:
        if move.replicas:
            now = self.reassign(move.place, move.replicas)
            if now.is_done and now.leader != move.replicas[0]:  # only their order has changed
                self.move_leader(move.place, source=now.leader, target=move.replicas[0])
            return
        name, number = self.name_of(move.place), move.place[1]
        if move.source == self._members.me.node_id:
            self._hand_over(name, number, node_id=move.target)
            return
        source = self._members.member(move.source)
        if source is None:
            raise LeaderUnknown(f"broker {move.source} is not known")
        self._peers.hand_over(source.url, topic=name, partition=number, node_id=move.target)

    def name_of(self, place: TopicIdPartition) -> str:
        """Raises UnknownTopicOrPartition."""
        return self._topics.find_by_id(place[0]).record.name

    def run_round(self) -> None:
        """In the background: give away what a drained broker leads; now and then have the preferred
        replicas lead, and, on one broker alone, balance the others.
        """
        if self._members.me.state == "draining":
            self._drain_self()
        elif self._interval_s and time.monotonic() >= self._balance_again_s:
            self._balance_again_s = time.monotonic() + self._interval_s
            self._prefer()
            if min(self._may_lead(), default=None) == self._members.me.node_id:
                self._news.read_reports()
                self.run_moves(self._balanced())

    def _drain_self(self) -> None:
        me = self._members.me.node_id
        if not self._leaders.count_replicas()[me]:
            return
        plan = self.plan_drain(me)
        alone = [one for one in plan if not one.replicas]
        others = [one for one in plan if one.replicas]
        busy = sum(me in led.removing for led in self._leaders.sets().values())
        self.run_moves([*alone, *others[: max(0, DRAINED_AT_ONCE - busy)]])

    def set_draining(self, node_id: int, *, draining: bool) -> None:
        """Have the broker with this node id drained, or no longer. Raises UnknownBroker,
        BrokerInUse if it does not run, and what `Members.set_state` and `Peers.set_draining` do.
        """
        me, other = self._members.me, self._members.find_member(node_id)
        if other.node_id == me.node_id:
            if (me.state == "draining") != draining:
                self._members.set_state("draining" if draining else "running")
            return
        if not other.is_alive or other.url == me.url:  # the same: it would be asked for ever
            raise BrokerInUse(f"broker {node_id} at {other.url} does not answer: start it first")
        self._peers.set_draining(other.url, node_id, draining=draining)
        self._members.refresh()

    def leave(self, *, timeout_s: float) -> None:
        """Before a clean stop: give the others all that this broker leads, as long as that takes no
        longer than this.
        """
        self._stopping.set()
        deadline_s = time.monotonic() + timeout_s
        moves = [one for one in self.plan_drain(self._members.me.node_id) if not one.replicas]
        self._news.in_threads([partial(self._try_move, move, deadline_s) for move in moves])

    def _try_move(self, move: Move, deadline_s: float) -> None:
        try:
            if time.monotonic() >= deadline_s:
                raise LeaderUnknown("there is no time left to hand it over")
            self._run_move(move)
        except TierlogError as error:
            log.warning("a partition stays here", partition=move.place, error=str(error))

    def stop(self) -> None:
        """No further move begins."""
        self._stopping.set()
