"""Two data folders that both claim one partition: one wins, and neither loses data."""

import errno
import shutil
import threading

import pytest
from structlog.testing import capture_logs

from tests.fakes.broker_harness import BrokerHarness
from tierlog.broker.background import fence_checker
from tierlog.broker.background.fence_checker import FenceChecker
from tierlog.broker.background.task_failures import TaskFailures
from tierlog.broker.broker import Broker
from tierlog.broker.bucket.ownership import Ownership
from tierlog.broker.data_folder.bucket_state import BucketState
from tierlog.manifest.transitions import record_gap
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    FencedError,
    ManifestConflict,
    OutcomeUnknownError,
    ShuttingDown,
)


def offloaded(harness):
    harness.broker.create_topic("t", config={"segment.bytes": 4096})
    harness.fill(100)
    harness.offload()


def claim_with_a_copy(harness, tmp_path):
    copy = BrokerHarness(harness.copy_to(tmp_path / "copy"))
    copy.wait_for(lambda: copy.broker.partition("t", 0).is_claimed)
    copy.broker.close()


def test_a_copied_folder_is_fenced_by_the_original(harness, tmp_path):
    offloaded(harness)
    harness.broker.close()
    copied = harness.copy_to(tmp_path / "copy")
    harness.broker = harness.open()
    harness.offload()
    copy = BrokerHarness(copied)
    try:
        assert copy.broker.folder.owner != harness.broker.folder.owner
        copy.claim()
        partition = copy.broker.partition("t", 0)
        assert "in force" in partition.leadership_lost
        with pytest.raises(FencedError):
            partition.read(0, max_bytes=1)
        assert copy.broker.readiness().reasons
    finally:
        copy.broker.close()
    harness.produce("t", [b"the original goes on"])
    harness.offload()


def test_the_original_is_fenced_by_a_copy_that_came_first(harness, tmp_path):
    offloaded(harness)
    harness.broker.close()
    claim_with_a_copy(harness, tmp_path)
    harness.broker = harness.open()
    harness.claim()
    assert harness.broker.partition("t", 0).leadership_lost


@pytest.mark.parametrize("folder", ["empty", "of another cluster"])
def test_another_folder_on_a_prefix_in_use_refuses_and_names_restore(harness, tmp_path, folder):
    offloaded(harness)
    root = tmp_path / "new"
    root.mkdir()
    if folder != "empty":
        BrokerHarness(root).broker.close()
        shutil.rmtree(root / "bucket")
    (root / "bucket").symlink_to(harness.root / "bucket")
    with pytest.raises(ConfigurationError, match="tierlog storage restore --store file:"):
        BrokerHarness(root)


def test_a_folder_in_use_refuses_a_second_broker(harness):
    with pytest.raises(ConfigurationError, match="in use by another broker"):
        harness.open()


def test_the_fence_check_detects_lost_leadership(harness, tmp_path):
    offloaded(harness)
    claim_with_a_copy(harness, tmp_path)
    harness.broker.background.fence_checker.run_round()
    with pytest.raises(FencedError):
        harness.produce("t", [b"too late"])


def test_an_unrecorded_claim_is_recognized_after_two_restarts(harness, monkeypatch):
    offloaded(harness)
    harness.broker.close()

    def dies(self, manifest):
        raise OutcomeUnknownError("the process dies here")

    with monkeypatch.context() as patched:
        patched.setattr(BucketState, "record_manifest", dies)
        harness.broker = harness.open()
        harness.claim()
        harness.broker.close()
    harness.broker = harness.open(down=True, store_start_timeout_ms=200)
    harness.restart()
    harness.produce("t", [b"more"])
    harness.offload()
    assert harness.broker.partition("t", 0).is_claimed


def test_epochs_written_during_a_store_outage_reach_the_bucket(harness):
    harness.broker.create_topic("t", config={"retention.ms": -1})
    for down in (True, True, False):
        harness.produce("t", [b"x"])
        harness.restart(down=down)
    assert harness.broker.offload("t", wait_ms=20_000).remaining_segments == 0
    starts = harness.broker.partition("t", 0).manifest.epochs
    assert [(e.epoch, e.start_offset) for e in starts] == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_a_restarted_former_owner_acknowledges_nothing(harness, tmp_path):
    offloaded(harness)
    harness.broker.close()
    claim_with_a_copy(harness, tmp_path)
    harness.broker = harness.open()
    with pytest.raises(FencedError):
        harness.produce("t", [b"refused"])


def disk_is_full(*_):
    raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize("disk_accepts_the_note", [True, False])
