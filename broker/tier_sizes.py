"""The size of a partition in each tier, and its offload lag: 0 if remote storage is off."""

from __future__ import annotations

from typing import NamedTuple

from tierlog.broker.partition import Partition
from tierlog.hot_tier.sealed_segments import SegmentView
from tierlog.hot_tier.segment import modified_ms


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
    views, log_start = partition.log.segments(), partition.log.log_start_offset
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
