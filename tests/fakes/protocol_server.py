"""uvicorn around one protocol and one application, in a thread of its own, on loopback."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn


class ProtocolServer(NamedTuple):
    uvicorn: uvicorn.Server
    port: int


@contextmanager
def serving_protocol(
    app: Any, protocol: type, bound: dict[str, Any], **config: Any
) -> Iterator[ProtocolServer]:
    """`bound`: what the protocol's class is given, as `api.http.server` does it."""
    given = uvicorn.Config(
        app,
        http=type("Bound", (protocol,), bound),
        lifespan="off",
        ws="none",
        log_config=None,
        proxy_headers=False,
        **config,
    )
    server = uvicorn.Server(given)
    sock = socket.create_server(("127.0.0.1", 0))  # listens: who connects early waits its turn
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        yield ProtocolServer(server, sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
