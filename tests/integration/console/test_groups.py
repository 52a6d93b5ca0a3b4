"""The pages of groups and of transactions, with Kafka's clients in them: a classic group, one of
KIP-848, a share group, and transactions that are open, done, and hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from confluent_kafka import Consumer, Producer

from tests.fakes.command_line import Program
from tests.fakes.kafka_brokers import three_brokers
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.share_member import ShareMember
from tests.fakes.waiting import until
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import TABLE
from tests.integration.console.test_accessibility import SETTLED, findings
from tierlog.api.console.group_pages import in_spans
from tierlog.api.console.transaction_pages import (
    HANGS_AFTER_MS,
    OpenProducer,
    TransactionsPart,
    _lines,
)
from tierlog.api.http.schemas import AssignedTopic, TransactionState
from tierlog.api.http.settings import HttpSettings
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token
from tierlog.record_format.errors import LeaderUnknown, PeerUnavailable, TierlogError
from tierlog.record_format.share_state import StateAnswer, StateCall

PARTITIONS = 3
BOTH = (Scope.READ, Scope.PRODUCE)
SETTINGS: dict[str, Any] = {
    "group_share_assignment_interval_ms": 0,
    "group_consumer_assignment_interval_ms": 0,
    "group_consumer_heartbeat_interval_ms": 100,
    "group_initial_rebalance_delay_ms": 0,
}


class Crowd(NamedTuple):
    url: str
    served: Served

    def page(self, path: str, **headers: str) -> str:
        answer = httpx2.get(f"{self.url}/console{path}", headers=headers, timeout=20)
        assert answer.status_code == 200, answer.text
        return answer.text

    def api(self, path: str) -> Any:
        return httpx2.get(f"{self.url}/v1{path}").json()


def consumer(port: int, group: str, **settings: Any) -> Consumer:
    made = Consumer(
        {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "group.id": group,
            "client.id": "billing-app",
            "auto.offset.reset": "earliest",
            "log_level": 0,
            **settings,
        }
    )
    made.subscribe(["flights"])
    return made


def transactional(port: int, name: str, partition: int) -> Producer:
    """In a transaction, with a record in this partition."""
    producer = Producer(
        {"bootstrap.servers": f"127.0.0.1:{port}", "transactional.id": name, "log_level": 0}
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce("flights", b"x", partition=partition)
    producer.flush(20)
    return producer


def fill(port: int, stack: ExitStack, *, partitions: int = PARTITIONS) -> None:
    """Groups `classic`, `modern`, `queue` and transactions `open` and `done`."""
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{port}"})
    for number in range(60):
        producer.produce("flights", b"%d" % number, partition=number % partitions)
    producer.flush(20)
    for group, protocol in (("classic", "classic"), ("modern", "consumer")):
        one = stack.enter_context(closing(consumer(port, group, **{"group.protocol": protocol})))
        until(lambda one=one: one.consume(5, 0.2) and len(one.assignment()) == partitions)
        one.commit(asynchronous=False)
    transactional(port, "done", 0).commit_transaction(20)
    transactional(port, "open", 1)


@contextmanager
def crowded(root: Path) -> Iterator[Crowd]:
    settings = {"kafka": KafkaSettings(), **SETTINGS}
    with served_broker(root / "data", **settings) as served:
        served.broker.create_topic("flights", partitions=PARTITIONS)
        transactional(served.kafka_port, "lost", 2)
    with served_broker(root / "data", **settings) as served:
        served.broker.delete_topic("__transaction_state")
    with served_broker(root / "data", **settings) as served, ExitStack() as stack:
        port = served.kafka_port
        served.broker.alter_group("queue", {"share.auto.offset.reset": "earliest"})
        fill(port, stack)
        for name in ("left", "right"):
            one = stack.enter_context(ShareMember(port, name, "flights", group="queue"))
            one.join(PARTITIONS if name == "left" else 1)
        one.fetch(max_records=5)
        place = next(iter(one.acquired))
        offsets = sorted(one.acquired[place])
        one.fetch({place: [(offsets[0], offsets[1], 1)]}, max_records=0)
        yield Crowd(served.server.url, served)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    with crowded(tmp_path_factory.mktemp("crowd")) as crowd:
        yield crowd


def cells(page: str) -> dict[str, list[str]]:
    """The rows of a page's tables as text, by their heading."""
    rows = {}
    for row in re.findall(r"<tr[ >](.*?)</tr>", page, re.S):
        texts = [
            " ".join(re.sub(r"<[^>]*>", " ", cell).split())
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
        ]
        rows[texts[0]] = texts[1:]
    return rows


def facts(page: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))


# --- groups ---------------------------------------------------------------------------------------


