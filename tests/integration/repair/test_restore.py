"""A data folder is restored from the bucket, optionally with the tail of an old disk."""

import errno
import shutil
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from tests.fakes.bad_sectors import cannot_read
from tests.fakes.broker_harness import BrokerHarness, run_copier, run_janitor
from tests.fakes.compacted_topics import put
from tests.fakes.damage import cut, flip
from tests.fakes.small_disk import no_room, read_only, small_disk
from tests.integration.broker.test_adopt import copy_of_kafka
from tierlog.broker.broker import Broker
from tierlog.broker.bucket.ownership import Ownership
from tierlog.broker.data_folder.data_folder import HIGH_WATERMARKS, RECOVERY_POINTS, new_id
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.opening import take_over
from tierlog.host.disk import Disk
from tierlog.hot_tier import closed_log, open_files
from tierlog.hot_tier.closed_log import first_batch_at
from tierlog.hot_tier.log_folder import LOG, path_of
from tierlog.manifest.state import Reason
from tierlog.manifest.topic_objects import TopicObjects
from tierlog.object_store.open import open_store
from tierlog.record_format.consumer_offsets import TOPIC as OFFSETS_TOPIC
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptBatch,
    FencedError,
    ManifestConflict,
    MissingObject,
)
from tierlog.repair import restore as restoring
from tierlog.repair import restore_tail
from tierlog.repair.repair import repair_topic
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.repair.verify import verify_bucket, verify_topic

CONFIG = {"segment.bytes": 4096, "retention.ms": -1, "local.retention.bytes": 8192}
GAP = 1_000_000


def store_of(harness):
    return open_store(f"file://{harness.root / 'bucket'}")


def topic_id_of(harness):
    return harness.broker.topic("t").record.topic_id


def merge_segments(harness):
    """Merge the log of the first partition into one segment; return its file."""
    folder = harness.root / "data" / "t-0"
    whole = b"".join(log.read_bytes() for log in sorted(folder.glob("*.log")))
    for path in folder.glob("0*"):
        path.unlink()
    log = path_of(folder, 0, LOG)
    log.write_bytes(whole)
    return log


class Restored(BrokerHarness):
    """A broker on a restored data folder, with the same bucket."""

    def __init__(self, root, original, *, tail=None, start=True):
        self.root = root
        root.mkdir()
        (root / "bucket").symlink_to(original.root / "bucket")
        options = RestoreOptions(data_dir=root / "data", gap=GAP, clock=lambda: 0, tail=tail)
        self.report = restore(store_of(original), options)
        self.broker = self.open() if start else None


@pytest.fixture
def lost(harness):
    """80 records of partition 0 in the bucket, 20 more only on disk; none of partition 1."""
    harness.broker.create_topic("t", partitions=2, config=CONFIG)
    harness.fill(80)
    harness.offload()
    harness.fill(20, mark=b"tail")
    harness.broker.checkpoints.save()
    harness.broker.close()
    return harness


@pytest.fixture
def to_close():
    """Brokers to close at the end."""
    harnesss = []
    yield harnesss
    for harness in harnesss:
        if harness.broker is not None:
            harness.broker.close()


def test_every_record_is_restored_from_the_bucket_at_its_offset(lost, tmp_path, to_close):
    lost.broker = lost.open()
    before = lost.records("t")
    description = lost.broker.topic("t").describe()
    lost.claim()
    epoch = lost.broker.partition("t", 0).offsets().leader_epoch
    lost.broker.close()
    shutil.rmtree(lost.root / "data")
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    assert new.records("t") == before[:80]
    now = new.broker.topic("t").describe()
    assert (now.topic_id, now.config) == (description.topic_id, description.config)
    assert len(now.partitions) == 2
    assert new.broker.folder.cluster_id
    assert new.broker.partition("t", 0).offsets().leader_epoch > epoch
    assert not take_over.TAKE_OVERS.path(new.root / "data").exists()


def test_no_offset_is_reused_and_readers_skip_the_gap(lost, tmp_path, to_close):
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    assert new.produce("t", [b"after"]).base_offset == 80 + GAP
    assert new.produce("t", [b"first of all"], partition=1).base_offset == GAP
    records = new.records("t")
    assert [record.offset for record in records] == [*range(80), 80 + GAP]
    new.offload()
    cold = new.broker.partition("t", 0)._cold
    assert [tuple(g for g in (gap.start_offset, gap.end_offset)) for gap in cold.manifest.gaps] == [
        (80, 80 + GAP)
    ]
    assert new.records("t") == records
    assert [record.offset for record in new.records("t", partition=1)] == [GAP]
    new.restart()
    assert new.produce("t", [b"again"]).base_offset == 81 + GAP
    new.offload()
    assert verify_topic(new.broker, "t", deep=True).ok


def test_the_second_of_two_restores_without_a_manifest_continues_above_the_first(
    harness, tmp_path, monkeypatch, to_close
):
    harness.stop_copying()
    harness.broker.create_topic("t", config=CONFIG)
    harness.broker.bucket.publish_topics(harness.broker.registry)
    harness.broker.close()
    assert not list((harness.root / "bucket").glob("topics/t/*/0/manifest/*"))
    other = Restored(tmp_path / "other", harness, start=False)
    for _ in range(3):  # its epochs become higher than the other's
        harness.open(down=True, store_start_timeout_ms=200).close()
    later = Restored(tmp_path / "later", harness, start=False, tail=harness.root / "data")
    real, calls = Ownership.take_over, []

    def overtaken(ownership, seen, **kwargs):
        calls.append(seen)
        if len(calls) == 1:
            other.broker = other.open()
            other.fill(30)
            other.offload()
            other.broker.close()
        return real(ownership, seen, **kwargs)

    monkeypatch.setattr(Ownership, "take_over", overtaken)
    later.broker = later.open()
    to_close.append(later)
    assert later.produce("t", [b"after"]).base_offset == GAP + 30 + GAP
    assert len(later.records("t", offset=GAP)) == 31


