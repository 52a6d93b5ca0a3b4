"""The produce calls: a body becomes batches, one append for each partition.

* Whatever can be checked by the head is, before a byte of the body is read.
* Nothing is appended before the whole body was parsed, checked and encoded for every partition.
* A record goes to the `partition` that it names; otherwise by murmur2 of its key, as Kafka's
  clients do, so that a key stays in one partition whoever produces it; otherwise all records of the
  request go to one, round robin over requests and the partitions that append.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Final
from urllib.parse import unquote

from fastapi import Response as FastApiResponse
from msgspec import UNSET

from tierlog.api.http import bodies, header_values, strict_json
from tierlog.api.http.cluster.splitting import is_split
from tierlog.api.http.context import UNKNOWN_SIZE, Context
from tierlog.api.http.control_routes import JsonResponse, WithoutBody
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.groups.transactions import take_part
from tierlog.api.http.memory_limits import EXPANDED_BYTES, PAGE_FACTOR
from tierlog.api.http.problems import UnsupportedMediaType
from tierlog.api.http.produce.append import (
    ProduceQuery,
    ProduceRequest,
    ProducerState,
    append_batches,
    build_appends,
    encode_column,
    mismatch,
)
from tierlog.api.http.produce.columns import (
    Content,
    RecordColumns,
    decode_base64,
    parse_envelopes,
    parse_json,
    parse_values,
    single_value,
)
from tierlog.api.http.produce.elsewhere import append_elsewhere
from tierlog.api.http.responses import Response
from tierlog.api.http.schemas import ProducerIdentity
from tierlog.api.http.settings import MAX_OFFSET, HttpSettings
from tierlog.api.serving.produced_batches import (
    check_batches,
    is_small_uncompressed_batch,
    limits_of,
    stays_as_produced,
)
from tierlog.broker.data_folder.topic_registry import INTERNAL_PREFIX
from tierlog.broker.membership.peers import SchemaCall
from tierlog.broker.partition.partition import Partition
from tierlog.broker.schema_registry.decoding import Part
from tierlog.broker.transaction_coordinator.transaction import ProducerEpoch
from tierlog.hot_tier.log_writer import Acks
from tierlog.hot_tier.producer_state import new_producer_id
from tierlog.record_format.encode import Headers
from tierlog.record_format.errors import (
    FieldProblem,
    Forbidden,
    InvalidRecord,
    RequestTooLarge,
    UnknownPartition,
)
from tierlog.record_format.produced import ProducedBatches
from tierlog.record_format.schema_records import Malformed
from tierlog.record_format.schema_state import LATEST
from tierlog.record_format.topic_rules import partition_for_key

_ACKS: Final[Mapping[str, Acks]] = {
    "0": Acks.NONE,
    "1": Acks.LEADER,
    "all": Acks.ALL,
    "-1": Acks.ALL,
}
_RECORD_FORMS: Final = (header_values.JSON, header_values.NDJSON, header_values.OCTETS)
_ALL_FORMS: Final = (*_RECORD_FORMS, header_values.BATCHES)
_PRODUCER_HEADERS: Final = (b"producer-id", b"producer-epoch", b"producer-sequence")
_PRODUCER_LIMITS: Final = (2**63 - 1, 2**15 - 1, 2**31 - 1)


async def produce_to_topic(context: Context, exchange: Exchange) -> Response:
    refuse_internal(exchange.topic)
    return await _produce(context, exchange, partition=None)


async def produce_to_partition(context: Context, exchange: Exchange) -> Response:
    refuse_internal(exchange.topic)
    topic = context.broker.topic(exchange.topic)
    return await _produce(context, exchange, partition=topic.partition(exchange.partition))


def refuse_internal(topic: str) -> None:
    """Raises Forbidden by the name alone: the broker makes such a topic when it first needs it."""
    if topic.startswith(INTERNAL_PREFIX):
        raise Forbidden(f"{topic} is internal: HTTP clients cannot produce to it")


async def _produce(
    context: Context, exchange: Exchange, *, partition: Partition | None
) -> Response:
    request = read_head(context, exchange, partition)
    if partition is None and is_split(context, exchange):
        elsewhere = partial(append_elsewhere, context, exchange, request)
        request = request._replace(elsewhere=elsewhere)
    encoding = header_values.content_encoding(exchange.header(b"content-encoding"))
    async with bodies.received_body(exchange, context.settings, context.inflight) as body:
        prepare = partial(_prepare, context, request, body=body, encoding=encoding)
        most, takes = _expansion_of(request, context.settings)
        is_parsed = takes > most
        if len(body) <= EXPANDED_BYTES or not is_parsed:
            try:
                usual = partial(prepare, expanded_max_bytes=min(EXPANDED_BYTES, most))
                appends = await context.compute(_work_bytes(request, body, encoding), usual)
            except RequestTooLarge as error:
                if error.limit_bytes != EXPANDED_BYTES:
                    raise
            else:
                built = sum(len(one.body) for one in appends.values())
                with context.inflight.holding_beside(len(body), max(0, built - len(body))):
                    return await _append(context, request, appends)
        async with context.decoding.for_expansion(takes):
            far = partial(prepare, expanded_max_bytes=most)
            return await _append(context, request, await context.compute(UNKNOWN_SIZE, far))


async def _append(
    context: Context, request: ProduceRequest, appends: Mapping[int, ProducedBatches]
) -> Response:
    if request.transactional_id is not None:
        ((number, produced),) = appends.items()
        header = produced.headers[0]
        producer = ProducerEpoch(header.producer_id, header.producer_epoch)
        place = request.topic.record.name, number
        await take_part(context, request.transactional_id, producer, place)
    return await append_batches(context, request, appends)


def _expansion_of(request: ProduceRequest, settings: HttpSettings) -> tuple[int, int]:
    """To how many bytes the body may expand, and how many that takes. Text that is parsed takes
    several times its size: it may expand to no more than plain text may have.
    """
    if request.media_type in (header_values.BATCHES, header_values.OCTETS):
        return settings.expanded_max_bytes, settings.expanded_max_bytes
    most = min(settings.body_max_bytes, settings.expanded_max_bytes)
    return most, PAGE_FACTOR * most


def read_head(context: Context, exchange: Exchange, partition: Partition | None) -> ProduceRequest:
    """Raises InvalidRequest, UnsupportedMediaType, Forbidden, UnknownTopic."""
    topic = context.broker.topic(exchange.topic)
    query = exchange.query(ProduceQuery)
    media_type = _media_type(exchange, partition)
    _check_parameters(query, media_type)
    producer, expected_offset = _producer_state(exchange), _expected_offset(exchange)
    transactional_id = _transactional_id(exchange)
    if partition is None:
        _refuse_on_topic(producer, expected_offset, transactional_id)
    if producer is not None and media_type == header_values.BATCHES:
        strict_json.refuse_field(
            "Producer-Id", "raw batches contain their producer's id, epoch and sequence"
        )
    if transactional_id is not None and media_type != header_values.BATCHES and producer is None:
        strict_json.refuse_field("Producer-Id", "missing: a transaction has a producer")
    return ProduceRequest(
        topic,
        partition,
        media_type,
        _ACKS[query.acks],
        query,
        expected_offset,
        producer,
        transactional_id,
    )


def _refuse_on_topic(
    producer: ProducerState | None, expected_offset: int | None, transactional_id: str | None
) -> None:
    given = {
        "Producer-Id": producer,
        "If-Offset-Match": expected_offset,
        "Transactional-Id": transactional_id,
    }
    for name, value in given.items():
        if value is not None:
            strict_json.refuse_field(name, "only supported on a partition's path")


def _media_type(exchange: Exchange, partition: Partition | None) -> str:
    header = exchange.header(b"content-type")
    if partition is not None:
        return header_values.content_type(header, accepted=_ALL_FORMS)
    if header == header_values.BATCHES:
        raise UnsupportedMediaType(
            "raw batches are only accepted on a partition's path", accepted=_RECORD_FORMS
        )
    return header_values.content_type(header, accepted=_RECORD_FORMS)


def _check_parameters(query: ProduceQuery, media_type: str) -> None:
    if query.envelope and media_type != header_values.NDJSON:
        strict_json.refuse_field("envelope", f"only supported with {header_values.NDJSON}")
    for name, given in (("key", query.key), ("key_base64", query.key_base64)):
        if given is not UNSET and media_type != header_values.OCTETS:
            strict_json.refuse_field(name, f"only supported with {header_values.OCTETS}")
    for part in query.encoded:
        _check_schema(part, query, media_type)
    if query.key is not UNSET and query.key_base64 is not UNSET:
        strict_json.refuse_field("key_base64", "give key or key_base64, not both")


def _check_schema(part: Part, query: ProduceQuery, media_type: str) -> None:
    schema_id, version = query.schema_of(part)
    given = f"{part}_schema_id" if version is UNSET else f"{part}_schema_version"
    if media_type not in (header_values.JSON, header_values.NDJSON):
        strict_json.refuse_field(given, f"only supported with {part}s that are JSON")
    if part == "key" and media_type == header_values.NDJSON and not query.envelope:
        strict_json.refuse_field(given, "only supported with envelope: a line is a value")
    if UNSET not in (schema_id, version):
        strict_json.refuse_field(given, f"give it or {part}_schema_id, not both")


def _producer_state(exchange: Exchange) -> ProducerState | None:
    texts = [exchange.header(name) for name in _PRODUCER_HEADERS]
    if not any(text is not None for text in texts):
        return None
    numbers = [
        _header_number(name, text, most=most)
        for name, text, most in zip(_PRODUCER_HEADERS, texts, _PRODUCER_LIMITS, strict=True)
    ]
    return ProducerState(*numbers)


def _transactional_id(exchange: Exchange) -> str | None:
    """Encoded as in a path, since a header has no other words for most characters. Raises
    Forbidden.
    """
    text = exchange.header(b"transactional-id")
    if text is None:
        return None
    try:
        transactional_id = unquote(text, errors="strict")
    except UnicodeDecodeError:
        strict_json.refuse_field("Transactional-Id", "not percent-encoded UTF-8")
    if not transactional_id or not text.isascii():
        strict_json.refuse_field("Transactional-Id", "expected an id, percent-encoded as in a path")
    exchange.grant.check_transactional_id(transactional_id)
    return transactional_id


def _expected_offset(exchange: Exchange) -> int | None:
    text = exchange.header(b"if-offset-match")
    if text is None:
        return None
    return _header_number(b"if-offset-match", text, most=MAX_OFFSET)


def _header_number(name: bytes, text: str | None, *, most: int) -> int:
    title = name.decode().title()
    if text is None:
        strict_json.refuse_field(
            title, "missing: Producer-Id, Producer-Epoch and Producer-Sequence are sent together"
        )
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > most:
        strict_json.refuse_field(title, f"expected a whole number up to {most}, not {text[:64]!r}")
    return int(text)


def _work_bytes(request: ProduceRequest, body: bytes | bytearray, encoding: str) -> int:
    """Estimate the work of a body, in bytes of JSON. A compressed body may expand to any size: it
    goes to a thread. A raw batch that is stored unchanged takes less than a sixteenth of the time,
    and handing it to a thread costs as much as checking 1 MiB of it.
    """
    if encoding or request.query.encoded:
        return UNKNOWN_SIZE
    if request.topic.config.schema_validation != "none":  # it may have to be looked for
        return UNKNOWN_SIZE
    if request.media_type != header_values.BATCHES:
        return len(body)
    if not is_small_uncompressed_batch(body):
        return UNKNOWN_SIZE
    stays = stays_as_produced(request.topic.config.compression_type)
    return len(body) // 16 if stays else len(body)


def _prepare(
    context: Context,
    request: ProduceRequest,
    *,
    body: bytes | bytearray,
    encoding: str,
    expanded_max_bytes: int,
) -> dict[int, ProducedBatches]:
    """Parse and check the body: the batches of each partition. May run in a thread."""
    settings = context.settings
    body = bodies.expand(body, encoding, max_bytes=expanded_max_bytes)
    config = request.topic.config
    limits = limits_of(
        config,
        now_ms=settings.clock(),
        expanded_max_bytes=settings.expanded_max_bytes,
        batch_max_bytes=expanded_max_bytes,
        records=settings.records_max,
        transactions=request.transactional_id is not None,
        check_values=context.broker.schema_validation.checks(
            request.topic.record.name, config.schema_validation
        ),
    )
    if request.media_type == header_values.BATCHES:
        assert request.partition is not None, "checked by `read_head`"
        produced = check_batches(
            body if isinstance(body, bytearray) else bytearray(body),
            limits,
            config.compression_type,
        )
        if request.transactional_id is not None:
            _check_transactional(produced)
        return {request.partition.number: produced}
    columns = _parse(request, body, records_max=settings.records_max)
    for part in request.query.encoded:
        columns = encode_column(columns, part, _encoder(context, request, part))
    return build_appends(
        _by_partition(request, columns), limits, config.compression_type, request.producer
    )


def _encoder(context: Context, request: ProduceRequest, part: Part) -> Callable[[bytes], bytes]:
    """Raises SchemaMismatch, and retriable errors."""
    subject = f"{request.topic.record.name}-{part}"
    schema_id, version = request.query.schema_of(part)
    if isinstance(version, str):
        call = SchemaCall(subject, version=LATEST if version == "latest" else int(version))
    else:
        assert isinstance(schema_id, int), "it names a schema"
        call = SchemaCall(subject, schema_id)
    try:
        return context.broker.schema_validation.encoder(call, part)
    except Malformed as error:
        named = f"{part}_schema_id" if call.version is None else f"{part}_schema_version"
        raise mismatch(named, str(error)) from error


def _check_transactional(produced: ProducedBatches) -> None:
    for index, header in enumerate(produced.headers):
        if not header.is_transactional:
            problem = "not transactional, though Transactional-Id is given"
            raise InvalidRecord(
                f"batch {index}, at position {header.position}: {problem}",
                problems=(FieldProblem(f"batches[{index}]", problem),),
            )


def _parse(request: ProduceRequest, body: bytes | bytearray, *, records_max: int) -> RecordColumns:
    if request.media_type == header_values.OCTETS:
        return single_value(body, key=_key(request.query))
    parse = parse_envelopes if request.query.envelope else parse_values
    if request.media_type == header_values.JSON:
        parse = parse_json
    return parse(body, records_max=records_max, as_json=request.query.encoded)


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
            _check_partition(request, number, columns)
        return split
    number = request.partition.number
    for index, chosen in enumerate(columns.partitions or ()):
        if chosen not in (None, number):
            strict_json.refuse_field(
                columns.path(index, "partition"), f"{chosen}, but the path says partition {number}"
            )
    return {number: columns}


def _check_partition(request: ProduceRequest, number: int, columns: RecordColumns) -> None:
    """Raise what `Topic.partition` does, before anything is appended."""
    topic = request.topic
    try:
        if request.elsewhere is None:
            topic.partition(number)
        else:
            topic.check_number(number)
    except UnknownPartition:
        chosen = columns.partitions or ()
        if number not in chosen:  # chosen by a key: the data folder lacks some of the partitions
            raise
        place = columns.path(chosen.index(number), "partition")
        raise UnknownPartition(topic.record.name, number, place=place) from None


def split_by_partition(
    columns: RecordColumns, *, sticky: int, count: int
) -> dict[int, RecordColumns]:
    """The records of each partition, in order. Keys are hashed over `count` partitions; records
    without a key go to `sticky`. A record may name a partition that does not exist.
    """
    targets = _targets(columns, sticky=sticky, count=count)
    rows: dict[int, list[int]] = {}
    for row, target in enumerate(targets):
        rows.setdefault(target, []).append(row)
    if len(rows) == 1:
        return dict.fromkeys(rows, columns)
    return {target: _take(columns, rows[target]) for target in sorted(rows)}


def _targets(columns: RecordColumns, *, sticky: int, count: int) -> list[int]:
    if columns.keys is None:
        targets = [sticky] * len(columns.values)
    else:
        known: dict[Content, int] = {None: sticky}
        targets = []
        for key in columns.keys:
            target = known.get(key)
            if target is None:
                assert key is not None, "`known` has it"
                target = known[key] = partition_for_key(key, count)
            targets.append(target)
    if columns.partitions is None:
        return targets
    return [
        target if chosen is None else chosen
        for target, chosen in zip(targets, columns.partitions, strict=True)
    ]


def _take(columns: RecordColumns, rows: Sequence[int]) -> RecordColumns:
    values, keys, headers, timestamps = columns[:4]
    chosen_keys: list[Content] | None = None if keys is None else [keys[row] for row in rows]
    chosen_headers: list[Headers | None] | None = (
        None if headers is None else [headers[row] for row in rows]
    )
    return RecordColumns(
        [values[row] for row in rows],
        chosen_keys,
        chosen_headers,
        None if timestamps is None else [timestamps[row] for row in rows],
        rows=rows,
        lines=columns.lines,
        has_members=columns.has_members,
    )


async def new_producer(_: Annotated[None, WithoutBody]) -> FastApiResponse:
    return JsonResponse(ProducerIdentity(new_producer_id(), 0))
