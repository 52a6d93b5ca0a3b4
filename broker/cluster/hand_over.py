"""Hands a partition over to another broker of the cluster, through the bucket.

| step                                         | if this broker dies after it               |
|----------------------------------------------|--------------------------------------------|
| upload what is sealed; appends go on         | nothing has changed                        |
| refuse appends; wait for the accepted ones   | it restarts as the leader                  |
| seal and upload the rest                     | it restarts as the leader                  |
| record that it may have left (`leave`)       | at the start, the bucket says whose it is  |
| commit that it is assigned to the other      | the other claims it at its next look       |
| tell the other, which opens and claims it    | as before                                  |
| remove what is left here                     | at the start, the bucket says whose it is  |

* From the commit on only the other can claim it: this broker answers with its name, and every look
  at the manifest fences it.
* A commit that was refused, or could not be sent, leaves the partition here. One whose answer was
  lost may take effect: appends stay refused until the bucket has said whether it did.
* Reads go on until the commit; a reader that waits is woken, and goes to the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

import structlog

from tierlog.broker.cluster.news import News
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.membership.members import Member
from tierlog.broker.partition.partition import Partition
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.host.latency_histogram import LatencyHistogram
from tierlog.manifest.invariants import InvalidTransition
from tierlog.record_format.errors import (
    ConfigurationError,
    FencedError,
    InvalidRequest,
    LeaderUnknown,
    RetriableError,
    ShuttingDown,
    StoreUnavailable,
    TierlogError,
)

log = structlog.get_logger(__name__)

CATCH_UP_S: Final = 300.0  # uploading what is sealed, while appends go on
STOP_S: Final = 10.0  # accepted appends, and the last upload: longer, and the leader goes on
ASK_AGAIN_S: Final = 0.5
# Of a commit: it was refused, or never sent.
_HAS_NO_EFFECT: Final = (RetriableError, ConfigurationError, InvalidTransition)


class Moved(NamedTuple):
    """`paused_ms`: how long appends were refused."""

    node_id: int
    end_offset: int
    paused_ms: int


class HandOver:
    """Thread-safe; one at a time for a partition. `offload` uploads what is sealed: whether all was
    within the time.
    """

    def __init__(
        self,
        topics: LiveTopics,
        news: News,
        *,
        offload: Callable[[Partition, float], bool],
        not_here: Callable[[TopicRecord, int], TierlogError],
    ) -> None:
        self._topics, self._news = topics, news
        self._offload, self._not_here = offload, not_here
        self._lock = threading.Lock()
        self._moving: set[Partition] = set()
        self.done = self.failed = 0
        self.pauses = LatencyHistogram()

    def run(self, partition: Partition, target: Member) -> Moved:
        """Raises LeaderUnknown if it did not take place, StoreUnavailable, and what a partition
        that cannot be written raises. Then this broker leads on.
        """
        try:
            moved = self._run(partition, target)
        except TierlogError:
            with self._lock:
                self.failed += 1
            raise
        with self._lock:
            self.done += 1
        self.pauses.observe(moved.paused_ms / 1000)
        log.info("partition handed over", partition=str(partition), **moved._asdict())
        return moved

    def _run(self, partition: Partition, target: Member) -> Moved:
        with self.alone(partition):
            partition.check_writable()
            if not partition.offloads:
                raise InvalidRequest(f"{partition}: remote.storage.enable=false keeps it here")
            partition.claim()
            partition.upkeep.roll()
            if not self._offload(partition, CATCH_UP_S):
                raise StoreUnavailable(f"{partition}: it is not in the bucket in time")
            began_s = time.monotonic()
            with partition.lasting:
                self._assign(partition, target)
                self._topics.retire_partition(partition, self._answer(partition))
            self._news.name_to_lead(target.node_id, [(partition.topic_id, partition.number)])
            paused_ms = round((time.monotonic() - began_s) * 1000)
            self._topics.remove_leftovers(partition)
        return Moved(target.node_id, partition.log_end_offset, paused_ms)

    def _answer(self, partition: Partition) -> Callable[[], TierlogError]:
        """From now on, to calls that already have the partition."""
        record = self._topics.find(partition.topic).record
        return lambda: self._not_here(record, partition.number)

    @contextmanager
    def alone(self, partition: Partition) -> Iterator[None]:
        """Nothing else is done about where it is meanwhile. Raises LeaderUnknown."""
        with self._lock:
            if partition in self._moving:
                raise LeaderUnknown(f"{partition} is being handed over already", retry_after_s=1)
            self._moving.add(partition)
        try:
            yield
        finally:
            with self._lock:
                self._moving.discard(partition)

    def _assign(self, partition: Partition, target: Member) -> None:
        is_left = False
        try:
            refusal = partial(LeaderUnknown, f"{partition} is being handed over", retry_after_s=1)
            if not partition.refuse_appends(refusal, timeout_s=STOP_S):
                raise LeaderUnknown(f"{partition}: appends do not end")
            partition.upkeep.roll()
            if not self._offload(partition, STOP_S):
                raise StoreUnavailable(f"{partition}: its end is not in the bucket in time")
            self._topics.leave(partition)
            is_left = True
            _commit(partition, target)
        except ShuttingDown:
            raise  # the next start asks the bucket
        except TierlogError:
            if is_left:
                self._topics.stay(partition)
            partition.accept_appends()
            raise


def _commit(partition: Partition, target: Member) -> None:
    """Returns once it is known that the commit took effect; raises if it did not, and cannot.

    Nothing but an answer of the store ends the doubt about a request that was sent: that the
    version is not there (yet) decides nothing.
    """
    is_unknown = False
    while True:
        try:
            return partition.assign_to(target.folder_id)
        except (FencedError, ShuttingDown):
            raise
        except _HAS_NO_EFFECT:
            if not is_unknown:
                raise
        except TierlogError as error:
            is_unknown = True
            log.warning("a hand-over is not confirmed", partition=str(partition), error=str(error))
        time.sleep(ASK_AGAIN_S)
