"""The calls of share groups (KIP-932) but for the records: ShareGroupHeartbeat, ShareGroupDescribe,
and the administration of where a group reads.

* A heartbeat is answered once what it changed is durable.
* A client needs `read`, and may subscribe only to topics that it may see.
* The errors, and their order, are Kafka's (GroupCoordinatorService, KafkaApis).
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, Final

from tierlog.api.kafka.calls import Answer, Call, Later
from tierlog.api.kafka.consumer_groups import answer_beat, places_by_topic
from tierlog.api.kafka.error_codes import Code, Refused, code_of
from tierlog.api.kafka.group_offsets import check_sees, find_to_describe, group_code
from tierlog.api.kafka.groups import check_group, coordinator_of, prepare_for, when_ready
from tierlog.api.kafka.operations import operations_of_group
from tierlog.api.kafka.partitions import NO_ID
from tierlog.api.serving.grants import Scope
from tierlog.broker.group_coordinator.group_events import GroupError, HeartbeatAnswer, ShareBeat
from tierlog.broker.group_coordinator.group_states import ConsumerGroupState, ConsumerMemberState
from tierlog.broker.share_coordinator.coordinator import ShareSummary
from tierlog.broker.topics.topics import Topic
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.errors import TierlogError, UnknownTopic
from tierlog.record_format.kafka_messages.messages import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsResponse,
    DeleteShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsResponse,
    ShareGroupDescribeRequest,
    ShareGroupDescribeResponse,
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)
from tierlog.record_format.share_state import UNKNOWN_START

MEMBER_ID_MAX_LENGTH: Final = 36  # Kafka's: a UUID as text
_LEAVING: Final = -1
_UNKNOWN: Final = -1

_Described = ShareGroupDescribeResponse.DescribedGroup
_Offsets = DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseGroup
_OffsetsTopic = DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseTopic
_Offset = DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponsePartition
_AlteredTopic = AlterShareGroupOffsetsResponse.AlterShareGroupOffsetsResponseTopic
_Altered = AlterShareGroupOffsetsResponse.AlterShareGroupOffsetsResponsePartition
_DeletedTopic = DeleteShareGroupOffsetsResponse.DeleteShareGroupOffsetsResponseTopic


def is_member_id(member_id: str | None) -> bool:
    return member_id is not None and 1 <= len(member_id) <= MEMBER_ID_MAX_LENGTH


# --- ShareGroupHeartbeat --------------------------------------------------------------------------


def share_group_heartbeat(
    call: Call, request: ShareGroupHeartbeatRequest
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    def refuse(code: Code, detail: str = "") -> ShareGroupHeartbeatResponse:
        return ShareGroupHeartbeatResponse(error_code=code, error_message=detail or code.name)

    code = check_group(call, request.group_id or "-")
    if code is not None:
        return refuse(code)
    if not is_member_id(request.member_id):
        return refuse(Code.INVALID_REQUEST, "Invalid member id in the request.")
    names = request.subscribed_topic_names
    if not all(map(call.session.grant.sees_topic, names or ())):
        return refuse(Code.TOPIC_AUTHORIZATION_FAILED)
    if problem := _problem(request):
        return refuse(Code.INVALID_REQUEST, problem)
    beat = ShareBeat(
        member_id=request.member_id,
        epoch=request.member_epoch,
        client_id=call.head.client_id or "",
        client_host=f"/{call.session.address}",  # as Java writes an address
        rack_id=request.rack_id,
        topics=None if names is None else frozenset(names),
    )
    shares, stopped = call.context.broker.share_groups, HeartbeatAnswer(GroupError.NOT_COORDINATOR)
    answer = partial(answer_beat, ShareGroupHeartbeatResponse)

    def make() -> Later:
        return call.context.waiting.answer_later(
            lambda reply: shares.beat(request.group_id, beat, reply),
            answer,
            stop=lambda: answer(stopped),
        )

    return when_ready(call, shares, request.group_id, make, refuse)


def _problem(request: ShareGroupHeartbeatRequest) -> str:
    """What is wrong with a request, in Kafka's words; empty if nothing is."""
    epoch = request.member_epoch
    problems = {
        "GroupId can't be empty.": not request.group_id,
        "RackId can't be empty.": request.rack_id == "",
        "SubscribedTopicNames must be set in first request.": epoch == 0
        and not request.subscribed_topic_names,
        "MemberEpoch is invalid.": epoch < _LEAVING,
    }
    return next((problem for problem, is_so in problems.items() if is_so), "")


