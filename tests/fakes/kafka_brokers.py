"""Three brokers of a cluster with Kafka listeners, in one process, and moving between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from confluent_kafka.admin import AdminClient

from tests.fakes.broker_cluster import cluster_of, node_id_of
from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.object_store.open import open_store

PARTITIONS = 6
Brokers = list[Served]


@contextmanager
def three_brokers(root: Path) -> Iterator[Brokers]:
    """With a topic, `flights`, that has leaders on each of them."""
    with ExitStack() as stack:
        served = [
            stack.enter_context(
                served_broker(
                    root / f"broker-{number}",
                    store=open_store((root / "bucket").as_uri()),
                    kafka=KafkaSettings(),
                    cluster_join=True,
                    heartbeat_interval_ms=200,
                    session_timeout_ms=10_000,  # none dies, however busy the machine is
                    cache_bytes=16 << 20,
                    offsets_topic_num_partitions=3,
                    transaction_state_log_num_partitions=3,
                    share_coordinator_state_topic_num_partitions=3,
                    group_share_assignment_interval_ms=0,
                    group_initial_rebalance_delay_ms=0,
                )
            )
            for number in range(3)
        ]
        for one in served:
            cluster_of(one.broker).members.refresh()
        served[0].broker.create_topic("flights", partitions=PARTITIONS)
        until(lambda: all(len(leads(served, one)) == PARTITIONS // 3 for one in served))
        yield served


def leads(served: Brokers, one: Served, topic: str = "flights") -> list[int]:
    """The partitions that all brokers say that it leads."""
    topic_id = one.broker.topic(topic).record.topic_id
    found = []
    for number in range(one.broker.topic(topic).record.partitions):
        said = [cluster_of(it.broker).find_leader(topic_id, number) for it in served]
        if {leader and leader.node_id for leader in said} == {node_id_of(one.broker)}:
            found.append(number)
    return found


def leader_of(served: Brokers, topic: str, number: int) -> Served:
    (found,) = [one for one in served if number in one.broker.topic(topic).partitions]
    return found


def move(served: Brokers, topic: str, number: int) -> Served:
    """To the next broker in line, which is returned."""
    old = leader_of(served, topic, number)
    new = served[(served.index(old) + 1) % len(served)]
    cluster_of(old.broker).move(topic, number, node_id=node_id_of(new.broker))
    return new


def addresses(served: Brokers) -> str:
    return ",".join(f"127.0.0.1:{one.kafka_port}" for one in served)


@contextmanager
def three_processes(root: Path, **env: str) -> Iterator[list[tuple[BrokerProcess, int]]]:
    """Brokers 0, 1 and 2 of a cluster, each with the port of its Kafka listener."""
    made = list[tuple[BrokerProcess, int]]()
    try:
        for number in range(3):
            port, folder = free_port(), root / str(number)
            folder.mkdir()
            flags = ("--join", "--node-id", str(number), "--kafka-listen", f"127.0.0.1:{port}")
            given = {
                "TIERLOG_HEARTBEAT_INTERVAL_MS": "200",
                "TIERLOG_SESSION_TIMEOUT_MS": "3000",
                **env,
            }
            process = BrokerProcess(folder, *flags, store=f"file://{root}/bucket", **given)
            made.append((process, port))
            process.start()
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{made[0][1]}"})
        until(lambda: len(admin.list_topics(timeout=20).brokers) == 3)
        yield made
    finally:
        for process, _ in made:
            process.kill()
