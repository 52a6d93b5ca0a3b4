"""The calls of a search: its form, what it finds, and one record.

* What it finds is a stream of lines of JSON, one for each piece of a log that was looked through:
  the records, shortened for a list, and how far the search is.
* Leaving the page closes the stream, and with it the search. It may not be resumed, but repeated
  from the place where it was.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Final
from weakref import WeakSet

import msgspec

from tierlog.api.console.downloads import MEDIA_TYPES, FileFormat, RecordFile, record_file
from tierlog.api.console.record_browser import (
    DisplayText,
    RecordsQuery,
    record_page,
    summary,
)
from tierlog.api.console.rendering import HEADERS, fragment
from tierlog.api.console.search import (
    Budget,
    Piece,
    Progress,
    Search,
    SearchQuery,
    SearchRun,
    led_elsewhere,
    parse_search,
)
from tierlog.api.console.search_all_brokers import WholeRun, steps_of
from tierlog.api.console.search_backward import BackwardRun
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch.long_poll import LongPoll
from tierlog.api.http.header_values import NDJSON
from tierlog.api.http.problems import HeaderList
from tierlog.api.http.responses import NO_STORE, AnyResponse, Response, StreamResponse
from tierlog.broker.topics.topics import Topic
from tierlog.record_format.errors import InvalidRequest, Throttled, TierlogError

_STREAM: Final[HeaderList] = [(b"content-type", NDJSON.encode()), NO_STORE, *HEADERS]
PROGRESS_S: Final = 0.1  # so often a page is told how far its search is
_BEFORE: Final = 60  # bytes that are shown before what was found
_ENCODER: Final = msgspec.json.Encoder()


class FoundText(msgspec.Struct):
    """`text` may begin and end within the value."""

    kind: str
    text: str


class FoundRecord(msgspec.Struct):
    partition: int
    offset: int
    timestamp: int
    tier: str
    key: FoundText
    value: FoundText


class FoundLine(msgspec.Struct):
    records: list[FoundRecord]
    place: str
    progress: Progress


class DownloadQuery(SearchQuery, forbid_unknown_fields=True):
    format: FileFormat = "ndjson"


class Searches:
    """Those that are under way. Used on the event loop."""

    def __init__(self) -> None:
        self._runs: WeakSet[SearchRun] = WeakSet()

    async def form(self, context: Context, exchange: Exchange) -> Response:
        query = exchange.query(SearchQuery)
        topic = context.broker.topic(exchange.topic)
        address = exchange.scope["query_string"].decode("ascii", "replace")
        refusal = ""
        try:
            parse_search(query, partitions=len(topic.numbers))
        except InvalidRequest as error:
            refusal, address = str(error), ""
        return fragment(
            "search.html",
            name=topic.record.name,
            numbers=topic.numbers,
            query=query,
            address=address,
            refusal=refusal,
            settings=context.settings,
        )

    async def found(self, context: Context, exchange: Exchange) -> AnyResponse:
        """Raises UnknownTopic, InvalidRequest, Throttled."""
        topic = context.broker.topic(exchange.topic)
        query = exchange.query(SearchQuery)
        search = parse_search(query, partitions=len(topic.numbers))
        if exchange.is_forwarded and search.partition is None:  # for another broker's search
            here = sorted(topic.partitions.keys() | topic.damaged.keys())
            part = self._begin(context, topic, search, here)
            return StreamResponse(_STREAM, self._steps(context, exchange, part))
        run = self._begin_whole(context, exchange, search, query)
        return StreamResponse(_STREAM, self._lines(context, exchange, run, search.wanted.text))

    async def download(self, context: Context, exchange: Exchange) -> AnyResponse:
        """As `found`, with whole records. What its budget ends is cut short, as a client sees."""
        query, topic = exchange.query(DownloadQuery), context.broker.topic(exchange.topic)
        name = topic.record.name
        make = partial(record_file, query.format, topic=name)
        file = await context.run_in(context.workers.searchers, make)
        search = parse_search(query, partitions=len(topic.numbers))
        run = self._begin_whole(context, exchange, search, query)
        disposition = f'attachment; filename="{name}.{query.format}"'.encode()
        headers = [
            (b"content-type", MEDIA_TYPES[query.format]),
            (b"content-disposition", disposition),
            NO_STORE,
            *HEADERS,
        ]
        return StreamResponse(headers, self._file(context, exchange, run, file))

    def _begin_whole(
        self, context: Context, exchange: Exchange, search: Search, query: SearchQuery
    ) -> SearchRun | WholeRun:
        """Raises NotLeader for a search of a partition that another broker leads, to which it is
        passed on.
        """
        topic = context.broker.topic(exchange.topic)
        if search.partition is not None:
            topic.check_led_here(search.partition)
            return self._begin(context, topic, search, [search.partition])
        elsewhere = led_elsewhere(topic, topic.numbers)
        here = [one for one in topic.numbers if one not in elsewhere]
        own = self._begin(context, topic, search, here)
        if not elsewhere:
            return own
        return WholeRun(context, exchange, own, search, query=query, elsewhere=elsewhere)

    def _begin(
        self, context: Context, topic: Topic, search: Search, numbers: Iterable[int]
    ) -> SearchRun:
        """A search that was begun is under way until it ends, or nothing refers to it. Raises
        Throttled.
        """
        settings, under_way = context.settings, sum(not run.is_over for run in self._runs)
        if under_way >= settings.searches_max:
            raise Throttled(f"{under_way} searches are under way already; try again")
        budget = Budget(settings.search_max_bytes, settings.search_max_ms / 1000)
        make = BackwardRun if search.order == "newest" else SearchRun
        run = make(context, topic, search, budget, numbers)
        self._runs.add(run)
        return run

    async def _steps(
        self, context: Context, exchange: Exchange, run: SearchRun
    ) -> AsyncGenerator[bytes, None]:
        said_s = 0.0
        async with aclosing(steps_of(run)) as steps:
            async for step in steps:
                is_last = step.piece is None
                has_found = step.piece is not None and bool(step.piece.batches)
                if has_found or is_last or time.monotonic() >= said_s + PROGRESS_S:
                    said_s = time.monotonic()
                    yield _ENCODER.encode(step) + b"\n"
                    await context.access.recheck(exchange)

    async def _lines(
        self, context: Context, exchange: Exchange, run: SearchRun | WholeRun, text: bytes
    ) -> AsyncGenerator[bytes, None]:
        said_s = 0.0
        with LongPoll(context.waiting, exchange, wait_ms=0) as poll:
            poll.listen()
            async with aclosing(run.pieces()) as pieces:
                async for piece in pieces:
                    if piece.batches or time.monotonic() >= said_s + PROGRESS_S:
                        said_s = time.monotonic()
                        yield _line(run, list(_records(piece, text)))
                        await context.access.recheck(exchange)
                    if poll.cancelled:
                        return
        yield _line(run)

    async def _file(
        self, context: Context, exchange: Exchange, run: SearchRun | WholeRun, file: RecordFile
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(run.pieces()) as pieces:
            async for piece in pieces:
                if piece.batches:
                    yield await context.run_in(context.workers.searchers, partial(file.add, piece))
                    await context.access.recheck(exchange)
        if run.progress.end in ("bytes", "time"):
            raise Throttled("a download ended with its budget: take a smaller range")
        yield await context.run_in(context.workers.searchers, file.end)


def _line(run: SearchRun | WholeRun, records: list[FoundRecord] | None = None) -> bytes:
    return _ENCODER.encode(FoundLine(records or [], run.place, run.progress)) + b"\n"


def _records(piece: Piece, text: bytes) -> Iterator[FoundRecord]:
    for columns in piece.batches:
        for offset, timestamp, key, value, _ in zip(*columns, strict=True):
            yield FoundRecord(
                partition=piece.place.partition,
                offset=offset,
                timestamp=timestamp,
                tier="hot" if offset >= piece.local_start_offset else "cold",
                key=_shown(summary(key)),
                value=_around(value, text),
            )


def _around(value: bytes | None, text: bytes) -> FoundText:
    """The value from shortly before the text that was searched for."""
    start = value.find(text) - _BEFORE if value and text else 0
    if value is None or start <= 0:
        return _shown(summary(value))
    while value[start] & 0xC0 == 0x80:  # within a character
        start += 1
    shown = _shown(summary(value[start:]))
    return FoundText(shown.kind, f"… {shown.text}")


def _shown(shown: DisplayText) -> FoundText:
    return FoundText(shown.kind, f"{shown.text} …" if shown.cut else shown.text)


async def record(context: Context, exchange: Exchange) -> Response:
    """One record, or why it is not there."""
    partition = context.broker.partition(exchange.topic, exchange.partition)
    offset = exchange.number("offset")
    try:
        page = await record_page(
            context, exchange, partition, RecordsQuery(at=str(offset), limit=1)
        )
        found = next((one for one in page.lines if one.offset == offset), None)
        refusal = "" if found else f"Offset {offset} is no longer there."
    except TierlogError as error:
        found, refusal = None, str(context.problem(exchange, error).document["detail"])
    return fragment("record.html", record=found, refusal=refusal)
