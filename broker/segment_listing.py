"""The segments of a partition as one list, and the bytes of any of them, whichever tier has them.

* Oldest first, without gaps or overlaps: from the manifest below the local log start, from local
  disk from there on. A local segment that the manifest has too is `both`.
* A segment's ETag is made of topic id, size and CRC-32C: the same for the same bytes in either
  tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from broker.partition import Partition
from hot_tier.segment_views import SegmentView
from manifest.state import SegmentEntry
from record_format.errors import UnknownSegment
from record_format.file_slice import FileSlice, OpenFile


class SegmentListing(NamedTuple):
    """One line of `GET …/segments`. `object_key` is whole; `crc32c` None while active."""

    base_offset: int
    last_offset: int
    size_bytes: int
    records: int | None
    min_timestamp: int | None
    max_timestamp: int | None
    tier: Literal["hot", "cold", "both"]
    active: bool
    object_key: str | None
    crc32c: str | None


class SegmentBytes(NamedTuple):
    """One segment's bytes. `etag` is None for the active segment, which grows."""

    size_bytes: int
    etag: str | None
    tier: Literal["hot", "cold"]
    source: SegmentEntry | OpenFile


def iter_segments(partition: Partition, *, from_offset: int = 0) -> Iterator[SegmentListing]:
    """Those that end at or above `from_offset` and hold something at or above the log start.

    Facts of a local segment that were never counted are counted now: it may read the segment.
    """
    from_offset = max(from_offset, partition.log.log_start_offset)
    local = partition.log.segments()
    local_start = local[0].base_offset
    cold = partition.cold
    if cold is not None:
        for entry in cold.entries(from_offset):
            if entry.base_offset >= local_start:
                break
            yield _cold_listing(entry, object_key=cold.full_key(entry.log_key))
    covered = {entry.base_offset: entry for entry in cold.entries(local_start)} if cold else {}
    for view in local:
        if view.last_offset >= max(from_offset, view.base_offset):
            yield _local_listing(partition, view, covered.get(view.base_offset))


def _cold_listing(entry: SegmentEntry, *, object_key: str) -> SegmentListing:
    return SegmentListing(
        base_offset=entry.base_offset,
        last_offset=entry.last_offset,
        size_bytes=entry.size_bytes,
        records=entry.record_count,
        min_timestamp=entry.min_timestamp,
        max_timestamp=_known(entry.max_timestamp),
        tier="cold",
        active=False,
        object_key=object_key,
        crc32c=f"{entry.log_crc32c:08x}",
    )


def _local_listing(
    partition: Partition, view: SegmentView, entry: SegmentEntry | None
) -> SegmentListing:
    log = partition.log
    facts = log.segment_facts(view.base_offset) if view.record_count is None else view
    object_key = None
    if entry is not None and partition.cold is not None:
        object_key = partition.cold.full_key(entry.log_key)
    return SegmentListing(
        base_offset=view.base_offset,
        last_offset=view.last_offset,
        size_bytes=view.size_bytes,
        records=facts.record_count,
        min_timestamp=facts.min_timestamp,
        max_timestamp=_known(facts.max_timestamp),
        tier="both" if entry is not None else "hot",
        active=view.active,
        object_key=object_key,
        crc32c=None if view.active else f"{log.segment_crc32c(view.base_offset):08x}",
    )


def _known(timestamp: int) -> int | None:
    return timestamp if timestamp >= 0 else None


def open_segment(partition: Partition, base_offset: int) -> SegmentBytes:
    """The segment that begins at `base_offset`; the active one up to the high watermark.

    Raises UnknownSegment.
    """
    partition.check_leadership()
    log = partition.log
    for view in log.segments():
        if view.base_offset == base_offset:
            size_bytes = view.size_bytes if not view.active else log.active_flushed_bytes
            etag = (
                None
                if view.active
                else _etag(log.topic_id, size_bytes, log.segment_crc32c(base_offset))
            )
            return SegmentBytes(size_bytes, etag, "hot", OpenFile(view.path))
    entry = next(partition.cold.entries(base_offset), None) if partition.cold else None
    if entry is None or entry.base_offset != base_offset:
        raise UnknownSegment(f"{partition} has no segment that begins at offset {base_offset}")
    etag = _etag(log.topic_id, entry.size_bytes, entry.log_crc32c)
    return SegmentBytes(entry.size_bytes, etag, "cold", entry)


def slices_of(
    partition: Partition, segment: SegmentBytes, *, start: int, end: int
) -> Iterator[FileSlice]:
    """Bytes [start, end) of a segment as slices of local files.

    A cold one's chunks are fetched one by one, as the iterator is asked: it may block.
    """
    assert 0 <= start <= end <= segment.size_bytes
    if start == end:
        return iter(())
    if isinstance(segment.source, OpenFile):
        return iter((FileSlice(segment.source, start, end - start),))
    assert partition.cold is not None
    return partition.cold.byte_range(segment.source, start=start, end=end)


def _etag(topic_id: str, size_bytes: int, crc32c: int) -> str:
    return f'"{topic_id}-{size_bytes:x}-{crc32c:08x}"'
