"""Serves a segment's bytes from either tier, as a static file server does.

A cold segment is downloaded chunk by chunk while it is sent. The first chunk precedes the
response's head, so that a bucket that is down is a 503; a later error aborts the connection, and
never sends wrong bytes. Files that are open, or in the chunk cache, are sent without a thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import NamedTuple

from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import no_query
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch.reading import Position, find_cold, find_here
from tierlog.api.http.header_values import (
    BATCHES,
    OCTETS,
    ByteRange,
    matches,
    none_match,
    preferred,
    select_range,
)
from tierlog.api.http.problems import HeaderList, PreconditionFailed
from tierlog.api.http.responses import AnyResponse, FileResponse, Response, WindowedResponse
from tierlog.broker.partition.segment_listing import SegmentBytes, open_segment, slices_of
from tierlog.host.file_slice import FileSlice, close_all
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.record_format.errors import UnknownSegment


class _Selection(NamedTuple):
    """The head of the response, and the range that is sent."""

    status: int
    headers: HeaderList
    range: ByteRange


async def get_segment(context: Context, exchange: Exchange) -> AnyResponse:
    no_query(exchange)
    media_type = preferred(exchange.header(b"accept"), offered=(OCTETS, BATCHES))
    topic, number = exchange.topic, exchange.partition
    partition = find_here(context, exchange, topic, number)
    base_offset = exchange.number("base_offset", missing=_no_segment)
    if partition is None:
        position = Position(offset=base_offset)
        partition = await find_cold(context, exchange, position, topic=topic, partition=number)
    segment = await context.read_partition(
        partition, base_offset, partial(open_segment, partition, base_offset)
    )
    with closing(segment):
        selection = _select(exchange, partition.topic_id, base_offset, segment)
        if isinstance(selection, Response):
            return selection
        selection.headers.append((b"content-type", media_type.encode()))
        _count_fetched(context, exchange, segment, selection.range)
        start, end, _ = selection.range
        found: list[FileSlice] = []
        try:
            found.extend(slices_of(partition, segment, start=start, end=end, wait=Wait.NEVER))
        except BaseException as error:
            close_all(found)
            if not isinstance(error, WouldBlock):
                raise
        else:
            return FileResponse(selection.status, selection.headers, tuple(found))
        slices = slices_of(partition, segment, start=start, end=end)
        fetch = partial(context.read_at, partition, base_offset, partial(next, slices, None))
        return await _windowed(exchange, selection, fetch)


async def _windowed(
    exchange: Exchange,
    selection: _Selection,
    fetch: Callable[[], Awaitable[FileSlice | None]],
) -> WindowedResponse:
    ready: list[FileSlice] = []

    async def fetch_next() -> None:
        """One at a time: each takes space in the cache until it is sent."""
        found = await fetch()
        if found is not None:
            ready.append(found)

    async def in_turn() -> AsyncGenerator[FileSlice, None]:
        while ready:
            yield ready.pop()
            await fetch_next()

    if exchange.method != "HEAD":  # which needs no byte of the segment
        await fetch_next()
    start, end, _ = selection.range
    return WindowedResponse(selection.status, selection.headers, end - start, ready, in_turn())


def _select(
    exchange: Exchange, topic_id: str, base_offset: int, segment: SegmentBytes
) -> _Selection | Response:
    """Raises PreconditionFailed, RangeNotSatisfiable."""
    size_bytes = segment.size_bytes
    etag = segment.etag or f'"{topic_id}-{base_offset}-{size_bytes:x}"'
    headers: HeaderList = [
        (b"etag", etag.encode()),
        (b"cache-control", b"private, no-cache"),
        (b"accept-ranges", b"bytes"),
        (b"vary", b"accept"),
        # A segment holds what anybody produced: it is no page, and no script of another site.
        (b"x-content-type-options", b"nosniff"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"log-tier", segment.tier.encode()),
    ]
    if not matches(exchange.header(b"if-match"), etag):
        raise PreconditionFailed(f"If-Match: the segment's ETag is {etag}")
    if not none_match(exchange.header(b"if-none-match"), etag):
        return Response(304, headers)
    selection = select_range(
        exchange.header(b"range"), exchange.header(b"if-range"), etag=etag, size_bytes=size_bytes
    )
    if not selection.partial:
        return _Selection(200, headers, selection)
    shown = b"bytes %d-%d/%d" % (selection.start, selection.end - 1, size_bytes)
    headers.append((b"content-range", shown))
    return _Selection(206, headers, selection)


def _count_fetched(
    context: Context, exchange: Exchange, segment: SegmentBytes, sent: ByteRange
) -> None:
    if exchange.method != "HEAD":  # HEAD reads no files
        context.metrics.requests.fetched(segment.tier, sent.end - sent.start)


def _no_segment(base_offset: int) -> UnknownSegment:
    return UnknownSegment(f"no segment begins at offset {base_offset}")
