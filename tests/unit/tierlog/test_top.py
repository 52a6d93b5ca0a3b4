"""`tierlog top`: rates from two samples of /metrics."""

import sys

import httpx2
import pytest
from rich.console import Console

from tierlog.cli.top import (
    Between,
    _loads,
    _print_as_json,
    load_between,
    parse_metrics,
    partition_loads,
)
from tierlog.cli.top_view import ORDERS, View, picture
from tierlog.client.client import Client
from tierlog.client.exchange import NO_RETRIES
from tierlog.client.problems import UnexpectedAnswer

BEFORE = """
# TYPE tierlog_produced_records counter
tierlog_produced_records_total 1000.0
# TYPE tierlog_fetched_bytes counter
tierlog_fetched_bytes_total{tier="hot"} 500.0
tierlog_fetched_bytes_total{tier="cold"} 0.0
# TYPE tierlog_log_flush_seconds histogram
tierlog_log_flush_seconds_sum 1.0
tierlog_log_flush_seconds_count 10.0
# TYPE tierlog_partition_log_end_offset gauge
tierlog_partition_log_end_offset{topic="a",partition="0"} 10.0
tierlog_partition_log_end_offset{topic="a",partition="1"} 20.0
# TYPE tierlog_partitions gauge
tierlog_partitions{state="serving"} 3.0
"""
NOW = """
# TYPE tierlog_produced_records counter
tierlog_produced_records_total 1400.0
# TYPE tierlog_fetched_bytes counter
tierlog_fetched_bytes_total{tier="hot"} 700.0
tierlog_fetched_bytes_total{tier="cold"} 50.0
# TYPE tierlog_log_flush_seconds histogram
tierlog_log_flush_seconds_sum 1.5
tierlog_log_flush_seconds_count 20.0
# TYPE tierlog_partition_log_end_offset gauge
tierlog_partition_log_end_offset{topic="a",partition="0"} 14.0
tierlog_partition_log_end_offset{topic="a",partition="1"} 26.0
tierlog_partition_log_end_offset{topic="new",partition="0"} 7.0
# TYPE tierlog_partitions gauge
tierlog_partitions{state="serving"} 2.0
tierlog_partitions{state="offline"} 1.0
# TYPE tierlog_topic_bytes gauge
tierlog_topic_bytes{topic="a",tier="hot"} 100.0
tierlog_topic_bytes{topic="a",tier="cold"} 900.0
"""


def between(before: str, now: str):
    return load_between(rates(before, now))


def rates(before, now):
    return Between(parse_metrics(before, at_s=10.0), parse_metrics(now, at_s=12.0))


def test_rates_are_differences_divided_by_time():
    load = between(BEFORE, NOW)
    assert load.produced_records_per_s == 200
    assert (load.hot_fetched_bytes_per_s, load.cold_fetched_bytes_per_s) == (100, 25)
    assert load.flush_ms == 50
    assert load.commit_ms is None
    busy, new = load.topics
    assert (busy.topic, busy.offsets_per_s) == ("a", 5)
    assert (busy.hot_bytes, busy.cold_bytes) == (100, 900)
    assert (new.topic, new.offsets_per_s) == ("new", 0)


def test_a_reset_counter_counts_from_zero():
    assert between(NOW, BEFORE).produced_records_per_s == 500


def test_problems_are_shown():
    console = Console(width=120, record=True)
    console.print(picture(between(BEFORE, NOW), rows=1))
    shown = console.export_text()
    assert "2 serving, 1 offline" in shown
    assert "not available" in shown
    assert "1 more not shown" in shown


def test_a_page_of_another_server_is_refused():
    with pytest.raises(UnexpectedAnswer, match="is that a tierlog broker"):
        parse_metrics("<html>{not even} close</html>", at_s=0.0)


def test_each_load_is_written_before_the_next_sample(tmp_path, monkeypatch):
    out, lines = tmp_path / "out", []

    def metrics(_request: httpx2.Request) -> httpx2.Response:
        lines.append(out.read_text().count("\n"))
        return httpx2.Response(200, text=NOW)

    with (
        out.open("w") as stdout,
        Client(transport=httpx2.MockTransport(metrics)) as client,
        monkeypatch.context() as patch,
    ):
        patch.setattr(sys, "stdout", stdout)
        _print_as_json(client, every=0, looks=2, rows=9)
    assert lines == [0, 0, 1]


def test_top_waits_for_a_restarting_broker():
    pages = [BEFORE, None, NOW]

    def respond(request: httpx2.Request) -> httpx2.Response:
        if (text := pages.pop(0)) is None:
            raise httpx2.ConnectError("refused", request=request)
        return httpx2.Response(200, text=text)

    with Client(retries=NO_RETRIES, transport=httpx2.MockTransport(respond)) as client:
        (load,) = _loads(client, every=0.0, looks=1)
    assert load.topics


TOPICS = ["b", "a", "c"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["q"], View(is_left=True)),
        (["s"], View(order="size")),
        (["s"] * len(ORDERS), View()),
        (["down"], View(selected="a")),
        (["down", "j", "down"], View(selected="c")),
        (["up"], View(selected="b")),
        (["down", "enter"], View(selected="a", opened="a")),
        (["down", "enter", "escape"], View(selected="a")),
        (["enter", "s", "enter"], View(selected="b", opened="b")),
        (["/", "q", "s"], View(wanted="qs", is_typing=True)),
        (["/", "q", "s", "backspace", "enter"], View(wanted="q")),
        (["/", "q", "escape"], View()),
        (["/", "q", "enter", "escape"], View()),
        (["/", "\x07", "up"], View(is_typing=True)),
        (["x"], View(selected="b")),
    ],
)
def test_keys_change_what_is_shown(keys, expected):
    view = View()
    for key in keys:
        view = view.press(key, TOPICS)
    assert view == expected


def test_no_topic_is_selected_or_opened_where_the_filter_leaves_none():
    assert View().press("enter", []) == View().press("down", []) == View()


def test_a_view_filters_and_orders_topics():
    load = between(BEFORE, NOW)
    assert View().names(load) == ["a", "new"]
    assert View(order="name", wanted="NE").names(load) == ["new"]
    console = Console(width=120, record=True)
    console.print(picture(load, rows=9, view=View(wanted="ne", has_keys=True)))
    shown = console.export_text()
    assert "filter (ne; esc removes it)" in shown
    assert "\na " not in shown


def test_the_partitions_of_a_topic_have_rates_of_their_own():
    loads = partition_loads(rates(BEFORE, NOW), "a")
    assert [(one.partition, one.offsets_per_s, one.log_end_offset) for one in loads] == [
        (0, 2, 14),
        (1, 3, 26),
    ]
    assert partition_loads(rates(BEFORE, NOW), "gone") == []
    console = Console(width=120, record=True)
    console.print(picture(between(BEFORE, NOW), rows=1, view=View(opened="a"), partitions=loads))
    shown = console.export_text()
    assert "partition 0" in shown
    assert "1 more not shown" in shown
