"""The demo's child processes: an S3 server, a broker, a compiler. Each logs to the demo's folder.

* Each runs in its own session: Ctrl-C reaches only the demo, which stops them in order, by process
  id.
* A process that dies early is reported with the end of its log; one that does not get ready in time
  is stopped.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx2

from tierlog.record_format.errors import ConfigurationError

TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0


class ChildProcess:
    """A program of this Python, running until `stop`."""

    def __init__(
        self, name: str, arguments: list[str], *, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own modules
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Raises ConfigurationError if the process exits instead, or on a time-out."""
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while not ready():
                if self._process.poll() is not None:
                    code = self._process.returncode
                    raise ConfigurationError(f"{self.name} exited with {code}: {self._log_tail()}")
                if time.monotonic() > deadline:
                    raise ConfigurationError(f"{self.name} did not start: {self._log_tail()}")
                time.sleep(0.05)
        except BaseException:  # Ctrl-C: the caller does not have the process yet
            self.stop()
            raise

    def wait(self) -> int:
        """Wait for the exit code. Raises ConfigurationError after `TIMEOUT_S`."""
        try:
            return self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(f"{self.name} does not exit: {self._log_tail()}") from error

    def stop(self) -> int:
        """Terminate, after `STOP_TIMEOUT_S` kill; return the exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " ".join(lines[-3:]) or "its log is empty"


def free_port(wanted: int = 0) -> int:
    """`wanted` if it is free, else any free port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
        port: int = sock.getsockname()[1]
        return port


def start_s3_server(folder: Path, environment: Mapping[str, str], *, port: int) -> ChildProcess:
    """Moto's S3 server: in memory, over HTTP."""
    arguments = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    child = ChildProcess("s3-server", arguments, folder=folder, environment=environment)
    child.wait_until(lambda: _is_ready(f"http://127.0.0.1:{port}/"))
    return child


def create_bucket(endpoint: str, bucket: str) -> None:
    """Without a signature, which the demo's server does not require."""
    httpx2.put(f"{endpoint}/{bucket}", trust_env=False).raise_for_status()


def start_broker(
    folder: Path, environment: Mapping[str, str], *, flags: list[str], server: str
) -> ChildProcess:
    arguments = ["-m", "tierlog.cli.main", "serve", *flags]
    child = ChildProcess("broker", arguments, folder=folder, environment=environment)
    child.wait_until(lambda: _is_ready(f"{server}/readyz"))
    return child


def start_compiling(folder: Path, environment: Mapping[str, str]) -> ChildProcess:
    """Compile the Arrow kernel into numba's cache, from which Spark's Python workers load it."""
    work = "from tierlog.record_format.arrow import warm; warm()"
    return ChildProcess("kernel", ["-c", work], folder=folder, environment=environment)


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(url, trust_env=False, timeout=5).status_code == 200
    except httpx2.TransportError:
        return False
