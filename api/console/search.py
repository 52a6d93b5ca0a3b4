"""Search over the stored records of a topic, in both tiers: from the oldest, one partition after
another, or from the newest, all at the same time (`search_backward`).

* A piece of a log is read and looked through at a time, in threads of the searches' own: neither
  the event loop nor the readers' threads wait for it, and what is in memory is one piece. Then it
  rests for as long as that took.
* A search ends at its limit of records, at its budget of bytes read or of time, or at the ends
  that the logs had when it began; and, before the next piece, when whoever asked has gone.
* Where it ended is a position, from which the same search goes on.
* With a key, chunks in the bucket whose key filter lacks it are not read. With a range of times,
  segments that lie outside of it by the manifest or the log are not read.
  Records are in the order of their offsets, so one may come earlier than the one before it.
* A partition that cannot be read is reported, and the next one is searched.
* In a cluster each broker searches what it leads (`search_all_brokers`). A search of one partition
  goes to its leader.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, closing
from functools import partial
from itertools import accumulate
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta

from tierlog.api.console.record_filter import RecordFilter, parse_header, parse_json_test
from tierlog.api.http import strict_json
from tierlog.api.http.context import Context
from tierlog.api.http.fetch.reading import (
    EARLIEST,
    KEYWORDS,
    LATEST,
    Position,
    parse_position,
    parse_timestamp,
    resolve,
)
from tierlog.api.http.fetch.record_pages import LargeRecord, read_page
from tierlog.api.http.settings import KIB, MAX_OFFSET, MIB
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.segment_listing import peek_segments
from tierlog.broker.topics.topics import Topic
from tierlog.cold_tier.key_search import KeySearch
from tierlog.record_format.decode import Columns
from tierlog.record_format.errors import InvalidRequest, NotLeader, OffsetTrimmed, TierlogError
from tierlog.record_format.units import in_utc

T = TypeVar("T")
PIECE_BYTES: Final = 128 * KIB  # read at a time, at least one batch
PIECE_EXPANDED_BYTES: Final = 4 * MIB
PIECE_RECORDS: Final = 4_000
WHOLE_BYTES: Final = 8 * MIB  # a larger record is counted, and not looked into
MOST_RECORDS: Final = 10_000
MOST_TROUBLES: Final = 20
MOST_TEXT: Final = 500  # characters of a condition
PLACES_MAX: Final = 1000  # partitions of a search from the newest: where it is, is in an address
_PLACE: Final = re.compile(r"(\d{1,9}):(\d{1,19})\Z", re.ASCII)

Order = Literal["newest", "oldest"]
Places = Mapping[int, int]  # by partition, between which offsets a search is
End = Literal["complete", "limit", "bytes", "time"]
Condition = Annotated[str, Meta(max_length=MOST_TEXT)]


class SearchQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`after`: where an earlier search ended; `until`: where to end, for what it had found. Both
    are of the same `order`.
    """

    text: Condition = ""
    key: Condition = ""
    header: Condition = ""
    json: Condition = ""
    partition: Annotated[str, Meta(max_length=10)] = ""
    by: Literal["offset", "timestamp"] = "timestamp"
    start: Condition = ""
    end: Condition = ""
    order: Order = "newest"
    limit: Annotated[int, Meta(ge=1, le=MOST_RECORDS)] = 100
    after: str = ""
    until: str = ""


