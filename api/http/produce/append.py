"""What a produce request appends: its batches are built or checked by the topic's configuration,
then appended to their partitions, and the response is made.

* Under LogAppendTime records may have any timestamp; otherwise the limits of `message.timestamp.*`
  apply to each record. The time is a parameter.
* The response waits for what `acks` requires; no thread is blocked meanwhile.
* In a cluster, what other brokers lead goes to them (`elsewhere`).
* If some partitions fail, the problem reports what the others appended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from itertools import accumulate
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
import structlog
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.http.context import AllCompleted, Context
from tierlog.api.http.exchange import record_time
from tierlog.api.http.groups.transactions import as_problem
from tierlog.api.http.problems import AppendedInPart
from tierlog.api.http.produce.columns import RecordColumns
from tierlog.api.http.responses import Response, json_response
from tierlog.api.http.schemas import Accepted, PartitionResult, Produced
from tierlog.api.serving.produced_batches import AS_PRODUCED
from tierlog.broker.partition.partition import Partition
from tierlog.broker.schema_registry.decoding import PARTS, Part
from tierlog.broker.topics.topics import Topic
from tierlog.hot_tier.config_words import in_words
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.hot_tier.producer_state import Verify
from tierlog.record_format import codecs
from tierlog.record_format.batch import CREATE_TIME, NO_PRODUCER_ID, NO_SEQUENCE
from tierlog.record_format.errors import (
    ELSEWHERE,
    FieldProblem,
    InvalidRecord,
    LogOfflineError,
    RecordTooLarge,
    SchemaMismatch,
    TierlogError,
    TransactionRefused,
)
from tierlog.record_format.produced import (
    KEY_REQUIRED,
    CheckValues,
    ProducedBatches,
    ProduceLimits,
    build_produced,
    timestamp_problem,
)
from tierlog.record_format.record_walk import HEAD_BYTES
from tierlog.record_format.schema_records import Malformed
from tierlog.record_format.schema_state import INT_MAX

log = structlog.get_logger(__name__)
_OLD: Final = "older-than-retention"
_VERSION: Final = "^(latest|[1-9][0-9]{0,8})$"


SchemaId = Annotated[int, Meta(ge=1, le=INT_MAX)] | UnsetType
SchemaVersion = Annotated[str, Meta(pattern=_VERSION)] | UnsetType


class ProduceQuery(msgspec.Struct, forbid_unknown_fields=True):
    acks: Literal["0", "1", "all", "-1"] = "all"
    envelope: bool = False
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    key_schema_id: SchemaId = UNSET
    key_schema_version: SchemaVersion = UNSET
    value_schema_id: SchemaId = UNSET
    value_schema_version: SchemaVersion = UNSET

    def schema_of(self, part: Part) -> tuple[SchemaId, SchemaVersion]:
        if part == "key":
            return self.key_schema_id, self.key_schema_version
        return self.value_schema_id, self.value_schema_version

    @property
    def encoded(self) -> list[Part]:
        """What is JSON that a schema encodes."""
        return [part for part in PARTS if self.schema_of(part) != (UNSET, UNSET)]


class ProducerState(NamedTuple):
    """The id, epoch and sequence number that an idempotent producer gives to a batch."""

    producer_id: int
    producer_epoch: int
    base_sequence: int


AppendElsewhere = Callable[[int, ProducedBatches], Future[AppendResult]]
"""Appends to a partition that another broker of the cluster leads."""


class ProduceRequest(NamedTuple):
    """A produce request without its body. `transactional_id`: its records are in the transaction of
    that id. `elsewhere`: None if it can only be carried out here.
    """

    topic: Topic
    partition: Partition | None
    media_type: str
    acks: Acks
    query: ProduceQuery
    expected_offset: int | None
    producer: ProducerState | None
    transactional_id: str | None = None
    elsewhere: AppendElsewhere | None = None


class AppendedElsewhere(AppendResult):
    """By another broker of the cluster, which counts it."""

    __slots__ = ()


_NO_PRODUCER: Final = ProducerState(NO_PRODUCER_ID, -1, NO_SEQUENCE)


def build_appends(
    by_partition: Mapping[int, RecordColumns],
    limits: ProduceLimits,
    compression: str,
    producer: ProducerState | None,
) -> dict[int, ProducedBatches]:
    """Encode each partition's columns as batches, transactional ones if the limits allow them.
    Raises InvalidRecord, TooLarge. `compression` is the topic's.
    """
    codec = codecs.NONE if compression == AS_PRODUCED else codecs.CODEC_IDS[compression]
    appends = {}
    for partition, columns in by_partition.items():
        try:
            appends[partition] = _build(columns, limits, codec, producer or _NO_PRODUCER)
        except RecordTooLarge as error:
            raise _located(error, columns) from None
    return appends


def _located(error: RecordTooLarge, columns: RecordColumns) -> RecordTooLarge:
    """Name the record by its place in the request, which may have records of other partitions."""
    assert error.row is not None, "a single record is too large"
    limit, size = error.limit_bytes, error.size_bytes
    return RecordTooLarge(
        f"{columns.record(error.row)} makes a batch of {size} bytes; max.message.bytes is {limit}",
        limit_bytes=limit,
        size_bytes=size,
    )


def _build(
    columns: RecordColumns, limits: ProduceLimits, codec: int, producer: ProducerState
) -> ProducedBatches:
    if limits.require_keys and (columns.keys is None or None in columns.keys):
        row = 0 if columns.keys is None else columns.keys.index(None)
        raise _invalid(columns.path(row, "key"), KEY_REQUIRED)
    if limits.check_values is not None:
        _check_values(columns, limits.check_values)
    return build_produced(
        columns.values,
        timestamps=_timestamps(columns, limits),
        keys=columns.keys,
        headers=columns.headers,
        max_message_bytes=limits.max_message_bytes,
        codec=codec,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=producer.base_sequence,
        transactional=limits.allow_transactions,
    )


def _check_values(columns: RecordColumns, check: CheckValues) -> None:
    """Raises SchemaMismatch."""
    heads = {value[:HEAD_BYTES] for value in columns.values if value is not None}
    if all(len(head) == HEAD_BYTES and check.knows(int.from_bytes(head)) for head in heads):
        return
    sizes = [0 if value is None else len(value) for value in columns.values]
    ends = list(accumulate(sizes))
    starts = [
        -1 if value is None else end - size
        for value, size, end in zip(columns.values, sizes, ends, strict=True)
    ]
    found = check(b"".join(filter(None, columns.values)), starts, ends)
    if found is not None:
        loc = columns.path(found.records[0], "value")
        raise mismatch(loc, found.problem.partition(": ")[2])


def encode_column(
    columns: RecordColumns, part: Part, encode: Callable[[bytes], bytes]
) -> RecordColumns:
    """Of keys or values that are JSON; null stays null. Raises SchemaMismatch."""
    encoded = list((columns.keys if part == "key" else columns.values) or ())
    for row, text in enumerate(encoded):
        if text is not None:
            try:
                encoded[row] = encode(text)
            except Malformed as error:
                raise mismatch(columns.path(row, part), str(error)) from error
    if part == "key":
        return columns._replace(keys=encoded or None)
    return columns._replace(values=encoded)


def mismatch(loc: str, problem: str) -> SchemaMismatch:
    return SchemaMismatch(f"{loc}: {problem}", problems=(FieldProblem(loc, problem),))


def _timestamps(columns: RecordColumns, limits: ProduceLimits) -> list[int]:
    now_ms = limits.now_ms
    if columns.timestamps is None:
        return [now_ms] * len(columns.values)
    timestamps = [now_ms if given is None else given for given in columns.timestamps]
    if limits.timestamp_type == CREATE_TIME:
        for timestamp in (max(timestamps), min(timestamps)):
            problem = timestamp_problem(timestamp, limits)
            if problem:
                index = timestamps.index(timestamp)
                raise _invalid(columns.path(index, "timestamp"), problem)
    return timestamps


def _invalid(loc: str, problem: str) -> InvalidRecord:
    return InvalidRecord(f"{loc}: {problem}", problems=(FieldProblem(loc, problem),))


async def append_batches(
    context: Context, request: ProduceRequest, appends: Mapping[int, ProducedBatches]
) -> Response:
    """Append the batches, each partition's as one append. Raises the error of a partition, as
    AppendedInPart if others succeeded.
    """
    name = request.topic.record.name
    acks = _acks_to_await(request, appends)
    if acks is Acks.NONE:
        _check_writable(request, appends)  # a refused request has changed nothing
    verify = _verifier(context, request)
    futures = {
        number: _submit(request, batches, acks, verify=verify(number), number=number)
        for number, batches in appends.items()
    }
    early = _led_elsewhere(request, futures)
    futures |= _append_elsewhere(request, appends, early)
    count = sum(produced.record_count for produced in appends.values())
    if acks is Acks.NONE:
        _raise_if_all_failed(futures.values())
        for number, future in futures.items():
            _detach(context, f"{name}-{number}", appends[number], future)
        return json_response(Accepted(name, count), status=202)
    began_s = time.perf_counter()
    await AllCompleted(futures.values())
    if late := [one for one in _led_elsewhere(request, futures) if one not in early]:
        futures |= _append_elsewhere(request, appends, late)
        await AllCompleted(futures.values())
    record_time("broker", began_s)
    outcomes = [future.exception() or future.result() for future in futures.values()]
    _count(context, zip(appends.values(), outcomes, strict=True))
    results = _results(request, appends, outcomes)
    if request.acks is Acks.NONE:
        return json_response(Accepted(name, count), status=202)
    if _expire_at_once(request, appends, context.settings.clock()):
        return json_response(Produced(name, results, [_OLD], {_OLD: _old_in_words(request)}))
    return json_response(Produced(name, results, []))


def _check_writable(request: ProduceRequest, numbers: Iterable[int]) -> None:
    for number in numbers:
        try:
            request.topic.partition(number).check_writable()
        except ELSEWHERE:
            if request.elsewhere is None:
                raise


def _acks_to_await(request: ProduceRequest, appends: Mapping[int, ProducedBatches]) -> Acks:
    """Await conditional appends even with acks=0, so that a failed condition is reported."""
    conditional = request.expected_offset is not None or any(
        header.producer_id >= 0 for produced in appends.values() for header in produced.headers[:1]
    )
    return Acks.LEADER if request.acks is Acks.NONE and conditional else request.acks


def _verifier(context: Context, request: ProduceRequest) -> Callable[[int], Verify | None]:
    """What asks, for a partition, whether it takes part in the request's transaction."""
    transactional_id, topic = request.transactional_id, request.topic.record.name
    if transactional_id is None:
        return lambda _: None
    verify = context.broker.transactions.verify
    return lambda number: verify(transactional_id, (topic, number))


