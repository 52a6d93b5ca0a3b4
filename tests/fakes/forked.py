"""`tierlog …` as a separate process, two seconds faster: it is forked from one that has imported
what it needs, the libraries and tierlog's modules, but none of the compiled kernels. That each
command's module can be imported alone is seen by tests/unit/tierlog/test_main.py.

* One parent per test run, asked over a socket: a fork of pytest would inherit its threads' locks.
* A keeper is in between: it waits for the process, and reports its id and how it ended over a pipe.
  So the caller need not be its parent. Once nobody reads the pipe, the keeper ends the process.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Final, NoReturn

ROOT: Final = Path(__file__).parents[2]
LIBRARIES: Final = (
    *(
        "boto3",
        "cramjam",
        "fastapi",
        "httpcore2",
        "httpx2",
        "jinja2",
        "lz4.frame",
        "msgspec",
        "numba",
        "pydantic",
    ),
    *("pyiceberg.catalog.sql", "pyiceberg.io.pyarrow"),
    *("prometheus_client", "rich.progress", "structlog", "typer", "uvicorn", "uvloop", "zstandard"),
)
IMPORTED_LATE: Final = (
    "tierlog.api.http.cluster.gateway",
    "tierlog.api.http.metrics.cluster_metrics",
    "tierlog.api.http.cluster.peers",
    "tierlog.api.kafka.handlers",
    "tierlog.api.kafka.listener",
    "tierlog.cli.broker_process",
    "tierlog.client.client",
    "tierlog.repair.restore",
)
"""What commands import once they run: for a broker, also what only some of them need."""

MAX_REQUEST: Final = 128 << 10
_NUMBER: Final = struct.Struct("<i")


class Forked:
    """The part of subprocess.Popen that tests use."""

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        cwd: Path | str | None = None,
        env: Mapping[str, str],
        requests: socket.socket | None = None,
    ) -> None:
        self.returncode: int | None = None
        request = json.dumps(
            [list(map(str, arguments)), str(cwd or Path.cwd()), dict(env)]
        ).encode()
        assert len(request) <= MAX_REQUEST
        devnull = os.open(os.devnull, os.O_RDONLY)
        self._status, status = os.pipe()
        fds = [devnull if stdin is None else _number(stdin), _number(stdout), _number(stderr)]
        try:
            socket.send_fds(requests or parent(), [request], [*fds, status])
        finally:
            os.close(devnull)
            os.close(status)
        self.pid = self._read_number()

    def poll(self) -> int | None:
        if self.returncode is None and self._ended(0):
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._ended(timeout):
                raise subprocess.TimeoutExpired("tierlog", timeout or 0)
            self.returncode = self._read_number()
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_s: float | None) -> bool:
        status = select.poll()  # select() takes no descriptor above 1,023
        status.register(self._status, select.POLLIN)
        return bool(status.poll(None if timeout_s is None else timeout_s * 1000))

    def _read_number(self) -> int:
        (number,) = _NUMBER.unpack(os.read(self._status, _NUMBER.size))
        return int(number)


def _number(file: int | IO[bytes]) -> int:
    return file if isinstance(file, int) else file.fileno()


@cache
def parent() -> socket.socket:
    """The parent ends once the other end of its socket is closed, however pytest ended."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.forked", str(its.fileno())],
            pass_fds=[its.fileno()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # runs first: the last registered
    return ours


def _call(requests: socket.socket, arguments: Sequence[str]) -> int:
    """As a program of a shell that inherited the socket: `tierlog` with its files, in its folder
    and environment. It ends with this process, and by the signals that come here.
    """
    process = Forked(arguments, stdin=0, stdout=1, stderr=2, env=os.environ, requests=requests)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda sent, _: process.send_signal(signal.Signals(sent)))
    code = process.wait()
    return code if code >= 0 else 128 - code


# --- the parent -----------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each request. Returns in each child, with its arguments."""
    for name in (*LIBRARIES, *IMPORTED_LATE):
        import_module(name)
    for command in import_module("tierlog.cli.program").COMMANDS.values():
        if not command.extra:
            import_module(f"tierlog.cli.{command.module}")
    import_module("tierlog.api.http.cluster.peers").trusted_for_peers(None)  # read once for all
    _prepare_numba()
    gc.freeze()  # a collection would write to shared pages, and so copy them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        request, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            *standard, status = fds
            _keep(status, standard)
            return _become(request, standard)
        for fd in fds:
            os.close(fd)


def _prepare_numba() -> None:
    """What it does before its first compiled function, in half a second, also for a cached one."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def _keep(status: int, standard: Sequence[int]) -> None:
    """Fork again; the keeper stays in this function until the child has ended."""
    pid = os.fork()
    if pid == 0:
        os.close(status)
        return
    for fd in (*standard, 0, 1, 2):
        os.close(fd)
    os.write(status, _NUMBER.pack(pid))
    ended, poll = os.pidfd_open(pid), select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(status, 0)  # only errors: the caller is gone
    if (ended, select.POLLIN) not in poll.poll():
        os.kill(pid, signal.SIGKILL)
    _, code = os.waitpid(pid, 0)
    os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(code)))
    os._exit(0)


def _become(request: bytes, standard: Sequence[int]) -> list[str]:
    arguments, folder, environment = json.loads(request)
    for target, fd in enumerate(standard):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  the previous one is of another file
    # The test process may ignore these, under `nohup` or a shell's `&`.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return list(arguments)


def _run() -> int:
    try:
        runpy.run_module("tierlog.cli.main", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def _end(code: int) -> NoReturn:
    """As multiprocessing ends its children: tearing down libraries would copy all their pages."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "call":
        sys.exit(_call(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]))
    sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    _end(_run())
