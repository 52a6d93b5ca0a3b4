"""`POST /v1/fetch`: many partitions in one long poll.

* A partition that cannot be read has its problem in its place; the others are unaffected.
* A request waits once, not per partition, for a store that does not respond or for space in the
  chunk cache: after that, partitions that need the store fail like the first.
* A partition requested without an offset and trimmed meanwhile is read from its new start.
* The request's `max_bytes` is spent in the order of the partitions, both on what is read from the
  log and on the records in the response: a partition for which nothing is left gets no records, at
  its offset. A client can put it first in its next request. The first partition with records always
  gets some.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import json_body
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch import record_json, record_pages
from tierlog.api.http.fetch.long_poll import AwaitedOffset, LongPoll
from tierlog.api.http.fetch.many_brokers import HERE, SplitFetch, shares_of
from tierlog.api.http.fetch.reading import (
    EARLIEST,
    Isolation,
    MaxBytes,
    MinBytes,
    Position,
    WaitMs,
    check_within,
    compute_text,
    find_cold,
    find_here,
    is_still_at_end,
    nothing_at,
    parse_position,
    resolve,
    text_response,
    work_bytes,
)
from tierlog.api.http.fetch.record_json import Encoding, PageText, Part
from tierlog.api.http.fetch.single import FetchQuery, json_object, read_again
from tierlog.api.http.responses import JSON, NO_STORE, AnyResponse
from tierlog.api.http.settings import MAX_PARTITION, MIB
from tierlog.broker.partition.partition import Partition, Readable
from tierlog.broker.partition.tiered_reads import Fetched
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.record_format.errors import StoreUnavailable, Throttled, TierlogError

MAX_PARTITIONS: Final = 1000
STORE_ERRORS: Final = (StoreUnavailable, Throttled)
STORE_WAIT_MAX_S: Final = 5.0


class RequestedPartition(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    partition: Annotated[int, Meta(ge=0, le=MAX_PARTITION)]
    offset: int | str | UnsetType = UNSET
    max_bytes: MaxBytes = MIB


class FetchMany(msgspec.Struct, forbid_unknown_fields=True):
    partitions: Annotated[list[RequestedPartition], Meta(min_length=1, max_length=MAX_PARTITIONS)]
    max_bytes: MaxBytes = 8 * MIB
    min_bytes: MinBytes = 1
    wait_ms: WaitMs = 0
    encoding: Encoding = "utf8"
    isolation: Isolation = "read_uncommitted"


class FailedFetch(NamedTuple):
    """A partition that could not be read."""

    topic: str
    partition: int
    error: Exception


class PartitionFetch(NamedTuple):
    """A partition, where it is read from (`position` as requested), and what was read."""

    partition: Readable
    position: Position
    offset: int
    max_bytes: int
    fetched: Fetched | None = None
    page_bytes: int = 0  # `max_bytes`, or what the partitions before have left of the request's


Fetch = PartitionFetch | FailedFetch


class RecordBudget:
    """How much the response may still hold, after the partitions before."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes, self._records = size_bytes, record_pages.PAGE_RECORDS
        self._text = record_json.TEXT_BYTES

    def write_page(
        self, fetch: PartitionFetch, fetched: Fetched, encoding: Encoding, wait: Wait
    ) -> PageText:
        if min(self._bytes, self._records, self._text) <= 0:
            return PageText((), fetch.offset, 0)
        page = record_pages.read_page(
            fetched,
            offset=fetch.offset,
            max_bytes=min(fetch.page_bytes, self._bytes),
            max_records=self._records,
            wait=wait,
        )
        text = record_json.write_array(page, encoding, text_bytes=self._text)
        self._bytes -= page.size_bytes
        self._records -= text.records
        self._text -= text.size_bytes
        return text


async def fetch_many(context: Context, exchange: Exchange) -> AnyResponse:
    request = await json_body(context, exchange, FetchMany)
    request.max_bytes = min(request.max_bytes, record_pages.PAGE_BYTES)
    if context.gateway is not None and not exchange.is_direct:
        shares = shares_of(context, request.partitions, range(len(request.partitions)))
        if shares.keys() != {HERE}:
            await context.immediate.until_task()
            here = partial(_fetch_here, context, exchange)
            return await SplitFetch(context, exchange, request, here).response(shares)
    return await _fetch_here(context, exchange, request)


