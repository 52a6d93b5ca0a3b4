"""Every line of README's tour is run, against a broker of its own."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.command_line import ENVIRONMENT, ROOT, RunningBroker

BLOCKS = re.findall(
    r"<!-- tour: (\w+) -->\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S
)


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour")
    programs = folder / "bin"
    programs.mkdir()
    shim(programs / "tierlog", f'exec "{sys.executable}" -m tierlog.cli.main "$@"')
    for name in ("python", "python3"):
        shim(programs / name, f'exec "{sys.executable}" "$@"')
    running = RunningBroker("dev", "--port", "0", cwd=folder)
    yield folder, programs, running.server
    assert running.stop() == 0


def shim(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def run_block(tour, script: str) -> str:
    folder, programs, server = tour
    script = script.replace("http://127.0.0.1:8640", server)
    script = script.replace("tierlog.Client()", f'tierlog.Client("{server}")')
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=ENVIRONMENT | {"PATH": f"{programs}:{ENVIRONMENT['PATH']}", "TIERLOG_SERVER": server},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def outputs(tour):
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    return [run_block(tour, script) for kind, script in BLOCKS if kind == "run"]


def test_the_tour_is_what_one_types(outputs):
    assert [kind for kind, _ in BLOCKS] == ["serve", "run", "run", "run", "spark"]
    assert BLOCKS[0][1].startswith("tierlog dev ")
    curl, shown, python = outputs
    assert '"records":2' in curl
    assert "just text" in curl
    assert "offset-past-end" in curl
    assert '"records":20000' in shown
    assert '"remaining_segments":0' in shown
    assert "cold" in shown
    assert "Dumping " in shown
    assert "Placed(topic='orders', partition=1, offset=9989)" in python
    assert "\n5000 b'customer-" in python


@pytest.mark.spark
@pytest.mark.usefixtures("outputs")
def test_the_tour_of_spark(tour):
    shown = run_block(tour, BLOCKS[4][1])
    assert "|        0|10013|" in shown
    assert "|        1| 9990|" in shown
