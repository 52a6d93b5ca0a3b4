"""Fetch from one partition: batches as they are on disk, or records as JSON.

* What is in the page cache, whole batches or a few records as text, is answered without waiting,
  in the parser's callback.
* Raw batches never enter this process's memory: the file slices are sent to the socket.
* With a key, chunks in the bucket that do not have it are not read, and batches that do not contain
  it are left out. What a call reads for it is limited: it may find nothing, and go on later.
* Keys and values are decoded by their schemas in a thread, and such a page is not shared.
* A position other than an offset may be trimmed between its lookup and the read, or during the
  wait: then it is looked up again, unlike an offset given by the client. A time past the last
  record is also looked up again as long as the request waits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.http import header_values, strict_json
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch import record_json, record_pages
from tierlog.api.http.fetch.long_poll import AwaitedOffset, LongPoll
from tierlog.api.http.fetch.reading import (
    EARLIEST,
    LATEST,
    Isolation,
    MakeDecoder,
    MaxBytes,
    MinBytes,
    Position,
    WaitMs,
    compute_text,
    decoder_of,
    end_of,
    find_cold,
    find_here,
    find_time,
    log_headers,
    nothing_at,
    parse_position,
    resolve,
    text_response,
    work_bytes,
)
from tierlog.api.http.fetch.record_json import Encoding
from tierlog.api.http.fetch.record_pages import batches_with_key, filter_batches
from tierlog.api.http.fetch.shared_pages import Key, RenderedPage, page_key
from tierlog.api.http.fetch.tail import tail_partition
from tierlog.api.http.problems import HeaderList
from tierlog.api.http.responses import NO_STORE, AnyResponse, FileResponse
from tierlog.api.http.settings import MAX_FETCH_BYTES, MIB
from tierlog.broker.partition.partition import Partition, Readable
from tierlog.broker.partition.tiered_reads import Fetched, Tier
from tierlog.broker.schema_registry.decoding import RecordDecoder
from tierlog.cold_tier.key_search import KeySearch
from tierlog.host.file_slice import FileSlice, close_all
from tierlog.host.waiting import Wait
from tierlog.hot_tier.log_state import Offsets
from tierlog.record_format.errors import OffsetTrimmed
from tierlog.record_format.index_layouts import AbortedTxn

MaxRecords = Annotated[int, Meta(ge=1, le=2**31 - 1)]

_FORMS: Final = (
    header_values.JSON,
    header_values.NDJSON,
    header_values.BATCHES,
    header_values.EVENTS,
)
_RAW: Final = (b"content-type", header_values.BATCHES.encode())
_ATTEMPTS: Final = 3
# The query that readers send again and again: parsed faster than by `Exchange.query`, with the same
# result.
_COMMON_QUERY: Final = re.compile(rb"offset=([0-9]{1,18})&max_bytes=([1-9][0-9]{0,8})\Z")
# For up to _FEW_RECORDS records, _FEW_BYTES are read first: one record does not need a megabyte.
_FEW_RECORDS: Final = 100
_FEW_BYTES: Final = 16 << 10
# Of what has a key, read at a time; a call ends soon once it has found something.
_PIECE_BYTES: Final = 1 << 20
_SLICES_MAX: Final = 64
_KEY_MAX_MS: Final = 5_000
_SOON_MS: Final = 100


class FetchQuery(msgspec.Struct, forbid_unknown_fields=True):
    offset: str | UnsetType = UNSET
    timestamp: str | UnsetType = UNSET
    max_bytes: MaxBytes = MIB
    max_records: MaxRecords | UnsetType = UNSET
    min_bytes: MinBytes = 1
    wait_ms: WaitMs = 0
    isolation: Isolation = "read_uncommitted"
    encoding: Encoding = "utf8"
    decode: bool = False
    key: str | UnsetType = UNSET
    key_base64: bytes | UnsetType = UNSET

    @property
    def wanted_key(self) -> bytes | None:
        """Raises InvalidRequest."""
        if isinstance(self.key, str):
            if self.key_base64 is not UNSET:
                strict_json.refuse_field("key_base64", "give key or key_base64, not both")
            return self.key.encode()
        return None if isinstance(self.key_base64, UnsetType) else self.key_base64

    @property
    def committed(self) -> bool:
        return self.isolation == "read_committed"

    def for_text(self) -> FetchQuery:
        """The query with at most the `max_bytes` of a page."""
        if self.max_bytes <= record_pages.PAGE_BYTES:
            return self
        return msgspec.structs.replace(self, max_bytes=record_pages.PAGE_BYTES)

    def for_few(self) -> FetchQuery:
        """The query with a smaller `max_bytes` if it asks for few records; otherwise itself."""
        limit = self.record_limit
        if limit is None or limit > _FEW_RECORDS or self.min_bytes > 1:
            return self
        return msgspec.structs.replace(self, max_bytes=min(self.max_bytes, _FEW_BYTES))

    @property
    def record_limit(self) -> int | None:
        return None if isinstance(self.max_records, UnsetType) else self.max_records


class ReadResult(NamedTuple):
    """What was read from a partition, and from which offset."""

    partition: Readable
    offset: int
    fetched: Fetched


async def fetch(context: Context, exchange: Exchange) -> AnyResponse:
    form = header_values.preferred(exchange.header(b"accept"), offered=_FORMS)
    if form == header_values.EVENTS:
        return await tail_partition(context, exchange)
    topic, number = exchange.topic, exchange.partition
    partition = find_here(context, exchange, topic, number)
    position, query = _parse(exchange)
    if query.decode and form == header_values.BATCHES:
        strict_json.refuse_field(
            "decode", "records are decoded for JSON and NDJSON, not as batches"
        )
    if (key := query.wanted_key) is not None:
        return await _fetch_with_key(context, exchange, position, query, key)
    if partition is None:
        partition = await find_cold(context, exchange, position, topic=topic, partition=number)
    if form == header_values.BATCHES:
        result = await _read_first(context, partition, position, query)
        if query.wait_ms:
            result = await _enough(context, exchange, position, query, result)
        return await _filtered_batches_response(context, exchange, result, query)
    query = query.for_text()
    few = query.for_few()
    result = await _read_first(context, partition, position, few)
    if few.wait_ms:
        result = await _enough(context, exchange, position, few, result)
    decode = decoder_of(context, exchange) if query.decode else None
    return await _text_response(context, result, few, query, form=form, decode=decode)


def _parse(exchange: Exchange) -> tuple[Position, FetchQuery]:
    common = _COMMON_QUERY.match(exchange.scope["query_string"])
    if common is not None and (max_bytes := int(common[2])) <= MAX_FETCH_BYTES:
        return Position(offset=int(common[1])), FetchQuery(max_bytes=max_bytes)
    query = exchange.query(FetchQuery)
    return parse_position(query.offset, query.timestamp, default=EARLIEST), query


def _is_cut_short(
    result: ReadResult, page: RenderedPage, few: FetchQuery, query: FetchQuery
) -> bool:
    """Whether the few bytes that were read first are not enough for the query."""
    too_few = few.max_bytes < query.max_bytes and page.records < (few.record_limit or 0)
    return too_few and page.next_offset < result.fetched.end_offset


async def _read_more(context: Context, result: ReadResult, query: FetchQuery) -> ReadResult | None:
    """Read again, with the whole `max_bytes`; None if that was trimmed meanwhile."""
    try:
        fetched = await context.read_batches(result.partition, result.offset, query)
    except OffsetTrimmed:
        return None
    return result._replace(fetched=fetched)


async def _enough(
    context: Context,
    exchange: Exchange,
    position: Position,
    query: FetchQuery,
    result: ReadResult,
) -> ReadResult:
    """The result once it is enough, or what there is after `wait_ms`. What is not enough is closed:
    it is read again after a wait.
    """
    if _is_enough(result, query):
        return result
    await context.immediate.until_task()
    partition = result.partition
    with LongPoll(context.waiting, exchange, wait_ms=query.wait_ms) as poll:
        while not poll.over and not _is_enough(result, query):
            result.fetched.close()
            awaited = AwaitedOffset(partition.led_here(), result.fetched.high_watermark)
            await poll.wait([awaited])
            await context.access.recheck(exchange)
            if position.timestamp >= 0 and not result.fetched.slices:
                # New records may be earlier than that time: it is looked up again.
                result = await _read_first(context, partition, position, query)
            else:
                result = await read_again(context, partition, position, result.offset, query)
    return result


async def _read_first(
    context: Context, partition: Readable, position: Position, query: FetchQuery
) -> ReadResult:
    for attempt in range(_ATTEMPTS):
        if position.timestamp >= 0:
            now = partition.offsets()
            first = await find_time(context, partition, position.timestamp)
            if first is None:
                return _nothing_yet(partition, now, query)
            offset = first[0]
        elif position.offset >= 0:
            offset = position.offset
        else:
            offset = await resolve(context, partition, position, committed=query.committed)
        try:
            return ReadResult(
                partition, offset, await context.read_batches(partition, offset, query)
            )
        except OffsetTrimmed:
            # A client that gave no offset gets no OffsetTrimmed: its position is looked up again.
            if position.offset >= 0 or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _nothing_yet(partition: Readable, now: Offsets, query: FetchQuery) -> ReadResult:
    """An empty read at the end of the log as it was before the lookup of a time found nothing:
    records appended since may be later or earlier than that time.
    """
    end = end_of(now, committed=query.committed)
    return ReadResult(partition, end, nothing_at(end, now, committed=query.committed))


async def read_again(
    context: Context, partition: Readable, position: Position, offset: int, query: FetchQuery
) -> ReadResult:
    """Read again from `offset`, to which `position` was resolved before."""
    try:
        return ReadResult(partition, offset, await context.read_batches(partition, offset, query))
    except OffsetTrimmed:
        if position.keyword == LATEST:  # do not skip records appended since the lookup
            position = Position(keyword=EARLIEST)
        return await _read_first(context, partition, position, query)


# --- by key ---------------------------------------------------------------------------------------


async def _fetch_with_key(
    context: Context, exchange: Exchange, position: Position, query: FetchQuery, key: bytes
) -> AnyResponse:
    partition = context.broker.partition(exchange.topic, exchange.partition)
    await context.immediate.until_task()
    form = header_values.preferred(exchange.header(b"accept"), offered=_FORMS)
    if form != header_values.BATCHES:
        query = query.for_text()
    offset = await resolve(context, partition, position, committed=query.committed)
    read = partial(
        _read_with_key,
        context,
        partition,
        query=query,
        search=KeySearch(key),
        given_offset=position.offset,
    )
    with LongPoll(context.waiting, exchange, wait_ms=query.wait_ms) as poll:
        poll.listen()
        result = await read(offset, poll=poll)
        poll.restart(wait_ms=query.wait_ms)
        while result.fetched.at_end and not result.fetched.slices and not poll.over:
            fetched = result.fetched
            await poll.wait([AwaitedOffset(partition, fetched.high_watermark)])
            await context.access.recheck(exchange)
            result = await read(fetched.next_offset, poll=poll)
    if form == header_values.BATCHES:
        return _batches_response(context, exchange, result)
    decode = decoder_of(context, exchange) if query.decode else None
    return await _text_response(context, result, query, query, form=form, decode=decode)


async def _read_with_key(
    context: Context,
    partition: Partition,
    offset: int,
    query: FetchQuery,
    search: KeySearch,
    *,
    poll: LongPoll,
    given_offset: int,
) -> ReadResult:
    """The batches from `offset` on that may have the key, until they are `max_bytes`, or the limit
    of what is read for them is reached, or the client has gone. `given_offset`: by the client, -1
    if it gave none.
    """
    settings, began_s, first_offset = context.settings, time.monotonic(), offset
    read = partial(_read_piece, partition, search, query=query)
    kept: list[FileSlice] = []
    aborted: dict[AbortedTxn, None] = {}
    tiers: set[Tier] = set()
    read_bytes = 0
    try:
        while True:
            try:
                found, size_bytes = await context.read_at(partition, offset, partial(read, offset))
            except OffsetTrimmed:  # the offset that was given is an error, not one on the way
                if offset in (given_offset, max(offset, partition.log_start_offset)):
                    raise
                offset = max(offset, partition.log_start_offset)
                continue
            kept += found.slices
            read_bytes += size_bytes
            aborted |= dict.fromkeys(found.aborted)
            tiers.add(found.tier)
            offset, passed_ms = found.next_offset, (time.monotonic() - began_s) * 1000
            is_enough = sum([one.size_bytes for one in kept]) >= query.max_bytes
            limit_ms = _SOON_MS if kept else min(settings.search_max_ms, _KEY_MAX_MS)
            is_spent = read_bytes >= settings.search_max_bytes or passed_ms >= limit_ms
            is_spent = is_spent or poll.cancelled or len(kept) >= _SLICES_MAX
            if found.at_end or is_enough or is_spent:
                break
    except BaseException:
        close_all(kept)
        raise
    tier = found.tier if len(tiers) == 1 else "mixed"
    fetched = found._replace(slices=tuple(kept), aborted=tuple(aborted), tier=tier, hot_offset=0)
    return ReadResult(partition, first_offset, fetched)


def _read_piece(
    partition: Partition, search: KeySearch, offset: int, *, query: FetchQuery
) -> tuple[Fetched, int]:
    """The batches of the next piece that may have the key, and how many bytes were read."""
    offset, below = partition.find_key(offset, search)
    max_bytes = min(_PIECE_BYTES, query.max_bytes)
    fetched = partition.read(offset, max_bytes=max_bytes, committed=query.committed, below=below)
    with closing(fetched):
        return batches_with_key(fetched, offset=offset, key=search.key), fetched.size_bytes


def _is_enough(result: ReadResult, query: FetchQuery) -> bool:
    """Whether `min_bytes` were read, or something other than the end of the log ended the read."""
    size = result.fetched.size_bytes
    wanted = min(query.min_bytes, query.max_bytes)
    return size >= wanted or (size > 0 and not result.fetched.at_end)


# --- responses ----------------------------------------------------------------------------------


def _headers(partition: Readable, fetched: Fetched, *, next_offset: int) -> HeaderList:
    tier = fetched.tier_below(next_offset)
    return [*log_headers(partition, fetched, next_offset=next_offset, tier=tier), NO_STORE]


async def _filtered_batches_response(
    context: Context, exchange: Exchange, result: ReadResult, query: FetchQuery
) -> FileResponse:
    fetched, limit = result.fetched, query.record_limit
    if limit is not None or fetched.aborted:
        with closing(fetched):
            fetched = await context.read(
                filter_batches, fetched, offset=result.offset, max_records=limit
            )
        result = result._replace(fetched=fetched)
    return _batches_response(context, exchange, result)


def _batches_response(context: Context, exchange: Exchange, result: ReadResult) -> FileResponse:
    partition, offset, fetched = result
    next_offset = max(fetched.next_offset, offset)
    if exchange.method != "HEAD":  # HEAD reads no files
        records = fetched.span_from(offset)
        context.metrics.requests.fetched(
            fetched.tier, fetched.size_bytes, topic=partition.topic, records=records
        )
    headers = _headers(partition, fetched, next_offset=next_offset)
    headers.append(_RAW)
    return FileResponse(200, headers, fetched.slices)


async def _text_response(
    context: Context,
    result: ReadResult,
    few: FetchQuery,
    query: FetchQuery,
    *,
    form: str,
    decode: MakeDecoder | None,
) -> AnyResponse:
    page_of = partial(_shared_page if decode is None else partial(_decoded_page, decode), context)
    with closing(result.fetched):
        page = await page_of(result, few, form)
        more = None
        if _is_cut_short(result, page, few, query):
            more = await _read_more(context, result, query)
        if more is None:
            return _records_response(context, result, page, form)
    with closing(more.fetched):
        page = await page_of(more, query, form)
        return _records_response(context, more, page, form)


def _records_response(
    context: Context, result: ReadResult, page: RenderedPage, form: str
) -> AnyResponse:
    partition, _, fetched = result
    context.metrics.requests.fetched(
        fetched.tier, fetched.size_bytes, topic=partition.topic, records=page.records
    )
    parts: Sequence[record_json.Part] = page.content
    if form == header_values.JSON:
        parts = json_object(partition, fetched, parts, next_offset=page.next_offset)
    headers = _headers(partition, fetched, next_offset=page.next_offset)
    headers.append((b"content-type", form.encode()))
    return text_response(context, headers, parts)


async def _shared_page(
    context: Context, result: ReadResult, query: FetchQuery, form: str
) -> RenderedPage:
    """Encode the records as text; at the end of the log, share the result with other readers."""
    work = work_bytes(result.fetched, result.offset)
    return await context.pages.get(
        _cache_key(result, query, form),
        result.fetched,
        lambda: compute_text(
            context, work, partial(_render, result, query, form), max_bytes=query.max_bytes
        ),
    )


async def _decoded_page(
    make: MakeDecoder, context: Context, result: ReadResult, query: FetchQuery, form: str
) -> RenderedPage:
    """Not shared: others may see other schemas. A schema may have to be looked for, in the bucket
    or at another broker.
    """
    render = partial(_render, result, query, form, Wait.WAIT)
    async with context.decoding.for_page(query.max_bytes):
        return await context.read_cold(lambda: render(decoder=make()))


def _cache_key(result: ReadResult, query: FetchQuery, form: str) -> Key:
    """Everything that the result of `_render` depends on."""
    partition, offset, fetched = result
    limits = (query.committed, query.max_bytes, query.record_limit, query.wanted_key)
    return page_key(partition, fetched, offset, form, query.encoding, *limits)


def _render(
    result: ReadResult,
    query: FetchQuery,
    form: str,
    wait: Wait,
    *,
    decoder: RecordDecoder | None = None,
) -> RenderedPage:
    """Encode the records as text. Raises CorruptBatch, and WouldBlock as `read_page` does."""
    key, max_records = query.wanted_key, query.record_limit or record_pages.PAGE_RECORDS
    page = record_pages.read_page(
        result.fetched,
        offset=result.offset,
        max_bytes=query.max_bytes,
        max_records=max_records if key is None else record_pages.PAGE_RECORDS,
        wait=wait,
    )
    if key is not None:
        page = record_pages.only_with_key(page, key, max_records=max_records)
    if form == header_values.JSON:
        text = record_json.write_array(page, query.encoding, decoder=decoder)
    else:
        number = result.partition.number
        text = record_json.write_lines(
            page, partition=number, encoding=query.encoding, decoder=decoder
        )
    return RenderedPage(
        text.parts, text.next_offset, text.size_bytes, text.records, page.large is not None
    )


def json_object(
    partition: Readable,
    fetched: Fetched,
    records: Sequence[record_json.Part],
    *,
    next_offset: int,
) -> Sequence[record_json.Part]:
    """The JSON object of a partition around its encoded records."""
    return (
        b'{"topic":"%b","partition":%d,"records":[' % (partition.topic.encode(), partition.number),
        *records,
        b'],"next_offset":%d,"log_start_offset":%d,"high_watermark":%d,"tier":"%b"}'
        % (
            next_offset,
            fetched.log_start_offset,
            fetched.high_watermark,
            fetched.tier_below(next_offset).encode(),
        ),
    )
