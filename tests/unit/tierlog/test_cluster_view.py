"""The lab's picture, as text without colours."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tierlog.cli.cluster_view import Look, Process, picture
from tierlog.client.responses import Broker

URLS = [f"http://127.0.0.1:864{node}" for node in range(3)]


def look() -> Look:
    given: dict[str, Any] = {"kafka": "", "zone": "", "folder_id": "f", "incarnation": 1}
    brokers = {
        node: Broker(
            node_id=node, url=URLS[node], state="running", is_alive=node != 1, leads=0, **given
        )
        for node in range(3)
    }
    processes = [
        Process(node, url, f"127.0.0.1:909{node}", None if node == 1 else 100 + node)
        for node, url in enumerate(URLS)
    ]
    leaders = {("flights", number): number % 3 for number in range(12) if number % 3 != 1}
    return Look(0.0, processes, brokers, {"flights": 12}, leaders)


def drawn(width: int) -> str:
    console = Console(width=width, no_color=True, file=StringIO(), force_terminal=False)
    console.print(picture(look(), [("12:00:00", "x")], title="t", rows=5, width=width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_addresses_states_and_leaders_are_whole_in_a_narrow_terminal(width: int) -> None:
    text = drawn(width)
    assert all(url in text for url in URLS)
    assert "…" not in text.replace("0, 1, …", "")
    assert "0 - 2 0 - 2 0 - 2 0 - 2" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_broker_that_left_no_word_is_dead_and_not_running() -> None:
    (row,) = [line for line in drawn(120).splitlines() if URLS[1] in line]
    assert "dead" in row
    assert "ended" in row
    assert "running" not in row
