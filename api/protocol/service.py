"""What the connections of one server share, and what they offer an application besides ASGI.

A body straight from the socket (`DirectBody`), and a response in the parser's callback, without a
task: for a fetch of 64 KiB, a task and the messages of ASGI cost more than the fetch.

* A response is immediate only for a GET without a body on an idle plain connection. In every other
  case the connection keeps pipelined responses in order.
* Only for a few bytes that are in memory, and once per read of the socket: nothing here waits for a
  disk or starves other connections.
* Reads that have arrived are responded to in turns, between which the event loop looks at what else
  has happened: a write, or its flush, does not wait behind all of them.
* A task sends whatever part of a file the socket does not accept, as if it had sent the first part.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from tierlog.api.serving.slice_sender import SMALL_BYTES, SendScheduler
from tierlog.host.file_slice import FileSlice
from tierlog.record_format.errors import RequestError

Scope = MutableMapping[str, Any]

IMMEDIATE_MAX_BYTES: Final = SMALL_BYTES
DIRECT_BODY: Final = "tierlog.body"  # the extension of a scope that is a `DirectBody`
_TURN_S: Final = 0.0005  # a few small fetches


class ClientDisconnected(Exception):
    """The client closed the connection, so there is no response to send."""


class ResponseCutShort(Exception):
    """A response has to end before its length. The application has logged why."""


class DirectBody(Protocol):
    """Access to the body of the request in progress that bypasses ASGI's messages."""

    def take_buffered_body(self) -> tuple[bytes | bytearray, bool] | None:
        """Return (the bytes received but not taken yet, whether more follow), or None if a message
        has to be awaited.
        """
        ...

    async def receive_into(
        self, view: memoryview, *, idle_s: float, on_bytes: Callable[[int], None]
    ) -> None:
        """Fill `view`, which is as long as the rest of the body. Raises what
        `BodyReceiver.receive_all` does.
        """
        ...


class ImmediateResponse(NamedTuple):
    """A complete head, followed by either bytes or slices of files."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes = b""
    slices: tuple[FileSlice, ...] = ()


class ImmediateApp(Protocol):
    def try_respond(self, scope: Scope) -> ImmediateResponse | None: ...

    def response_sent(self, scope: Scope, *, unsent: tuple[FileSlice, ...]) -> None: ...


class ReadTurns:
    """Reads that have arrived, in order; each is a call that responds to one."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def add_turn(self, loop: asyncio.AbstractEventLoop, respond: Callable[[], None]) -> None:
        self._waiting.append(respond)
        self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._take_turn, loop)

    def _take_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False
        ends_s = time.perf_counter() + _TURN_S
        try:
            while self._waiting and time.perf_counter() < ends_s:
                self._waiting.popleft()()
        finally:
            self._schedule(loop)


class ConnectionLimits(NamedTuple):
    """`drain_*` limit what is read only to be discarded."""

    connections_max: int
    header_max_bytes: int
    header_timeout_s: float
    drain_max_bytes: int
    drain_timeout_s: float


@dataclass(slots=True, kw_only=True)
class Service:
    """What the connections of one server share.

    `error_response` makes the complete response to bytes that are not a request. `threads` read
    what is sent and not in memory.
    """

    limits: ConnectionLimits
    error_response: Callable[[RequestError], bytes]
    busy_app: Any = None
    immediate_app: ImmediateApp | None = None
    threads: Executor | None = None
    scheduler: SendScheduler = field(default_factory=SendScheduler)
    turns: ReadTurns = field(default_factory=ReadTurns)
    is_stopping: bool = False
