"""Commits trims in the bucket, and waits only as long as a client would.

* A trim that takes longer goes on in its thread. What it then fails to do, a later round of the
  janitor makes up for (`follow_log_start`).
* One trim per partition: waiting in the pool, the others would occupy its threads.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from typing import Final

from tierlog.broker.cold_log import ColdLog
from tierlog.host.threads import Threads
from tierlog.record_format.errors import ShuttingDown, StoreUnavailable

TRIM_WAIT_S: Final = 15.0  # clients time out after half a minute
TRIMS_MAX: Final = 8  # concurrent commits, of different partitions


class BucketTrims:
    """Thread-safe."""

    def __init__(self) -> None:
        self._threads = Threads(TRIMS_MAX, name="trim")
        self._in_progress: dict[ColdLog, threading.Event] = {}

    def close(self) -> None:
        """Wait for the trims so far, which a closed store refuses; no other is accepted."""
        self._threads.shutdown()

    def trim(self, cold: ColdLog, start: int) -> None:
        """Raises StoreUnavailable if it takes longer than TRIM_WAIT_S; it may still succeed."""
        deadline_s, done = time.monotonic() + TRIM_WAIT_S, threading.Event()
        while (ahead := self._in_progress.setdefault(cold, done)) is not done:
            _check_in_time(ahead.wait(_left_s(deadline_s)))
        try:
            trimming = self._threads.submit(self._trim, cold, start, done)
        except RuntimeError as error:  # the pool was shut down
            self._in_progress.pop(cold, None)
            raise ShuttingDown(str(error)) from error
        try:
            _check_in_time(wait([trimming], _left_s(deadline_s)).done)
            trimming.result()
        finally:
            del trimming  # breaks the reference cycle of the future and its exception

    def _trim(self, cold: ColdLog, start: int, done: threading.Event) -> None:
        try:
            cold.follow_log_start(start)
        finally:
            self._in_progress.pop(cold, None)
            done.set()


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def _check_in_time(done: object) -> None:
    if not done:
        raise StoreUnavailable(f"no response within {TRIM_WAIT_S:g} s")
