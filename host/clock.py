"""The clocks, for the outermost callers: everything below them takes the time as an argument.

The wall clock may jump in either direction, even by decades, so durations are never measured by it.
"""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Milliseconds since the Unix epoch, like the timestamps of records."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds of an arbitrary origin, unaffected by wall-clock changes; stops in suspend."""
    return time.monotonic_ns() // 1_000_000


def boottime_ms() -> int:
    """As `monotonic_ms`; on Linux it also counts the time in suspend."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000_000
