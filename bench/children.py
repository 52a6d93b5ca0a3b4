"""Servers as child processes on loopback, on ports that the system picks.

* Each is a context manager: leaving it stops the child, and kills it if it does not stop.
* Ours is `tierlog serve` as a user starts it, with its defaults except for the flags of a claim.
* A peer that is not installed raises MissingPeer, which names the package that has it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
START_TIMEOUT_S: Final = 60
_PACKAGES: Final = {
    "nginx": "Debian's package nginx-light or nginx",
    "wrk": "Debian's package wrk",
}


class MissingPeer(Exception):
    """A peer, or a measuring program, is not installed."""


class Server(NamedTuple):
    pid: int
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def program(name: str) -> str:
    """Path of an installed program. Raises MissingPeer."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise MissingPeer(f"{name} is not installed: {_PACKAGES.get(name, name)} has it")
    return found


def peer_program(name: str, variable: str, install: str) -> str:
    """Path of a peer that no distribution packages, from `variable` or PATH."""
    found = shutil.which(os.environ.get(variable) or name)
    if found is None:
        raise MissingPeer(f"{name} is not installed: `{install}`, or name it in {variable}")
    return found


@contextmanager
def running(command: Sequence[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(40)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def broker(folder: Path, *flags: str) -> Iterator[Server]:
    """`tierlog serve` with its data and its bucket under `folder`."""
    log = folder / "broker.log"
    command = [sys.executable, "-m", "tierlog.cli.main", "serve"]
    command += ["--data-dir", str(folder / "data"), "--store", f"file://{folder / 'bucket'}"]
    command += ["--listen", "127.0.0.1:0", "--disk-reserve-bytes", "0", *flags]
    with running(command, log=log) as child:
        yield Server(child.pid, "127.0.0.1", _announced_port(child, log))


def _announced_port(child: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and child.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("tierlog listens on "):
                return int(line.split()[3].rstrip(",").rpartition(":")[2])
        time.sleep(0.02)
    raise RuntimeError(f"the broker did not start: {log.read_text()[-2000:]}")


_NGINX_CONFIG: Final = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_requests 100000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@contextmanager
def nginx(folder: Path, *, root: Path) -> Iterator[Server]:
    """One nginx process that serves `root` with sendfile."""
    path = program("nginx")
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_NGINX_CONFIG.format(folder=folder, root=root, port=port))
    command = [path, "-p", str(folder), "-e", str(folder / "nginx-error.log"), "-c", str(config)]
    with running(command, log=folder / "nginx.log") as child:
        await_port(child, port)
        yield Server(child.pid, "127.0.0.1", port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def await_port(child: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"{child.args!r} did not open port {port}")
