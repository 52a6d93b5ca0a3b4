"""Logs that a repair cut shorter, until the groups that had read further are set back.

`<data>/tierlog/cuts.json` has them by topic id and partition: where the log ended then, or null
before that was known.

* A cut is noted before its first byte is cut, and forgotten once the groups' new offsets are
  flushed: after a crash in between, or if the groups' offsets cannot be read or written, it is done
  later.
* A cut that startup finds without an end is looked at before anything is appended.

Thread-safe; each change is durable when the call returns.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Final

from broker.data_folder import (
    DataFolder,
    TopicIdPartition,
    format_topic_id_partition,
    parse_topic_id_partition,
)
from broker.partition import Partition
from record_format import sealed_json

KIND: Final = "cuts"


class Truncations:
    def __init__(self, folder: DataFolder) -> None:
        self._folder, self._path = folder, folder.path / "tierlog" / "cuts.json"
        self._lock = threading.Lock()
        self._noted: dict[str, int | None] = {}
        if self._path.exists():
            self._noted = sealed_json.decode(
                self._path.read_bytes(),
                kind=KIND,
                file=str(self._path),
                document=dict[str, int | None],
            )

    @property
    def ends(self) -> dict[TopicIdPartition, int]:
        """Where each log ended that groups still have to follow."""
        return {
            parse_topic_id_partition(name): end
            for name, end in self._noted.items()
            if end is not None
        }

    def begin(self, place: TopicIdPartition) -> None:
        """Call it before anything is cut. Raises ShuttingDown, OSError."""
        self._note(place, None)

    def end(self, place: TopicIdPartition, end_offset: int) -> None:
        """Note from where on offsets are assigned again. Raises ShuttingDown, OSError."""
        self._note(place, end_offset)

    def look(self, partitions: Iterable[Partition], topic_ids: Collection[str]) -> None:
        """At startup: find the ends of logs whose cut was interrupted, and forget topics that are
        gone.
        """
        if not self._noted:
            return
        ends = {
            format_topic_id_partition(one.log.topic_id, one.number): one.log.log_end_offset
            for one in partitions
        }
        with self._lock:
            self._save(
                {
                    name: ends.get(name) if end is None else end
                    for name, end in self._noted.items()
                    if parse_topic_id_partition(name)[0] in topic_ids
                }
            )

    def forget(self, done: Iterable[tuple[TopicIdPartition, int]]) -> None:
        """Groups have followed these ends. Raises ShuttingDown, OSError."""
        gone = {(format_topic_id_partition(*place), end) for place, end in done}
        with self._lock:
            self._save({name: end for name, end in self._noted.items() if (name, end) not in gone})

    def _note(self, place: TopicIdPartition, end_offset: int | None) -> None:
        with self._lock:
            self._save({**self._noted, format_topic_id_partition(*place): end_offset})

    def _save(self, noted: dict[str, int | None]) -> None:
        if noted != self._noted:
            self._folder.write(self._path, sealed_json.encode(noted, kind=KIND))
            self._noted = noted
