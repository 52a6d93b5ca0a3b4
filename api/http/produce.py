"""The produce calls: a body becomes batches, each partition's batches one append.

* Nothing is appended before the whole body was parsed, checked and encoded for every partition.
* The answer waits for what `acks` asks for, and no thread waits with it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Final, Literal, NamedTuple

import msgspec
import structlog
from msgspec import UNSET, UnsetType

from api.http import bodies, media_types, strict_json, timings
from api.http.answers import Answer, json_answer
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.partitioner import split_by_partition
from api.http.produce_batches import (
    TopicRules,
    build_appends,
    check_batches,
    is_one_plain_batch,
)
from api.http.produce_columns import (
    RecordColumns,
    decode_base64,
    parse_envelopes,
    parse_json,
    parse_values,
    single_value,
)
from api.http.refusals import AppendedInPart, UnsupportedMediaType
from broker.partition import Partition
from broker.topics import Topic
from hot_tier.append import Acks, AppendResult
from record_format.errors import Forbidden, LogOfflineError, TierlogError, UnknownPartition
from record_format.produced import ProducedBatches

log = structlog.get_logger(__name__)

_ACKS: Final[Mapping[str, Acks]] = {
    "0": Acks.NONE,
    "1": Acks.LEADER,
    "all": Acks.ALL,
    "-1": Acks.ALL,
}
_RECORD_FORMS: Final = (media_types.JSON, media_types.NDJSON, media_types.OCTETS)
_ALL_FORMS: Final = (*_RECORD_FORMS, media_types.BATCHES)
_PRODUCER_HEADERS: Final = (b"producer-id", b"producer-epoch", b"producer-sequence")
_PRODUCER_LIMITS: Final = (2**63 - 1, 2**15 - 1, 2**31 - 1)
_MAX_OFFSET: Final = 2**63 - 1
_NOT_KNOWN: Final = sys.maxsize


class ProduceQuery(msgspec.Struct, forbid_unknown_fields=True):
    acks: Literal["0", "1", "all", "-1"] = "all"
    envelope: bool = False
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET


class PartitionResult(msgspec.Struct):
    partition: int
    base_offset: int
    last_offset: int
    records: int
    log_append_time: int | None
    duplicate: bool


class Produced(msgspec.Struct):
    topic: str
    results: list[PartitionResult]
    warnings: list[str]


class Accepted(msgspec.Struct):
    """`acks=0`: records taken in, not awaited."""

    topic: str
    accepted: int


class ProducerState(NamedTuple):
    """An idempotent producer's headers."""

    producer_id: int
    producer_epoch: int
    base_sequence: int


class Request(NamedTuple):
    """A produce request but for its body."""

    topic: Topic
    partition: Partition | None
    media_type: str
    acks: Acks
    query: ProduceQuery
    expected_offset: int | None
    producer: ProducerState | None


async def produce_to_topic(context: Context, exchange: Exchange) -> Answer:
    return await _produce(context, exchange, partition=None)


async def produce_to_partition(context: Context, exchange: Exchange) -> Answer:
    topic = context.broker.topic(exchange.topic)
    return await _produce(context, exchange, partition=topic.partition(exchange.partition))


async def _produce(context: Context, exchange: Exchange, *, partition: Partition | None) -> Answer:
    request = _read_head(context, exchange, partition)
    encoding = bodies.encoding_of(exchange)
    async with bodies.received_body(exchange, context.settings, context.inflight) as body:
        appends = await context.compute(
            _work_bytes(request, body, encoding),
            lambda: _prepare(context, request, body=body, encoding=encoding),
        )
        return await _append(context, request, appends)


def _warnings(request: Request, appends: Mapping[int, ProducedBatches], now_ms: int) -> list[str]:
    rules = TopicRules.of(request.topic.config, now_ms=now_ms)
    expired = any(rules.is_expired(produced) for produced in appends.values())
    return ["older-than-retention"] if expired else []


