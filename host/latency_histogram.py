"""A histogram of durations. Metrics read its snapshots; it does not know about them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

BOUNDS_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
    60.0,
)


class HistogramSnapshot(NamedTuple):
    """`counts` are cumulative, as Prometheus has them: `counts[i]` durations were at most
    `BOUNDS_S[i]`, and the last entry counts all of them.
    """

    counts: tuple[int, ...]
    total_s: float


class LatencyHistogram:
    """Thread-safe."""

    __slots__ = ("_counts", "_lock", "_total_s")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0

    def observe(self, seconds: float) -> None:
        bucket = bisect_left(BOUNDS_S, seconds)  # upper bounds are inclusive
        with self._lock:
            self._counts[bucket] += 1
            self._total_s += seconds

    def observe_all(self, seconds: Sequence[float]) -> None:
        buckets = [bisect_left(BOUNDS_S, one) for one in seconds]
        with self._lock:
            for bucket in buckets:
                self._counts[bucket] += 1
            self._total_s += sum(seconds)

    def snapshot(self) -> HistogramSnapshot:
        with self._lock:
            counts = tuple(accumulate(self._counts))
            return HistogramSnapshot(counts, self._total_s)
