"""Requests that schemathesis generates from the OpenAPI document get the responses it describes.

Both valid and invalid requests: an invalid one must be refused, and a valid one must not, but for
what depends on the log (a missing topic, an offset past its end). Longer, and at random, in
tests/soak/test_openapi.py.
"""

from pathlib import Path

from tests.fakes.schemathesis_run import run_schemathesis


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    run = run_schemathesis(tmp_path, "--seed", "1", seconds=60)
    assert run.returncode == 0, run.stdout
