"""Server-sent events: a partition or a topic as it grows.

* A slow reader costs no memory: a page of a partition is read only after the last one went into its
  socket.
* After each page the loop gets its turn: what is in memory is read and written without waiting, and
  a reader that keeps up would otherwise hold up all others.
* An event's id says where to resume: for a partition it is the record's offset, for a topic that of
  each partition, as `partition:offset,…`. `Last-Event-ID` takes precedence over `offset` and
  resumes after those records.
* A topic's tail includes partitions that the topic gains, from their first record on.
* A fault in mid-stream is an event of its own, `error`, with the problem; then the stream ends.
* Waiting costs no thread and no polling; readers that wait at the same place share one page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api.http import strict_json
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.fetch import record_json
from api.http.fetch.long_poll import AwaitedOffset, LongPoll
from api.http.fetch.positions import LATEST, MAX_OFFSET, parse_position, resolve
from api.http.fetch.reading import Isolation, compute_text, log_headers, read, work_bytes
from api.http.fetch.shared_pages import RenderedPage, page_key
from api.http.problems import HeaderList
from api.http.request import media_types
from api.http.responses import AnyResponse, StreamResponse
from broker.partition import Fetched, Partition, Tier
from broker.topics import Topic
from record_format.errors import TierlogError

PAGE_BYTES: Final = 64 << 10
_HEADERS: Final[HeaderList] = [
    (b"content-type", media_types.EVENTS.encode() + b"; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_COMMENT: Final = b":\n\n"
_STAND: Final = re.compile(r"([0-9]{1,9}):(-1|[0-9]{1,19})\Z", re.ASCII)


class TailQuery(msgspec.Struct, forbid_unknown_fields=True):
    offset: str | UnsetType = UNSET
    timestamp: str | UnsetType = UNSET
    isolation: Isolation = "read_uncommitted"
    encoding: record_json.Encoding = "utf8"
    max_bytes: Annotated[int, Meta(ge=1, le=1 << 20)] = PAGE_BYTES

    @property
    def committed(self) -> bool:
        return self.isolation == "read_committed"


class Tail:
    """The position in each partition."""

    def __init__(self, context: Context, query: TailQuery, *, topic: Topic | None) -> None:
        self._context, self._query, self._topic = context, query, topic
        self._whole_topic = topic is not None
        self.places: dict[Partition, int] = {}
        self._seen: dict[Partition, int] = {}  # high watermarks
        self.at_end = False

    async def start(self, partitions: list[Partition], resumed: Mapping[int, int]) -> None:
        """Find every partition's first offset. Raises OffsetTrimmed, OffsetPastEnd, FencedError."""
        position = parse_position(self._query.offset, self._query.timestamp, default=LATEST)
        for partition in partitions:
            offset = resumed.get(partition.number)
            if offset is None and resumed:  # it is younger than the id: everything in it is new
                offset = partition.offsets().log_start_offset
            if offset is None:
                offset = await resolve(
                    self._context, partition, position, committed=self._query.committed
                )
            check_within(partition, offset)
            self.places[partition] = offset

    def add_new_partitions(self) -> bool:
        """Whether the topic gained partitions: everything in them is new, and read next."""
        if self._topic is None or len(self._topic.partitions) == len(self.places):
            return False
        for _, partition in sorted(self._topic.partitions.items()):
            self.places.setdefault(partition, partition.offsets().log_start_offset)
        return True

    async def pages(self) -> AsyncGenerator[bytes, None]:
        """A page of each partition that has something; `at_end` then says whether there is more.

        Raises what `read` does.
        """
        self.at_end = True
        for partition, offset in list(self.places.items()):
            fetched = await read(self._context, partition, offset, self._query)
            self._seen[partition] = fetched.high_watermark
            if fetched.slices:
                yield await self._events(partition, fetched, offset)
                await asyncio.sleep(0)
            else:  # a gap may lead up to the end
                self.places[partition] = max(offset, fetched.next_offset)
            self.at_end = self.at_end and self.places[partition] >= fetched.end_offset

    async def _events(self, partition: Partition, fetched: Fetched, offset: int) -> bytes:
        query = self._query
        form = (query.encoding, query.committed, query.max_bytes, self._whole_topic)
        page = await self._context.pages.get(
            page_key(partition, fetched, offset, "events", *form),
            fetched,
            lambda: compute_text(
                self._context,
                work_bytes(fetched, offset),
                partial(self._write, partition, fetched, offset),
            ),
        )
        self._context.metrics.requests.fetched(
            fetched.tier, fetched.size_bytes, records=page.records
        )
        events: bytes = page.content
        if self._whole_topic:
            events = b"".join(self._event(partition, at, line) for at, line in page.content)
        self.places[partition] = page.next_offset
        return events

    def _write(
        self, partition: Partition, fetched: Fetched, offset: int, nowait: bool
    ) -> RenderedPage:
        """What all readers at the same place are sent; for a topic's tail without the ids."""
        query = self._query
        page = record_json.read_page(
            fetched, offset=offset, max_bytes=query.max_bytes, nowait=nowait
        )
        lines = record_json.event_lines(page, partition=partition.number, encoding=query.encoding)
        size_bytes = sum(len(line) for _, line in lines)
        if self._whole_topic:
            return RenderedPage(lines, page.next_offset, size_bytes, len(lines))
        events = b"".join(b"id: %d\ndata: %b\n\n" % event for event in lines)
        return RenderedPage(events, page.next_offset, size_bytes, len(lines))

    def _event(self, partition: Partition, offset: int, line: bytes) -> bytes:
        # Each partition's last offset that was sent; -1 is before the first.
        self.places[partition] = offset + 1
        stands = ",".join(f"{one.number}:{at - 1}" for one, at in self.places.items())
        return b"id: %b\ndata: %b\n\n" % (stands.encode(), line)

    def beyonds(self) -> list[AwaitedOffset]:
        """What to wait for: everything up to the high watermarks that were seen has been sent."""
        return [AwaitedOffset(partition, seen) for partition, seen in self._seen.items()]


