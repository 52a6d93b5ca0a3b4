"""Brokers of one cluster in this process, each with its HTTP server on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.fakes.broker_cluster import cluster_of, node_id_of
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.api.http.server import Tls
from tierlog.broker.partition.partition import Partition
from tierlog.object_store.open import open_store
from tierlog.object_store.store import ObjectStore


class ServedCluster:
    def __init__(self, brokers: list[Served]) -> None:
        self.brokers = brokers

    def create(self, name: str, *, partitions: int, **config: object) -> None:
        body = {"name": name, "partitions": partitions, "config": config}
        made = httpx2.post(f"{self.brokers[0].server.url}/v1/topics", json=body)
        assert made.status_code == 201, made.text
        until(lambda: all(self.knows(one, name) for one in self.brokers))

    def knows(self, served: Served, topic: str) -> bool:
        """Whether the broker knows who leads each partition."""
        record = served.broker.topic(topic).record
        find = cluster_of(served.broker).find_leader
        return all(find(record.topic_id, number) for number in range(record.partitions))

    def leader(self, topic: str, number: int = 0) -> Served:
        (found,) = [one for one in self.brokers if number in one.broker.topic(topic).partitions]
        return found

    def others(self, topic: str, number: int = 0) -> list[Served]:
        leader = self.leader(topic, number)
        return [one for one in self.brokers if one is not leader]

    def partition(self, topic: str, number: int = 0) -> Partition:
        return self.leader(topic, number).broker.partition(topic, number)

    def move(self, topic: str, number: int, to: Served) -> None:
        leader = cluster_of(self.leader(topic, number).broker)
        leader.move(topic, number, node_id=node_id_of(to.broker))


@contextmanager
def served_cluster(
    root: Path,
    *,
    brokers: int = 3,
    tls: Sequence[Tls | None] = (),
    bucket: Callable[[], ObjectStore] | None = None,
    **settings: Any,
) -> Iterator[ServedCluster]:
    """`tls`: of each broker. `bucket` opens it; by default a folder."""
    bucket = bucket or (lambda: open_store((root / "bucket").as_uri()))
    with ExitStack() as running:
        served = [
            running.enter_context(
                served_broker(
                    root / f"broker-{number}",
                    store=bucket(),
                    cluster_join=True,
                    heartbeat_interval_ms=200,
                    session_timeout_ms=2_000,
                    cache_bytes=64 << 20,
                    tls=tls[number] if tls else None,
                    **settings,
                )
            )
            for number in range(brokers)
        ]
        for one in served:
            cluster_of(one.broker).members.refresh()
        for one in served:
            cluster_of(one.broker).news.read_reports()
        yield ServedCluster(served)
