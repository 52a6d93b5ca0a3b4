"""Sockets that listen, with and without TLS.

* TLS has a listener of its own, which counts and limits handshakes. asyncio's reports a connection
  only after its handshake: until then each holds a descriptor for up to the handshake timeout, and
  nothing bounds their number.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

BACKLOG: Final = 2048
_ACCEPT_RETRY_S: Final = 1.0  # after a lack of descriptors; as asyncio's own server


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything else is started. No other process can bind
    it from then on. Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            sock.bind((host, port))
        except OSError:
            # Now a predecessor's closed connections do not count. Not at first: many kernels let
            # another process bind an address that was free, even once the option is off again.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        sock.close()
        raise
    return sock


async def listen(
    sock: socket.socket,
    new_protocol: Callable[[], asyncio.BaseProtocol],
    tls: ssl.SSLContext | None,
    *,
    send_idle_timeout_ms: int,
    handshake_timeout_ms: int,
    is_full: Callable[[], bool],
) -> asyncio.Server | TlsServer:
    """Serve on a bound socket. The last two are for TLS: see `TlsServer`."""
    _set_tcp_timeouts(sock, send_idle_timeout_ms=send_idle_timeout_ms)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for this one's successor
    sock.listen(BACKLOG)  # uvloop would not raise the error
    if tls is None:
        loop = asyncio.get_running_loop()
        return await loop.create_server(new_protocol, sock=sock, backlog=BACKLOG)
    sock.setblocking(False)
    return TlsServer(
        sock,
        new_protocol,
        tls,
        handshake_timeout_s=handshake_timeout_ms / 1000,
        is_full=is_full,
    )


def _set_tcp_timeouts(sock: socket.socket, *, send_idle_timeout_ms: int) -> None:
    """Have the kernel end connections whose clients have stopped reading, or no longer exist.

    Connections inherit the options from the listening socket. None of our code runs while a
    response is unread, so a timer of ours would be neither simpler nor safer.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    if user_timeout is not None:
        sock.setsockopt(socket.IPPROTO_TCP, user_timeout, send_idle_timeout_ms)


class TlsServer:
    """The part of the `asyncio.Server` interface that uvicorn uses. Runs until it is closed.

    A connection accepted while `is_full` is closed immediately, and one whose handshake takes
    longer than `handshake_timeout_s` is aborted.
    """

    def __init__(
        self,
        sock: socket.socket,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext,
        *,
        handshake_timeout_s: float,
        is_full: Callable[[], bool],
    ) -> None:
        self._sock, self._new_protocol, self._context = sock, new_protocol, context
        self._handshake_timeout_s, self._is_full = handshake_timeout_s, is_full
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @property
    def handshakes(self) -> int:
        return len(self._handshakes)

    def close(self) -> None:
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait((self._accepting, *self._handshakes))
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._sock)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                loop.call_exception_handler({"message": "accept failed", "exception": error})
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if self._is_full():
                accepted.close()
                continue
            task = loop.create_task(self._handshake(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, accepted: socket.socket) -> None:
        with suppress(OSError):  # includes ssl.SSLError and a handshake timeout
            await asyncio.get_running_loop().connect_accepted_socket(
                self._new_protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
