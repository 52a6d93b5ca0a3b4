"""`tierlog cluster`: what waits ends when there is nothing left to wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tierlog.cli.cluster import DrainEnded, Draining


def cluster(state: str, *, replicas: int) -> Any:
    broker = SimpleNamespace(node_id=1, state=state, replicas=replicas)
    return SimpleNamespace(brokers=[SimpleNamespace(node_id=0, state="running"), broker])


def test_a_drain_that_another_has_ended_is_not_waited_for() -> None:
    shown = list[int]()

    def update(*, completed: int) -> None:
        shown.append(completed)

    is_done = Draining(1, had=5, update=update)
    assert not is_done(cluster("running", replicas=5)), "the order is not heard of yet"
    assert not is_done(cluster("draining", replicas=3))
    with pytest.raises(DrainEnded, match="broker 1 is not being drained any more, and has 3"):
        is_done(cluster("running", replicas=3))
    assert shown == [0, 2, 2]


def test_a_drain_is_over_once_the_broker_has_nothing_whatever_its_state() -> None:
    is_done = Draining(1, had=5, update=lambda completed: None)
    assert not is_done(cluster("draining", replicas=1))
    assert is_done(cluster("stopped", replicas=0))
