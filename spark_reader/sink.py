"""The `format("tierlog")` sink, for batches and streams.

* At-least-once, as Spark's Kafka sink: an idempotent producer serves one task attempt at a time, so
  that a retried request is appended once; rows of a failed attempt may remain. Exactly once with
  `transactionalId`: see `sink_transactions`.
* A producer serves the worker's next attempt too, unless its own failed: the broker remembers each
  producer for a day, and a stream has thousands of tasks in an hour.
* A task ends when everything it sent is flushed at the broker (acks=all); nothing is left to commit
  or roll back afterwards.
* Only mode append is supported; overwriting a log is an error.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.batch import MAX_SEQUENCE, set_producer
from tierlog.record_format.codecs import CODEC_IDS, CODEC_NAMES
from tierlog.record_format.errors import InvalidOption, closest_match
from tierlog.spark_reader import option_values as read
from tierlog.spark_reader.access import Access, Connections
from tierlog.spark_reader.options import (
    TABLE_HINT,
    TYPO_LIKENESS,
    Option,
    Use,
    access_of,
    read_options,
)
from tierlog.spark_reader.sink_batches import (
    COLUMN_TYPES,
    Batch,
    Batcher,
    TopicMetadata,
    TopicPartition,
)
from tierlog.spark_reader.sink_transactions import (
    Transactional,
    abort_attempts,
    abort_messages,
    begin_attempt,
    commit_epoch,
    commit_job,
    written,
)
from tierlog.spark_reader.source import TYPES

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.sender import Within

_TIMEOUT_MS: Final = 900_000  # Kafka's transaction.max.timeout.ms
_COMPRESSION: Final = Option(read.one_of(*CODEC_NAMES.values()))

_OPTIONS: Final[dict[str, Option]] = {
    "server": Option(read.address),
    "token": Option(read.text, secret=True),
    "tokenFile": Option(read.text),
    "caFile": Option(read.text),
    "topic": Option(read.text),
    "compression": _COMPRESSION,
    "kafka.compression.type": _COMPRESSION,  # of a migrated job
    "exactlyOnce": Option(read.boolean),
    "transactionalId": Option(read.text),
    "transactionTimeout": Option(read.duration_ms),
    "includeHeaders": Option(read.boolean),
    "checkpointLocation": Option(read.text),  # Spark's, which it passes to a stream's sink
}


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    access: Access
    topic: str | None
    codec: int
    transactional: Transactional | None = None  # exactly once


def parse_write_options(given: Mapping[str, str]) -> WriteOptions:
    """Raises InvalidOption."""
    values = read_options(given, _OPTIONS, use=Use.WRITE)
    if "server" not in values:
        hint = "" if values else TABLE_HINT
        raise InvalidOption(
            f"option server: required, since records are written to the broker{hint}"
        )
    return WriteOptions(
        access=access_of(values),
        topic=values.get("topic"),
        codec=CODEC_IDS[values.get("compression") or values.get("kafka.compression.type", "none")],
        transactional=_transactional(values),
    )


def _transactional(values: Mapping[str, Any]) -> Transactional | None:
    transactional_id = values.get("transactionalId")
    is_exact = values.get("exactlyOnce", transactional_id is not None)
    if not is_exact:
        return None
    if transactional_id is None:
        raise InvalidOption("option exactlyOnce: needs a transactionalId, which no other query has")
    return Transactional(transactional_id, values.get("transactionTimeout", _TIMEOUT_MS))


def write_options(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> WriteOptions:
    """Parse the options and check the schema. Raises InvalidOption."""
    if overwrite:
        raise InvalidOption("a log cannot be overwritten; write with mode append")
    options = parse_write_options(given)
    check_columns(schema, options)
    return options


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Raise InvalidOption for a schema that cannot be written."""
    found = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name, kind in found.items():
        allowed = COLUMN_TYPES.get(name)
        if allowed is None:
            _check_typo(name)
        elif kind not in allowed:
            known = ", ".join(f"{one} {' or '.join(kinds)}" for one, kinds in COLUMN_TYPES.items())
            raise InvalidOption(f"column {name} {kind} cannot be written; the columns are: {known}")
    if "value" not in found:
        raise InvalidOption("the frame has no column value, which is required")
    if "topic" not in found and options.topic is None:
        raise InvalidOption("set the option topic, or add a column topic")


