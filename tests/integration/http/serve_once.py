"""Run by a test in a process of its own: a broker on the folder given, until a signal."""

import sys
from pathlib import Path

from api.http.app import create_app
from api.http.server import bind, serve
from api.http.settings import HttpSettings
from broker.broker import Broker
from broker.settings import BrokerSettings


def main() -> None:
    settings = HttpSettings(shutdown_timeout_ms=30_000)
    broker = Broker.open(
        BrokerSettings(data_dir=Path(sys.argv[1]), disk_reserve_bytes=0), store=None
    )
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    app = create_app(broker, settings)
    serve(app, settings, sock=sock, on_started=lambda: print(port, flush=True))
    broker.close()


if __name__ == "__main__":
    main()
