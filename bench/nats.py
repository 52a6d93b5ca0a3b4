"""NATS JetStream as a peer: one server on loopback, a stream in a file, its text protocol by hand.

* In two forms: by default, where an acknowledgement means "in the page cache" (a flush every two
  minutes), and with `sync_interval: always`, where it means "on disk", like ours.
* A request of N records is N prepared PUB lines in one write, and N acknowledgements awaited: what
  its clients call an asynchronous publish with a window of N.
* Reads are pushed by a consumer that acknowledges nothing, its fastest way.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.children import Server, await_port, free_port, peer_program, running

VERSION: Final = "2.15.2"
_INSTALL: Final = f"go install github.com/nats-io/nats-server/v2@v{VERSION}"
_CONFIG: Final = """
listen: "127.0.0.1:{port}"
max_pending: 256MB
jetstream {{ store_dir: "{folder}", sync_interval: {sync} }}
"""
_CONNECT: Final = b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB _I.%d 1\r\nPING\r\n'
_RECEIVE_BYTES: Final = 1 << 20


@contextmanager
def nats(folder: Path, *, durable: bool) -> Iterator[NatsLog]:
    """A server on an empty folder. Raises MissingPeer."""
    path = peer_program("nats-server", "BENCH_NATS", _INSTALL)
    port, name = free_port(), "nats-durable" if durable else "nats"
    config = folder / f"{name}.conf"
    sync = "always" if durable else "2m"
    config.write_text(_CONFIG.format(port=port, folder=folder / name, sync=sync))
    with running([path, "-c", str(config)], log=folder / f"{name}.log") as child:
        await_port(child, port)
        yield NatsLog(Server(child.pid, "127.0.0.1", port))


class NatsLog:
    """Streams of one server, each with one subject of the same name."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def renew(self, log: str) -> None:
        """An empty stream of that name, whatever was there."""
        with _Connection(self._server) as connection:
            connection.ask(f"$JS.API.STREAM.DELETE.{log}", {}, may_fail=True)
            settings = {"name": log, "subjects": [log], "storage": "file"}
            connection.ask(f"$JS.API.STREAM.CREATE.{log}", settings)

    @contextmanager
    def appender(self, log: str, values: list[bytes]) -> Iterator[Callable[[], None]]:
        with _Connection(self._server) as connection:
            lines = [connection.publish(log, value) for value in values]
            request = b"".join(lines)

            def append() -> None:
                connection.sock.sendall(request)
                connection.await_marks(b'"seq":', len(values))

            yield append

    def read(self, log: str, count: int) -> None:
        with _Connection(self._server) as connection:
            connection.sock.sendall(b"SUB _D.%d 2\r\n" % id(connection))
            subject = f"_D.{id(connection)}"
            config = {"deliver_subject": subject, "ack_policy": "none", "deliver_policy": "all"}
            asked = json.dumps({"stream_name": log, "config": config}).encode()
            connection.sock.sendall(connection.publish(f"$JS.API.CONSUMER.CREATE.{log}", asked))
            connection.await_marks(b"$JS.ACK.", count)


class _Connection:
    """One client, and its inbox."""

    def __init__(self, server: Server) -> None:
        self.sock = socket.create_connection((server.host, server.port), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.sendall(_CONNECT % id(self))
        self._await(b"PONG\r\n")

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def publish(self, subject: str, payload: bytes) -> bytes:
        """The bytes of a PUB whose answer comes to this connection's inbox."""
        return b"PUB %s _I.%d %d\r\n%s\r\n" % (subject.encode(), id(self), len(payload), payload)

    def ask(self, subject: str, request: Mapping[str, object], *, may_fail: bool = False) -> None:
        self.sock.sendall(self.publish(subject, json.dumps(request).encode()))
        answer = self._await(b"}\r\n")
        if b'"error"' in answer and not may_fail:
            raise RuntimeError(f"{subject}: {answer[:500]!r}")

    def await_marks(self, mark: bytes, count: int) -> None:
        """Receive until `mark` came `count` times; discard what is in between."""
        buffer = bytearray(_RECEIVE_BYTES)
        kept, view = b"", memoryview(buffer)
        while count > 0:
            data = kept + view[: self.sock.recv_into(view)]
            if len(data) == len(kept) or b"-ERR" in data or b'"error"' in data:
                raise RuntimeError(f"no more of {mark!r}: {data[-500:]!r}")
            if data.endswith(b"PING\r\n"):
                self.sock.sendall(b"PONG\r\n")
            count -= data.count(mark)
            kept = data[-len(mark) + 1 :]

    def _await(self, end: bytes) -> bytes:
        seen = b""
        while not seen.endswith(end):
            data = self.sock.recv(_RECEIVE_BYTES)
            if not data:
                raise RuntimeError(f"the server closed the connection: {seen[-500:]!r}")
            seen += data
        return seen
