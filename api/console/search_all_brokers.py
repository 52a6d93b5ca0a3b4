"""A search of a whole topic in a cluster: each broker searches what it leads, and whoever was asked
puts together what they find, in the order of one search.

* A broker sends a line of JSON for each piece of a log that it looked through: whole records, and
  how far it is. The next step is of the broker that is least far, so what one finds ahead of the
  others waits, one piece of it, and the rest in its connection.
* Each has a budget of its own. As soon as one is used up the search ends, for all.
* A broker that does not answer is reported, with the partitions that it leads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Final
from urllib.parse import urlencode

import msgspec

from tierlog.api.console.search import (
    End,
    Piece,
    Place,
    Progress,
    Search,
    SearchQuery,
    SearchRun,
    parse_places,
)
from tierlog.api.http.cluster.splitting import gateway_of, token_of
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.settings import MAX_OFFSET, MIB
from tierlog.record_format.decode import Columns
from tierlog.record_format.errors import NotLeader, PeerUnavailable, TierlogError
from tierlog.record_format.workarounds import decode_json

LINE_MAX_BYTES: Final = 64 * MIB  # a piece, of which one batch may be large, in base64


class Step(msgspec.Struct, omit_defaults=True):
    """A piece, and how far its broker was after it. The last step has none."""

    numbers: list[int]
    place: str
    progress: Progress
    piece: Piece | None = None


async def steps_of(run: SearchRun) -> AsyncGenerator[Step, None]:
    async with aclosing(run.pieces()) as pieces:
        async for piece in pieces:
            yield Step(run.numbers, run.place, run.progress, piece)
    yield Step(run.numbers, run.place, run.progress)


class _Source:
    """A broker's part. `head`: found, and not given out yet."""

    def __init__(self, name: str, numbers: list[int], steps: AsyncGenerator[Step, None]) -> None:
        self.name, self.steps = name, steps
        self.at = Step(numbers, "", Progress(Place(min(numbers, default=0), 0)))
        self.head: Piece | None = None

    async def step(self) -> bool:
        """False once there is no more. Raises TierlogError."""
        self.at = await anext(self.steps, self.at)
        self.head = self.at.piece
        return self.head is not None


