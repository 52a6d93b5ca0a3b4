"""The handlers of the produce calls: a body becomes batches, one append per partition.

* Nothing is appended before the whole body was parsed, checked and encoded for every partition.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

from tierlog.api.http import strict_json
from tierlog.api.http.context import UNKNOWN_SIZE, Context
from tierlog.api.http.control_requests import no_body
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.produce.append import append
from tierlog.api.http.produce.batches import (
    AS_PRODUCED,
    build_appends,
    check_batches,
    is_small_uncompressed_batch,
    limits_of,
)
from tierlog.api.http.produce.columns import (
    RecordColumns,
    decode_base64,
    parse_envelopes,
    parse_json,
    parse_values,
    single_value,
)
from tierlog.api.http.produce.head import ProduceQuery, ProduceRequest, read_head, refuse_internal
from tierlog.api.http.produce.partitioner import split_by_partition
from tierlog.api.http.request import bodies, media_types
from tierlog.api.http.responses import Response, json_response
from tierlog.api.http.schemas import ProducerIdentity
from tierlog.broker.partition import Partition
from tierlog.broker.topics import Topic
from tierlog.record_format.errors import UnknownPartition
from tierlog.record_format.produced import ProducedBatches

_FIRST_PRODUCER_ID: Final = 2**32
_END_PRODUCER_ID: Final = 2**53  # JSON readers that use doubles are exact below it


async def produce_to_topic(context: Context, exchange: Exchange) -> Response:
    refuse_internal(exchange.topic)
    return await _produce(context, exchange, partition=None)


async def produce_to_partition(context: Context, exchange: Exchange) -> Response:
    refuse_internal(exchange.topic)
    topic = context.broker.topic(exchange.topic)
    return await _produce(context, exchange, partition=topic.partition(exchange.partition))


async def _produce(
    context: Context, exchange: Exchange, *, partition: Partition | None
) -> Response:
    request = read_head(context, exchange, partition)
    encoding = media_types.content_encoding(exchange.header(b"content-encoding"))
    async with bodies.received_body(exchange, context.settings, context.inflight) as body:
        appends = await context.compute(
            _work_bytes(request, body, encoding),
            lambda: _prepare(context, request, body=body, encoding=encoding),
        )
        return await append(context, request, appends)


def _work_bytes(request: ProduceRequest, body: bytes | bytearray, encoding: str) -> int:
    """Estimate the work of a body, in bytes of JSON. A compressed body may expand to any size: it
    goes to a thread. A raw batch that is stored unchanged takes less than a sixteenth of the time,
    and handing it to a thread costs as much as checking 1 MiB of it.
    """
    if encoding:
        return UNKNOWN_SIZE
    if request.media_type != media_types.BATCHES:
        return len(body)
    if not is_small_uncompressed_batch(body):
        return UNKNOWN_SIZE
    stays = request.topic.config.compression_type in (AS_PRODUCED, "uncompressed")
    return len(body) // 16 if stays else len(body)


def _prepare(
    context: Context, request: ProduceRequest, *, body: bytes | bytearray, encoding: str
) -> dict[int, ProducedBatches]:
    """Parse and check the body: the batches of each partition. May run in a thread."""
    settings = context.settings
    body = bodies.expand(body, encoding, max_bytes=settings.expanded_max_bytes)
    config = request.topic.config
    limits = limits_of(config, settings, now_ms=settings.clock())
    if request.media_type == media_types.BATCHES:
        assert request.partition is not None, "checked by `read_head`"
        produced = check_batches(
            body if isinstance(body, bytearray) else bytearray(body),
            limits,
            config.compression_type,
        )
        return {request.partition.number: produced}
    columns = _parse(request, body, records_max=settings.records_max)
    return build_appends(
        _by_partition(request, columns), limits, config.compression_type, request.producer
    )


def _parse(request: ProduceRequest, body: bytes | bytearray, *, records_max: int) -> RecordColumns:
    if request.media_type == media_types.JSON:
        return parse_json(body, records_max=records_max)
    if request.media_type == media_types.OCTETS:
        return single_value(body, key=_key(request.query))
    parse = parse_envelopes if request.query.envelope else parse_values
    return parse(body, records_max=records_max)


def _key(query: ProduceQuery) -> bytes | None:
    if isinstance(query.key_base64, str):
        return decode_base64(query.key_base64, loc="key_base64")
    return query.key.encode() if isinstance(query.key, str) else None


def _by_partition(request: ProduceRequest, columns: RecordColumns) -> Mapping[int, RecordColumns]:
    topic = request.topic
    if request.partition is None:
        split = split_by_partition(
            columns, sticky=topic.next_partition(), count=topic.record.partitions
        )
        for number in split:
            _check_partition(topic, number, columns)
        return split
    number = request.partition.number
    for index, chosen in enumerate(columns.partitions or ()):
        if chosen not in (None, number):
            strict_json.refuse_field(
                columns.path(index, "partition"), f"{chosen}, but the path says partition {number}"
            )
    return {number: columns}


def _check_partition(topic: Topic, number: int, columns: RecordColumns) -> None:
    """Raise what `Topic.partition` does, before anything is appended."""
    try:
        topic.partition(number)
    except UnknownPartition:
        chosen = columns.partitions or ()
        if number not in chosen:  # chosen by a key: the data folder lacks some of the partitions
            raise
        place = columns.path(chosen.index(number), "partition")
        raise UnknownPartition(topic.record.name, number, place=place) from None


async def new_producer(context: Context, exchange: Exchange) -> Response:
    """Producer ids are random, so no counter can be lost with a disk."""
    await no_body(context, exchange)
    span = _END_PRODUCER_ID - _FIRST_PRODUCER_ID
    return json_response(ProducerIdentity(_FIRST_PRODUCER_ID + secrets.randbelow(span), 0))
