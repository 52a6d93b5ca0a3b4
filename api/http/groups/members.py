"""Membership in a group over HTTP: join, heartbeat, leave.

* The members are those of Kafka's classic protocol, beside Kafka's consumers, with whichever of
  their assignors these have. Who joins reads nothing until it is answered, so it owns nothing, as
  cooperative members have to say. A member that leads has nothing to do: the broker assigns for it.
* Joining waits for the others: one call is Kafka's JoinGroup and SyncGroup, repeated if another
  rebalance begins meanwhile. A client that disconnects meanwhile, and was new, has left.
* A refusal is 409 `group-refused`, with Kafka's name of the error as `reason`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Final, NoReturn, TypeVar

import msgspec
from fastapi import Response
from msgspec import Meta

from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import (
    JsonResponse,
    TheContext,
    TheExchange,
    TheGrant,
    body_as,
)
from tierlog.api.http.groups.handlers import GroupName, check_here
from tierlog.api.http.schemas import AssignedTopic, Membership
from tierlog.broker.group_coordinator.consumer_protocol import (
    CONSUMER,
    COOPERATIVE,
    RANGE,
    ROUND_ROBIN,
    Subscription,
    assign,
    decode_assignment,
    encode_assignment,
    encode_subscription,
    read_subscription,
)
from tierlog.broker.group_coordinator.group_events import (
    HTTP_HOST,
    NO_MEMBER,
    GroupError,
    Identity,
    Join,
    Joined,
    Protocol,
    Sync,
    Synced,
    refusal,
)
from tierlog.record_format.errors import GroupRefused, ShuttingDown, Starting, UnknownTopic

T = TypeVar("T")
TOPICS_MAX: Final = 1000
_ASSIGNORS: Final = (RANGE, ROUND_ROBIN, COOPERATIVE)  # as preferred; what clients have by default


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True):
    topics: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=249)]],
        Meta(min_length=1, max_length=TOPICS_MAX),
    ]
    member_id: Annotated[str, Meta(max_length=255)] = NO_MEMBER
    instance_id: Annotated[str, Meta(min_length=1, max_length=249)] | None = None
    client_id: Annotated[str, Meta(min_length=1, max_length=100)] = HTTP_HOST
    session_timeout_ms: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 45_000
    rebalance_timeout_ms: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 60_000


class HeartbeatRequest(msgspec.Struct, forbid_unknown_fields=True):
    generation: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    instance_id: Annotated[str, Meta(min_length=1, max_length=249)] | None = None


async def join_group(
    context: TheContext,
    grant: TheGrant,
    exchange: TheExchange,
    group: GroupName,
    body: Annotated[JoinRequest, body_as(JoinRequest)],
) -> Response:
    for topic in body.topics:
        grant.check_topic(topic)
    await _until_ready(context, group)
    joining = _Joining(context, group, body)
    work = asyncio.ensure_future(joining.run())
    gone = asyncio.ensure_future(exchange.wait_for_disconnect())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            joining.give_up()
        return JsonResponse(await work)
    finally:
        for task in (work, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def heartbeat(
    context: TheContext,
    group: GroupName,
    member: str,
    body: Annotated[HeartbeatRequest, body_as(HeartbeatRequest)],
) -> Response:
    await _until_ready(context, group)
    who = Identity(member, body.instance_id)
    _check(group, context.broker.groups.coordinator.heartbeat(group, who, body.generation))
    return Response(status_code=204)


async def leave_group(context: TheContext, group: GroupName, member: str) -> Response:
    await _until_ready(context, group)
    (error,) = context.broker.groups.coordinator.leave(group, [Identity(member, None)])
    _check(group, error)
    return Response(status_code=204)


async def _until_ready(context: Context, group: str) -> None:
    if not context.broker.groups.log.is_ready_for(group):
        await context.write(context.broker.groups.log.prepare_for, group)
        check_here(context, group)  # before, there were no offsets, and no coordinator


def _check(group: str, error: GroupError) -> None:
    if error is GroupError.NOT_COORDINATOR:
        raise ShuttingDown("the broker is shutting down")
    if error is GroupError.COORDINATOR_NOT_AVAILABLE:
        raise Starting(f"group {group!r} cannot be written, or is being deleted: try again")
    if error is not GroupError.NONE:
        raise refusal(group, error)


class _Joining:
    """One call of a member that joins, until it has its partitions."""

    def __init__(self, context: Context, group: str, body: JoinRequest) -> None:
        self._context, self._group, self._body = context, group, body
        self._coordinator = context.broker.groups.coordinator
        self._member_id = body.member_id
        self._new_id = f"{body.instance_id or body.client_id}-{uuid.uuid4()}"

    def give_up(self) -> None:
        """Leave, if the client cannot know its id, nor join again as an instance."""
        if self._body.member_id == NO_MEMBER and self._body.instance_id is None:
            self._coordinator.leave(self._group, [Identity(self._new_id, None)])

    async def run(self) -> Membership:
        while True:
            joined = await self._answer(self._join)
            _check(self._group, joined.error)
            self._member_id = joined.member_id
            synced = await self._answer(partial(self._sync, joined))
            if synced.error is GroupError.REBALANCE_IN_PROGRESS:
                continue
            _check(self._group, synced.error)
            assigned = sorted(decode_assignment(synced.assignment).items())
            rows = [AssignedTopic(topic, sorted(partitions)) for topic, partitions in assigned]
            return Membership(self._member_id, joined.generation, rows)

    def _join(self, reply: Callable[[Joined], None]) -> None:
        body = self._body
        join = Join(
            self._member_id,
            body.instance_id,
            body.client_id,
            HTTP_HOST,
            CONSUMER,
            tuple(Protocol(name, encode_subscription(body.topics)) for name in _ASSIGNORS),
            body.session_timeout_ms,
            body.rebalance_timeout_ms,
            self._new_id,
            requires_id=False,
        )
        self._coordinator.join(self._group, join, reply)

    def _sync(self, joined: Joined, reply: Callable[[Synced], None]) -> None:
        assigns = joined.leader == joined.member_id and not joined.skip_assignment
        sync = Sync(
            joined.member_id,
            self._body.instance_id,
            joined.generation,
            CONSUMER,
            joined.protocol_name,
            self._assign(joined) if assigns else {},
        )
        self._coordinator.sync(self._group, sync, reply)

    def _assign(self, joined: Joined) -> dict[str, bytes]:
        """For all members. One whose subscription cannot be read gets nothing."""
        wanted: dict[str, Subscription] = {}
        for one in sorted(joined.members, key=lambda it: it.instance_id or it.member_id):
            wanted[one.member_id] = Subscription(frozenset(), (), None)
            with suppress(GroupRefused):
                wanted[one.member_id] = read_subscription(one.metadata)
        given = assign(joined.protocol_name or "", wanted, self._partitions)
        return {member: encode_assignment(it) for member, it in given.items()}

    def _partitions(self, topic: str) -> list[int]:
        try:
            return self._context.broker.topic(topic).numbers
        except UnknownTopic:
            return []

    async def _answer(self, begin: Callable[[Callable[[T], None]], None]) -> T:
        """What the coordinator answers. Raises ShuttingDown."""
        return await self._context.waiting.answer_later(begin, _as_it_is, stop=_shutting_down)


def _as_it_is(body: T) -> T:
    return body


def _shutting_down() -> NoReturn:
    raise ShuttingDown("the broker is shutting down")