# --- ShareGroupDescribe ---------------------------------------------------------------------------


async def share_group_describe(
    call: Call, request: ShareGroupDescribeRequest
) -> ShareGroupDescribeResponse:
    def describe() -> list[_Described]:
        return [_described(call, request, name) for name in request.group_ids]

    return ShareGroupDescribeResponse(groups=await call.context.read(describe))


def _described(call: Call, request: ShareGroupDescribeRequest, name: str) -> _Described:
    try:
        find = coordinator_of(call).describe_share
        found = find_to_describe(call, name, find, kind="share")
        check_sees(call, (one for member in found.members for one in member.assignment))
    except Refused as refused:
        return _Described(group_id=name, error_code=refused.code, error_message=str(refused))
    described = _shown(name, found)
    if request.include_authorized_operations:
        described.authorized_operations = operations_of_group(call)
    return described


def _shown(name: str, found: ConsumerGroupState) -> _Described:
    return _Described(
        group_id=name,
        group_state=found.state,
        group_epoch=found.epoch,
        assignment_epoch=found.target_epoch,
        assignor_name=found.assignor,
        members=list(map(_shown_member, found.members)),
    )


def _shown_member(shown: ConsumerMemberState) -> ShareGroupDescribeResponse.Member:
    member, kind = shown.member, ShareGroupDescribeResponse.TopicPartitions
    return ShareGroupDescribeResponse.Member(
        member_id=member.member_id,
        rack_id=member.rack_id,
        member_epoch=member.epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=sorted(member.topics),
        assignment=ShareGroupDescribeResponse.Assignment(
            [kind(one.topic_id, one.topic, one.partitions) for one in shown.assignment]
        ),
    )


# --- DescribeShareGroupOffsets --------------------------------------------------------------------


async def describe_share_group_offsets(
    call: Call, request: DescribeShareGroupOffsetsRequest
) -> DescribeShareGroupOffsetsResponse:
    def describe() -> list[_Offsets]:
        return [_offsets_of(call, one) for one in request.groups]

    return DescribeShareGroupOffsetsResponse(groups=await call.context.read(describe))


def _offsets_of(
    call: Call, asked: DescribeShareGroupOffsetsRequest.DescribeShareGroupOffsetsRequestGroup
) -> _Offsets:
    """What a group does not read has no start. A group that there is not reads nothing."""
    name, code = asked.group_id, check_group(call, asked.group_id)
    if code is not None:
        return _Offsets(group_id=name, error_code=code, error_message=code.name)
    try:
        coordinator_log = call.context.broker.groups.log
        coordinator_log.load_home(name)
        if call.context.broker.cluster is not None:
            coordinator_log.check_ready(name)
        if asked.topics is None:
            topics = _all_offsets(call, name)
        else:
            topics = [_offsets(call, name, one.topic_name, one.partitions) for one in asked.topics]
    except (TierlogError, OSError) as error:
        code = group_code(error)
        return _Offsets(group_id=name, error_code=code, error_message=code.name)
    return _Offsets(group_id=name, topics=topics)


def _all_offsets(call: Call, group: str) -> list[_OffsetsTopic]:
    read = places_by_topic(call.context.broker.share_groups.read_places(group))
    found = {coordinator_of(call).topic_name(topic_id): read[topic_id] for topic_id in read}
    return [
        _offsets(call, group, name, sorted(numbers))
        for name, numbers in found.items()
        if name is not None and call.session.grant.sees_topic(name)
    ]


def _offsets(call: Call, group: str, name: str, numbers: Iterable[int]) -> _OffsetsTopic:
    if not call.session.grant.sees_topic(name):
        code = Code.TOPIC_AUTHORIZATION_FAILED
        rows = [_Offset(one, UNKNOWN_START, 0, _UNKNOWN, code, code.name) for one in numbers]
        return _OffsetsTopic(name, NO_ID, rows)
    try:
        topic = call.context.broker.topic(name)
    except UnknownTopic:
        return _OffsetsTopic(name, NO_ID, [_Offset(one, UNKNOWN_START) for one in numbers])
    topic_id, numbers = _id_of(topic), list(numbers)
    shares = call.context.broker.share_groups
    found, failures = shares.summaries(group, [(topic_id, one) for one in numbers])
    if failures:
        raise failures[0]
    rows = [_offset(topic, one, found.get((topic_id, one))) for one in numbers]
    return _OffsetsTopic(name, topic_id, rows)


