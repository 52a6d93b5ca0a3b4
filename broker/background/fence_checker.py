"""Checks whether another folder has become the owner of a partition in the bucket: before anything
is served, and at half of `fence.check.ms` after that, so that no answer waits for a look
(`OwnerCheck`).

* The first check comes before serving, because nobody would ever read what a former owner
  acknowledges between its start and its claim. If the store does not respond in time, the partition
  is served anyway.
* A partition that lost its leadership refuses calls until a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf
from operator import attrgetter
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final

import structlog

from tierlog.broker.background.task_failures import TaskFailures
from tierlog.broker.bucket.ownership import Silence
from tierlog.broker.partition.partition import Partition
from tierlog.manifest.forced_claims import ForcedClaims
from tierlog.record_format.errors import (
    ConfigurationError,
    FencedError,
    StoreUnavailable,
    TierlogError,
    UnknownTopic,
)

log = structlog.get_logger(__name__)

STARTUP_THREADS: Final = 16
PARTITIONS_PER_THREAD: Final = 100  # later: at 20 ms a request, one thread checks them in 2 s


class FenceChecker:
    def __init__(
        self,
        partitions: Callable[[], Iterable[Partition]],
        failures: TaskFailures,
        silence: Silence | None = None,
        *,
        forced_claims: ForcedClaims | None = None,
    ) -> None:
        self._partitions, self._failures, self._silence = partitions, failures, silence
        self._forced_claims = forced_claims
        self._seen: int | None = None  # the newest forced claim when all partitions were looked at

    def run_round(self) -> None:
        """If the store does not answer, the round ends early, and the next one tries again."""
        if self._forced_claims is not None:
            self._in_threads(partial(self._look_for_forced_claims, self._forced_claims), 1)
        else:
            self._check_all()

    def _check_all(self) -> None:
        partitions = list(self._partitions())
        check = self._checker(partitions)
        self._in_threads(check, 1 + len(partitions) // PARTITIONS_PER_THREAD)

    def _in_threads(self, check: Callable[[], None], count: int) -> None:
        threads = _started(check, count)
        if not threads:
            check()
        for thread in threads:
            self._wait_for(thread)

    def _look_for_forced_claims(self, forced_claims: ForcedClaims) -> None:
        """In a cluster: one request, unless somebody has claimed a partition against the rules.
        The partitions are looked at one by one then, and at first.
        """
        assert self._silence is not None, "a cluster has a bucket"
        began_ms = self._silence.boot_clock()
        try:
            if self._seen is None:
                newest = forced_claims.newest()
                self._check_all()
                served = [one for one in self._partitions() if not one.is_defunct]
                if any(one.owner_looked_ms < began_ms for one in served):
                    return None  # the store did not answer each
                self._seen = newest
            elif forced_claims.find_newer(self._seen) > self._seen:
                self._seen = None
                return self._look_for_forced_claims(forced_claims)
            self._silence.note_all_looked(began_ms)
        except (StoreUnavailable, ConfigurationError) as error:
            self._silence.note_unanswered(began_ms, str(error))

    def _wait_for(self, thread: Thread) -> None:
        """So that answers need not find out themselves that the store hangs."""
        while self._silence is not None and thread.is_alive():
            since_ms = self._silence.boot_clock()
            thread.join(self._silence.patience_s)
            if thread.is_alive():
                self._silence.note_waited(since_ms)
        thread.join()

    def check_before_serving(self, *, timeout_s: float) -> None:
        """Return after `timeout_s` at most: a request may take a minute to time out."""
        deadline_s = time.monotonic() + timeout_s
        for thread in _started(self._checker(self._partitions(), deadline_s), STARTUP_THREADS):
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _checker(
        self, partitions: Iterable[Partition], deadline_s: float = inf
    ) -> Callable[[], None]:
        """Checks them one by one, in as many threads as call it."""
        waiting: SimpleQueue[Partition] = SimpleQueue()
        for partition in sorted(
            partitions, key=attrgetter("owner_looked_ms")
        ):  # a slow store ends rounds early
            waiting.put(partition)

        def check_waiting() -> None:
            with suppress(Empty):
                while time.monotonic() <= deadline_s and self._check_one(waiting.get_nowait()):
                    pass

        return check_waiting

    def _check_one(self, partition: Partition) -> bool:
        """Returns False if the store does not respond."""
        if partition.leadership_lost:  # by a commit since the last round
            partition.wake_all()
            return True
        try:
            with self._failures.noting("fence-check", partition):
                partition.look_for_owner()
        except (FencedError, UnknownTopic):
            pass  # the partition records it and reports it; or it was deleted
        except StoreUnavailable:
            return False
        except (TierlogError, OSError) as error:
            log.warning("ownership check failed", partition=str(partition), error=str(error))
        return True


def _started(check: Callable[[], None], count: int) -> list[Thread]:
    """Threads that check; fewer if the process may not have so many."""
    threads: list[Thread] = []
    with suppress(RuntimeError):
        for _ in range(count):
            thread = Thread(target=check, name="fence-checker", daemon=True)
            thread.start()
            threads.append(thread)
    return threads
