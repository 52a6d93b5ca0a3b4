"""Who has each partition of the cluster, for showing: at most two seconds old, it decides nothing.

* Of replication factor 1 a partition has its leader as its only replica, in sync while it leads.
* Of a partition that nobody leads, the last that is known is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tierlog.broker.membership.leaders import Leader, Leaders
from tierlog.broker.replication.messages import ShownSet
from tierlog.broker.topics.topics import Topic


@dataclass(slots=True)
class Short:
    """Partitions that lack something: a leader; of those that are led, replicas in sync, as many as
    they have or as `min.insync.replicas` says. `at_min_isr`: of several, one less would be too few.
    The names are Kafka's metrics'.
    """

    offline: int = 0
    under_replicated: int = 0
    under_min_isr: int = 0
    at_min_isr: int = 0


class ShownSets:
    """Thread-safe. `find_leader`: what is known of who leads."""

    def __init__(self, leaders: Leaders, find_leader: Callable[[str, int], Leader | None]) -> None:
        self._leaders, self._find_leader = leaders, find_leader

    def shown(self, topic_id: str, number: int) -> ShownSet:
        place, leader = (topic_id, number), self._find_leader(topic_id, number)
        last = self._leaders.find_leader(place) or self._leaders.find_gone_leader(place) or leader
        if last is None:
            return ShownSet(-1, None, [], [], [])
        replicas = list(last.replicas) or [last.node_id]
        if leader is None:
            return ShownSet(-1, None, replicas, list(last.in_sync), [], *last[7:])
        in_sync = list(last.in_sync) or [leader.node_id]
        lags = list(last.lags) or [0]
        return ShownSet(leader.leader_epoch, leader.node_id, replicas, in_sync, lags, *last[7:])

    def count_short(self, topics: Iterable[Topic], *, leader: int | None = None) -> Short:
        """`leader`: of the partitions of this broker alone."""
        short = Short()
        for topic in topics:
            for number in topic.numbers:
                found = self.shown(topic.record.topic_id, number)
                if leader not in (None, found.leader):
                    continue
                is_led = found.leader is not None
                in_sync = len(found.in_sync) + found.has_store
                enough = topic.config.effective_min_in_sync(len(found.wanted))
                # As Kafka: what is being added is not missed yet.
                missed = len(found.replicas) - len(found.adding) - len(found.in_sync)
                short.offline += not is_led
                short.under_replicated += is_led and missed > 0
                short.under_min_isr += is_led and in_sync < enough
                short.at_min_isr += is_led and in_sync == enough < len(found.wanted)
        return short
