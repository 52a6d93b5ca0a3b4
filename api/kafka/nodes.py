"""The brokers that Kafka's clients are told of, and which of them leads a partition.

* A broker alone is node 0, at the address that the client has connected to. In a cluster there are
  those that live and serve Kafka, at the addresses that they registered: the same on each broker.
* Kafka's controller is the node with the lowest id. Every broker does what a controller does.
* A leader that no client can reach is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tierlog.api.kafka.calls import Call
from tierlog.broker.topics.topics import Topic
from tierlog.record_format.errors import NotLeader

if TYPE_CHECKING:
    from tierlog.broker.membership.members import Member

NODE_ID: Final = 0  # of a single broker
NOBODY: Final = -1


class Node(NamedTuple):
    node_id: int
    host: str
    port: int
    rack: str | None = None


class Replicas(NamedTuple):
    """Of a partition: its leader, or NOBODY, with its epoch; who has it, who of them is in sync,
    who cannot be reached, and who is being added.
    """

    leader_id: int
    leader_epoch: int
    nodes: list[int]
    in_sync: list[int]
    offline: list[int]
    adding: Sequence[int] = ()


def own_id(call: Call) -> int:
    cluster = call.context.broker.cluster
    return NODE_ID if cluster is None else cluster.members.me.node_id


def nodes_of(call: Call) -> list[Node]:
    """By their ids."""
    cluster = call.context.broker.cluster
    if cluster is None:
        return [Node(NODE_ID, *call.advertised)]
    return [_node(one) for one in cluster.members.members() if one.is_alive and one.kafka]


def controller_id(nodes: Iterable[Node]) -> int:
    return min((one.node_id for one in nodes), default=NOBODY)


def replicas_of(call: Call, topic: Topic, number: int, nodes: Iterable[Node]) -> Replicas:
    """As far as is known here."""
    found, me = topic.partitions.get(number), own_id(call)
    cluster = call.context.broker.cluster
    if found is not None and found.term is None:
        epoch = found.offsets().leader_epoch
        return _only(me, NOBODY if found.is_defunct else me, epoch)
    if cluster is None or number in topic.damaged:
        return _only(me, NOBODY, -1)
    known = cluster.sets.shown(topic.record.topic_id, number)
    living = {one.node_id for one in nodes}
    is_led = known.leader in living and (known.leader != me or found is not None)
    leader_id = known.leader if is_led and known.leader is not None else NOBODY
    offline = [one for one in known.replicas if one not in living]
    if leader_id == NOBODY and len(known.replicas) == 1:
        return Replicas(NOBODY, known.leader_epoch, known.replicas, [], known.replicas)
    epoch, replicas, in_sync = known.leader_epoch, known.replicas, known.in_sync
    return Replicas(leader_id, epoch, replicas, in_sync, offline, known.adding)


def _only(node_id: int, leader_id: int, leader_epoch: int) -> Replicas:
    """No other broker has it."""
    has, lacks = ([node_id], []) if leader_id != NOBODY else ([], [node_id])
    return Replicas(leader_id, leader_epoch, [node_id], has, lacks)


def node_of(error: BaseException | None) -> Node | None:
    """The broker that leads instead; None if the error names none that a client can reach."""
    if not isinstance(error, NotLeader) or not error.kafka:
        return None
    return Node(error.node_id, *_address(error.kafka))


def _node(member: Member) -> Node:
    return Node(member.node_id, *_address(member.kafka), member.zone or None)


def _address(kafka: str) -> tuple[str, int]:
    host, _, port = kafka.rpartition(":")
    return host.strip("[]"), int(port)
