"""Server-sent events: streams a partition or a topic as it grows.

* A slow reader costs no memory: a page is read only after the previous one is in its socket.
* The stream yields to the event loop after each page: pages in memory are read and sent without
  waiting, and a reader that keeps up would otherwise starve all others.
* An event's id says where to resume: for a partition the record's offset, for a topic that of each
  partition, as `partition:offset,…`. `Last-Event-ID` takes precedence over `offset` and resumes
  after those records.
* A topic's tail includes partitions that are added to the topic, from their first record on.
* An error in mid-stream is sent as an `error` event with the problem; then the stream ends.
* Waiting takes no thread and no polling; readers that wait at the same offset share one page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.http import header_values, strict_json
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch import record_json, record_pages
from tierlog.api.http.fetch.long_poll import AwaitedOffset, LongPoll
from tierlog.api.http.fetch.reading import (
    LATEST,
    Isolation,
    check_within,
    compute_text,
    is_still_at_end,
    log_headers,
    parse_position,
    resolve,
    stream_text,
    work_bytes,
)
from tierlog.api.http.fetch.record_json import Encoding, Part
from tierlog.api.http.fetch.shared_pages import RenderedPage, page_key
from tierlog.api.http.problems import HeaderList
from tierlog.api.http.responses import AnyResponse, StreamResponse
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.broker.partition import Partition
from tierlog.broker.tiered_reads import Fetched, Tier
from tierlog.broker.topics import Topic
from tierlog.host.waiting import Wait
from tierlog.record_format.errors import TierlogError

PAGE_BYTES: Final = 64 << 10
_HEADERS: Final[HeaderList] = [
    (b"content-type", header_values.EVENTS.encode() + b"; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_COMMENT: Final = b":\n\n"
_PARTITION_OFFSET: Final = re.compile(r"([0-9]{1,9}):(-1|[0-9]{1,19})\Z", re.ASCII)


class TailQuery(msgspec.Struct, forbid_unknown_fields=True):
    offset: str | UnsetType = UNSET
    timestamp: str | UnsetType = UNSET
    isolation: Isolation = "read_uncommitted"
    encoding: Encoding = "utf8"
    max_bytes: Annotated[int, Meta(ge=1, le=1 << 20)] = PAGE_BYTES

    @property
    def committed(self) -> bool:
        return self.isolation == "read_committed"


class Tail:
    """The next offset of each partition, and what to wait for."""

    def __init__(self, context: Context, query: TailQuery, source: Partition | Topic) -> None:
        self._context, self._query, self._source = context, query, source
        self._whole_topic = isinstance(source, Topic)
        self.next_offsets: dict[Partition, int] = {}
        self._high_watermarks: dict[Partition, int] = {}  # as of the last read
        self.at_end = False

    async def start(self, resumed: Mapping[int, int]) -> None:
        """Resolve where each partition starts. Raises OffsetTrimmed, OffsetPastEnd, FencedError."""
        position = parse_position(self._query.offset, self._query.timestamp, default=LATEST)
        for partition in _partitions_of(self._source):
            offset = resumed.get(partition.number)
            if offset is None and resumed:  # added to the topic after that event: all of it is new
                offset = partition.offsets().log_start_offset
            if offset is None:
                offset = await resolve(
                    self._context, partition, position, committed=self._query.committed
                )
            check_within(partition, offset)
            self.next_offsets[partition] = offset

    def add_new_partitions(self) -> bool:
        """Add partitions that the topic has gained, from their start. Returns whether there are."""
        source = self._source
        if isinstance(source, Partition) or len(source.partitions) == len(self.next_offsets):
            return False
        for partition in source.partitions.values():
            self.next_offsets.setdefault(partition, partition.offsets().log_start_offset)
        return True

    async def pages(self) -> AsyncGenerator[bytes, None]:
        """A page of each partition with new records. Sets `at_end` to whether nothing is left.

        Raises what `read` does.
        """
        self.at_end = True
        for partition, offset in list(self.next_offsets.items()):
            seen = self._high_watermarks.get(partition, -1)
            if is_still_at_end(partition, offset, high_watermark=seen):
                continue
            fetched = await self._context.read_batches(partition, offset, self._query)
            with closing(fetched):
                self._high_watermarks[partition] = fetched.high_watermark
                if fetched.slices:
                    page = await self._page(partition, fetched, offset)
                    for part in self._parts(partition, page):
                        if isinstance(part, bytes):
                            yield part
                            await asyncio.sleep(0)
                            continue
                        async with aclosing(stream_text(self._context, part)) as pieces:
                            async for piece in pieces:
                                yield piece
                    self.next_offsets[partition] = page.next_offset
                else:  # there may be a gap up to the end
                    self.next_offsets[partition] = max(offset, fetched.next_offset)
                self.at_end = self.at_end and self.next_offsets[partition] >= fetched.end_offset

    async def _page(self, partition: Partition, fetched: Fetched, offset: int) -> RenderedPage:
        query = self._query
        form = (query.encoding, query.committed, query.max_bytes, self._whole_topic)
        page = await self._context.pages.get(
            page_key(partition, fetched, offset, "events", *form),
            fetched,
            lambda: compute_text(
                self._context,
                work_bytes(fetched, offset),
                partial(self._render, partition, fetched, offset),
                max_bytes=query.max_bytes,
            ),
        )
        self._context.metrics.requests.fetched(
            fetched.tier, fetched.size_bytes, topic=partition.topic, records=page.records
        )
        return page

    def _parts(self, partition: Partition, page: RenderedPage) -> Iterator[Part]:
        """The events of a page. Those of a topic come in parts, because the id of each names every
        partition: a page of small records would become gigabytes.
        """
        if not self._whole_topic:
            yield from page.content
            return
        # An id has the last offset sent of each partition; -1 is before the first.
        ids = {one: b"%d:%d" % (one.number, at - 1) for one, at in self.next_offsets.items()}
        ids[partition] = b"%d:@" % partition.number
        before, _, after = b",".join(ids.values()).partition(b"@")
        part = bytearray()
        for offset, line in page.content:
            part += b"id: %b%d%b\ndata: " % (before, offset, after)
            if isinstance(line, bytes):
                part += line
            else:
                yield bytes(part)
                yield line
                part.clear()
            part += b"\n\n"
            if len(part) >= PAGE_BYTES:
                yield bytes(part)
                part.clear()
        yield bytes(part)

    def _render(
        self, partition: Partition, fetched: Fetched, offset: int, wait: Wait
    ) -> RenderedPage:
        """The events, the same for all readers; for a topic's tail, records without event ids."""
        query = self._query
        page = record_pages.read_page(fetched, offset=offset, max_bytes=query.max_bytes, wait=wait)
        lines = record_json.event_lines(page, partition=partition.number, encoding=query.encoding)
        size_bytes = record_json.size_of(line for _, line in lines)
        content: Sequence[object] = lines
        if not self._whole_topic:
            content = _events(lines)
        needs_files = page.large is not None
        return RenderedPage(content, page.next_offset, size_bytes, len(lines), needs_files)

    def awaited_offsets(self) -> list[AwaitedOffset]:
        """The high watermarks up to which everything has been sent."""
        return [AwaitedOffset(partition, seen) for partition, seen in self._high_watermarks.items()]


