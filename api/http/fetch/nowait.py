"""A fetch that need not wait: whole batches in the page cache, or a few records as text."""

from __future__ import annotations

import re
import time
from typing import Final

from api.http import strict_json
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.fetch.positions import EARLIEST, parse_position
from api.http.fetch.reading import work_bytes
from api.http.fetch.record_json import WouldBlock
from api.http.fetch.single import (
    FORMS,
    FetchQuery,
    ReadResult,
    batches_response,
    cache_key,
    is_cut_short,
    is_enough,
    records_response,
    render,
)
from api.http.request import media_types
from api.http.responses import AnyResponse
from api.http.settings import MAX_FETCH_BYTES
from api.protocol.immediate import IMMEDIATE_MAX_BYTES
from broker.partition import Partition

# The query that readers send again and again: parsed faster than by `parse_query`, with the same
# result.
_COMMON_QUERY: Final = re.compile(rb"offset=([0-9]{1,18})&max_bytes=([1-9][0-9]{0,8})\Z")


def try_fetch(context: Context, exchange: Exchange) -> AnyResponse | None:
    """As `fetch`, if an offset is given and the records are in memory; otherwise None."""
    form = media_types.preferred(exchange.header(b"accept"), offered=FORMS)
    if form == media_types.EVENTS:
        return None
    partition = context.broker.partition(exchange.topic, exchange.partition)
    offset, query = _offset_and_query(exchange.scope["query_string"])
    if offset < 0 or query.committed:
        return None
    if form == media_types.BATCHES:
        if query.record_limit is not None:
            return None
        result = _try_read(exchange, partition, offset, query)
        return None if result is None else batches_response(context, exchange, result)
    few = query.for_few()
    result = _try_read(exchange, partition, offset, few)
    if result is None or work_bytes(result.fetched, result.offset) > IMMEDIATE_MAX_BYTES:
        return None
    began_s = time.perf_counter()
    try:
        page = context.pages.get_sync(
            cache_key(result, few, form),
            result.fetched,
            lambda: render(result, few, form, nowait=True),
        )
    except WouldBlock:
        return None
    exchange.timings.add("encode", began_s)
    if is_cut_short(result, page, few, query):
        return None
    return records_response(context, result, page, form)


def _offset_and_query(query_string: bytes) -> tuple[int, FetchQuery]:
    """The offset of a fetch's query, -1 if there is none, and the whole query."""
    common = _COMMON_QUERY.match(query_string)
    if common is not None and (max_bytes := int(common[2])) <= MAX_FETCH_BYTES:
        return int(common[1]), FetchQuery(max_bytes=max_bytes)
    query = strict_json.parse_query(query_string, FetchQuery)
    return parse_position(query.offset, query.timestamp, default=EARLIEST).offset, query


def _try_read(
    exchange: Exchange, partition: Partition, offset: int, query: FetchQuery
) -> ReadResult | None:
    """What can be read without waiting for the disk or for new records."""
    began_s = time.perf_counter()
    fetched = partition.try_read(offset, max_bytes=query.max_bytes)
    if fetched is None:
        return None
    result = ReadResult(partition, offset, fetched)
    if query.wait_ms and not is_enough(result, query):
        return None
    exchange.timings.add("broker" if fetched.tier == "hot" else "store", began_s)
    return result