def test_the_list_says_of_each_group_its_type_state_members_partitions_and_lag(
    crowd: Crowd,
) -> None:
    rows = cells(crowd.page("/groups"))
    assert rows["classic"][:4] == ["classic", "Stable", "1", "3"]
    assert rows["modern"][:4] == ["consumer", "Stable", "1", "3"]
    assert rows["queue"][:3] == ["share", "Stable", "2"]
    for group in ("classic", "modern", "queue"):
        offsets = crowd.api(f"/groups/{group}")["offsets"]
        assert rows[group][4] == str(sum(one["lag"] for one in offsets))
    by_members = list(cells(crowd.page("/groups?sort=-members")))
    assert by_members[1] == "queue"


def test_a_group_says_who_is_in_it_and_who_reads_what(crowd: Crowd) -> None:
    for group, counted in (("classic", "Generation"), ("modern", "Epoch")):
        page = crowd.page(f"/group?group={group}")
        found = crowd.api(f"/groups/{group}")
        (member,) = found["members"]
        shown = facts(page)
        assert shown["Type"] == found["type"]
        assert shown["State"] == "Stable"
        assert shown[counted] == str(found["generation"])
        assert shown["Assignor"] == {"classic": "range", "modern": "uniform"}[group]
        rows = cells(page)
        for one in found["offsets"]:
            row = rows[f"flights {one['partition']}"]
            assert row[:3] == [str(one[key]) for key in ("offset", "log_end_offset", "lag")]
        readers = [rows[f"flights {number}"][3] for number in range(PARTITIONS)]
        assert len(set(readers)) == 1
        assert readers[0]
        assert member["member_id"].startswith(readers[0])
        assert rows[f"{readers[0]} {member['member_id']}"] == [
            "billing-app",
            member["client_host"],
            "flights 0-2",
        ]


def test_a_share_group_says_where_it_begins_in_each_partition_and_all_who_have_it(
    crowd: Crowd,
) -> None:
    page = crowd.page("/group?group=queue")
    assert "Start offset" in page
    assert "Committed offset" not in page
    found = crowd.api("/groups/queue")["offsets"]
    assert [one["log_end_offset"] - one["offset"] - one["lag"] for one in found] == [2], (
        "two are done"
    )
    rows = cells(page)
    for one in found:
        row = rows[f"flights {one['partition']}"]
        assert row[:3] == [str(one[key]) for key in ("offset", "log_end_offset", "lag")]
    read_by = {name for n in range(PARTITIONS) for name in rows[f"flights {n}"][3].split(", ")}
    assert read_by == {"left", "right"}
    assert rows["left"][2] == "flights 0-2"
    unread = {n for n in range(PARTITIONS) if rows[f"flights {n}"][:3] == ["–"] * 3}
    assert unread == {*range(PARTITIONS)} - {one["partition"] for one in found}


@pytest.mark.parametrize("kind", [LeaderUnknown, PeerUnavailable])
def test_a_share_group_is_listed_while_nobody_answers_for_its_state(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch, kind: type[TierlogError]
) -> None:
    def fail(*_: object) -> None:
        raise kind("nobody keeps it")

    monkeypatch.setattr(crowd.served.broker.share_groups, "summaries", fail)
    rows = cells(crowd.page("/groups"))
    assert rows["queue"] == ["share", "Stable", "2", "–", "–"]
    assert rows["classic"][:2] == ["classic", "Stable"]


