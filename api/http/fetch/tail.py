"""Server-sent events: streams a partition or a topic as it grows.

* A slow reader costs no memory: a page is read only after the previous one is in its socket.
* The stream yields to the event loop after each page: pages in memory are read and sent without
  waiting, and a reader that keeps up would otherwise starve all others.
* An event's id says where to resume: for a partition the record's offset, for a topic that of each
  partition, as `partition:offset,…`. `Last-Event-ID` takes precedence over `offset` and resumes
  after those records.
* A topic's tail includes partitions that are added to the topic, from their first record on.
* An error in mid-stream is sent as an `error` event with the problem; then the stream ends.
* In a cluster, what other brokers lead is followed there (`remote_tail`), and a partition that is
  handed over is read on where it is led next.
* Waiting takes no thread and no polling; readers that wait at the same offset share one page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.http import header_values, strict_json
from tierlog.api.http.cluster.splitting import is_split
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch import record_json, record_pages
from tierlog.api.http.fetch.long_poll import AwaitedOffset, LongPoll
from tierlog.api.http.fetch.reading import (
    EARLIEST,
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
from tierlog.api.http.fetch.remote_tail import Event, RemoteTail
from tierlog.api.http.fetch.shared_pages import RenderedPage, page_key
from tierlog.api.http.problems import HeaderList
from tierlog.api.http.responses import AnyResponse, StreamResponse
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.tiered_reads import Fetched, Tier
from tierlog.broker.topics.topics import Topic
from tierlog.host.waiting import Wait
from tierlog.record_format.errors import ELSEWHERE, TierlogError

PAGE_BYTES: Final = 64 << 10
LOOK_INTERVAL_S: Final = 1.0
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
    """The next offset of each partition, and what to wait for. `number`: of the one partition;
    otherwise of the whole topic. `close` it.
    """

    def __init__(
        self,
        context: Context,
        exchange: Exchange,
        query: TailQuery,
        topic: Topic,
        *,
        number: int | None = None,
    ) -> None:
        self._context, self._exchange, self._query = context, exchange, query
        self._topic, self._number = topic, number
        self._is_split = is_split(context, exchange) and not (
            exchange.is_direct and number is not None
        )
        self._whole_topic = number is None
        self.next_offsets: dict[int, int] = {}
        self._here: dict[int, Partition] = {}
        self._elsewhere: dict[int, RemoteTail] = {}
        self._wake: Callable[[], None] = lambda: None
        self._looking: asyncio.Task[None] | None = None
        self._high_watermarks: dict[Partition, int] = {}  # as of the last read
        self.at_end = False

    @property
    def numbers(self) -> list[int]:
        """Those of the stream, as of now."""
        if self._number is not None:
            return [self._number]
        return self._topic.numbers if self._is_split else list(self._topic.partitions)

    async def start(self, resumed: Mapping[int, int]) -> HeaderList:
        """Resolve where each partition starts; the log headers of a single one. Raises
        OffsetTrimmed, OffsetPastEnd, FencedError.
        """
        numbers = self._topic.numbers if self._whole_topic else self.numbers
        headers = [await self._start_here(number, resumed) for number in numbers]
        begun = list(self._elsewhere.values())
        for remote, found in zip(
            begun, await asyncio.gather(*(self._begin(one, resumed) for one in begun)), strict=True
        ):
            headers[numbers.index(remote.number)] = found
        self.next_offsets = {number: self.next_offsets[number] for number in numbers}
        if self._is_split and self._whole_topic:
            self._looking = asyncio.ensure_future(self._look_for_new_partitions())
        return headers[0] if len(headers) == 1 else []

    async def _start_here(self, number: int, resumed: Mapping[int, int]) -> HeaderList:
        """Nothing yet if it is elsewhere."""
        try:
            partition = self._topic.partition(number)
        except ELSEWHERE:
            if not self._is_split:
                raise
            self._elsewhere[number] = self._remote(number)
            return []
        offset = resumed.get(number)
        if offset is None and resumed:  # added to the topic after that event: all of it is new
            offset = partition.offsets().log_start_offset
        if offset is None:
            query = self._query
            position = parse_position(query.offset, query.timestamp, default=LATEST)
            offset = await resolve(self._context, partition, position, committed=query.committed)
        await check_within(partition, offset)
        self._here[number], self.next_offsets[number] = partition, offset
        return _log_headers_at(partition, offset)

    async def _begin(self, remote: RemoteTail, resumed: Mapping[int, int]) -> HeaderList:
        number, query = remote.number, self._query
        position = {
            name: value
            for name, value in (("offset", query.offset), ("timestamp", query.timestamp))
            if isinstance(value, str)
        }
        if resumed:
            position = {"offset": str(resumed.get(number, EARLIEST))}
        headers = await remote.begin(position)
        if remote.is_here:  # it came here meanwhile
            del self._elsewhere[number]
            return await self._start_here(number, resumed)
        lines = {name: value for name, value in headers if name.startswith(b"log-")}
        self.next_offsets[number] = int(lines[b"log-next-offset"])
        return list(lines.items())

    def _remote(self, number: int) -> RemoteTail:
        query = self._query
        given = {
            "isolation": query.isolation,
            "encoding": query.encoding,
            "max_bytes": str(query.max_bytes),
        }
        remote = RemoteTail(self._context, self._exchange, self._topic, number, query=given)
        remote.on_event(self._arrived)
        return remote

    def _arrived(self) -> None:
        self._wake()

    def on_event(self, wake: Callable[[], None]) -> None:
        """Call it when something arrives from another broker."""
        self._wake = wake

    @property
    def is_ready(self) -> bool:
        """Whether something has arrived from another broker."""
        return any(one.is_ready for one in self._elsewhere.values())

    def add_new_partitions(self) -> bool:
        """Add partitions that the topic has gained, from their start. Returns whether there are."""
        numbers = self.numbers
        if len(numbers) == len(self.next_offsets):
            return False
        for number in numbers:
            if number not in self.next_offsets:
                self._add(number)
        return True

    def _add(self, number: int) -> None:
        self.next_offsets[number] = 0
        self._read_on(number)
        if number in self._here:
            self.next_offsets[number] = self._here[number].offsets().log_start_offset

    def _read_on(self, number: int) -> None:
        """Where the partition is led now."""
        self._here.pop(number, None)
        try:
            self._here[number] = self._topic.partition(number)
        except ELSEWHERE:
            self._elsewhere[number] = self._remote(number)
            self._elsewhere[number].follow({"offset": str(self.next_offsets[number])})

    async def _look_for_new_partitions(self) -> None:
        """They may be added through any broker, and be led by any."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if len(self.numbers) != len(self.next_offsets):
                self._wake()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for remote in self._elsewhere.values():
            remote.close()

    async def pages(self) -> AsyncGenerator[bytes, None]:
        """A page of each partition with new records. Sets `at_end` to whether nothing is left.

        Raises what `read` does.
        """
        self.at_end = True
        for number, partition in list(self._here.items()):
            try:
                async with aclosing(self._pages_of(partition, self.next_offsets[number])) as parts:
                    async for part in parts:
                        yield part
            except ELSEWHERE:
                if not self._is_split:
                    raise
                self._read_on(number)
        for number, remote in list(self._elsewhere.items()):
            for event in remote.take():
                yield self._event(number, event)
                self.next_offsets[number] = event.offset + 1
            if remote.is_here:
                del self._elsewhere[number]
                self._read_on(number)
                self.at_end = False

    async def _pages_of(self, partition: Partition, offset: int) -> AsyncGenerator[bytes, None]:
        seen = self._high_watermarks.get(partition, -1)
        if is_still_at_end(partition, offset, high_watermark=seen):
            return
        fetched = await self._context.read_batches(partition, offset, self._query)
        with closing(fetched):
            self._high_watermarks[partition] = fetched.high_watermark
            number, next_offset = partition.number, max(offset, fetched.next_offset)
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
                next_offset = page.next_offset
            # Without a page there may be a gap up to the end.
            self.next_offsets[number] = next_offset
            self.at_end = self.at_end and next_offset >= fetched.end_offset

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
        before, after = self._id_around(partition.number)
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

    def _id_around(self, number: int) -> tuple[bytes, bytes]:
        """What is before and after the offset of this partition in an id. That has the last offset
        sent of each; -1 is before the first.
        """
        ids = {one: b"%d:%d" % (one, at - 1) for one, at in self.next_offsets.items()}
        ids[number] = b"%d:@" % number
        before, _, after = b",".join(ids.values()).partition(b"@")
        return before, after

    def _event(self, number: int, event: Event) -> bytes:
        before, after = self._id_around(number) if self._whole_topic else (b"", b"")
        return b"id: %b%d%b\ndata: %b\n\n" % (before, event.offset, after, event.line)

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
        seen = self._high_watermarks
        return [AwaitedOffset(one, seen[one]) for one in self._here.values() if one in seen]


