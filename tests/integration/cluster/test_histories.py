"""Idempotent producers, a group's offsets and conditional appends, while leaders are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.append_history import find_fault
from tests.fakes.failover_loads import kill_leaders_under_all_loads
from tests.fakes.planted_histories import FAULTY, LINEARIZABLE, PlantedHistory


@pytest.mark.parametrize("history", LINEARIZABLE, ids=str)
def test_a_linearizable_history_is_accepted(history: PlantedHistory) -> None:
    assert find_fault(history.rows, history.log) is None


@pytest.mark.parametrize("history", FAULTY, ids=str)
def test_a_planted_fault_is_found(history: PlantedHistory) -> None:
    assert find_fault(history.rows, history.log) is not None


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_over_failovers_nothing_is_doubled_left_out_or_taken_back(
    tmp_path: Path, kills: int
) -> None:
    history = kill_leaders_under_all_loads(tmp_path, kills)
    assert len(history.log) > kills
    assert find_fault(*history) is None
