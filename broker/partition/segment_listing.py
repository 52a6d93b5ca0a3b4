"""Lists and counts the segments of a partition over both tiers, and reads the bytes of any of them.

* Oldest first, without overlaps: from the manifest below the local log start, from local disk above
  it. The tier of a local segment that the manifest has too is `both`.
* A gap that a restore left belongs to no segment.
* A segment's ETag consists of topic id, size and CRC-32C: it is the same for the same bytes in
  either tier.
* What is local and not in the bucket is the offload lag: 0 if remote storage is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from tierlog.broker.partition.partition import Partition, Readable
from tierlog.host.file_slice import FileSlice, OpenFile
from tierlog.host.waiting import Wait
from tierlog.hot_tier.sealed_segments import SegmentView
from tierlog.hot_tier.segment import modified_ms
from tierlog.manifest.state import OffsetGap
from tierlog.record_format.errors import UnknownSegment
from tierlog.record_format.segment_entry import SegmentEntry


class SegmentState(msgspec.Struct, frozen=True, kw_only=True):
    """`object_key`: the whole key in the bucket. `crc32c`: null while the segment is active."""

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
    """`etag` is None for the active segment, which grows. A local one is held open."""

    size_bytes: int
    etag: str | None
    tier: Literal["hot", "cold"]
    source: SegmentEntry | OpenFile

    def close(self) -> None:
        if isinstance(self.source, OpenFile):
            self.source.close()


def iter_segments(partition: Partition, *, from_offset: int = 0) -> Iterator[SegmentState]:
    """The segments that end at or above `from_offset`, and are not entirely below the log start.

    Facts that neither the log nor the manifest has are determined now, which may read the segment.
    If it cannot be read, they stay None. Raises UnknownTopic if the topic was deleted meanwhile.
    """
    with partition.reporting_defunct():
        yield from _listed(partition, from_offset, count=True)


def peek_segments(partition: Partition, *, from_offset: int = 0) -> Iterator[SegmentState]:
    """As `iter_segments`, but facts that neither the log nor the manifest has stay None."""
    return _listed(partition, from_offset, count=False)


def _listed(partition: Partition, from_offset: int, *, count: bool) -> Iterator[SegmentState]:
    from_offset = max(from_offset, partition.log_start_offset)
    local = partition.local_segments()
    local_start = local[0].base_offset
    for entry in partition.cold_entries(from_offset):
        if entry.base_offset >= local_start:
            break
        yield _cold_listing(entry, object_key=partition.object_key(entry.log_key))
    start = max(from_offset, local_start)
    covered = {entry.base_offset: entry for entry in partition.cold_entries(start)}
    for view in (_without_gap(one, partition.gaps) for one in local):
        if view.last_offset >= max(from_offset, view.base_offset):
            in_bucket = covered.get(view.base_offset)
            known = _with_manifest_facts(view, in_bucket)
            if count:
                known = partition.counted(known)
            yield _local_listing(partition, known, in_bucket)


def _cold_listing(entry: SegmentEntry, *, object_key: str) -> SegmentState:
    return SegmentState(
        base_offset=entry.base_offset,
        last_offset=entry.last_offset,
        size_bytes=entry.size_bytes,
        records=entry.record_count,
        min_timestamp=entry.min_timestamp,
        max_timestamp=entry.max_timestamp_or_none,
        tier="cold",
        active=False,
        object_key=object_key,
        crc32c=f"{entry.log_crc32c:08x}",
    )


def _local_listing(
    partition: Partition, view: SegmentView, entry: SegmentEntry | None
) -> SegmentState:
    object_key = None if entry is None else partition.object_key(entry.log_key)
    return SegmentState(
        base_offset=view.base_offset,
        last_offset=view.last_offset,
        size_bytes=view.size_bytes,
        records=view.record_count,
        min_timestamp=view.min_timestamp,
        max_timestamp=view.max_timestamp if view.max_timestamp >= 0 else None,
        tier="both" if entry is not None else "hot",
        active=view.active,
        object_key=object_key,
        crc32c=None if view.crc32c is None else f"{view.crc32c:08x}",
    )


def _without_gap(view: SegmentView, gaps: Sequence[OffsetGap]) -> SegmentView:
    """On disk a segment ends where the next one begins, even above a gap."""
    for gap in gaps:
        if view.base_offset < gap.start_offset <= view.last_offset < gap.end_offset:
            return view._replace(last_offset=gap.start_offset - 1)
    return view


def _with_manifest_facts(view: SegmentView, entry: SegmentEntry | None) -> SegmentView:
    """What the log does not know of the segment, if the manifest has it in the same size."""
    if entry is None or entry.size_bytes != view.size_bytes:
        return view
    if view.record_count is None:
        view = view._replace(
            record_count=entry.record_count,
            min_timestamp=entry.min_timestamp,
            max_timestamp=entry.max_timestamp,
        )
    return view._replace(crc32c=entry.log_crc32c) if view.crc32c is None else view


def first_time(partition: Partition) -> int | None:
    """The smallest timestamp of the first segment, of either tier; None if nobody knows it."""
    now = partition.offsets()
    if now.log_start_offset < now.local_log_start_offset:
        entry = next(partition.oldest_cold_entries(now.log_start_offset), None)
        return entry.min_timestamp if entry else None
    return partition.local_segments()[0].min_timestamp


def last_time(partition: Partition) -> int:
    """The largest timestamp of the last segment that has one, in either tier; -1 if none has."""
    for segment in reversed(partition.local_segments()):
        if segment.max_timestamp >= 0:
            return segment.max_timestamp
    cold = partition.manifest.segments if partition.manifest else ()
    newest = cold[-1].max_timestamp_or_none if cold else None
    return -1 if newest is None else newest


def open_segment(partition: Readable, base_offset: int, wait: Wait = Wait.WAIT) -> SegmentBytes:
    """The segment that begins at `base_offset`; the active one up to the high watermark.

    Raises UnknownSegment, also for one below the log start that is yet to be deleted;
    CorruptDataError; WouldBlock if that needs the disk or the bucket.
    """
    partition.check_leadership()
    with partition.reporting_defunct():
        return _open(partition, base_offset, wait)


def _open(partition: Readable, base_offset: int, wait: Wait) -> SegmentBytes:
    opened = partition.open_local_segment(base_offset, wait)
    if opened is not None:
        etag = _etag(partition, opened.size_bytes, opened.crc32c)
        return SegmentBytes(opened.size_bytes, etag, "hot", opened.file)
    entry = partition.find_cold_entry(base_offset, wait)
    log_start = partition.log_start_offset
    if entry is None or entry.base_offset != base_offset or entry.last_offset < log_start:
        wait.before("a segment that just left the disk is looked for")
        raise UnknownSegment(f"{partition} has no segment that begins at offset {base_offset}")
    etag = _etag(partition, entry.size_bytes, entry.log_crc32c)
    return SegmentBytes(entry.size_bytes, etag, "cold", entry)


def slices_of(
    partition: Readable,
    segment: SegmentBytes,
    *,
    start: int,
    end: int,
    wait: Wait = Wait.WAIT,
) -> Iterator[FileSlice]:
    """Bytes [start, end) of a segment as slices of local files.

    The caller closes each. The iterator fetches the chunks of a cold segment one by one. It may
    raise WouldBlock.
    """
    assert 0 <= start <= end <= segment.size_bytes
    if start == end:
        return iter(())
    if isinstance(segment.source, OpenFile):
        return iter((FileSlice(segment.source.share(), start, end - start),))
    return partition.cold_bytes(segment.source, start=start, end=end, wait=wait)


def _etag(partition: Readable, size_bytes: int, crc32c: int | None) -> str | None:
    return None if crc32c is None else f'"{partition.topic_id}-{size_bytes:x}-{crc32c:08x}"'


class TierSizes(NamedTuple):
    """`cold_end_offset`: everything from the log start up to it is in the bucket. `segments`: over
    both tiers, each once. `waiting`: the oldest local segment that is yet to be uploaded.
    """

    hot_bytes: int
    cold_bytes: int
    cold_end_offset: int
    segments: int
    hot_segments: int
    cold_segments: int
    offload_lag_bytes: int
    offload_lag_segments: int
    waiting: SegmentView | None


def tier_sizes(partition: Partition) -> TierSizes:
    """Bytes and segments by tier; what is local and not in the bucket is the offload lag."""
    views, log_start = partition.local_segments(), partition.log_start_offset
    hot_bytes = sum(view.size_bytes for view in views)
    # As in `segment_listing`: neither an empty segment nor one below the log start.
    shown = sum(view.last_offset >= max(log_start, view.base_offset) for view in views)
    manifest = partition.manifest
    end_offset = manifest.end_offset if manifest else 0
    cold_segments = manifest.segment_count if manifest else 0
    both = [view for view in views if view.last_offset < end_offset and view.sealed]
    lag_bytes = lag_segments = 0
    waiting = None
    if partition.offloads:
        lag_bytes = hot_bytes - sum(view.size_bytes for view in both)
        lag_segments = sum(1 for view in views if view.size_bytes) - len(both)
        waiting = next(one for one in views if one.active or one.last_offset >= end_offset)
    return TierSizes(
        hot_bytes,
        cold_bytes=partition.cold_size_bytes,
        cold_end_offset=end_offset,
        segments=cold_segments + shown - sum(view.last_offset >= log_start for view in both),
        hot_segments=shown,
        cold_segments=cold_segments,
        offload_lag_bytes=lag_bytes,
        offload_lag_segments=lag_segments,
        waiting=waiting,
    )


def offload_lag_ms(waiting: SegmentView | None, *, now_ms: int) -> int:
    """How long the segment has been waiting; 0 for None.

    Since its first record, or since its last write if it was sealed before the broker started.
    """
    if waiting is None or (waiting.active and waiting.age_ms is None):
        return 0
    if waiting.age_ms is not None:
        return waiting.age_ms
    try:
        return max(0, now_ms - modified_ms(waiting.path))
    except FileNotFoundError:
        return 0  # deleted meanwhile
