"""Which part of a log compaction may work on, and whether a round is due. Kafka's
LogCleanerManager.

* Clean is everything below the checkpoint, where the last round ended. Dirty is everything from
  there to the first offset that must not be cleaned yet: the active segment, open transactions,
  unflushed records, and records younger than `min.compaction.lag.ms`.
* The dirty part ends at a segment boundary; a round reads all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierlog.hot_tier.file_names import OFFSET_INDEX, TIME_INDEX
from tierlog.hot_tier.log_reader import largest_timestamp, with_index_rebuild
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.segment import Segment, age_timestamp


class Cleanable(NamedTuple):
    """[first_dirty_offset, end_offset) is dirty and may be cleaned now."""

    first_dirty_offset: int
    end_offset: int
    clean_bytes: int
    dirty_bytes: int
    oldest_dirty_ms: int | None

    @property
    def dirty_ratio(self) -> float:
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0

    def is_due(self, *, min_dirty_ratio: float, max_lag_ms: int, now_ms: int) -> bool:
        """Whether the dirty ratio calls for a round, or `max.compaction.lag.ms` is over."""
        oldest = self.oldest_dirty_ms
        overdue = oldest is not None and oldest < now_ms - max_lag_ms
        # > as in Kafka: with a ratio of 0, nothing is due while nothing is dirty
        return self.dirty_bytes > 0 and (overdue or self.dirty_ratio > min_dirty_ratio)


def find_cleanable(state: LogState, checkpoint: int | None, *, now_ms: int) -> Cleanable:
    """`checkpoint`: where the last round ended; None if there was none.

    A checkpoint outside this log is ignored: cleaning again does no harm.
    """
    items = state.segments.items
    start = state.local_log_start_offset
    first_dirty = checkpoint if checkpoint is not None else start
    if not start <= first_dirty <= items[-1].base_offset:
        first_dirty = start
    sealed = items[:-1]
    dirty = [segment for segment in sealed if segment.end.next_offset > first_dirty]
    ready = _ready(state, dirty, now_ms=now_ms)
    clean_bytes = sum(
        segment.end.size_bytes for segment in sealed if segment.end.next_offset <= first_dirty
    )
    return Cleanable(
        first_dirty_offset=first_dirty,
        end_offset=ready[-1].end.next_offset if ready else first_dirty,
        clean_bytes=clean_bytes,
        dirty_bytes=sum(segment.end.size_bytes for segment in ready),
        oldest_dirty_ms=_oldest_ms(state, ready),
    )


def _ready(state: LogState, dirty: Sequence[Segment], *, now_ms: int) -> list[Segment]:
    unstable = state.producers.first_unstable_offset()
    stable = state.flushed.offset if unstable is None else min(unstable, state.flushed.offset)
    lag_ms = state.config.min_compaction_lag_ms
    ready: list[Segment] = []
    for segment in dirty:
        too_young = lag_ms > 0 and _newest_ms(state, segment) > now_ms - lag_ms
        if too_young or segment.end.next_offset > stable:
            break
        ready.append(segment)
    return ready


def _newest_ms(state: LogState, segment: Segment) -> int:
    largest = largest_timestamp(state, segment)
    return age_timestamp(largest, folder=segment.folder, base_offset=segment.base_offset)


def _oldest_ms(state: LogState, ready: Sequence[Segment]) -> int | None:
    """The smallest first timestamp of the segments; only needed if a maximum lag is set."""
    if state.config.max_compaction_lag_ms == 2**63 - 1:
        return None
    firsts = (_first_timestamp(state, segment) for segment in ready)
    return min((first for first in firsts if first is not None and first > 0), default=None)


def _first_timestamp(state: LogState, segment: Segment) -> int | None:
    return with_index_rebuild(state, segment, lambda: segment.first_timestamp(state.files))


class GroupLimits(NamedTuple):
    segment_bytes: int
    index_bytes: int
    borders: frozenset[int]  # offsets that no group may span


def group_segments(segments: Sequence[Segment], limits: GroupLimits) -> list[tuple[Segment, ...]]:
    """Consecutive segments that are merged into one each, within the limits of a segment's size, an
    index's size, and 31 bits of relative offset.
    """
    groups: list[list[Segment]] = []
    sizes = (0, 0, 0)
    for segment in segments:
        more = _sizes_of(segment)
        together = tuple(a + b for a, b in zip(sizes, more, strict=True))
        fits = (
            together[0] <= limits.segment_bytes
            and max(together[1:]) <= limits.index_bytes
            and segment.base_offset not in limits.borders
        )
        if groups and fits and segment.end.next_offset - 1 - groups[-1][0].base_offset < 2**31:
            groups[-1].append(segment)
            sizes = together  # type: ignore[assignment]
        else:
            groups.append([segment])
            sizes = more
    return [tuple(group) for group in groups]


def _sizes_of(segment: Segment) -> tuple[int, int, int]:
    return (segment.end.size_bytes, _size_of(segment, OFFSET_INDEX), _size_of(segment, TIME_INDEX))


def _size_of(segment: Segment, suffix: str) -> int:
    try:
        return segment.path(suffix).stat().st_size
    except FileNotFoundError:
        return 0  # it will be rebuilt
