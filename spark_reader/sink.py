"""The writing side of `format("tierlog")`, for batches and streams.

Rules that keep it honest:

* At least once, as Spark's Kafka sink: every attempt of a task is an idempotent producer of its
  own, so that a request sent twice is appended once; rows of an attempt that failed may remain.
* A task is done when everything it sent is flushed at the broker (acks=all); there is nothing left
  to commit or to take back afterwards.
* Only appending is known: a batch that would overwrite a log is refused by name.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from record_format.batch import MAX_SEQUENCE, set_producer
from record_format.clock import wall_clock_ms
from record_format.codecs import CODEC_IDS, CODEC_NAMES
from record_format.name_suggestions import closest_match
from spark_reader import columns
from spark_reader import option_values as read
from spark_reader.access import Access, Connections
from spark_reader.option_table import MISTYPED, Option, Use, read_options
from spark_reader.option_values import InvalidOption
from spark_reader.options import access_of
from spark_reader.sink_batches import (
    COLUMN_TYPES,
    Batch,
    Batcher,
    TopicPartition,
    TopicShape,
    rows_of,
)

_COMPRESSION: Final = Option(read.one_of(*CODEC_NAMES.values()))

_OPTIONS: Final[dict[str, Option]] = {
    "server": Option(read.address),
    "token": Option(read.text, secret=True),
    "tokenFile": Option(read.text),
    "caFile": Option(read.text),
    "topic": Option(read.text),
    "compression": _COMPRESSION,
    "kafka.compression.type": _COMPRESSION,  # of a job that was moved
    "includeHeaders": Option(read.boolean),
    "checkpointLocation": Option(read.text),  # Spark's, and handed on to the sink of a stream
}


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    access: Access
    topic: str | None
    codec: int


def parse_write_options(given: Mapping[str, str]) -> WriteOptions:
    """Raises InvalidOption."""
    values = read_options(given, _OPTIONS, use=Use.WRITE)
    if "server" not in values:
        raise InvalidOption("option server: records are written to the broker; give its address")
    return WriteOptions(
        access=access_of(values),
        topic=values.get("topic"),
        codec=CODEC_IDS[values.get("compression") or values.get("kafka.compression.type", "none")],
    )


def write_options(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> WriteOptions:
    """Everything that decides whether a write can begin. Raises InvalidOption."""
    if overwrite:
        raise InvalidOption("a log cannot be overwritten: write with mode append")
    options = parse_write_options(given)
    check_columns(schema, options)
    return options


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Raises InvalidOption for a frame that cannot be written."""
    found = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name, kind in found.items():
        allowed = COLUMN_TYPES.get(name)
        if allowed is None:
            _refuse_if_mistyped(name)
        elif kind not in allowed:
            known = ", ".join(f"{one} {' or '.join(kinds)}" for one, kinds in COLUMN_TYPES.items())
            raise InvalidOption(f"column {name} {kind} cannot be written; there are: {known}")
    if "value" not in found:
        raise InvalidOption("there is no column value, which a record needs")
    if "topic" not in found and options.topic is None:
        raise InvalidOption("give the option topic, or a column topic")


def _refuse_if_mistyped(name: str) -> None:
    """Other columns are passed over, as by Kafka's sink, those that the source gives above all."""
    near = closest_match(name.lower(), COLUMN_TYPES, cutoff=MISTYPED)
    if near and name not in columns.TYPES:
        raise InvalidOption(f"column {name} is not one that is written; did you mean {near}?")


class Sink:
    """What both writers do. Picklable. What the tasks sent is already in the log: committing or
    aborting does nothing.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task."""
        rows = (row for batch in iterator for row in rows_of(batch))
        first = next(rows, None)
        if first is None:  # as of most tasks of a small aggregation: the broker hears nothing of it
            return WriterCommitMessage()
        producer = _Producer(self._options.access)
        batcher = Batcher(
            topic=self._options.topic,
            shape_of=producer.shape_of,
            codec=self._options.codec,
            now_ms=wall_clock_ms,
            first_sticky=random.randrange(1 << 16),
        )
        for row in chain((first,), rows):
            for batch in batcher.add(row):
                producer.send(batch)
        for batch in batcher.flush():
            producer.send(batch)
        return WriterCommitMessage()


class _Producer:
    """One attempt of one task, as the broker knows it, whose restart it waits for. Not shared."""

    def __init__(self, access: Access) -> None:
        self._broker = Connections(access, patient=True).broker
        self._identity = self._broker.init_producer()
        self._sequences: dict[TopicPartition, int] = {}
        self._shapes: dict[str, TopicShape] = {}

    def shape_of(self, topic: str) -> TopicShape:
        if topic not in self._shapes:
            found = self._broker.describe_topic(topic)
            limit = found.effective_config["max.message.bytes"]
            self._shapes[topic] = TopicShape(
                found.partition_count, int(limit), found.available_partitions
            )
        return self._shapes[topic]

    def send(self, batch: Batch) -> None:
        """Append one batch and wait until it is flushed; a retry by the client is recognised as
        one.
        """
        sequence = self._sequences.get(batch.place, 0)
        set_producer(
            batch.data,
            producer_id=self._identity.producer_id,
            producer_epoch=self._identity.producer_epoch,
            base_sequence=sequence,
        )
        self._broker.produce_batches(
            batch.place.topic, bytes(batch.data), partition=batch.place.partition
        )
        self._sequences[batch.place] = (sequence + batch.records) & MAX_SEQUENCE


class TierlogWriter(Sink, DataSourceArrowWriter):  # type: ignore[misc]
    """Of a batch. The broker is asked before there are tasks, so that what cannot work is reported
    at once.
    """

    def __init__(self, options: WriteOptions) -> None:
        super().__init__(options)
        broker = Connections(options.access).broker
        broker.init_producer()
        if options.topic is not None:
            broker.describe_topic(options.topic)


class TierlogStreamWriter(Sink, DataSourceStreamArrowWriter):  # type: ignore[misc]
    """Of a stream's batches. Created again for each batch, and to commit it, so it asks the broker
    nothing.
    """
