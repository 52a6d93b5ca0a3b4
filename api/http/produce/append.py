"""Appends the batches of a produce request to their partitions, and makes the response.

* The response waits for what `acks` requires; no thread is blocked meanwhile.
* If some partitions fail, the problem reports what the others appended.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future

import structlog

from tierlog.api.http.all_completed import AllCompleted
from tierlog.api.http.context import Context
from tierlog.api.http.http_errors import AppendedInPart
from tierlog.api.http.metrics import timings
from tierlog.api.http.produce.batches import is_expired
from tierlog.api.http.produce.head import ProduceRequest
from tierlog.api.http.responses import Response, json_response
from tierlog.api.http.schemas import Accepted, PartitionResult, Produced
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.record_format.errors import LogOfflineError, TierlogError
from tierlog.record_format.produced import ProducedBatches

log = structlog.get_logger(__name__)


async def append(
    context: Context, request: ProduceRequest, appends: Mapping[int, ProducedBatches]
) -> Response:
    """Append the batches, each partition's as one append. Raises the error of a partition, as
    AppendedInPart if others succeeded.
    """
    name = request.topic.record.name
    acks = _acks_to_await(request, appends)
    if acks is Acks.NONE:
        for number in appends:  # before any is queued: a refused request has changed nothing
            request.topic.partition(number).check_writable()
    futures = {number: _submit(request, number, appends[number], acks) for number in appends}
    count = sum(produced.record_count for produced in appends.values())
    if acks is Acks.NONE:
        _raise_if_all_failed(futures.values())
        for number, future in futures.items():
            _detach(context, f"{name}-{number}", appends[number], future)
        return json_response(Accepted(name, count), status=202)
    began_s = time.perf_counter()
    await AllCompleted(futures.values())
    timings.record("broker", began_s)
    outcomes = [future.exception() or future.result() for future in futures.values()]
    _count(context, zip(appends.values(), outcomes, strict=True))
    results = _results(request, appends, outcomes)
    if request.acks is Acks.NONE:
        return json_response(Accepted(name, count), status=202)
    warnings = _warnings(request, appends, context.settings.clock())
    return json_response(Produced(name, results, warnings))


def _acks_to_await(request: ProduceRequest, appends: Mapping[int, ProducedBatches]) -> Acks:
    """Await conditional appends even with acks=0, so that a failed condition is reported."""
    conditional = request.expected_offset is not None or any(
        header.producer_id >= 0 for produced in appends.values() for header in produced.headers[:1]
    )
    return Acks.LEADER if request.acks is Acks.NONE and conditional else request.acks


def _submit(
    request: ProduceRequest, number: int, produced: ProducedBatches, acks: Acks
) -> Future[AppendResult]:
    try:
        return request.topic.partition(number).append(
            produced, acks=acks, expected_offset=request.expected_offset
        )
    except TierlogError as error:
        refused: Future[AppendResult] = Future()
        refused.set_exception(error)
        return refused


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
    return error


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
        if isinstance(outcome, AppendResult) and not outcome.duplicate
    ]
    context.metrics.produced_bytes.inc(sum(len(produced.body) for produced in appended))
    context.metrics.produced_records.inc(sum(produced.record_count for produced in appended))


def _warnings(
    request: ProduceRequest, appends: Mapping[int, ProducedBatches], now_ms: int
) -> list[str]:
    config = request.topic.config
    expired = any(is_expired(one, config, now_ms=now_ms) for one in appends.values())
    return ["older-than-retention"] if expired else []
