"""Catalogs of Iceberg tables as others run them: Iceberg's REST calls in Java, and PostgreSQL.

Each is a process of its own, and yields the URL that `tierlog table --catalog` takes. What is not
on this machine skips the test, with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.fakes.real_kafka import CACHE, is_available
from tests.fakes.waiting import until

HERE = Path(__file__).parent / "iceberg_rest"


@contextmanager
def rest_catalog(folder: Path) -> Iterator[str]:
    if not is_available():
        pytest.skip("needs mvn, java and javac")
    path = ["java", "-Xmx256m", "-cp", f"{_server()}:{_home()}/libs/*"]
    command = [*path, "org.apache.iceberg.rest.IcebergRest", f"file://{folder}/tables"]
    with (folder / "rest.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    with process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def _home() -> Path:
    version = re.search(r"<iceberg.version>(.+)</", (HERE / "pom.xml").read_text())
    assert version
    return CACHE / f"iceberg-{version[1]}"


def _server() -> Path:
    """The server's classes, which are made once."""
    home, classes = _home(), _home() / "classes"
    if not classes.exists():
        making = home / f"making-{os.getpid()}"
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={home}/libs"]
        subprocess.run(["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), *goal], check=True)
        sources = [str(HERE / "IcebergRest.java")]
        javac = ["javac", "-cp", f"{home}/libs/*", "-d", str(making)]
        subprocess.run([*javac, *sources], check=True)
        try:
            making.rename(classes)
        except OSError:  # made by another meanwhile
            shutil.rmtree(making)
    return classes


@contextmanager
def postgres_catalog(folder: Path) -> Iterator[str]:
    pytest.importorskip("psycopg2", reason="needs psycopg2")
    programs = _postgres()
    sockets = folder / "sockets"  # a path of at most 107 characters
    sockets.mkdir()
    as_other = _not_root()
    init = [programs / "initdb", "-D", folder / "postgres", "-A", "trust", "-U", "postgres", "-N"]
    subprocess.run([*as_other, *init], check=True, capture_output=True)
    serve = [programs / "postgres", "-D", folder / "postgres", "-k", sockets, "-h", "", "-F"]
    with (folder / "postgres.log").open("wb") as log:
        process = subprocess.Popen([*as_other, *serve], stderr=log)
    ready = [programs / "pg_isready", "-q", "-h", sockets]
    with process:
        try:
            until(lambda: subprocess.run(ready, check=False).returncode == 0)
            yield f"postgresql+psycopg2://postgres@/postgres?host={sockets}"
        finally:
            process.send_signal(signal.SIGINT)  # does not wait for those who are connected


def _postgres() -> Path:
    """The folder of its programs, which Debian does not put on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("pg_isready") and shutil.which("postgres")
    if not found and not on_path:
        pytest.skip("needs PostgreSQL")
    return found[-1].parent if found else Path(on_path).parent


def _not_root() -> list[str]:
    """PostgreSQL refuses to be root."""
    if os.getuid():
        return []
    command = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        pytest.skip("PostgreSQL does not run as root, and unshare does not make us another")
    return command


CATALOGS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "rest": rest_catalog,
    "postgres": postgres_catalog,
}