def test_a_copy_behind_the_bucket_fences_only_itself(
    harness, tmp_path, monkeypatch, disk_accepts_the_note
):
    offloaded(harness)
    copied = harness.copy_to(tmp_path / "copy")
    harness.produce("t", [b"x" * 5000])
    harness.offload()
    monkeypatch.setattr(FenceChecker, "check_before_serving", lambda *_, **__: None)
    if not disk_accepts_the_note:
        monkeypatch.setattr(BucketState, "record_manifest", disk_is_full)
    copy = BrokerHarness(copied)
    try:
        copy.broker.background.copy_round()
        partition = copy.broker.partition("t", 0)
        copy.wait_for(lambda: partition.leadership_lost)
        assert "the bucket reaches offset" in partition.leadership_lost
    finally:
        copy.broker.close()
    harness.broker.background.fence_checker.run_round()
    harness.produce("t", [b"the original goes on"])


def test_a_hanging_store_delays_a_start_by_at_most_the_timeout(harness, monkeypatch):
    offloaded(harness)
    released, ended = threading.Event(), threading.Event()
    harness.broker.close()

    def hangs(*_, **__):
        released.wait(30)
        ended.set()

    monkeypatch.setattr(Ownership, "check_fence", hangs)
    harness.broker = harness.open(store_start_timeout_ms=1000)
    try:
        assert not ended.is_set()
        harness.produce("t", [b"accepted"])
    finally:
        released.set()


@pytest.mark.parametrize(
    "failure",
    [CorruptDataError("a manifest of nonsense"), ManifestConflict("lost"), OSError("disk full")],
)
def test_a_failed_fence_check_blocks_neither_the_start_nor_other_checks(
    harness, monkeypatch, failure
):
    checked = []

    def fails(cold, **_):
        checked.append(str(cold))
        raise failure

    harness.broker.create_topic("t", partitions=20)
    harness.broker.close()
    monkeypatch.setattr(Ownership, "check_fence", fails)
    harness.broker = harness.open(fence_check_ms=3_600_000)
    assert len(set(checked)) == 20, "all of them, beyond those checked in parallel"
    harness.broker.background.fence_checker.run_round()
    assert len(checked) == 40
    harness.produce("t", [b"taken"])


def test_fence_checks_run_in_parallel(harness, monkeypatch):
    harness.restart(fence_check_ms=3_600_000).create_topic("t", partitions=4)
    two_at_a_time = threading.Barrier(2)
    monkeypatch.setattr(fence_checker, "PARTITIONS_PER_THREAD", 4)
    monkeypatch.setattr(Ownership, "check_fence", lambda *_, **__: two_at_a_time.wait(20))
    harness.broker.background.fence_checker.run_round()
    assert not two_at_a_time.broken


def test_a_late_commit_writes_nothing_to_a_closed_folder(harness):
    offloaded(harness)
    cold = harness.broker.partition("t", 0)._cold
    harness.broker.close()
    noted = cold.bucket_state._path.read_bytes()
    with pytest.raises(ShuttingDown):
        cold.commit_transition(
            lambda manifest: record_gap(manifest, end_offset=manifest.end_offset + 1)
        )
    assert cold.bucket_state._path.read_bytes() == noted


def test_the_fence_check_ignores_deleted_topics(harness):
    harness.broker.create_topic("t")
    partition = harness.broker.partition("t", 0)
    partition.retire()
    with capture_logs() as lines:
        FenceChecker(lambda: [partition], TaskFailures()).run_round()
    assert not lines


def test_altering_a_topic_during_its_claim_reaches_the_bucket(harness, monkeypatch):
    """The claim is committed between reading the local state and reading the bucket."""
    harness.broker.close()
    store = open_store(f"file://{harness.root / 'bucket'}")
    broker = harness.broker = Broker.open_idle(harness.broker.settings, store=store)
    broker.create_topic("t")
    broker.bucket.publish_topics(broker.registry)
    broker.alter_topic("t", config={"retention.ms": 1000})
    list_ = store.list

    def claim_and_list(prefix, **options):
        if prefix.endswith("/manifest/"):
            monkeypatch.undo()
            broker.partition("t", 0).claim()
        return list_(prefix, **options)

    monkeypatch.setattr(store, "list", claim_and_list)
    broker.bucket.publish_topics(broker.registry)
    assert broker.partition("t", 0).is_claimed
    assert not broker.registry.by_name("t").dirty


def test_trimming_a_partition_during_its_claim_reaches_the_bucket(harness, monkeypatch):
    """The trim comes too early to be committed itself, and too late for the claim's commit."""
    harness.broker.close()
    store = open_store(f"file://{harness.root / 'bucket'}")
    broker = harness.broker = Broker.open_idle(harness.broker.settings, store=store)
    broker.create_topic("t")
    harness.produce("t", [b"v"] * 10)
    claim, partition = Ownership.claim, broker.partition("t", 0)

    def trim_and_claim(ownership, **kwargs):
        broker.trim("t", 0, 7)
        return claim(ownership, **kwargs)

    monkeypatch.setattr(Ownership, "claim", trim_and_claim)
    partition.claim()
    assert partition.manifest.log_start_offset == 7
