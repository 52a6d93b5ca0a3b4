"""A broker with its HTTP server on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tierlog.api.app import create_app, kafka_listener
from tierlog.api.http.dispatch import TierlogApp
from tierlog.api.http.server import Beside, Tls, configured_server
from tierlog.api.http.settings import HttpSettings
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.api.serving.listening import bind
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.object_store.s3_connection import S3Options
from tierlog.object_store.store import ObjectStore
from tierlog.settings import Settings, described


class RunningServer(NamedTuple):
    url: str
    port: int


class Served(NamedTuple):
    """`kafka_port`: of the Kafka listener; 0 without one."""

    broker: Broker
    server: RunningServer
    app: TierlogApp
    kafka_port: int = 0


@contextmanager
def served_broker(
    data_dir: Path,
    *,
    store: ObjectStore | None = None,
    http: HttpSettings | None = None,
    loop: str = "auto",
    tls: Tls | None = None,
    kafka: KafkaSettings | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """`settings`: the broker's; by default without a disk reserve."""
    given = BrokerSettings(data_dir=data_dir, **{"disk_reserve_bytes": 0, **settings})
    broker = Broker.open(given, store=store)
    try:
        app = create_app(broker, http or HttpSettings())
        sock = bind("127.0.0.1", 0) if kafka is not None else None
        beside = None
        if kafka is not None and sock is not None:
            whole = Settings(
                broker=broker.settings, http=app.context.settings, s3=S3Options(), kafka=kafka
            )
            beside = kafka_listener(app, kafka, sock, configs=described(whole))
        with _running(app, loop=loop, tls=tls, beside=beside) as server:
            yield Served(broker, server, app, sock.getsockname()[1] if sock else 0)
    finally:
        broker.close()


@contextmanager
def _running(
    app: TierlogApp, *, loop: str, tls: Tls | None, beside: Beside | None
) -> Iterator[RunningServer]:
    """In a thread, on a loopback port."""
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    started = threading.Event()
    with configured_server(
        app, tls=tls, beside=beside, on_started=started.set, loop=loop
    ) as server:
        thread = threading.Thread(
            target=server.run, args=([sock],), name="http-server", daemon=True
        )
        thread.start()
        while not started.wait(0.1):
            assert thread.is_alive(), "the server did not start"
        try:
            yield RunningServer(f"{'https' if tls else 'http'}://127.0.0.1:{port}", port)
        finally:
            server.should_exit = True
            thread.join()
