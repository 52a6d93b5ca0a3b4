"""Limits uploads to `offload.bandwidth` bytes a second, and interrupts them at shutdown.

* A token bucket with a burst of one second, shared by all uploads. A caller that needs more than is
  available waits; callers are served in order.
* After `stop` nothing more is sent: a broker does not delay its shutdown for a segment of a
  gigabyte. The next start resumes the upload.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tierlog.record_format.errors import ShuttingDown


class UploadThrottle:
    """Call it with the number of bytes about to be sent; it may block. Thread-safe."""

    def __init__(
        self,
        bytes_per_second: int | None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        assert bytes_per_second is None or bytes_per_second > 0
        self._rate, self._monotonic = bytes_per_second, monotonic
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait
        self._lock = threading.Lock()
        self._free_at = monotonic()

    def stop(self) -> None:
        """Interrupt all uploads, including those that wait."""
        self._stopped.set()

    def __call__(self, size_bytes: int) -> None:
        """Raises ShuttingDown after `stop`."""
        wait_s = self._wait_s(size_bytes, self._rate) if self._rate is not None else 0.0
        if wait_s > 0:
            self._sleep(wait_s)
        if self._stopped.is_set():
            raise ShuttingDown("the broker is shutting down")

    def _wait_s(self, size_bytes: int, rate: int) -> float:
        with self._lock:
            now = self._monotonic()
            begin = max(self._free_at, now - 1.0)
            self._free_at = begin + size_bytes / rate
            return begin - now
