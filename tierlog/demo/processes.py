"""The demo's own processes: an S3 server, a broker, and one that compiles; each logs to the demo's
folder.

* Each runs in its own session, so that Ctrl-C reaches only the demo, which then stops them in
  order; they are ended by process id, never by name.
* A process that dies early is reported with the end of its log; one for which the demo stops
  waiting is stopped.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

from record_format.errors import ConfigurationError

PATIENCE_S = 60.0


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
        """Raises ConfigurationError if it ends instead, or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        try:
            while not ready():
                if self._process.poll() is not None:
                    code = self._process.returncode
                    raise ConfigurationError(f"{self.name} ended with {code}: {self._last_words()}")
                if time.monotonic() > deadline:
                    raise ConfigurationError(f"{self.name} did not start: {self._last_words()}")
                time.sleep(0.05)
        except BaseException:  # Ctrl-C: the caller never gets the process
            self.stop()
            raise

    def wait(self) -> int:
        """Its exit code, once it has ended by itself. Raises ConfigurationError after a minute."""
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(f"{self.name} does not end: {self._last_words()}") from error

    def stop(self, *, patience_s: float = 40.0) -> int:
        """SIGTERM, then SIGKILL if it does not end; its exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " ".join(lines[-3:]) or "it said nothing"


def free_port(wanted: int = 0) -> int:
    """`wanted` if nobody listens on it, else any free port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
        port: int = sock.getsockname()[1]
        return port


def start_s3_server(folder: Path, environment: Mapping[str, str], *, port: int) -> ChildProcess:
    """Moto's S3 server, in memory, over real HTTP."""
    arguments = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    child = ChildProcess("s3-server", arguments, folder=folder, environment=environment)
    child.wait_until(lambda: _answers(f"http://127.0.0.1:{port}/"))
    return child


def create_bucket(endpoint: str, bucket: str) -> None:
    """By plain HTTP: the demo's server needs no signature."""
    httpx.put(f"{endpoint}/{bucket}", trust_env=False).raise_for_status()


def start_broker(
    folder: Path, environment: Mapping[str, str], *, flags: list[str], server: str
) -> ChildProcess:
    arguments = ["-m", "tierlog.cli.main", "serve", *flags]
    child = ChildProcess("broker", arguments, folder=folder, environment=environment)
    child.wait_until(lambda: _answers(f"{server}/readyz"))
    return child


def start_compiling(folder: Path, environment: Mapping[str, str]) -> ChildProcess:
    """Compile the Arrow kernel into numba's cache, from which Spark's Python workers load it."""
    work = "from record_format.arrow import warm; warm()"
    return ChildProcess("kernel", ["-c", work], folder=folder, environment=environment)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
