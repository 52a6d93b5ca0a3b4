"""The blocks of a page that are commands or programs, and a shell to run them in as printed.

`<!-- tour: KIND -->` stands above each: `run` (a shell), `python`, `serve` (starts the broker,
which the test did), and `shown: WHY` where a block cannot run here. Those of
docs/guides/kafka-clients.md have the kinds of tests/judges/test_clients_of_the_guide.py.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.fakes import forked
from tests.fakes.command_line import ENVIRONMENT

BLOCK = re.compile(r"^<!-- tour: (\w+)(?:: [^\n]+)? -->\n```\w+\n(.*?)^```", re.M | re.S)


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """(kind, text) of each, in order."""
    return BLOCK.findall(page.read_text())


class Shell:
    """A folder with `tierlog` and `python` on the path, and a broker to talk to."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder = folder
        self.server = server
        self._programs = folder / ".programs"
        self._programs.mkdir()
        self._forks = forked.parent()
        call = f'"{sys.executable}" -IS "{forked.__file__}" call {self._forks.fileno()}'
        self._add_program("tierlog", f'exec {call} "$@"')
        for name in ("python", "python3"):
            self._add_program(name, f'exec "{sys.executable}" "$@"')

    def _add_program(self, name: str, line: str) -> None:
        path = self._programs / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def run(self, kind: str, script: str, **variables: str) -> str:
        """What the block printed; it must not fail."""
        program = ["bash", "-e", "-o", "pipefail", "-s"] if kind == "run" else ["python", "-"]
        path = f"{self._programs}:{ENVIRONMENT['PATH']}"
        process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=ENVIRONMENT | {"PATH": path, "TIERLOG_SERVER": self.server} | variables,
            pass_fds=[self._forks.fileno()],
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(
                script.replace("http://127.0.0.1:8640", self.server), timeout=600
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left in the background
            process.wait()
        assert process.returncode == 0, f"{process.returncode}\n{out}\n{err}"
        return out
