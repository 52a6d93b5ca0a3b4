"""The wall clock, for those at an edge: everything below them is given its time."""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, as records carry them."""
    return time.time_ns() // 1_000_000
