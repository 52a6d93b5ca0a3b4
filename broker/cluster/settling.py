"""Claims what is assigned to this broker, and has its replicas look at what may have changed.

* A place is a replica's, or this folder's alone; which of the two, only the bucket says of one that
  is not here yet. Where there is or was a replica the manifest alone says nothing.
* What cannot be claimed now is later: whoever settles it again finds it as it is then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import structlog

from tierlog.broker.cluster.cluster_topics import ClusterTopics
from tierlog.broker.cluster.news import News
from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.replicas import Replicas
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.record_format.errors import TierlogError, UnknownTopicOrPartition

log = structlog.get_logger(__name__)


class Settling:
    """Thread-safe; one at a time for a partition. `on_led`: a partition that is this folder's alone
    is led here from now on.
    """

    def __init__(
        self,
        topics: LiveTopics,
        all_topics: ClusterTopics,
        replicas: Replicas,
        news: News,
        *,
        on_led: Callable[[Partition], None],
    ) -> None:
        self._topics, self._all_topics, self._replicas = topics, all_topics, replicas
        self._news, self._on_led = news, on_led
        self._being_settled: set[TopicIdPartition] = set()
        self._settled = threading.Condition()

    def settle_all(self, places: Iterable[TopicIdPartition], *, is_named: bool = False) -> None:
        """Claim what was assigned to this broker; what cannot be claimed now is later. `is_named`:
        it is to lead what nobody leads, or to have what only the bucket has; else its turn comes.
        """
        self._news.in_threads([partial(self._settle, place, is_named=is_named) for place in places])

    def _settle(self, place: TopicIdPartition, *, is_named: bool) -> None:
        try:
            if self._replicas.has(place):
                self._replicas.settle(place, is_named=is_named)
                return
            with self._settling(place):
                self._settle_new(place, is_named=is_named)
        except UnknownTopicOrPartition:
            pass  # it was deleted meanwhile
        except (TierlogError, OSError) as error:
            log.warning("a partition cannot be claimed", partition=place, error=str(error))

    def _settle_new(self, place: TopicIdPartition, *, is_named: bool) -> None:
        """Of which there is no replica here. Where there was one, the manifest alone says nothing:
        its owner may be the last that uploaded.
        """
        record, was_replica = self._topics.find_by_id(place[0]).record, self._replicas.keeps(place)
        looks_first = was_replica or record.is_replicated
        settle = partial(self._replicas.settle, place, is_named=is_named)
        if looks_first and (settle() or was_replica):
            return
        if not self._settle_alone(record, place) and not looks_first:
            settle()

    def _settle_alone(self, record: TopicRecord, place: TopicIdPartition) -> bool:
        """Whether the partition is this folder's alone."""
        was_here = place[1] in self._topics.find_by_id(place[0]).partitions
        if record.internal:
            self._all_topics.follow_all()  # what is in it counts for topics that exist
        partition = self._topics.settle(*place)
        if partition is not None and not was_here:
            self._on_led(partition)
        return partition is not None

    @contextmanager
    def _settling(self, place: TopicIdPartition) -> Iterator[None]:
        """One at a time for a partition; whoever comes second looks again."""
        with self._settled:
            self._settled.wait_for(lambda: place not in self._being_settled)
            self._being_settled.add(place)
        try:
            yield
        finally:
            with self._settled:
                self._being_settled.discard(place)
                self._settled.notify_all()
