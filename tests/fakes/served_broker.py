"""A broker with its HTTP server on loopback."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tierlog.api.app import create_app, kafka_listener
from tierlog.api.http.cluster.peers import HttpPeers
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
    peer_token: str = "",
    **settings: Any,
) -> Iterator[Served]:
    """`settings`: the broker's; by default without a disk reserve. The addresses that a broker of
    a cluster registers are those that it listens on.
    """
    http_sock = bind("127.0.0.1", 0)
    sock = bind("127.0.0.1", 0) if kafka is not None else None
    given = BrokerSettings(
        data_dir=data_dir,
        **{
            "disk_reserve_bytes": 0,
            "advertised_url": f"{'https' if tls else 'http'}://{_address(http_sock)}",
            "advertised_kafka": _address(sock) if sock is not None else "",
            **settings,
        },
    )
    try:
        ca_file = http.peers_ca_file if http is not None else None
        peers = HttpPeers(token=peer_token, ca_file=ca_file) if given.cluster_join else None
        broker = Broker.open(given, store=store, peers=peers)
    except BaseException:
        http_sock.close()
        if sock is not None:
            sock.close()
        raise
    try:
        app = create_app(broker, http or HttpSettings())
        beside = None
        if kafka is not None and sock is not None:
            whole = Settings(
                broker=broker.settings, http=app.context.settings, s3=S3Options(), kafka=kafka
            )
            beside = kafka_listener(app, kafka, sock, configs=described(whole))
        with _running(app, http_sock, loop=loop, tls=tls, beside=beside) as server:
            yield Served(broker, server, app, sock.getsockname()[1] if sock else 0)
    finally:
        broker.close()


def _address(sock: socket.socket) -> str:
    return "127.0.0.1:{1}".format(*sock.getsockname())


@contextmanager
def _running(
    app: TierlogApp, sock: socket.socket, *, loop: str, tls: Tls | None, beside: Beside | None
) -> Iterator[RunningServer]:
    """In a thread, on a loopback port."""
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
