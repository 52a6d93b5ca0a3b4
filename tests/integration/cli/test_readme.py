"""Every block of the README and of the tour that follows it runs, against one broker. The block for
Spark runs in `spark/test_guides.py`.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.command_line import ENVIRONMENT, ROOT, RunningBroker

PAGES = (ROOT / "README.md", ROOT / "docs" / "guides" / "tour.md")
BLOCKS = re.findall(
    r"<!-- tour: (\w+) -->\n```(?:sh|python)\n(.*?)```",
    "".join(page.read_text() for page in PAGES),
    re.S,
)
SPARK = 2  # index of its block


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


def run_block(tour, kind: str, script: str) -> str:
    folder, programs, server = tour
    program = ["bash", "-e", "-o", "pipefail", "-s"] if kind == "run" else ["python", "-"]
    result = subprocess.run(
        program,
        input=script.replace("http://127.0.0.1:8640", server),
        cwd=folder,
        env=ENVIRONMENT | {"PATH": f"{programs}:{ENVIRONMENT['PATH']}", "TIERLOG_SERVER": server},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def outputs(tour):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    return [
        run_block(tour, kind, script)
        for index, (kind, script) in enumerate(BLOCKS)
        if kind != "serve" and index != SPARK
    ]


def test_the_tour_runs_as_printed(outputs):
    assert [kind for kind, _ in BLOCKS] == ["serve", "run", "python", "run", "run", "python"]
    assert "\ntierlog dev " in BLOCKS[0][1]
    first, curl, shown, python = outputs
    assert '"value":"1000"' in first
    assert '"remaining_segments":0' in first
    assert '"records":2' in curl
    assert "just text" in curl
    assert "offset-past-end" in curl
    assert '"records":20000' in shown
    assert '"remaining_segments":0' in shown
    assert "cold" in shown
    assert "Dumping " in shown
    assert "RecordMetadata(topic='orders', partition=1, offset=9989)" in python
    assert "\n5000 b'customer-" in python
