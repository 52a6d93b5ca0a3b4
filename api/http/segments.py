"""A segment's bytes, from either tier, as a static file server would give them.

A cold segment is brought to disk chunk by chunk while it is sent, the first before the head of the
answer, so that a bucket that is down is a 503; a fault later on ends the connection short, never
wrong. What is open already, or in the chunk cache, is sent without a thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

from api.http.answers import Answer, AnyAnswer, FileAnswer, WindowedAnswer
from api.http.byte_range import ByteRange, matches, none_match, select_range
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.media_types import BATCHES, OCTETS, preferred
from api.http.problems import HeaderList
from api.http.refusals import PreconditionFailed
from api.http.topics import no_query
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


async def get_segment(context: Context, exchange: Exchange) -> AnyAnswer:
    no_query(exchange)
    media_type = preferred(exchange.header(b"accept"), offered=(OCTETS, BATCHES))
    topic = context.broker.topic(exchange.topic)
    partition = topic.partition(exchange.partition)
    base_offset = exchange.number("base_offset", missing=_no_segment)
    segment = try_open_segment(partition, base_offset)
    if segment is None:
        segment = await context.read(open_segment, partition, base_offset)
    etag = segment.etag or f'"{topic.record.topic_id}-{base_offset}-{segment.size_bytes:x}"'
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
        return Answer(304, headers)
    chosen = select_range(
        exchange.header(b"range"),
        exchange.header(b"if-range"),
        etag=etag,
        size_bytes=segment.size_bytes,
    )
    headers.append((b"content-type", media_type.encode()))
    if chosen.partial:
        shown = f"bytes {chosen.start}-{chosen.end - 1}/{segment.size_bytes}"
        headers.append((b"content-range", shown.encode()))
    status = 206 if chosen.partial else 200
    if exchange.method != "HEAD":  # which reads nothing of the file
        context.metrics.fetched(segment.tier, chosen.end - chosen.start)
    return await _answer(context, partition, segment, chosen, (status, headers))


async def _answer(
    context: Context,
    partition: Partition,
    segment: SegmentBytes,
    chosen: ByteRange,
    head: tuple[int, HeaderList],
) -> AnyAnswer:
    status, headers = head
    at_once = try_slices_of(partition, segment, start=chosen.start, end=chosen.end)
    if at_once is not None:
        return FileAnswer(status, headers, at_once)
    slices = slices_of(partition, segment, start=chosen.start, end=chosen.end)
    first = await context.read(_next_slice, slices)

    async def windows() -> AsyncGenerator[tuple[FileSlice, ...], None]:
        following = first
        while following is not None:
            yield (following,)
            following = await context.read(_next_slice, slices)

    return WindowedAnswer(status, headers, chosen.end - chosen.start, windows())


def _next_slice(slices: Iterator[FileSlice]) -> FileSlice | None:
    return next(slices, None)


def _no_segment(base_offset: int) -> UnknownSegment:
    return UnknownSegment(f"there is no segment that begins at offset {base_offset}")
