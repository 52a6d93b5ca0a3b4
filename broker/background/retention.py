"""Decides which segments retention deletes. Pure: no clock, no disk, no bucket.

Kafka's rules (UnifiedLog.deleteOldSegments, KIP-405): whole segments, oldest first, up to the first
that has to stay. By time, a segment is deleted when its largest timestamp (its file's, if the
records have none) is older than the limit; by size, while the remaining segments still reach the
limit. The active segment stays unless it has expired.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

UNLIMITED = -1


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
