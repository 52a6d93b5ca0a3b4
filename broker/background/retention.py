"""What may be deleted, decided from facts alone: no clock, no disk, no bucket.

Kafka's rules (UnifiedLog.deleteOldSegments, KIP-405): whole segments, oldest first, stopping at the
first that has to stay; by time a segment goes when its largest timestamp (its file's, where the
records have none) is older than the limit, by size while what remains is still at least the limit.
The active segment stays unless it has expired.
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
    """End offset of the last segment that `limits` allow to be deleted; None if all stay.

    `total_bytes`: of all segments. An empty active segment never goes. Where the active segment has
    expired too, its end is returned: the caller rolls it first. Nothing after the first that stays
    is looked at: the cold tier may have a million.
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
