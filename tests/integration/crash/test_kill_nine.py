"""Kill -9 while producers write and segments move to the bucket: what was acknowledged is there.

The records go through the whole way: HTTP, group commit, roll, offload, local retention. After each
life every acknowledged record is read back at the very offset that its acknowledgement named.
"""

import random
import threading
import time

import httpx

from tests.fakes.broker_process import BrokerProcess

PRODUCERS = 4
LIVES = 3
CONFIG = {"segment.bytes": 8192, "local.retention.bytes": 32768, "retention.ms": -1}


class Producer(threading.Thread):
    """Appends numbered records until the broker dies; keeps what was acknowledged."""

    def __init__(self, url: str, number: int, life: int) -> None:
        super().__init__(daemon=True)
        self.url, self.number, self.life = f"{url}/v1/topics/t/records", number, life
        self.acknowledged: dict[tuple[int, int], str] = {}

    def run(self) -> None:
        count = 0
        with httpx.Client(timeout=10) as client:
            while True:
                values = [f"{self.life}-{self.number}-{count + i}" + "x" * 50 for i in range(5)]
                records = [{"value": value, "partition": count % 2} for value in values]
                try:
                    answer = client.post(self.url, json={"records": records})
                except httpx.TransportError:
                    return
                assert answer.status_code == 200, answer.text
                (result,) = answer.json()["results"]
                for i, value in enumerate(values):
                    place = result["partition"], result["base_offset"] + i
                    assert place not in self.acknowledged, "an offset was given twice"
                    self.acknowledged[place] = value
                count += 5


def read_all(url: str, partition: int) -> dict[tuple[int, int], str]:
    found, offset = {}, 0
    with httpx.Client(timeout=30) as client:
        while True:
            path = f"{url}/v1/topics/t/partitions/{partition}/records"
            answer = client.get(path, params={"offset": offset})
            assert answer.status_code == 200, answer.text
            body = answer.json()
            for record in body["records"]:
                found[partition, record["offset"]] = record["value"]
            offset = body["next_offset"]
            if offset == body["high_watermark"]:
                return found


def test_what_was_acknowledged_survives_kill_nine(tmp_path):
    seed = random.randrange(10**6)
    print("seed", seed)
    dice = random.Random(seed)
    broker = BrokerProcess(tmp_path, "--retention-check-interval", "0.2").start()
    acknowledged: dict[tuple[int, int], str] = {}
    try:
        created = httpx.post(
            f"{broker.url}/v1/topics", json={"name": "t", "partitions": 2, "config": CONFIG}
        )
        assert created.status_code == 201, created.text
        for life in range(LIVES):
            producers = [Producer(broker.url, number, life) for number in range(PRODUCERS)]
            for producer in producers:
                producer.start()
            deadline = time.monotonic() + dice.uniform(0.3, 1.0)
            while time.monotonic() < deadline:
                httpx.post(f"{broker.url}/v1/topics/t/offload", params={"wait_ms": 50}, timeout=10)
            broker.kill()
            for producer in producers:
                producer.join(20)
                for place, value in producer.acknowledged.items():
                    assert place not in acknowledged, f"offset {place} was given twice"
                    acknowledged[place] = value
            broker.start()
            found = read_all(broker.url, 0) | read_all(broker.url, 1)
            lost = {
                place: value for place, value in acknowledged.items() if found.get(place) != value
            }
            assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged records are lost"
        assert len(acknowledged) > 100, "the test wrote too little to mean something"
        assert broker.stop() == 0
    finally:
        broker.kill()
