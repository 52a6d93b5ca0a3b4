"""The wall clock, for callers at the edge: everything below them gets the time as an argument."""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, as records carry them."""
    return time.time_ns() // 1_000_000
