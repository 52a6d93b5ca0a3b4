"""FindCoordinator, and the calls of a group's members: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

* The coordinator answers; a JoinGroup or SyncGroup that waits is a future that it completes.
* Until the committed offsets are loaded and their topic exists, a call waits for that in a thread.
* When the server stops, whoever waits is told to look for the coordinator again.
* A client needs `read`, as over HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog

from tierlog.api.kafka.calls import Answer, Call, Later
from tierlog.api.kafka.context import NODE_ID
from tierlog.api.kafka.error_codes import Code
from tierlog.api.serving.grants import Scope
from tierlog.broker.group_coordinator.coordinator import GroupCoordinator, error_of
from tierlog.broker.group_coordinator.group_events import (
    NO_MEMBER,
    GroupError,
    Identity,
    Join,
    Joined,
    Protocol,
    Sync,
    Synced,
)
from tierlog.broker.groups import MAX_NAME_LENGTH
from tierlog.record_format.errors import Forbidden, Starting, TierlogError
from tierlog.record_format.kafka_messages.messages import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")
_BATCHED_FROM: Final = 4  # FindCoordinator: several keys
_GROUP, _TRANSACTION = 0, 1  # types of keys
_LEAVE_SEVERAL_FROM: Final = 3
_ID_REQUIRED_FROM, _NULL_PROTOCOL_FROM, _SKIP_FROM = 4, 7, 9  # JoinGroup


# --- FindCoordinator ------------------------------------------------------------------------------


def find_coordinator(call: Call, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    """Find this broker, for groups and for transactions."""
    if call.version >= _BATCHED_FROM:
        found = [_coordinator(call, request.key_type, key) for key in request.coordinator_keys]
        return FindCoordinatorResponse(coordinators=found)
    one = _coordinator(call, request.key_type, request.key)
    return FindCoordinatorResponse(
        error_code=one.error_code,
        error_message=one.error_message,
        node_id=one.node_id,
        host=one.host,
        port=one.port,
    )


def _coordinator(call: Call, key_type: int, key: str) -> FindCoordinatorResponse.Coordinator:
    code = Code.NONE
    if key_type == _GROUP:
        code = check_group(call, key) or Code.NONE
    elif key_type != _TRANSACTION:
        code = Code.INVALID_REQUEST
    if code is not Code.NONE:
        return FindCoordinatorResponse.Coordinator(
            key=key, node_id=-1, port=-1, error_code=code, error_message=code.name
        )
    host, port = call.advertised
    return FindCoordinatorResponse.Coordinator(key=key, node_id=NODE_ID, host=host, port=port)


def check_group(call: Call, name: str, scopes: tuple[Scope, ...] = (Scope.READ,)) -> Code | None:
    """Why the client may not use a group of this name; None if it may."""
    try:
        call.session.grant.check_scopes(scopes)
    except Forbidden:
        return Code.GROUP_AUTHORIZATION_FAILED
    return None if 1 <= len(name) <= MAX_NAME_LENGTH else Code.INVALID_GROUP_ID


# --- calls that wait for the coordinator ----------------------------------------------------------


def coordinator_of(call: Call) -> GroupCoordinator:
    return call.context.broker.groups.coordinator


def when_ready(
    call: Call, make: Callable[[], Answer | Later], refuse: Callable[[Code], Answer]
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    """Call `make` once the coordinator can be called; at once, where it already can."""
    if call.context.broker.groups.is_ready:
        return make()
    return _when_ready(call, make, refuse)


async def _when_ready(
    call: Call, make: Callable[[], Answer | Later], refuse: Callable[[Code], Answer]
) -> Answer | Later:
    try:
        await call.context.write(call.context.broker.groups.prepare)
    except (TierlogError, OSError) as error:
        return refuse(coordinator_code(error))
    return make()


def coordinator_code(error: BaseException) -> Code:
    """For what keeps the coordinator from its log."""
    if isinstance(error, Starting):
        return Code.COORDINATOR_LOAD_IN_PROGRESS
    return Code[error_of(error)]


# --- JoinGroup ------------------------------------------------------------------------------------


def join_group(
    call: Call, request: JoinGroupRequest
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    def refuse(code: Code) -> JoinGroupResponse:
        return _joined(call, Joined(GroupError.NONE, request.member_id), code)

    settings = call.context.broker.settings
    if (code := check_group(call, request.group_id)) is not None:
        return refuse(code)
    shortest, longest = (
        settings.group_min_session_timeout_ms,
        settings.group_max_session_timeout_ms,
    )
    if not shortest <= request.session_timeout_ms <= longest:
        return refuse(Code.INVALID_SESSION_TIMEOUT)
    join = _join(call, request)
    stopped = Joined(GroupError.NOT_COORDINATOR, request.member_id)

    def answer(body: Joined) -> Answer:
        return _joined(call, body, Code[body.error])

    def make() -> Later:
        return call.context.waiting.answer_later(
            lambda reply: coordinator_of(call).join(request.group_id, join, reply),
            answer,
            stop=lambda: answer(stopped),
        )

    return when_ready(call, make, refuse)


def _join(call: Call, request: JoinGroupRequest) -> Join:
    client_id = call.head.client_id or ""
    rebalance_ms = request.rebalance_timeout_ms
    return Join(
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        client_id=client_id,
        client_host=f"/{call.session.address}",  # as Java writes an address
        protocol_type=request.protocol_type,
        protocols=tuple(Protocol(one.name, bytes(one.metadata)) for one in request.protocols),
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=rebalance_ms if rebalance_ms >= 0 else request.session_timeout_ms,
        new_id=f"{request.group_instance_id or client_id}-{uuid.uuid4()}",
        requires_id=call.version >= _ID_REQUIRED_FROM,
        can_skip_assignment=call.version >= _SKIP_FROM,
    )


def _joined(call: Call, body: Joined, code: Code) -> JoinGroupResponse:
    has_null = call.version >= _NULL_PROTOCOL_FROM
    return JoinGroupResponse(
        error_code=code,
        generation_id=body.generation,
        protocol_type=body.protocol_type if has_null else None,
        protocol_name=body.protocol_name if has_null else body.protocol_name or "",
        leader=body.leader,
        skip_assignment=body.skip_assignment,
        member_id=body.member_id,
        members=[
            JoinGroupResponse.JoinGroupResponseMember(
                member_id=one.member_id, group_instance_id=one.instance_id, metadata=one.metadata
            )
            for one in body.members
        ],
    )


# --- SyncGroup ------------------------------------------------------------------------------------


def sync_group(
    call: Call, request: SyncGroupRequest
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    def refuse(code: Code) -> SyncGroupResponse:
        return SyncGroupResponse(error_code=code)

    if (code := check_group(call, request.group_id)) is not None:
        return refuse(code)
    sync = Sync(
        request.member_id,
        request.group_instance_id,
        request.generation_id,
        request.protocol_type,
        request.protocol_name,
        {one.member_id: bytes(one.assignment) for one in request.assignments},
    )

    def make() -> Later:
        return call.context.waiting.answer_later(
            lambda reply: coordinator_of(call).sync(request.group_id, sync, reply),
            _synced,
            stop=lambda: _synced(Synced(GroupError.NOT_COORDINATOR)),
        )

    return when_ready(call, make, refuse)


def _synced(body: Synced) -> Answer:
    return SyncGroupResponse(
        error_code=Code[body.error],
        protocol_type=body.protocol_type,
        protocol_name=body.protocol_name,
        assignment=body.assignment,
    )


# --- Heartbeat, LeaveGroup ------------------------------------------------------------------------


def heartbeat(
    call: Call, request: HeartbeatRequest
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    def refuse(code: Code) -> HeartbeatResponse:
        return HeartbeatResponse(error_code=code)

    if (code := check_group(call, request.group_id)) is not None:
        return refuse(code)
    who = Identity(request.member_id, request.group_instance_id)

    def make() -> HeartbeatResponse:
        error = coordinator_of(call).heartbeat(request.group_id, who, request.generation_id)
        return refuse(Code[error])

    return when_ready(call, make, refuse)


def leave_group(
    call: Call, request: LeaveGroupRequest
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    def refuse(code: Code) -> LeaveGroupResponse:
        return LeaveGroupResponse(error_code=code)

    if (code := check_group(call, request.group_id)) is not None:
        return refuse(code)
    if call.version >= _LEAVE_SEVERAL_FROM:
        leaving = [Identity(one.member_id, one.group_instance_id) for one in request.members]
    else:
        leaving = [Identity(request.member_id or NO_MEMBER, None)]

    def make() -> LeaveGroupResponse:
        errors = coordinator_of(call).leave(request.group_id, leaving)
        if call.version < _LEAVE_SEVERAL_FROM:
            return refuse(Code[errors[0]])
        return LeaveGroupResponse(
            members=[
                LeaveGroupResponse.MemberResponse(
                    member_id=who.member_id,
                    group_instance_id=who.instance_id,
                    error_code=Code[error],
                )
                for who, error in zip(leaving, errors, strict=True)
            ]
        )

    return when_ready(call, make, refuse)
