"""Waits for what another thread does: what does not come to pass fails the test, and hangs none."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

PATIENCE_S = 30  # two cores, and other tests on them


def until(holds: Callable[[], object], *, patience_s: float = PATIENCE_S) -> None:
    """Look until `holds()` is true."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come to pass within {patience_s} s"
        threading.Event().wait(0.01)


def until_waiting(metrics: Callable[[], str], *, least: int = 1) -> None:
    """Until so many requests wait in the broker whose `/metrics` this gives."""

    def waiting() -> bool:
        found = re.search(r"^tierlog_http_waiting_requests (\d+)", metrics(), re.MULTILINE)
        return found is not None and int(found[1]) >= least

    until(waiting)
