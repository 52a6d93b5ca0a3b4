"""Calls on consumer groups. All wait for a flush or a lock, so all run in a thread.

A token with a topic prefix sees, commits and deletes only offsets of topics with that prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from tierlog.api.http import strict_json
from tierlog.api.http.access.scopes import Grant
from tierlog.api.http.context import Context
from tierlog.api.http.control_requests import json_body
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.responses import Response, json_response
from tierlog.api.http.schemas import GroupList, GroupState, GroupSummary
from tierlog.api.http.settings import MAX_OFFSET, MAX_PARTITION
from tierlog.broker.groups.groups import OffsetState
from tierlog.broker.groups.requests import NewOffset, check_group_name
from tierlog.record_format.errors import UnknownGroup


class OffsetToCommit(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    partition: Annotated[int, Meta(ge=0, le=MAX_PARTITION)]
    offset: Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
    metadata: str | None = None
    topic_id: str | None = None


class OffsetsToCommit(msgspec.Struct, forbid_unknown_fields=True):
    offsets: Annotated[list[OffsetToCommit], Meta(min_length=1)]


async def commit_offsets(context: Context, exchange: Exchange) -> Response:
    group = _group(exchange)
    body = await json_body(context, exchange, OffsetsToCommit)
    if (count := len(body.offsets)) > context.settings.records_max:
        limit = context.settings.records_max
        strict_json.refuse_field("offsets", f"at most {limit} in a request, not {count}")
    for entry in body.offsets:
        exchange.grant.check_topic(entry.topic)
    offsets = [
        NewOffset(entry.topic, entry.partition, entry.offset, entry.metadata or "", entry.topic_id)
        for entry in body.offsets
    ]
    await context.write(context.broker.groups.commit, group, offsets)
    return Response(204, [])


async def get_group(context: Context, exchange: Exchange) -> Response:
    group = _group(exchange)
    offsets = await context.read(context.broker.groups.group, group)
    visible = _visible(offsets, exchange.grant)
    if offsets and not visible:
        raise _unknown(group)
    return json_response(GroupState(group, visible))


async def list_groups(context: Context, exchange: Exchange) -> Response:
    return json_response(await context.read(_summaries, context, exchange.grant))


def _summaries(context: Context, grant: Grant) -> GroupList:
    shown = []
    for name, offsets in context.broker.groups.all_groups():
        visible = _visible(offsets, grant)
        if visible:
            topics = sorted({one.topic for one in visible})
            lag = sum(one.lag for one in visible)
            shown.append(GroupSummary(name, topics, len(visible), lag))
    return GroupList(shown)


async def delete_group(context: Context, exchange: Exchange) -> Response:
    group, grant = _group(exchange), exchange.grant

    def check(topics: set[str]) -> None:
        if not any(map(grant.sees_topic, topics)):
            raise _unknown(group)
        for topic in topics:
            grant.check_topic(topic)

    await context.write(context.broker.groups.delete, group, check=check)
    return Response(204, [])


def _group(exchange: Exchange) -> str:
    name = exchange.params["group"]
    check_group_name(name)
    return name


def _unknown(group: str) -> UnknownGroup:
    return UnknownGroup(f"there is no group {group!r}")


def _visible(offsets: Iterable[OffsetState], grant: Grant) -> list[OffsetState]:
    return [one for one in offsets if grant.sees_topic(one.topic)]
