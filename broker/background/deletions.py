"""Removes what deleted topics have left: files of all topics first, because the disk may need the
room, then objects, then the entry in `topics.json`. Each step may be repeated by the next round or
start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import structlog

from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.host.deferred_errors import DeferredErrors
from tierlog.record_format.errors import FencedError, TierlogError

log = structlog.get_logger(__name__)


class Deletions:
    """Thread-safe: one round at a time removes folders, which another would miss. `is_gone`: see
    `Bucket.delete_topic`.
    """

    def __init__(
        self, topics: LiveTopics, bucket: Bucket | None, *, is_gone: Callable[[str], bool]
    ) -> None:
        self._topics, self._bucket, self._is_gone = topics, bucket, is_gone
        self._round = threading.Lock()

    def run_round(self) -> None:
        """Raises the first error once every topic was tried."""
        with self._round:
            with suppress(OSError):  # `_finish` tries again, and raises it
                self._for_each(self._topics.remove_files)
            self._for_each(self._finish)

    def _for_each(self, act: Callable[[TopicRecord], None]) -> None:
        failures = DeferredErrors(TierlogError, OSError)
        for record in self._topics.deleted():
            if self._topics.is_closed:
                break
            with failures:
                act(record)
        failures.raise_first()

    def _finish(self, record: TopicRecord) -> None:
        if self._topics.is_busy(record):
            return  # an object whose upload is in progress would be left behind
        self._topics.remove_files(record)
        if self._bucket is not None:
            self._delete_objects(self._bucket, record)
        self._topics.forget(record)

    def _delete_objects(self, bucket: Bucket, record: TopicRecord) -> None:
        bucket.store_status.require_store()  # not in another cluster's bucket
        try:
            bucket.delete_topic(record, is_gone=self._is_gone)
        except FencedError as error:
            log.error(
                "objects not deleted: another folder owns them",
                topic=record.name,
                reason=str(error),
            )