def _read_head(context: Context, exchange: Exchange, partition: Partition | None) -> Request:
    """Everything that can be refused before a byte of the body is read."""
    topic = context.broker.topic(exchange.topic)
    if topic.record.internal:
        raise Forbidden(f"{topic.record.name} is internal: it is not produced to over HTTP")
    query = strict_json.parse_query(exchange.scope["query_string"], ProduceQuery)
    media_types.preferred(exchange.header(b"accept"), offered=(media_types.JSON,))
    media_type = _media_type(exchange, partition)
    _check_parameters(query, media_type)
    producer, expected_offset = _producer_state(exchange), _expected_offset(exchange)
    if partition is None and (producer is not None or expected_offset is not None):
        strict_json.refuse_field(
            "If-Offset-Match" if producer is None else "Producer-Id",
            "taken only on the path of a partition",
        )
    if producer is not None and media_type == media_types.BATCHES:
        strict_json.refuse_field("Producer-Id", "raw batches carry their producer themselves")
    return Request(
        topic, partition, media_type, _ACKS[query.acks], query, expected_offset, producer
    )


def _media_type(exchange: Exchange, partition: Partition | None) -> str:
    header = exchange.header(b"content-type")
    media_type = media_types.content_type(header, accepted=_ALL_FORMS)
    if media_type == media_types.BATCHES and partition is None:
        raise UnsupportedMediaType(
            "raw batches are taken only on the path of a partition", accepted=_RECORD_FORMS
        )
    return media_type


def _check_parameters(query: ProduceQuery, media_type: str) -> None:
    if query.envelope and media_type != media_types.NDJSON:
        strict_json.refuse_field("envelope", f"taken only with {media_types.NDJSON}")
    for name, given in (("key", query.key), ("key_base64", query.key_base64)):
        if given is not UNSET and media_type != media_types.OCTETS:
            strict_json.refuse_field(name, f"taken only with {media_types.OCTETS}")
    if query.key is not UNSET and query.key_base64 is not UNSET:
        strict_json.refuse_field("key_base64", "give key or key_base64, not both")


def _producer_state(exchange: Exchange) -> ProducerState | None:
    texts = [exchange.header(name) for name in _PRODUCER_HEADERS]
    if not any(text is not None for text in texts):
        return None
    numbers = [
        _header_number(name, text, most=most)
        for name, text, most in zip(_PRODUCER_HEADERS, texts, _PRODUCER_LIMITS, strict=True)
    ]
    return ProducerState(*numbers)


def _expected_offset(exchange: Exchange) -> int | None:
    text = exchange.header(b"if-offset-match")
    if text is None:
        return None
    return _header_number(b"if-offset-match", text, most=_MAX_OFFSET)


def _header_number(name: bytes, text: str | None, *, most: int) -> int:
    title = name.decode().title()
    if text is None:
        strict_json.refuse_field(
            title, "Producer-Id, Producer-Epoch and Producer-Sequence go together"
        )
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > most:
        strict_json.refuse_field(title, f"expected a whole number up to {most}, not {text[:64]!r}")
    return int(text)


# --- the body -----------------------------------------------------------------------------------


def _work_bytes(request: Request, body: bytes | bytearray, encoding: str) -> int:
    """How much work a body is, in bytes of JSON. What expands to who knows what is not for the
    loop; a batch that stays as it is takes a quarter of the time.
    """
    if encoding:
        return _NOT_KNOWN
    if request.media_type != media_types.BATCHES:
        return len(body)
    if not is_one_plain_batch(body):
        return _NOT_KNOWN
    stays = request.topic.config.compression_type in ("producer", "uncompressed")
    return len(body) // 4 if stays else len(body)


def _prepare(
    context: Context, request: Request, *, body: bytes | bytearray, encoding: str
) -> dict[int, ProducedBatches]:
    """The batches of each partition, checked. May run in a thread."""
    settings = context.settings
    body = bodies.expand(body, encoding, max_bytes=settings.expanded_max_bytes)
    rules = TopicRules.of(request.topic.config, now_ms=settings.clock())
    if request.media_type == media_types.BATCHES:
        assert request.partition is not None, "refused before"
        produced = check_batches(
            body if isinstance(body, bytearray) else bytearray(body), rules, settings
        )
        return {request.partition.number: produced}
    columns = _parse(request, body, records_max=settings.records_max)
    return build_appends(_by_partition(request, columns), rules, request.producer)


def _parse(request: Request, body: bytes | bytearray, *, records_max: int) -> RecordColumns:
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


def _by_partition(request: Request, columns: RecordColumns) -> Mapping[int, RecordColumns]:
    topic = request.topic
    if request.partition is None:
        split = split_by_partition(
            columns,
            existing=topic.partitions or topic.numbers,
            count=topic.record.partitions,
            turn=next(topic.turns),
        )
        for number in split:
            _check_partition(topic, number, columns)
        return split
    number = request.partition.number
    for index, chosen in enumerate(columns.partitions or ()):
        if chosen not in (None, number):
            strict_json.refuse_field(
                columns.place(index, "partition"), f"{chosen}, but the path says partition {number}"
            )
    return {number: columns}


