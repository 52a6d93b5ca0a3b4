"""A real broker in its own process, and the command line in others."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import httpx2

from tests.fakes import fast_jvm
from tests.fakes.forked import Forked

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **{
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TIERLOG_") and name != "COLUMNS"  # which pytest's workers set
    },
    "PYTHONPATH": str(ROOT),
    **fast_jvm.ENVIRONMENT,
}
Ended = Callable[[], subprocess.CompletedProcess]


class Program:
    """`tierlog` with a server in its environment."""

    def __init__(self, server: str = "") -> None:
        self.environment = ENVIRONMENT | ({"TIERLOG_SERVER": server} if server else {})
        self.server = server

    @contextlib.contextmanager
    def started(self, *arguments, cwd=None) -> Iterator[tuple[IO[bytes], Ended]]:
        """Yields its standard input, and a function that closes it and waits for the result."""
        read, write = os.pipe()
        with TemporaryFile() as out, TemporaryFile() as err, open(write, "wb", 0) as stdin:
            try:
                process = Forked(
                    arguments, stdin=read, stdout=out, stderr=err, cwd=cwd, env=self.environment
                )
            finally:
                os.close(read)

            def ended() -> subprocess.CompletedProcess:
                stdin.close()
                code = process.wait(120)
                out.seek(0)
                err.seek(0)
                return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

            try:
                yield stdin, ended
            finally:
                process.kill()

    def run(self, *arguments, stdin: bytes = b"", cwd=None) -> subprocess.CompletedProcess:
        with self.started(*arguments, cwd=cwd) as (pipe, ended):
            with contextlib.suppress(BrokenPipeError):
                pipe.write(stdin)
            return ended()

    def ok(self, *arguments, stdin: bytes = b"") -> bytes:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def answer_prompt(self, answer: str, *arguments) -> tuple[int, str]:
        """Run it on a terminal, and type the answer: its exit code and output."""
        ours, theirs = pty.openpty()
        try:
            process = Forked(
                arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=self.environment
            )
        finally:
            os.close(theirs)
        os.write(ours, answer.encode() + b"\n")
        shown = b""
        with open(ours, "rb", 0) as terminal, contextlib.suppress(OSError):  # EIO at the end
            while piece := terminal.read(4096):
                shown += piece
        return process.wait(60), shown.decode()

    def fails(self, code: int, *arguments, stdin: bytes = b"") -> str:
        """Run it, expect this exit code, and return its one line on stderr."""
        done = self.run(*arguments, stdin=stdin)
        message = done.stderr.decode()
        assert done.returncode == code, message
        assert message.count("\n") == 1, message
        assert message.startswith("tierlog: "), message
        return message


class Terminal:
    """`tierlog …` on a terminal of its own, 40 lines of 120 columns; `stdin` may be a pipe."""

    def __init__(self, *arguments, environment, stdin: int | None = None) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.shown = b""
        try:
            self._process = Forked(
                arguments,
                stdin=theirs if stdin is None else stdin,
                stdout=theirs,
                stderr=theirs,
                env=environment | {"TERM": "xterm"},
            )
        finally:
            os.close(theirs)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait_for(self, text: str) -> None:
        """Read until the text appears in what was not read yet."""
        unread = b""
        while text.encode() not in unread:
            piece = self._read()
            assert piece, f"{text!r} was never shown: {self.shown!r}"
            unread += piece

    def _read(self) -> bytes:
        try:
            piece = os.read(self._ours, 1 << 16)
        except OSError:  # EIO at the end
            return b""
        self.shown += piece
        return piece

    def ended(self) -> int:
        """Read to the end; its exit code."""
        while self._read():
            pass
        try:
            return self._process.wait(60)
        finally:
            self.was_restored = self.reads_lines()
            os.close(self._ours)

    def reads_lines(self) -> bool:
        """Whether keys wait for a line break, as a shell needs it."""
        return bool(termios.tcgetattr(self._ours)[3] & termios.ICANON)


class RunningBroker:
    """`tierlog …`, running until `stop`; `server` is the URL of its ready line."""

    def __init__(self, *arguments, cwd: Path) -> None:
        self.log = (cwd / "broker.log").open("ab")
        self.process = Forked(arguments, stdout=self.log, stderr=self.log, cwd=cwd, env=ENVIRONMENT)
        try:
            self.server = self._wait(cwd / "broker.log")
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def _wait(self, log: Path) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for line in log.read_text().splitlines():
                if "listens on http" in line:
                    server = line.split("listens on ")[1].split(",")[0].strip()
                    ready = httpx2.get(f"{server}/readyz", trust_env=False, verify=False)
                    if ready.status_code == 200:
                        return server
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.02)
        raise AssertionError(log.read_text())

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.log.close()
