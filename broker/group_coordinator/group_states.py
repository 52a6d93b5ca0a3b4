"""Groups as they are now, for whoever asks: pure functions of the state machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from tierlog.broker.group_coordinator.assignors import SIMPLE, TopicPartition
from tierlog.broker.group_coordinator.classic_group import ClassicGroup
from tierlog.broker.group_coordinator.consumer_group import ConsumerGroup
from tierlog.broker.group_coordinator.consumer_members import ConsumerMember
from tierlog.broker.group_coordinator.consumer_protocol import (
    CONSUMER,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from tierlog.broker.group_coordinator.group_events import NO_MEMBER, State
from tierlog.broker.group_coordinator.share_group import ShareGroup
from tierlog.record_format.kafka_messages.source import MessageError

CLASSIC: Final = "classic"  # a type of groups; the others are `consumer` and `share`
SHARE: Final = "share"

Group = ClassicGroup | ConsumerGroup | ShareGroup


class MemberState(NamedTuple):
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class GroupState(NamedTuple):
    """`protocol` and the members' bytes are those of a stable group. A consumer group and a share
    group are shown in the terms of a classic one: its epoch, its assignor, and what its members
    read and have.
    """

    name: str
    state: State = State.DEAD
    generation: int = -1
    protocol_type: str = ""
    protocol: str = ""
    leader: str = NO_MEMBER
    members: tuple[MemberState, ...] = ()
    type: str = CLASSIC


def type_of(group: Group) -> str:
    if isinstance(group, ConsumerGroup):
        return CONSUMER
    return SHARE if isinstance(group, ShareGroup) else CLASSIC


def state_of(group: Group) -> GroupState:
    if isinstance(group, ConsumerGroup):
        return _modern_state(group, CONSUMER, group.assignor)
    if isinstance(group, ShareGroup):
        return _modern_state(group, SHARE, SIMPLE)
    is_stable = group.state is State.STABLE
    protocol = group.protocol_name if is_stable else None
    members = tuple(
        MemberState(
            one.member_id,
            one.instance_id,
            one.client_id,
            one.client_host,
            one.metadata(protocol),
            one.assignment if is_stable else b"",
        )
        for one in group.members.values()
    )
    return GroupState(
        group.name,
        group.state,
        group.generation,
        group.protocol_type or "",
        protocol or "",
        group.leader or NO_MEMBER,
        members,
    )


def _modern_state(group: ConsumerGroup | ShareGroup, kind: str, assignor: str) -> GroupState:
    members = tuple(
        MemberState(
            one.member_id,
            one.instance_id,
            one.client_id,
            one.client_host,
            encode_subscription(group.subscriptions.names_of(one)),
            encode_assignment(group.subscriptions.by_name([*one.assigned, *one.revoking])),
        )
        for one in group.members
    )
    return GroupState(
        group.name,
        group.state,
        group.epoch,
        kind,
        assignor,
        members=members,
        type=kind,
    )


def subscribed_topics(group: Group) -> frozenset[str] | None:
    """The topics that a group of consumers reads; None if they cannot be known."""
    if not isinstance(group, ClassicGroup):
        return group.subscriptions.names()
    if not group.members:
        return frozenset()
    if group.protocol_type != CONSUMER or group.state is State.PREPARING:
        return None
    found: set[str] = set()
    try:
        for member in group.members.values():
            found |= decode_subscription(member.metadata(group.protocol_name))
    except MessageError:
        return None
    return frozenset(found)


# --- a consumer or share group in its own terms ---------------------------------------------------


class TopicPartitions(NamedTuple):
    topic_id: bytes
    topic: str
    partitions: list[int]


class ConsumerMemberState(NamedTuple):
    """`assignment`: what it has, also what it has to give up. `target`: what it is to have."""

    member: ConsumerMember
    assignment: list[TopicPartitions]
    target: list[TopicPartitions]


class ConsumerGroupState(NamedTuple):
    state: State
    epoch: int
    target_epoch: int
    assignor: str
    members: list[ConsumerMemberState]


def consumer_state_of(group: ConsumerGroup | ShareGroup) -> ConsumerGroupState:
    members = [
        ConsumerMemberState(
            one,
            _topic_partitions(group, [*one.assigned, *one.revoking]),
            _topic_partitions(group, group.target_of(one.member_id)),
        )
        for one in group.members
    ]
    assignor = SIMPLE if isinstance(group, ShareGroup) else group.assignor
    return ConsumerGroupState(group.state, group.epoch, group.target_epoch, assignor, members)


def _topic_partitions(
    group: ConsumerGroup | ShareGroup, places: Iterable[TopicPartition]
) -> list[TopicPartitions]:
    ids = {topic_id: group.subscriptions.topics.name_of(topic_id) for topic_id, _ in places}
    found = group.subscriptions.by_name(places)
    return [
        TopicPartitions(topic_id, name, found[name])
        for topic_id, name in sorted(ids.items())
        if name is not None
    ]
