"""Calls on a partition that carry no records: offsets, segments, manifest, trim."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import Response
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.http.control_routes import (
    JsonResponse,
    TheContext,
    ThePartition,
    body_as,
    query_as,
)
from tierlog.api.http.fetch.reading import find_time, parse_timestamp
from tierlog.api.http.schemas import (
    EpochState,
    GapState,
    ManifestSegment,
    ManifestState,
    OffsetAtTime,
    OffsetsState,
    SegmentList,
    Trimmed,
)
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.broker.partition import Partition
from tierlog.broker.segment_listing import SegmentState, iter_segments
from tierlog.manifest.state import Manifest
from tierlog.record_format.errors import Forbidden
from tierlog.record_format.segment_entry import SegmentEntry

PAGE: Final = 1000
Segment = TypeVar("Segment", SegmentState, SegmentEntry)
FromOffset = Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
Limit = Annotated[int, Meta(ge=1, le=10_000)]


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
    query: Annotated[OffsetsQuery, query_as(OffsetsQuery)],
    partition: ThePartition,
) -> Response:
    partition.check_leadership()  # once taken over, this log is out of date
    if isinstance(query.timestamp, UnsetType):
        return JsonResponse(OffsetsState(**partition.offsets()._asdict()))
    timestamp = parse_timestamp(query.timestamp, loc="timestamp")
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
    if context.broker.topic(topic).record.internal:  # as Kafka's DeleteRecords
        raise Forbidden(f"{topic} is internal: HTTP clients cannot trim it")
    log_start = await context.write_cold(
        context.broker.trim, topic, partition.number, body.before_offset
    )
    context.waiting.wake_all(partition)  # a long poll may be waiting at a trimmed offset
    return JsonResponse(Trimmed(log_start))
