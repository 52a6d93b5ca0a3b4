"""The shell blocks of the guides run in their order, against a broker that is stopped and started
as a page says: `run` with it, `stopped` without, `serve` starts it by that line.

What a page leaves to its reader, in capitals, gets a value here.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.fakes.command_line import ROOT, Program, RunningBroker
from tests.fakes.page_blocks import Shell, blocks_of

PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guides").glob("*.md")])
RUN = [page for page in PAGES if {kind for kind, _ in blocks_of(page)} - {"shown"}]
# test_readme.py; kafka_listener/test_guide.py, judges; cluster/test_lab.py
ELSEWHERE = {"tour.md", "kafka-clients.md", "several-brokers.md"}
KAFKA = ROOT / "tests/fixtures/kafka"
ADOPTED = ("keyed", "many-segments")


class Reader:
    """Follows a page, with a broker of `tierlog dev` and a topic `orders` to begin with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker = RunningBroker("dev", "--port", "0", cwd=folder)
        self.shell = Shell(folder, self.broker.server)
        self.restored = 0

    def fill(self) -> None:
        program = Program(self.broker.server)
        program.ok("topic", "create", "orders")
        program.ok("produce", "orders", stdin=b"tea\ncoffee\n")
        program.ok("storage", "offload", "orders")
        program.ok("produce", "orders", stdin=b"not in the bucket yet\n")

    def follow(self, kind: str, script: str) -> None:
        script = self.with_values(script)
        if kind == "serve":
            self.serve(script)
        elif kind in {"run", "stopped"}:
            if kind == "stopped":
                self.stop()
            port = self.shell.server.rpartition(":")[2]
            self.shell.run("run", script.replace("localhost:8640", f"localhost:{port}"))

    def serve(self, line: str) -> None:
        self.stop()
        (self.folder / "broker.log").unlink()  # where its address will be
        line = line.replace("\\\n", " ").replace("$PWD", str(self.folder)).replace(":8640", ":0")
        arguments = shlex.split(line)[1:]
        listen = [] if "--listen" in arguments else ["--listen", "127.0.0.1:0"]
        self.broker = RunningBroker(*arguments, *listen, cwd=self.folder)
        self.shell.server = self.broker.server

    def stop(self) -> None:
        self.broker.stop()

    def with_values(self, script: str) -> str:
        bucket = f"file://{self.folder}/.tierlog/bucket"
        self.restored += "storage restore" in script
        values = {
            "s3://my-bucket/some/prefix": f"file://{self.folder}/adopted-bucket",
            "/var/lib/kafka/data": str(self.folder / "kafka"),
            r"\bTOPIC\b": "orders",
            r"\bURL\b": bucket,
            r"\bNAME\b": "june",
            r"\bNEW\b": f"new-{self.restored}",
            r"\b(OLD_DIR|OLD|DIR)\b": ".tierlog/data",
        }
        for name, value in values.items():
            script = re.sub(name, value, script)
        return script


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_as_printed(page, tmp_path):
    if page.name in ELSEWHERE:
        pytest.skip("another test runs it")
    for program in ("curl", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    reader = Reader(tmp_path)
    try:
        reader.fill()
        if "kafka-folder" in page.stem:
            kafka_folder(tmp_path / "kafka")
        for kind, script in blocks_of(page):
            reader.follow(kind, script)
    finally:
        reader.stop()


def kafka_folder(folder: Path) -> None:
    folder.mkdir()
    for ours, theirs in zip(("orders", "users"), ADOPTED, strict=True):
        shutil.copytree(KAFKA / f"{theirs}-0", folder / f"{ours}-0")
    shutil.copy(KAFKA / "_broker" / "meta.properties", folder)
    (folder / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')


def test_each_block_of_commands_or_a_program_says_how_it_is_run():
    for page in (ROOT / "README.md", *PAGES):
        text = page.read_text()
        unmarked = re.findall(
            r"^(?!<!-- tour: ).*\n```(?:sh|java|go|properties|xml)\n(.*)", text, re.M
        )
        assert unmarked == [], page.name
