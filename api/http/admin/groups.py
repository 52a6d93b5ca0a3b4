"""Calls on consumer groups. All wait for a flush or a lock, so all run in a thread.

A token with a topic prefix sees, commits and deletes only offsets of topics with that prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from fastapi import Depends, Response
from msgspec import Meta

from tierlog.api.http import strict_json
from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import JsonResponse, TheContext, TheGrant, body_as
from tierlog.api.http.schemas import GroupList, GroupState, GroupSummary
from tierlog.api.http.settings import MAX_OFFSET, MAX_PARTITION
from tierlog.api.serving.grants import Grant
from tierlog.broker.groups import NewOffset, OffsetState, check_group_name
from tierlog.record_format.errors import UnknownGroup


class OffsetToCommit(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    partition: Annotated[int, Meta(ge=0, le=MAX_PARTITION)]
    offset: Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
    metadata: str | None = None
    topic_id: str | None = None


class OffsetsToCommit(msgspec.Struct, forbid_unknown_fields=True):
    offsets: Annotated[list[OffsetToCommit], Meta(min_length=1)]


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
    await context.write(context.broker.groups.commit_offsets, group, offsets)
    return Response(status_code=204)


async def get_group(context: TheContext, grant: TheGrant, group: GroupName) -> Response:
    offsets = await context.read(context.broker.groups.group, group)
    visible = _visible(offsets, grant)
    if offsets and not visible:
        raise _unknown(group)
    return JsonResponse(GroupState(group, visible))


async def list_groups(context: TheContext, grant: TheGrant) -> Response:
    return JsonResponse(await context.read(_summaries, context, grant))


def _summaries(context: Context, grant: Grant) -> GroupList:
    shown = []
    for name, offsets in context.broker.groups.all_groups():
        visible = _visible(offsets, grant)
        if visible:
            topics = sorted({one.topic for one in visible})
            lag = sum(one.lag for one in visible)
            shown.append(GroupSummary(name, topics, len(visible), lag))
    return GroupList(shown)


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
