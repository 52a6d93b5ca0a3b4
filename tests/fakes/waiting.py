"""Wait for another thread with a timeout: the test fails instead of hanging."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

PATIENCE_S = 30  # for slow machines


def until(holds: Callable[[], object], *, patience_s: float = PATIENCE_S) -> None:
    """Wait until `holds()` is true."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, f"the condition was not met within {patience_s} s"
        threading.Event().wait(0.01)


def until_waiting(metrics: Callable[[], str], *, least: int = 1) -> None:
    """Wait until `least` requests are waiting in the broker, by its `/metrics`."""

    def waiting() -> bool:
        found = re.search(r"^tierlog_http_waiting_requests (\d+)", metrics(), re.MULTILINE)
        return found is not None and int(found[1]) >= least

    until(waiting)
