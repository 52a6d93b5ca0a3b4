"""Writes to `__consumer_offsets`, and keeps the view in the order of the log.

* Appends are made under `lock`, and applied to the view in that order once they are flushed, never
  in the order in which threads wake up.
* A row that could not be written is `unwritten`: it is retried until it succeeds, or until a later
  commit of its key supersedes it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import structlog

from tierlog.broker.groups.view import GroupView
from tierlog.broker.partition import Partition
from tierlog.broker.topics import Topic
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.record_format.consumer_offsets import (
    Commit,
    CommitKey,
    encode_key,
    encode_value,
    partition_for_group,
)
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.produced import build_produced

log = structlog.get_logger(__name__)


class Row(NamedTuple):
    """`commit` is None for a tombstone."""

    key: CommitKey
    commit: Commit | None


class PendingAppend(NamedTuple):
    """An append in progress; rows are applied in the order of appends."""

    rows: Sequence[Row]
    future: Future[AppendResult]


class OffsetLog:
    """`topic` returns None if the topic does not exist yet. `view` is None until the log was read;
    `lock` guards it and `unwritten`.
    """

    def __init__(self, topic: Callable[[], Topic | None], *, clock: Callable[[], int]) -> None:
        self._topic, self._clock = topic, clock
        self.lock = threading.RLock()
        self.view: GroupView | None = None
        self.unwritten: dict[CommitKey, Commit | None] = {}  # None: a tombstone
        self._pending: deque[PendingAppend] = deque()

    @property
    def known(self) -> GroupView:
        """The view; call it only after the log was read."""
        assert self.view is not None, "the log was not read yet"
        return self.view

    def append(self, home: Partition, rows: Sequence[Row]) -> PendingAppend:
        """Append rows. Call it under the lock: the order of appends is the order of `_pending`."""
        batches = build_produced(
            [None if row.commit is None else encode_value(row.commit) for row in rows],
            keys=[encode_key(row.key) for row in rows],
            timestamps=[self._clock()] * len(rows),
            max_message_bytes=home.log.config.max_message_bytes,
        )
        pending = PendingAppend(rows, home.append(batches, acks=Acks.ALL))
        self._pending.append(pending)
        return pending

    def complete(self, pending: PendingAppend) -> None:
        """Wait for the flush, then apply everything appended up to this, in order."""
        try:
            pending.future.result()
        finally:
            with self.lock:
                while any(one is pending for one in self._pending):
                    self._apply_first()

    def complete_all(self) -> None:
        """Complete every append in progress. Call it under the lock."""
        while self._pending:
            self._apply_first()

    def _apply_first(self) -> None:
        """Hardly waits: earlier appends of a log are flushed no later than the later ones."""
        pending = self._pending.popleft()
        if pending.future.exception() is not None:
            return  # the caller that appended it raises the error
        record_offset = pending.future.result().base_offset
        for key, commit in pending.rows:
            self.unwritten.pop(key, None)
            if commit is None:
                self.known.remove(key)
            else:
                self.known.put(key, commit, record_offset=record_offset)

    def write_unwritten(self) -> None:
        """Try to append the unwritten rows; those that fail stay unwritten."""
        with self.lock:
            started = self._append_unwritten()
        for pending in started:
            try:
                self.complete(pending)
            except TierlogError as error:
                log.warning("offsets not written yet", error=str(error))

    def _append_unwritten(self) -> list[PendingAppend]:
        self.complete_all()  # a commit appended since supersedes the unwritten row of its key
        topic = self._topic()
        if topic is None:
            return []
        by_home: dict[Partition, list[Row]] = {}
        for key in sorted(self.unwritten):
            by_home.setdefault(home_partition(key.group, topic), []).append(
                Row(key, self.unwritten[key])
            )
        started = []
        for home, rows in by_home.items():
            try:
                started.append(self.append(home, rows))
            except TierlogError as error:
                log.warning("offsets not written yet", partition=str(home), error=str(error))
        return started


def home_partition(group: str, topic: Topic) -> Partition:
    """The partition that Kafka would choose; if an adopted folder lacks it, the first it has."""
    wanted = partition_for_group(group, topic.record.partitions)
    return topic.partition(wanted if wanted in topic.numbers else topic.numbers[0])