def _events(lines: Sequence[tuple[int, Part]]) -> Sequence[Part]:
    """The events of one partition. A large line is alone."""
    if any(not isinstance(line, bytes) for _, line in lines):
        return [part for at, line in lines for part in (b"id: %d\ndata: " % at, line, b"\n\n")]
    return (b"".join([b"id: %d\ndata: %b\n\n" % event for event in lines]),)  # type: ignore[str-format]


async def tail_partition(context: Context, exchange: Exchange) -> AnyResponse:
    partition = context.broker.partition(exchange.topic, exchange.partition)
    return await tail_of(context, exchange, partition)


async def tail_topic(context: Context, exchange: Exchange) -> AnyResponse:
    return await tail_of(context, exchange, context.broker.topic(exchange.topic))


async def tail_of(
    context: Context, exchange: Exchange, source: Partition | Topic
) -> StreamResponse:
    query = exchange.query(TailQuery)
    header_values.preferred(exchange.header(b"accept"), offered=(header_values.EVENTS,))
    last_event_id = exchange.header(b"last-event-id")
    tail = Tail(context, query, source)
    await tail.start(_parse_last_event_id(last_event_id, source) if last_event_id else {})
    headers = _HEADERS
    if isinstance(source, Partition):
        headers = [*_HEADERS, *_log_headers_at(source, tail.next_offsets[source])]
    return StreamResponse(headers, _stream(context, exchange, tail))


def _partitions_of(source: Partition | Topic) -> list[Partition]:
    return [source] if isinstance(source, Partition) else source.all_partitions()


def _log_headers_at(partition: Partition, offset: int) -> HeaderList:
    """The log headers of a stream of one partition that begins at `offset`."""
    now = partition.offsets()
    tier: Tier = "hot" if offset >= now.local_log_start_offset else "cold"
    return log_headers(partition, now, next_offset=offset, tier=tier)


def _parse_last_event_id(text: str, source: Partition | Topic) -> dict[int, int]:
    """Each partition's next offset. Raises InvalidRequest."""
    parts = [f"{source.number}:{text}"] if isinstance(source, Partition) else text.split(",")
    numbers = {partition.number for partition in _partitions_of(source)}
    offsets: dict[int, int] = {}
    for part in parts:
        match = _PARTITION_OFFSET.match(part)
        if match is None or int(match.group(2)) > MAX_OFFSET:
            strict_json.refuse_field("Last-Event-ID", f"not an id of this stream: {text[:64]!r}")
        number = int(match.group(1))
        if number not in numbers or number in offsets:
            why = "given twice" if number in offsets else "not in this topic"
            strict_json.refuse_field("Last-Event-ID", f"partition {number} is {why}: {text[:64]!r}")
        offsets[number] = int(match.group(2)) + 1
    return offsets


async def _stream(context: Context, exchange: Exchange, tail: Tail) -> AsyncGenerator[bytes, None]:
    yield _COMMENT  # so that the head is sent immediately
    heartbeat_ms = context.settings.heartbeat_ms
    with LongPoll(context.waiting, exchange, wait_ms=heartbeat_ms) as poll:
        poll.listen()
        while True:
            try:
                await context.access.recheck(exchange)
                async with aclosing(tail.pages()) as pages:
                    async for events in pages:
                        yield events
                        if poll.cancelled:
                            return
                        await context.access.recheck(exchange)
            except TierlogError as error:
                yield _error_event(context, exchange, error)
                return
            if not tail.add_new_partitions() and tail.at_end:
                await poll.wait(tail.awaited_offsets())
            if poll.cancelled:
                return
            if poll.over:
                yield _COMMENT
                poll.restart(wait_ms=heartbeat_ms)


def _error_event(context: Context, exchange: Exchange, error: TierlogError) -> bytes:
    problem = context.problem(exchange, error)
    return b"event: error\ndata: %b\n\n" % problem.body()
