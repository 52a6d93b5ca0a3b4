"""Turns Arrow batches of rows into record batches for the sink. Uses neither Spark nor the network.

* The columns are those of Spark's Kafka sink: `value`, and optionally `key`, `headers`, `topic` and
  `partition`; in addition, `timestamp`. Others are ignored.
* A row goes to its `partition`, or by murmur2 of its key, as Kafka's clients do; rows with neither
  stick to one partition per batch. The rows of a partition keep their order.
* Rows are routed by column: the only objects per row are its bytes.
* Memory is bounded: at most `FLUSH_BYTES` and one of Spark's batches are pending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tierlog.record_format.encode import NO_HEADERS, Headers, encode_batches
from tierlog.record_format.errors import InvalidRecord
from tierlog.record_format.topic_rules import partition_for_key

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

_INSTANT: Final = pa.timestamp("us", "UTC")


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class Batch(NamedTuple):
    """A record batch whose producer fields are not set yet."""

    topic_partition: TopicPartition
    data: bytearray
    records: int


class _Rows(NamedTuple):
    """Rows by column, as they are encoded."""

    values: list[bytes | None]
    keys: list[bytes | None]
    timestamps: list[int]
    headers: list[Headers]


@dataclass
class _Pending:
    """Pending rows of one partition."""

    rows: _Rows = field(default_factory=lambda: _Rows([], [], [], []))
    size_bytes: int = 0

    def append_rows(self, rows: _Rows, indices: Sequence[int], *, size_bytes: int) -> None:
        columns: zip[tuple[list[Any], list[Any]]] = zip(self.rows, rows, strict=True)
        for pending, column in columns:
            pending += map(column.__getitem__, indices)
        self.size_bytes += size_bytes


class TopicMetadata(NamedTuple):
    """`available_partitions` are those that accept rows without a key or partition."""

    partitions: int
    max_message_bytes: int
    available_partitions: Sequence[int]


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
        self._topic, self._metadata_of, self._codec = topic, metadata_of, codec
        self._now_ms = now_ms
        self._pending: dict[TopicPartition, _Pending] = {}
        self._sticky = first_sticky
        self._size_bytes = 0

    def add_rows(self, batch: pa.RecordBatch) -> Iterator[Batch]:
        """Add the rows of one of Spark's batches and yield what is ready to be sent. Raises
        InvalidRecord.
        """
        rows = _columns(batch, now_ms=self._now_ms())
        count = max(1, rows.num_rows * BATCH_BYTES // max(1, rows.nbytes))
        for start in range(0, rows.num_rows, count):
            yield from self._add_slice(rows.slice(start, count))
            if self._size_bytes >= FLUSH_BYTES:
                yield from self.flush()

    def flush(self) -> Iterator[Batch]:
        """Yield batches of all pending rows."""
        for target in list(self._pending):
            yield from self._encode(target)

    def _add_slice(self, rows: pa.RecordBatch) -> Iterator[Batch]:
        listed, sizes = _listed(rows), _sizes_bytes(rows)
        for target, indices in self._routed(rows):
            pending = self._pending.setdefault(target, _Pending())
            size = int(sizes[indices].sum())
            pending.append_rows(listed, indices.tolist(), size_bytes=size)
            self._size_bytes += size
            if pending.size_bytes >= BATCH_BYTES:
                yield from self._encode(target)
                if target.partition == self._sticky_partition(target.topic):
                    self._sticky += 1

    def _routed(self, rows: pa.RecordBatch) -> Iterator[tuple[TopicPartition, Any]]:
        """The indices of each partition's rows, in their order, as a NumPy array."""
        given, keys = _column(rows, "partition", pa.int32()), _column(rows, "key", pa.binary())
        for topic, of_topic in self._by_topic(rows):
            partitions = self._partitions(topic, given.take(of_topic), keys.take(of_topic))
            for partition, indices in _grouped(partitions):
                yield TopicPartition(topic, partition), of_topic[indices]

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, Any]]:
        if self._topic is not None:
            yield self._topic, np.arange(rows.num_rows)
            return
        topics = rows["topic"].dictionary_encode()
        if topics.null_count:
            raise InvalidRecord("a row has no topic, and the option topic is not set")
        for number, indices in _grouped(topics.indices):
            yield topics.dictionary[number].as_py(), indices

    def _partitions(self, topic: str, given: pa.Array, keys: pa.Array) -> pa.Array:
        """The partition of each row, by its own and its key."""
        count = self._metadata_of(topic).partitions
        for number in pc.min_max(given).as_py().values():
            if number is not None and not 0 <= number < count:
                raise InvalidRecord(
                    f"a row is for {topic}-{number}, but the topic has {count} partitions "
                    "(without a column partition, rows are partitioned by key)"
                )
        if not given.null_count:
            return given
        encoded = keys.dictionary_encode()
        by_key = [partition_for_key(key, count) for key in encoded.dictionary.to_pylist()]
        chosen = pa.array(by_key, pa.int32()).take(encoded.indices)
        return pc.coalesce(given, chosen, pa.scalar(self._sticky_partition(topic), pa.int32()))

    def _sticky_partition(self, topic: str) -> int:
        """Where rows without a key and partition go now."""
        available = self._metadata_of(topic).available_partitions
        return available[self._sticky % len(available)]

    def _encode(self, target: TopicPartition) -> Iterator[Batch]:
        pending = self._pending.pop(target)
        self._size_bytes -= pending.size_bytes
        values, keys, timestamps, headers = pending.rows
        for one in encode_batches(
            values,
            keys=keys if keys.count(None) < len(keys) else None,
            timestamps=timestamps,
            headers=headers if any(headers) else None,
            codec=self._codec,
            max_bytes=self._metadata_of(target.topic).max_message_bytes,
        ):
            yield Batch(target, one.batch, one.end - one.start)


