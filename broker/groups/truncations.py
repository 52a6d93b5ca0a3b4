"""Logs that a repair truncated, or of which a restore found nothing, until the groups that had read
further are set back.

`<data>/tierlog/cuts.json` maps topic id and partition to the log's new end; null until it is known.

* A truncation is recorded before the first byte is removed, and forgotten once the groups' new
  offsets are flushed. After a crash in between, or if the offsets cannot be read or written, the
  groups are set back later.
* If startup finds a truncation without an end, it records the log's end before anything is
  appended.

Thread-safe; each change is durable when the call returns.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Final

from tierlog.broker.data_folder import (
    DataFolder,
    Document,
    TopicIdPartition,
    format_topic_id_partition,
    parse_topic_id_partition,
)
from tierlog.broker.partition import Partition

TRUNCATIONS: Final = Document("cuts.json", "cuts", dict[str, int | None])


class Truncations:
    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ends = TRUNCATIONS.read(folder.path) or {}

    @property
    def ends(self) -> dict[TopicIdPartition, int]:
        """The new ends of truncated logs, where they are known."""
        return {
            parse_topic_id_partition(name): end
            for name, end in self._ends.items()
            if end is not None
        }

    def begin(self, place: TopicIdPartition) -> None:
        """Record a truncation that is about to begin. Raises ShuttingDown, OSError."""
        self._put(place, None)

    def end(self, place: TopicIdPartition, end_offset: int) -> None:
        """Record the new end: from there on offsets are assigned again. Raises ShuttingDown,
        OSError.
        """
        self._put(place, end_offset)

    def reconcile_at_start(
        self, partitions: Iterable[Partition], topic_ids: Collection[str]
    ) -> None:
        """Record the ends of logs whose truncation was interrupted; forget deleted topics."""
        if not self._ends:
            return
        ends = {
            format_topic_id_partition(one.log.topic_id, one.number): one.log.log_end_offset
            for one in partitions
        }
        with self._lock:
            self._save(
                {
                    name: ends.get(name) if end is None else end
                    for name, end in self._ends.items()
                    if parse_topic_id_partition(name)[0] in topic_ids
                }
            )

    def forget(self, done: Iterable[tuple[TopicIdPartition, int]]) -> None:
        """Remove truncations that groups have followed. Raises ShuttingDown, OSError."""
        gone = {(format_topic_id_partition(*place), end) for place, end in done}
        with self._lock:
            self._save({name: end for name, end in self._ends.items() if (name, end) not in gone})

    def _put(self, place: TopicIdPartition, end_offset: int | None) -> None:
        with self._lock:
            self._save({**self._ends, format_topic_id_partition(*place): end_offset})

    def _save(self, ends: dict[str, int | None]) -> None:
        if ends != self._ends:
            TRUNCATIONS.write(self._folder.path, ends, write=self._folder.write)
            self._ends = ends