async def _fetch_here(context: Context, exchange: Exchange, request: FetchMany) -> AnyResponse:
    positions = [
        parse_position(wanted.offset, UNSET, default=EARLIEST, within=f"partitions[{index}]")
        for index, wanted in enumerate(request.partitions)
    ]
    fetches = [
        await _resolve(context, exchange, wanted, position, request)
        for wanted, position in zip(request.partitions, positions, strict=True)
    ]
    with LongPoll(context.waiting, exchange, wait_ms=request.wait_ms) as poll:
        fetches = await _read_all(context, fetches, request)
        while not poll.over and not _is_enough(fetches, request):
            _close(fetches)  # they are read again
            await poll.wait(_awaited_offsets(fetches))
            await context.access.recheck(exchange)
            fetches = await _read_all(context, fetches, request)
    try:
        return await _response(context, exchange, fetches, request)
    finally:
        _close(fetches)


def _close(fetches: Sequence[Fetch]) -> None:
    for fetch in fetches:
        if isinstance(fetch, PartitionFetch) and fetch.fetched is not None:
            fetch.fetched.close()


async def _resolve(
    context: Context,
    exchange: Exchange,
    wanted: RequestedPartition,
    position: Position,
    request: FetchMany,
) -> Fetch:
    try:
        exchange.grant.check_topic(wanted.topic)
        place = wanted.topic, wanted.partition
        partition = find_here(context, exchange, *place)
        if partition is None:
            topic, number = place
            partition = await find_cold(context, exchange, position, topic=topic, partition=number)
        committed = request.isolation == "read_committed"
        offset = await resolve(context, partition, position, committed=committed)
    except TierlogError as error:
        return FailedFetch(wanted.topic, wanted.partition, error)
    return PartitionFetch(partition, position, offset, wanted.max_bytes)


async def _read_all(context: Context, fetches: Sequence[Fetch], request: FetchMany) -> list[Fetch]:
    done: list[Fetch] = []
    try:
        await _read_each(context, fetches, done, request)
    except BaseException:
        _close(done)
        raise
    return done


async def _read_each(
    context: Context, fetches: Sequence[Fetch], done: list[Fetch], request: FetchMany
) -> None:
    bytes_left, store_wait_s = request.max_bytes, 0.0
    store_error: TierlogError | None = None
    for fetch in fetches:
        if isinstance(fetch, FailedFetch) or _has_nothing_new(fetch):
            done.append(fetch)
            continue
        began_s = time.monotonic()
        read = await _read_one(context, fetch, request, bytes_left, store_error=store_error)
        done.append(read)
        if isinstance(read, PartitionFetch):
            assert read.fetched is not None, "just read"
            bytes_left -= read.fetched.size_bytes
        elif isinstance(read.error, STORE_ERRORS):
            store_wait_s += time.monotonic() - began_s
            if store_wait_s > STORE_WAIT_MAX_S:
                store_error = _not_tried(read.error)


def _has_nothing_new(fetch: PartitionFetch) -> bool:
    """Whether to read again, after a wait, would find what was found before: nothing."""
    partition, found = fetch.partition, fetch.fetched
    return (
        found is not None
        and found.log_start_offset == partition.offsets().log_start_offset
        and is_still_at_end(partition, fetch.offset, high_watermark=found.high_watermark)
    )


def _not_tried(error: Exception) -> TierlogError:
    kind = Throttled if isinstance(error, Throttled) else StoreUnavailable
    return kind(
        "not tried: reads of earlier partitions in this request waited for the store without "
        "success"
    )


async def _read_one(
    context: Context,
    fetch: PartitionFetch,
    request: FetchMany,
    bytes_left: int,
    *,
    store_error: TierlogError | None,
) -> Fetch:
    """Read up to `bytes_left`. If `store_error` is given, fail with it instead of waiting for the
    store.
    """
    page_bytes = max(1, min(fetch.max_bytes, bytes_left))
    query = FetchQuery(max_bytes=page_bytes, isolation=request.isolation)
    partition, position = fetch.partition, fetch.position
    try:
        if bytes_left <= 0:
            return await _unread(fetch, committed=query.committed)
        if store_error is not None and _needs_store(fetch):
            raise store_error
        _, offset, fetched = await read_again(context, partition, position, fetch.offset, query)
    except TierlogError as error:
        return FailedFetch(partition.topic, partition.number, error)
    return fetch._replace(offset=offset, fetched=fetched, page_bytes=page_bytes)


