"""The README and the tour that follows it, as a newcomer runs them: `python3 .ci/tour.py`.

* From an empty folder: a clone of the commit, a fresh environment, and the pages' own commands in
  their order, both installs among them. Only the port is another, and `tierlog dev` is put into the
  background: the pages say "in another terminal".
* A block that is marked `shown` is not run, but for the README's, which is Spark's install.
* No libraries: the environment of the tests is what a newcomer does not have.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README, TOUR = "README.md", "docs/guides/tour.md"
SPARK_INSTALL = "pip install '.[spark]'\n"
BLOCK = re.compile(r"^<!-- tour: (\w+)(?:: [^\n]+)? -->\n```(?:sh|python)\n(.*?)^```", re.M | re.S)
READY_S = 60
BLOCK_S = 1800  # an install may have 660 MB to fetch
EXPECTED = (
    ('"value":"1000"', "a record over HTTP"),
    ('"remaining_segments":0', "an upload"),
    ("|   999|", "Spark's last row"),
    ('"records":20000', "the tour's lines"),
    ("RecordMetadata(topic='orders'", "the tour's producer"),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def blocks(clone: Path) -> list[tuple[str, str]]:
    """(kind, text) of each block to run, in order."""
    found = BLOCK.findall((clone / README).read_text()) + BLOCK.findall((clone / TOUR).read_text())
    return [
        (("run", text) if text == SPARK_INSTALL else (kind, text))
        for kind, text in found
        if kind != "shown" or text == SPARK_INSTALL
    ]


class Newcomer:
    def __init__(self, clone: Path) -> None:
        self.clone, self.server = clone, f"http://127.0.0.1:{free_port()}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIERLOG_", "PYTHON"))}
        path = f"{clone}/.venv/bin:{kept['PATH']}"
        server = {"TIERLOG_SERVER": self.server, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.environment = kept | server | {"PATH": path}
        self.broker: subprocess.Popen[bytes] | None = None

    def follow(self, kind: str, text: str) -> str:
        text = text.replace("http://127.0.0.1:8640", self.server)
        if kind != "serve":
            return self.run(["bash", "-e"] if kind == "run" else ["python", "-"], text)
        *before, start = text.splitlines()
        said = self.run(["bash", "-e"], "\n".join(before))
        self.serve(start.partition("#")[0])
        return said

    def run(self, command: list[str], text: str) -> str:
        done = subprocess.run(  # noqa: S603
            command,
            input=text,
            cwd=self.clone,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BLOCK_S,
            check=False,
        )
        if done.returncode:
            sys.exit(f"tour: exit code {done.returncode} of\n{text}\n{done.stdout}")
        return done.stdout

    def serve(self, line: str) -> None:
        command = ["bash", "-c", f"exec {line} --port {self.server.rpartition(':')[2]}"]
        log, deadline = self.clone / "broker.log", time.monotonic() + READY_S
        with log.open("wb") as out:
            self.broker = subprocess.Popen(  # noqa: S603
                command, cwd=self.clone, env=self.environment, stdout=out, stderr=out
            )
        while "listens on" not in log.read_text():
            if self.broker.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"tour: {line.strip()} does not listen\n{log.read_text()}")
            time.sleep(0.05)

    def stop(self) -> None:
        assert self.broker is not None, "a block started it"
        self.broker.send_signal(signal.SIGINT)  # Ctrl-C
        if (code := self.broker.wait(READY_S)) != 0:
            sys.exit(f"tour: `tierlog dev` ended with {code} after Ctrl-C")

    def leave(self) -> None:
        """Also where a block failed."""
        if self.broker is not None and self.broker.poll() is None:
            self.broker.kill()
            self.broker.wait()


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierlog-tour-") as made:
        clone = Path(made) / "tierlog"
        git = shutil.which("git") or sys.exit("tour: needs git")
        subprocess.run([git, "clone", "-q", f"file://{ROOT}", clone], check=True)  # noqa: S603
        subprocess.run([sys.executable, "-m", "venv", clone / ".venv"], check=True)  # noqa: S603
        newcomer, said = Newcomer(clone), ""
        try:
            for kind, text in blocks(clone):
                said += newcomer.follow(kind, text)
                print(f"{time.monotonic() - began:6.1f} s  {text.splitlines()[0]}", flush=True)
            newcomer.stop()
        finally:
            newcomer.leave()
        if missing := [what for text, what in EXPECTED if text not in said]:
            sys.exit(f"tour: not seen: {', '.join(missing)}\n{said}")
    print("the tour runs as printed, from an empty folder to a Spark result")


if __name__ == "__main__":
    main()
