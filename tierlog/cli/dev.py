"""`tierlog dev`: a broker with an embedded store, for one person on one machine."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tierlog.client.wire import DEFAULT_SERVER

app = typer.Typer(add_completion=False)


@app.command()
def dev(
    data_dir: Annotated[
        Path, typer.Option(help="Folder for the logs (data) and the embedded store (bucket).")
    ] = Path(".tierlog"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1.")] = 8640,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log each request, and each request to the store.")
    ] = False,
) -> None:
    """Run a broker with an embedded store; no flags needed. Its files are kept when it stops."""
    from tierlog import settings
    from tierlog.cli.broker_process import run_broker
    from tierlog.cli.logs import configure_logs

    folder = data_dir.absolute()
    flags = {
        "data.dir": folder / "data",
        "store": (folder / "bucket").as_uri(),
        "listen": f"127.0.0.1:{port}",
    }
    configure_logs(verbose=verbose)
    loaded = settings.load(flags, os.environ, None)
    run_broker(loaded, announce=lambda url: _announce(url, folder), verbose=verbose)


def _announce(url: str, folder: Path) -> None:
    server = "" if url == DEFAULT_SERVER else f" --server {shlex.quote(url)}"
    sys.stdout.write(
        f"""
  tierlog listens on {url}
  logs and bucket in {folder}; Ctrl-C stops it

  Try, in another terminal:
    tierlog topic create hello{server}
    echo "it works" | tierlog produce hello{server}
    tierlog consume hello{server}

"""
    )
    sys.stdout.flush()
