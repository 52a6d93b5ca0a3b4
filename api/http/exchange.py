"""One request as a handler sees it: path parameters, headers, and what the caller may do.

`receive` and `send` are set once the request has a task.

Header names are looked up in lower case. A repeated header is read as its values joined by commas
(RFC 9110, 5.2); whitespace around a value, which the parser leaves, is not part of it (5.5).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeVar

from tierlog.api.http import strict_json
from tierlog.api.protocol.service import DIRECT_BODY, ClientDisconnected, DirectBody, Scope
from tierlog.api.serving.grants import NOBODY, Grant
from tierlog.record_format.errors import FieldProblem, InvalidRequest, UnknownPartition

T = TypeVar("T")
FORWARDED: Final = b"tierlog-forwarded"  # by the broker with this node id
_ROUTE: Final = b"tierlog-route"
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


_NO_PARAMS: Final[Mapping[str, str]] = MappingProxyType({})


Part = Literal["broker", "store", "encode"]


class Timings:
    """How long each part of a request took, for the `Server-Timing` header, in milliseconds.

    `broker`: the log and the local disk, including the wait for a flush. `store`: reads from the
    cold tier. `encode`: encoding and decoding records as text. `total`: from the head of the
    request to the head of the response; it alone includes the wait of a long poll.
    """

    __slots__ = ("_began_s", "broker", "encode", "store")

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self.broker = self.store = self.encode = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    def add_time(self, part: Part, began_s: float) -> None:
        """Add the time since `began_s`, a value of `time.perf_counter`."""
        setattr(self, part, getattr(self, part) + time.perf_counter() - began_s)

    def header(self) -> bytes:
        parts = [b"total;dur=%.3f" % (self.elapsed_s * 1000)]
        if self.broker:
            parts.append(b"broker;dur=%.3f" % (self.broker * 1000))
        if self.store:
            parts.append(b"store;dur=%.3f" % (self.store * 1000))
        if self.encode:
            parts.append(b"encode;dur=%.3f" % (self.encode * 1000))
        return b", ".join(parts)


_TIMINGS: ContextVar[Timings | None] = ContextVar("tierlog_timings", default=None)


def record_time(part: Part, began_s: float) -> None:
    """Add the time since `began_s` to the current request's timings."""
    timings = _TIMINGS.get()
    if timings is not None:
        timings.add_time(part, began_s)


class UnsentBytes(NamedTuple):
    """The size of responses that their clients have not read yet, by where they are held."""

    memory_bytes: int = 0
    disk_bytes: int = 0


class KeptBody(NamedTuple):
    """`release`: its bytes count as in flight until then."""

    body: bytes | bytearray
    release: Callable[[], None]


class Exchange:
    __slots__ = (
        "_given_back",
        "_headers",
        "grant",
        "head_sent",
        "is_spent",
        "keeps_body",
        "kept",
        "method",
        "params",
        "receive",
        "request_id",
        "scope",
        "send",
        "template",
        "timings",
        "unsent",
    )

    receive: Receive
    send: Send

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.request_id = ""
        self.method: str = scope["method"]
        headers = scope["headers"]
        self._headers: dict[bytes, bytes] = dict(headers)
        if len(self._headers) < len(headers):
            self._headers = _joined(headers)
        self.params: Mapping[str, str] = _NO_PARAMS
        self.grant: Grant = NOBODY  # until `access` has authenticated the caller
        self.template = ""  # of the path, once it is routed
        self.head_sent = False  # of the response
        self.timings = Timings()
        _TIMINGS.set(self.timings)
        self.unsent = UnsentBytes()
        self.keeps_body = False  # once received, until the end: it may be sent to another broker
        self.kept: KeptBody | None = None
        self._given_back: tuple[bytes, bool] | None = None
        self.is_spent = False  # of its body a part was received that nobody has any more

    def header(self, name: bytes) -> str | None:
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1").strip(" \t")

    def query(self, kind: type[T]) -> T:
        """The query's parameters as this struct. Raises InvalidRequest."""
        return strict_json.parse_query(self.scope["query_string"], kind)

    @property
    def topic(self) -> str:
        return self.params["topic"]

    @property
    def partition(self) -> int:
        return self.number("partition", missing=lambda n: UnknownPartition(self.topic, n))

    def number(self, name: str, *, missing: Callable[[int], Exception] | None = None) -> int:
        """A path parameter that is a whole number of at most 19 digits, plus leading zeros."""
        text = self.params[name]
        value = strict_json.parse_natural(text.removeprefix("-"))
        if value is None:
            msg = f"expected a whole number of at most 19 digits, not {text[:64]!r}"
            raise InvalidRequest(f"{name} in the path: {msg}", problems=(FieldProblem(name, msg),))
        if text.startswith("-"):
            value = -value
        if value < 0 and missing is not None:
            raise missing(value)
        return value

    @property
    def is_forwarded(self) -> bool:
        """By another broker of the cluster: to be carried out here, or nowhere."""
        return FORWARDED in self._headers

    @property
    def is_direct(self) -> bool:
        """The client follows the leaders itself (`Tierlog-Route: direct`), or is a broker."""
        return self.is_forwarded or self.header(_ROUTE) == "direct"

    def release_body(self) -> None:
        if self.kept is not None:
            self.kept.release()
            self.kept = None

    async def wait_for_disconnect(self) -> None:
        """Return once the client has closed the connection, or its sending side. Call after the
        request's body was read.
        """
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def next_body_part(self, *, timeout_s: float) -> tuple[bytes | bytearray, bool]:
        """(bytes, whether more follow). Raises TimeoutError, ClientDisconnected."""
        given, self._given_back = self._given_back, None
        direct = self.direct_body if given is None or given[1] else None
        buffered = None if direct is None else direct.take_buffered_body()
        if given is not None:
            return (given[0] + buffered[0], buffered[1]) if buffered is not None else given
        if buffered is not None:
            return buffered
        async with asyncio.timeout(timeout_s):
            message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        return message.get("body", b""), message.get("more_body", False)

    def give_back(self, part: bytes, *, more: bool) -> None:
        """The body's beginning: `next_body_part` returns it again. `more`: the rest is to come."""
        self._given_back = part, more

    @property
    def direct_body(self) -> DirectBody | None:
        """None if the server does not offer it."""
        direct: DirectBody | None = self.scope.get("extensions", _NO_PARAMS).get(DIRECT_BODY)
        return direct


def _joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    return {name: b", ".join(given) for name, given in values.items()}