def _events(lines: Sequence[tuple[int, Part]]) -> Sequence[Part]:
    """The events of one partition. A large line is alone."""
    if any(not isinstance(line, bytes) for _, line in lines):
        return [part for at, line in lines for part in (b"id: %d\ndata: " % at, line, b"\n\n")]
    return (b"".join([b"id: %d\ndata: %b\n\n" % event for event in lines]),)  # type: ignore[str-format]


async def tail_partition(context: Context, exchange: Exchange) -> AnyResponse:
    topic, number = context.broker.topic(exchange.topic), exchange.partition
    topic.check_number(number)
    return await tail_of(context, exchange, topic, number=number)


async def tail_topic(context: Context, exchange: Exchange) -> AnyResponse:
    return await tail_of(context, exchange, context.broker.topic(exchange.topic), number=None)


async def tail_of(
    context: Context, exchange: Exchange, topic: Topic, *, number: int | None
) -> StreamResponse:
    query = exchange.query(TailQuery)
    header_values.preferred(exchange.header(b"accept"), offered=(header_values.EVENTS,))
    # Checked here also if another broker reads.
    parse_position(query.offset, query.timestamp, default=LATEST)
    last_event_id = exchange.header(b"last-event-id")
    resumed = _parse_last_event_id(last_event_id, topic, number) if last_event_id else {}
    tail = Tail(context, exchange, query, topic, number=number)
    try:
        headers = [*_HEADERS, *await tail.start(resumed)]
    except BaseException:
        tail.close()
        raise
    return StreamResponse(headers, _stream(context, exchange, tail), (tail,))


