"""What a broker that stops says to those that wait for what it asked of others."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tierlog.broker.cluster import news
from tierlog.broker.membership.leaders import Leaders
from tierlog.record_format.errors import ShuttingDown


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_round_that_is_late_ends_because_the_broker_stops(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It is no bug, and is not logged as one."""
    monkeypatch.setattr(news, "THREADS_MAX", 1)
    asked, release = threading.Event(), threading.Event()

    def read_leaders(_: str) -> Any:
        asked.set()
        release.wait(10)
        return SimpleNamespace(node_id=1, led={})

    brokers = [SimpleNamespace(node_id=n, is_alive=True, url=f"http://{n}") for n in range(3)]
    members: Any = SimpleNamespace(me=brokers[0], members=lambda: brokers, doubt=lambda: None)
    peers: Any = SimpleNamespace(read_leaders=read_leaders)
    told = news.News(members, Leaders(), peers, settle=lambda _: None, led_here=dict)
    if when == "before":
        told.close()
    else:

        def stop() -> None:
            asked.wait(10)
            told.close()  # the question to the second one has not begun
            release.set()

        threading.Thread(target=stop).start()
    with pytest.raises(ShuttingDown, match="the broker stops"):
        told.read_reports()