def _offset(topic: Topic, number: int, found: ShareSummary | None) -> _Offset:
    partition = topic.partitions.get(number)
    end = topic.end_elsewhere(number) if partition is None else partition.high_watermark
    if found is None or number not in topic.numbers:
        return _Offset(number, UNKNOWN_START, 0, _UNKNOWN)
    lag = _UNKNOWN
    if found.start_offset != UNKNOWN_START and found.complete_count >= 0 and end is not None:
        lag = max(0, end - found.start_offset - found.complete_count)
    return _Offset(number, found.start_offset, found.leader_epoch, lag)


def _id_of(topic: Topic) -> bytes:
    return parse_topic_id(topic.record.topic_id).bytes


# --- AlterShareGroupOffsets, DeleteShareGroupOffsets ----------------------------------------------


async def alter_share_group_offsets(
    call: Call, request: AlterShareGroupOffsetsRequest
) -> AlterShareGroupOffsetsResponse:
    name, code = request.group_id, check_group(call, request.group_id)
    if code is not None:
        return AlterShareGroupOffsetsResponse(error_code=code, error_message=code.name)
    starts: dict[tuple[bytes, int], int] = {}
    topics = [_checked(call, one, starts) for one in request.topics]
    shares = call.context.broker.share_groups
    try:
        await prepare_for(call, shares, name)
        await call.context.write(shares.alter_offsets, name, starts)
    except (TierlogError, OSError) as error:
        code = group_code(error)
        return AlterShareGroupOffsetsResponse(error_code=code, error_message=str(error))
    return AlterShareGroupOffsetsResponse(responses=topics)


def _checked(
    call: Call,
    asked: AlterShareGroupOffsetsRequest.AlterShareGroupOffsetsRequestTopic,
    starts: dict[tuple[bytes, int], int],
) -> _AlteredTopic:
    code, topic = Code.NONE, None
    try:
        topic = _readable(call, asked.topic_name)
    except TierlogError as error:
        code = code_of(error)
    topic_id = NO_ID if topic is None else _id_of(topic)
    rows = []
    for one in asked.partitions:
        found, number = code, one.partition_index
        if topic is not None and number not in topic.numbers:
            found = Code.UNKNOWN_TOPIC_OR_PARTITION
        if found is Code.NONE:
            starts[topic_id, number] = one.start_offset
        rows.append(_Altered(number, found, None if found is Code.NONE else found.name))
    return _AlteredTopic(asked.topic_name, topic_id, rows)


def _readable(call: Call, name: str) -> Topic:
    """Raises Forbidden, UnknownTopic."""
    call.session.grant.check_topic(name)
    call.session.grant.check_scopes((Scope.READ,))
    return call.context.broker.topic(name)


async def delete_share_group_offsets(
    call: Call, request: DeleteShareGroupOffsetsRequest
) -> DeleteShareGroupOffsetsResponse:
    name, code = request.group_id, check_group(call, request.group_id, (Scope.ADMIN,))
    if code is not None:
        return DeleteShareGroupOffsetsResponse(error_code=code, error_message=code.name)
    found: dict[str, bytes] = {}
    codes: dict[str, Code] = {}
    for one in request.topics:
        try:
            found[one.topic_name] = _id_of(_readable(call, one.topic_name))
        except TierlogError as error:
            codes[one.topic_name] = code_of(error)
    shares = call.context.broker.share_groups
    try:
        await prepare_for(call, shares, name)
        gone = await call.context.write(shares.delete_offsets, name, list(found.values()))
    except (TierlogError, OSError) as error:
        code = group_code(error)
        return DeleteShareGroupOffsetsResponse(error_code=code, error_message=str(error))
    for topic, topic_id in found.items():
        codes[topic] = Code.NONE if topic_id in gone else Code.UNKNOWN_TOPIC_OR_PARTITION
    return DeleteShareGroupOffsetsResponse(
        responses=[
            _DeletedTopic(
                one.topic_name,
                found[one.topic_name] if codes[one.topic_name] is Code.NONE else NO_ID,
                codes[one.topic_name],
                None if codes[one.topic_name] is Code.NONE else codes[one.topic_name].name,
            )
            for one in request.topics
        ]
    )
