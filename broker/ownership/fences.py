"""Whether another folder owns a partition in the bucket by now: asked before anything is served,
and every `fence.check.ms` from then on.

* Before it is served, since what a former owner acknowledges between its start and its claim is
  read by nobody. Where the store does not answer in time, the partition is served all the same.
* A partition that lost its leadership says so from then on, until a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

import structlog

from broker.partition import Partition
from record_format.errors import FencedError, StoreUnavailable, TierlogError

log = structlog.get_logger(__name__)

AT_ONCE: Final = 16  # requests side by side, before a broker serves


class Fences:
    def __init__(self, partitions: Callable[[], Iterable[Partition]]) -> None:
        self._partitions = partitions

    def look(self) -> None:
        """One after the other; where the store is down the next round asks again."""
        for partition in list(self._partitions()):
            if not _was_asked(partition):
                return

    def look_first(self, *, timeout_s: float) -> None:
        """Side by side, and no longer than this: a store may take a minute to say nothing."""
        waiting: SimpleQueue[Partition] = SimpleQueue()
        for partition in self._partitions():
            waiting.put(partition)
        deadline = time.monotonic() + timeout_s

        def ask_on() -> None:
            with suppress(Empty):
                while time.monotonic() <= deadline and _was_asked(waiting.get_nowait()):
                    pass

        threads = [
            threading.Thread(target=ask_on, name="fences-first", daemon=True)
            for _ in range(AT_ONCE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _was_asked(partition: Partition) -> bool:
    """False where the store does not answer."""
    if partition.cold is None:
        return True
    try:
        if not partition.leadership_lost:
            partition.cold.ownership.check_fence(log_end_offset=partition.log.log_end_offset)
    except FencedError:
        pass  # kept and reported by the partition
    except StoreUnavailable:
        return False
    except (TierlogError, OSError) as error:
        log.warning("not known who owns it", partition=str(partition), error=str(error))
    if partition.leadership_lost:  # found here, or by a commit since the last round
        partition.wake_all()
    return True
