"""A data folder and bucket written by an older version are opened without loss."""

import shutil
from pathlib import Path

import pytest

from tests.fakes.broker_harness import BrokerHarness
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.produced import ProduceLimits, check_produced
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.repair.verify import verify_topic

OLDER = Path(__file__).parents[2] / "fixtures" / "older"
ORDERS = [b"order %d" % number for number in range(300)]
PRODUCER_ID = 2187984684630354


@pytest.fixture
def older(tmp_path):
    for name in ("data", "bucket"):
        shutil.copytree(OLDER / name, tmp_path / name)
    return tmp_path


def values(harness, topic, partition=0):
    return [record.value for record in harness.records(topic, partition=partition)]


def newest_users(harness):
    return {record.key: record.value for record in harness.records("users")}


def assert_whole(harness):
    """Everything that was in the bucket when the older version stopped."""
    assert values(harness, "orders", 0)[:300] == ORDERS
    assert values(harness, "orders", 1) == [*ORDERS, b"once"]
    assert newest_users(harness) == {b"user-%d" % n: b"round 2" for n in range(40)}
    harness.offload("orders")
    for topic in ("orders", "users"):
        report = verify_topic(harness.broker, topic, deep=True)
        assert report.ok, report.problems


def retry(harness):
    batch = encode_batch(
        [b"once"],
        timestamps=[1_700_000_000_000],
        producer_id=PRODUCER_ID,
        producer_epoch=0,
        base_sequence=0,
    )
    produced = check_produced(
        batch, ProduceLimits(max_message_bytes=1 << 20, now_ms=1_700_000_000_000)
    )
    return harness.broker.partition("orders", 1).append(produced, acks=Acks.ALL).result(10)


def test_a_data_folder_of_an_older_version_is_opened_completely(older):
    harness = BrokerHarness(older)
    try:
        assert harness.broker.readiness() == ([], [])
        assert_whole(harness)
        assert values(harness, "orders", 0)[300:] == [b"of the second start"]
        assert (retry(harness).duplicate, retry(harness).base_offset) == (True, 300)
        group = harness.broker.groups.group("readers")
        assert [(one.partition, one.offset) for one in group] == [(0, 77), (1, 0)]
        assert harness.produce("orders", [b"new"]).base_offset == 301
    finally:
        harness.broker.close()


def test_a_bucket_of_an_older_version_is_restored(older):
    shutil.rmtree(older / "data")
    store = open_store(f"file://{older / 'bucket'}")
    report = restore(store, RestoreOptions(data_dir=older / "data", gap=1000, clock=lambda: 0))
    assert {one.topic for one in report.partitions} >= {"orders", "users"}
    harness = BrokerHarness(older)
    try:
        assert_whole(harness)
        assert retry(harness).duplicate
    finally:
        harness.broker.close()
