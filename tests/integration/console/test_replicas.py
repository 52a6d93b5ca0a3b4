"""The console shows who has a partition and who is in sync, and an election as it happens. The
third broker is a process, which is killed and started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.fakes.broker_cluster import cluster_of
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.served_cluster import served_cluster
from tests.fakes.waiting import until
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import PHONE
from tests.integration.console.test_cluster import FLAGS, TICK, Lab, check_with_axe, show
from tierlog.api.http.settings import HttpSettings

QUICK = ("--replica-lag-time-max-ms", "1500")
PARTITIONS = 3


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("replicas")
    (root / "third").mkdir()
    third = BrokerProcess(root / "third", *FLAGS, *QUICK, store=(root / "bucket").as_uri())
    http = HttpSettings(console_sample_ms=100, leader_wait_ms=500)
    with served_cluster(root, brokers=2, http=http, replica_lag_time_max_ms=1_500) as cluster:
        third.start()
        members = [cluster_of(one.broker).members for one in cluster.brokers]
        until(lambda: all(len(one.members()) == 3 for one in members))
        lab = Lab(cluster, third)
        topic = {"name": "flights", "partitions": PARTITIONS, "replication_factor": 3}
        assert lab.api.post("/v1/topics", json=topic).status_code == 201
        until(lambda: set(lab.leaders().values()) == {0, 1, 2})
        records = [{"partition": n, "value": f"from {n}"} for n in range(PARTITIONS)] * 10
        made = lab.api.post("/v1/topics/flights/records", json={"records": records})
        assert made.status_code == 200, made.text
        yield lab
        lab.api.close()
        third.stop()


def replicas(page: str) -> list[str]:
    """What each partition's cell says."""
    cells = re.findall(r'data-label="Replicas" class="replicas">(.*?)</td>', page, re.S)
    return [" ".join(re.sub(r"<[^>]*>", " ", one).split()) for one in cells]


def test_replicas_an_election_and_what_is_out_of_sync_are_seen_without_a_reload(
    browser: Chromium, lab: Lab
) -> None:
    every = [["0", "1", "2"]] * PARTITIONS
    until(lambda: [sorted(one.split()) for one in replicas(lab.page("/topics/flights"))] == every)
    assert "under-replicated" not in lab.page("/overview")
    (number,) = [n for n, one in lab.leaders().items() if one == 2]
    show(browser, lab, "#/topics/flights")
    lab.third.kill()
    browser.run("window.kept = true")
    cell = f"[...document.querySelectorAll('#partitions tbody tr')][{number}].innerText"

    def shown(text: str) -> bool:
        browser.run(TICK)
        return bool(browser.run(f"{cell}.includes({text!r})"))

    until(lambda: shown("epoch 2"))
    until(lambda: shown("2 not in sync"))
    assert browser.run("window.kept"), "the page was not loaded again"
    until(lambda: lab.page("/topics/flights").count("not in sync") == PARTITIONS)
    assert f"{PARTITIONS} under-replicated" in lab.page("/overview")
    brokers = lab.page("/brokers")
    assert f"{PARTITIONS} not in sync" in brokers
    assert f"{PARTITIONS} partitions have fewer replicas in sync" in brokers
    assert "no leader" not in brokers
    leader = lab.leaders()[number]
    head = lab.page(f"/topics/flights/partitions/{number}/records")
    assert f"<dt>Leader</dt><dd>{leader}</dd>" in head
    assert "2 not in sync" in head
    for address in ("#/overview", "#/topics/flights", "#/brokers"):
        for width in (PHONE, 1280):
            check_with_axe(browser, lab, address, width)
    show(browser, lab, "#/brokers")
    lab.third.start()
    until(lambda: "not in sync" not in lab.page("/topics/flights"), patience_s=60)
    browser.run(TICK)
    browser.until("!document.querySelector('#brokers').innerText.includes('not in sync')")


def test_writes_that_are_refused_are_seen(lab: Lab) -> None:
    name = "doubled"
    topic = {"name": name, "replicas": [[0, 2]]}
    assert lab.api.post("/v1/topics", json=topic).status_code == 201
    until(lambda: lab.leaders(name) == {0: 0})
    lab.third.kill()
    until(lambda: "1 refusing acks=all" in lab.page("/overview"), patience_s=60)
    assert "1 partition refuses writes" in lab.page(f"/topics/{name}")
    lab.third.start()
    until(lambda: "refus" not in lab.page(f"/topics/{name}"), patience_s=60)


def test_the_bucket_is_seen_as_a_replica(browser: Chromium, lab: Lab) -> None:
    name = "kept"
    topic = {"name": name, "replicas": [[0]], "config": {"replication.store": "always"}}
    assert lab.api.post("/v1/topics", json=topic).status_code == 201
    until(lambda: replicas(lab.page(f"/topics/{name}")) == ["0 bucket"])
    show(browser, lab, "#/brokers")
    browser.run(TICK)
    browser.until(
        "document.querySelector('#brokers').innerText"
        ".includes('The bucket is a replica of 1 partition, in sync.')"
    )
    check_with_axe(browser, lab, "#/brokers", PHONE)
