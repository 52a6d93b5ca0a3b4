"""Deletes write-ahead objects whose records the manifests name (docs/formats/write-ahead.md).

* Each broker looks after the chains of its own folder; of those of brokers that do not live, the
  one that looks after what nobody leads.
* A topic that the cluster does not have any more needs nothing.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from functools import cache

import structlog

from tierlog.broker.replication.write_ahead_chain import (
    chain_folder,
    chains_of,
    close_chain,
    collect,
)
from tierlog.cold_tier.write_ahead_object import Place
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.checkpoint_files import format_topic_id
from tierlog.record_format.errors import TierlogError, UnknownTopicOrPartition

log = structlog.get_logger(__name__)


class WriteAheadGarbage:
    """`uploaded_end`: where the manifest of a partition ends, by its topic id and number; raises
    UnknownTopic. `follow_topics`: know those that there are.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        uploaded_end: Callable[[str, int], int],
        follow_topics: Callable[[], None],
    ) -> None:
        self._store = store
        self._uploaded_end, self._follow_topics = uploaded_end, follow_topics

    def collect(self, folder: str, *, ended: Callable[[str], bool]) -> int:
        """Of a broker's chains; how many objects. `ended`: chains that nobody writes any more,
        which are closed, so that nothing remains of them but fences. Raises StoreUnavailable.
        """
        deleted, end_of = 0, cache(self._end_of)
        for chain in list(chains_of(self._store, folder)):
            try:
                if ended(chain):
                    close_chain(self._store, chain_folder(chain))
                deleted += collect(
                    self._store,
                    chain_folder(chain),
                    lambda parts: all(one.end_offset <= end_of(one.place) for one in parts),
                )
            except TierlogError as error:
                log.warning("write-ahead objects are kept", chain=chain, error=str(error))
        return deleted

    def folders(self) -> set[str]:
        """The brokers' folders that have chains. Raises StoreUnavailable."""
        return {chain.partition("/")[0] for chain in chains_of(self._store)}

    def _end_of(self, place: Place) -> float:
        topic_id = format_topic_id(uuid.UUID(bytes=place.topic_id))
        try:
            return self._uploaded_end(topic_id, place.partition)
        except UnknownTopicOrPartition:
            self._follow_topics()  # it may be younger than the last look, and older than the object
        try:
            return self._uploaded_end(topic_id, place.partition)
        except UnknownTopicOrPartition:
            return math.inf  # it was deleted
