"""A TLS server that counts and limits connections in their handshake.

asyncio's own server reports a connection only after its handshake: until then each holds a
descriptor for up to the handshake timeout, and nothing bounds their number.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_ACCEPT_RETRY_S: Final = 1.0  # after a lack of descriptors; as asyncio's own server


class TlsServer:
    """The part of the `asyncio.Server` interface that uvicorn uses. Runs until it is closed.

    A connection accepted while `is_full` is closed immediately, and one whose handshake takes
    longer than `handshake_timeout_s` is aborted.
    """

    def __init__(
        self,
        sock: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
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
