"""The API against its OpenAPI document, by schemathesis, for as long as one likes."""

from pathlib import Path

import pytest

from tests.fakes.schemathesis_run import run_schemathesis
from tests.fakes.soak import MINUTES, soak_seed


@pytest.mark.soak
def test_schemathesis_finds_nothing_at_random(tmp_path: Path) -> None:
    seconds = int(60 * MINUTES)
    options = ("--seed", str(soak_seed()), "--max-time", str(seconds))
    run = run_schemathesis(tmp_path, *options, timeout_s=2 * seconds + 300)
    assert run.returncode == 0, run.stdout
