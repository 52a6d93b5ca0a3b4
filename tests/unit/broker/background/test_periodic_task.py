from collections.abc import Callable

import pytest

from tierlog.broker.background.periodic_task import PeriodicTask
from tierlog.broker.background.task_failures import TaskFailures
from tierlog.record_format.errors import StoreUnavailable


def intervals(task: PeriodicTask, monkeypatch: pytest.MonkeyPatch, *, rounds: int) -> list[float]:
    """How long the task waits before each of its first rounds."""
    waits: list[float] = []

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        if len(waits) > rounds:
            task.stop(0)
        return True

    monkeypatch.setattr(task._woken, "wait", wait)
    task._loop()
    return waits


def failing(*failures: bool) -> Callable[[], None]:
    rounds = iter(failures)

    def run_round() -> None:
        if next(rounds):
            raise StoreUnavailable("down")

    return run_round


def test_the_interval_doubles_while_a_task_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run_round = failing(False, True, True, True, True, False, True)
    failures = TaskFailures()
    task = PeriodicTask("groups", run_round, failures=failures, interval_s=1.0, interval_max_s=5.0)
    assert intervals(task, monkeypatch, rounds=7) == [1.0, 1.0, 2.0, 4.0, 5.0, 5.0, 1.0, 2.0]
    assert failures.by_task()["groups"] == (5, 1)


def test_without_a_maximum_a_failing_task_keeps_its_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = TaskFailures()
    task = PeriodicTask("groups", failing(True, True, False), failures=failures, interval_s=1.0)
    assert intervals(task, monkeypatch, rounds=3) == [1.0] * 4
    assert failures.by_task()["groups"] == (2, 0)
