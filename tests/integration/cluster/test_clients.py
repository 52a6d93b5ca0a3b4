"""Clients of a cluster of real processes: a rolling restart, and a broker that is killed, under
producers and consumers.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from itertools import count
from pathlib import Path

from tests.fakes.cluster_processes import ClusterOfProcesses, cluster_of_processes
from tests.fakes.waiting import until
from tierlog.client.client import AsyncClient, Client
from tierlog.client.exchange import RETRY_OVER_RESTART, AnswerLost

PARTITIONS = 6


class Follower(threading.Thread):
    """As `consume --follow`, until it is told the end."""

    def __init__(self, servers: str) -> None:
        super().__init__(daemon=True)
        self.servers = servers
        self.values: defaultdict[int, list[bytes]] = defaultdict(list)

    def run(self) -> None:
        with Client(self.servers) as client:
            for record in client.consume("flights", follow=True):
                if record.value == b"end":
                    return
                self.values[record.partition].append(record.value or b"")


def roll(cluster: ClusterOfProcesses) -> None:
    for broker in cluster.brokers:
        assert broker.stop() == 0
        broker.start()


def test_over_a_rolling_restart_no_record_is_lost_doubled_or_reordered(tmp_path: Path) -> None:
    with cluster_of_processes(tmp_path, "folder") as cluster:
        servers = cluster.servers
        with Client(servers) as client:
            client.create_topic("flights", partitions=PARTITIONS, replication_factor=3)
        follower, stop = Follower(servers), threading.Event()
        follower.start()
        sent: defaultdict[int, list[bytes]] = defaultdict(list)

        def produce() -> None:
            with Client(servers) as client, client.producer() as producer:
                for number in count():
                    value = b"%d" % number
                    producer.send("flights", value, partition=number % PARTITIONS)
                    sent[number % PARTITIONS].append(value)
                    if stop.wait(0.03):
                        break

        producing = threading.Thread(target=produce)
        producing.start()
        try:
            roll(cluster)
        finally:
            stop.set()
            producing.join()
        until(lambda: follower.values == sent, patience_s=60)
        with Client(servers, retries=RETRY_OVER_RESTART) as client:
            cluster.brokers[1].kill()
            cluster.brokers[1].start()
            for number in range(PARTITIONS):
                end(client, servers, number)
        follower.join(60)
        assert not follower.is_alive(), "it outlived all of it"
        assert asyncio.run(_read_all(servers)) == {
            one: [*values, b"end"] for one, values in sent.items()
        }


def end(client: Client, servers: str, number: int) -> None:
    """Produce the last value once, also if the broker that was just started drops the call."""
    try:
        client.produce("flights", [b"end"], partition=number)
    except AnswerLost:
        if asyncio.run(_read_all(servers))[number][-1] != b"end":
            client.produce("flights", [b"end"], partition=number)


async def _read_all(servers: str) -> dict[int, list[bytes]]:
    found: defaultdict[int, list[bytes]] = defaultdict(list)
    async with AsyncClient(servers.split(",")) as client:
        async for record in client.consume("flights"):
            found[record.partition].append(record.value or b"")
    return found
