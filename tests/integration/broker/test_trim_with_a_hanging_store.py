"""A trim while the store hangs: it accepts requests and sends no response."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.faulty_object_store import Slow
from tests.fakes.waiting import until
from tierlog.broker.background import janitor

CONFIG = {"segment.bytes": 4096, "retention.ms": -1}


@pytest.fixture
def gate(harness, monkeypatch):
    """200 records of t-0 in the bucket; its next commit waits for the returned event."""
    monkeypatch.setattr(janitor, "TRIM_WAIT_S", 0.05)
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(200)
    harness.offload()
    harness.stop_copying()
    fault = Slow()
    harness.store.fail(
        "put", fault, when=lambda key: key.startswith("topics/t/") and "/manifest/" in key
    )
    yield fault.gate
    fault.gate.set()


def log_start_in_bucket(harness):
    return harness.broker.partition("t", 0).manifest.log_start_offset


def test_a_trim_returns_once_it_is_durable_locally(harness, gate):
    assert harness.broker.trim("t", 0, 55) == 55
    assert log_start_in_bucket(harness) == 0
    harness.produce("t", [b"meanwhile"])
    assert harness.records("t", offset=55)[-1].value == b"meanwhile"
    gate.set()
    harness.wait_for(lambda: log_start_in_bucket(harness) == 55)


def test_a_second_trim_during_the_first_reaches_the_bucket(harness, gate):
    assert harness.broker.trim("t", 0, 55) == 55
    assert harness.broker.trim("t", 0, 95) == 95
    assert log_start_in_bucket(harness) == 0
    gate.set()
    harness.broker.background.janitor.bucket_round()
    assert log_start_in_bucket(harness) == 95
    harness.restart()
    assert harness.broker.partition("t", 0).offsets().log_start_offset == 95


def test_trims_beyond_the_thread_pool_are_left_to_the_next_round(harness, gate, monkeypatch):
    trims = harness.broker.background.janitor._trims
    monkeypatch.setattr(trims, "_threads", ThreadPoolExecutor(1))
    for offset in (55, 65, 75):
        assert harness.broker.trim("t", 0, offset) == offset
    gate.set()
    trims._threads.shutdown(wait=True)
    assert log_start_in_bucket(harness) == 55, "trims that did not start in time are dropped"
    harness.broker.background.janitor.bucket_round()
    assert log_start_in_bucket(harness) == 75


def test_trims_of_one_partition_block_no_other(harness, gate):
    harness.broker.create_topic("u", config=CONFIG)
    harness.produce("u", [b"v"] * 10)
    harness.broker.partition("u", 0).upkeep.roll()
    harness.copy_sealed()
    other = harness.broker.partition("u", 0)._cold
    assert other.manifest.end_offset == 10
    for before in range(1, janitor.TRIMS_MAX + 3):
        assert harness.broker.trim("t", 0, before) == before
    assert harness.broker.trim("u", 0, 5) == 5
    harness.wait_for(lambda: other.manifest.log_start_offset == 5)
    assert log_start_in_bucket(harness) == 0


class HeldPartition:
    """A partition whose commit waits for the event."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.upkeep = self

    def follow_log_start(self) -> None:
        self.begun.set()
        assert self.go_on.wait(20)


def test_a_stop_answers_the_trims_that_wait_for_a_thread(monkeypatch):
    monkeypatch.setattr(janitor, "TRIMS_MAX", 1)
    trims, first, second = janitor.BucketTrims(), HeldPartition(), HeldPartition()
    second.go_on.set()
    with ThreadPoolExecutor(3) as callers:
        ahead = callers.submit(trims.commit_trim, first)
        assert first.begun.wait(10)
        queued = callers.submit(trims.commit_trim, second)
        until(lambda: len(trims._threads._calls) == 1)
        closing = callers.submit(trims.close)
        until(lambda: trims._threads._is_shut_down)
        first.go_on.set()
        for call in (ahead, closing, queued):
            call.result(10)
