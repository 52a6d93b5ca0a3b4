"""Turns rows into record batches for the sink. Uses neither Spark nor the network.

* The columns are those of Spark's Kafka sink: `value`, and optionally `key`, `headers`, `topic` and
  `partition`; in addition, `timestamp`. Others are ignored.
* A row goes to its `partition`, or by murmur2 of its key, as Kafka's clients do; rows with neither
  stick to one partition per batch.
* Memory is bounded: at most `FLUSH_BYTES` and one row are pending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa

from record_format.encode import Headers, encode_batches
from record_format.errors import InvalidRecord
from record_format.murmur2 import partition_for_key

BATCH_BYTES: Final = 512 * 1024
FLUSH_BYTES: Final = 16 * 1024 * 1024
ROW_BYTES: Final = 64  # memory overhead per row

_BINARY: Final = ("binary", "string")
COLUMN_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "key": _BINARY,
    "value": _BINARY,
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class Batch(NamedTuple):
    """A record batch whose producer fields are not set yet."""

    topic_partition: TopicPartition
    data: bytearray
    records: int


@dataclass
class _Pending:
    """Pending rows of one partition, by column."""

    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)
    size_bytes: int = 0


class TopicMetadata(NamedTuple):
    """`available_partitions` are those that accept rows without a key or partition."""

    partitions: int
    max_message_bytes: int
    available_partitions: Sequence[int]


class Row(NamedTuple):
    topic: str | None
    partition: int | None
    key: bytes | None
    value: bytes | None
    timestamp: int | None
    headers: Headers


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of Spark's Arrow batch; strings become their UTF-8 bytes."""
    empty = [None] * batch.num_rows
    names = batch.schema.names

    def column(name: str) -> Sequence[Any]:
        if name not in names:
            return empty
        found = batch.column(name)
        if name in {"key", "value"}:
            found = found.cast(pa.binary())
        if name == "timestamp":
            found = found.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        listed: list[Any] = found.to_pylist()
        return listed

    columns = [column(name) for name in ("topic", "partition", "key", "value", "timestamp")]
    for topic, partition, key, value, micros, headers in zip(
        *columns, column("headers"), strict=True
    ):
        pairs = tuple(map(_header, headers or ()))
        yield Row(topic, partition, key, value, None if micros is None else micros // 1000, pairs)


def _header(given: Mapping[str, Any] | None) -> tuple[str, bytes | None]:
    if given is None or given["key"] is None:
        raise InvalidRecord("a row has a header without a key")
    return given["key"], given["value"]


class Batcher:
    """Collects rows by partition and yields batches when they are large enough. Not thread-safe."""

    def __init__(
        self,
        *,
        topic: str | None,
        metadata_of: Callable[[str], TopicMetadata],
        codec: int,
        now_ms: Callable[[], int],
        first_sticky: int = 0,
    ) -> None:
        self._topic, self._metadata_of, self._codec, self._now_ms = (
            topic,
            metadata_of,
            codec,
            now_ms,
        )
        self._pending: dict[TopicPartition, _Pending] = {}
        self._sticky = first_sticky
        self._size_bytes = 0

    def add(self, row: Row) -> Iterator[Batch]:
        """Add a row and yield the batches that are ready to be sent. Raises InvalidRecord."""
        topic = self._topic if self._topic is not None else row.topic
        if topic is None:
            raise InvalidRecord("a row has no topic, and the option topic is not set")
        target = TopicPartition(topic, self._partition(topic, row))
        if (pending := self._pending.get(target)) is None:
            pending = self._pending[target] = _Pending()
        size = ROW_BYTES + len(row.key or b"") + len(row.value or b"")
        if row.headers:
            size += sum(len(name) + len(content or b"") + 8 for name, content in row.headers)
        pending.values.append(row.value)
        pending.keys.append(row.key)
        pending.timestamps.append(self._now_ms() if row.timestamp is None else row.timestamp)
        pending.headers.append(row.headers)
        pending.size_bytes += size
        self._size_bytes += size
        if pending.size_bytes >= BATCH_BYTES:
            yield from self._encode(target)
            if row.key is None and row.partition is None:
                self._sticky += 1
        elif self._size_bytes >= FLUSH_BYTES:
            yield from self.flush()

    def flush(self) -> Iterator[Batch]:
        """Yield batches of all pending rows."""
        for target in list(self._pending):
            yield from self._encode(target)

    def _partition(self, topic: str, row: Row) -> int:
        partitions, _, available_partitions = self._metadata_of(topic)
        if row.partition is not None:
            if not 0 <= row.partition < partitions:
                raise InvalidRecord(
                    f"a row is for {topic}-{row.partition}, but the topic has {partitions} "
                    "partitions (without a column partition, rows are partitioned by key)"
                )
            return row.partition
        if row.key is not None:
            return partition_for_key(row.key, partitions)
        return available_partitions[self._sticky % len(available_partitions)]

    def _encode(self, target: TopicPartition) -> Iterator[Batch]:
        pending = self._pending.pop(target)
        self._size_bytes -= pending.size_bytes
        has_headers = any(pending.headers)
        for one in encode_batches(
            pending.values,
            keys=pending.keys,
            timestamps=pending.timestamps,
            headers=pending.headers if has_headers else None,
            codec=self._codec,
            max_bytes=self._metadata_of(target.topic).max_message_bytes,
        ):
            yield Batch(target, one.batch, one.end - one.start)
