"""A broker whose event loop does not run answers nobody: it is taken for dead, disk or no disk."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.fakes.broker_cluster import cluster_of, node_id_of
from tests.fakes.served_broker import Served
from tests.fakes.served_cluster import ServedCluster, served_cluster
from tests.fakes.waiting import until
from tierlog.api.http import server
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.membership import members
from tierlog.host.clock import wall_clock_ms


class HangingClock:
    """A clock that the next event loop which asks for the time does not get back from."""

    def __init__(self) -> None:
        self.hangs, self.is_over = threading.Event(), threading.Event()

    def __call__(self) -> int:
        if self.hangs.is_set() and _is_on_a_loop():
            self.hangs.clear()
            assert self.is_over.wait(60)
        return wall_clock_ms()


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def leaders(cluster: ServedCluster) -> list[Served]:
    return [one for one in cluster.brokers if 0 in one.broker.topic("t").partitions]


def is_seen(one: Served, by: Served) -> bool:
    member = cluster_of(by.broker).members.member(node_id_of(one.broker))
    return member is not None and member.is_alive


def test_another_leads_while_a_leaders_event_loop_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "HANGS_S", 0.5)
    monkeypatch.setattr(server, "_PULSE_S", 0.1)
    clock = HangingClock()
    settings = HttpSettings(clock=clock)
    with served_cluster(tmp_path, http=settings) as cluster, ThreadPoolExecutor(1) as pool:
        url = f"{cluster.brokers[0].server.url}/v1/topics"
        made = httpx2.post(url, json={"name": "t", "partitions": 1, "replication_factor": 3})
        assert made.status_code == 201, made.text
        until(lambda: leaders(cluster), patience_s=30)
        (old,) = leaders(cluster)
        records = "/v1/topics/t/partitions/0/records"
        body = {"records": [{"value": "a"}]}
        clock.hangs.set()
        hung = pool.submit(httpx2.post, f"{old.server.url}{records}", json=body, timeout=90)
        others = [one for one in cluster.brokers if one is not old]
        until(lambda: not any(is_seen(old, one) for one in others), patience_s=30)
        until(lambda: any(one is not old for one in leaders(cluster)), patience_s=30)
        new = next(one for one in leaders(cluster) if one is not old)
        made = httpx2.post(f"{new.server.url}{records}", json=body, timeout=30)
        assert made.status_code == 200, made.text
        clock.is_over.set()
        assert hung.result(90).status_code in (200, 421, 503)
        until(lambda: all(is_seen(old, one) for one in others), patience_s=30)
        until(lambda: leaders(cluster) == [new], patience_s=30)
