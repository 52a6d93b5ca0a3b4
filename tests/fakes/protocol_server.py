"""uvicorn with a given protocol and application, in its own thread, on loopback."""

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
    """`bound`: attributes for the protocol's class, as in `api.http.server`."""
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
    sock = socket.create_server(("127.0.0.1", 0))  # listens: early connections wait
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        yield ProtocolServer(server, sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
