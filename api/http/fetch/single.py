"""The fetch of one partition: batches as they are on disk, or records as JSON.

* What is in memory is answered by the event loop; a thread fetches what is not.
* Raw batches are never in this process's memory: the slices go to the socket.
* A position other than an offset may be trimmed between its lookup and the read, or during the
  wait: it is looked up again, while an offset that the client gave is not. A time past the last
  record is looked up again too, as long as the request waits.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api.http import strict_json
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.fetch import record_json
from api.http.fetch.batch_filter import filter_batches
from api.http.fetch.long_poll import AwaitedOffset, LongPoll
from api.http.fetch.positions import (
    EARLIEST,
    LATEST,
    Position,
    end_of,
    find_time,
    parse_position,
    resolve,
)
from api.http.fetch.reading import (
    Isolation,
    MaxBytes,
    MinBytes,
    WaitMs,
    compute_text,
    log_headers,
    read,
    work_bytes,
)
from api.http.fetch.shared_pages import Key, RenderedPage, page_key
from api.http.fetch.tail import tail_of
from api.http.problems import HeaderList
from api.http.request import media_types
from api.http.responses import NO_STORE, AnyResponse, FileResponse, Response
from api.http.settings import MIB
from broker.partition import Fetched, Partition
from hot_tier.log_state import Offsets
from record_format.errors import OffsetTrimmed

MaxRecords = Annotated[int, Meta(ge=1, le=2**31 - 1)]

FORMS: Final = (
    media_types.JSON,
    media_types.NDJSON,
    media_types.BATCHES,
    media_types.EVENTS,
)
_RAW: Final = (b"content-type", media_types.BATCHES.encode())
_ATTEMPTS: Final = 3
# Up to so many records are looked for in so few bytes first: one record does not need a megabyte.
FEW_RECORDS: Final = 100
FEW_BYTES: Final = 16 << 10


class FetchQuery(msgspec.Struct, forbid_unknown_fields=True):
    offset: str | UnsetType = UNSET
    timestamp: str | UnsetType = UNSET
    max_bytes: MaxBytes = MIB
    max_records: MaxRecords | UnsetType = UNSET
    min_bytes: MinBytes = 1
    wait_ms: WaitMs = 0
    isolation: Isolation = "read_uncommitted"
    encoding: record_json.Encoding = "utf8"

    @property
    def committed(self) -> bool:
        return self.isolation == "read_committed"

    def for_few(self) -> FetchQuery:
        """The same with less to read if few records are asked for; otherwise itself."""
        limit = self.record_limit
        if limit is None or limit > FEW_RECORDS or self.min_bytes > 1:
            return self
        return msgspec.structs.replace(self, max_bytes=min(self.max_bytes, FEW_BYTES))

    @property
    def record_limit(self) -> int | None:
        return None if isinstance(self.max_records, UnsetType) else self.max_records


class Found(NamedTuple):
    """What was read from a partition, and the offset it was read from."""

    partition: Partition
    offset: int
    fetched: Fetched


async def fetch(context: Context, exchange: Exchange) -> AnyResponse:
    form = media_types.preferred(exchange.header(b"accept"), offered=FORMS)
    partition = context.broker.partition(exchange.topic, exchange.partition)
    if form == media_types.EVENTS:
        return await tail_of(context, exchange, [partition])
    query = strict_json.parse_query(exchange.scope["query_string"], FetchQuery)
    position = parse_position(query.offset, query.timestamp, default=EARLIEST)
    if form == media_types.BATCHES:
        found = await _fetch_enough(context, exchange, partition, position, query)
        return await _filtered_batches_response(context, exchange, found, query)
    few = query.for_few()
    found = await _fetch_enough(context, exchange, partition, position, few)
    page = await _written(context, found, few, form)
    if is_cut_short(found, page, few, query):
        found, page = await _more(context, found, page, query, form)
    return records_response(context, found, page, form)


def is_cut_short(found: Found, page: RenderedPage, few: FetchQuery, query: FetchQuery) -> bool:
    """Whether the few bytes that were read first are not enough for what is asked for."""
    too_few = few.max_bytes < query.max_bytes and page.records < (few.record_limit or 0)
    return too_few and page.next_offset < found.fetched.end_offset


async def _more(
    context: Context, found: Found, page: RenderedPage, query: FetchQuery, form: str
) -> tuple[Found, RenderedPage]:
    """Read again, with all of `max_bytes`."""
    try:
        fetched = await read(context, found.partition, found.offset, query)
    except OffsetTrimmed:
        return found, page  # what was there is a response
    found = found._replace(fetched=fetched)
    return found, await _written(context, found, query, form)


async def _fetch_enough(
    context: Context,
    exchange: Exchange,
    partition: Partition,
    position: Position,
    query: FetchQuery,
) -> Found:
    found = await read_first(context, partition, position, query)
    if query.wait_ms == 0 or is_enough(found, query):
        return found
    with LongPoll(context, exchange, wait_ms=query.wait_ms) as poll:
        while not poll.over and not is_enough(found, query):
            await poll.wait([AwaitedOffset(partition, found.fetched.high_watermark)])
            context.access.recheck(exchange)
            if position.timestamp >= 0 and not found.fetched.slices:
                # New records may be older than that time: it is looked up again.
                found = await read_first(context, partition, position, query)
            else:
                found = await read_on(context, partition, position, found.offset, query)
    return found


async def read_first(
    context: Context, partition: Partition, position: Position, query: FetchQuery
) -> Found:
    for attempt in range(_ATTEMPTS):
        if position.timestamp >= 0:
            now = partition.offsets()
            first = await find_time(context, partition, position.timestamp)
            if first is None:
                return _nothing_yet(partition, now, query)
            offset = first[0]
        else:
            offset = await resolve(context, partition, position, committed=query.committed)
        try:
            return Found(partition, offset, await read(context, partition, offset, query))
        except OffsetTrimmed:
            # A client that gave no offset is not told of one: the position is looked up again.
            if position.offset >= 0 or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _nothing_yet(partition: Partition, now: Offsets, query: FetchQuery) -> Found:
    """The log as it was before a time was looked up in vain: records that came since may be those
    that are waited for, or older ones.
    """
    end = end_of(now, committed=query.committed)
    fetched = Fetched(
        slices=(),
        next_offset=end,
        end_offset=end,
        log_start_offset=now.log_start_offset,
        high_watermark=now.high_watermark,
        tier="hot",
    )
    return Found(partition, end, fetched)


async def read_on(
    context: Context, partition: Partition, position: Position, offset: int, query: FetchQuery
) -> Found:
    """What is there now from `offset` on, to which `position` was resolved before."""
    try:
        return Found(partition, offset, await read(context, partition, offset, query))
    except OffsetTrimmed:
        if position.keyword == LATEST:  # records that came since the lookup are not left out
            position = Position(keyword=EARLIEST)
        return await read_first(context, partition, position, query)


def is_enough(found: Found, query: FetchQuery) -> bool:
    """A page that is full, or was cut by something other than the end of the log, is enough."""
    size = found.fetched.size_bytes
    wanted = min(query.min_bytes, query.max_bytes)
    return size >= wanted or (size > 0 and not found.fetched.at_end)


# --- answers ------------------------------------------------------------------------------------


def _headers(partition: Partition, fetched: Fetched, *, next_offset: int) -> HeaderList:
    tier = fetched.tier_below(next_offset)
    return [*log_headers(partition, fetched, next_offset=next_offset, tier=tier), NO_STORE]


async def _filtered_batches_response(
    context: Context, exchange: Exchange, found: Found, query: FetchQuery
) -> FileResponse:
    fetched, limit = found.fetched, query.record_limit
    if limit is not None or fetched.aborted:
        fetched = await context.read(
            filter_batches, fetched, offset=found.offset, max_records=limit
        )
        found = found._replace(fetched=fetched)
    return batches_response(context, exchange, found)


def batches_response(context: Context, exchange: Exchange, found: Found) -> FileResponse:
    partition, offset, fetched = found
    next_offset = max(fetched.next_offset, offset)
    if exchange.method != "HEAD":  # which reads nothing of the files
        records = next_offset - offset
        context.metrics.requests.fetched(fetched.tier, fetched.size_bytes, records=records)
    headers = _headers(partition, fetched, next_offset=next_offset)
    headers.append(_RAW)
    return FileResponse(200, headers, fetched.slices)


def records_response(context: Context, found: Found, page: RenderedPage, form: str) -> Response:
    partition, _, fetched = found
    context.metrics.requests.fetched(fetched.tier, fetched.size_bytes, records=page.records)
    body: bytes = page.content
    if form == media_types.JSON:
        body = json_object(partition, fetched, body, next_offset=page.next_offset)
    headers = _headers(partition, fetched, next_offset=page.next_offset)
    headers.append((b"content-type", form.encode()))
    return Response(200, headers, body)


async def _written(context: Context, found: Found, query: FetchQuery, form: str) -> RenderedPage:
    """The records as text; shared with others at the end of the log, if possible."""
    work = work_bytes(found.fetched, found.offset)
    return await context.pages.get(
        cache_key(found, query, form),
        found.fetched,
        lambda: compute_text(context, work, partial(write, found, query, form)),
    )


def cache_key(found: Found, query: FetchQuery, form: str) -> Key:
    """Everything that the result of `write` depends on."""
    partition, offset, fetched = found
    limits = (query.committed, query.max_bytes, query.record_limit)
    return page_key(partition, fetched, offset, form, query.encoding, *limits)


def write(found: Found, query: FetchQuery, form: str, nowait: bool) -> RenderedPage:
    """The records as text. Raises CorruptBatch, and WouldBlock as `read_page` does."""
    page = record_json.read_page(
        found.fetched,
        offset=found.offset,
        max_bytes=query.max_bytes,
        max_records=query.record_limit or record_json.PAGE_RECORDS,
        nowait=nowait,
    )
    if form == media_types.JSON:
        body = record_json.write_array(page, query.encoding)
    else:
        number = found.partition.number
        body = record_json.write_lines(page, partition=number, encoding=query.encoding)
    return RenderedPage(body, page.next_offset, len(body), page.record_count)


def json_object(
    partition: Partition, fetched: Fetched, records: bytes, *, next_offset: int
) -> bytes:
    """The object around records that were written already."""
    return b"".join(
        (
            b'{"topic":"%b","partition":%d,"records":['
            % (partition.topic.encode(), partition.number),
            records,
            b'],"next_offset":%d,"log_start_offset":%d,"high_watermark":%d,"tier":"%b"}'
            % (
                next_offset,
                fetched.log_start_offset,
                fetched.high_watermark,
                fetched.tier_below(next_offset).encode(),
            ),
        )
    )
