"""Follows a partition of a cluster where it is led, for a tail that began at this broker.

* The stream of its leader is read event by event, and read on from the next offset wherever the
  partition is led next; if that is here, the tail reads it itself (`is_here`).
* Little is read ahead: a slow reader costs its leader nothing either. An event that is larger
  counts as in flight while it arrives.
* What cannot be read on, or has no leader for `PATIENCE_S`, is the tail's `error`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlencode

import msgspec

from tierlog.api.http.cluster.splitting import PAUSE_MAX_S, gateway_of, refusal_of, token_of
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.problems import HeaderList, PeerProblem
from tierlog.broker.topics.topics import Topic
from tierlog.record_format.errors import (
    WILL_PASS,
    NotLeader,
    PeerUnavailable,
    RetriableError,
    ShuttingDown,
    TierlogError,
)
from tierlog.record_format.workarounds import decode_json

if TYPE_CHECKING:
    from tierlog.api.http.cluster.gateway import PeerStream

PATIENCE_S: Final = 120.0  # as the client's own
AHEAD_BYTES: Final = 64 << 10
_MOVES: Final = (*WILL_PASS, PeerUnavailable, ShuttingDown)


class Event(NamedTuple):
    offset: int
    line: bytes


class RemoteTail:
    """`query`: of the tail, but for where it begins. Used on the event loop; `close` it."""

    def __init__(
        self,
        context: Context,
        exchange: Exchange,
        topic: Topic,
        number: int,
        *,
        query: Mapping[str, str],
    ) -> None:
        self._context, self._exchange = context, exchange
        self._topic, self.number, self._query = topic, number, query
        self._events: deque[Event] = deque()
        self._ahead_bytes = 0
        self._has_room = asyncio.Event()
        self._wake: Callable[[], None] = lambda: None
        self._position: Mapping[str, str] = {}  # where it is read on
        self._seen_s = 0.0  # when there was a leader
        self._begun: asyncio.Future[HeaderList] | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_here = False
        self.error: TierlogError | None = None

    async def begin(self, position: Mapping[str, str]) -> HeaderList:
        """The headers of the leader's stream; empty if the partition is here by now. Raises what
        the leader answers, and LeaderUnknown after `leader_wait_ms`.
        """
        self._begun = asyncio.get_running_loop().create_future()
        self.follow(position)
        return await self._begun

    def follow(self, position: Mapping[str, str]) -> None:
        self._position, self._seen_s = position, time.monotonic()
        self._task = asyncio.ensure_future(self._follow())

    def on_event(self, wake: Callable[[], None]) -> None:
        """Call it when there is something to take."""
        self._wake = wake

    @property
    def is_ready(self) -> bool:
        return bool(self._events) or self.is_here or self.error is not None

    def take(self) -> list[Event]:
        """What has arrived, in order. Raises `error` once all was taken."""
        taken = list(self._events)
        if not taken and self.error is not None:
            raise self.error
        self._events.clear()
        self._ahead_bytes = 0
        self._has_room.set()
        return taken

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # --- in its task ------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            await self._follow_leaders()
        except TierlogError as error:
            self.error = error
            if self._begun is not None and not self._begun.done():
                self._begun.set_exception(error)
        self._wake()

    def _has_begun(self, headers: HeaderList) -> None:
        self._seen_s = time.monotonic()
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(headers)

    async def _follow_leaders(self) -> None:
        pause_s = 0.0
        while True:
            wait_s = self._context.settings.leader_wait_ms / 1000
            try:
                url = self._leader()
                if url is None:
                    self.is_here = True
                    return self._has_begun([])
                async with aclosing(self._stream(url)) as events:
                    async for event in events:
                        await self._keep(event)
                        pause_s = 0.0
            except _MOVES:
                is_beginning = self._begun is not None and not self._begun.done()
                patience_s = wait_s if is_beginning else PATIENCE_S
                if time.monotonic() - self._seen_s > patience_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s + 0.02, PAUSE_MAX_S)

    def _leader(self) -> str | None:
        """Its url; None if it is here. Raises LeaderUnknown."""
        try:
            self._topic.partition(self.number)
        except NotLeader as error:
            return error.url
        return None

    async def _keep(self, event: Event) -> None:
        while self._ahead_bytes >= AHEAD_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        self._position = {"offset": str(event.offset + 1)}
        self._events.append(event)
        self._ahead_bytes += len(event.line)
        self._wake()

    async def _stream(self, url: str) -> AsyncGenerator[Event, None]:
        gateway, name = gateway_of(self._context), self._topic.record.name
        query = urlencode({**self._query, **self._position})
        path = f"/v1/topics/{name}/partitions/{self.number}/tail?{query}"
        headers = [*token_of(self._exchange), (b"accept", b"text/event-stream")]
        request = gateway.request(self._exchange, url, path.encode(), method="GET", headers=headers)
        async with gateway.streaming(request) as answer:
            starts = dict(answer.headers)[b"log-next-offset"].decode()
            self._position = {"offset": starts}  # `latest` is another one later
            self._has_begun(answer.headers)
            try:
                async with aclosing(self._events_of(answer)) as events:
                    async for event in events:
                        yield event
            finally:
                self._seen_s = time.monotonic()

    async def _events_of(self, answer: PeerStream) -> AsyncGenerator[Event, None]:
        inflight, held_bytes = self._context.inflight, 0
        pending, searched = bytearray(), 0
        try:
            async for part in answer.parts:
                pending += part
                while (end := pending.find(b"\n\n", searched)) >= 0:
                    found = _parse(bytes(pending[:end]))
                    del pending[: end + 2]
                    searched = 0
                    if found is not None:
                        yield found
                searched = max(0, len(pending) - 1)
                excess = max(0, len(pending) - AHEAD_BYTES)
                if excess > held_bytes:
                    inflight.acquire(excess - held_bytes)
                else:
                    inflight.release(held_bytes - excess)
                held_bytes = excess
        finally:
            inflight.release(held_bytes)


def _parse(event: bytes) -> Event | None:
    """None for a comment. Raises the error that ends a stream."""
    name, _, rest = event.partition(b"\n")
    data = rest.removeprefix(b"data: ")
    if name.startswith(b"id: "):
        return Event(int(name[4:]), data)
    if name == b"event: error":
        raise error_of(data)
    return None


class _Problem(msgspec.Struct):
    status: int = 503
    code: str = ""


def error_of(problem: bytes) -> TierlogError:
    """The error of a problem document in a stream: one that passes, or the broker's own."""
    try:
        status = decode_json(problem, _Problem).status
        passes = refusal_of(status, problem)
        return passes or PeerProblem(status, decode_json(problem, dict[str, object]))
    except msgspec.MsgspecError:
        return RetriableError("another broker's stream ended with an error that is none")