def _columns(batch: pa.RecordBatch, *, now_ms: int) -> pa.RecordBatch:
    """The columns that are written: strings as their UTF-8 bytes, timestamps in milliseconds."""
    columns = {name: batch[name] for name in batch.schema.names if name in COLUMN_TYPES}
    for name in columns.keys() & {"key", "value"}:
        columns[name] = columns[name].cast(pa.binary())
    times = _column(batch, "timestamp", _INSTANT).cast(_INSTANT).cast(pa.int64())
    milliseconds = pa.array(np.asarray(times.fill_null(0)) // 1000)  # rounds down, unlike pc.divide
    columns["timestamp"] = pc.if_else(times.is_null(), now_ms, milliseconds)
    return pa.RecordBatch.from_pydict(columns)


def _column(rows: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    """All null if the rows do not have it."""
    return rows[name] if name in rows.schema.names else pa.nulls(rows.num_rows, kind)


def _listed(rows: pa.RecordBatch) -> _Rows:
    headers = _column(rows, "headers", pa.null()).to_pylist()
    return _Rows(
        rows["value"].to_pylist(),
        _column(rows, "key", pa.binary()).to_pylist(),
        rows["timestamp"].to_pylist(),
        [*map(_headers, headers)],
    )


def _sizes_bytes(rows: pa.RecordBatch) -> Any:
    """The size of each row in memory, as a NumPy array; headers count by their mean."""
    headers = _column(rows, "headers", pa.null())
    sizes = np.full(rows.num_rows, ROW_BYTES + headers.nbytes // rows.num_rows)
    for name in ("key", "value"):
        sizes += pc.binary_length(_column(rows, name, pa.binary())).fill_null(0)
    return sizes


def _grouped(numbers: pa.Array) -> Iterator[tuple[int, Any]]:
    """The indices of each number, in their order, as a NumPy array."""
    order = np.argsort(numbers, kind="stable")
    ordered = np.asarray(numbers)[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    for start, end in pairwise((*starts.tolist(), len(ordered))):
        yield int(ordered[start]), order[start:end]


def _headers(given: Sequence[Mapping[str, Any] | None] | None) -> Headers:
    if not given:
        return NO_HEADERS
    if any(one is None or one["key"] is None for one in given):
        raise InvalidRecord("a row has a header without a key")
    return tuple((one["key"], one["value"]) for one in given if one is not None)
