"""The last release, and other trees than this one, run from their own files: their broker and their
command line, with this environment's libraries.
"""

import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.command_line import ENVIRONMENT, ROOT
from tests.fakes.waiting import until
from tierlog import Client

KEPT = ROOT / "tests" / "fixtures" / "last-release"
CHECK = "import tierlog; assert tierlog.__file__.startswith({place!r}), tierlog.__file__\n"
NO_NUMBA = "import sys; sys.modules['numba'] = None\n"
RUN = "from tierlog.cli.main import main; main()\n"


class Tree:
    """`place` has the package `tierlog`; `first` is run before the command."""

    def __init__(self, place: Path, *, first: str = "") -> None:
        self._program = [sys.executable, "-c", CHECK.format(place=str(place)) + first + RUN]
        self._environment = ENVIRONMENT | {"PYTHONPATH": str(place)}

    def run(self, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [*self._program, *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=cwd,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @contextmanager
    def serving(self, *arguments: object, cwd: Path) -> Iterator[Client]:
        """A client of `tierlog serve`, which must start, and stop cleanly."""
        log = cwd / "broker.log"
        command = [*self._program, "serve", "--listen", "127.0.0.1:0", *map(str, arguments)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=cwd, env=self._environment, stdout=out, stderr=out
            )
        try:
            until(lambda: process.poll() is not None or "listens on http" in log.read_text())
            assert process.poll() is None, log.read_text()
            with Client(log.read_text().split("listens on ")[1].split(",")[0]) as client:
                yield client
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def this_tree(*, first: str = "") -> Tree:
    return Tree(ROOT, first=first)


def last_release(folder: Path) -> Tree:
    """Unpacked into `folder`; without kernels, which it would have to compile each time."""
    (archive,) = KEPT.glob("*.tar.xz")
    with tarfile.open(archive) as kept:
        kept.extractall(folder, filter="data")
    return Tree(folder, first=NO_NUMBA)