def _submit(
    request: ProduceRequest,
    produced: ProducedBatches,
    acks: Acks,
    *,
    number: int,
    verify: Verify | None,
) -> Future[AppendResult]:
    try:
        return request.topic.partition(number).append(
            produced, acks=acks, expected_offset=request.expected_offset, verify=verify
        )
    except TierlogError as error:
        refused: Future[AppendResult] = Future()
        refused.set_exception(error)
        return refused


def _led_elsewhere(
    request: ProduceRequest, futures: Mapping[int, Future[AppendResult]]
) -> list[int]:
    """The partitions that this broker has not appended to, but another can."""
    if request.elsewhere is None:
        return []
    return [
        number
        for number, future in futures.items()
        if future.done() and isinstance(future.exception(), ELSEWHERE)
    ]


def _append_elsewhere(
    request: ProduceRequest, appends: Mapping[int, ProducedBatches], numbers: Iterable[int]
) -> dict[int, Future[AppendResult]]:
    elsewhere = request.elsewhere
    return {one: elsewhere(one, appends[one]) for one in numbers} if elsewhere is not None else {}


def _raise_if_all_failed(futures: Collection[Future[AppendResult]]) -> None:
    """With acks=0 a later failure is only logged, unless it is known already and no partition has
    appended: clients repeat a request that was refused.
    """
    errors = [future.exception() for future in futures if future.done()]
    if len(errors) == len(futures) and all(errors):
        raise next(filter(None, errors))