async def tail_partition(context: Context, exchange: Exchange) -> AnyResponse:
    partition = context.broker.partition(exchange.topic, exchange.partition)
    return await tail_of(context, exchange, [partition])


async def tail_topic(context: Context, exchange: Exchange) -> AnyResponse:
    topic = context.broker.topic(exchange.topic)
    return await tail_of(context, exchange, topic.all_partitions(), topic=topic)


async def tail_of(
    context: Context,
    exchange: Exchange,
    partitions: list[Partition],
    *,
    topic: Topic | None = None,
) -> StreamResponse:
    """`topic`, if all of it is followed."""
    query = strict_json.parse_query(exchange.scope["query_string"], TailQuery)
    media_types.preferred(exchange.header(b"accept"), offered=(media_types.EVENTS,))
    last_event_id = exchange.header(b"last-event-id")
    resumed: dict[int, int] = {}
    if last_event_id:
        whole_topic = topic is not None
        resumed = parse_last_event_id(last_event_id, partitions, whole_topic=whole_topic)
    tail = Tail(context, query, topic=topic)
    await tail.start(partitions, resumed)
    headers = _HEADERS if topic else [*_HEADERS, *_log_headers_at(*next(iter(tail.places.items())))]
    return StreamResponse(headers, _stream(context, exchange, tail))


def _log_headers_at(partition: Partition, offset: int) -> HeaderList:
    """Where the stream of one partition begins."""
    now = partition.offsets()
    tier: Tier = "hot" if offset >= now.local_log_start_offset else "cold"
    return log_headers(partition, now, next_offset=offset, tier=tier)


def parse_last_event_id(
    text: str, partitions: list[Partition], *, whole_topic: bool
) -> dict[int, int]:
    """Each partition's next offset. Raises InvalidRequest."""
    stands = text.split(",") if whole_topic else [f"{partitions[0].number}:{text}"]
    numbers = {partition.number for partition in partitions}
    found: dict[int, int] = {}
    for stand in stands:
        match = _STAND.match(stand)
        if match is None or int(match.group(2)) > MAX_OFFSET:
            strict_json.refuse_field("Last-Event-ID", f"not an id of this stream: {text[:64]!r}")
        number = int(match.group(1))
        if number not in numbers or number in found:
            why = "named twice" if number in found else "not of this topic"
            strict_json.refuse_field("Last-Event-ID", f"partition {number} is {why}: {text[:64]!r}")
        found[number] = int(match.group(2)) + 1
    return found


async def _stream(context: Context, exchange: Exchange, tail: Tail) -> AsyncGenerator[bytes, None]:
    yield _COMMENT  # so that the head of the response leaves at once
    heartbeat_ms = context.settings.heartbeat_ms
    with LongPoll(context, exchange, wait_ms=heartbeat_ms) as poll:
        poll.listen()
        while True:
            try:
                context.access.recheck(exchange)
                async with aclosing(tail.pages()) as pages:
                    async for events in pages:
                        yield events
                        if poll.cancelled:
                            return
                        context.access.recheck(exchange)
            except TierlogError as error:
                yield _error_event(context, exchange, error)
                return
            if tail.at_end and not tail.add_new_partitions():
                await poll.wait(tail.beyonds())
            if poll.cancelled:
                return
            if poll.over:
                yield _COMMENT
                poll.restart(wait_ms=heartbeat_ms)


def _error_event(context: Context, exchange: Exchange, error: TierlogError) -> bytes:
    problem = context.problem(exchange, error)
    return b"event: error\ndata: %b\n\n" % problem.body()


def check_within(partition: Partition, offset: int) -> None:
    """Raise OffsetTrimmed or OffsetPastEnd, before the stream begins.

    FencedError first: this folder does not know the end of a partition that was taken over.
    """
    partition.check_leadership()
    now = partition.offsets()
    if now.log_start_offset <= offset <= now.high_watermark:
        return
    bounds = f"[{now.log_start_offset}, {now.high_watermark}]"
    refuse = now.trimmed if offset < now.log_start_offset else now.past_end
    raise refuse(f"offset {offset} of {partition} is outside the log, {bounds}")
