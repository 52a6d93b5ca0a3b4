"""A segment's bytes, from either tier, as a static file server would give them.

A cold segment is brought to disk chunk by chunk while it is sent, the first chunk before the
response's head, so that a bucket that is down is a 503; a later fault cuts the connection, and
never sends wrong bytes. What is open already, or in the chunk cache, is sent without a thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import NamedTuple

from api.http.context import Context
from api.http.control_requests import no_query
from api.http.exchange import Exchange
from api.http.http_errors import PreconditionFailed
from api.http.problems import HeaderList
from api.http.request.byte_range import ByteRange, matches, none_match, select_range
from api.http.request.media_types import BATCHES, OCTETS, preferred
from api.http.responses import AnyResponse, FileResponse, Response, WindowedResponse
from broker.partition import Partition
from broker.segment_listing import (
    SegmentBytes,
    open_segment,
    slices_of,
    try_open_segment,
    try_slices_of,
)
from record_format.errors import UnknownSegment
from record_format.file_slice import FileSlice


class _Asked(NamedTuple):
    """Which segment is asked for, and what of it."""

    partition: Partition
    base_offset: int
    media_type: str


class _Chosen(NamedTuple):
    """What of it is sent, and with which head."""

    status: int
    headers: HeaderList
    range: ByteRange


def try_get_segment(context: Context, exchange: Exchange) -> AnyResponse | None:
    asked = _asked(context, exchange)
    segment = try_open_segment(asked.partition, asked.base_offset)
    if segment is None:
        return None
    chosen = _choose(exchange, asked, segment)
    if isinstance(chosen, Response):
        return chosen
    start, end, _ = chosen.range
    slices = try_slices_of(asked.partition, segment, start=start, end=end)
    if slices is None:
        return None
    _count(context, exchange, segment, chosen.range)
    return FileResponse(chosen.status, chosen.headers, slices)


async def get_segment(context: Context, exchange: Exchange) -> AnyResponse:
    asked = _asked(context, exchange)
    partition, base_offset = asked.partition, asked.base_offset
    segment = await context.read_at(
        partition, base_offset, partial(open_segment, partition, base_offset)
    )
    chosen = _choose(exchange, asked, segment)
    if isinstance(chosen, Response):
        return chosen
    start, end, _ = chosen.range
    slices = slices_of(partition, segment, start=start, end=end)
    next_slice = partial(_next_slice, slices)
    first = await context.read_at(partition, base_offset, next_slice)

    async def windows(
        following: FileSlice | None,
    ) -> AsyncGenerator[tuple[FileSlice, ...], None]:
        while following is not None:
            yield (following,)
            following = None  # released before the next is waited for
            following = await context.read_at(partition, base_offset, next_slice)

    _count(context, exchange, segment, chosen.range)
    return WindowedResponse(chosen.status, chosen.headers, end - start, windows(first))


def _asked(context: Context, exchange: Exchange) -> _Asked:
    no_query(exchange)
    media_type = preferred(exchange.header(b"accept"), offered=(OCTETS, BATCHES))
    partition = context.broker.partition(exchange.topic, exchange.partition)
    return _Asked(partition, exchange.number("base_offset", missing=_no_segment), media_type)


def _choose(exchange: Exchange, asked: _Asked, segment: SegmentBytes) -> _Chosen | Response:
    """Raises PreconditionFailed, RangeNotSatisfiable."""
    topic_id, size_bytes = asked.partition.log.topic_id, segment.size_bytes
    etag = segment.etag or f'"{topic_id}-{asked.base_offset}-{size_bytes:x}"'
    headers: HeaderList = [
        (b"etag", etag.encode()),
        (b"cache-control", b"private, no-cache"),
        (b"accept-ranges", b"bytes"),
        (b"vary", b"accept"),
        (b"log-tier", segment.tier.encode()),
    ]
    if not matches(exchange.header(b"if-match"), etag):
        raise PreconditionFailed(f"If-Match: the segment is {etag} now")
    if not none_match(exchange.header(b"if-none-match"), etag):
        return Response(304, headers)
    chosen = select_range(
        exchange.header(b"range"), exchange.header(b"if-range"), etag=etag, size_bytes=size_bytes
    )
    headers.append((b"content-type", asked.media_type.encode()))
    if not chosen.partial:
        return _Chosen(200, headers, chosen)
    shown = b"bytes %d-%d/%d" % (chosen.start, chosen.end - 1, size_bytes)
    headers.append((b"content-range", shown))
    return _Chosen(206, headers, chosen)


def _count(context: Context, exchange: Exchange, segment: SegmentBytes, sent: ByteRange) -> None:
    if exchange.method != "HEAD":  # which reads nothing of the file
        context.metrics.requests.fetched(segment.tier, sent.end - sent.start)


def _next_slice(slices: Iterator[FileSlice]) -> FileSlice | None:
    return next(slices, None)


def _no_segment(base_offset: int) -> UnknownSegment:
    return UnknownSegment(f"there is no segment that begins at offset {base_offset}")
