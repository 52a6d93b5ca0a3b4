"""Whether another folder owns a partition in the bucket by now: asked before anything is served,
and every `fence.check.ms` from then on.

* Before it is served, because nobody would read what a former owner acknowledges between its start
  and its claim. If the store does not answer in time, the partition is served nevertheless.
* A partition that lost its leadership says so from then on, until a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final

import structlog

from broker.partition import Partition
from record_format.errors import FencedError, StoreUnavailable, TierlogError, UnknownTopic

log = structlog.get_logger(__name__)

AT_ONCE: Final = 16  # requests side by side, before a broker serves
OF_ONE: Final = 250  # later: at 20 ms each, that many are asked one after the other in 5 s


class FenceChecker:
    def __init__(self, partitions: Callable[[], Iterable[Partition]]) -> None:
        self._partitions = partitions

    def look(self) -> None:
        """If the store is down, the next round asks again."""
        partitions = list(self._partitions())
        _ask(partitions, threads=1 + len(partitions) // OF_ONE)

    def check_before_serving(self, *, timeout_s: float) -> None:
        """Waits no longer than this: a store may take a minute not to answer."""
        _ask(self._partitions(), threads=AT_ONCE, timeout_s=timeout_s)


def _ask(partitions: Iterable[Partition], *, threads: int, timeout_s: float = inf) -> None:
    waiting: SimpleQueue[Partition] = SimpleQueue()
    for partition in partitions:
        waiting.put(partition)
    deadline = time.monotonic() + timeout_s

    def ask_on() -> None:
        with suppress(Empty):
            while time.monotonic() <= deadline and _was_asked(waiting.get_nowait()):
                pass

    asking = [Thread(target=ask_on, name="fences", daemon=True) for _ in range(threads)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(None if timeout_s == inf else max(0.0, deadline - time.monotonic()))


def _was_asked(partition: Partition) -> bool:
    """False if the store does not answer."""
    if partition.cold is None:
        return True
    try:
        if not partition.leadership_lost:
            partition.cold.ownership.check_fence(log_end_offset=partition.log.log_end_offset)
    except (FencedError, UnknownTopic):
        pass  # kept and reported by the partition; or deleted
    except StoreUnavailable:
        return False
    except (TierlogError, OSError) as error:
        log.warning("not known who owns it", partition=str(partition), error=str(error))
    if partition.leadership_lost:  # found here, or by a commit since the last round
        partition.wake_all()
    return True
