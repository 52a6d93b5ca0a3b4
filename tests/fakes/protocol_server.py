"""uvicorn with our connections and a given application, in its own thread, on loopback."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn

from tierlog.api.protocol.connection import connection_class
from tierlog.api.protocol.service import Service


class ProtocolServer(NamedTuple):
    uvicorn: uvicorn.Server
    port: int


@contextmanager
def serving_protocol(app: Any, service: Service, **config: Any) -> Iterator[ProtocolServer]:
    given = uvicorn.Config(
        app,
        http=connection_class(service),
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
