"""The records of consumer groups and share groups in `__consumer_offsets`, as Kafka 4.3 writes and
reads them.

* A record's value is a function of the group's state and the record's key; None is a tombstone.
* Keys have version 0, whose number is the record's type; values have version 0.
* Read is the newest record of each key, in any order. One that cannot be read is skipped.

--- records: ConsumerGroupMetadata (the epoch), ConsumerGroupMemberMetadata,
ConsumerGroupTargetAssignmentMetadata, ConsumerGroupTargetAssignmentMember,
ConsumerGroupCurrentMemberAssignment, ConsumerGroupRegularExpression. ConsumerGroupPartitionMetadata
is Kafka's before 4.1: it is deleted. GroupMetadata is a classic group's. ShareGroup… are a share
group's, with ShareGroupStatePartitionMetadata: the partitions whose state there is, or will be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import structlog

from tierlog.broker.group_coordinator.assignors import Target
from tierlog.broker.group_coordinator.classic_group import ClassicGroup
from tierlog.broker.group_coordinator.consumer_group import ConsumerGroup
from tierlog.broker.group_coordinator.consumer_members import (
    Assignment,
    ClassicMember,
    ConsumerMember,
    MemberState,
)
from tierlog.broker.group_coordinator.group_events import Protocol, RecordKey, RecordKind
from tierlog.broker.group_coordinator.share_group import ShareGroup
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages import messages as m
from tierlog.record_format.kafka_messages.source import MessageError

log = structlog.get_logger(__name__)

CLASSIC_VERSION: Final = 3  # as Kafka 4 writes
_KEYS: Final[Mapping[RecordKind, Any]] = {
    RecordKind.CLASSIC: m.GroupMetadataKey,
    RecordKind.EPOCH: m.ConsumerGroupMetadataKey,
    RecordKind.PARTITION_METADATA: m.ConsumerGroupPartitionMetadataKey,
    RecordKind.MEMBER: m.ConsumerGroupMemberMetadataKey,
    RecordKind.TARGET_EPOCH: m.ConsumerGroupTargetAssignmentMetadataKey,
    RecordKind.TARGET: m.ConsumerGroupTargetAssignmentMemberKey,
    RecordKind.CURRENT: m.ConsumerGroupCurrentMemberAssignmentKey,
    RecordKind.PATTERN: m.ConsumerGroupRegularExpressionKey,
    RecordKind.SHARE_MEMBER: m.ShareGroupMemberMetadataKey,
    RecordKind.SHARE_EPOCH: m.ShareGroupMetadataKey,
    RecordKind.SHARE_TARGET_EPOCH: m.ShareGroupTargetAssignmentMetadataKey,
    RecordKind.SHARE_TARGET: m.ShareGroupTargetAssignmentMemberKey,
    RecordKind.SHARE_CURRENT: m.ShareGroupCurrentMemberAssignmentKey,
    RecordKind.SHARE_STATES: m.ShareGroupStatePartitionMetadataKey,
}
_OF_ONE: Final = (
    RecordKind.MEMBER,
    RecordKind.TARGET,
    RecordKind.CURRENT,
    RecordKind.PATTERN,
    RecordKind.SHARE_MEMBER,
    RecordKind.SHARE_TARGET,
    RecordKind.SHARE_CURRENT,
)
_Member = m.ConsumerGroupMemberMetadataValue
_Current = m.ConsumerGroupCurrentMemberAssignmentValue
_TargetValue = m.ConsumerGroupTargetAssignmentMemberValue
_ShareTargetValue = m.ShareGroupTargetAssignmentMemberValue
_ShareCurrent = m.ShareGroupCurrentMemberAssignmentValue
_States = m.ShareGroupStatePartitionMetadataValue

Records = Mapping[bytes, bytes]
"""Newest values by key, of one group."""


def encode_key(group: str, key: RecordKey) -> bytes:
    names = (group, key.of) if key.kind in _OF_ONE else (group,)
    return codec.encode_record_key(_KEYS[key.kind](*names))


def read_key(data: bytes) -> tuple[str, RecordKey] | None:
    """The group that a record is of, and its key; None for other records. Raises MessageError."""
    number = codec.record_type(data)
    if number not in _KEYS:
        return None
    kind = RecordKind(number)
    found = msgspec.structs.astuple(codec.decode_record_key(_KEYS[kind], data))
    return found[0], RecordKey(kind, *found[1:])


# --- writing --------------------------------------------------------------------------------------


def encode_value(
    group: ClassicGroup | ConsumerGroup | ShareGroup, key: RecordKey, *, wall_ms: int
) -> bytes | None:
    """Raises MessageError for what is too long."""
    if isinstance(group, ClassicGroup):
        value = _classic(group, wall_ms) if key.kind is RecordKind.CLASSIC else None
    elif isinstance(group, ConsumerGroup):
        value = _value(group, key, wall_ms)
    else:
        value = _share_value(group, key, wall_ms)
    version = CLASSIC_VERSION if key.kind is RecordKind.CLASSIC else 0
    return None if value is None else codec.encode_versioned(value, version)


def _classic(group: ClassicGroup, wall_ms: int) -> msgspec.Struct:
    value = group.record(group.assignments())
    value.current_state_timestamp = wall_ms
    return value


def _value(group: ConsumerGroup, key: RecordKey, wall_ms: int) -> msgspec.Struct | None:
    match key.kind:
        case RecordKind.EPOCH:
            return m.ConsumerGroupMetadataValue(group.epoch, group.metadata_hash)
        case RecordKind.TARGET_EPOCH:
            return m.ConsumerGroupTargetAssignmentMetadataValue(group.target_epoch, wall_ms)
        case RecordKind.PATTERN:
            topics = group.subscriptions.matched.get(key.of)
            version = group.subscriptions.version
            if topics is None:
                return None
            return m.ConsumerGroupRegularExpressionValue(sorted(topics), version, wall_ms)
        case RecordKind.TARGET:
            target = group.targets.get(key.of)
            return None if target is None else _TargetValue(_targets(target))
    member = group.members.by_id.get(key.of)
    if member is None:
        return None
    return _member(member) if key.kind is RecordKind.MEMBER else _current(member)


def _share_value(group: ShareGroup, key: RecordKey, wall_ms: int) -> msgspec.Struct | None:
    match key.kind:
        case RecordKind.SHARE_EPOCH:
            return m.ShareGroupMetadataValue(group.epoch, group.metadata_hash)
        case RecordKind.SHARE_TARGET_EPOCH:
            return m.ShareGroupTargetAssignmentMetadataValue(group.target_epoch, wall_ms)
        case RecordKind.SHARE_STATES:
            return _States(
                _states(group, group.initializing),
                _states(group, ((one, n) for one, all_ in group.initialized.items() for n in all_)),
            )
        case RecordKind.SHARE_TARGET:
            target = group.targets.get(key.of)
            if target is None:
                return None
            rows = _by_topic(target).items()
            return _ShareTargetValue([_ShareTargetValue.TopicPartition(*one) for one in rows])
    member = group.members.by_id.get(key.of)
    if member is None:
        return None
    if key.kind is RecordKind.SHARE_MEMBER:
        return m.ShareGroupMemberMetadataValue(
            member.rack_id, member.client_id, member.client_host, sorted(member.topics)
        )
    rows = _by_topic(member.assigned).items()
    assigned = [_ShareCurrent.TopicPartitions(*one) for one in rows]
    return _ShareCurrent(member.epoch, member.previous_epoch, member.state, assigned)


def _states(
    group: ShareGroup, places: Iterable[tuple[bytes, int]]
) -> list[_States.TopicPartitionsInfo]:
    name_of = group.subscriptions.topics.name_of
    return [
        _States.TopicPartitionsInfo(topic_id, name_of(topic_id) or "<UNKNOWN>", numbers)
        for topic_id, numbers in _by_topic(places).items()
    ]


def _member(member: ConsumerMember) -> _Member:
    classic = member.classic
    return _Member(
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=sorted(member.topics),
        subscribed_topic_regex=member.pattern,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        server_assignor=member.assignor,
        classic_member_metadata=None
        if classic is None
        else _Member.ClassicMemberMetadata(
            classic.session_timeout_ms,
            [_Member.ClassicProtocol(one.name, one.metadata) for one in classic.protocols],
        ),
    )


def _current(member: ConsumerMember) -> _Current:
    return _Current(
        member.epoch,
        member.previous_epoch,
        member.state,
        _epochs(member.assigned),
        _epochs(member.revoking),
    )


def _by_topic(places: Iterable[tuple[bytes, int]]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for topic_id, number in sorted(places):
        found.setdefault(topic_id, []).append(number)
    return found


def _targets(target: Target) -> list[_TargetValue.TopicPartition]:
    rows = _by_topic(target).items()
    return [_TargetValue.TopicPartition(topic_id, numbers) for topic_id, numbers in rows]


def _epochs(given: Assignment) -> list[_Current.TopicPartitions]:
    return [
        _Current.TopicPartitions(topic_id, numbers, [given[topic_id, one] for one in numbers])
        for topic_id, numbers in _by_topic(given).items()
    ]


# --- reading --------------------------------------------------------------------------------------


def load_group(group: ConsumerGroup | ShareGroup, records: Records, now_ms: int) -> bool:
    """Fill a new group. Returns False if the records are of no group of its type."""
    values, kinds = dict(_read(records)), group.kinds
    if RecordKey(kinds.epoch) not in values:
        return False
    read = _read_share_member if isinstance(group, ShareGroup) else _read_member
    members = list[ConsumerMember]()
    for key, value in values.items():
        if key.kind is kinds.epoch:
            group.epoch, group.metadata_hash = value.epoch, value.metadata_hash
        elif key.kind is kinds.target_epoch:
            group.target_epoch = value.assignment_epoch
        elif key.kind is kinds.target:
            group.targets[key.of] = frozenset(_places(value.topic_partitions))
        elif key.kind is kinds.member:
            current = values.get(RecordKey(kinds.current, key.of))
            members.append(read(key.of, value, current))
        elif isinstance(group, ShareGroup):
            _load_states(group, key, value)
        else:
            _load_patterns(group, key, value)
    group.load(members, now_ms)
    return True


def _load_patterns(group: ConsumerGroup, key: RecordKey, value: Any) -> None:
    if key.kind is RecordKind.PATTERN:
        group.subscriptions.matched[key.of] = frozenset(value.topics)
    elif key.kind is RecordKind.PARTITION_METADATA:
        group.has_partition_metadata = True


def _load_states(group: ShareGroup, key: RecordKey, value: Any) -> None:
    if key.kind is RecordKind.SHARE_STATES:
        for one in value.initialized_topics:
            group.initialized[one.topic_id] = set(one.partitions)


def _read_share_member(
    member_id: str, value: m.ShareGroupMemberMetadataValue, current: _ShareCurrent | None
) -> ConsumerMember:
    member = ConsumerMember(
        member_id,
        rack_id=value.rack_id,
        client_id=value.client_id,
        client_host=value.client_host,
        topics=frozenset(value.subscribed_topic_names),
    )
    if current is None:
        return member
    return member._replace(
        epoch=current.member_epoch,
        previous_epoch=current.previous_member_epoch,
        assigned=dict.fromkeys(_places(current.assigned_partitions), 0),
    )


def _places(rows: Iterable[Any]) -> Iterator[tuple[bytes, int]]:
    return ((row.topic_id, number) for row in rows for number in row.partitions)


def _read(records: Records) -> Iterator[tuple[RecordKey, Any]]:
    for data, value in records.items():
        try:
            found = read_key(data)
            if found is not None:
                kind: Any = getattr(m, _KEYS[found[1].kind].__name__.removesuffix("Key") + "Value")
                yield found[1], codec.decode_versioned(kind, value)
        except MessageError as error:
            log.warning("a record of a group cannot be read", key=data.hex(), error=str(error))


def _read_member(member_id: str, value: _Member, current: _Current | None) -> ConsumerMember:
    classic = value.classic_member_metadata
    member = ConsumerMember(
        member_id,
        instance_id=value.instance_id,
        rack_id=value.rack_id,
        client_id=value.client_id,
        client_host=value.client_host,
        rebalance_timeout_ms=value.rebalance_timeout_ms,
        topics=frozenset(value.subscribed_topic_names),
        pattern=value.subscribed_topic_regex or "",
        assignor=value.server_assignor,
        classic=None
        if classic is None
        else ClassicMember(
            classic.session_timeout_ms,
            tuple(Protocol(one.name, bytes(one.metadata)) for one in classic.supported_protocols),
        ),
    )
    if current is None:
        return member
    known = current.state in MemberState.__members__.values()
    return member._replace(
        epoch=current.member_epoch,
        previous_epoch=current.previous_member_epoch,
        state=MemberState(current.state) if known else MemberState.UNKNOWN,
        assigned=_read_epochs(current.assigned_partitions, current.member_epoch),
        revoking=_read_epochs(current.partitions_pending_revocation, current.member_epoch),
    )


def _read_epochs(rows: Iterable[_Current.TopicPartitions], member_epoch: int) -> Assignment:
    """Before 4.2 Kafka did not write the epochs: the member's, as Kafka takes it."""
    return {
        (row.topic_id, number): epoch
        for row in rows
        for number, epoch in zip(
            row.partitions,
            row.assignment_epochs or [member_epoch] * len(row.partitions),
            strict=False,
        )
    }
