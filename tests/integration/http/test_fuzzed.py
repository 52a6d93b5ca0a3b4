"""Requests that schemathesis generates from the OpenAPI document get the responses it describes.

Both valid and invalid requests: an invalid one must be refused, and a valid one must not, but for
what depends on the log (a missing topic, an offset past its end). The seed and the number of
requests are given, so that the same are sent each time; longer, and at random, in
tests/soak/test_openapi.py.
"""

from pathlib import Path

import pytest

from tests.fakes.schemathesis_run import run_schemathesis


# Of requests that take from each other's answers, a seed gives some thirty chains.
@pytest.mark.parametrize(
    "options",
    [
        ("--seed", "1", "--phases", "examples,coverage,fuzzing"),
        ("--seed", "2", "--phases", "stateful"),
    ],
    ids="-".join,
)
def test_schemathesis_finds_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    run = run_schemathesis(tmp_path, *options, timeout_s=300)
    assert run.returncode == 0, run.stdout
