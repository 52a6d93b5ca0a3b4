"""Calls on consumer groups. All wait for a flush or a lock, so all run in a thread.

A token with a topic prefix sees, commits and deletes only offsets of topics with that prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

import msgspec
from fastapi import Depends, Response
from msgspec import Meta

from tierlog.api.http import strict_json
from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import JsonResponse, TheContext, TheGrant, body_as
from tierlog.api.http.schemas import (
    AssignedTopic,
    GroupList,
    GroupMember,
    GroupState,
    GroupSummary,
)
from tierlog.api.http.settings import MAX_OFFSET, MAX_PARTITION
from tierlog.api.serving.grants import Grant
from tierlog.broker.group_coordinator.consumer_protocol import decode_assignment
from tierlog.broker.group_coordinator.coordinator import GroupState as Described
from tierlog.broker.group_coordinator.coordinator import MemberState
from tierlog.broker.group_coordinator.group_events import Identity, State
from tierlog.broker.groups import Groups, NewOffset, OffsetState, check_group_name
from tierlog.record_format.errors import UnknownGroup


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


async def _checked(group: str) -> str:
    check_group_name(group)
    return group


GroupName = Annotated[str, Depends(_checked)]


async def commit_offsets(
    context: TheContext,
    grant: TheGrant,
    group: GroupName,
    body: Annotated[OffsetsToCommit, body_as(OffsetsToCommit)],
) -> Response:
    if (count := len(body.offsets)) > context.settings.records_max:
        limit = context.settings.records_max
        strict_json.refuse_field("offsets", f"at most {limit} in a request, not {count}")
    for entry in body.offsets:
        grant.check_topic(entry.topic)
    offsets = [
        NewOffset(entry.topic, entry.partition, entry.offset, entry.metadata or "", entry.topic_id)
        for entry in body.offsets
    ]
    await context.write(
        context.broker.groups.commit_offsets,
        group,
        offsets,
        member=Identity(body.member_id, None),
        generation=body.generation,
    )
    return Response(status_code=204)


async def get_group(context: TheContext, grant: TheGrant, group: GroupName) -> Response:
    return JsonResponse(await context.read(group_state, context.broker.groups, grant, group))


def group_state(groups: Groups, grant: Grant, name: str) -> GroupState:
    """As far as the token may see it. Raises UnknownGroup."""
    now = groups.coordinator.describe(name)
    try:
        offsets = groups.group(name)
    except UnknownGroup:
        if now is None or (grant.topics and not now.members):
            raise
        offsets = []
    visible = _visible(offsets, grant)
    members = [_member(one, grant) for one in now.members] if now is not None else []
    if grant.topics and not visible and not any(one.assignment for one in members):
        raise _unknown(name)
    now = now or Described(name, State.EMPTY, 0)
    return GroupState(name, visible, now.state, now.generation, now.protocol_type, members)


def _member(member: MemberState, grant: Grant) -> GroupMember:
    assigned = sorted(decode_assignment(member.assignment).items())
    return GroupMember(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        [AssignedTopic(*one) for one in assigned if grant.sees_topic(one[0])],
    )


async def list_groups(context: TheContext, grant: TheGrant) -> Response:
    return JsonResponse(await context.read(_summaries, context, grant))


def _summaries(context: Context, grant: Grant) -> GroupList:
    shown = []
    groups = context.broker.groups
    for name in groups.names():
        with suppress(UnknownGroup):  # deleted meanwhile, or of others
            shown.append(_summary(group_state(groups, grant, name)))
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
    )


async def delete_group(context: TheContext, grant: TheGrant, group: GroupName) -> Response:
    def check(topics: set[str]) -> None:
        if not any(map(grant.sees_topic, topics)):
            raise _unknown(group)
        for topic in topics:
            grant.check_topic(topic)

    await context.write(context.broker.groups.delete, group, check=check)
    return Response(status_code=204)


def _unknown(group: str) -> UnknownGroup:
    return UnknownGroup(f"there is no group {group!r}")


def _visible(offsets: Iterable[OffsetState], grant: Grant) -> list[OffsetState]:
    return [one for one in offsets if grant.sees_topic(one.topic)]
