"""The clocks, for callers at the edge: everything below them gets the time as an argument. The wall
clock may jump, either way and by decades: how long something lasts is never measured by it.
"""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, as records carry them."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds that pass while this machine is awake, whatever is done to the wall clock."""
    return time.monotonic_ns() // 1_000_000
