"""Porcupine, a checker of linearizability, judges histories of conditional appends: planted ones,
and one of a cluster whose leaders are killed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fakes.append_history import as_json_lines, find_fault
from tests.fakes.failover_loads import kill_leaders_under_all_loads
from tests.fakes.forked import ROOT
from tests.fakes.planted_histories import FAULTY, LINEARIZABLE, PlantedHistory
from tests.fakes.tools import find_go

SOURCE = Path(__file__).parent / "porcupine"
BUILD_S, RUN_S = 600, 180
ACCEPTED, REFUSED = 0, 1


@pytest.fixture(scope="module")
def judge() -> Path:
    program = ROOT / ".cache" / "porcupine" / "judge"
    build = [find_go(), "build", "-o", str(program), "."]
    subprocess.run(build, cwd=SOURCE, check=True, timeout=BUILD_S)
    return program


def verdict(judge: Path, history: str) -> int:
    done = subprocess.run([judge], input=history.encode(), timeout=RUN_S, check=False)
    return done.returncode


@pytest.mark.judge
@pytest.mark.parametrize("history", LINEARIZABLE, ids=str)
def test_a_linearizable_history_is_accepted(judge: Path, history: PlantedHistory) -> None:
    assert verdict(judge, as_json_lines(history.rows, history.log)) == ACCEPTED


@pytest.mark.judge
@pytest.mark.parametrize("history", FAULTY, ids=str)
def test_a_planted_fault_is_found(judge: Path, history: PlantedHistory) -> None:
    assert verdict(judge, as_json_lines(history.rows, history.log)) == REFUSED


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(3, marks=pytest.mark.judge),
        pytest.param(20, marks=pytest.mark.soak),
    ],
)
def test_what_a_cluster_answers_over_failovers_is_linearizable(
    judge: Path, tmp_path: Path, kills: int
) -> None:
    history = kill_leaders_under_all_loads(tmp_path, kills)
    lines = as_json_lines(*history)
    (tmp_path / "history.jsonl").write_text(lines)
    assert verdict(judge, lines) == ACCEPTED
    assert find_fault(*history) is None
