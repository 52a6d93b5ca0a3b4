"""A broker with its HTTP server on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from api.app import create_app
from api.http.server import RunningServer, Tls
from api.http.settings import HttpSettings
from broker.broker import Broker
from broker.settings import BrokerSettings
from cold_tier.object_store import ObjectStore


class Served(NamedTuple):
    broker: Broker
    server: RunningServer
    app: Any


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
        app = create_app(broker, http := http or HttpSettings())
        with RunningServer(app, http, loop=loop, tls=tls) as server:
            yield Served(broker, server, app)
    finally:
        broker.close()
