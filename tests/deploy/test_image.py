"""The broker's Dockerfile. Its steps run in `.ci/image.py`, which needs root and takes a minute."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.fakes.command_line import ROOT

FOLDER = ROOT / "deploy/docker"


def test_hadolint_finds_nothing():
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not program.exists():
        pytest.skip("needs hadolint")
    subprocess.run([program, FOLDER / "Dockerfile"], check=True)


def test_all_that_the_wheel_is_built_of_is_in_the_context():
    admitted = {
        line[1:]
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["only-include"]) <= admitted
    assert all((ROOT / name).exists() for name in admitted)
    copied = re.findall(r"^COPY (?:--chmod=\S+ )?(deploy/\S+)", dockerfile(), re.M)
    assert set(copied) <= admitted


def dockerfile():
    return (FOLDER / "Dockerfile").read_text()


def test_it_does_not_run_as_root():
    assert re.findall(r"^USER (\S+)$", dockerfile(), re.M)[-1] == "10001:10001"


def test_the_health_check_fails_where_nothing_listens():
    command = [sys.executable, FOLDER / "ready.py", "http://127.0.0.1:1/healthz"]
    assert subprocess.run(command, check=False).returncode == 1


def test_the_steps_run_and_the_image_is_small():
    if shutil.which("docker") is None:
        pytest.skip("needs docker")
    try:
        subprocess.run(["docker", "info"], check=True, capture_output=True, timeout=20)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("no engine runs; .ci/image.py builds it without one")
    build = ["docker", "build", "-q", "-f", FOLDER / "Dockerfile", ROOT]
    subprocess.run(build, check=True, timeout=900)