def _log_headers_at(partition: Partition, offset: int) -> HeaderList:
    """The log headers of a stream of one partition that begins at `offset`."""
    now = partition.offsets()
    tier: Tier = "hot" if offset >= now.local_log_start_offset else "cold"
    return log_headers(partition, now, next_offset=offset, tier=tier)


def _parse_last_event_id(text: str, topic: Topic, number: int | None) -> dict[int, int]:
    """Each partition's next offset. Raises InvalidRequest."""
    parts = text.split(",") if number is None else [f"{number}:{text}"]
    numbers = set(topic.numbers if number is None else [number])
    offsets: dict[int, int] = {}
    for part in parts:
        match = _PARTITION_OFFSET.match(part)
        if match is None or int(match.group(2)) > MAX_OFFSET:
            strict_json.refuse_field("Last-Event-ID", f"not an id of this stream: {text[:64]!r}")
        given = int(match.group(1))
        if given not in numbers or given in offsets:
            why = "given twice" if given in offsets else "not in this topic"
            strict_json.refuse_field("Last-Event-ID", f"partition {given} is {why}: {text[:64]!r}")
        offsets[given] = int(match.group(2)) + 1
    return offsets


async def _stream(context: Context, exchange: Exchange, tail: Tail) -> AsyncGenerator[bytes, None]:
    yield _COMMENT  # so that the head is sent immediately
    heartbeat_ms = context.settings.heartbeat_ms
    with LongPoll(context.waiting, exchange, wait_ms=heartbeat_ms) as poll:
        poll.listen()
        tail.on_event(poll.wake)
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
            if not tail.add_new_partitions() and tail.at_end and not tail.is_ready:
                await poll.wait(tail.awaited_offsets())
            if poll.cancelled:
                return
            if poll.over:
                yield _COMMENT
                poll.restart(wait_ms=heartbeat_ms)


def _error_event(context: Context, exchange: Exchange, error: TierlogError) -> bytes:
    problem = context.problem(exchange, error)
    return b"event: error\ndata: %b\n\n" % problem.body()
