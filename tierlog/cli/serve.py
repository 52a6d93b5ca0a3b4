"""`tierlog serve` and `tierlog dev`: a broker on a data folder and a bucket, or with an embedded
store, for one person on one machine. The flags of `serve` are the table of settings.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.options import takes
from tierlog.client.wire import DEFAULT_SERVER
from tierlog.record_format.units import duration_in_words, size_in_words
from tierlog.setting_kinds import Kind
from tierlog.setting_table import TABLE, Part, Setting
from tierlog.settings import DEFAULT_PORT, default_of

if TYPE_CHECKING:
    from tierlog.cli.broker_process import Listening

_KAFKA_PORTS = 100  # that `dev` tries
_PANELS = {
    Part.SERVE: "HTTP",
    Part.STORE: "Bucket",
    Part.BROKER: "Broker",
    Part.PRICE: "Bucket",
    Part.HTTP: "HTTP",
    Part.KAFKA: "Kafka",
}


def _field_name(setting: Setting) -> str:
    return setting.flag_name.removeprefix("--").replace("-", "_")


def _default(setting: Setting) -> str:
    """The default as written after the flag; empty if there is none, or if `doc` explains it."""
    value = default_of(setting)
    if value is None or isinstance(value, bool) or setting.part is Part.PRICE:
        return ""
    if setting.kind is Kind.MS and isinstance(value, int):
        return duration_in_words(value)
    return (
        size_in_words(value)
        if setting.kind is Kind.BYTES and isinstance(value, int)
        else str(value)
    )


def _field(setting: Setting) -> tuple[str, Any, None]:
    switch = setting.kind is Kind.SWITCH
    kind = setting.flag_kind or setting.kind
    option = typer.Option(
        setting.flag_name,
        help=setting.doc,
        metavar=None if switch else kind.placeholder,
        rich_help_panel=_PANELS[setting.part],
        show_default=_default(setting) or False,
    )
    return _field_name(setting), Annotated[bool | None if switch else str | None, option], None


Flags = make_dataclass("Flags", [_field(setting) for setting in TABLE], frozen=True, kw_only=True)


Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port on 127.0.0.1, in place of --listen.",
        rich_help_panel=_PANELS[Part.SERVE],
    ),
]


def _listen(listen: str | None, port: int | None) -> str | None:
    """Raises BadParameter."""
    if listen is not None and port is not None:
        raise typer.BadParameter("give either --listen or --port")
    return listen if port is None else f"127.0.0.1:{port}"


@takes(Flags)
def serve(
    flags: Any,
    *,
    port: Port = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of settings.", metavar="FILE")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log each request, and each request to the store.")
    ] = False,
) -> None:
    """Run a broker, with recent records in a data folder and sealed segments in a bucket.

    Every flag is also a TIERLOG_... variable and a key in the file given by --config; flags win.
    """
    gc.disable()  # until all is loaded: see `broker_process`
    from tierlog import settings
    from tierlog.cli.broker_process import run_broker
    from tierlog.cli.logs import configure_logs

    given = {setting.name: getattr(flags, _field_name(setting)) for setting in TABLE}
    given["listen"] = _listen(flags.listen, port)
    file = config or (Path(found) if (found := os.environ.get("TIERLOG_CONFIG")) else None)
    configure_logs(verbose=verbose)
    loaded = settings.load_settings(given, os.environ, file)
    store = loaded.store_url or "no store: nothing is offloaded"

    def announce(listening: Listening) -> None:
        kafka = f", Kafka clients connect to {listening.kafka}" if listening.kafka else ""
        where = f"tierlog listens on {listening.url}{kafka}, data in {loaded.broker.data_dir}"
        print(f"{where}, {store}", file=sys.stderr, flush=True)

    run_broker(loaded, announce=announce, verbose=verbose)


def dev(
    data_dir: Annotated[
        Path, typer.Option(help="Folder for the logs (data) and the embedded store (bucket).")
    ] = Path(".tierlog"),
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port on 127.0.0.1.", show_default=str(DEFAULT_PORT)),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Another address; it requires tokens."),
    ] = None,
    kafka_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="For Kafka clients; by default the first free port of 127.0.0.1 from 9092 on.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log each request, and each request to the store.")
    ] = False,
) -> None:
    """Run a broker with an embedded store; no flags needed. Its files are kept when it stops."""
    gc.disable()  # until all is loaded: see `broker_process`
    from tierlog import settings
    from tierlog.cli.broker_process import run_broker
    from tierlog.cli.logs import configure_logs

    folder = data_dir.absolute()
    flags = {
        "data.dir": folder / "data",
        "store": (folder / "bucket").as_uri(),
        "listen": _listen(listen, port) or f"127.0.0.1:{DEFAULT_PORT}",
        "kafka.listen": kafka_listen,
    }
    tried = 1
    if kafka_listen is None and "TIERLOG_KAFKA_LISTEN" not in os.environ:
        flags["kafka.listen"], tried = f"127.0.0.1:{settings.KAFKA_PORT}", _KAFKA_PORTS
    configure_logs(verbose=verbose)
    loaded = settings.load_settings(flags, os.environ, None)
    run_broker(
        loaded,
        announce=lambda listening: _announce(listening, folder),
        verbose=verbose,
        kafka_ports=tried,
    )


def _announce(listening: Listening, folder: Path) -> None:
    url, kafka = listening
    server = "" if url == DEFAULT_SERVER else f" --server {shlex.quote(url)}"
    sys.stdout.write(
        f"""
  tierlog listens on {url}
  Kafka clients: bootstrap.servers={kafka}
  logs and bucket in {folder}; Ctrl-C stops it

  Try, in another terminal:
    tierlog topic create hello{server}
    echo "it works" | tierlog produce hello{server}
    tierlog consume hello{server}
    kcat -b {kafka} -C -t hello -e        # or any other Kafka client

"""
    )
    sys.stdout.flush()
