"""What a new replica copies, and how long a thousand partitions are without a leader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.waiting import until
from tierlog.client.wire import RECORD_BATCHES
from tierlog.record_format.encode import encode_batch

TOPIC = "flights"
MIB = 1 << 20
PARTITIONS = 1000


@contextmanager
def three_brokers(root: Path, *flags: str) -> Iterator[list[BrokerProcess]]:
    """With the time-outs that there are by default."""
    store, brokers = (root / "bucket").as_uri(), list[BrokerProcess]()
    try:
        for node_id in range(3):
            folder = root / f"broker-{node_id}"
            folder.mkdir()
            joins = ("--join", "--node-id", str(node_id), *flags)
            brokers.append(BrokerProcess(folder, *joins, store=store).start())
        until(lambda: all(living(one) == 3 for one in brokers), patience_s=60)
        yield brokers
    finally:
        for broker in brokers:
            broker.kill()


def call(method: str, url: str, **given: Any) -> Any:
    answer = httpx2.request(method, url, timeout=300, **given)
    assert answer.status_code < 300, f"{url}: {answer.status_code} {answer.text}"
    return answer.json()


def living(broker: BrokerProcess) -> int:
    """How many brokers it knows that live."""
    shown = call("GET", f"{broker.url}/v1/cluster")["brokers"]
    return sum(one["is_alive"] for one in shown)


def size_of(broker: BrokerProcess) -> int:
    folder = broker.root / "data" / f"{TOPIC}-0"
    return sum(path.stat().st_size for path in folder.glob("*.log"))


def value_of(metric: str, broker: BrokerProcess) -> float:
    """Of all its labels together."""
    text = httpx2.get(f"{broker.url}/metrics", timeout=60).text
    lines = [one for one in text.splitlines() if one.startswith(metric)]
    return sum(float(one.split()[-1]) for one in lines)


@pytest.mark.soak
def test_a_new_replica_copies_what_is_on_its_leaders_disk_and_not_what_is_in_the_bucket(
    tmp_path: Path,
) -> None:
    with three_brokers(tmp_path, "--retention-check-interval", "1") as brokers:
        leader, new = brokers[0], brokers[2]
        topic = f"{leader.url}/v1/topics/{TOPIC}"
        config = {"segment.bytes": 4 * MIB, "local.retention.bytes": 12 * MIB, "retention.ms": -1}
        document = {"name": TOPIC, "partitions": 1, "replicas": [[0, 1]], "config": config}
        call("POST", f"{leader.url}/v1/topics", json=document)
        batch = bytes(encode_batch([bytes(1000)] * 1000, timestamps=[1_700_000_000_000] * 1000))
        headers = {"content-type": RECORD_BATCHES}
        for _ in range(1000):
            records = f"{topic}/partitions/0/records"
            call("POST", records, content=batch, headers=headers)
        until(lambda: size_of(leader) <= 20 * MIB, patience_s=120)
        assert (
            sum(path.stat().st_size for path in tmp_path.glob("bucket/**/*") if path.is_file())
            > 900 * MIB
        )
        before = value_of("tierlog_replication_bytes_in_total{", new)
        call("POST", f"{topic}/partitions/0/replicas", json={"replicas": [0, 1, 2]})
        in_sync = lambda: call("GET", topic)["partitions"][0]["in_sync_replicas"]  # noqa: E731
        until(lambda: in_sync() == [0, 1, 2], patience_s=60)
        copied = value_of("tierlog_replication_bytes_in_total{", new) - before
        print(f"{copied / MIB:.1f} MiB copied, of {size_of(leader) / MIB:.1f} on the leader's disk")
        assert size_of(new) <= copied <= 30_000_000


def led_by(broker: BrokerProcess) -> int:
    return len(call("GET", f"{broker.url}/v1/cluster/leaders")["leaders"])


@pytest.mark.soak
def test_a_thousand_partitions_of_a_broker_that_fails_are_led_again_within_15_s(
    tmp_path: Path,
) -> None:
    with three_brokers(tmp_path, "--rebalance-interval-ms", "5000") as brokers:
        old, *others = brokers
        document = {"name": TOPIC, "partitions": PARTITIONS, "replicas": [[0, 1, 2]] * PARTITIONS}
        call("POST", f"{old.url}/v1/topics", json=document)
        until(lambda: led_by(old) == PARTITIONS, patience_s=300)
        until(lambda: value_of("tierlog_under_replicated_partitions ", old) == 0, patience_s=120)
        old.kill()
        began_s = time.monotonic()
        until(lambda: sum(map(led_by, others)) == PARTITIONS, patience_s=120)
        took_s = time.monotonic() - began_s
        print(f"all are led again after {took_s:.1f} s")
        records = {"records": [{"partition": one, "value": "x"} for one in range(PARTITIONS)]}
        url = f"{others[0].url}/v1/topics/{TOPIC}/records"
        # The old leader counts until each set has changed, or its followers have fetched.
        until(lambda: httpx2.post(url, json=records, timeout=300).is_success, patience_s=60)
        assert took_s <= 15