def test_a_former_owner_is_fenced_and_no_referenced_object_is_lost(lost, tmp_path, to_close):
    lost.broker = lost.open()
    lost.offload()
    new = Restored(tmp_path / "new", lost, start=False)
    to_close.append(new)
    lost.fill(20, mark=b"zombie")
    lost.offload()  # it is alive, and writes between the restore and its first start
    new.broker = new.open()
    assert len(new.records("t")) == 120
    named = {key for entry in new.broker.partition("t", 0).cold_entries(0) for key in entry.keys}
    lost.produce("t", [b"not seen yet"])
    lost.broker.partition("t", 0).upkeep.roll()
    lost.claim()
    with pytest.raises(FencedError, match="took the partition over; `tierlog serve --take-over`"):
        lost.produce("t", [b"too late"])
    there = {str(p.relative_to(lost.root / "bucket")) for p in (lost.root / "bucket").rglob("*")}
    assert named <= there
    assert new.produce("t", [b"new"]).base_offset == 120 + GAP
    new.offload()
    assert verify_topic(new.broker, "t", deep=True).ok
    lost.restart()
    lost.claim()
    assert lost.broker.partition("t", 0).leadership_lost


def test_a_former_owner_cannot_delete_or_alter_the_topic_in_the_bucket(lost, tmp_path, to_close):
    """It has not noticed yet that it lost the partitions, like a paused process."""
    lost.broker = lost.open(fence_check_ms=10**9)
    lost.claim()
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    new.broker.alter_topic("t", config={"retention.ms": 10**12}, partitions=3)
    new.claim()
    lost.broker.alter_topic("t", config={"retention.ms": 1000})
    lost.claim()
    assert TopicObjects(store_of(new)).load_topic("t", topic_id_of(new)).partitions == 3
    lost.broker.delete_topic("t")
    lost.wait_for(lambda: not lost.broker.registry.deleted())
    there = TopicObjects(store_of(new)).load_topic("t", topic_id_of(new))
    assert (there.deleted, there.config["retention.ms"]) == (False, 10**12)
    assert verify_topic(new.broker, "t", deep=True).ok


def test_a_fenced_broker_refuses_to_delete_or_alter(lost, tmp_path, to_close):
    lost.broker = lost.open()
    lost.claim()
    to_close.append(Restored(tmp_path / "new", lost))
    lost.broker.background.fence_checker.run_round()
    with pytest.raises(FencedError):
        lost.broker.alter_topic("t", config={"retention.ms": 1000})
    with pytest.raises(FencedError):
        lost.broker.delete_topic("t")
    assert lost.broker.topic("t").config.retention_ms == -1


def test_the_former_owner_can_take_over_again_with_its_tail_set_aside(lost, tmp_path, to_close):
    new = Restored(tmp_path / "new", lost)
    new.produce("t", [b"new"])
    new.offload()
    new.broker.close()
    lost.broker = lost.open(take_over=True)
    assert [one.offset for one in lost.records("t")] == [*range(80), 80 + GAP]
    (folder,) = (lost.root / "data" / "tierlog" / "diverged").glob("t-0-*")
    assert list(folder.glob("*80.log"))


def test_a_complete_tail_needs_no_gap(lost, tmp_path, to_close):
    lost.broker = lost.open()
    before = lost.records("t")
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    (first, _) = new.report.partitions
    assert (first.tail.whole, first.tail.start_offset, first.tail.end_offset) == (True, 80, 100)
    assert new.records("t") == before
    assert new.produce("t", [b"next"]).base_offset == 100
    assert new.produce("t", [b"first"], partition=1).base_offset == 0
    new.offload()
    assert verify_topic(new.broker, "t", deep=True).ok
    assert new.broker.partition("t", 0).manifest.gaps == ()
    new.restart()
    assert len(new.records("t")) == 101


def test_a_tail_inside_a_segment_is_copied_from_the_buckets_end(lost, tmp_path, to_close):
    """The bucket does not end at a local segment bound: a copy of the folder rolled elsewhere."""
    old = tmp_path / "old"
    shutil.copytree(lost.root / "data", old)
    lost.broker = lost.open()
    log = lost.broker.partition("t", 0)._log
    (active,) = [view.base_offset for view in log.segments() if view.active]
    lost.broker.close()
    assert active == 80
    source, bases = old / "t-0", restore_tail.closed_log.base_offsets(old / "t-0")
    before, last = bases[-2], bases[-1]
    joined = source / f"{before:020d}.log"
    joined.write_bytes(joined.read_bytes() + (source / f"{last:020d}.log").read_bytes())
    for path in source.glob(f"{last:020d}.*"):
        path.unlink()
    new = Restored(tmp_path / "new", lost, tail=old)
    to_close.append(new)
    assert new.report.partitions[0].tail.end_offset == 100
    assert [record.offset for record in new.records("t")] == list(range(100))


def test_the_tail_of_a_superseded_folder_is_ignored(lost, tmp_path, to_close):
    old = tmp_path / "old"
    shutil.copytree(lost.root / "data", old)
    lost.broker = lost.open()
    lost.fill(10, mark=b"later")
    lost.offload()
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=old)
    to_close.append(new)
    tail = new.report.partitions[0].tail
    assert not tail.whole
    assert "another owner came after it" in tail.detail
    assert new.produce("t", [b"x"]).base_offset == 110 + GAP


def test_a_tail_whose_folder_was_written_to_afterwards_is_set_aside(lost, tmp_path, to_close):
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data", start=False)
    to_close.append(new)
    lost.broker = lost.open()
    lost.fill(20, mark=b"zombie")
    lost.offload()
    lost.broker.close()
    new.broker = new.open()
    assert [record.offset for record in new.records("t")] == list(range(120))
    assert new.produce("t", [b"x"]).base_offset == 120 + GAP


def last_log(folder):
    return max((folder / "t-0").glob("*.log"))


