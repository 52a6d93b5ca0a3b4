"""A broker with its HTTP server on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import uvicorn

from api.app import create_app
from api.http.dispatch import TierlogApp
from api.http.server import Tls, bind, configured_server
from api.http.settings import HttpSettings
from broker.broker import Broker
from broker.settings import BrokerSettings
from cold_tier.object_store import ObjectStore


class RunningServer:
    """A server in its own thread, on a loopback port."""

    def __init__(self, app: TierlogApp, *, loop: str, tls: Tls | None) -> None:
        self._sock = bind("127.0.0.1", 0)
        self.port: int = self._sock.getsockname()[1]
        self._started = threading.Event()
        self._tls = tls
        self._serving = configured_server(app, tls=tls, on_started=self._started.set, loop=loop)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server = self._serving.__enter__()
        self._thread = threading.Thread(target=self._run, name="http-server", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise RuntimeError("the server did not start") from self._failure
        return self

    def _run(self) -> None:
        assert self._server is not None
        try:
            self._server.run(sockets=[self._sock])
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join()
        self._serving.__exit__(None, None, None)


class Served(NamedTuple):
    broker: Broker
    server: RunningServer
    app: TierlogApp


@contextmanager
def served_broker(
    data_dir: Path,
    *,
    store: ObjectStore | None = None,
    http: HttpSettings | None = None,
    loop: str = "auto",
    tls: Tls | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """`settings`: the broker's; by default without a disk reserve."""
    given = BrokerSettings(data_dir=data_dir, **{"disk_reserve_bytes": 0, **settings})
    broker = Broker.open(given, store=store)
    try:
        app = create_app(broker, http or HttpSettings())
        with RunningServer(app, loop=loop, tls=tls) as server:
            yield Served(broker, server, app)
    finally:
        broker.close()
