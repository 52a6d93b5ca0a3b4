"""Decides which segments retention deletes, by facts: `expired_end` is pure, below it is where the
facts of both tiers come from.

Kafka's rules (UnifiedLog.deleteOldSegments, KIP-405): whole segments, oldest first, up to the first
that has to stay. By time, a segment is deleted when its largest timestamp (its file's, if the
records have none) is older than the limit; by size, while the remaining segments still reach the
limit. The active segment stays unless it has expired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from tierlog.broker.partition.partition import Partition
from tierlog.hot_tier.sealed_segments import SegmentView
from tierlog.hot_tier.segment import age_timestamp
from tierlog.manifest.state import live_size_bytes

UNLIMITED = -1
NEVER_OLD = 2**63 - 1


class SegmentFacts(NamedTuple):
    base_offset: int
    end_offset: int
    size_bytes: int
    age_timestamp: int
    active: bool


class Limits(NamedTuple):
    retention_ms: int
    retention_bytes: int


def expired_end(
    segments: Iterable[SegmentFacts], limits: Limits, *, total_bytes: int, now_ms: int
) -> int | None:
    """End offset of the last segment that exceeds `limits`; None if all stay.

    `total_bytes`: of all segments; not used without a limit in bytes. An empty active segment
    always stays. If the active segment has expired too, its end is returned, and the caller has to
    roll it first. Segments after the first that stays are not iterated: the cold tier may have a
    million.
    """
    if limits == (UNLIMITED, UNLIMITED):
        return None
    end: int | None = None
    left_bytes = total_bytes
    for segment in segments:
        too_old = limits.retention_ms != UNLIMITED and (
            now_ms - segment.age_timestamp > limits.retention_ms
        )
        # >= : the limit is what must remain, so a segment goes when the rest still reaches it
        too_much = limits.retention_bytes != UNLIMITED and (
            left_bytes - segment.size_bytes >= limits.retention_bytes and not segment.active
        )
        is_empty = segment.active and segment.size_bytes == 0
        if is_empty or not (too_old or too_much):
            break
        left_bytes -= segment.size_bytes
        end = segment.end_offset
    return end


def local_facts(partition: Partition) -> list[SegmentFacts]:
    return [
        SegmentFacts(
            base_offset=segment.base_offset,
            end_offset=segment.last_offset + 1,
            size_bytes=segment.size_bytes,
            age_timestamp=_age_timestamp(segment),
            active=segment.active,
        )
        for segment in partition.local_segments()
    ]


def _age_timestamp(view: SegmentView) -> int:
    try:
        return age_timestamp(view.max_timestamp, folder=view.folder, base_offset=view.base_offset)
    except FileNotFoundError:
        return NEVER_OLD  # deleted meanwhile: the next round sees what is left


def cold_facts(partition: Partition, local: Sequence[SegmentFacts]) -> Iterator[SegmentFacts]:
    """The segments below the local ones, oldest first; manifest pages are read as they are reached.

    A segment of unknown age never expires.
    """
    local_start = local[0].base_offset if local else partition.log_end_offset
    for entry in partition.oldest_cold_entries(partition.log_start_offset):
        if entry.base_offset >= local_start:
            return
        yield SegmentFacts(
            base_offset=entry.base_offset,
            end_offset=entry.next_offset,
            size_bytes=entry.size_bytes,
            age_timestamp=entry.age_timestamp if entry.age_timestamp >= 0 else NEVER_OLD,
            active=False,
        )


def total_bytes(partition: Partition, local: Sequence[SegmentFacts]) -> int:
    """The size over both tiers, each segment once: the manifest's sum, and the local segments after
    its end. Manifest pages are read only if that sum is too high: before the bucket mirrors
    compaction, or catches up with a log start that moved while the store was down.
    """
    log_start = partition.log_start_offset
    manifest = partition.manifest
    is_behind = manifest is not None and manifest.log_start_offset < log_start
    if manifest is None or is_behind or not partition.is_mirrored:
        segments = chain(cold_facts(partition, local), local)
        return sum(fact.size_bytes for fact in segments)
    newest = (*manifest.pages, *manifest.segments)[-1:]
    counted_end = newest[0].next_offset if newest else 0
    not_counted = (fact.size_bytes for fact in local if fact.base_offset >= counted_end)
    return live_size_bytes(manifest) + sum(not_counted)
