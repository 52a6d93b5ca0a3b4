"""Replicas that move: another of the set leads, other brokers have the replicas.

* A leader hands over once nothing is appended any more and the other has all of it: in the next
  version nobody leads, and the other, which is told first, claims it at once.
* A reassignment is in the set itself, and goes on in the background (`reassigning`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.membership.members import Member, Members
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.elections import Elections, nodes_of
from tierlog.broker.replicas.replica import Replica, folder_of
from tierlog.broker.replication.in_sync import STORE
from tierlog.broker.replication.messages import ShownSet
from tierlog.broker.replication.reassigning import adding, removing
from tierlog.broker.replication.term import Term
from tierlog.record_format.errors import (
    InvalidRequest,
    LeaderUnknown,
    StoreUnavailable,
)

HAND_OVER_S: Final = 10.0


class ReplicaMoves:
    """Thread-safe. `replicas`: those of this broker; `name` has another lead what nobody leads."""

    def __init__(
        self,
        replicas: Mapping[TopicIdPartition, Replica],
        members: Members,
        elections: Elections,
        *,
        name: Callable[[int, Sequence[TopicIdPartition]], None],
    ) -> None:
        self._replicas, self._members, self._elections = replicas, members, elections
        self._name = name

    @property
    def node_id(self) -> int:
        return self._members.me.node_id

    def may_lead_instead(self, partition: Partition) -> list[int]:
        """The brokers that run and have a replica in sync, the preferred ones first."""
        replica = self._replicas[partition.topic_id, partition.number]
        term, newest = replica.term, replica.newest
        if term is None or newest is None or newest.found is None:
            return []
        in_sync = nodes_of(term.lead.in_force.in_sync - term.lagging(), self._members)
        alive = {
            one.node_id
            for one in self._members.members()
            if one.is_alive and one.state == "running"
        }
        order = [one for one in newest.found.replicas if one in in_sync]
        return [one for one in order if one in alive - {self._members.me.node_id}]

    def hand_over(self, partition: Partition, target: Member, *, timeout_s: float) -> None:
        """Have another broker lead, whose replica is in sync. Returns once that is decided. Raises
        InvalidRequest, LeaderUnknown, StoreUnavailable.
        """
        replica = self._replicas[partition.topic_id, partition.number]
        with replica.stepping:
            self._hand_over(replica, partition, target, timeout_s=timeout_s)
        self._name(target.node_id, [replica.place])

    def look_who_leads(self, partition: Partition) -> int | None:
        """Which broker leads what was handed over: another may have claimed it first. None if none
        does yet, or this broker. Raises StoreUnavailable.
        """
        replica = self._replicas[partition.topic_id, partition.number]
        with replica.stepping:
            self._elections.look(replica)
        return None if replica.following is None else replica.following.node_id

    def hand_over_to_any(self, replica: Replica, node_ids: Sequence[int]) -> None:
        partition = replica.partition
        if partition is None:
            return
        alive = self.may_lead_instead(partition)
        for node_id in [one for one in node_ids if one in alive][:1]:
            target = self._members.find_member(node_id)
            self._hand_over(replica, partition, target, timeout_s=HAND_OVER_S)
            self._name(node_id, [replica.place])

    def _hand_over(
        self, replica: Replica, partition: Partition, target: Member, *, timeout_s: float
    ) -> None:
        term = replica.term
        if term is None or replica.partition is not partition:
            raise LeaderUnknown(f"{partition} is led elsewhere now", retry_after_s=1)
        to = _in_sync_of(term, target)
        refusal = partial(LeaderUnknown, f"{partition} is being handed over", retry_after_s=1)
        try:
            if not partition.refuse_appends(refusal, timeout_s=timeout_s):
                raise LeaderUnknown(f"{partition}: appends do not end")
            if not term.wait_until(lambda: term.may_hand_over(to), timeout_s=timeout_s):
                raise LeaderUnknown(f"{partition}: broker {target.node_id} lags")
            self._elections.resign(replica, is_failing=False)
        finally:
            if replica.partition is partition:
                partition.accept_appends()
        if replica.partition is partition:
            raise StoreUnavailable(f"{partition}: the hand-over is not confirmed yet")

    def reassign(self, partition: Partition, node_ids: Sequence[int]) -> ShownSet:
        """As `Elections.reassign`; new replicas begin at once. Returns the set that there is."""
        replica = self._replicas[partition.topic_id, partition.number]
        with replica.stepping:
            self._elections.reassign(replica, node_ids)
            shown = shown_of(replica, self._members)
        for node_id in replica.node_ids:
            self._name(node_id, [replica.place])
        if shown is None:
            raise LeaderUnknown(f"{partition} is led elsewhere now", retry_after_s=1)
        return shown


def shown_of(replica: Replica, members: Members) -> ShownSet | None:
    """The set of what is led here; None if it is not. A member that lags is not shown as in sync,
    though it stays while too few others would (R3): Kafka calls it an eligible leader (KIP-966).
    """
    term, newest = replica.term, replica.newest
    if term is None or newest is None or newest.found is None:
        return None
    found, in_force, me = newest.found, term.lead.in_force, members.me.node_id
    replicas = [one for one in found.replicas if one in in_force.replicas]
    live = in_force.in_sync - term.lagging()
    return ShownSet(
        term.epoch,
        me,
        replicas,
        sorted(nodes_of(live, members)),
        [0 if one == me else term.lag_of(one) for one in replicas],
        adding(found),
        removing(found),
        STORE in live,
    )


def _in_sync_of(term: Term, target: Member) -> str:
    """The broker's replica. Raises InvalidRequest."""
    for one in sorted(term.lead.in_force.in_sync):
        if folder_of(one) == target.folder_id:
            return one
    raise InvalidRequest(f"node_id: broker {target.node_id} has no replica in sync of {term.log}")
