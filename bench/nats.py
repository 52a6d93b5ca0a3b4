"""NATS JetStream as a peer: one server on loopback, streams in files, its text protocol by hand.

* Two configurations: by default an acknowledgement means "in the page cache" (a flush every two
  minutes); with `sync_interval: always` it means "on disk", like ours.
* A request of N records is N prepared PUB lines in one write, and waits for N acknowledgements:
  what its clients call an asynchronous publish with a window of N.
* Reads are pushed by a consumer without acknowledgements, the fastest kind.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.children import Server, await_port, free_port, peer_program, running
from bench.wire import Append

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

    def recreate(self, log: str) -> None:
        """Create an empty stream of that name, in place of an existing one."""
        with _Connection(self._server) as connection:
            connection.request(f"$JS.API.STREAM.DELETE.{log}", {}, may_fail=True)
            settings = {"name": log, "subjects": [log], "storage": "file"}
            connection.request(f"$JS.API.STREAM.CREATE.{log}", settings)

    @contextmanager
    def appender(self, log: str, values: list[bytes]) -> Iterator[Append]:
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
            request = json.dumps({"stream_name": log, "config": config}).encode()
            connection.sock.sendall(connection.publish(f"$JS.API.CONSUMER.CREATE.{log}", request))
            connection.await_marks(b"$JS.ACK.", count)


class _Connection:
    """One client with an inbox."""

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
        """The bytes of a PUB whose response goes to this connection's inbox."""
        return b"PUB %s _I.%d %d\r\n%s\r\n" % (subject.encode(), id(self), len(payload), payload)

    def request(
        self, subject: str, document: Mapping[str, object], *, may_fail: bool = False
    ) -> None:
        self.sock.sendall(self.publish(subject, json.dumps(document).encode()))
        response = self._await(b"}\r\n")
        if b'"error"' in response and not may_fail:
            raise RuntimeError(f"{subject}: {response[:500]!r}")

    def await_marks(self, mark: bytes, count: int) -> None:
        """Receive until `mark` has arrived `count` times; discard everything else."""
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
