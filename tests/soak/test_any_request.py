"""Requests to the Kafka listener, searched for with atheris: coverage of the broker guides it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.forked import ROOT
from tests.fakes.soak import MINUTES

ATHERIS = "3.0.0"
FOLDER = ROOT / ".cache" / f"atheris-{ATHERIS}"

pytestmark = pytest.mark.soak


def test_any_request_is_answered(tmp_path: Path) -> None:
    if not FOLDER.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(FOLDER)]
        subprocess.run([*command, f"atheris=={ATHERIS}"], check=True)
    program = [sys.executable, "-m", "tests.fakes.kafka_fuzz_search"]
    done = subprocess.run(
        [*program, str(tmp_path / "data"), str(round(MINUTES * 60))],
        cwd=tmp_path,  # it writes what it has found there
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{FOLDER}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "DONE" in done.stdout, done.stdout[-2000:]
