"""A rate limit in bytes a second, shared by all uploads (`offload.bandwidth`).

A token bucket of one second's worth: a caller that takes more than is there waits for its turn, and
turns are given in the order of the calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Call it with the bytes that are about to be sent; it blocks. Thread-safe."""

    def __init__(
        self,
        bytes_per_second: int,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert bytes_per_second > 0
        self._rate, self._monotonic, self._sleep = bytes_per_second, monotonic, sleep
        self._lock = threading.Lock()
        self._free_at = monotonic()

    def __call__(self, size_bytes: int) -> None:
        with self._lock:
            now = self._monotonic()
            begin = max(self._free_at, now - 1.0)
            self._free_at = begin + size_bytes / self._rate
            wait_s = begin - now
        if wait_s > 0:
            self._sleep(wait_s)
