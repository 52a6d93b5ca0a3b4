"""The console of one of three brokers shows what all have, and moves partitions between them. The
third is a process, which is killed and started.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.fakes.broker_cluster import cluster_of, node_id_of
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.served_cluster import ServedCluster, served_cluster
from tests.fakes.waiting import until
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import PHONE
from tests.integration.console.test_accessibility import SETTLED, findings
from tierlog.api.console.all_brokers import part_response
from tierlog.api.console.samples import Series
from tierlog.api.console.whole_series import HELD_MS, added_series
from tierlog.api.http.settings import HttpSettings

FLAGS = ("--join", "--heartbeat-interval-ms", "200", "--session-timeout-ms", "2000")
TICK = "document.body.dispatchEvent(new CustomEvent('tick'))"
PARTITIONS = 6
GROUPS = ("delays", "crew", "billing", "gates")


class Lab:
    """`third`: the broker that is a process, and leads a third of `flights`."""

    def __init__(self, cluster: ServedCluster, third: BrokerProcess) -> None:
        self.cluster, self.third = cluster, third
        self.first = cluster.brokers[0]
        self.url = self.first.server.url
        self.api = httpx2.Client(base_url=self.url, timeout=20)

    def leaders(self, topic: str = "flights") -> dict[int, int]:
        described = self.api.get(f"/v1/topics/{topic}").json()
        return {one["partition"]: one["leader"]["node_id"] for one in described["partitions"]}

    def page(self, path: str, **headers: str) -> str:
        answer = self.api.get(f"/console{path}", headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.text


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("lab")
    (root / "third").mkdir()
    third = BrokerProcess(root / "third", *FLAGS, store=(root / "bucket").as_uri())
    http = HttpSettings(console_sample_ms=100, leader_wait_ms=500)
    with served_cluster(root, brokers=2, http=http) as cluster:
        third.start()
        members = [cluster_of(one.broker).members for one in cluster.brokers]
        until(lambda: all(len(one.members()) == 3 for one in members))
        lab = Lab(cluster, third)
        lab.api.post("/v1/topics", json={"name": "flights", "partitions": PARTITIONS})
        until(lambda: len(lab.leaders()) == PARTITIONS)
        records = [{"partition": n, "value": f"from {n}"} for n in range(PARTITIONS)] * 10
        made = lab.api.post("/v1/topics/flights/records", json={"records": records})
        assert made.status_code == 200, made.text
        offsets = [{"topic": "flights", "partition": n, "offset": 4} for n in range(PARTITIONS)]
        for group in GROUPS:
            path = f"/v1/groups/{group}/offsets"
            assert lab.api.put(path, json={"offsets": offsets}).status_code == 204
        yield lab
        lab.api.close()
        third.stop()


def show(browser: Chromium, lab: Lab, address: str, *, until_shown: str = "true") -> None:
    browser.open(f"{lab.url}/{address}")
    browser.until(f"document.querySelector('#view h1') && {SETTLED}")
    browser.until(until_shown)


# --- what all have --------------------------------------------------------------------------------


def test_each_page_shows_what_all_brokers_have(lab: Lab) -> None:
    assert set(lab.leaders().values()) == {0, 1, 2}
    overview = lab.page("/overview")
    assert 'data-label="Records">60<' in overview.replace("\u202f", "")
    assert f'data-label="Partitions">{PARTITIONS}<' in overview
    for sort in ("partition", "-watermark"):
        topic = lab.page(f"/topics/flights?sort={sort}")
        assert topic.count('data-label="High watermark">10<') == PARTITIONS
        assert "does not answer" not in topic
    for number, leader in lab.leaders().items():
        assert f'href="#/topics/flights/partitions/{number}/leader"' in topic
        assert "from" in lab.page(f"/topics/flights/partitions/{number}/records"), leader
    for sort in ("name", "-lag"):
        path = f"/groups?sort={sort}"  # ends are as the leaders said a moment ago
        until(lambda: lab.page(path).count('data-label="Lag">36<') == len(GROUPS))  # noqa: B023
        assert all(lab.page(path).count(f"<bdi>{one}</bdi>") == 1 for one in GROUPS)
    alone = httpx2.get(f"{lab.url}/v1/storage", headers={"tierlog-forwarded": "9"}).json()
    whole = lab.api.get("/v1/storage").json()
    assert alone["hot_bytes"] < whole["hot_bytes"]
    assert sum(one["requests"] for one in whole["store_requests"]) > sum(
        one["requests"] for one in alone["store_requests"]
    )


def test_any_broker_shows_the_schemas(lab: Lab) -> None:
    for number in (1, 2):
        schema = {"schema": json.dumps({"type": "fixed", "name": "f", "size": number})}
        lab.api.put("/config", json={"compatibility": "NONE"}).raise_for_status()
        lab.api.post("/subjects/flights-value/versions", json=schema).raise_for_status()
    paths = (
        "/subjects",
        "/subject?subject=flights-value&version=2&against=1",
        "/topics/flights/schemas",
    )
    for url in (*(one.server.url for one in lab.cluster.brokers), lab.third.url):
        for path in paths:
            shown = httpx2.get(f"{url}/console{path}", timeout=20)
            assert shown.status_code == 200, shown.text
            assert "flights-value" in shown.text


def test_any_broker_decodes_what_it_leads(lab: Lab) -> None:
    lab.api.post("/v1/topics", json={"name": "coded", "partitions": PARTITIONS})
    until(lambda: len(lab.leaders("coded")) == PARTITIONS)
    path = "/subjects/coded-value/versions"
    lab.api.post(path, json={"schema": '"string"'}).raise_for_status()
    records = [{"partition": n, "value": f"of {n}"} for n in range(PARTITIONS)]
    named = {"value_schema_version": "latest"}
    sent = lab.api.post("/v1/topics/coded/records", json={"records": records}, params=named)
    assert sent.status_code == 200, sent.text
    assert set(lab.leaders("coded").values()) == {0, 1, 2}
    for number in range(PARTITIONS):
        path = f"/v1/topics/coded/partitions/{number}/records"
        (one,) = lab.api.get(path, params={"decode": "true"}).json()["records"]
        assert (one["value"], one["value_schema"]["subject"]) == (f"of {number}", "coded-value")


def test_what_another_broker_is_answered_is_no_fragment(lab: Lab) -> None:
    for path in (
        "/topics",
        "/summary",
        "/groups",
        "/transactions",
        "/store",
        "/brokers",
        "/topics/flights",
    ):
        answer = lab.api.get(f"/console{path}", headers={"tierlog-forwarded": "1"})
        assert answer.headers["content-type"] == "application/json"
        assert "tierlog-console" not in answer.headers
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert part_response([]).status == 200


def test_the_charts_of_all_brokers_are_one(lab: Lab) -> None:
    lab.api.get("/console/topics/flights/samples")

    def produced() -> Any:
        for one in lab.cluster.brokers:  # a topic that nobody looks at has no chart
            httpx2.get(f"{one.server.url}/console/topics/flights/samples")
        httpx2.get(f"{lab.third.url}/console/topics/flights/samples")
        return lab.api.get("/console/topics/flights/samples").json()

    until(lambda: len(produced()["at_ms"]) > 2)
    until(lambda: produced()["lag"][-1] == 36)
    (flights,) = [
        one for one in lab.api.get("/v1/storage").json()["topics"] if one["topic"] == "flights"
    ]
    until(lambda: produced()["hot_bytes"][-1] == flights["hot_bytes"], patience_s=30)


def test_a_broker_that_was_not_sampled_for_long_adds_nothing() -> None:
    def of(*at_ms: int, value: float) -> Series:
        return Series(list(at_ms), *([value] * len(at_ms) for _ in range(6)))

    own = of(1000, 2000, HELD_MS + 2001, value=1)
    both = added_series(own, [of(500, 2000, value=2), of(1999, 3000, value=4)])
    assert both.produced_bytes_per_s == [3, 7, 5]
    assert both.lag_ms == [2, 4, 4]
    assert own.produced_bytes_per_s == [1, 1, 1]


def found(lab: Lab, **query: str) -> tuple[list[tuple[int, int, int]], dict[str, Any]]:
    """(partition, offset, timestamp) of what a search finds, and its last line."""
    answer = lab.api.get("/console/topics/flights/found", params=query)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    records = [one for line in lines for one in line["records"]]
    return [(one["partition"], one["offset"], one["timestamp"]) for one in records], lines[-1]


EVERY = {(number, offset) for number in range(PARTITIONS) for offset in range(10)}


def test_a_search_of_one_partition_is_at_its_leader(lab: Lab) -> None:
    for number in lab.leaders():
        for path in ("found", "download"):
            params = {"text": f"from {number}", "partition": str(number)}
            answer = lab.api.get(f"/console/topics/flights/{path}", params=params)
            assert answer.status_code == 200, answer.text
            assert f"from {number}" in answer.text


def test_a_search_of_all_partitions_is_of_all_brokers_in_either_order(lab: Lab) -> None:
    assert set(lab.leaders().values()) == {0, 1, 2}
    for order in ("newest", "oldest"):
        records, last = found(lab, text="from", order=order)
        progress = last["progress"]
        assert {one[:2] for one in records} == EVERY
        assert len(records) == len(EVERY)
        assert (progress["found"], progress["end"], progress["troubles"]) == (60, "complete", [])
        assert progress["records"] == progress["offsets"] == progress["offsets_in_all"] == 60
        if order == "oldest":
            assert [one[:2] for one in records] == sorted(EVERY)
    download = lab.api.get("/console/topics/flights/download", params={"text": "from"})
    assert len(download.text.splitlines()) == 60


@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_a_search_of_all_brokers_goes_on_where_it_ended(lab: Lab, order: str) -> None:
    seen: list[tuple[int, int]] = []
    query = {"text": "from", "order": order, "limit": "7"}
    while True:
        records, last = found(lab, **query)
        seen += [one[:2] for one in records]
        if last["progress"]["end"] == "complete":
            break
        assert (len(records), last["progress"]["end"]) == (7, "limit")
        query["after"] = last["place"]
    assert len(seen) == len(EVERY)
    assert set(seen) == EVERY


# --- moving ---------------------------------------------------------------------------------------


def test_a_partition_is_moved_after_a_look_at_what_would_be_done(
    browser: Chromium, lab: Lab
) -> None:
    number, source = next((n, one) for n, one in lab.leaders().items() if one != 2)
    show(browser, lab, "#/topics/flights")
    browser.run(f"document.querySelector('a[href$=\"partitions/{number}/leader\"]').click()")
    browser.until("document.querySelector('select[name=to]')")
    browser.run("document.querySelector('select[name=to]').value = '2'")
    browser.run("document.querySelector('form[data-route]').requestSubmit()")
    browser.until("document.querySelector('form[data-act=move]')")
    assert "up to offset 10" in browser.text()
    assert lab.leaders()[number] == source, "nothing is done before it is asked for"
    browser.run("document.querySelector('form[data-act=move] button').click()")
    browser.until("document.querySelector('[data-state]').textContent.includes('Broker 2 leads')")
    until(lambda: lab.leaders()[number] == 2)
    assert "epoch 2" not in browser.run("document.querySelector('[data-refusal]').textContent")


def test_a_broker_is_drained_and_given_its_share_again(browser: Chromium, lab: Lab) -> None:
    show(
        browser, lab, "#/brokers", until_shown="document.querySelectorAll('tbody tr').length === 3"
    )
    browser.run("document.querySelector('a[href=\"#/drain?node=1\"]').click()")
    browser.until("document.querySelectorAll('[data-plan] tbody tr').length")
    browser.run("document.querySelector('form[data-act=drain] button').click()")
    browser.until("document.querySelector('[data-state]').textContent.includes('has nothing')")
    until(lambda: 1 not in lab.leaders().values())
    browser.run("document.querySelector('[data-answer] a').click()")
    browser.until("document.querySelector('#brokers')?.innerText.includes('draining')")
    browser.run("document.querySelector('a[href=\"#/drain?node=1\"]').click()")
    browser.until("document.querySelector('form[data-act=undrain]')")
    browser.run("document.querySelector('form[data-act=undrain] button').click()")
    browser.until("document.querySelector('[data-state]').textContent.includes('may lead again')")
    show(browser, lab, "#/balance", until_shown="document.querySelector('[data-plan]')")
    browser.run("document.querySelector('form[data-act=balance] button').click()")
    browser.until("/^Moved: \\d+\\.$/.test(document.querySelector('[data-state]').textContent)")
    until(lambda: 1 in lab.leaders().values())


# --- axe, and a broker that is down ---------------------------------------------------------------

PAGES = {
    "brokers": "#/brokers",
    "balance": "#/balance",
    "drain": "#/drain?node=1",
    "move": "#/topics/flights/partitions/{}/leader?to={}",
    "topic": "#/topics/flights",
    "groups": "#/groups",
    "group": "#/group?group=crew",
}


@pytest.mark.parametrize("width", [PHONE, 1280])
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_on_the_pages_of_a_cluster(
    browser: Chromium, lab: Lab, page: str, width: int
) -> None:
    number, leader = next(iter(lab.leaders().items()))
    check_with_axe(browser, lab, PAGES[page].format(number, (leader + 1) % 3), width)


def check_with_axe(browser: Chromium, lab: Lab, address: str, width: int) -> None:
    browser.emulate(width=width)
    show(browser, lab, address)
    assert findings(browser) == []
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_a_broker_is_seen_to_be_down_and_back_without_a_reload(browser: Chromium, lab: Lab) -> None:
    led = [number for number, one in lab.leaders().items() if one == 2]
    show(
        browser, lab, "#/brokers", until_shown="document.querySelectorAll('tbody tr').length === 3"
    )
    assert "does not answer" not in browser.text()
    lab.third.kill()
    for order in ("newest", "oldest"):  # it is not known to be dead yet
        records, last = found(lab, text="from", order=order)
        assert {one[:2] for one in records} == {one for one in EVERY if one[0] not in led}
        assert last["progress"]["end"] == "complete"
        assert len(last["progress"]["troubles"]) in (1, len(led))
    members = cluster_of(lab.first.broker).members
    until(lambda: not members.find_member(2).is_alive)
    until(lambda: not cluster_of(lab.first.broker).leaders.led_by(2))
    browser.run(f"{TICK}, window.kept = true")
    browser.until("document.querySelector('#brokers').innerText.includes('is down')")
    browser.until("document.querySelector('#brokers').innerText.includes('no leader')")
    for path in ("/overview", "/topics/flights", "/groups", "/transactions", "/store"):
        assert "Broker 2 does not answer" in lab.page(path), path
    plan = lab.page("/offsets?group=crew&topic=flights&at=latest")
    assert "Broker 2 does not answer" in plan
    assert f"no leader of partition {min(led)} answers" in plan
    assert "data-plan" not in plan
    topic = lab.page("/topics/flights")
    assert topic.count("broker 2, which led it, is down") == len(led)
    assert topic.count('data-label="High watermark">10<') == PARTITIONS - len(led)
    assert f"{len(led)} without a leader" in lab.page("/overview")
    for address in ("#/brokers", "#/topics/flights"):
        check_with_axe(browser, lab, address, 1280)
    show(browser, lab, "#/brokers")
    browser.run("window.kept = true")
    lab.third.start()
    until(lambda: members.find_member(2).is_alive)
    until(lambda: len(lab.leaders()) == PARTITIONS)
    browser.run(TICK)
    browser.until("!document.querySelector('#brokers').innerText.includes('is down')")
    assert browser.run("window.kept"), "the page was not loaded again"
    assert node_id_of(lab.first.broker) == 0
