"""The five calls on topics. Those that may wait for the disk run in a thread."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from fastapi import Depends, Response
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from tierlog.api.http import strict_json
from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import (
    JsonResponse,
    TheContext,
    TheGrant,
    body_as,
    query_as,
)
from tierlog.api.http.schemas import TopicList
from tierlog.broker.topic_registry import INTERNAL_PREFIX
from tierlog.broker.topics import TopicState
from tierlog.record_format.consumer_offsets import TOPIC as CONSUMER_OFFSETS
from tierlog.record_format.errors import Forbidden
from tierlog.record_format.topic_rules import ConfigValue

_FEW: Final = Meta(max_length=100)  # several times as many keys as there are


class CreateTopic(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    partitions: int = 1
    config: Annotated[dict[str, ConfigValue], _FEW] = {}


class AlterTopic(msgspec.Struct, forbid_unknown_fields=True):
    """null resets a key to its default."""

    config: Annotated[dict[str, ConfigValue | None], _FEW] | UnsetType = UNSET
    partitions: int | UnsetType = UNSET


class ListTopicsQuery(msgspec.Struct, forbid_unknown_fields=True):
    prefix: str = ""
    internal: bool = False


async def create_topic(
    context: TheContext, grant: TheGrant, body: Annotated[CreateTopic, body_as(CreateTopic)]
) -> Response:
    grant.check_topic(body.name)
    if body.name.startswith(INTERNAL_PREFIX):  # no client could produce to it, or delete it
        raise Forbidden(f"{body.name!r}: names that begin with {INTERNAL_PREFIX} are reserved")
    created = await context.write(
        context.broker.create_topic,
        body.name,
        partitions=body.partitions,
        config=body.config,
    )
    location = {"location": f"/v1/topics/{created.name}"}
    return JsonResponse(_shown(context, created), status=201, headers=location)


async def list_topics(
    context: TheContext,
    grant: TheGrant,
    query: Annotated[ListTopicsQuery, query_as(ListTopicsQuery)],
) -> Response:
    topics = await context.read(  # there may be many
        context.broker.list_topics, prefix=query.prefix, internal=query.internal
    )
    return JsonResponse(TopicList([one for one in topics if grant.sees_topic(one.name)]))


async def get_topic(context: TheContext, topic: str) -> Response:
    described = await context.read(context.broker.topic(topic).describe)
    return JsonResponse(_shown(context, described))


async def _known_topic(context: TheContext, topic: str) -> str:
    return context.broker.topic(topic).record.name


async def alter_topic(
    context: TheContext,
    topic: Annotated[str, Depends(_known_topic)],  # UnknownTopic precedes errors of the body
    body: Annotated[AlterTopic, body_as(AlterTopic)],
) -> Response:
    if topic == CONSUMER_OFFSETS:
        _check_keeps_offsets(body)
    if body.config is UNSET and body.partitions is UNSET:
        strict_json.refuse_field("", "nothing to change: give config or partitions")
    altered = await context.write(
        context.broker.alter_topic,
        topic,
        config=None if isinstance(body.config, UnsetType) else body.config,
        partitions=None if isinstance(body.partitions, UnsetType) else body.partitions,
    )
    if body.partitions is not UNSET:
        _wake_tails(context, topic)
    return JsonResponse(_shown(context, altered))


def _wake_tails(context: Context, name: str) -> None:
    """Wake the tails of the topic, so that they include its new partitions."""
    for partition in list(context.broker.topic(name).partitions.values()):
        context.waiting.wake_all(partition)


def _check_keeps_offsets(body: AlterTopic) -> None:
    """Raises Forbidden for a change that would lose the groups' committed offsets."""
    if body.partitions is not UNSET:
        raise Forbidden(
            f"{CONSUMER_OFFSETS}: partitions cannot be added, since groups are found by their hash"
        )
    config = {} if isinstance(body.config, UnsetType) else body.config
    if config.get("cleanup.policy", "compact") != "compact":
        raise Forbidden(
            f"{CONSUMER_OFFSETS}: cleanup.policy has to be compact, or offsets would expire"
        )
    for key in ("retention.ms", "retention.bytes"):  # adopted from Kafka, it is not compacted
        if str(config.get(key, -1)) != "-1":
            raise Forbidden(f"{CONSUMER_OFFSETS}: {key} has to be -1, or offsets would expire")


async def delete_topic(context: TheContext, topic: str) -> Response:
    if context.broker.topic(topic).record.internal:
        raise Forbidden(f"{topic} is internal: HTTP clients cannot delete it")
    await context.write(context.broker.delete_topic, topic)
    return Response(status_code=204)


def _shown(context: Context, topic: TopicState) -> TopicState:
    """Shorten local paths, as in problem documents."""
    damaged = [
        replace(one, detail=context.shorten_paths(one.detail)) for one in topic.damaged_partitions
    ]
    return replace(topic, damaged_partitions=damaged)
