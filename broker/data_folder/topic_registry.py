"""The topics of this data folder, and which of them are yet to be published to the bucket.

`<data>/tierlog/topics.json` is authoritative for the owner: a topic exists once it is listed there,
fsynced.

* A topic is identified by its id, never by its name alone: a name may be used again.
* A deleted topic stays listed until its files and objects are gone, so that the next start finishes
  what a crash interrupted.
* Thread-safe; each change is durable when the call returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from tierlog.broker.data_folder.data_folder import Document
from tierlog.host.durable_file import write_durably
from tierlog.manifest.topic_objects import TopicObject
from tierlog.record_format.errors import ShuttingDown
from tierlog.record_format.topic_rules import ConfigValue

INTERNAL_PREFIX: Final = "__"
REPLICATION_STORE: Final = "replication.store"


class TopicRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`dirty`: the bucket does not have this state yet. `absent`: partitions that an adopted folder
    lacks, or that are elsewhere in the cluster. `unclean`: those that Kafka left with gaps that
    only its clean shutdown would explain. `version`: of the topic's name in the cluster; 0 outside
    of one.
    """

    name: str
    topic_id: str
    partitions: int
    config: dict[str, ConfigValue]
    created_ms: int
    replication_factor: int = 1
    dirty: bool = True
    deleted: bool = False
    absent: tuple[int, ...] = ()
    unclean: tuple[int, ...] = ()
    version: int = 0

    @property
    def is_replicated(self) -> bool:
        """Whether several brokers have each partition, or the bucket as one more: a set says who
        leads.
        """
        return self.replication_factor > 1 or self.config.get(REPLICATION_STORE, "none") != "none"

    @property
    def internal(self) -> bool:
        return self.name.startswith(INTERNAL_PREFIX)

    def as_object(self) -> TopicObject:
        """The topic object for the bucket."""
        return TopicObject(
            name=self.name,
            topic_id=self.topic_id,
            partitions=self.partitions,
            config=self.config,
            created_ms=self.created_ms,
        )

    def is_state_of(self, there: TopicObject) -> bool:
        """Whether the bucket has this state of the topic, by the newest version there."""
        now = self.partitions, self.config
        return not there.deleted and (there.partitions, dict(there.config)) == now

    def partition_numbers(self) -> list[int]:
        return [p for p in range(self.partitions) if p not in self.absent]


class _Topics(msgspec.Struct, frozen=True, kw_only=True):
    topics: list[TopicRecord]


TOPICS: Final = Document("topics.json", "topics", _Topics)


class TopicRegistry:
    def __init__(
        self, data_dir: Path, *, write: Callable[[Path, bytes], None] = write_durably
    ) -> None:
        self._data_dir, self._write_file = data_dir, write
        self._lock = threading.Lock()
        self._by_id: dict[str, TopicRecord] = {}
        known = TOPICS.read_document(data_dir)
        if known is not None:
            self._by_id = {record.topic_id: record for record in known.topics}

    def live(self) -> list[TopicRecord]:
        return [record for record in self._by_id.copy().values() if not record.deleted]

    def deleted(self) -> list[TopicRecord]:
        return [record for record in self._by_id.copy().values() if record.deleted]

    def ids(self) -> frozenset[str]:
        """The ids of all topics, including those that are being deleted."""
        return frozenset(self._by_id.copy())

    def unpublished(self, topic_id: str) -> TopicRecord | None:
        """The topic as it is now; None if it was deleted, or the bucket has that state."""
        record = self._by_id.get(topic_id)
        return record if record is not None and record.dirty and not record.deleted else None

    def by_name(self, name: str) -> TopicRecord | None:
        return next((record for record in self.live() if record.name == name), None)

    def put_topics(self, *records: TopicRecord) -> None:
        with self._lock:
            self._save(self._by_id | {record.topic_id: record for record in records})

    def forget(self, topic_id: str) -> None:
        with self._lock:
            self._save({key: value for key, value in self._by_id.items() if key != topic_id})

    def mark_published(self, records: Iterable[TopicRecord]) -> None:
        """The bucket has these states of topics. A newer state stays dirty."""
        with self._lock:
            clean = {
                record.topic_id: msgspec.structs.replace(record, dirty=False)
                for record in records
                if self._by_id.get(record.topic_id) is record  # it may be equal again
            }
            if clean:
                self._save(self._by_id | clean)

    def mark_unpublished(self, topic_id: str) -> None:
        """The bucket no longer has the topic's state."""
        with self._lock:
            if (record := self._by_id.get(topic_id)) is not None:
                dirty = msgspec.structs.replace(record, dirty=True)
                self._save(self._by_id | {topic_id: dirty})

    def _save(self, records: dict[str, TopicRecord]) -> None:
        """Raises ShuttingDown, OSError. After an OSError the new file may already be in place, and
        the next start would see the refused change: the old content is restored if the disk allows.
        """
        try:
            self._write(records)
        except OSError:
            with suppress(OSError, ShuttingDown):
                self._write(self._by_id)
            raise
        self._by_id = records

    def _write(self, records: Mapping[str, TopicRecord]) -> None:
        topics = _Topics(topics=sorted(records.values(), key=lambda record: record.name))
        TOPICS.write_document(self._data_dir, topics, write=self._write_file)
