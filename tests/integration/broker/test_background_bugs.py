"""A bug in background work is logged and backed off, and blocks no other partition."""

import errno
import threading
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.fakes.broker_harness import run_janitor
from tests.fakes.compacted_topics import COMPACT, fill
from tierlog.broker.background import copier, janitor
from tierlog.broker.partition.checkpoints import CompactionOffsets
from tierlog.broker.partition.upkeep import PartitionUpkeep
from tierlog.manifest.garbage import GarbagePolicy
from tierlog.record_format.errors import CorruptBatch

PENDING = PartitionUpkeep.pending_uploads


class Bug(Exception):
    pass


@pytest.fixture
def two(harness):
    for topic in ("a-broken", "b-whole"):
        harness.broker.create_topic(topic, config=COMPACT)
        fill(harness, topic, 100)
        harness.broker.partition(topic, 0).upkeep.roll()
    return harness


def raising(error):
    def raises(*args, **kwargs):
        raise error

    return raises


def breaking(partition_of):
    """Make a method raise for topic a-broken; `partition_of` maps its arguments."""

    def wrap(method):
        def wrapped(*args, **kwargs):
            if str(partition_of(*args)).startswith("a-broken"):
                raise Bug("unexpected")
            return method(*args, **kwargs)

        return wrapped

    return wrap


def test_a_bug_in_an_upload_is_logged_and_backed_off(two, monkeypatch):
    wrap = breaking(lambda _self, partition, _offload: partition)
    monkeypatch.setattr(copier.Copier, "_copy_next", wrap(copier.Copier._copy_next))
    with capture_logs() as lines:
        for topic in ("a-broken", "b-whole"):
            fill(two, topic, 10)
            two.broker.offload(topic, wait_ms=None if topic == "a-broken" else 20_000)
        two.wait_for(lambda: any("a bug" in line["event"] for line in lines))
        two.wait_for(lambda: any("will retry" in line["event"] for line in lines))
    cold = two.broker.partition("b-whole", 0)._cold
    assert cold.end_offset == 110
    waits = [line["retry_in_s"] for line in lines if line["event"] == "offload failed, will retry"]
    assert min(waits) > 0


def test_a_bug_while_a_failure_is_looked_at_leaves_no_partition_queued(two, monkeypatch):
    two.stop_copying()
    for topic in ("a-broken", "b-whole"):
        fill(two, topic, 10)
        two.broker.partition(topic, 0).upkeep.roll()
    monkeypatch.setattr(copier.Copier, "_copy_next", raising(CorruptBatch("bad", file="x.log")))
    queued, copying = threading.Event(), two.broker.background.copier

    def pending(upkeep):
        if threading.current_thread().name.startswith("offload"):
            assert queued.wait(20)
            raise Bug("unexpected")
        return PENDING(upkeep)

    monkeypatch.setattr(PartitionUpkeep, "pending_uploads", pending)
    with capture_logs() as lines:
        copying.run_round()
        queued.set()
        assert copying.wait_until_idle(timeout_s=20)
    bugs = [line["partition"] for line in lines if line["event"] == "offload failed: a bug"]
    assert sorted(bugs) == ["a-broken-0", "b-whole-0"]


def test_a_bug_in_compaction_blocks_no_other_partition(two, monkeypatch):
    wrap = breaking(lambda _self, partition, *_: partition)
    monkeypatch.setattr(CompactionOffsets, "begin_round", wrap(CompactionOffsets.begin_round))
    with capture_logs() as lines:
        two.broker.background.compactor.run_round()
    assert [
        line["partition"] for line in lines if line["event"] == "compaction failed, will retry"
    ] == ["a-broken-0"]
    broken, whole = (two.broker.partition(topic, 0) for topic in ("a-broken", "b-whole"))
    assert two.broker._topics.compaction_offsets.cleaned(whole)
    assert list(two.broker.background.compactor._backoff) == [broken]


def test_a_bug_in_retention_blocks_no_other_partition(two, monkeypatch):
    seen = []
    wrap = breaking(lambda _self, partition: seen.append(str(partition)) or partition)
    monkeypatch.setattr(janitor.Janitor, "_apply_retention", wrap(janitor.Janitor._apply_retention))
    with capture_logs() as lines:
        run_janitor(two.broker)
    assert seen == ["a-broken-0", "b-whole-0"]
    assert [line["event"] for line in lines if line["log_level"] == "error"] == [
        "retention failed: a bug"
    ]


def test_a_full_disk_during_garbage_collection_is_not_a_bug(two, monkeypatch):
    monkeypatch.setattr(janitor, "MIN_COLLECT_MS", 0)
    two.broker.background.janitor.policy = GarbagePolicy(grace_ms=0)
    two.broker.background.janitor._settings = replace(two.broker.settings, gc_grace_ms=0)
    partition = two.broker.partition("a-broken", 0)
    assert two.broker.offload("a-broken", wait_ms=20_000).remaining_segments == 0
    two.stop_copying()
    two.broker.trim("a-broken", 0, 50)
    full = OSError(errno.ENOSPC, "no space left on device")
    monkeypatch.setattr(partition._cold.bucket_state, "_write", raising(full))
    with capture_logs() as lines:
        run_janitor(two.broker)
    events = [line["event"] for line in lines if line.get("partition") == str(partition)]
    assert events == ["garbage collection failed, will retry"]
