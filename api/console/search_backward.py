"""Search from the newest record on, in all partitions of a topic at the same time.

* A log is read forward only, so a search goes back in blocks of offsets: a block is read from its
  start to its end, and what it has is turned round. Blocks grow while they are cheap, so that
  empty ranges of offsets cost little, and are halved when they hold too much for memory.
* The next block is one of the partition that is searched least far back in time. What a block has
  waits until every partition is searched as far back, or too much waits.
* A block that the search's budget ends is as if it had not begun.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from tierlog.api.console.search import (
    PIECE_EXPANDED_BYTES,
    Budget,
    Piece,
    Place,
    Range,
    Search,
    SearchRun,
)
from tierlog.api.http.context import Context
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.segment_listing import peek_segments
from tierlog.broker.topics.topics import Topic
from tierlog.cold_tier.key_search import KeySearch
from tierlog.record_format.decode import Columns
from tierlog.record_format.encode import Headers
from tierlog.record_format.errors import OffsetTrimmed, TierlogError

FIRST_BLOCK: Final = 256  # offsets
FEW_PIECES, MANY_PIECES = 2, 8
SPANS_MAX: Final = 10_000  # of a partition, at a time
KEPT_BYTES: Final = PIECE_EXPANDED_BYTES  # of a block
WAITING_MAX: Final = 20_000  # records

Row = tuple[int, int, bytes | None, bytes | None, Headers]


class _Span(NamedTuple):
    """Of one segment. The times are None if they are not known."""

    base_offset: int
    last_offset: int
    min_timestamp: int | None
    max_timestamp: int | None


@dataclass(slots=True)
class _Part:
    """What is left of a partition: [start_offset, end_offset). `since_ms`: what is newer was
    searched. `spans`: its newest segments, oldest first; None if they have to be listed.
    `waiting`: what was found and not given out yet, newest first.
    """

    partition: Partition
    start_offset: int
    end_offset: int
    keys: KeySearch | None
    since_ms: int = MAX_OFFSET
    block: int = FIRST_BLOCK
    spans: deque[_Span] | None = None
    waiting: deque[Row] = field(default_factory=deque)

    @property
    def place(self) -> int:
        return self.waiting[0][0] + 1 if self.waiting else self.end_offset

    @property
    def is_searched(self) -> bool:
        return self.end_offset <= self.start_offset


class BackwardRun(SearchRun):
    """As `SearchRun`, from the newest on."""

    def __init__(
        self,
        context: Context,
        topic: Topic,
        search: Search,
        budget: Budget,
        numbers: Iterable[int],
    ) -> None:
        within = search._replace(after={}, until={})
        super().__init__(context, topic, within, budget, numbers)
        self._ends, self._starts = search.after, search.until
        self._parts: dict[int, _Part] = {}

    @property
    def place(self) -> str:
        return ",".join(f"{number}:{one.place}" for number, one in self._parts.items())

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        for number in self.numbers:
            try:
                self._parts[number] = await self._part(number)
            except TierlogError as error:
                self._add_trouble(number, error)
        left = {number: one for number, one in self._parts.items() if not one.is_searched}
        while left and self._spent is None:
            number = max(left, key=lambda one: left[one].since_ms)
            try:
                async with aclosing(self._search_block(left[number])) as looked:
                    async for piece in looked:
                        yield piece
            except OffsetTrimmed:  # retention was faster
                start = left[number].partition.log_start_offset
                left[number].start_offset = max(left[number].start_offset, start)
            except TierlogError as error:
                self._add_trouble(number, error)
                del left[number]
            else:
                if left[number].is_searched:
                    del left[number]
            for piece in self._take(self._look_at(left)):
                yield piece
        is_complete = not left and not any(one.waiting for one in self._parts.values())
        if is_complete:
            self.progress.offsets = self.progress.offsets_in_all
        self.progress.end = "complete" if is_complete else self._spent

    async def _part(self, number: int) -> _Part:
        partition, start, end_offset, keys = await self._range(self._topic.partition(number))
        start = max(start, self._starts.get(number, 0))
        if keys is not None:
            keys = KeySearch(keys.key, backward_to=start)
        return _Part(partition, start, min(end_offset, self._ends.get(number, MAX_OFFSET)), keys)

    def _look_at(self, left: dict[int, _Part]) -> int:
        """Count how far it is; the time since which everything was searched."""
        progress = self.progress
        unsearched = sum(one.end_offset - one.start_offset for one in left.values())
        progress.offsets = max(progress.offsets, progress.offsets_in_all - unsearched)
        since_ms = max((one.since_ms for one in left.values()), default=-1)
        progress.since_ms = since_ms if 0 <= since_ms < MAX_OFFSET else None
        return since_ms

    def _take(self, since_ms: int) -> list[Piece]:
        """What may be given out: the newest that wait, by partition."""
        heads = [(-one.waiting[0][1], n) for n, one in self._parts.items() if one.waiting]
        heapq.heapify(heads)
        too_many = sum(len(one.waiting) for one in self._parts.values()) - WAITING_MAX
        taken: dict[int, list[Row]] = {}
        while heads and self.progress.found < self._search.limit:
            newest_ms, number = -heads[0][0], heads[0][1]
            if newest_ms < since_ms and too_many <= 0:
                break
            waiting = self._parts[number].waiting
            taken.setdefault(number, []).append(waiting.popleft())
            self.progress.found += 1
            too_many -= 1
            if waiting:
                heapq.heapreplace(heads, (-waiting[0][1], number))
            else:
                heapq.heappop(heads)
        return [self._piece(number, rows) for number, rows in taken.items()]

    def _piece(self, number: int, rows: list[Row]) -> Piece:
        partition = self._parts[number].partition
        return Piece(
            place=Place(number, rows[-1][0]),
            batches=[Columns._make(map(list, zip(*rows, strict=True)))],
            local_start_offset=partition.offsets().local_log_start_offset,
            read_bytes=0,
            records=0,
        )

    async def _search_block(self, part: _Part) -> AsyncGenerator[Piece, None]:
        """Look through the newest block that is left of the partition, or make it smaller. What
        was looked at is given out without its records, as progress.
        """
        span = await self._run(partial(self._newest_span, part))
        if span is None:
            part.end_offset = part.start_offset
            return
        end_offset = min(part.end_offset, span.last_offset + 1)
        start = max(span.base_offset, part.start_offset, end_offset - part.block)
        pieces: list[Piece] = []
        kept_bytes, offset = 0, start
        while offset < end_offset:
            if pieces and self._spent is not None:
                return
            here = Range(part.partition, offset, end_offset, part.keys)
            piece, rest_s = await self._look(here, MAX_OFFSET)
            self._count_reading(piece)
            await asyncio.sleep(rest_s)
            pieces.append(piece)
            kept_bytes += _size_of(piece)
            if kept_bytes > KEPT_BYTES and end_offset - start > 1:
                part.block = max(1, (end_offset - start) // 2)
                return
            offset = piece.place.offset
            yield piece._replace(batches=[])
        if len(pieces) <= FEW_PIECES:
            part.block *= 2
        elif len(pieces) > MANY_PIECES:
            part.block = max(1, part.block // 2)
        part.waiting.extend(_newest_first(pieces))
        part.end_offset = start
        part.since_ms = min(part.since_ms, _first_ms(pieces, span, start))

    def _newest_span(self, part: _Part) -> _Span | None:
        """The newest segment that may have wanted records below the end of what is left."""
        while True:
            if part.spans is None:
                wanted = self._search.wanted
                part.spans = deque(
                    (
                        _Span(
                            one.base_offset, one.last_offset, one.min_timestamp, one.max_timestamp
                        )
                        for one in peek_segments(part.partition, from_offset=part.start_offset)
                        if one.base_offset < part.end_offset
                        and wanted.could_hold(one.min_timestamp, one.max_timestamp)
                    ),
                    maxlen=SPANS_MAX,
                )
            are_all = len(part.spans) < SPANS_MAX
            while part.spans and part.spans[-1].base_offset >= part.end_offset:
                part.spans.pop()
            if part.spans:
                return part.spans[-1]
            if are_all:
                return None
            part.spans = None


def _first_ms(pieces: list[Piece], span: _Span, start: int) -> int:
    """The time of the first record from `start` on. Of a chunk that was not read, because it lacks
    the key, only the segment's times are known.
    """
    first_ms = pieces[0].first_ms
    if first_ms is None:
        first_ms = span.min_timestamp if start <= span.base_offset else span.max_timestamp
    return MAX_OFFSET if first_ms is None else first_ms


def _size_of(piece: Piece) -> int:
    """What its records take in memory, about."""
    return sum(len(one or b"") for batch in piece.batches for one in (*batch.keys, *batch.values))


def _newest_first(pieces: list[Piece]) -> Iterator[Row]:
    for piece in reversed(pieces):
        for batch in reversed(piece.batches):
            yield from reversed(list(zip(*batch, strict=True)))
