"""`tierlog.integrations` with packages that the other tests are better without, each in an
environment of its own: dbt-duckdb wants older ones, and Ray is 200 MB.
"""

import subprocess
import sys

import pytest

from tests.fakes.forked import ROOT

TESTS = "tests/unit/spark_reader/test_integrations.py"
CACHE = ROOT / ".cache" / "integrations"
TOOLS = (
    "hypothesis",
    "moto[server]",
    "pytest>=9",
    "pytest-xdist",
)  # what the tests' own modules import


@pytest.mark.judge
def test_dbt_takes_what_it_is_given() -> None:
    assert run("dbt", "not soak", "dbt-core<1.12")  # newer ones fetch a part from elsewhere


@pytest.mark.judge
def test_ray_takes_what_it_is_given() -> None:
    assert run("ray", "not soak")


@pytest.mark.soak
def test_ray_reads_a_topic() -> None:
    assert run("ray", "soak")


def run(extra: str, marks: str, *pins: str) -> bool:
    """Whether tests of the extra ran, and passed."""
    environment = CACHE / extra
    python = environment / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--allow-existing", "--python", "3.11", environment], check=True)
    packages = [*TOOLS, *pins, "--editable", f"{ROOT}[{extra}]"]
    subprocess.run([*uv, "pip", "install", "--python", python, *packages], check=True)
    command = [python, "-m", "pytest", "-q", "-m", marks, "-k", extra, TESTS]
    command += ["-p", "no:cacheprovider", "-W", "default"]  # their warnings are no fault of ours
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    print(done.stdout.decode())
    return done.returncode == 0 and b" passed" in done.stdout and b"skipped" not in done.stdout
