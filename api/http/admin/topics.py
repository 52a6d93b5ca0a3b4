"""Calls on topics and partitions that carry no records. Those that may wait for the disk or the
bucket run in a thread.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import islice
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import Depends, Response
from msgspec import UNSET, Meta, UnsetType, structs
from msgspec.structs import replace

from tierlog.api.http import strict_json
from tierlog.api.http.cluster.splitting import describe_whole
from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import (
    JsonResponse,
    TheContext,
    TheExchange,
    TheGrant,
    ThePartition,
    body_as,
    query_as,
)
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch.reading import (
    Position,
    find_cold,
    find_here,
    find_time,
    parse_timestamp,
)
from tierlog.api.http.schemas import (
    AlteredTopic,
    EpochState,
    GapState,
    ManifestSegment,
    ManifestState,
    OffsetAtTime,
    OffsetsState,
    SegmentList,
    TopicList,
    Trimmed,
)
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.broker.internal_topics import (
    check_may_alter,
    check_may_create,
    check_may_delete,
    check_may_trim,
)
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.segment_listing import SegmentState, iter_segments
from tierlog.broker.topics.topics import TopicState
from tierlog.hot_tier.config_words import in_words
from tierlog.manifest.state import Manifest
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.record_format.topic_rules import MAX_PARTITIONS, ConfigValue

_FEW: Final = Meta(max_length=100)  # several times as many keys as there are
PAGE: Final = 1000
_SEGMENT_AND_BATCH: Final = ("segment.bytes", "max.message.bytes")
_SMALL_SEGMENT: Final = "segment-smaller-than-batch"
Segment = TypeVar("Segment", SegmentState, SegmentEntry)
Assigned = Annotated[list[list[int]], Meta(max_length=MAX_PARTITIONS)]
FromOffset = Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
Limit = Annotated[int, Meta(ge=1, le=10_000)]


class CreateTopic(msgspec.Struct, forbid_unknown_fields=True):
    """`replication_factor`: `default.replication.factor` if there is none. `replicas`: the node ids
    of the brokers that are to have each partition, in the partitions' order; the first is to lead.
    """

    name: str
    partitions: int | UnsetType = UNSET
    config: Annotated[dict[str, ConfigValue], _FEW] = {}
    replication_factor: int | UnsetType = UNSET
    replicas: Assigned = []


class AlterTopic(msgspec.Struct, forbid_unknown_fields=True):
    """null resets a key to its default. `replicas`: of the partitions that are added."""

    config: Annotated[dict[str, ConfigValue | None], _FEW] | UnsetType = UNSET
    partitions: int | UnsetType = UNSET
    replicas: Assigned = []


class ListTopicsQuery(msgspec.Struct, forbid_unknown_fields=True):
    prefix: str = ""
    internal: bool = False


async def create_topic(
    context: TheContext,
    grant: TheGrant,
    exchange: TheExchange,
    body: Annotated[CreateTopic, body_as(CreateTopic)],
) -> Response:
    grant.check_topic(body.name)
    check_may_create(body.name)
    created = await context.write(
        context.broker.create_topic,
        body.name,
        partitions=_partition_count(body),
        config=body.config,
        replication_factor=None if body.replication_factor is UNSET else body.replication_factor,
        replicas=dict(enumerate(body.replicas)),
    )
    location = {"location": f"/v1/topics/{created.name}"}
    whole = await _whole(context, exchange, created)
    answer = _with_warnings(whole, body.config)
    return JsonResponse(answer, status=201, headers=location)


def _partition_count(body: CreateTopic) -> int:
    """Raises InvalidRequest."""
    given = None if isinstance(body.partitions, UnsetType) else body.partitions
    if body.replicas and given not in (None, len(body.replicas)):
        strict_json.refuse_field("replicas", f"{len(body.replicas)} for {given} partitions")
    return (len(body.replicas) or 1) if given is None else given


async def list_topics(
    context: TheContext,
    grant: TheGrant,
    query: Annotated[ListTopicsQuery, query_as(ListTopicsQuery)],
) -> Response:
    topics = await context.read(  # there may be many
        context.broker.list_topics, prefix=query.prefix, internal=query.internal
    )
    return JsonResponse(TopicList([one for one in topics if grant.sees_topic(one.name)]))


async def get_topic(context: TheContext, exchange: TheExchange, topic: str) -> Response:
    described = await context.read(context.broker.topic(topic).describe)
    return JsonResponse(await _whole(context, exchange, described))


async def _known_topic(context: TheContext, topic: str) -> str:
    return context.broker.topic(topic).record.name


async def alter_topic(
    context: TheContext,
    exchange: TheExchange,
    topic: Annotated[str, Depends(_known_topic)],  # UnknownTopic precedes errors of the body
    body: Annotated[AlterTopic, body_as(AlterTopic)],
) -> Response:
    changed = {} if isinstance(body.config, UnsetType) else body.config
    partitions = None if isinstance(body.partitions, UnsetType) else body.partitions
    check_may_alter(topic, config=changed, partitions=partitions)
    if body.config is UNSET and partitions is None:
        strict_json.refuse_field("", "nothing to change: give config or partitions")
    altered = await context.write(
        context.broker.alter_topic,
        topic,
        config=changed,
        partitions=partitions,
        replicas=_added_replicas(context, topic, body),
    )
    if partitions is not None:
        context.waiting.wake_topic(context.broker.topic(topic))
    whole = await _whole(context, exchange, altered)
    return JsonResponse(_with_warnings(whole, changed))


def _added_replicas(context: Context, topic: str, body: AlterTopic) -> dict[int, list[int]]:
    """Raises InvalidRequest."""
    first = context.broker.topic(topic).record.partitions
    added = 0 if isinstance(body.partitions, UnsetType) else body.partitions - first
    if body.replicas and len(body.replicas) != added:
        strict_json.refuse_field("replicas", f"{len(body.replicas)} for {added} new partitions")
    return dict(enumerate(body.replicas, first))


def _with_warnings(topic: TopicState, changed: Container[str]) -> AlteredTopic:
    """What will surprise about the settings that were given."""
    given = any(key in changed for key in _SEGMENT_AND_BATCH)
    text = _small_segments(topic.effective_config) if given else ""
    warnings = {_SMALL_SEGMENT: text} if text else {}
    return AlteredTopic(**structs.asdict(topic), warnings=list(warnings), warning_details=warnings)


def _small_segments(config: Mapping[str, ConfigValue]) -> str:
    """Why segments may be larger than was asked for; empty if they may not."""
    segment, batch = (config[key] for key in _SEGMENT_AND_BATCH)
    assert isinstance(segment, int)
    assert isinstance(batch, int)
    if segment >= batch:
        return ""
    sizes = [in_words(key, config[key]) for key in _SEGMENT_AND_BATCH]
    return (
        f"segment.bytes ({sizes[0]}) is less than max.message.bytes ({sizes[1]}): a batch is never "
        "cut, and a larger one makes a segment of its own size. Smaller requests, or a smaller "
        "max.message.bytes, keep segments small"
    )


async def delete_topic(context: TheContext, topic: str) -> Response:
    check_may_delete(context.broker.topic(topic).record.name)
    await context.write(context.broker.delete_topic, topic)
    return Response(status_code=204)


async def _whole(context: Context, exchange: Exchange, topic: TopicState) -> TopicState:
    """With what other brokers lead."""
    return await describe_whole(context, exchange, _shown(context, topic))


def _shown(context: Context, topic: TopicState) -> TopicState:
    """Shorten local paths, as in problem documents."""
    damaged = [
        replace(one, detail=context.shorten_paths(one.detail)) for one in topic.damaged_partitions
    ]
    return replace(topic, damaged_partitions=damaged)


class OffsetsQuery(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: str | UnsetType = UNSET


class PageQuery(msgspec.Struct, forbid_unknown_fields=True):
    from_offset: FromOffset = 0
    limit: Limit = PAGE


class ManifestQuery(msgspec.Struct, forbid_unknown_fields=True):
    version: Annotated[int, Meta(ge=0, le=MAX_OFFSET)] | UnsetType = UNSET
    from_offset: FromOffset = 0
    limit: Limit = PAGE


class Trim(msgspec.Struct, forbid_unknown_fields=True):
    before_offset: FromOffset


async def get_offsets(
    context: TheContext,
    exchange: TheExchange,
    query: Annotated[OffsetsQuery, query_as(OffsetsQuery)],
) -> Response:
    topic, number = exchange.topic, exchange.partition
    if isinstance(query.timestamp, UnsetType):
        here = context.broker.partition(topic, number)
        here.check_leadership()  # once taken over, this log is out of date
        return JsonResponse(OffsetsState(**here.offsets()._asdict()))
    partition = find_here(context, exchange, topic, number)
    timestamp = parse_timestamp(query.timestamp, loc="timestamp")
    if partition is None:
        position = Position(timestamp=timestamp)
        partition = await find_cold(context, exchange, position, topic=topic, partition=number)
    partition.check_leadership()
    found = await find_time(context, partition, timestamp)
    return JsonResponse(OffsetAtTime(*(found or (None, None))))


async def list_segments(
    context: TheContext,
    query: Annotated[PageQuery, query_as(PageQuery)],
    partition: ThePartition,
) -> Response:
    partition.check_leadership()  # the new owner's segments are others
    return JsonResponse(await context.read_cold(_segment_page, partition, query))


def _segment_page(partition: Partition, query: PageQuery) -> SegmentList:
    segments = iter_segments(partition, from_offset=query.from_offset)
    return SegmentList(*first_page(segments, query.limit))


def first_page(segments: Iterable[Segment], limit: int) -> tuple[list[Segment], int | None]:
    """At most `limit` segments, and where the next page begins; None at the end."""
    found = list(islice(segments, limit + 1))
    return found[:limit], found[limit].base_offset if len(found) > limit else None


async def get_manifest(
    context: TheContext,
    query: Annotated[ManifestQuery, query_as(ManifestQuery)],
    partition: ThePartition,
) -> Response:
    partition.check_leadership()  # the manifest known here is no longer in force
    return JsonResponse(await context.read_cold(_manifest_page, partition, query))


def _manifest_page(partition: Partition, query: ManifestQuery) -> ManifestState:
    version = None if isinstance(query.version, UnsetType) else query.version
    with partition.reporting_defunct():
        manifest = partition.manifest_version(version)
        entries = partition.manifest_entries(manifest, from_offset=query.from_offset)
        return _shown_manifest(partition, manifest, entries, limit=query.limit)


def _shown_manifest(
    partition: Partition, manifest: Manifest, entries: Iterable[SegmentEntry], *, limit: int
) -> ManifestState:
    shown, following = first_page(entries, limit)
    return ManifestState(
        topic=manifest.topic,
        topic_id=manifest.topic_id,
        partition=manifest.partition,
        version=manifest.version,
        created_ms=manifest.created_ms,
        leader_epoch=manifest.leader_epoch,
        owner=manifest.owner,
        log_start_offset=manifest.log_start_offset,
        end_offset=manifest.end_offset,
        epochs=[EpochState(one.epoch, one.start_offset, one.owner) for one in manifest.epochs],
        gaps=[GapState(gap.start_offset, gap.end_offset) for gap in manifest.gaps],
        segments=[_shown_entry(partition, entry) for entry in shown],
        next_from_offset=following,
    )


def _shown_entry(partition: Partition, entry: SegmentEntry) -> ManifestSegment:
    return ManifestSegment(
        base_offset=entry.base_offset,
        last_offset=entry.last_offset,
        size_bytes=entry.size_bytes,
        records=entry.record_count,
        min_timestamp=entry.min_timestamp,
        max_timestamp=entry.max_timestamp_or_none,
        leader_epoch=entry.leader_epoch,
        object_key=partition.object_key(entry.log_key),
        crc32c=f"{entry.log_crc32c:08x}",
        indexes_key=partition.object_key(entry.indexes_key),
        indexes_crc32c=f"{entry.indexes_crc32c:08x}",
        indexes_size_bytes=entry.indexes_size_bytes,
    )


async def trim(
    context: TheContext, topic: str, partition: ThePartition, body: Annotated[Trim, body_as(Trim)]
) -> Response:
    check_may_trim(context.broker.topic(topic).record.name)  # as Kafka's DeleteRecords
    log_start = await context.write_cold(
        context.broker.trim, topic, partition.number, body.before_offset
    )
    context.waiting.wake_all(partition)  # a long poll may be waiting at a trimmed offset
    return JsonResponse(Trimmed(log_start))