def corrupt_tail(folder):
    """Corrupt the middle of the tail."""
    last = last_log(folder)
    flip(last, last.stat().st_size // 2)


def lose_the_last_segment(folder):
    last_log(folder).unlink()


def tear_past_the_checkpoints(folder):
    for checkpoint in (RECOVERY_POINTS, HIGH_WATERMARKS):
        (folder / checkpoint).unlink()
    cut(last_log(folder))


@pytest.mark.parametrize(
    ("damage", "kept", "reached", "message"),
    [
        (lose_the_last_segment, 80, 100, "it ends at offset 80, but had 100"),
        (tear_past_the_checkpoints, 90, 90, "10 offsets copied; a gap follows"),
    ],
)
def test_an_incomplete_tail_is_followed_by_a_gap(
    lost, tmp_path, to_close, damage, kept, reached, message
):
    damage(lost.root / "data")
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    tail = new.report.partitions[0].tail
    assert (tail.whole, tail.end_offset) == (False, kept)
    assert message in tail.detail
    assert [record.offset for record in new.records("t")] == list(range(kept))
    assert new.produce("t", [b"x"]).base_offset == reached + GAP
    assert verify_topic(new.broker, "t", deep=True).ok


def test_a_torn_tail_of_a_partition_that_was_never_claimed_is_kept(harness, tmp_path, to_close):
    harness.restart(down=True, store_start_timeout_ms=200)
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(30)
    before = harness.records("t")
    harness.broker.close()
    tear_past_the_checkpoints(harness.root / "data")
    new = Restored(tmp_path / "new", harness, tail=harness.root / "data")
    to_close.append(new)
    tail = new.report.partitions[0].tail
    assert tail.end_offset == 20
    assert "20 offsets copied; no gap follows: " in tail.detail
    assert new.records("t") == before[:20]
    assert new.produce("t", [b"x"]).base_offset == 20
    new.offload()
    assert verify_topic(new.broker, "t", deep=True).ok


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_gap_is_kept_if_a_restored_folder_is_the_tail(lost, tmp_path, to_close, is_whole):
    if not is_whole:
        tear_past_the_checkpoints(lost.root / "data")
    unstarted = Restored(tmp_path / "unstarted", lost, tail=lost.root / "data", start=False)
    end = unstarted.report.partitions[0].tail.end_offset
    assert end == (100 if is_whole else 90)
    new = Restored(tmp_path / "new", lost, tail=unstarted.root / "data")
    to_close.append(new)
    assert new.report.partitions[0].tail.whole is is_whole
    assert new.produce("t", [b"x"]).base_offset == (end if is_whole else end + GAP)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_tail_corrupted_before_the_first_start_is_truncated_only_with_accept_loss(
    lost, tmp_path, to_close, is_whole
):
    if not is_whole:
        lost.broker = lost.open()
        lost.fill(20, mark=b"tail")
        lost.broker.partition("t", 0).upkeep.roll()
        lost.fill(10, mark=b"lost")
        lost.broker.close()
        lose_the_last_segment(lost.root / "data")
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data", start=False)
    to_close.append(new)
    tail = new.report.partitions[0].tail
    assert tail.whole is is_whole
    corrupt_tail(new.root / "data")
    new.broker = new.open()
    with pytest.raises(CorruptBatch, match=f"below offset {tail.end_offset + 10 * (not is_whole)}"):
        new.broker.partition("t", 0)
    (step,) = [
        one for one in repair_topic(new.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert step.action == "cut"
    kept = new.records("t")[-1].offset + 1
    assert 80 < kept < tail.end_offset
    assert new.produce("t", [b"next"]).base_offset == (kept if is_whole else kept + GAP)
    new.offload()
    assert verify_topic(new.broker, "t", deep=True).ok
    assert not take_over.TAKE_OVERS.path(new.root / "data").exists()
    new.restart()
    assert len(new.records("t")) == kept + 1


def test_a_tail_missing_a_file_at_the_first_start_is_followed_by_a_gap(lost, tmp_path, to_close):
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data", start=False)
    to_close.append(new)
    lose_the_last_segment(new.root / "data")
    new.broker = new.open()
    assert new.produce("t", [b"next"]).base_offset == 100 + GAP
    new.offload()
    assert verify_topic(new.broker, "t", deep=True).ok


@pytest.fixture
def local_topic(harness):
    """A local topic: 100 records in segments of ten, none in the bucket."""
    harness.broker.create_topic("t", config={**CONFIG, "remote.storage.enable": False})
    for _ in range(10):
        harness.fill(10)
        harness.broker.partition("t", 0).upkeep.roll()
    harness.broker.checkpoints.save()
    harness.claim()
    return harness


def test_an_incomplete_tail_of_a_local_topic_is_refused(local_topic, tmp_path, to_close):
    local_topic.broker.close()
    for _ in range(2):  # the last one is empty
        lose_the_last_segment(local_topic.root / "data")
    new = Restored(tmp_path / "new", local_topic, tail=local_topic.root / "data")
    to_close.append(new)
    tail = new.report.partitions[0].tail
    assert "no gap follows: it ends at offset 90, but had 100" in tail.detail
    with pytest.raises(CorruptBatch, match="it had reached offset 100"):
        new.broker.partition("t", 0)


@pytest.mark.parametrize("has_bucket", [False, True])
def test_the_log_start_is_restored_from_the_tail(harness, tmp_path, to_close, request, has_bucket):
    if has_bucket:
        harness.broker.create_topic("t", config=CONFIG)
        harness.fill(100)
        harness.offload()
        harness.set_down(True)
    else:
        request.getfixturevalue("local_topic")
    harness.broker.trim("t", 0, 55)
    harness.broker.close()
    new = Restored(tmp_path / "new", harness, tail=harness.root / "data")
    to_close.append(new)
    assert new.broker.partition("t", 0).offsets().log_start_offset == 55
    assert [one.offset for one in new.records("t", offset=55)] == list(range(55, 100))
    new.offload()
    assert verify_topic(new.broker, "t", deep=True).ok


def test_a_tail_trimmed_past_the_buckets_end_is_copied(lost, tmp_path, to_close):
    lost.broker = lost.open(down=True, store_start_timeout_ms=200)
    lost.broker.partition("t", 0).upkeep.roll()
    lost.fill(10, mark=b"tail")
    lost.broker.trim("t", 0, 100)
    assert lost.broker.partition("t", 0).first_local_offset == 100
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    assert new.report.partitions[0].tail.whole
    assert [one.offset for one in new.records("t", offset=100)] == list(range(100, 110))
    assert new.produce("t", [b"next"]).base_offset == 110
    new.offload()
    removed = new.broker.partition("t", 0).manifest.removed
    assert {one.reason for one in removed} == {Reason.TRIM}
    assert verify_topic(new.broker, "t", deep=True).ok


def test_a_gap_is_kept_after_remote_storage_is_disabled(lost, tmp_path, to_close):
    """For a partition that has nothing else in the bucket."""
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    new.produce("t", [b"after"], partition=1)
    new.broker.trim("t", 0, new.broker.partition("t", 0).offsets().high_watermark)
    new.broker.alter_topic("t", config={"remote.storage.enable": False})
    for _ in range(2):
        assert [one.offset for one in new.records("t", partition=1)] == [GAP]
        assert verify_topic(new.broker, "t", deep=True).ok
        new.restart()


def test_no_offset_is_reused_after_remote_storage_is_disabled(harness, tmp_path, to_close):
    """Only the manifest is left in the bucket; it knows how far the log had reached."""
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(20)
    harness.offload()
    harness.broker.trim("t", 0, 20)
    harness.broker.alter_topic("t", config={"remote.storage.enable": False})
    harness.wait_for(lambda: not harness.broker.registry.by_name("t").dirty)
    harness.broker.close()
    new = Restored(tmp_path / "new", harness)
    to_close.append(new)
    for turn in range(2):
        assert new.produce("t", [b"next"]).base_offset == 20 + GAP + turn
        new.restart()


def test_a_corrupt_high_watermark_checkpoint_does_not_affect_the_tail(lost, tmp_path):
    (lost.root / "data" / HIGH_WATERMARKS).write_bytes(b"rotten")
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data", start=False)
    assert [one.tail.whole for one in new.report.partitions] == [True, True]


def test_the_tail_of_an_older_copy_is_followed_by_a_gap(harness, tmp_path, to_close):
    """It knows the current epoch, but not everything written under it."""
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(80)
    harness.offload()
    older = tmp_path / "older"
    shutil.copytree(harness.root / "data", older)
    harness.fill(80)
    harness.offload()
    harness.fill(10, mark=b"acknowledged")
    harness.broker.close()
    new = Restored(tmp_path / "new", harness, tail=older)
    to_close.append(new)
    assert "it ends at offset 80, but had 160" in new.report.partitions[0].tail.detail
    assert new.produce("t", [b"x"]).base_offset == 160 + GAP


def test_unpublished_changes_of_an_older_copy_are_ignored(harness, tmp_path, to_close):
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(40)
    harness.offload()
    harness.set_down(True)
    harness.broker.alter_topic("t", config={"retention.ms": 3_600_000_001})
    older = tmp_path / "older"
    shutil.copytree(harness.root / "data", older)
    harness.set_down(False)
    harness.broker.alter_topic("t", config={"retention.ms": 3_600_000_002})
    harness.claim()
    assert not harness.broker.registry.by_name("t").dirty
    for _ in range(5):
        harness.fill(10)
        harness.offload()
    harness.broker.close()
    new = Restored(tmp_path / "new", harness, tail=older)
    to_close.append(new)
    assert new.broker.topic("t").config.retention_ms == 3_600_000_002


def test_a_partition_with_segments_but_no_manifest_is_not_re_created(lost, tmp_path, to_close):
    """The segments would be garbage to a new first manifest."""
    (manifests,) = (lost.root / "bucket").glob("topics/t/*/0/manifest")
    shutil.copytree(manifests, tmp_path / "kept")
    shutil.rmtree(manifests)
    store = store_of(lost)
    (problem,) = verify_bucket(
        store, TopicObjects(store).find_topic("t"), deep=False, clock=lambda: 0
    ).problems
    assert problem.kind == "manifest-missing"
    report = restore(store, RestoreOptions(tmp_path / "other", GAP, lambda: 0))
    (other,) = [topic for topic in report.others if topic.name == "t"]
    assert "the manifest is missing although there are segments" in other.unreadable
    for note in (lost.root / "data" / "tierlog" / "manifests").iterdir():
        note.unlink()
    lost.broker = lost.open()
    with pytest.raises(MissingObject, match="although there are segments"):
        lost.broker.partition("t", 0).claim()
    lost.broker.close()
    shutil.copytree(tmp_path / "kept", manifests)
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    assert len(new.records("t")) == 80


def test_a_missing_topic_object_is_reported(harness, tmp_path):
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(40)
    harness.offload()
    old_id = topic_id_of(harness)
    harness.broker.close()
    (objects,) = (harness.root / "bucket").glob("topics/t/*/topic")
    shutil.rmtree(objects)
    report = restore(store_of(harness), RestoreOptions(tmp_path / "other", GAP, lambda: 0))
    (other,) = [topic for topic in report.others if topic.name == "t"]
    assert (other.topic_id, "the topic object, which" in other.unreadable) == (old_id, True)


def test_a_corrupt_tail_blocks_no_other_partition(lost, tmp_path, to_close):
    lost.broker = lost.open()
    lost.fill(20, mark=b"tail", partition=1)
    lost.broker.close()
    (tail,) = (lost.root / "data" / "t-0").glob("*80.log")
    flip(tail, tail.stat().st_size - 20)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    first, second = new.report.partitions
    assert (first.is_damaged, second.is_damaged, second.tail.whole) == (True, False, True)
    assert str(new.root / "data" / "t-0") in first.tail.detail
    with pytest.raises(CorruptBatch, match="below offset 100"):
        new.broker.partition("t", 0)
    assert new.broker.partition("t", 1).offsets().high_watermark == 20
    (step,) = [
        one for one in repair_topic(new.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert step.action == "cut"
    assert [record.offset for record in new.records("t")] == list(range(90))
    assert new.produce("t", [b"next"]).base_offset == 90 + GAP
    new.offload()
    assert verify_topic(new.broker, "t", deep=True).ok


def test_a_damaged_tail_of_a_deleted_topic_does_not_prevent_plans(lost, tmp_path, to_close):
    corrupt_tail(lost.root / "data")
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    marker = take_over.TAKE_OVERS.path(new.root / "data")
    assert marker.exists()  # until the partition is repaired
    new.broker.delete_topic("t")
    run_copier(new.broker)  # waits for uploads, which a deletion waits for too
    new.broker.background.deletions.run_round()
    assert not marker.exists()


@pytest.mark.parametrize("place", ["tail", "segment of the end", "below the end"])
def test_what_the_old_disk_cannot_read_counts_as_corrupt(
    lost, tmp_path, to_close, monkeypatch, place
):
    if place == "tail":
        (log,) = (lost.root / "data" / "t-0").glob("*80.log")
        bad = first_batch_at(log, 90)
    else:
        log = merge_segments(lost)
        bad = first_batch_at(log, 90 if place == "segment of the end" else 20)
    where = range(bad.position + 8, bad.position + 12)  # its length
    monkeypatch.setattr(open_files, "SECTOR_BYTES", 1)
    cannot_read(monkeypatch, log, kept=tmp_path / "kept", where=where)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    first, second = new.report.partitions
    assert (first.is_damaged, second.is_damaged) == (place != "below the end", False)
    if place == "below the end":
        assert (first.tail.whole, len(new.records("t"))) == (True, 100)
        return
    (step,) = [
        one for one in repair_topic(new.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert step.action == "cut"
    assert [record.offset for record in new.records("t")] == list(range(90))


def test_a_zeroed_unflushed_segment_of_a_tail_is_ignored(lost, tmp_path, to_close):
    """A segment that was not flushed yet is zeroed."""
    (lost.root / "data" / "t-0" / f"{100:020d}.log").write_bytes(bytes(200))
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    tail = new.report.partitions[0].tail
    assert (tail.whole, tail.damaged, tail.end_offset) == (False, False, 100)
    assert [record.offset for record in new.records("t")] == list(range(100))
    assert new.produce("t", [b"next"]).base_offset == 100 + GAP


@pytest.mark.parametrize("kept", [0, 5])
def test_a_tail_ends_at_a_hole_left_by_a_power_failure(lost, tmp_path, to_close, kept):
    """The next segment is intact; neither was flushed yet, and the first may be empty."""
    folder = lost.root / "data" / "t-1"
    values, stamps = [b"x"] * 10, [1] * 10
    left = encode_batch(values[:kept], timestamps=stamps[:kept]) if kept else b""
    path_of(folder, 0, LOG).write_bytes(left)
    following = encode_batch(values, timestamps=stamps, base_offset=10)
    path_of(folder, 10, LOG).write_bytes(following)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    tail = new.report.partitions[1].tail
    assert (tail.whole, tail.damaged, tail.end_offset) == (False, False, kept)
    assert [one.offset for one in new.records("t", partition=1)] == list(range(kept))
    assert new.produce("t", [b"next"], partition=1).base_offset == kept + GAP


def test_a_tail_with_a_hole_at_the_buckets_end_is_empty(lost, tmp_path, to_close):
    """The segment reaches beyond the bucket's end, and no checkpoint says that it was flushed."""
    log = merge_segments(lost)
    beyond = first_batch_at(log, 80)
    following = first_batch_at(log, beyond.next_offset)
    whole = log.read_bytes()
    log.write_bytes(whole[: beyond.position])
    path_of(log.parent, following.base_offset, LOG).write_bytes(whole[following.position :])
    for checkpoint in (RECOVERY_POINTS, HIGH_WATERMARKS):
        (lost.root / "data" / checkpoint).unlink()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    tail = new.report.partitions[0].tail
    assert (tail.whole, tail.damaged, tail.end_offset) == (False, False, 80)
    assert [record.offset for record in new.records("t")] == list(range(80))
    assert new.produce("t", [b"next"]).base_offset == 80 + GAP


def test_corruption_below_the_buckets_end_does_not_affect_the_tail(lost, tmp_path, to_close):
    lost.broker = lost.open()
    lost.fill(20, mark=b"more")
    lost.broker.close()
    log = merge_segments(lost)
    rotten = bytearray(log.read_bytes())
    rotten[16] = 0  # the magic of the first batch
    log.write_bytes(rotten)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    assert new.report.partitions[0].tail.whole
    assert [record.offset for record in new.records("t")] == list(range(120))


def test_a_corrupt_tail_is_repaired_in_the_restored_folder(local_topic, tmp_path, to_close):
    local_topic.broker.close()
    bad = local_topic.root / "data" / "t-0" / f"{30:020d}.log"
    bad.write_bytes(bad.read_bytes()[:-1] + b"\xff")
    new = Restored(tmp_path / "new", local_topic, tail=local_topic.root / "data")
    to_close.append(new)
    assert new.report.partitions[0].is_damaged
    (step,) = repair_topic(new.broker, "t", deep=True, apply=True, accept_loss=True)
    assert (step.action, step.done) == ("drop-batches", True)
    kept = [record.offset for record in new.records("t")]
    assert (len(kept), kept[-1]) == (90, 99)


def test_compacted_offsets_of_a_tail_are_not_a_loss(harness, tmp_path, to_close):
    """For a topic that is no longer compacted."""
    config = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01, "retention.ms": -1}
    config |= {"segment.bytes": 1400, "remote.storage.enable": False}
    harness.broker.create_topic("t", config=config)
    for keys in ((b"once", b"again"), (b"more", b"again"), (b"last",)):
        for key in keys:
            put(harness, "t", [(key, b"x" * 600)])
        harness.broker.partition("t", 0).upkeep.roll()
    harness.broker.background.compactor.run_round()
    harness.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    harness.claim()
    assert verify_topic(harness.broker, "t", deep=True).ok
    harness.broker.close()
    new = Restored(tmp_path / "new", harness, tail=harness.root / "data")
    to_close.append(new)
    run_janitor(new.broker)
    assert [one.offset for one in new.records("t")] == [0, 2, 3, 4]
    assert verify_topic(new.broker, "t", deep=True).ok
    assert new.broker.readiness().degraded == []


def test_aborted_transactions_of_a_tail_stay_aborted(tmp_path, to_close):
    harness = BrokerHarness(copy_of_kafka(tmp_path, "txn-0", clean=True))
    to_close.append(harness)
    harness.stop_copying()
    harness.broker.alter_topic("txn", config={"remote.storage.enable": False})
    harness.claim()
    end = harness.broker.partition("txn", 0).offsets().high_watermark
    aborted = harness.broker.partition("txn", 0)._log.aborted_transactions(0, end)
    assert aborted
    harness.broker.close()
    new = Restored(tmp_path / "new", harness, tail=harness.root / "data")
    to_close.append(new)
    assert new.broker.partition("txn", 0)._log.aborted_transactions(0, end) == aborted


def test_an_unpublished_topic_is_restored_from_the_tail(lost, tmp_path, to_close):
    lost.broker = lost.open(down=True)
    config = {"retention.ms": 10**12}
    topic_id = lost.broker.create_topic("new", partitions=2, config=config).topic_id
    lost.produce("new", [b"a", b"b"], partition=1, at=10**12)
    before = lost.records("new", partition=1)
    lost.broker.close()
    without = Restored(tmp_path / "without", lost, start=False)
    assert {one.topic for one in without.report.partitions} == {"t"}
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    assert new.broker.topic("new").record.topic_id == topic_id
    assert new.broker.topic("new").config.retention_ms == 10**12
    assert new.records("new", partition=1) == before
    assert new.produce("new", [b"c"], partition=1).base_offset == 2
    new.claim()
    assert TopicObjects(store_of(new)).load_topic("new", topic_id).partitions == 2
    assert verify_topic(new.broker, "new", deep=True).ok


def test_partitions_that_were_uploaded_but_not_published_are_restored(
    harness, tmp_path, to_close, monkeypatch
):
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(20)
    harness.offload()
    harness.stop_copying()

    def fails(*_, **__):
        raise ManifestConflict("conflicts in a row")

    with monkeypatch.context() as failing:
        failing.setattr(TopicObjects, "write_topic", fails)
        harness.broker.alter_topic("t", partitions=3)
        with pytest.raises(ManifestConflict):
            harness.broker.background.copy_round()
        harness.fill(20, partition=2)
        harness.broker.partition("t", 2).upkeep.roll()
        harness.copy_sealed()
    assert harness.broker.partition("t", 2).cold_end_offset == 20
    harness.broker.close()
    shutil.rmtree(harness.root / "data")
    topics = TopicObjects(store_of(harness))
    topic = topics.find_topic("t")
    assert topics.load_topic("t", topic.topic_id).partitions < topic.partitions == 3
    checked = verify_bucket(store_of(harness), topic, deep=True, clock=lambda: 0)
    assert (checked.ok, checked.checked.records) == (True, 40)
    new = Restored(tmp_path / "new", harness)
    to_close.append(new)
    assert len(new.records("t", partition=2)) == 20
    new.claim()
    assert topics.load_topic("t", topic.topic_id).partitions == 3


def test_a_tail_whose_first_records_were_compacted_has_no_hole(harness, tmp_path, to_close):
    """The first remaining batch lies above the bucket's end."""
    config = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01, "retention.ms": -1}
    harness.broker.create_topic("t", config=config)
    put(harness, "t", [(b"before", b"1")])
    harness.offload()
    harness.stop_copying()
    for number in range(3):
        put(harness, "t", [(b"again", b"%d" % number)])
    put(harness, "t", [(b"once", b"kept")])
    log = harness.broker.partition("t", 0)._log
    log.roll()
    put(harness, "t", [(b"again", b"last")])
    log.roll()
    harness.broker.background.compactor.run_round()
    assert [one.offset for one in harness.records("t")] == [0, 4, 5]
    harness.broker.close()
    new = Restored(tmp_path / "new", harness, tail=harness.root / "data")
    to_close.append(new)
    assert [one.offset for one in new.records("t")] == [0, 4, 5]
    new.offload()
    assert verify_topic(new.broker, "t", deep=True).ok


def change_offline(harness):
    """While the store is down, add partitions and records and change the configuration."""
    harness.broker = harness.open(down=True)
    harness.broker.alter_topic("t", config={"retention.ms": 10**12}, partitions=4)
    harness.fill(10, partition=3)
    harness.broker.close()


def test_an_unpublished_change_is_restored_from_the_tail(lost, tmp_path, to_close):
    change_offline(lost)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    assert len(new.broker.topic("t").describe().partitions) == 4
    assert new.broker.topic("t").config.retention_ms == 10**12
    assert len(new.records("t", partition=3)) == 10
    new.claim()
    assert TopicObjects(store_of(new)).load_topic("t", topic_id_of(new)).partitions == 4


def test_an_unpublished_change_of_a_superseded_folder_is_ignored(lost, tmp_path, to_close):
    other = Restored(tmp_path / "other", lost)
    other.broker.alter_topic("t", config={"retention.ms": 10**11})
    other.claim()
    other.broker.close()
    change_offline(lost)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    assert len(new.broker.topic("t").describe().partitions) == 2
    assert new.broker.topic("t").config.retention_ms == 10**11


def delete_offline(harness):
    """Delete the topic while the store is down."""
    harness.broker = harness.open(down=True)
    harness.broker.delete_topic("t")


def test_an_unpublished_deletion_is_restored_from_the_tail(lost, tmp_path, to_close):
    delete_offline(lost)
    lost.broker.create_topic("t", config=CONFIG)
    lost.produce("t", [b"of the next topic of the name"])
    lost.broker.close()
    topic_id = topic_id_of(lost)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    (other,) = new.report.others
    assert (other.name, other.deleted) == ("t", True)
    assert topic_id_of(new) == topic_id
    assert [one.value for one in new.records("t")] == [b"of the next topic of the name"]
    new.wait_for(lambda: not new.broker.registry.deleted())
    new.claim()
    assert list(TopicObjects(store_of(new)).scan()) == [("t", topic_id)]


def test_a_deletion_is_finished_even_without_the_topic_object(lost, tmp_path, to_close):
    topic_id = topic_id_of(lost)
    delete_offline(lost)
    lost.broker.close()
    shutil.rmtree(lost.root / "bucket" / "topics" / "t" / topic_id / "topic")
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    new.wait_for(lambda: not new.broker.registry.deleted())
    assert list(TopicObjects(store_of(new)).scan()) == []


def test_an_unpublished_deletion_of_a_superseded_folder_is_ignored(lost, tmp_path, to_close):
    other = Restored(tmp_path / "other", lost)
    other.claim()
    other.broker.close()
    delete_offline(lost)
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    assert new.report.others == []
    assert len(new.records("t")) == 80


def test_a_tail_of_another_cluster_is_refused(lost, tmp_path):
    other = BrokerHarness(tmp_path / "other")
    other.broker.close()
    with pytest.raises(ConfigurationError, match="belongs to cluster"):
        Restored(tmp_path / "new", lost, tail=other.root / "data")


def test_a_tail_in_use_by_a_broker_is_refused(lost, tmp_path):
    lost.broker = lost.open()
    with pytest.raises(ConfigurationError, match="in use"):
        Restored(tmp_path / "new", lost, tail=lost.root / "data")


@pytest.mark.parametrize("with_tail", [False, True])
def test_a_producer_retry_is_a_duplicate_after_a_restore(lost, tmp_path, to_close, with_tail):
    lost.broker = lost.open()
    first = lost.produce_idempotent(sequence=0)
    lost.offload()
    if with_tail:
        lost.fill(10)
    lost.broker.close()
    tail = lost.root / "data" if with_tail else None
    new = Restored(tmp_path / "new", lost, tail=tail)
    to_close.append(new)
    again = new.produce_idempotent(sequence=0)
    assert (again.duplicate, again.base_offset) == (True, first.base_offset)
    assert not new.produce_idempotent(sequence=1).duplicate


@pytest.mark.parametrize("trimmed", ["to the end", "within a segment", "past a segment"])
def test_a_producer_retry_is_a_duplicate_after_a_trim_and_a_restore(
    lost, tmp_path, to_close, trimmed
):
    lost.broker = lost.open(down=trimmed == "past a segment", store_start_timeout_ms=200)
    first = lost.produce_idempotent(sequence=0)
    if trimmed == "past a segment":
        lost.broker.partition("t", 0).upkeep.roll()
    else:
        lost.claim()
    if trimmed != "to the end":
        lost.fill(10)
    lost.broker.trim("t", 0, first.base_offset + 1)
    lost.broker.close()
    (lost.root / "data" / "t-0" / f"{111:020}.snapshot").unlink(missing_ok=True)  # of shutdown
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    to_close.append(new)
    again = new.produce_idempotent(sequence=0)
    assert (again.duplicate, again.base_offset) == (True, first.base_offset)


@pytest.mark.parametrize("with_tail", [False, True])
def test_group_offsets_are_restored(lost, tmp_path, to_close, with_tail):
    lost.broker = lost.open()
    for offset in (5, 77):
        lost.broker.groups.commit_offsets("readers", [NewOffset("t", 0, offset)])
    if not with_tail:
        lost.offload(OFFSETS_TOPIC)
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data" if with_tail else None)
    to_close.append(new)
    assert [one.offset for one in new.broker.groups.group("readers")] == [77]
    new.broker.groups.commit_offsets("readers", [NewOffset("t", 0, 78)])
    new.offload(OFFSETS_TOPIC)
    new.restart()
    assert [one.offset for one in new.broker.groups.group("readers")] == [78]
    assert verify_topic(new.broker, OFFSETS_TOPIC, deep=True).ok


def test_the_log_start_is_restored_from_the_bucket(lost, tmp_path, to_close):
    lost.broker = lost.open()
    lost.claim()
    lost.broker.trim("t", 0, 35)
    lost.broker.close()
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    assert new.broker.partition("t", 0).offsets().log_start_offset == 35
    assert new.records("t", offset=35)[0].offset <= 35
    new.restart()
    assert new.broker.partition("t", 0).offsets().log_start_offset == 35


def test_deleted_topics_are_reported_and_stay_deleted(lost, tmp_path, to_close):
    store = store_of(lost)
    objects = restoring.TopicObjects(store)
    ((name, topic_id),) = objects.scan()
    there = objects.load_topic(name, topic_id)
    objects.write_topic(msgspec.structs.replace(there, deleted=True), check=lambda: None)
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    assert new.broker.list_topics() == []
    assert [(one.topic_id, one.deleted) for one in new.report.others] == [(topic_id, True)]


def test_an_unreadable_topic_blocks_no_other(lost, tmp_path, to_close):
    """Neither an older version nor an older topic of its name is restored in its place."""
    lost.broker = lost.open()
    ids = {name: lost.broker.create_topic(name).topic_id for name in ("bad-topic", "bad-manifest")}
    lost.broker.background.copier.run_round()
    lost.wait_for(lambda: all(one.is_claimed for one in lost.broker.partitions()))
    lost.wait_for(lambda: not any(one.dirty for one in lost.broker.registry.live()))
    before = lost.records("t")
    lost.broker.close()
    objects = restoring.TopicObjects(store_of(lost))
    whole = objects.load_topic("bad-topic", ids["bad-topic"])
    older = msgspec.structs.replace(whole, topic_id="older", created_ms=0)
    objects.write_topic(older, check=lambda: None)
    topics = lost.root / "bucket" / "topics"
    for folder in (f"bad-topic/{ids['bad-topic']}/topic", "bad-manifest/*/0/manifest"):
        (newest,) = [max(one.iterdir()) for one in topics.glob(folder)]
        newest.write_bytes(newest.read_bytes().replace(b"crc32c", b"crc32x"))
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    unreadable = {one.topic_id for one in new.report.others if one.unreadable}
    assert unreadable == set(ids.values())
    assert [one.topic_id for one in new.report.others if not one.unreadable] == ["older"]
    assert [topic.name for topic in new.broker.list_topics()] == ["t"]
    assert new.records("t") == before[:80]


@pytest.mark.parametrize(
    "hostile",
    [
        {"config": {"no.such.key": 1}},
        {"partitions": 1_000_000_000},
        {"topic_id": "no-id"},
        {"name": "t 0 99"},  # a line of a checkpoint file
    ],
    ids=str,
)
def test_a_topic_that_no_broker_can_open_blocks_no_other(lost, tmp_path, to_close, hostile):
    objects = restoring.TopicObjects(store_of(lost))
    ((name, topic_id),) = objects.scan()
    there = objects.load_topic(name, topic_id)
    other = {"name": "other", "topic_id": new_id(), **hostile}
    objects.write_topic(msgspec.structs.replace(there, **other), check=lambda: None)
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    new.restart()
    assert [topic.name for topic in new.broker.list_topics()] == ["t"]
    reported = [one.name for one in new.report.others if one.unreadable]
    assert reported == ([] if "name" in hostile else ["other"])


def test_the_newer_topic_of_a_name_is_restored_even_if_the_clock_went_back(
    harness, tmp_path, to_close, monkeypatch
):
    """The disk is lost before the deletion of the older topic reached the bucket."""
    harness.broker.create_topic("t", config=CONFIG)
    harness.stop_copying()
    harness.broker.background.deleting.stop(10)
    harness.broker.bucket.publish_topics(harness.broker.registry)
    monkeypatch.setattr(harness.broker._topics, "_clock", lambda: 0)
    harness.broker.delete_topic("t")
    harness.broker.create_topic("t", config=CONFIG)
    harness.broker.bucket.publish_topics(harness.broker.registry)
    newer = topic_id_of(harness)
    harness.broker.close()
    new = Restored(tmp_path / "new", harness)
    to_close.append(new)
    assert topic_id_of(new) == newer


def test_a_folder_that_is_not_empty_and_a_bucket_without_a_cluster_are_refused(lost, tmp_path):
    store = store_of(lost)
    with pytest.raises(ConfigurationError, match="not empty"):
        restore(store, RestoreOptions(lost.root / "data", GAP, lambda: 0))
    empty = open_store(f"file://{tmp_path / 'empty'}")
    with pytest.raises(ConfigurationError, match="no cluster"):
        restore(empty, RestoreOptions(tmp_path / "x", GAP, lambda: 0))


class Crash(BaseException):
    pass


@pytest.fixture
def crash(monkeypatch):
    """A context in which a restore crashes just before it completes."""

    def die(path, pending):
        raise Crash

    @contextmanager
    def crashes():
        with monkeypatch.context() as patched:
            patched.setattr(restoring, "write_take_overs", die)
            with pytest.raises(Crash):
                yield

    return crashes


def test_an_interrupted_restore_can_be_repeated(lost, tmp_path, crash):
    with crash():
        Restored(tmp_path / "new", lost, tail=lost.root / "data")
    options = RestoreOptions(tmp_path / "new" / "data", GAP, lambda: 0, lost.root / "data")
    restore(store_of(lost), options)
    with pytest.raises(ConfigurationError, match="not empty, it belongs to a broker: serve it"):
        restore(store_of(lost), options)


def test_a_folder_left_by_a_refused_start_can_be_restored_into(lost, tmp_path):
    settings = replace(lost.broker.settings, data_dir=tmp_path / "new")
    with pytest.raises(ConfigurationError, match="belongs to cluster"):
        Broker.open(settings, store=store_of(lost))
    assert (tmp_path / "new" / "meta.properties").exists()
    options = RestoreOptions(data_dir=tmp_path / "new", gap=GAP, clock=lambda: 0)
    restore(store_of(lost), options)
    broker = Broker.open(settings, store=store_of(lost))
    assert broker.partition("t", 0).log_end_offset == 80 + GAP
    broker.close()
    with pytest.raises(ConfigurationError, match="not empty, it belongs to a broker: serve it"):
        restore(store_of(lost), options)


def test_an_incomplete_restore_is_neither_served_nor_kept(lost, tmp_path, to_close, crash):
    """The next restore has no tail."""
    new = Restored.__new__(Restored)
    with crash():
        new.__init__(tmp_path / "new", lost, tail=lost.root / "data")
    with pytest.raises(ConfigurationError, match="a restore into it is incomplete: run"):
        new.open()
    restore(store_of(lost), RestoreOptions(new.root / "data", GAP, lambda: 0))
    assert not list((new.root / "data").glob("*/*.log"))
    to_close.append(new)
    new.broker = new.open()
    assert [record.offset for record in new.records("t")] == list(range(80))
    assert new.produce("t", [b"next"]).base_offset == 80 + GAP


@pytest.mark.parametrize("call", ["open", "rename", "sync_folder"])
def test_a_restore_refused_on_a_full_disk_can_be_repeated(lost, tmp_path, monkeypatch, call):
    with monkeypatch.context() as disk:
        disk.setattr(Disk, call, no_room)
        with pytest.raises(ConfigurationError, match=r"data folder .*new/data: .*No space left"):
            Restored(tmp_path / "new", lost)
    options = RestoreOptions(tmp_path / "new" / "data", GAP, lambda: 0)
    assert len(restore(store_of(lost), options).partitions) == 2


def test_a_restore_that_fills_the_disk_during_the_tail_can_be_repeated(lost, tmp_path):
    with small_disk(tmp_path / "small") as disk:
        options = RestoreOptions(disk.path / "new", GAP, lambda: 0, lost.root / "data")
        copy_tail = closed_log.copy_tail

        def fill_and_copy(*args, **options):
            disk.fill()
            copy_tail(*args, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(closed_log, "copy_tail", fill_and_copy)
            with pytest.raises(ConfigurationError, match=r"t-0/0*80\.log: No space left"):
                restore(store_of(lost), options)
        (disk.path / "ballast").unlink()
        first, _ = restore(store_of(lost), options).partitions
        assert (first.tail.whole, first.tail.end_offset) == (True, 100)


def test_a_tail_can_be_on_a_read_only_disk(lost, tmp_path):
    with read_only(lost.root / "data", tmp_path / "rescued") as old:
        options = RestoreOptions(tmp_path / "new", GAP, lambda: 0, old)
        first, _ = restore(store_of(lost), options).partitions
    assert (first.tail.whole, first.tail.end_offset) == (True, 100)


def test_the_first_start_after_a_restore_needs_the_store(lost, tmp_path, to_close):
    new = Restored(tmp_path / "new", lost, start=False)
    with pytest.raises(ConfigurationError, match="take-over"):
        new.open(down=True, store_start_timeout_ms=200)
    new.broker = new.open()
    to_close.append(new)
    assert len(new.records("t")) == 80


def test_planted_a_restore_without_a_gap_reuses_offsets(lost, tmp_path, to_close, monkeypatch):
    monkeypatch.setattr(take_over.PendingTakeOver, "gap_over", lambda self, manifest: 0)
    new = Restored(tmp_path / "new", lost)
    to_close.append(new)
    assert new.produce("t", [b"x"]).base_offset == 80, "an offset that the lost disk had assigned"


@pytest.mark.parametrize("renames", range(12))
def test_a_tail_with_an_interrupted_compaction_swap_keeps_all_keys(
    harness, tmp_path, to_close, monkeypatch, renames
):
    """Interrupted between two renames of its swap by a disk error or a crash."""
    config = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01, "retention.ms": -1}
    harness.broker.create_topic("t", config=config)
    put(harness, "t", [(b"before", b"1")])
    harness.offload()
    harness.stop_copying()
    log = harness.broker.partition("t", 0)._log
    for number in range(3):
        put(harness, "t", [(b"k%d" % number, b"kept"), (b"again", b"%d" % number)])
    log.roll()
    put(harness, "t", [(b"again", b"last")])
    log.roll()
    put(harness, "t", [(b"z", b"active")])
    before = latest_of(harness)
    allowed = iter([True] * renames)

    def rename(disk, source, target):
        is_of_swap = source.suffix in (".swap", ".cleaned") or target.suffix == ".deleted"
        if is_of_swap and not next(allowed, False):
            raise OSError(errno.EIO, "the disk failed", str(source))
        source.replace(target)

    with monkeypatch.context() as failing:
        failing.setattr(Disk, "rename", rename)
        harness.broker.background.compactor.run_round()
    harness.broker.close()
    new = Restored(tmp_path / "new", harness, tail=harness.root / "data")
    to_close.append(new)
    assert new.report.partitions[0].tail.whole
    assert latest_of(new) == before


def latest_of(harness):
    return {record.key: (record.offset, record.value) for record in harness.records("t")}
