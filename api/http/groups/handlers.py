"""Calls on consumer groups. All wait for a flush or a lock, so all run in a thread.

A token with a topic prefix sees, commits and deletes only offsets of topics with that prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

import msgspec
from fastapi import Depends, Response
from msgspec import Meta

from tierlog.api.http import strict_json
from tierlog.api.http.cluster.splitting import ask_others
from tierlog.api.http.context import AllCompleted, Context
from tierlog.api.http.control_routes import (
    JsonResponse,
    TheContext,
    TheExchange,
    TheGrant,
    body_as,
    query_as,
)
from tierlog.api.http.schemas import (
    AssignedTopic,
    GroupList,
    GroupMember,
    GroupState,
    GroupSummary,
)
from tierlog.api.http.settings import MAX_OFFSET, MAX_PARTITION
from tierlog.api.serving.grants import Grant
from tierlog.broker.broker import Broker
from tierlog.broker.group_coordinator.consumer_protocol import decode_assignment
from tierlog.broker.group_coordinator.group_events import Identity, State
from tierlog.broker.group_coordinator.group_states import SHARE, MemberState
from tierlog.broker.group_coordinator.group_states import GroupState as Described
from tierlog.broker.group_coordinator.groups import NewOffset, OffsetState, check_group_name
from tierlog.record_format.errors import (
    ELSEWHERE,
    ConcurrentTransactions,
    TierlogError,
    UnknownGroup,
)


class OffsetToCommit(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    partition: Annotated[int, Meta(ge=0, le=MAX_PARTITION)]
    offset: Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
    metadata: str | None = None
    topic_id: str | None = None


class OffsetsToCommit(msgspec.Struct, forbid_unknown_fields=True):
    """`member_id` and `generation`: of a member; others may commit while nobody is in the group."""

    offsets: Annotated[list[OffsetToCommit], Meta(min_length=1)]
    member_id: Annotated[str, Meta(max_length=255)] = ""
    generation: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1


async def _checked(context: TheContext, group: str) -> str:
    check_group_name(group)
    check_here(context, group)
    return group


def check_here(context: Context, group: str) -> None:
    """Raises NotLeader or LeaderUnknown if another broker of the cluster coordinates it."""
    if context.broker.cluster is not None:
        context.broker.groups.log.check_here(group)


GroupName = Annotated[str, Depends(_checked)]


async def commit_offsets(
    context: TheContext,
    grant: TheGrant,
    group: GroupName,
    body: Annotated[OffsetsToCommit, body_as(OffsetsToCommit)],
) -> Response:
    offsets = new_offsets(context, grant, body)
    await context.write(
        context.broker.groups.commit_offsets,
        group,
        offsets,
        member=Identity(body.member_id, None),
        generation=body.generation,
    )
    return Response(status_code=204)


def new_offsets(context: Context, grant: Grant, body: OffsetsToCommit) -> list[NewOffset]:
    """Raises InvalidRequest, Forbidden."""
    if (count := len(body.offsets)) > context.settings.records_max:
        limit = context.settings.records_max
        strict_json.refuse_field("offsets", f"at most {limit} in a request, not {count}")
    for entry in body.offsets:
        grant.check_topic(entry.topic)
    return [
        NewOffset(entry.topic, entry.partition, entry.offset, entry.metadata or "", entry.topic_id)
        for entry in body.offsets
    ]


class GroupQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`stable`: for who reads on from the offsets, and must not repeat what a transaction did."""

    stable: bool = False


async def get_group(
    context: TheContext,
    grant: TheGrant,
    group: GroupName,
    query: Annotated[GroupQuery, query_as(GroupQuery)],
) -> Response:
    confirmed = context.broker.groups.confirm(group)
    await AllCompleted([confirmed])
    confirmed.result()
    state = await context.read(_settled_state, context.broker, grant, group, stable=query.stable)
    return JsonResponse(state)


def _settled_state(broker: Broker, grant: Grant, name: str, *, stable: bool) -> GroupState:
    groups = broker.groups
    groups.settle()
    if stable and groups.unstable(name):
        detail = f"a transaction in progress has offsets of group {name!r}"
        raise ConcurrentTransactions(detail)
    return group_state(broker, grant, name)


def group_state(broker: Broker, grant: Grant, name: str) -> GroupState:
    """As far as the token may see it. Raises UnknownGroup, and why it is not known wholly."""
    found, failures = known_group_state(broker, grant, name)
    if failures:
        raise failures[0]
    return found


def known_group_state(
    broker: Broker, grant: Grant, name: str
) -> tuple[GroupState, list[TierlogError]]:
    """As `group_state`; and why a share group's other offsets are not known."""
    failures: list[TierlogError] = []
    now = broker.groups.coordinator.describe(name)
    try:
        is_share = now is not None and now.type == SHARE
        if is_share:
            offsets, failures = broker.share_groups.offsets(name)
        else:
            offsets = broker.groups.group(name)
    except UnknownGroup:
        if now is None or (grant.topics and not now.members):
            raise
        offsets = []
    visible = _visible(offsets, grant)
    members = [_member(one, grant) for one in now.members] if now is not None else []
    if grant.topics and not visible and not any(one.assignment for one in members):
        raise failures[0] if failures else _unknown(name)
    now = now or Described(name, State.EMPTY, 0)
    described = (now.state, now.generation, now.protocol_type, members, now.type)
    return GroupState(name, visible, *described), failures


def _member(member: MemberState, grant: Grant) -> GroupMember:
    assigned = sorted(decode_assignment(member.assignment).items())
    return GroupMember(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        [AssignedTopic(*one) for one in assigned if grant.sees_topic(one[0])],
    )


async def list_groups(context: TheContext, grant: TheGrant, exchange: TheExchange) -> Response:
    here = context.read(_summaries, context, grant)
    found, others = await asyncio.gather(here, ask_others(context, exchange, GroupList))
    groups = [one for part in (found, *others) for one in part.groups]
    return JsonResponse(GroupList(sorted(groups, key=lambda one: one.group)))


def _summaries(context: Context, grant: Grant) -> GroupList:
    shown = []
    for name in context.broker.groups.names():
        with suppress(UnknownGroup, *ELSEWHERE):  # deleted meanwhile, or of others
            shown.append(_summary(group_state(context.broker, grant, name)))
    return GroupList(shown)


def _summary(state: GroupState) -> GroupSummary:
    assigned = {row.topic for member in state.members for row in member.assignment}
    return GroupSummary(
        state.group,
        sorted(assigned | {one.topic for one in state.offsets}),
        len(state.offsets),
        sum(one.lag for one in state.offsets),
        state.state,
        len(state.members),
        state.type,
    )


async def delete_group(context: TheContext, grant: TheGrant, group: GroupName) -> Response:
    def check(topics: set[str]) -> None:
        is_nobodys = not topics and not grant.topics  # without offsets, it is nobody's of a prefix
        if not is_nobodys and not any(map(grant.sees_topic, topics)):
            raise _unknown(group)
        for topic in topics:
            grant.check_topic(topic)

    await context.write(context.broker.delete_group, group, check=check)
    return Response(status_code=204)


def _unknown(group: str) -> UnknownGroup:
    return UnknownGroup(f"there is no group {group!r}")


def _visible(offsets: Iterable[OffsetState], grant: Grant) -> list[OffsetState]:
    return [one for one in offsets if grant.sees_topic(one.topic)]
