"""Background tasks that fail round after round are counted, until they succeed again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.broker_harness import BrokerHarness, run_copier, run_janitor
from tests.fakes.compacted_topics import COMPACT, fill
from tierlog.broker.background import janitor
from tierlog.broker.background.compactor import MAX_WAIT_S
from tierlog.broker.background.task_failures import Failures
from tierlog.broker.broker import Broker
from tierlog.broker.partition.partition import Partition
from tierlog.record_format.errors import StoreUnavailable


@pytest.fixture
def idle(harness: BrokerHarness, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """A broker whose tasks run on request only, with a segment to upload in topics `a` and `b`."""
    for topic in ("a", "b"):
        harness.broker.create_topic(topic, config={"retention.ms": -1})
    harness.claim()
    for task in harness.broker.background._tasks:
        task.stop(10)
    for topic in ("a", "b"):
        harness.fill(10, topic)
        harness.broker.partition(topic, 0).upkeep.roll()
    monkeypatch.setattr(janitor, "MIN_COLLECT_MS", 0)
    settings = replace(harness.broker.settings, gc_grace_ms=0)
    harness.broker.background.janitor._settings = settings
    return harness.broker


def state(broker: Broker, task: str) -> Failures:
    return broker.background.failures.by_task()[task]


def fails(*_: object, **__: object) -> None:
    raise StoreUnavailable("down")


def check_fences(broker: Broker) -> None:
    broker.background.fence_checker.run_round()


@pytest.mark.parametrize(
    ("task", "part", "call", "run"),
    [
        ("offload", lambda one: one._cold, "upload_files", run_copier),
        ("disk-retention", lambda one: one._log, "maybe_roll", run_janitor),
        ("bucket-retention", lambda one: one._cold, "merge_pages", run_janitor),
        ("garbage-collection", lambda one: one._cold, "collect_garbage", run_janitor),
        ("fence-check", lambda one: one._cold.ownership, "check_fence", check_fences),
    ],
)
def test_a_task_that_fails_at_a_partition_is_counted(
    idle: Broker,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    part: Callable[[Partition], Any],
    call: str,
    run: Callable[[Broker], None],
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(part(idle.partition("a", 0)), call, fails)
        for errors in (1, 2):
            run(idle)
            assert state(idle, task) == (errors, 1)
    assert sum(one.errors for one in idle.background.failures.by_task().values()) == 2
    run(idle)
    assert state(idle, task) == (2, 0)


def test_a_deleted_partition_does_not_count_as_failing(
    idle: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle.partition("a", 0)._cold, "merge_pages", fails)
    run_janitor(idle)
    assert state(idle, "bucket-retention") == (1, 1)
    idle.delete_topic("a")
    assert state(idle, "bucket-retention") == (1, 0)


@pytest.mark.parametrize("call", ["cleanable", "clean"])
@pytest.mark.parametrize("turned_off", [False, True])
def test_a_failing_compaction_is_counted(
    harness: BrokerHarness, monkeypatch: pytest.MonkeyPatch, call: str, turned_off: bool
) -> None:
    now_ms = harness.broker.clock()
    harness.broker.create_topic("a", config=COMPACT)
    for task in harness.broker.background._tasks:
        task.stop(10)
    fill(harness, "a", 100)
    partition, compactor = harness.broker.partition("a", 0), harness.broker.background.compactor
    partition.upkeep.roll()
    monkeypatch.setattr(compactor, "_clock", lambda: now_ms)
    with monkeypatch.context() as broken:
        broken.setattr(partition._log.sealed, call, fails)
        for errors in (1, 2):
            compactor.run_round()
            assert state(harness.broker, "compaction") == (errors, 1)
            compactor.run_round()  # it backs off
            assert state(harness.broker, "compaction") == (errors, 1)
            now_ms += int(MAX_WAIT_S * 1000)
    if turned_off:
        harness.broker.alter_topic("a", config={"cleanup.policy": "delete"})
    compactor.run_round()
    assert state(harness.broker, "compaction") == (2, 0)
