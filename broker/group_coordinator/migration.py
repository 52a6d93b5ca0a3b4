"""A group with members changes its protocol: the classic one becomes a consumer group when a member
of the new protocol joins, and the other way round when the last of them has gone.

* Members stay, with what they have. Whoever waits for an answer is told to join again.
* Refused (GROUP_ID_NOT_FOUND, as by Kafka): groups of other types than consumers', and members
  whose own assignor says more than partitions, which nobody else could go on with.
"""

from __future__ import annotations

from tierlog.broker.group_coordinator.classic_group import ClassicGroup
from tierlog.broker.group_coordinator.consumer_group import ConsumerGroup, ConsumerLimits
from tierlog.broker.group_coordinator.consumer_members import ClassicMember, ConsumerMember
from tierlog.broker.group_coordinator.consumer_protocol import (
    CONSUMER,
    encode_assignment_for,
    read_subscription,
)
from tierlog.broker.group_coordinator.group_events import GroupError, Limits, Member
from tierlog.broker.group_coordinator.subscriptions import TopicView
from tierlog.record_format.errors import GroupRefused
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import ConsumerProtocolAssignment
from tierlog.record_format.kafka_messages.source import MessageError


def upgraded(
    classic: ClassicGroup, limits: ConsumerLimits, topics: TopicView, now_ms: int
) -> ConsumerGroup:
    """The consumer group that has the classic group's members. Raises GroupRefused."""
    if not limits.migration.upgrades:
        raise _refused(classic, "groups may not be upgraded")
    if classic.protocol_type != CONSUMER:
        raise _refused(classic, f"its type is {classic.protocol_type}")
    if len(classic.members) > limits.max_size:
        raise _refused(classic, f"it has more than {limits.max_size} members")
    group = ConsumerGroup(classic.name, limits, topics)
    group.epoch = group.target_epoch = classic.generation
    members = [_consumer(classic, one, topics) for one in classic.members.values()]
    group.targets = {one.member_id: frozenset(one.assigned) for one in members}
    group.load(members, now_ms)
    return group


def _consumer(classic: ClassicGroup, member: Member, topics: TopicView) -> ConsumerMember:
    try:
        read = read_subscription(member.metadata(classic.protocol_name) or member.protocols[0][1])
        owned = _decode_assignment(member.assignment)
    except (GroupRefused, MessageError, ValueError) as error:
        raise _refused(classic, str(error)) from error
    found = ((topics.find(name), number) for name, number in owned)
    return ConsumerMember(
        member.member_id,
        epoch=classic.generation,
        previous_epoch=classic.generation,
        instance_id=member.instance_id,
        rack_id=read.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        topics=read.topics,
        classic=ClassicMember(member.session_timeout_ms, member.protocols),
        assigned={
            (facts.topic_id, number): classic.generation
            for facts, number in found
            if facts is not None
        },
    )


def _decode_assignment(data: bytes) -> list[tuple[str, int]]:
    """Raises MessageError; ValueError for data of an assignor of the client's own."""
    if not data:
        return []
    found = codec.decode_versioned(ConsumerProtocolAssignment, data)
    if found.user_data:
        raise ValueError("its assignor keeps data of its own")
    return [(one.topic, number) for one in found.assigned_partitions for number in one.partitions]


def _refused(classic: ClassicGroup, why: str) -> GroupRefused:
    return GroupRefused(
        GroupError.GROUP_ID_NOT_FOUND, f"group {classic.name} cannot become a consumer group: {why}"
    )


def downgraded(group: ConsumerGroup, limits: Limits, now_ms: int) -> ClassicGroup:
    """The classic group that has the consumer group's members, all of the classic protocol."""
    classic = ClassicGroup(group.name, limits)
    members = []
    for one in group.members:
        assert one.classic is not None, "the others have gone"
        given = group.subscriptions.by_name(group.target_of(one.member_id))
        members.append(
            Member(
                one.member_id,
                one.instance_id,
                one.client_id,
                one.client_host,
                one.classic.protocols,
                one.classic.session_timeout_ms,
                one.rebalance_timeout_ms,
                assignment=encode_assignment_for(one.classic.protocols[0].metadata, given),
            )
        )
    classic.take_over(members, generation=group.epoch, protocol_type=CONSUMER, now_ms=now_ms)
    return classic
