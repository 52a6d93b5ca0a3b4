"""Two data folders that both claim one partition: one wins, and neither loses data."""

import errno
import threading

import pytest
from structlog.testing import capture_logs

from broker.broker import Broker
from broker.bucket_state import BucketState
from broker.ownership import fence_checker
from broker.ownership.fence_checker import FenceChecker
from broker.ownership.ownership import Ownership
from cold_tier.open import open_store
from manifest.transitions import record_gap
from record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    FencedError,
    ManifestConflict,
    OutcomeUnknownError,
    ShuttingDown,
)
from tests.fakes.house import House


def offloaded(house):
    house.broker.create_topic("t", config={"segment.bytes": 4096})
    house.fill(100)
    house.offload()


def claim_with_a_copy(house, tmp_path):
    copy = House(house.copy_to(tmp_path / "copy"))
    copy.wait_for(lambda: copy.broker.partition("t", 0).cold.ownership.claimed)
    copy.broker.close()


def test_a_copied_folder_is_fenced_by_the_original(house, tmp_path):
    offloaded(house)
    house.broker.close()
    copied = house.copy_to(tmp_path / "copy")
    house.broker = house.open()
    house.offload()
    copy = House(copied)
    try:
        assert copy.broker.folder.owner != house.broker.folder.owner
        copy.claim()
        partition = copy.broker.partition("t", 0)
        assert "in force" in partition.leadership_lost
        with pytest.raises(FencedError):
            partition.read(0, max_bytes=1)
        assert copy.broker.readiness().reasons
    finally:
        copy.broker.close()
    house.produce("t", [b"the original goes on"])
    house.offload()


def test_the_original_is_fenced_by_a_copy_that_came_first(house, tmp_path):
    offloaded(house)
    house.broker.close()
    claim_with_a_copy(house, tmp_path)
    house.broker = house.open()
    house.claim()
    assert house.broker.partition("t", 0).leadership_lost


def test_an_empty_folder_on_a_prefix_in_use_refuses_and_names_restore(house, tmp_path):
    offloaded(house)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "bucket").symlink_to(house.root / "bucket")
    with pytest.raises(ConfigurationError, match="tierlog storage restore"):
        House(tmp_path / "new")


def test_a_folder_in_use_refuses_a_second_broker(house):
    with pytest.raises(ConfigurationError, match="in use by another broker"):
        house.open()


def test_the_fence_check_detects_lost_leadership(house, tmp_path):
    offloaded(house)
    claim_with_a_copy(house, tmp_path)
    house.broker.background.fence_checker.run_round()
    with pytest.raises(FencedError):
        house.produce("t", [b"too late"])


def test_an_unrecorded_claim_is_recognized_after_two_restarts(house, monkeypatch):
    offloaded(house)
    house.broker.close()

    def dies(self, manifest):
        raise OutcomeUnknownError("the process dies here")

    with monkeypatch.context() as patched:
        patched.setattr(BucketState, "record_manifest", dies)
        house.broker = house.open()
        house.claim()
        house.broker.close()
    house.broker = house.open(down=True, store_start_timeout_ms=200)
    house.restart()
    house.produce("t", [b"more"])
    house.offload()
    assert house.broker.partition("t", 0).cold.ownership.claimed


def test_epochs_written_during_a_store_outage_reach_the_bucket(house):
    house.broker.create_topic("t", config={"retention.ms": -1})
    for down in (True, True, False):
        house.produce("t", [b"x"])
        house.restart(down=down)
    assert house.broker.offload("t", wait_ms=20_000).remaining_segments == 0
    starts = house.broker.partition("t", 0).cold.manifest.epochs
    assert [(e.epoch, e.start_offset) for e in starts] == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_a_restarted_former_owner_acknowledges_nothing(house, tmp_path):
    offloaded(house)
    house.broker.close()
    claim_with_a_copy(house, tmp_path)
    house.broker = house.open()
    with pytest.raises(FencedError):
        house.produce("t", [b"refused"])


def disk_is_full(*_):
    raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize("disk_accepts_the_note", [True, False])
def test_a_copy_behind_the_bucket_fences_only_itself(
    house, tmp_path, monkeypatch, disk_accepts_the_note
):
    offloaded(house)
    copied = house.copy_to(tmp_path / "copy")
    house.produce("t", [b"x" * 5000])
    house.offload()
    monkeypatch.setattr(FenceChecker, "check_before_serving", lambda *_, **__: None)
    if not disk_accepts_the_note:
        monkeypatch.setattr(BucketState, "record_manifest", disk_is_full)
    copy = House(copied)
    try:
        copy.broker.background.copy_round()
        partition = copy.broker.partition("t", 0)
        copy.wait_for(lambda: partition.leadership_lost)
        assert "the bucket reaches offset" in partition.leadership_lost
    finally:
        copy.broker.close()
    house.broker.background.fence_checker.run_round()
    house.produce("t", [b"the original goes on"])