def _results(
    request: ProduceRequest,
    appends: Mapping[int, ProducedBatches],
    outcomes: Iterable[AppendResult | BaseException],
) -> list[PartitionResult]:
    """Raises a failure, together with what was appended: one that leaves the outcome unknown if
    there is one, since clients repeat a request of which nothing was appended.
    """
    results: list[PartitionResult] = []
    failures: list[BaseException] = []
    for number, outcome in zip(appends, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            failures.append(_cause(request, number, outcome))
        else:
            results.append(_result(number, outcome, appends[number].record_count))
    if not failures:
        return results
    failure = next((one for one in failures if isinstance(one, LogOfflineError)), failures[0])
    if results and isinstance(failure, Exception):
        raise AppendedInPart(failure, results=results)
    raise failure


def _cause(request: ProduceRequest, number: int, error: BaseException) -> BaseException:
    """A log may be offline because its topic was deleted, not because its disk failed."""
    if isinstance(error, LogOfflineError):
        try:
            request.topic.partition(number).check_leadership()
        except TierlogError as reason:
            return reason
    return as_problem(error) if isinstance(error, TransactionRefused) else error


def _result(number: int, outcome: AppendResult, records: int) -> PartitionResult:
    return PartitionResult(
        partition=number,
        base_offset=outcome.base_offset,
        last_offset=outcome.last_offset,
        records=records,
        log_append_time=outcome.log_append_time,
        duplicate=outcome.duplicate,
    )


def _detach(
    context: Context, partition: str, produced: ProducedBatches, future: Future[AppendResult]
) -> None:
    """For acks=0: count the bytes as in flight until they are written, and log a failure."""
    inflight, size_bytes = context.inflight, len(produced.body)

    def done(future: Future[AppendResult]) -> None:
        inflight.release(size_bytes)
        error = future.exception()
        _count(context, [(produced, error or future.result())])
        if error is not None:
            log.warning("append with acks=0 failed", partition=partition, error=str(error))

    inflight.force(size_bytes)
    future.add_done_callback(done)


def _count(
    context: Context, outcomes: Iterable[tuple[ProducedBatches, AppendResult | BaseException]]
) -> None:
    """Count what was appended, without duplicates."""
    appended = [
        produced
        for produced, outcome in outcomes
        if isinstance(outcome, AppendResult)
        and not (outcome.duplicate or isinstance(outcome, AppendedElsewhere))
    ]
    context.metrics.produced_bytes.inc(sum(len(produced.body) for produced in appended))
    context.metrics.produced_records.inc(sum(produced.record_count for produced in appended))


def _expire_at_once(
    request: ProduceRequest, appends: Mapping[int, ProducedBatches], now_ms: int
) -> bool:
    config = request.topic.config
    return any(is_expired(one, config, now_ms=now_ms) for one in appends.values())


def _old_in_words(request: ProduceRequest) -> str:
    """The same for all records of a topic: clients show it once."""
    kept = in_words("retention.ms", request.topic.config.retention_ms)
    return (
        f"the timestamps are further in the past than retention.ms of topic "
        f"{request.topic.record.name!r} keeps ({kept}): the next check of retention deletes the "
        "records from both tiers, unless newer ones are in their segment. retention.ms=-1 keeps "
        "records of any age"
    )


def is_expired(produced: ProducedBatches, config: LogConfig, *, now_ms: int) -> bool:
    """Whether the next retention check would delete all of these records."""
    if config.retention_ms < 0 or config.log_append_time or not config.deletes:
        return False
    newest = max(header.max_timestamp for header in produced.headers)
    return 0 <= newest < now_ms - config.retention_ms
