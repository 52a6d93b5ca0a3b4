"""A task that runs in rounds, in a thread of its own.

* A round that fails with a TierlogError or OSError is logged, and the next round runs as scheduled.
  Any other exception is a bug: it is logged with its traceback, but does not end the thread either,
  because the logs still need maintenance. A repeated failure is logged once, and so is the recovery
  from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from tierlog.broker.background.task_failures import RoundTask, TaskFailures
from tierlog.host.retry import backoff_s
from tierlog.record_format.errors import TierlogError

log = structlog.get_logger(__name__)


class PeriodicTask:
    """`wake` starts the next round at once. With `interval_max_s`, the interval doubles with each
    failure in a row, up to that.
    """

    def __init__(
        self,
        name: RoundTask,
        run_round: Callable[[], None],
        *,
        failures: TaskFailures,
        interval_s: float,
        interval_max_s: float = 0.0,
    ) -> None:
        self._name, self._run_round, self._interval_s = name, run_round, interval_s
        self._interval_max_s, self._failures = interval_max_s, failures
        self._failure: str | None = None
        self._failed_rounds = 0  # in a row
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self, timeout_s: float) -> None:
        """Let the round in progress be the last, and wait for it."""
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._woken.wait(self._wait_s())
            self._woken.clear()
            if self._stopping.is_set():
                return
            succeeded = self._run()
            self._failures.note_round(self._name, failed=not succeeded)
            self._failed_rounds = 0 if succeeded else self._failed_rounds + 1

    def _run(self) -> bool:
        """Run a round. Returns whether it succeeded."""
        try:
            self._run_round()
        except (TierlogError, OSError) as error:
            self._report(str(error))
        except Exception:
            log.exception("background round failed: a bug", task=self._name)
        else:
            self._report(None)
            return True
        return False

    def _wait_s(self) -> float:
        """The interval; after failures, from twice the interval up."""
        longest_s = max(self._interval_s, self._interval_max_s)
        return backoff_s(self._failed_rounds + 1, first_s=self._interval_s, max_s=longest_s)

    def _report(self, failure: str | None) -> None:
        if failure == self._failure:
            return
        if failure is None:
            log.info("background task recovered", task=self._name)
        else:
            log.warning("background task failed, will retry", task=self._name, error=failure)
        self._failure = failure