def test_a_share_group_shows_what_is_known_and_says_what_is_not(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, known = crowd.served.broker.share_groups, crowd.api("/groups/queue")["offsets"]
    ask, before = shares._ask, cells(crowd.page("/group?group=queue"))
    (silent,) = [one["partition"] for one in known]

    def is_silent(call: StateCall) -> Future[StateAnswer]:
        if call.key.partition != silent:
            return ask(call)
        failed = Future[StateAnswer]()
        failed.set_exception(PeerUnavailable("broker 7 <does> not answer"))
        return failed

    monkeypatch.setattr(shares, "_ask", is_silent)
    page = crowd.page("/group?group=queue")
    assert "in 1 partition is not known" in page
    assert "broker 7 &lt;does&gt; not answer" in page
    before[f"flights {silent}"][:3] = ["–"] * 3
    assert cells(page) == before


def test_the_command_line_says_of_a_share_group_what_its_page_does(crowd: Crowd) -> None:
    shown = Program(crowd.url).ok("group", "describe", "queue", "--output", "text").decode()
    epoch = facts(crowd.page("/group?group=queue"))["Epoch"]
    assert f"queue: share, Stable, generation {epoch}" in shown
    assert "start offset" in shown
    (one,) = crowd.api("/groups/queue")["offsets"]
    row = ["flights", *(one[key] for key in ("partition", "offset", "log_end_offset", "lag"))]
    assert [str(cell) for cell in row] in [line.split() for line in shown.splitlines()]


def test_a_group_whose_name_is_any_text_has_its_page(crowd: Crowd, browser: Chromium) -> None:
    name = "a/b <i>&?#%2F"
    path = "a%2Fb%20%3Ci%3E%26%3F%23%252F"
    offsets = {"offsets": [{"topic": "flights", "partition": 0, "offset": 1}]}
    assert httpx2.put(f"{crowd.url}/v1/groups/{path}/offsets", json=offsets).status_code == 204
    show(browser, crowd.url, "#/groups")
    browser.run(
        f"[...document.querySelectorAll('#groups a')].find(a => a.textContent === {name!r}).click()"
    )
    browser.until("document.querySelector('#group')")
    assert browser.run("document.querySelector('h1').textContent") == name
    browser.run("document.querySelector('#group a.button').click()")
    browser.until("document.querySelector('form[data-route=\"/offsets\"]')")
    assert browser.run("document.querySelector('[name=group]').value") == name
    httpx2.delete(f"{crowd.url}/v1/groups/{path}")


def test_a_group_that_there_is_not_is_said_so(crowd: Crowd) -> None:
    answer = httpx2.get(f"{crowd.url}/console/group?group=nobody")
    assert answer.status_code == 404
    assert "nobody" in answer.json()["detail"]


def test_partitions_are_shown_as_spans() -> None:
    assigned = [AssignedTopic("a", [3, 0, 1, 2, 7]), AssignedTopic("b", [4])]
    assert in_spans(assigned) == "a 0-3, 7; b 4"
    assert in_spans([]) == ""


# --- transactions ---------------------------------------------------------------------------------


def test_transactions_say_their_state_producer_partitions_and_for_how_long_they_are_open(
    crowd: Crowd,
) -> None:
    page = crowd.page("/transactions")
    rows = cells(page)
    for name, state in (("open", "Ongoing"), ("done", "CompleteCommit")):
        found = crowd.api(f"/transactions/{name}")
        row = rows[name]
        assert row[0] == found["state"] == state
        assert row[3:] == [str(found["producer_id"]), str(found["producer_epoch"])]
    assert re.fullmatch(r"\d+ (s|ms|min) of 60 s", rows["open"][1])
    assert rows["done"][1:3] == ["–", "–"]
    assert rows["open"][2] == "flights 1"
    assert list(rows).index("open") < list(rows).index("done")
    now = crowd.api("/topics/flights/partitions/1/offsets")
    held = now["high_watermark"] - now["last_stable_offset"]
    assert rows["flights 1"][:3] == ["open", str(now["last_stable_offset"]), str(held)]
    assert "flights 0" not in rows, "nothing is open there"


def test_a_transaction_that_no_coordinator_knows_hangs_after_a_while() -> None:
    """Not at once, and not while a coordinator does not answer."""
    known = TransactionState("a", "Ongoing", 7, 0, 60_000, 5, [])
    other = OpenProducer("t", 1, 8, 0, 5, 10, 1000)
    parts = [
        TransactionsPart([], [OpenProducer("t", 0, 7, 0, 5, 20, 1000), other], []),
        TransactionsPart([known], [], [7]),
    ]

    def hanging(now_ms: int, *, is_whole: bool = True) -> list[tuple[str, bool]]:
        lines = _lines(parts, now_ms=now_ms, is_whole=is_whole)
        return [(line.transactional_id, line.hangs) for line in lines]

    late_ms = 1001 + HANGS_AFTER_MS
    assert hanging(late_ms) == [("a", False), ("", True)]
    assert hanging(late_ms - 1) == [("a", False), ("", False)]
    assert hanging(late_ms, is_whole=False) == [("a", False), ("", False)]


def test_what_hangs_is_named_with_the_way_to_end_it(crowd: Crowd, monkeypatch: Any) -> None:
    assert cells(crowd.page("/transactions"))["flights 2"][0] == "–"
    monkeypatch.setattr("tierlog.api.console.transaction_pages.HANGS_AFTER_MS", -1)
    page = crowd.page("/transactions")
    assert cells(page)["flights 2"][0] == "hangs: no coordinator knows it"
    assert "kafka-transactions.sh" in page
    assert cells(page)["flights 1"][0] == "open"


def test_a_token_sees_the_transactions_that_the_api_shows_it(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    read = create_token(tokens, "reader", scopes=(Scope.READ,), now_ms=0)
    some = create_token(tokens, "some", scopes=BOTH, topics="orders.", now_ms=0)
    every = create_token(tokens, "every", scopes=BOTH, now_ms=0)
    with served_broker(tmp_path / "data", http=HttpSettings(tokens_file=tokens)) as served:

        def page(token: str) -> str:
            headers = {"authorization": f"Bearer {token}"}
            return httpx2.get(f"{served.server.url}/console/transactions", headers=headers).text

        served.broker.create_topic("flights")
        headers = {"authorization": f"Bearer {every}"}
        begun = httpx2.post(
            f"{served.server.url}/v1/transactions",
            json={"transactional_id": "billing"},
            headers=headers,
        )
        assert begun.status_code == 201, begun.text
        assert "billing" in page(every)
        assert "billing" not in page(some)
        assert "No transactions yet" in page(some)
        assert "billing" not in page(read)
        assert "shown to a token that may produce" in page(read)


# --- a cluster ------------------------------------------------------------------------------------


def test_in_a_cluster_each_broker_shows_the_groups_and_transactions_of_all(
    tmp_path: Path,
) -> None:
    with three_brokers(tmp_path) as brokers, ExitStack() as stack:
        port = brokers[0].kafka_port
        fill(port, stack, partitions=6)
        urls = [one.server.url for one in brokers]
        crowds = [Crowd(url, one) for url, one in zip(urls, brokers, strict=True)]

        def told(one: Crowd) -> dict[str, list[str]]:
            return cells(one.page("/groups")) | cells(one.page("/transactions"))

        for one in crowds:
            until(lambda one=one: {"classic", "modern", "open", "done"} <= told(one).keys())
            rows = told(one)
            assert rows["classic"][:4] == ["classic", "Stable", "1", "6"]
            assert rows["modern"][:4] == ["consumer", "Stable", "1", "6"]
            assert rows["open"][0] == "Ongoing"
            assert rows["flights 1"][0] == "open", "its coordinator and its leader may be two"
        for group in ("classic", "modern"):
            shown = [facts(one.page(f"/group?group={group}")) for one in crowds]
            assert {one["State"] for one in shown} == {"Stable"}
            assert len({one["Coordinator"] for one in shown}) == 1, "the coordinator's own page"


def test_offsets_are_planned_for_all_partitions_by_whichever_broker_is_asked(
    tmp_path: Path,
) -> None:
    with three_brokers(tmp_path) as brokers:
        offsets = [{"topic": "flights", "partition": n, "offset": 0} for n in range(6)]
        url = brokers[0].server.url
        answer = httpx2.put(f"{url}/v1/groups/g/offsets", json={"offsets": offsets}, timeout=20)
        assert answer.status_code == 204
        for number in range(6):
            path = f"{url}/v1/topics/flights/partitions/{number}/records"
            records = {"records": [{"value": "x"}] * (number + 1)}
            assert httpx2.post(path, json=records, timeout=20).status_code == 200
        for one in brokers:
            page = Crowd(one.server.url, one).page("/offsets?group=g&topic=flights&at=latest")
            rows = cells(page)
            for number in range(6):
                end = number + 1
                assert rows[str(number)] == ["0", str(end), "0", f"0 to {end}"]
            for wrong, why in (("partition=9&at=latest", "9"), ("at=7", "offset 7")):
                refused = Crowd(one.server.url, one).page(f"/offsets?group=g&topic=flights&{wrong}")
                assert "data-plan" not in refused
                assert (
                    why in re.findall('class="refusal" role="alert"><bdi>(.*?)</bdi>', refused)[0]
                )


# --- in a browser ---------------------------------------------------------------------------------

PAGES = {
    "groups": "#/groups",
    "classic": "#/group?group=classic",
    "modern": "#/group?group=modern",
    "share": "#/group?group=queue",
    "transactions": "#/transactions",
}


def show(browser: Chromium, url: str, address: str) -> None:
    browser.open(f"{url}/{address}")
    browser.until(f"document.querySelector('#view h1') && {SETTLED}")


@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_on_the_pages_of_groups_and_transactions(
    browser: Chromium, crowd: Crowd, page: str
) -> None:
    for width in (TABLE, 320):
        browser.emulate(width=width)
        show(browser, crowd.url, PAGES[page])
        assert findings(browser) == []
        assert browser.run("document.documentElement.scrollWidth") <= width


def test_a_page_of_a_group_is_refreshed_in_its_place(browser: Chromium, crowd: Crowd) -> None:
    show(browser, crowd.url, "#/group?group=classic")
    (read,) = crowd.api("/groups/classic")["offsets"]
    row = f"lag-flights-{read['partition']}"
    browser.run(f"document.getElementById('{row}').focus()")
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{crowd.served.kafka_port}"})
    producer.produce("flights", b"one more", partition=read["partition"])
    producer.flush(20)
    browser.run("document.body.dispatchEvent(new CustomEvent('tick'))")
    shown = f"flights {read['partition']}\\t{read['offset']}\\t{read['log_end_offset'] + 1}"
    browser.until(f"document.querySelector('#group').innerText.includes('{shown}')")
    assert browser.run("document.activeElement.id") == row
    browser.press("u")
    browser.until("document.querySelector('#groups')")