class Place(NamedTuple):
    """Between two records of a topic. Everything before it was searched."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


class Search(NamedTuple):
    """What is searched for, and where: `start` and `end` are offsets if there are no times."""

    order: Order

    wanted: RecordFilter
    partition: int | None
    start: Position
    end_offset: int
    limit: int
    after: Places
    until: Places


class Budget(NamedTuple):
    size_bytes: int
    seconds: float


class Piece(NamedTuple):
    """What was looked through at once, and the records of it that are wanted, by batch.
    `first_ms`: the time of its first record.
    """

    place: Place
    batches: list[Columns]
    local_start_offset: int
    read_bytes: int
    records: int
    too_large: int = 0
    first_ms: int | None = None

    @property
    def found(self) -> int:
        return sum(len(one.offsets) for one in self.batches)


class Progress(msgspec.Struct):
    """So far. `place`: the partition that it is in. `offsets`: how many were passed, of
    `offsets_in_all`. `since_ms`: from the newest, all that is newer was searched. `troubles`:
    partitions that could not be searched to their end. `end` is set at the end.
    """

    place: Place
    since_ms: int | None = None
    found: int = 0
    records: int = 0
    read_bytes: int = 0
    too_large: int = 0
    offsets: int = 0
    offsets_in_all: int = 0
    troubles: list[str] = msgspec.field(default_factory=list)
    end: End | None = None


def parse_search(query: SearchQuery, *, partitions: int) -> Search:
    """Raises InvalidRequest."""
    if query.order == "newest" and not query.partition and partitions > PLACES_MAX:
        raise InvalidRequest(
            f"more than {PLACES_MAX} partitions are not searched from the newest: choose one of "
            "them, or the oldest first"
        )
    times, start, end_offset = None, Position(keyword=EARLIEST), MAX_OFFSET
    if query.by == "timestamp":
        first, last = _time(query.start, "start"), _time(query.end, "end")
        if first is not None or last is not None:
            times = (first or 0, MAX_OFFSET if last is None else last)
            start = Position(timestamp=first) if first else start
    else:
        start = parse_position(query.start.strip() or EARLIEST, UNSET, default=EARLIEST)
        if query.end.strip() and query.end.strip() not in KEYWORDS:
            end_offset = parse_position(query.end.strip(), UNSET, default=LATEST).offset
    return Search(
        order=query.order,
        wanted=RecordFilter(
            text=query.text.encode(),
            key=query.key.encode(),
            header=parse_header(query.header) if query.header.strip() else None,
            json=parse_json_test(query.json) if query.json.strip() else None,
            times=times,
        ),
        partition=_partition_number(query.partition),
        start=start,
        end_offset=end_offset,
        limit=query.limit,
        after=parse_places(query.after, "after"),
        until=parse_places(query.until, "until"),
    )


def _partition_number(text: str) -> int | None:
    number = strict_json.parse_natural(text) if text else None
    if text and number is None:
        strict_json.refuse_field("partition", f"expected a number, or nothing, not {text!r}")
    return number


def _time(text: str, loc: str) -> int | None:
    return parse_timestamp(in_utc(text.strip()), loc=loc) if text.strip() else None


def parse_places(text: str, loc: str) -> Places:
    found = {}
    for part in text.split(",") if text else ():
        match = _PLACE.match(part)
        if not match:
            strict_json.refuse_field(loc, f"expected partition:offset, not {part[:64]!r}")
        found[int(match[1])] = int(match[2])
    return found


class SearchRun:
    """A search of these partitions. `pieces` is iterated once; whoever stops iterating ends it."""

    is_over = False

    def __init__(
        self,
        context: Context,
        topic: Topic,
        search: Search,
        budget: Budget,
        numbers: Iterable[int],
    ) -> None:
        self._context, self._topic, self._search, self._budget = context, topic, search, budget
        self._ends_at = time.monotonic() + budget.seconds
        first, last = max(search.after, default=-1), min(search.until, default=MAX_OFFSET)
        self.numbers = [number for number in numbers if first <= number <= last]
        spans = [_span(topic.partitions.get(number)) for number in self.numbers]
        before = accumulate((end - start for start, end in spans), initial=0)
        # What to add to an offset of a partition: how far the search has come.
        self._added = {
            number: passed - start
            for number, passed, (start, _) in zip(self.numbers, before, spans, strict=False)
        }
        in_all = sum(end - start for start, end in spans)
        self.progress = Progress(Place(max(first, 0), 0), offsets_in_all=in_all)

    @property
    def place(self) -> str:
        """Where it is, for `after` and `until`."""
        return str(self.progress.place)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.is_over = True

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        progress = self.progress
        for number in self.numbers:
            try:
                async with aclosing(self._in_partition(number)) as pieces:
                    async for piece in pieces:
                        self._count(piece)
                        yield piece
            except TierlogError as error:
                self._add_trouble(number, error)
            if self._spent is not None:
                break
        else:
            progress.offsets = progress.offsets_in_all
        progress.end = self._spent or "complete"

    def _add_trouble(self, number: int, error: TierlogError) -> None:
        if len(self.progress.troubles) < MOST_TROUBLES:
            why = self._context.shorten_paths(str(error))
            self.progress.troubles.append(f"Partition {number}: {why}")

    @property
    def _spent(self) -> End | None:
        """What of the search is used up."""
        if self.progress.found >= self._search.limit:
            return "limit"
        if self.progress.read_bytes >= self._budget.size_bytes:
            return "bytes"
        return "time" if time.monotonic() >= self._ends_at else None

    async def _in_partition(self, number: int) -> AsyncGenerator[Piece, None]:
        part = await self._range(self._topic.partition(number))
        partition, offset, end_offset, _ = part
        known_to = MAX_OFFSET if self._search.wanted.times is None else offset
        while offset < end_offset and self._spent is None:
            self._stand_at(number, offset)
            try:
                if offset >= known_to:
                    offset, known_to = await self._run(partial(self._find, partition, offset))
                    continue
                left = part._replace(start_offset=offset)
                piece, rest_s = await self._look(left, self._search.limit - self.progress.found)
            except OffsetTrimmed:  # retention was faster
                offset = max(offset, partition.log_start_offset)
                continue
            offset = piece.place.offset
            yield piece
            await asyncio.sleep(rest_s)
        self._stand_at(number, min(offset, end_offset))

    async def _look(self, here: Range, most: int) -> tuple[Piece, float]:
        """The next piece, and how long to rest after it: half of the time is for all others."""
        began_s = time.monotonic()
        async with self._context.decoding.for_page(PIECE_EXPANDED_BYTES):
            piece = await self._run(partial(look_through, here, self._search.wanted, most))
        return piece, time.monotonic() - began_s

    async def _run(self, call: Callable[[], T]) -> T:
        return await self._context.run_in(self._context.workers.searchers, call)

    async def _range(self, partition: Partition) -> Range:
        search, now, number = self._search, partition.offsets(), partition.number
        end_offset = min(search.end_offset, now.high_watermark)
        if number in search.until:
            end_offset = min(end_offset, search.until[number])
        if number in search.after:
            start = search.after[number]
        else:
            start = await resolve(self._context, partition, search.start, committed=False)
        start = max(start, now.log_start_offset)
        keys = KeySearch(search.wanted.key) if search.wanted.key else None
        return Range(partition, start, end_offset, keys)

    def _find(self, partition: Partition, offset: int) -> tuple[int, int]:
        """The next offset whose segment may have records of the wanted times, and where that one
        ends; beyond the end of the log if none has.
        """
        for one in peek_segments(partition, from_offset=offset):
            if self._search.wanted.could_hold(one.min_timestamp, one.max_timestamp):
                return max(offset, one.base_offset), max(offset, one.last_offset) + 1
        return MAX_OFFSET, MAX_OFFSET

    # --- progress ---------------------------------------------------------------------------------

    def _stand_at(self, number: int, offset: int) -> None:
        progress = self.progress
        progress.place = Place(number, offset)
        passed = min(self._added[number] + offset, progress.offsets_in_all)
        progress.offsets = max(progress.offsets, passed)

    def _count(self, piece: Piece) -> None:
        self.progress.found += piece.found
        self._count_reading(piece)
        self._stand_at(*piece.place)

    def _count_reading(self, piece: Piece) -> None:
        self.progress.records += piece.records
        self.progress.read_bytes += piece.read_bytes
        self.progress.too_large += piece.too_large


class Range(NamedTuple):
    """What of a partition is searched; with `keys`, only what may have their key."""

    partition: Partition
    start_offset: int
    end_offset: int
    keys: KeySearch | None


def led_elsewhere(topic: Topic, numbers: Iterable[int]) -> dict[int, NotLeader]:
    found = {}
    for number in numbers:
        try:
            topic.partition(number)
        except NotLeader as error:
            found[number] = error
        except TierlogError:
            continue  # reported in its turn
    return found


def _span(partition: Partition | None) -> tuple[int, int]:
    """The offsets that it has; none if it is damaged."""
    if partition is None:
        return 0, 0
    now = partition.offsets()
    return now.log_start_offset, now.high_watermark


def look_through(part: Range, wanted: RecordFilter, most: int) -> Piece:
    """Read a piece from the start of the range on, and keep the first `most` wanted records of it.
    Blocks; raises what a read does.
    """
    partition, offset, end_offset, keys = part
    below = MAX_OFFSET
    if keys is not None:
        offset, below = partition.find_key(offset, keys, end_offset=end_offset)
    fetched = partition.read(offset, max_bytes=PIECE_BYTES, below=below)
    with closing(fetched):
        page = read_page(
            fetched, offset=offset, max_bytes=PIECE_EXPANDED_BYTES, max_records=PIECE_RECORDS
        )
        batches = page.batches if page.large is None else _whole(page.large)
        size_bytes, too_large = fetched.size_bytes, page.record_count - _records_in(batches)
    first_ms = batches[0].timestamps[0] if batches else None
    found, next_offset = [], page.next_offset
    for columns in batches:
        kept = [at for at in wanted.rows(columns) if columns.offsets[at] < end_offset][:most]
        most -= len(kept)
        if kept:
            found.append(Columns._make([column[at] for at in kept] for column in columns))
        if not most:
            next_offset = columns.offsets[kept[-1]] + 1
            break
    return Piece(
        place=Place(partition.number, next_offset),
        batches=found,
        local_start_offset=partition.offsets().local_log_start_offset,
        read_bytes=size_bytes,
        records=page.record_count,
        too_large=too_large,
        first_ms=first_ms,
    )


def _records_in(batches: list[Columns]) -> int:
    return sum(len(one.offsets) for one in batches)


def _whole(large: LargeRecord) -> list[Columns]:
    """The record alone, or nothing if it is too large."""
    head = large.head
    if head.size_bytes > WHOLE_BYTES:
        return []
    return [Columns._make([field] for field in large.stream(head.position).whole_record(head))]
