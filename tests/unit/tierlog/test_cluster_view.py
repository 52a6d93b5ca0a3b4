"""The lab's picture, as text without colours, and what it tells."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tierlog.cli.cluster_view import Led, Look, Process, Story, picture
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
    return Look(0.0, processes, brokers, {"flights": 12}, ALL_LED)


def led(leader: int, *, in_sync: tuple[int, ...] = (0, 1, 2), epoch: int = 1) -> Led:
    return Led(leader, epoch, (0, 1, 2), in_sync, (0, 12_000, -1))


FLIGHTS = [("flights", number) for number in range(12)]
ALL_LED = {place: led(place[1] % 3) for place in FLIGHTS if place[1] % 3 != 1}


def drawn(width: int) -> str:
    console = Console(width=width, no_color=True, file=StringIO(), force_terminal=False)
    console.print(picture(look(), [("12:00:00", "x")], title="t", rows=5, width=width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_addresses_states_and_leaders_are_whole_in_a_narrow_terminal(width: int) -> None:
    text = drawn(width)
    assert all(url in text for url in URLS)
    assert "…" not in text
    rows = [line.split() for line in text.splitlines() if line.startswith("flights")]
    assert rows == [
        ["flights", "0,3,6,9", "0", "1", "0,1,2", "1:12,000", "2:?"],
        ["flights", "1,4,7,10", "none"],
        ["flights", "2,5,8,11", "2", "1", "0,1,2", "1:12,000", "2:?"],
    ]
    assert max(map(len, text.splitlines())) <= width


def test_a_broker_that_left_no_word_is_dead_and_not_running() -> None:
    (row,) = [line for line in drawn(120).splitlines() if URLS[1] in line]
    assert "dead" in row
    assert "ended" in row
    assert "running" not in row


def test_an_election_and_a_smaller_set_are_told_with_their_partitions() -> None:
    story, at = Story(), look()
    story.tell(at._replace(led={place: led(place[1] % 3) for place in FLIGHTS}))
    story.tell(at._replace(at_s=1.0))
    assert story.tell(at._replace(at_s=3.0)) == ["flights:1,4,7,10: broker 1 -> no leader"]
    after = {place: led(2, in_sync=(0, 2), epoch=2 + place[1] // 10) for place in FLIGHTS}
    assert story.tell(at._replace(at_s=4.0, led=ALL_LED | after)) == [
        "flights:0,3,6,9: broker 0 -> broker 2 under epoch 2",
        "flights:1,4,7,10: broker 2 leads under epoch 2 to 3",
        "flights:0,1,2,3,4,5 and 6 more: in sync 0,1,2 -> 0,2",
    ]


def test_the_bucket_is_told_among_those_in_sync() -> None:
    story, place = Story(), ("payments", 0)
    alone = Led(0, 1, (0,), (0,), (0,), has_store=True)
    at = look()._replace(topics={"payments": 1}, led={place: alone})
    story.tell(at)
    assert story.tell(at._replace(led={place: alone._replace(has_store=False)})) == [
        "payments:0: in sync 0,bucket -> 0"
    ]
    console = Console(width=80, no_color=True, file=StringIO(), force_terminal=False)
    console.print(picture(at, [], title="t", rows=5, width=80))
    assert isinstance(console.file, StringIO)
    assert "0,bucket" in console.file.getvalue()