def test_a_hanging_store_delays_a_start_by_at_most_the_timeout(house, monkeypatch):
    offloaded(house)
    released, ended = threading.Event(), threading.Event()
    house.broker.close()

    def hangs(*_, **__):
        released.wait(30)
        ended.set()

    monkeypatch.setattr(Ownership, "check_fence", hangs)
    house.broker = house.open(store_start_timeout_ms=1000)
    try:
        assert not ended.is_set()
        house.produce("t", [b"accepted"])
    finally:
        released.set()


@pytest.mark.parametrize(
    "failure",
    [CorruptDataError("a manifest of nonsense"), ManifestConflict("lost"), OSError("disk full")],
)
def test_a_failed_fence_check_blocks_neither_the_start_nor_other_checks(
    house, monkeypatch, failure
):
    checked = []

    def fails(cold, **_):
        checked.append(str(cold))
        raise failure

    house.broker.create_topic("t", partitions=20)
    house.broker.close()
    monkeypatch.setattr(Ownership, "check_fence", fails)
    house.broker = house.open(fence_check_ms=3_600_000)
    assert len(set(checked)) == 20, "all of them, beyond those checked in parallel"
    house.broker.background.fence_checker.run_round()
    assert len(checked) == 40
    house.produce("t", [b"taken"])


def test_fence_checks_run_in_parallel(house, monkeypatch):
    house.restart(fence_check_ms=3_600_000).create_topic("t", partitions=4)
    two_at_a_time = threading.Barrier(2)
    monkeypatch.setattr(fence_checker, "PARTITIONS_PER_THREAD", 4)
    monkeypatch.setattr(Ownership, "check_fence", lambda *_, **__: two_at_a_time.wait(20))
    house.broker.background.fence_checker.run_round()
    assert not two_at_a_time.broken


def test_a_late_commit_writes_nothing_to_a_closed_folder(house):
    offloaded(house)
    cold = house.broker.partition("t", 0).cold
    house.broker.close()
    noted = cold.bucket_state._path.read_bytes()
    with pytest.raises(ShuttingDown):
        cold.commit(lambda manifest: record_gap(manifest, end_offset=manifest.end_offset + 1))
    assert cold.bucket_state._path.read_bytes() == noted


def test_the_fence_check_ignores_deleted_topics(house):
    house.broker.create_topic("t")
    partition = house.broker.partition("t", 0)
    partition.retire()
    with capture_logs() as lines:
        FenceChecker(lambda: [partition]).run_round()
    assert not lines


def test_altering_a_topic_during_its_claim_reaches_the_bucket(house, monkeypatch):
    """The claim is committed between reading the local state and reading the bucket."""
    house.broker.close()
    store = open_store(f"file://{house.root / 'bucket'}")
    broker = house.broker = Broker.open_idle(house.broker.settings, store=store)
    broker.create_topic("t")
    broker.bucket.publish_topics(broker.registry)
    broker.alter_topic("t", config={"retention.ms": 1000})
    list_ = store.list

    def claim_and_list(prefix, **options):
        if prefix.endswith("/manifest/"):
            monkeypatch.undo()
            broker.background.copier.claim(broker.partition("t", 0))
        return list_(prefix, **options)

    monkeypatch.setattr(store, "list", claim_and_list)
    broker.bucket.publish_topics(broker.registry)
    assert broker.partition("t", 0).cold.ownership.claimed
    assert not broker.registry.by_name("t").dirty


def test_trimming_a_partition_during_its_claim_reaches_the_bucket(house, monkeypatch):
    """The trim comes too early to be committed itself, and too late for the claim's commit."""
    house.broker.close()
    store = open_store(f"file://{house.root / 'bucket'}")
    broker = house.broker = Broker.open_idle(house.broker.settings, store=store)
    broker.create_topic("t")
    house.produce("t", [b"v"] * 10)
    claim, partition = Ownership.claim, broker.partition("t", 0)

    def trim_and_claim(ownership, **kwargs):
        broker.trim("t", 0, 7)
        return claim(ownership, **kwargs)

    monkeypatch.setattr(Ownership, "claim", trim_and_claim)
    broker.background.copier.claim(partition)
    assert partition.cold.manifest.log_start_offset == 7
