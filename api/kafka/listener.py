"""The Kafka listener: one socket on the HTTP server's event loop, and its connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

from tierlog.api.kafka.calls import Calls, Row, Session
from tierlog.api.kafka.connection import SCRATCH_BYTES, KafkaConnection
from tierlog.api.kafka.context import KafkaContext
from tierlog.api.serving.listening import TlsServer, listen
from tierlog.api.serving.slice_sender import SendScheduler
from tierlog.record_format.kafka_messages.apis import api_of


class KafkaListener:
    """Serves on a bound socket from `start` to `stop`."""

    def __init__(self, context: KafkaContext, calls: Calls, sock: socket.socket) -> None:
        self.context, self.calls = context, calls
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.scheduler = SendScheduler()
        self._sock = sock
        self._server: asyncio.Server | TlsServer | None = None
        self._connections: set[KafkaConnection] = set()
        self._all_ended: asyncio.Event | None = None  # set while it stops

    async def start(self, tls: ssl.SSLContext | None) -> None:
        settings = self.context.settings
        self._server = await listen(
            self._sock,
            lambda: KafkaConnection(self),
            tls,
            send_idle_timeout_ms=settings.send_idle_timeout_ms,
            handshake_timeout_ms=settings.request_idle_timeout_ms,
            is_full=lambda: len(self._connections) >= settings.connections_max,
        )

    async def stop(self, timeout_s: float) -> None:
        """Accept nothing more, answer what was begun, and close what is left after the time."""
        if self._server is not None:
            self._server.close()
        self._all_ended = asyncio.Event()
        for connection in list(self._connections):
            connection.end()
        if self._connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        for connection in list(self._connections):
            connection.abort()

    def add_connection(self, connection: KafkaConnection) -> bool:
        """Whether there is room for it."""
        self._connections.add(connection)
        self.context.counts.connections = len(self._connections)
        return len(self._connections) <= self.context.settings.connections_max

    def remove_connection(self, connection: KafkaConnection) -> None:
        self._connections.discard(connection)
        self.context.counts.connections = len(self._connections)
        if self._all_ended is not None and not self._connections:
            self._all_ended.set()

    def is_alone(self) -> bool:
        return len(self._connections) <= 1

    def frame_max_bytes(self, session: Session) -> int:
        settings = self.context.settings
        return (
            settings.request_max_bytes
            if session.is_authenticated
            else settings.first_request_max_bytes
        )

    def row_of(self, frame: bytearray) -> Row | None:
        """The row of the frame's API; None if it is not served."""
        api = api_of(int.from_bytes(frame[:2], "big", signed=True))
        return None if api is None else self.calls.get(api.name)
