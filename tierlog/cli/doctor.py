"""`tierlog doctor`: checks what tierlog requires of this machine, and how fast its disk flushes.

Each check is a function that returns verdicts. They change nothing, except for an unnamed temporary
file in the data folder.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tierlog.cli.options import CaFile, OutputOption, Token, TokenFile
from tierlog.cli.output import FOUND_PROBLEMS, Output, format_size
from tierlog.extras import OPTIONAL_PACKAGES

SYNCS = 20
MIN_FREE_BYTES = 1 << 30


class Verdict(NamedTuple):
    """`ok`: None if something optional is missing."""

    check: str
    ok: bool | None
    detail: str


def doctor(
    *,
    data_dir: Annotated[
        Path | None, typer.Option(help="A data folder, or where one is to be created.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(envvar="TIERLOG_SERVER", help="A broker to check.")
    ] = None,
    token: Token = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Check this machine for what tierlog requires; exit 3 if something will not work."""
    verdicts = [*_machine(), *_packages(), _java(), *_disk(data_dir or Path())]
    if server is not None:
        verdicts += _broker(server, token, token_file, ca_file)
    healthy = all(verdict.ok is not False for verdict in verdicts)
    words = {True: "ok", False: "PROBLEM", None: "missing"}
    output.table(
        {"ok": healthy, "checks": [verdict._asdict() for verdict in verdicts]},
        ("", "check", ""),
        [(words[verdict.ok], verdict.check, verdict.detail) for verdict in verdicts],
    )
    if not healthy:
        raise typer.Exit(FOUND_PROBLEMS)


def _machine() -> Iterator[Verdict]:
    version = platform.python_version()
    yield Verdict("Python", sys.version_info >= (3, 11), f"{version}; 3.11 or newer is required")
    system = platform.system()
    detail = "Linux is for production, macOS for development"
    yield Verdict(
        "system", system in {"Linux", "Darwin"}, f"{system} {platform.release()}; {detail}"
    )


def _packages() -> Iterator[Verdict]:
    for name, (purpose, extra) in OPTIONAL_PACKAGES.items():
        there = importlib.util.find_spec(name) is not None
        detail = purpose if there else f"{purpose}: pip install 'tierlog[{extra}]'"
        yield Verdict(name, True if there else None, detail)


def _java() -> Verdict:
    from tierlog.record_format.errors import ConfigurationError
    from tierlog.spark_reader.environment import ensure_java

    environment = dict(os.environ)
    try:
        return Verdict("Java", True, f"{ensure_java(environment)} for Spark")
    except ConfigurationError as error:
        return Verdict("Java", None, str(error))


def _disk(folder: Path) -> Iterator[Verdict]:
    if folder.is_file():
        yield Verdict("disk", False, f"{folder} is a file, not a folder")
        return
    while not folder.is_dir():
        folder = folder.absolute().parent
    free = shutil.disk_usage(folder).free
    yield Verdict(
        "disk", free >= MIN_FREE_BYTES, f"{format_size(free)} free at {folder.absolute()}"
    )
    try:
        slowest_ms, median_ms = _time_syncs(folder)
    except OSError as error:
        yield Verdict("fdatasync", False, f"{folder}: {error.strerror}")
        return
    detail = f"{median_ms:.2f} ms, slowest {slowest_ms:.2f} ms: the latency of acks=all"
    yield Verdict("fdatasync", True, detail)


def _time_syncs(folder: Path) -> tuple[float, float]:
    """The slowest and the median of a few flushes, in milliseconds."""
    from tierlog.host.medium import sync_bytes

    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(SYNCS):
            file.write(b"\0" * 4096)
            file.flush()
            began = time.perf_counter()
            sync_bytes(file.fileno())
            times.append((time.perf_counter() - began) * 1000)
    times.sort()
    return times[-1], times[len(times) // 2]


def _broker(
    server: str, token: str | None, token_file: Path | None, ca_file: Path | None
) -> Iterator[Verdict]:
    from tierlog.client.client import Client
    from tierlog.record_format.errors import TierlogError

    try:
        with Client(server, token=token, token_file=token_file, ca_file=ca_file) as client:
            found = client.readiness()
    except TierlogError as error:
        yield Verdict("broker", False, str(error))
        return
    yield Verdict("broker", found.ready, "; ".join(found.reasons) or f"{server} is ready")
    for what in found.degraded:
        yield Verdict("broker", False, f"degraded: {what}")
