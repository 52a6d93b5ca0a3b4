"""What the calls that read have in common: where a read starts, its limits, how its text is sent.

A position is `offset` (a number or a keyword) or `timestamp`, resolved to an offset.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Final, Literal, NamedTuple, TypeVar, cast

from msgspec import UNSET, Meta, UnsetType

from tierlog.api.http import strict_json
from tierlog.api.http.context import UNKNOWN_SIZE, Context
from tierlog.api.http.exchange import Exchange, record_time
from tierlog.api.http.fetch.record_json import LargeText, Part
from tierlog.api.http.problems import HeaderList
from tierlog.api.http.responses import AnyResponse, Response, StreamResponse
from tierlog.api.http.settings import MAX_FETCH_BYTES, MAX_OFFSET, MAX_WAIT_MS
from tierlog.api.http.strict_json import parse_time
from tierlog.broker.partition.partition import Readable
from tierlog.broker.partition.tiered_reads import Fetched, Tier
from tierlog.broker.schema_registry.decoding import DecodeLimits, RecordDecoder
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.hot_tier.log_state import Offsets
from tierlog.record_format.errors import ELSEWHERE

T = TypeVar("T")
MakeDecoder = Callable[[], RecordDecoder]
Isolation = Literal["read_uncommitted", "read_committed"]
MaxBytes = Annotated[int, Meta(ge=1, le=MAX_FETCH_BYTES)]
MinBytes = Annotated[int, Meta(ge=0, le=MAX_FETCH_BYTES)]
WaitMs = Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)]
_RECORD_BYTES: Final = 100  # a smaller record is as much work to encode
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
EARLIEST_LOCAL: Final = "earliest-local"
_LEADER_UNKNOWN: Final = (b"log-leader", b"unknown")
KEYWORDS: Final = (EARLIEST, LATEST, EARLIEST_LOCAL)


class Position(NamedTuple):
    """Exactly one of a keyword, an offset, or a time."""

    keyword: str = ""
    offset: int = -1
    timestamp: int = -1


def parse_position(
    offset: str | int | UnsetType, timestamp: str | UnsetType, *, default: str, within: str = ""
) -> Position:
    """Raises InvalidRequest. `within` is the path of the two members in a body."""
    if timestamp is not UNSET:
        if offset is not UNSET:
            strict_json.refuse_field(
                strict_json.join(within, "timestamp"), "give offset or timestamp, not both"
            )
        assert isinstance(timestamp, str)
        return Position(
            timestamp=parse_timestamp(timestamp, loc=strict_json.join(within, "timestamp"))
        )
    if offset is UNSET:
        return Position(keyword=default)
    text = str(offset)
    if text in KEYWORDS:
        return Position(keyword=text)
    value = strict_json.parse_natural(text)  # segment files have 20 digits
    if value is None or value > MAX_OFFSET:
        strict_json.refuse_field(
            strict_json.join(within, "offset"),
            f"expected a non-negative offset or one of {', '.join(KEYWORDS)}, not {text[:64]!r}",
        )
    return Position(offset=value)


def parse_timestamp(text: str, *, loc: str) -> int:
    try:
        return parse_time(text)
    except ValueError as error:
        strict_json.refuse_field(loc, str(error))


def find_here(context: Context, exchange: Exchange, topic: str, partition: int) -> Readable | None:
    """The partition; None if another broker of the cluster leads it: then `find_cold` may find it
    in the bucket. Raises as `Broker.partition` does.
    """
    try:
        return context.broker.partition(topic, partition)
    except ELSEWHERE:
        if context.gateway is None or exchange.is_forwarded:
            raise
        return None


async def find_cold(
    context: Context, exchange: Exchange, position: Position, *, topic: str, partition: int
) -> Readable:
    """What there is at this position in the bucket of a partition that another broker leads. Raises
    as `Broker.partition` does if only its leader can tell.
    """
    assert context.gateway is not None, "only in a cluster is a partition elsewhere"
    if position.keyword in (LATEST, EARLIEST_LOCAL):
        return context.broker.partition(topic, partition)
    offset = max(position.offset, 0)
    return await context.gateway.cold.find_partition(exchange, topic, partition, offset=offset)


async def resolve(
    context: Context, partition: Readable, position: Position, *, committed: bool
) -> int:
    """The offset to read from. A time after the last record resolves to the end of the log."""
    if position.offset >= 0:
        return position.offset
    now = partition.offsets()  # before the lookup: records appended during it are not skipped
    if position.timestamp >= 0:
        found = await find_time(context, partition, position.timestamp)
        if found is not None:
            return found[0]
    if position.keyword == EARLIEST:
        return now.log_start_offset
    if position.keyword == EARLIEST_LOCAL:
        return max(now.local_log_start_offset, now.log_start_offset)
    partition.led_here().check_end_known()
    return end_of(now, committed=committed)


async def find_time(
    context: Context, partition: Readable, timestamp: int
) -> tuple[int, int] | None:
    """`TieredReads.offset_for_timestamp` in a thread of the tier in which the log begins."""
    look = partial(partition.offset_for_timestamp, timestamp)
    return await context.read_at(partition, partition.offsets().log_start_offset, look)


def end_of(offsets: Offsets, *, committed: bool) -> int:
    return offsets.last_stable_offset if committed else offsets.high_watermark


async def check_within(partition: Readable, offset: int) -> None:
    """Raise OffsetTrimmed or OffsetPastEnd without reading.

    FencedError comes first: this broker does not know the end of a partition that was taken over.
    """
    partition.check_leadership()
    if offset > partition.high_watermark:
        here = partition.led_here()
        here.check_end_known()
        await asyncio.wrap_future(here.confirm_leads())
    now = partition.offsets()
    if now.log_start_offset <= offset <= now.high_watermark:
        return
    bounds = f"[{now.log_start_offset}, {now.high_watermark}]"
    error = now.trimmed if offset < now.log_start_offset else now.past_end
    raise error(f"offset {offset} of {partition} is outside the log, {bounds}")


def nothing_at(offset: int, now: Offsets, *, committed: bool) -> Fetched:
    """A read of no records, which the next one continues at `offset`."""
    return Fetched(
        slices=(),
        next_offset=offset,
        end_offset=end_of(now, committed=committed),
        log_start_offset=now.log_start_offset,
        high_watermark=now.high_watermark,
        tier="hot" if offset >= now.local_log_start_offset else "cold",
    )


def is_still_at_end(partition: Readable, offset: int, *, high_watermark: int) -> bool:
    """Whether a read at `offset`, which found the log to end at `high_watermark`, would find the
    same again. Cheaper than to read nothing from each of many partitions.
    """
    return high_watermark == partition.high_watermark <= offset and not partition.is_defunct


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
            record_time("encode", began_s)
    async with context.decoding.for_page(max_bytes):
        return await context.compute(UNKNOWN_SIZE, lambda: render(Wait.WAIT))


def decoder_of(context: Context, exchange: Exchange) -> MakeDecoder:
    """Makes the decoder of a page of the topic's records, when its time is to begin."""
    settings = context.settings
    return partial(
        RecordDecoder,
        context.broker.schema_validation,
        exchange.topic,
        prefix=exchange.grant.topics,
        limits=DecodeLimits(settings.decode_max_bytes, settings.decode_max_ms),
    )


def text_response(context: Context, headers: HeaderList, parts: Sequence[Part]) -> AnyResponse:
    """A response of these parts, streamed if one of them is large: then it holds its file."""
    if all(isinstance(part, bytes) for part in parts):
        return Response(200, headers, b"".join(cast("Sequence[bytes]", parts)))
    files = tuple(part.record.file.share() for part in parts if not isinstance(part, bytes))
    return StreamResponse(headers, _stream(context, parts), files)


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
    partition: Readable, log: Fetched | Offsets, *, next_offset: int, tier: Tier
) -> HeaderList:
    """The headers of every response with a partition's records."""
    is_at_end = partition.is_end_known and next_offset == log.high_watermark
    up_to_date = b"true" if is_at_end else b"false"
    return [
        *(() if partition.is_end_known else (_LEADER_UNKNOWN,)),
        (b"log-start-offset", b"%d" % log.log_start_offset),
        (b"log-high-watermark", b"%d" % log.high_watermark),
        (b"log-next-offset", b"%d" % next_offset),
        (b"log-up-to-date", up_to_date),
        (b"log-tier", tier.encode()),
        (b"log-topic-id", partition.topic_id.encode()),
    ]
