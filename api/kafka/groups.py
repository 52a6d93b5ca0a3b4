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
from tierlog.api.kafka.error_codes import Code, text_of
from tierlog.api.kafka.nodes import Node, node_of, nodes_of, own_id
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
from tierlog.broker.group_coordinator.groups import MAX_NAME_LENGTH
from tierlog.broker.share_coordinator.share_groups import ShareGroups
from tierlog.broker.topics.coordinator_log import CoordinatorLog
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
Kept = CoordinatorLog | ShareGroups
_BATCHED_FROM: Final = 4  # FindCoordinator: several keys
_GROUP, _TRANSACTION = 0, 1  # types of keys
_LEAVE_SEVERAL_FROM: Final = 3
_ID_REQUIRED_FROM, _NULL_PROTOCOL_FROM, _SKIP_FROM = 4, 7, 9  # JoinGroup


# --- FindCoordinator ------------------------------------------------------------------------------


def find_coordinator(
    call: Call, request: FindCoordinatorRequest
) -> Answer | Coroutine[Any, Any, Answer]:
    """Find the leader of the partition that the key belongs to: without a cluster, this broker."""
    if call.context.broker.cluster is None:
        return _found(call, request, "")
    return _find_in_cluster(call, request)


async def _find_in_cluster(call: Call, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    kept, problem = _kept(call, request.key_type), ""
    if kept is not None:
        try:
            await call.context.write(kept.ensure_topic)
        except (TierlogError, OSError) as error:
            problem = text_of(error) or "it cannot be created now"
    found = _found(call, request, problem)
    cluster = call.context.broker.cluster
    if cluster is not None and _is_missing(found):  # another broker may have just come to lead it
        await call.context.write(cluster.ask_who_leads)
        found = _found(call, request, problem)
    return found


def _is_missing(found: FindCoordinatorResponse) -> bool:
    codes = [one.error_code for one in found.coordinators] or [found.error_code]
    return Code.COORDINATOR_NOT_AVAILABLE in codes


def _kept(call: Call, key_type: int) -> CoordinatorLog | None:
    broker = call.context.broker
    if key_type == _GROUP:
        return broker.groups.log
    return broker.transactions.log if key_type == _TRANSACTION else None


def _found(call: Call, request: FindCoordinatorRequest, problem: str) -> FindCoordinatorResponse:
    """`problem`: why there is no log to find a coordinator by."""
    if call.version >= _BATCHED_FROM:
        keys = request.coordinator_keys
        found = [_coordinator(call, request.key_type, key, problem) for key in keys]
        return FindCoordinatorResponse(coordinators=found)
    one = _coordinator(call, request.key_type, request.key, problem)
    return FindCoordinatorResponse(
        error_code=one.error_code,
        error_message=one.error_message,
        node_id=one.node_id,
        host=one.host,
        port=one.port,
    )


def _coordinator(
    call: Call, key_type: int, key: str, problem: str
) -> FindCoordinatorResponse.Coordinator:
    code, node = Code.NONE, None
    if key_type == _GROUP:
        code = check_group(call, key) or Code.NONE
    elif key_type == _TRANSACTION:
        code = check_transactional_id(call, key) or Code.NONE
    else:
        code = Code.INVALID_REQUEST
    if code is Code.NONE:
        node = None if problem else _home(call, _kept(call, key_type), key)
        code = Code.NONE if node is not None else Code.COORDINATOR_NOT_AVAILABLE
    if node is None:
        return FindCoordinatorResponse.Coordinator(
            key=key, node_id=-1, port=-1, error_code=code, error_message=problem or code.name
        )
    return FindCoordinatorResponse.Coordinator(
        key=key, node_id=node.node_id, host=node.host, port=node.port
    )


def _home(call: Call, kept: CoordinatorLog | None, key: str) -> Node | None:
    """None if nobody is known to have it: the client asks again."""
    assert kept is not None, "its type was checked"
    if call.context.broker.cluster is not None:
        try:
            kept.check_here(key)
        except TierlogError as error:
            return node_of(error)
    return next((one for one in nodes_of(call) if one.node_id == own_id(call)), None)


def check_transactional_id(call: Call, transactional_id: str) -> Code | None:
    """Why the client may not use it; None if it may."""
    try:
        call.session.grant.check_transactional_id(transactional_id)
    except Forbidden:
        return Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return None if transactional_id else Code.INVALID_REQUEST


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
    call: Call,
    kept: Kept,
    key: str,
    make: Callable[[], Answer | Later],
    refuse: Callable[[Code], Answer],
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    """Call `make` once the coordinator of this group or transactional id can be called; at once,
    where it already can.
    """
    if call.context.broker.cluster is None and kept.is_ready_for(key):
        return make()
    return _when_ready(call, kept, key, make, refuse)


async def _when_ready(
    call: Call,
    kept: Kept,
    key: str,
    make: Callable[[], Answer | Later],
    refuse: Callable[[Code], Answer],
) -> Answer | Later:
    """In a cluster an answer counts if it is this broker's to give, before and after."""
    try:
        await prepare_for(call, kept, key)
        answer = make()
        _check_here(call, kept, key)
    except (TierlogError, OSError) as error:
        return refuse(coordinator_code(error))
    return answer


async def prepare_for(call: Call, kept: Kept, key: str) -> None:
    """Wait until the coordinator of this key can be called. Raises what keeps it from that."""
    if not kept.is_ready_for(key):
        await call.context.write(kept.prepare_for, key)
    _check_here(call, kept, key)


def _check_here(call: Call, kept: Kept, key: str) -> None:
    if call.context.broker.cluster is not None:
        kept.check_ready(key)


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

    if (code := check_group(call, request.group_id)) is not None:
        return refuse(code)
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

    return when_ready(call, call.context.broker.groups.log, request.group_id, make, refuse)


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

    return when_ready(call, call.context.broker.groups.log, request.group_id, make, refuse)


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

    return when_ready(call, call.context.broker.groups.log, request.group_id, make, refuse)


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

    return when_ready(call, call.context.broker.groups.log, request.group_id, make, refuse)
