"""ConsumerGroupHeartbeat and ConsumerGroupDescribe: groups whose members the broker assigns
(KIP-848).

* A heartbeat is answered once what it changed is durable.
* A client needs `read`, and may subscribe by name only to topics that it may see; a pattern matches
  those alone.
* The errors, and their order, are Kafka's (GroupCoordinatorService, KafkaApis).
"""

from __future__ import annotations

import uuid
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from tierlog.api.kafka.calls import Answer, Call, Later
from tierlog.api.kafka.error_codes import Code, Refused
from tierlog.api.kafka.group_offsets import check_sees, find_to_describe
from tierlog.api.kafka.groups import check_group, coordinator_of, when_ready
from tierlog.api.kafka.operations import operations_of_group
from tierlog.api.kafka.patterns import TopicPatterns
from tierlog.broker.group_coordinator.assignors import ASSIGNORS
from tierlog.broker.group_coordinator.consumer_group import LEFT
from tierlog.broker.group_coordinator.group_events import GroupError, Heartbeat, HeartbeatAnswer
from tierlog.broker.group_coordinator.group_states import (
    ConsumerGroupState,
    ConsumerMemberState,
    TopicPartitions,
)
from tierlog.record_format.kafka_messages.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ShareGroupHeartbeatResponse,
)

ID_MAX_LENGTH: Final = 1_000  # of a member, an instance, a rack: records hold them
_OWN_ID_FROM: Final = 1  # the client makes its member id
_LEAVING: Final = -1
_CLASSIC_TYPE, _CONSUMER_TYPE = 0, 1

_Described = ConsumerGroupDescribeResponse.DescribedGroup

# A share group's has the same fields, in a message of its own.
Beaten = TypeVar("Beaten", ConsumerGroupHeartbeatResponse, ShareGroupHeartbeatResponse)


# --- ConsumerGroupHeartbeat -----------------------------------------------------------------------


def consumer_group_heartbeat(
    call: Call, request: ConsumerGroupHeartbeatRequest
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    def refuse(code: Code, detail: str = "") -> ConsumerGroupHeartbeatResponse:
        return ConsumerGroupHeartbeatResponse(error_code=code, error_message=detail or code.name)

    code = check_group(call, request.group_id or "-")
    if code is not None:
        return refuse(code)
    if not all(map(call.session.grant.sees_topic, request.subscribed_topic_names or ())):
        return refuse(Code.TOPIC_AUTHORIZATION_FAILED)
    if problem := _problem(call, request):
        return refuse(Code.INVALID_REQUEST, problem)
    if request.server_assignor is not None and request.server_assignor not in ASSIGNORS:
        known = ", ".join(ASSIGNORS)
        return refuse(
            Code.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {request.server_assignor} is not supported. "
            f"Supported assignors: {known}.",
        )
    beat = _heartbeat(call, request)
    stopped = HeartbeatAnswer(GroupError.NOT_COORDINATOR)
    answer = partial(answer_beat, ConsumerGroupHeartbeatResponse)

    def make() -> Later:
        return call.context.waiting.answer_later(
            lambda reply: coordinator_of(call).beat(request.group_id, beat, reply),
            answer,
            stop=lambda: answer(stopped),
        )

    return when_ready(call, call.context.broker.groups.log, request.group_id, make, refuse)


def _problem(call: Call, request: ConsumerGroupHeartbeatRequest) -> str:
    """What is wrong with a request, in Kafka's words; empty if nothing is."""
    epoch = request.member_epoch
    has_own_id = call.version >= _OWN_ID_FROM or epoch > 0 or epoch == _LEAVING
    given = (request.member_id, request.instance_id, request.rack_id, request.server_assignor)
    has_topics = (request.subscribed_topic_names, request.subscribed_topic_regex) != (None, None)
    problems = {
        "MemberId can't be empty.": has_own_id and not request.member_id,
        "GroupId can't be empty.": not request.group_id,
        "InstanceId can't be empty.": request.instance_id == "",
        "RackId can't be empty.": request.rack_id == "",
        f"An id has at most {ID_MAX_LENGTH} characters.": any(
            len(one) > ID_MAX_LENGTH for one in given if one is not None
        ),
        "RebalanceTimeoutMs must be provided in first request.": epoch == 0
        and request.rebalance_timeout_ms == -1,
        "TopicPartitions must be empty when (re-)joining.": epoch == 0
        and (request.topic_partitions is None or len(request.topic_partitions) > 0),
        "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.": (
            epoch == 0 and not has_topics
        ),
        "InstanceId can't be null.": epoch == LEFT and request.instance_id is None,
        "MemberEpoch is invalid.": epoch < LEFT,
    }
    return next((problem for problem, is_so in problems.items() if is_so), "")


def _heartbeat(call: Call, request: ConsumerGroupHeartbeatRequest) -> Heartbeat:
    owned, names = request.topic_partitions, request.subscribed_topic_names
    return Heartbeat(
        member_id=request.member_id or str(uuid.uuid4()),
        epoch=request.member_epoch,
        client_id=call.head.client_id or "",
        client_host=f"/{call.session.address}",  # as Java writes an address
        patterns=TopicPatterns(call.session.grant),
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        topics=None if names is None else frozenset(names),
        pattern=request.subscribed_topic_regex,
        assignor=request.server_assignor,
        owned=None
        if owned is None
        else frozenset((one.topic_id, number) for one in owned for number in one.partitions),
    )


def answer_beat(kind: type[Beaten], body: HeartbeatAnswer) -> Beaten:
    if body.error is not GroupError.NONE:
        code = Code[body.error]
        return kind(error_code=code, error_message=body.detail or code.name)
    given, row = body.assignment, kind.TopicPartitions
    rows = [] if given is None else [row(*one) for one in places_by_topic(given).items()]
    return kind(
        member_id=body.member_id,
        member_epoch=body.epoch,
        heartbeat_interval_ms=body.interval_ms,
        assignment=None if given is None else kind.Assignment(rows),
    )


def places_by_topic(places: Iterable[tuple[bytes, int]]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for topic_id, number in sorted(places):
        found.setdefault(topic_id, []).append(number)
    return found


# --- ConsumerGroupDescribe ------------------------------------------------------------------------


async def consumer_group_describe(
    call: Call, request: ConsumerGroupDescribeRequest
) -> ConsumerGroupDescribeResponse:
    def describe() -> list[_Described]:
        return [_described(call, request, name) for name in request.group_ids]

    return ConsumerGroupDescribeResponse(groups=await call.context.read(describe))


def _described(call: Call, request: ConsumerGroupDescribeRequest, name: str) -> _Described:
    try:
        find = coordinator_of(call).describe_consumers
        found = find_to_describe(call, name, find, kind="consumer")
        check_sees(call, (one for member in found.members for one in (*member[1], *member[2])))
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


def _shown_member(shown: ConsumerMemberState) -> ConsumerGroupDescribeResponse.Member:
    member = shown.member
    return ConsumerGroupDescribeResponse.Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=member.epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=sorted(member.topics),
        subscribed_topic_regex=member.pattern,
        assignment=_shown_places(shown.assignment),
        target_assignment=_shown_places(shown.target),
        member_type=_CONSUMER_TYPE if member.classic is None else _CLASSIC_TYPE,
    )


def _shown_places(places: list[TopicPartitions]) -> ConsumerGroupDescribeResponse.Assignment:
    kind = ConsumerGroupDescribeResponse.TopicPartitions
    return ConsumerGroupDescribeResponse.Assignment(
        [kind(one.topic_id, one.topic, one.partitions) for one in places]
    )
