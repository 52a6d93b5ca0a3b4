"""Reads a partition for a call, with the limits that all reading calls share."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Final, Literal, Protocol, TypeVar, cast

from msgspec import Meta

from tierlog.api.http.context import UNKNOWN_SIZE, Context
from tierlog.api.http.fetch.large_records import LargeText
from tierlog.api.http.fetch.record_json import Part
from tierlog.api.http.metrics import timings
from tierlog.api.http.problems import HeaderList
from tierlog.api.http.responses import AnyResponse, Response, StreamResponse
from tierlog.api.http.settings import MAX_FETCH_BYTES, MAX_WAIT_MS
from tierlog.broker.partition import Fetched, Partition, Tier
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.hot_tier.log_state import Offsets

T = TypeVar("T")

Isolation = Literal["read_uncommitted", "read_committed"]
MaxBytes = Annotated[int, Meta(ge=1, le=MAX_FETCH_BYTES)]
MinBytes = Annotated[int, Meta(ge=0, le=MAX_FETCH_BYTES)]
WaitMs = Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)]
_RECORD_BYTES: Final = 100  # a smaller record is as much work to encode


class ReadQuery(Protocol):
    """How much a query reads. With `committed` it reads up to the last stable offset."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def committed(self) -> bool: ...


async def read(context: Context, partition: Partition, offset: int, query: ReadQuery) -> Fetched:
    """Read on the event loop if everything is in memory, otherwise in a thread of the tier."""
    began_s = time.perf_counter()
    max_bytes, committed = query.max_bytes, query.committed
    try:
        fetched = partition.read(offset, max_bytes=max_bytes, committed=committed, wait=Wait.NEVER)
    except WouldBlock:
        call = partial(partition.read, offset, max_bytes=max_bytes, committed=committed)
        fetched = await context.run(context.threads_for(partition, offset), call)
    timings.record("broker" if fetched.tier == "hot" else "store", began_s)
    return fetched


def is_still_at_end(partition: Partition, offset: int, *, high_watermark: int) -> bool:
    """Whether a read at `offset`, which found the log to end at `high_watermark`, would find the
    same again. Cheaper than to read nothing from each of many partitions.
    """
    return high_watermark == partition.log.high_watermark <= offset and not partition.is_defunct


def work_bytes(fetched: Fetched, offset: int) -> int:
    """Estimate the work of encoding this as text: few compressed bytes may hold many records."""
    return max(fetched.size_bytes, fetched.span_from(offset) * _RECORD_BYTES)


async def compute_text(
    context: Context, work: int, render: Callable[[Wait], T], *, max_bytes: int
) -> T:
    """Encode records on the event loop if it is little work, otherwise in a thread, with the memory
    for a page of `max_bytes`.

    `render` raises WouldBlock as `read_page` does.
    """
    if work <= context.settings.inline_max_bytes:
        began_s = time.perf_counter()
        try:
            return render(Wait.NEVER)
        except WouldBlock:
            pass
        finally:
            timings.record("encode", began_s)
    async with context.decoding.for_page(max_bytes):
        return await context.compute(UNKNOWN_SIZE, lambda: render(Wait.WAIT))


def text_response(context: Context, headers: HeaderList, parts: Sequence[Part]) -> AnyResponse:
    """A response of these parts, streamed if one of them is large."""
    if all(isinstance(part, bytes) for part in parts):
        return Response(200, headers, b"".join(cast("Sequence[bytes]", parts)))
    return StreamResponse(headers, _stream(context, parts))


async def _stream(context: Context, parts: Iterable[Part]) -> AsyncGenerator[bytes, None]:
    for part in parts:
        if isinstance(part, bytes):
            yield part
        else:
            async with aclosing(stream_text(context, part)) as pieces:
                async for piece in pieces:
                    yield piece


async def stream_text(context: Context, text: LargeText) -> AsyncGenerator[bytes, None]:
    """Its pieces, each made in a thread once the one before was sent."""
    async with context.decoding.for_stream(text.memory_bytes):
        pieces = text.pieces()
        while piece := await context.compute(UNKNOWN_SIZE, partial(next, pieces, b"")):
            yield piece


def log_headers(
    partition: Partition, log: Fetched | Offsets, *, next_offset: int, tier: Tier
) -> HeaderList:
    """The headers of every response with a partition's records."""
    up_to_date = b"true" if next_offset == log.high_watermark else b"false"
    return [
        (b"log-start-offset", b"%d" % log.log_start_offset),
        (b"log-high-watermark", b"%d" % log.high_watermark),
        (b"log-next-offset", b"%d" % next_offset),
        (b"log-up-to-date", up_to_date),
        (b"log-tier", tier.encode()),
        (b"log-topic-id", partition.log.topic_id.encode()),
    ]
