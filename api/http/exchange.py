"""One request as a handler sees it: the path's parts, the headers, and who is calling.

An exchange exists before there is anything to answer through: `receive` and `send` are set once the
request has a task.

Header names are looked up in lower case. A header that was sent twice is read as both values,
joined by a comma; blanks around a value, which the parser leaves, are not part of it (RFC 9110,
5.5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from api.http import strict_json
from api.http.access.grants import NOBODY, Grant
from api.http.metrics import timings
from api.protocol.at_once import Scope
from api.protocol.body_receive import DIRECT_BODY, DirectBody
from api.protocol.errors import ClientGone
from record_format.errors import FieldProblem, InvalidRequest, UnknownPartition

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


_NO_PARAMS: Final[Mapping[str, str]] = MappingProxyType({})


class Unsent(NamedTuple):
    """Bytes of a response that is ready, and where they wait for the client."""

    memory_bytes: int = 0
    disk_bytes: int = 0


class Exchange:
    __slots__ = (
        "_headers",
        "grant",
        "method",
        "params",
        "receive",
        "request_id",
        "scope",
        "send",
        "started",
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
        self.grant: Grant = NOBODY  # until `access` has said who is calling
        self.template = ""  # of the path, once it is known
        self.started = False  # the head of the response was sent
        self.timings = timings.begin()
        self.unsent = Unsent()

    def header(self, name: bytes) -> str | None:
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1").strip(" \t")

    @property
    def topic(self) -> str:
        return self.params["topic"]

    @property
    def partition(self) -> int:
        return self.number("partition", missing=lambda n: UnknownPartition(self.topic, n))

    def number(self, name: str, *, missing: Callable[[int], Exception] | None = None) -> int:
        """A part of the path that is a whole number of at most 19 digits, plus leading zeros."""
        text = self.params[name]
        value = strict_json.natural(text.removeprefix("-"))
        if value is None:
            said = f"expected a whole number of at most 19 digits, not {text[:64]!r}"
            problem = FieldProblem(name, said)
            raise InvalidRequest(f"{name} in the path: {problem.msg}", problems=(problem,))
        if text.startswith("-"):
            value = -value
        if value < 0 and missing is not None:
            raise missing(value)
        return value

    async def until_gone(self) -> None:
        """Return once the client closed the connection, or its sending side; its body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def watch_for_leaving(self, wake: Callable[[], object]) -> asyncio.Task[None]:
        """Call `wake` when the client leaves. The caller cancels the task."""

        async def watch() -> None:
            await self.until_gone()
            wake()

        return asyncio.get_running_loop().create_task(watch())

    async def next_body_part(self, *, timeout_s: float) -> tuple[bytes | bytearray, bool]:
        """(bytes, more to come). Raises TimeoutError, ClientGone."""
        direct = self.direct_body
        at_hand = None if direct is None else direct.body_at_hand()
        if at_hand is not None:
            return at_hand
        async with asyncio.timeout(timeout_s):
            message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    @property
    def direct_body(self) -> DirectBody | None:
        """If the server has it."""
        direct: DirectBody | None = self.scope.get("extensions", _NO_PARAMS).get(DIRECT_BODY)
        return direct


def _joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    joined: dict[bytes, bytes] = {}
    for name, value in headers:
        joined[name] = b"%b, %b" % (joined[name], value) if name in joined else value
    return joined