def _check_typo(name: str) -> None:
    """Other columns are ignored, as by Kafka's sink, in particular the source's own."""
    near = closest_match(name.lower(), COLUMN_TYPES, cutoff=TYPO_LIKENESS)
    if near and name not in TYPES:
        raise InvalidOption(f"column {name} would not be written; did you mean {near}?")


class Sink:
    """The common part of both writers. Picklable. Without transactions commit and abort do nothing,
    since what the tasks sent is already in the log.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task."""
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        if first is None:  # common for a small aggregation: then the broker is not contacted
            return WriterCommitMessage()
        rows, broker = chain((first,), batches), self._broker()
        if (transactional := self._options.transactional) is not None:
            return self._write_in_transaction(broker, begin_attempt(broker, transactional), rows)
        idle = _idle_producers[self._options.access]
        producer = idle.pop() if idle else _Producer(broker)
        self._send(broker, producer, rows)
        idle.append(producer)  # not after an error: what was appended is unknown
        return WriterCommitMessage()

    def _write_in_transaction(
        self, broker: Client, within: Within, rows: Iterable[pa.RecordBatch]
    ) -> WriterCommitMessage:
        producer = _Producer(broker, within)
        try:
            self._send(broker, producer, rows)
        except BaseException:
            abort_attempts(broker, [within])
            raise
        return written(within, producer.places[0])

    def abort(self, messages: Sequence[WriterCommitMessage | None], *_: int) -> None:
        if self._options.transactional is not None:
            abort_messages(self._broker(), messages)

    def _broker(self) -> Client:
        return Connections(self._options.access).broker_over_restarts()

    def _send(self, broker: Client, producer: _Producer, batches: Iterable[pa.RecordBatch]) -> None:
        batcher = Batcher(
            topic=self._options.topic,
            metadata_of=cache(partial(_metadata, broker)),
            codec=self._options.codec,
            now_ms=wall_clock_ms,
            first_sticky=random.randrange(1 << 16),
        )
        for rows in batches:
            for batch in batcher.add_rows(rows):
                producer.send(batch)
        for batch in batcher.flush():
            producer.send(batch)


def _metadata(broker: Client, topic: str) -> TopicMetadata:
    found = broker.describe_topic(topic)
    limit = int(found.effective_config["max.message.bytes"])
    return TopicMetadata(found.partition_count, limit, found.available_partitions)


class _Producer:
    """An idempotent producer, for one attempt at a time; with `within`, in its transaction."""

    def __init__(self, broker: Client, within: Within | None = None) -> None:
        self._broker, self._within = broker, within
        self._identity = broker.init_producer() if within is None else within.identity
        self._sequences: dict[TopicPartition, int] = {}

    @property
    def places(self) -> list[TopicPartition]:
        """Where it has written."""
        return list(self._sequences)

    def send(self, batch: Batch) -> None:
        """Append one batch and wait until it is flushed. The broker deduplicates the client's
        retries.
        """
        sequence = self._sequences.get(batch.topic_partition, 0)
        set_producer(
            batch.data,
            producer_id=self._identity.producer_id,
            producer_epoch=self._identity.producer_epoch,
            base_sequence=sequence,
            transactional=self._within is not None,
        )
        self._broker.produce_batches(
            batch.topic_partition.topic,
            bytes(batch.data),
            partition=batch.topic_partition.partition,
            transactional_id=None if self._within is None else self._within.transactional_id,
        )
        self._sequences[batch.topic_partition] = (sequence + batch.records) & MAX_SEQUENCE


# Per process: a worker runs one task after the other.
_idle_producers: Final = defaultdict[Access, list[_Producer]](list)


class TierlogWriter(Sink, DataSourceArrowWriter):  # type: ignore[misc]
    """The batch writer. Contacts the broker before tasks start, to report errors early."""

    def __init__(self, options: WriteOptions) -> None:
        super().__init__(options)
        broker = Connections(options.access).broker
        broker.init_producer()
        if options.topic is not None:
            broker.describe_topic(options.topic)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if self._options.transactional is not None:
            commit_job(self._broker(), messages)


class TierlogStreamWriter(Sink, DataSourceStreamArrowWriter):  # type: ignore[misc]
    """The writer of a stream's batches. Spark creates one for each batch and for its commit, so it
    does not contact the broker.
    """

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  Spark's
    ) -> None:
        if (transactional := self._options.transactional) is not None:
            commit_epoch(self._broker(), transactional, messages, batchId)
