"""A flipped byte in one log: the errors that clients get, and the repair."""

import json

import httpx2
import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.command_line import Program
from tests.fakes.damage import flip
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.produced import build_produced


@pytest.fixture
def broker(tmp_path):
    """Topic `t`; partition 0 has a flipped byte in flushed data, partition 1 is intact."""
    process = BrokerProcess(tmp_path).start()
    with httpx2.Client(base_url=process.url) as http:
        http.post("/v1/topics", json={"name": "t", "partitions": 2})
        for number in range(6):
            records = [{"value": f"value {number}", "partition": number % 2}]
            assert http.post("/v1/topics/t/records", json={"records": records}).is_success
    assert process.stop() == 0
    (tmp_path / "data" / ".kafka_cleanshutdown").unlink()
    log = tmp_path / "data" / "t-0" / "00000000000000000000.log"
    flip(log, -1)
    yield process.start(until="/healthz")
    process.kill()


def test_a_damaged_partition_is_reported_and_repaired(broker, tmp_path):
    with httpx2.Client(base_url=broker.url) as http:
        ready = http.get("/readyz")
        assert ready.status_code == 503
        assert "t-0/00000000000000000000.log" in ready.json()["reasons"][0]
        assert str(tmp_path) not in ready.text
        for response in (
            http.get("/v1/topics/t/partitions/0/records"),
            http.get("/v1/topics/t/partitions/0/offsets"),
            http.post("/v1/topics/t/partitions/0/records", json={"records": [{"value": "x"}]}),
            http.post("/v1/topics/t/records", json={"records": [{"value": "x", "partition": 0}]}),
            http.get("/v1/topics/t/tail"),
        ):
            problem = response.json()
            assert (response.status_code, problem["code"]) == (500, "corrupt-log")
            assert problem["file"] == "t-0/00000000000000000000.log"
            assert problem["position"] > 0
        for _ in range(4):  # without a key: to a writable partition
            placed = http.post("/v1/topics/t/records", json={"records": [{"value": "y"}]})
            assert placed.json()["results"][0]["partition"] == 1
        assert len(http.get("/v1/topics/t/partitions/1/records").json()["records"]) == 7
        described = http.get("/v1/topics/t").json()
        assert [partition["partition"] for partition in described["damaged_partitions"]] == [0]
        assert 'tierlog_partitions{state="damaged"} 1.0' in http.get("/metrics").text
    online = Program(broker.url)
    for command in ("topic", "describe"), ("storage", "segments"):
        result = online.run(*command, "t", "--output", "text")
        assert (result.returncode, b"partition 0 is not served" in result.stderr) == (0, True)
    assert broker.stop() == 0

    flags = ("--store", broker.store, "--data-dir", str(tmp_path / "data"))
    offline = Program()
    plan = offline.run("storage", "repair", "t", *flags)
    (step,) = json.loads(plan.stdout)["steps"]
    assert (plan.returncode, step["action"], step["base_offset"]) == (3, "cut", 0)
    assert offline.run("storage", "repair", "t", *flags, "--apply").returncode == 3
    offline.ok("storage", "repair", "t", *flags, "--apply", "--accept-loss")
    assert list((tmp_path / "data" / "tierlog" / "damaged").iterdir())

    broker.start()
    with httpx2.Client(base_url=broker.url) as http:
        remaining = http.get("/v1/topics/t/partitions/0/records").json()["records"]
    assert [record["value"] for record in remaining] == ["value 0", "value 2"]


def test_a_local_only_folder_is_repaired_without_a_store(tmp_path):
    broker = Broker.open_idle(BrokerSettings(data_dir=tmp_path / "data"), store=None)
    broker.create_topic("t", config={"segment.bytes": 1024, "retention.ms": -1})
    values = [b"x" * 100] * 10
    for _ in range(3):
        produced = build_produced(values, timestamps=range(10), max_message_bytes=1 << 20)
        broker.partition("t", 0).append(produced, acks=Acks.ALL).result(10)
        broker.partition("t", 0).upkeep.roll()
    broker.close()
    (tmp_path / "data" / "t-0" / "00000000000000000010.log").unlink()
    offline, flags = Program(), ("t", "--data-dir", str(tmp_path / "data"), "--deep")
    plan = offline.run("storage", "repair", *flags)
    (step,) = json.loads(plan.stdout)["steps"]
    assert (plan.returncode, step["action"]) == (3, "drop-batches")
    offline.ok("storage", "repair", *flags, "--apply", "--accept-loss")
    assert json.loads(offline.ok("storage", "repair", *flags))["steps"] == []


def test_repair_of_a_folder_with_a_bucket_requires_the_store(tmp_path):
    store = open_store(f"file://{tmp_path / 'bucket'}")
    broker = Broker.open_idle(BrokerSettings(data_dir=tmp_path / "data"), store=store)
    broker.create_topic("t")
    broker.background.copy_round()
    assert broker.background.copier.wait_until_idle(timeout_s=10)
    broker.close()
    flags = ("t", "--data-dir", str(tmp_path / "data"))
    assert "has the bucket" in Program().fails(1, "storage", "repair", *flags)
    assert "--store" in Program().fails(2, "storage", "gc", *flags)
