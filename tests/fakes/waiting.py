"""Wait for another thread with a timeout: the test fails instead of hanging."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

PATIENCE_S = 30  # for slow machines


def until(holds: Callable[[], object], *, patience_s: float = PATIENCE_S) -> None:
    """Wait until `holds()` is true. What is slow to ask is asked less often: it takes processor
    time of what is waited for.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        asked_s = time.monotonic()
        if holds():
            return
        now_s = time.monotonic()
        assert now_s < deadline_s, f"the condition was not met within {patience_s} s"
        threading.Event().wait(min(max(0.01, 10 * (now_s - asked_s)), 0.1))


def until_waiting(metrics: Callable[[], str], *, least: int = 1) -> None:
    """Wait until `least` requests are waiting in the broker, by its `/metrics`."""

    def waiting() -> bool:
        found = re.search(r"^tierlog_http_waiting_requests (\d+)", metrics(), re.MULTILINE)
        return found is not None and int(found[1]) >= least

    until(waiting)
