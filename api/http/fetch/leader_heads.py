"""Asks leaders where their logs begin and end, by HEADs over one connection to each: for a fraction
of what a client library's request costs.

* An answer is newer than the question of everybody who gets it: whoever asks while a request is on
  its way waits for the next one, which is sent once for all who ask the same.
* One question at a time is on its way; one that fails, or waits too long, closes the connection.
* Only the answers of our own server are understood, and they have no body.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from tierlog.record_format.errors import PeerUnavailable

ANSWER_TIMEOUT_S: Final = 1.0
HEAD_MAX_BYTES: Final = 64 << 10
_END: Final = b"\r\n\r\n"
_FAILURES: Final = (
    OSError,
    ValueError,
    TimeoutError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
)


class Head(NamedTuple):
    status: int
    headers: Mapping[str, str]


class Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class LeaderHeads:
    """Of one broker. Used on the event loop only."""

    def __init__(self, url: str, trusted: ssl.SSLContext) -> None:
        parts = urlsplit(url)
        self._host, self._is_tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._authority, self._trusted = parts.netloc.encode(), trusted
        self._connection: Connection | None = None
        self._in_turn = asyncio.Lock()
        self._next: dict[bytes, asyncio.Task[Head]] = {}

    async def ask(self, request: bytes) -> Head:
        """`request`: all of a HEAD but its `Host` and the empty line. Raises PeerUnavailable."""
        asked = self._next.get(request)
        if asked is None:
            asked = self._next[request] = asyncio.ensure_future(self._ask(request))
            asked.add_done_callback(_retrieved)
        return await asyncio.shield(asked)

    async def _ask(self, request: bytes) -> Head:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S), self._in_turn:
                del self._next[request]
                return await self._send(request)
        except _FAILURES as error:
            detail = f"the broker at {self._authority.decode()}: {error or type(error).__name__}"
            raise PeerUnavailable(detail) from error
        finally:
            if self._next.get(request) is asyncio.current_task():  # its turn did not come
                del self._next[request]

    async def _send(self, request: bytes) -> Head:
        whole = b"%b\r\nhost: %b%b" % (request, self._authority, _END)
        try:
            if self._connection is not None:
                with suppress(OSError, asyncio.IncompleteReadError):  # closed while it rested
                    return await self._exchange(self._connection, whole)
                self.close()
            self._connection = await self._connect()
            return await self._exchange(self._connection, whole)
        except BaseException:  # an answer may still come, to the wrong question
            self.close()
            raise

    async def _connect(self) -> Connection:
        trusted = self._trusted if self._is_tls else None
        found = await asyncio.open_connection(
            self._host, self._port, ssl=trusted, limit=HEAD_MAX_BYTES
        )
        return Connection(*found)

    async def _exchange(self, connection: Connection, whole: bytes) -> Head:
        connection.writer.write(whole)
        return _parse(await connection.reader.readuntil(_END))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.writer.close()
            self._connection = None


def _parse(head: bytes) -> Head:
    """Raises ValueError."""
    first, *lines = head[: -len(_END)].decode("latin-1").split("\r\n")
    _, status, *_ = first.split(" ", 2)
    fields = (line.partition(":") for line in lines)
    return Head(int(status), {name.lower(): value.strip() for name, _, value in fields})


def _retrieved(asked: asyncio.Task[Head]) -> None:
    """All who asked may have gone."""
    if not asked.cancelled():
        asked.exception()
