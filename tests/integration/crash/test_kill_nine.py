"""Kill -9 while producers write and segments are offloaded: acknowledged records survive.

The records go through HTTP, group commit, roll, offload and local retention. After each restart
every acknowledged record is read back at the offset that its acknowledgement named.
"""

import random
import threading
import time

import httpx2

from tests.fakes.broker_process import BrokerProcess

PRODUCERS = 4
RUNS = 3
CONFIG = {"segment.bytes": 8192, "local.retention.bytes": 32768, "retention.ms": -1}


class Producer(threading.Thread):
    """Appends numbered records until the broker dies; keeps the acknowledged ones."""

    def __init__(self, url: str, number: int, run_number: int) -> None:
        super().__init__(daemon=True)
        self.url, self.number, self.run_number = f"{url}/v1/topics/t/records", number, run_number
        self.acknowledged: dict[tuple[int, int], str] = {}

    def run(self) -> None:
        count = 0
        with httpx2.Client(timeout=10) as client:
            while True:
                values = [
                    f"{self.run_number}-{self.number}-{count + i}" + "x" * 50 for i in range(5)
                ]
                records = [{"value": value, "partition": count % 2} for value in values]
                try:
                    response = client.post(self.url, json={"records": records})
                except httpx2.TransportError:
                    return
                assert response.status_code == 200, response.text
                (result,) = response.json()["results"]
                for i, value in enumerate(values):
                    position = result["partition"], result["base_offset"] + i
                    assert position not in self.acknowledged, "an offset was assigned twice"
                    self.acknowledged[position] = value
                count += 5


def read_all(url: str, partition: int) -> dict[tuple[int, int], str]:
    found, offset = {}, 0
    with httpx2.Client(timeout=30) as client:
        while True:
            path = f"{url}/v1/topics/t/partitions/{partition}/records"
            response = client.get(path, params={"offset": offset})
            assert response.status_code == 200, response.text
            body = response.json()
            for record in body["records"]:
                found[partition, record["offset"]] = record["value"]
            offset = body["next_offset"]
            if offset == body["high_watermark"]:
                return found


def test_acknowledged_records_survive_kill_nine(tmp_path):
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    broker = BrokerProcess(tmp_path, "--retention-check-interval", "0.2").start()
    acknowledged: dict[tuple[int, int], str] = {}
    try:
        created = httpx2.post(
            f"{broker.url}/v1/topics", json={"name": "t", "partitions": 2, "config": CONFIG}
        )
        assert created.status_code == 201, created.text
        for run_number in range(RUNS):
            producers = [Producer(broker.url, number, run_number) for number in range(PRODUCERS)]
            for producer in producers:
                producer.start()
            deadline = time.monotonic() + rng.uniform(0.3, 1.0)
            while time.monotonic() < deadline:
                httpx2.post(f"{broker.url}/v1/topics/t/offload", params={"wait_ms": 50}, timeout=10)
            broker.kill()
            for producer in producers:
                producer.join(20)
                for position, value in producer.acknowledged.items():
                    assert position not in acknowledged, f"offset {position} was assigned twice"
                    acknowledged[position] = value
            broker.start()
            found = read_all(broker.url, 0) | read_all(broker.url, 1)
            lost = {
                position: value
                for position, value in acknowledged.items()
                if found.get(position) != value
            }
            assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged records are lost"
        assert len(acknowledged) > 100, "too few records were acknowledged"
        assert broker.stop() == 0
    finally:
        broker.kill()