class WholeRun:
    """As `SearchRun`."""

    def __init__(
        self,
        context: Context,
        exchange: Exchange,
        own: SearchRun,
        search: Search,
        *,
        query: SearchQuery,
        elsewhere: Mapping[int, NotLeader],
    ) -> None:
        self._search = search
        self._sources = [_Source("", own.numbers, steps_of(own))]
        by_leader: dict[int, tuple[NotLeader, list[int]]] = {}
        for number, error in elsewhere.items():
            by_leader.setdefault(error.node_id, (error, []))[1].append(number)
        for node_id, (error, numbers) in sorted(by_leader.items()):
            steps = _ask(context, exchange, error.url, query)
            self._sources.append(_Source(f"broker {node_id}", numbers, steps))
        self._numbers = {*own.numbers, *elsewhere}
        self._troubles: list[str] = []
        self.progress = Progress(own.progress.place)

    @property
    def place(self) -> str:
        if self._search.order == "oldest":
            return str(self.progress.place)
        places: dict[int, int] = {}
        for source in self._sources:
            places |= parse_places(source.at.place, "place")
            if source.head is not None:
                number, first = source.head.place.partition, source.head.batches[0].offsets[0]
                places[number] = max(places.get(number, 0), first + 1)
        return ",".join(f"{number}:{offset}" for number, offset in sorted(places.items()))

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        async with AsyncExitStack() as at_the_end:
            for source in self._sources:
                at_the_end.push_async_callback(source.steps.aclose)
            left, end = list(self._sources), None
            while left and end is None and self.progress.found < self._search.limit:
                source = min(left, key=self._turn)
                if source.head is None:
                    try:
                        is_left = await source.step()
                    except TierlogError as error:
                        is_left = self._fail(source, error)
                    if not is_left:
                        left.remove(source)
                        end = self._ended(source)
                piece = self._take(source, left)
                self._add_up(left)
                if piece is not None:
                    yield piece
            self._end(end)

    def _turn(self, source: _Source) -> tuple[int, bool]:
        """The broker that is least far, or has what comes next."""
        head, progress = source.head, source.at.progress
        if self._search.order == "oldest":
            number = progress.place.partition if head is None else head.place.partition
            return number, head is None
        since_ms = MAX_OFFSET if progress.since_ms is None else progress.since_ms
        return -(since_ms if head is None else head.batches[0].timestamps[0]), head is None

    def _take(self, source: _Source, left: list[_Source]) -> Piece | None:
        """What may be given out now: a piece that nothing was found in, at once."""
        head = source.head
        if head is None:
            return None
        if not head.found:
            source.head = None
            return head
        if any(self._turn(one) < self._turn(source) for one in left):
            return None
        taken, source.head = _cut(head, self._search.limit - self.progress.found)
        self.progress.found += taken.found
        return taken

    def _fail(self, source: _Source, error: TierlogError) -> bool:
        numbers = ", ".join(map(str, source.at.numbers))
        where = f"partition {numbers}, led by {source.name}"
        self._troubles.append(f"Not searched to the end: {where}: {error}")
        self._numbers -= {*source.at.numbers}
        return False

    def _ended(self, source: _Source) -> End | None:
        """Whether the search ends with this part of it."""
        end = source.at.progress.end
        return None if end == "complete" else end

    def _add_up(self, left: list[_Source]) -> None:
        progress, every = self.progress, [one.at.progress for one in self._sources]
        for name in ("records", "read_bytes", "too_large", "offsets", "offsets_in_all"):
            setattr(progress, name, sum(getattr(one, name) for one in every))
        since = [one.at.progress.since_ms for one in left]
        known = [one for one in since if one is not None]
        progress.since_ms = max(known) if len(known) == len(since) and known else None
        progress.troubles = [*self._troubles, *(it for one in every for it in one.troubles)]
        if left:
            progress.place = min(map(_place_of, left))

    def _end(self, end: End | None) -> None:
        progress = self.progress
        if progress.found >= self._search.limit:
            end = "limit"
        elif end is None:
            searched = {number for one in self._sources for number in one.at.numbers}
            moved = sorted(self._numbers - searched)
            if moved:
                numbers = ", ".join(map(str, moved))
                progress.troubles.append(f"Not searched: partition {numbers}, which is being moved")
            end = "complete"
        progress.end = end


def _place_of(source: _Source) -> Place:
    head = source.head
    if head is None or not head.batches:
        return source.at.progress.place
    return Place(head.place.partition, head.batches[0].offsets[0])


def _cut(piece: Piece, most: int) -> tuple[Piece, Piece | None]:
    """Its first records, and the piece with those that are left, if any."""
    if piece.found <= most:
        return piece, None
    rows = [row for batch in piece.batches for row in zip(*batch, strict=True)]
    halves = rows[:most], rows[most:]
    first, rest = (Columns._make(map(list, zip(*part, strict=True))) for part in halves)
    left = piece._replace(batches=[rest], records=0, read_bytes=0)
    return piece._replace(batches=[first]), left


async def _ask(
    context: Context, exchange: Exchange, url: str, query: SearchQuery
) -> AsyncGenerator[Step, None]:
    """The part of the broker at `url`. Raises TierlogError."""
    given = {name: getattr(query, name) for name in SearchQuery.__struct_fields__}
    words = {name: value for name, value in given.items() if value}
    target = f"/console/topics/{exchange.topic}/found?{urlencode(words)}".encode()
    gateway = gateway_of(context)
    request = gateway.request(exchange, url, target, method="GET", headers=token_of(exchange))
    async with gateway.streaming(request) as answer, aclosing(_lines(answer.parts)) as lines:
        async for line in lines:
            step = decode_json(line, Step)
            yield step
            if step.piece is None:
                return
    raise PeerUnavailable("its answer breaks off")


async def _lines(parts: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    left = bytearray()
    async for part in parts:
        left += part
        *lines, rest = left.split(b"\n")
        for line in lines:
            yield bytes(line)
        left = rest
        if len(left) > LINE_MAX_BYTES:
            raise PeerUnavailable(f"a line of more than {LINE_MAX_BYTES} bytes")
