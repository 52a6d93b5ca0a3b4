"""`POST /v1/fetch` over several brokers of a cluster.

* Each broker is asked for what it leads, with its share of the request's `max_bytes`. Without
  enough, all are asked to wait for their share of `min_bytes`; once one has it, all are read again.
* A partition that has just moved is asked for again; one that nobody leads has its problem in its
  place, at once: the others do not wait for it.
* What the others answer counts as in flight, at the request's `max_bytes`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from tierlog.api.http.cluster.splitting import gateway_of, token_of
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch.reading import EARLIEST
from tierlog.api.http.responses import (
    JSON,
    NO_STORE,
    AnyResponse,
    Response,
    StreamResponse,
)
from tierlog.record_format.errors import NotLeader, PeerUnavailable, ShuttingDown, TierlogError
from tierlog.record_format.workarounds import decode_json

HERE: Final = ""  # in place of another broker's url
_MOVED: Final = frozenset(("not-leader", "leader-unknown"))
_ASK_AGAIN_S: Final = (0.05, 0.2)
_PAUSE_MAX_S: Final = 1.0


class Wanted(Protocol):
    topic: str
    partition: int


class _Row(msgspec.Struct):
    records: list[msgspec.Raw] = []
    next_offset: int = 0
    error: dict[str, Any] | None = None


class _Rows(msgspec.Struct):
    partitions: list[msgspec.Raw]


FetchHere = Callable[[Any], Awaitable[AnyResponse]]
Share = dict[str, list[int]]


def shares_of(context: Context, wanted: Sequence[Wanted], indexes: Iterable[int]) -> Share:
    """Who leads which of these partitions, by url; `HERE` also for what has a problem."""
    shares: Share = {}
    for index in indexes:
        url, one = HERE, wanted[index]
        try:
            context.broker.partition(one.topic, one.partition)
        except NotLeader as error:
            url = error.url
        except TierlogError:
            pass  # its problem is found here
        shares.setdefault(url, []).append(index)
    return shares


class SplitFetch:
    """`request`: a `FetchMany`. `here` answers one of which all is led here, or has a problem."""

    def __init__(self, context: Context, exchange: Exchange, request: Any, here: FetchHere) -> None:
        self._context, self._exchange = context, exchange
        self._request, self._here = request, here
        self._rows: dict[int, bytes] = {}
        self._offsets: dict[int, int | str] = {}  # found for a keyword

    async def response(self, shares: Share) -> Response:
        held_bytes = self._request.max_bytes
        self._context.inflight.acquire(held_bytes)
        try:
            await self._ask_at_once(shares)
            await self._until_enough()
        finally:
            self._context.inflight.release(held_bytes)
        rows = b",".join([self._rows[index] for index in range(len(self._request.partitions))])
        return Response(200, [JSON, NO_STORE], b'{"partitions":[%b]}' % rows)

    async def _until_enough(self) -> None:
        deadline_s, pause_s = time.monotonic() + self._request.wait_ms / 1000, _ASK_AGAIN_S[0]
        while (left_s := deadline_s - time.monotonic()) > 0 and not self._is_enough():
            await self._wait_for_any(self._shares(), wait_ms=round(left_s * 1000))
            await self._ask_at_once(self._shares())
            if self._is_enough() or await self._is_over(pause_s):
                return
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _is_over(self, pause_s: float) -> bool:
        """Whether the client goes away within this time, or the broker stops."""
        gone = asyncio.ensure_future(self._exchange.wait_for_disconnect())
        try:
            await asyncio.wait([gone], timeout=pause_s)
            return gone.done() or self._context.waiting.is_stopping
        finally:
            gone.cancel()

    def _shares(self) -> Share:
        wanted = self._request.partitions
        return shares_of(self._context, wanted, range(len(wanted)))

    async def _ask_at_once(self, shares: Share) -> None:
        for pause_s in (*_ASK_AGAIN_S, 0.0):
            asked = [self._ask(url, indexes, wait_ms=0) for url, indexes in shares.items()]
            for rows in await asyncio.gather(*asked):
                self._rows |= rows
            again = [index for index in self._rows if self._may_be_read(index)]
            if not (again and pause_s):
                return
            await asyncio.sleep(pause_s)
            shares = shares_of(self._context, self._request.partitions, again)

    def _may_be_read(self, index: int) -> bool:
        """Whether it is worth asking again. A position other than an offset is found once, and
        found again only if it was trimmed meanwhile.
        """
        wanted, row = self._request.partitions[index], self._row(index)
        is_named = isinstance(wanted.offset, int)
        if row.error is None and not row.records and not is_named:
            self._offsets[index] = row.next_offset
        code = "" if row.error is None else row.error.get("code")
        if code == "offset-trimmed" and index in self._offsets:
            self._offsets[index] = EARLIEST
            return True
        return code in _MOVED

    def _row(self, index: int) -> _Row:
        return _row_of(self._rows[index])

    async def _wait_for_any(self, shares: Share, *, wait_ms: int) -> None:
        """Until one of the brokers has its share of what is enough."""
        asked = [
            asyncio.ensure_future(self._ask(url, indexes, wait_ms=wait_ms))
            for url, indexes in shares.items()
        ]
        # What is fetched here looks out for the client itself.
        watch = None if HERE in shares else gateway_of(self._context).watch(self._exchange)
        try:
            first = asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            await (first if watch is None else watch.until(first))
        except (PeerUnavailable, ShuttingDown):
            pass  # the client has gone, or the broker stops
        finally:
            if watch is not None:
                watch.close()
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _is_enough(self) -> bool:
        rows = [self._row(index) for index in self._rows]
        if any(row.error is not None for row in rows):
            return True
        found = sum(len(record) for row in rows for record in row.records)
        return bool(found >= self._request.min_bytes)

    async def _ask(self, url: str, indexes: Sequence[int], *, wait_ms: int) -> dict[int, bytes]:
        """The rows of these partitions."""
        request = self._request
        count = len(request.partitions)
        part = replace(
            request,
            partitions=[self._wanted(index) for index in indexes],
            max_bytes=max(1, request.max_bytes * len(indexes) // count),
            min_bytes=max(1, request.min_bytes * len(indexes) // count),
            wait_ms=wait_ms,
        )
        if url == HERE:
            return await self._ask_here(indexes, part)
        try:
            return _rows_of(indexes, await self._ask_broker(url, part))
        except PeerUnavailable as error:
            failed = {index: self._failed(index, error) for index in indexes}
            found = await self._ask_here(indexes, replace(part, wait_ms=0))
            return failed | {index: row for index, row in found.items() if not _has_error(row)}
        except TierlogError as error:
            return {index: self._failed(index, error) for index in indexes}

    async def _ask_here(self, indexes: Sequence[int], part: Any) -> dict[int, bytes]:
        """Also for what the bucket has of a partition whose leader does not answer."""
        return _rows_of(indexes, await _collected(await self._here(part)))

    def _wanted(self, index: int) -> Any:
        wanted = self._request.partitions[index]
        return replace(wanted, offset=self._offsets.get(index, wanted.offset))

    async def _ask_broker(self, url: str, part: Any) -> bytes:
        gateway = gateway_of(self._context)
        headers = [*token_of(self._exchange), JSON]
        sent = gateway.request(
            self._exchange,
            url,
            b"/v1/fetch",
            method="POST",
            headers=headers,
            body=msgspec.json.encode(part),
        )
        return (await gateway.ask(sent, writes=False)).body

    def _failed(self, index: int, error: TierlogError) -> bytes:
        one = self._request.partitions[index]
        problem = self._context.problem(self._exchange, error)
        row: Mapping[str, object] = {
            "topic": one.topic,
            "partition": one.partition,
            "error": problem.document,
        }
        return msgspec.json.encode(row)


def _rows_of(indexes: Iterable[int], body: bytes) -> dict[int, bytes]:
    rows = decode_json(body, _Rows).partitions
    return {index: bytes(row) for index, row in zip(indexes, rows, strict=True)}


def _row_of(row: bytes) -> _Row:
    return decode_json(row, _Row)


def _has_error(row: bytes) -> bool:
    return _row_of(row).error is not None


async def _collected(response: AnyResponse) -> bytes:
    if isinstance(response, Response):
        return response.body
    assert isinstance(response, StreamResponse), "JSON is not sent from files"
    try:
        async with aclosing(response.parts) as parts:
            return b"".join([part async for part in parts])
    finally:
        response.close()
