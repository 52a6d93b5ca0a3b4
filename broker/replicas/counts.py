"""What has happened to the sets of replicas that this broker leads, for its metrics."""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet

from tierlog.host.latency_histogram import LatencyHistogram


class SetCounts:
    """Thread-safe. `elections`: how long each took, from the claim until this broker led."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.shrinks = self.expands = self.failed = 0
        self.elections = LatencyHistogram()

    def count_change(self, before: AbstractSet[str], after: AbstractSet[str]) -> None:
        """A set in which one takes another's place shrinks, and expands."""
        with self._lock:
            self.shrinks += bool(before - after)
            self.expands += bool(after - before)

    def count_failed(self) -> None:
        with self._lock:
            self.failed += 1
