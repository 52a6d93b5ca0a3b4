"""A trim while the store accepts requests and does not answer."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.background import janitor
from tests.fakes.faulty_object_store import Slow

CONFIG = {"segment.bytes": 4096, "retention.ms": -1}


@pytest.fixture
def silent(house, monkeypatch):
    """The gate behind which a commit of t-0 waits; 200 records of it are in the bucket."""
    monkeypatch.setattr(janitor, "TRIM_WAIT_S", 0.05)
    house.broker.create_topic("t", config=CONFIG)
    house.fill(200)
    house.offload()
    house.stop_copying()
    fault = Slow()
    house.store.fail(
        "put", fault, when=lambda key: key.startswith("topics/t/") and "/manifest/" in key
    )
    yield fault.gate
    fault.gate.set()


def in_bucket(house):
    return house.broker.partition("t", 0).cold.manifest.log_start_offset


def test_it_is_answered_once_it_is_durable_and_the_bucket_follows(house, silent):
    assert house.broker.trim("t", 0, 55) == 55
    assert in_bucket(house) == 0
    house.produce("t", [b"meanwhile"])
    assert house.records("t", offset=55)[-1].value == b"meanwhile"
    silent.set()
    house.wait_for(lambda: in_bucket(house) == 55)


def test_a_second_one_while_the_first_waits_is_caught_up_with(house, silent):
    assert house.broker.trim("t", 0, 55) == 55
    assert house.broker.trim("t", 0, 95) == 95
    assert in_bucket(house) == 0
    silent.set()
    house.broker.background.janitor.bucket_round()
    assert in_bucket(house) == 95
    house.restart()
    assert house.broker.partition("t", 0).offsets().log_start_offset == 95


def test_more_than_have_a_thread_are_left_to_the_round(house, silent, monkeypatch):
    monkeypatch.setattr(house.broker.background.janitor, "_trims", ThreadPoolExecutor(1))
    for offset in (55, 65, 75):
        assert house.broker.trim("t", 0, offset) == offset
    silent.set()
    house.broker.background.janitor._trims.shutdown(wait=True)
    assert in_bucket(house) == 55, "who did not begin in time is not begun later"
    house.broker.background.janitor.bucket_round()
    assert in_bucket(house) == 75


def test_those_of_one_partition_hold_up_no_other(house, silent):
    house.broker.create_topic("u", config=CONFIG)
    house.produce("u", [b"v"] * 10)
    house.broker.partition("u", 0).log.roll()
    house.copy_sealed()
    other = house.broker.partition("u", 0).cold
    assert other.manifest.end_offset == 10
    for before in range(1, janitor.TRIMS_MAX + 3):
        assert house.broker.trim("t", 0, before) == before
    assert house.broker.trim("u", 0, 5) == 5
    house.wait_for(lambda: other.manifest.log_start_offset == 5)
    assert in_bucket(house) == 0
