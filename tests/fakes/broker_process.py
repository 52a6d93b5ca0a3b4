"""A broker in its own process, as a user starts it: for tests that kill it."""

import os
import secrets
import signal
import socket
from contextlib import suppress
from pathlib import Path

import httpx2

from tests.fakes import waiting
from tests.fakes.forked import ROOT, Forked


def free_port() -> int:
    """Below those that connections are given (net.ipv4.ip_local_port_range), of which one may take
    it before it is listened on.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class BrokerProcess:
    """`tierlog serve` on `root`/data, by default with `root`/bucket as store; the port stays the
    same over restarts.
    """

    def __init__(self, root: Path, *flags: str, store: str | None = None, **env: str) -> None:
        self.root, self.flags, self.port, self.env = root, flags, free_port(), env
        self.store = store or f"file://{root}/bucket"
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Forked | None = None

    def start(self, *, until: str = "/readyz") -> "BrokerProcess":
        command = ["serve", "--data-dir", str(self.root / "data"), "--store", self.store]
        command += ["--listen", f"127.0.0.1:{self.port}", *self.flags]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TIERLOG_")}
        environment |= self.env
        with (self.root / "broker.log").open("ab") as log:
            self.process = Forked(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        self.wait_until_ready(until)
        return self

    def wait_until_ready(self, path: str = "/readyz") -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, (self.root / "broker.log").read_text()[-2000:]
            with suppress(httpx2.TransportError):
                return client.get(f"{self.url}{path}").status_code == 200
            return False

        with httpx2.Client(timeout=2) as client:
            waiting.until(is_ready, patience_s=120)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        return self._end(how)

    def _end(self, how: signal.Signals) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(how)
        code = self.process.wait(60)
        self.process = None
        return code