def _check_partition(topic: Topic, number: int, columns: RecordColumns) -> None:
    """All are there, before anything is appended to one. Raises what `Topic.partition` does."""
    try:
        topic.partition(number)
    except UnknownPartition:
        chosen = columns.partitions or ()
        if number not in chosen:  # a key's: the folder lacks some of the topic's partitions
            raise
        place = columns.place(chosen.index(number), "partition")
        raise UnknownPartition(topic.record.name, number, place=place) from None


# --- the append ---------------------------------------------------------------------------------


async def _append(
    context: Context, request: Request, appends: Mapping[int, ProducedBatches]
) -> Answer:
    name = request.topic.record.name
    warnings = _warnings(request, appends, context.settings.clock())
    acks = _acks_to_await(request, appends)
    futures = {number: _submit(request, number, appends[number], acks) for number in appends}
    count = sum(produced.record_count for produced in appends.values())
    context.metrics.produced_bytes.inc(sum(len(produced.body) for produced in appends.values()))
    context.metrics.produced_records.inc(count)
    if acks is Acks.NONE:
        _refuse_where_nothing_is_taken(futures.values())
        for number, future in futures.items():
            future.add_done_callback(_Unawaited(name, number))
        return json_answer(Accepted(name, count), status=202)
    waiting = [asyncio.wrap_future(future) for future in futures.values()]
    began_s = time.perf_counter()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    timings.took("broker", began_s)
    results: list[PartitionResult] = []
    failure: BaseException | None = None
    for number, outcome in zip(futures, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            failure = failure or _reason(request, number, outcome)
        else:
            results.append(_result(number, outcome, appends[number].record_count))
    if failure is not None:
        raise _failed(failure, results)
    if request.acks is Acks.NONE:
        return json_answer(Accepted(name, count), status=202)
    return json_answer(Produced(name, results, warnings))


def _acks_to_await(request: Request, appends: Mapping[int, ProducedBatches]) -> Acks:
    """A condition that does not hold is told also under acks=0: its append is awaited."""
    conditional = request.expected_offset is not None or any(
        header.producer_id >= 0 for produced in appends.values() for header in produced.headers[:1]
    )
    return Acks.LEADER if request.acks is Acks.NONE and conditional else request.acks


def _submit(
    request: Request, number: int, produced: ProducedBatches, acks: Acks
) -> Future[AppendResult]:
    try:
        return request.topic.partition(number).append(
            produced, acks=acks, expected_offset=request.expected_offset
        )
    except TierlogError as error:
        refused: Future[AppendResult] = Future()
        refused.set_exception(error)
        return refused


def _refuse_where_nothing_is_taken(futures: Collection[Future[AppendResult]]) -> None:
    """What is not awaited may fail unseen, but a full disk is known by now: raised."""
    refusals = [future.exception() for future in futures if future.done()]
    if len(refusals) == len(futures) and (refusal := next(filter(None, refusals), None)):
        raise refusal


def _reason(request: Request, number: int, error: BaseException) -> BaseException:
    """A log that was closed because its topic was deleted meanwhile has no bad disk."""
    if isinstance(error, LogOfflineError):
        try:
            request.topic.partition(number).check_leadership()
        except TierlogError as reason:
            return reason
    return error


def _failed(failure: BaseException, results: list[PartitionResult]) -> BaseException:
    """What was appended before a fault is told with it."""
    if results and isinstance(failure, Exception):
        return AppendedInPart(failure, results=results)
    return failure


def _result(number: int, outcome: AppendResult, records: int) -> PartitionResult:
    return PartitionResult(
        partition=number,
        base_offset=outcome.base_offset,
        last_offset=outcome.last_offset,
        records=records,
        log_append_time=outcome.log_append_time,
        duplicate=outcome.duplicate,
    )


class _Unawaited:
    """Nobody waits for an append with acks=0: a failure of it goes to the log."""

    def __init__(self, topic: str, partition: int) -> None:
        self.topic, self.partition = topic, partition

    def __call__(self, future: Future[AppendResult]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            log.warning(
                "append with acks=0 failed",
                partition=f"{self.topic}-{self.partition}",
                error=str(error),
            )