async def _unread(fetch: PartitionFetch, *, committed: bool) -> PartitionFetch:
    """Nothing is left of the request's `max_bytes`: only the offsets, without disk or store. Raises
    what `check_within` does.
    """
    partition, offset = fetch.partition, fetch.offset
    if fetch.position.offset < 0:  # it may have been trimmed meanwhile
        offset = max(offset, partition.offsets().log_start_offset)
    await check_within(partition, offset)
    fetched = nothing_at(offset, partition.offsets(), committed=committed)
    return fetch._replace(offset=offset, fetched=fetched)


def _needs_store(fetch: PartitionFetch) -> bool:
    partition, offset = fetch.partition, fetch.offset
    is_cold = offset < partition.offsets().local_log_start_offset
    if not is_cold:
        return False
    try:
        partition.read(offset, max_bytes=1, wait=Wait.NEVER).close()
    except WouldBlock:
        return True
    return False


def _is_enough(fetches: Sequence[Fetch], request: FetchMany) -> bool:
    """A failed partition is enough too: the problem is returned without waiting."""
    read = [
        fetch.fetched for fetch in fetches if isinstance(fetch, PartitionFetch) and fetch.fetched
    ]
    if len(read) < len(fetches):
        return True
    size = sum(fetched.size_bytes for fetched in read)
    full = any(fetched.slices and not fetched.at_end for fetched in read)
    return size >= min(request.min_bytes, request.max_bytes) or full


def _awaited_offsets(fetches: Sequence[Fetch]) -> list[AwaitedOffset]:
    return [
        AwaitedOffset(fetch.partition, fetch.fetched.high_watermark)
        for fetch in fetches
        if isinstance(fetch, PartitionFetch) and fetch.fetched is not None
        if isinstance(fetch.partition, Partition)  # what the bucket has does not grow here
    ]


async def _response(
    context: Context,
    exchange: Exchange,
    fetches: Sequence[Fetch],
    request: FetchMany,
) -> AnyResponse:
    work = 0
    for fetch in fetches:
        if isinstance(fetch, PartitionFetch) and fetch.fetched is not None:
            fetched = fetch.fetched
            work += work_bytes(fetched, fetch.offset)
            records = fetched.span_from(fetch.offset)
            context.metrics.requests.fetched(
                fetched.tier, fetched.size_bytes, topic=fetch.partition.topic, records=records
            )

    def render(wait: Wait) -> list[Part]:
        budget = RecordBudget(request.max_bytes)
        parts: list[Part] = [b'{"partitions":[']
        for fetch in fetches:
            json = _fetch_json(context, exchange, fetch, budget, request=request, wait=wait)
            parts += (*json, b",")
        parts[-1] = b"]}"
        return parts

    parts = await compute_text(context, work, render, max_bytes=request.max_bytes)
    return text_response(context, [JSON, NO_STORE], parts)


def _fetch_json(
    context: Context,
    exchange: Exchange,
    fetch: Fetch,
    budget: RecordBudget,
    *,
    request: FetchMany,
    wait: Wait,
) -> Sequence[Part]:
    if isinstance(fetch, FailedFetch):
        return (_error_json(context, exchange, fetch),)
    assert fetch.fetched is not None, "read before"
    try:
        text = budget.write_page(fetch, fetch.fetched, request.encoding, wait)
    except TierlogError as error:
        failed = FailedFetch(fetch.partition.topic, fetch.partition.number, error)
        return (_error_json(context, exchange, failed),)
    return json_object(fetch.partition, fetch.fetched, text.parts, next_offset=text.next_offset)


def _error_json(context: Context, exchange: Exchange, failed: FailedFetch) -> bytes:
    problem = context.problem(exchange, failed.error)
    return msgspec.json.encode(
        {
            "topic": failed.topic,
            "partition": failed.partition,
            "error": problem.document,
        }
    )
