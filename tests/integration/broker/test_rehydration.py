"""Segments of compacted topics that only the bucket has are rehydrated to disk, and compacted."""

import shutil

import pytest

from tests.fakes.broker_harness import BrokerHarness
from tests.fakes.compacted_topics import (
    COMPACT,
    cold_records,
    compacted,
    fill,
    last_of,
    offload,
    put,
)
from tests.fakes.damage import flip
from tests.fakes.records import iter_records
from tests.integration.broker.test_adopt import copy_of_kafka
from tests.integration.repair.test_restore import GAP, Restored
from tierlog.broker.broker import Broker
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.settings import BrokerSettings
from tierlog.host.durable_file import REAL_DISK
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.object_store.open import open_store
from tierlog.record_format.consumer_offsets import TOPIC as OFFSETS_TOPIC
from tierlog.record_format.errors import DiskFull, InvalidConfig
from tierlog.repair.repair import repair_topic
from tierlog.repair.verify import verify_topic


@pytest.fixture
def last_values(harness):
    """The last values of a partly compacted topic that is entirely in the bucket."""
    harness.broker.create_topic("t", config=COMPACT)
    last = fill(harness, "t", 300)
    compacted(harness, "t")
    last |= fill(harness, "t", 200, keys=30, seed=2)
    harness.broker.partition("t", 0).upkeep.roll()
    offload(harness, "t")
    harness.broker.close()
    return last


@pytest.fixture
def restored(harness, last_values, tmp_path):
    restored = Restored(tmp_path / "restored", harness)
    yield restored
    restored.broker.close()


def partition_of(harness):
    return harness.broker.partition("t", 0)


def test_a_restored_topic_is_rehydrated_and_compacted(restored, last_values):
    end = partition_of(restored).log_start_offset + 500 + GAP
    assert partition_of(restored).offsets().local_log_start_offset == end
    last = last_values | fill(restored, "t", 200, keys=10, seed=3)
    partition_of(restored).upkeep.roll()
    restored.broker.background.compactor.run_round()
    log = partition_of(restored)._log
    assert not partition_of(restored).compaction.has_cold_only()
    assert log.first_local_offset < 500
    records = restored.records("t")
    assert last_of(records) == last
    assert len(records) == len(last), "the old values of both sides of the gap are gone"


def test_nothing_is_missing_any_more_if_retention_was_faster(restored):
    compactor = restored.broker.background.compactor
    compactor._rehydrate_all()
    assert not partition_of(restored).compaction.has_cold_only()
    compactor._rehydrate(partition_of(restored), stopping=lambda: False)


def test_a_topic_can_be_altered_before_it_is_rehydrated(restored):
    assert partition_of(restored).compaction.has_cold_only()
    restored.broker.alter_topic("t", config={"max.message.bytes": 12345}, partitions=2)
    topic = restored.broker.topic("t")
    assert topic.config.max_message_bytes == 12345
    assert len(topic.partitions) == 2
    with pytest.raises(InvalidConfig, match=r"remote\.storage\.enable"):
        restored.broker.alter_topic("t", config={"remote.storage.enable": False})


def test_a_transaction_aborted_in_a_later_segment_stays_aborted(tmp_path):
    harness = BrokerHarness(copy_of_kafka(tmp_path, "txn-0", clean=True))
    harness.broker.alter_topic("txn", config=COMPACT | {"min.cleanable.dirty.ratio": 1.0})
    harness.broker.partition("txn", 0).upkeep.roll()
    offload(harness, "txn")
    log = harness.broker.partition("txn", 0)._log
    end, borders = log.high_watermark, log.base_offsets
    aborted = log.aborted_transactions(0, end)
    assert any(
        txn.first_offset < border <= txn.last_offset for border in borders for txn in aborted
    )
    harness.broker.close()
    restored = Restored(tmp_path / "restored", harness)
    restored.broker.background.compactor._rehydrate_all()
    assert restored.broker.partition("txn", 0)._log.aborted_transactions(0, end) == aborted
    restored.broker.close()


def test_a_segment_before_a_gap_that_was_trimmed_does_not_keep_the_next_on_disk(restored):
    """Its last record is below the log start, its last offset is not."""
    restored.broker.background.compactor._rehydrate_all()
    fill(restored, "t", 20)
    log = partition_of(restored)._log
    log.roll()
    offload(restored, "t")
    restored.broker.trim("t", 0, 507)
    assert log.base_offsets[1] == 500 + GAP
    flip(log.segments()[1].path, 100)
    (step,) = repair_topic(restored.broker, "t", apply=True, deep=True)
    assert step.action == "set-aside"
    assert verify_topic(restored.broker, "t", deep=True).ok


def test_a_reader_at_the_end_crosses_the_gap_before_new_records(restored):
    """A fetch below the high watermark that makes no progress is repeated at once, forever."""
    partition = partition_of(restored)
    before = partition.read(500, max_bytes=1 << 20)
    restored.broker.background.compactor._rehydrate_all()
    assert partition.first_local_offset < 500
    for offset in (500, 600):
        found = partition.read(offset, max_bytes=1 << 20)
        assert (found.slices, found.next_offset) == ((), before.next_offset)
    assert before.next_offset == partition.offsets().high_watermark == 500 + GAP


def test_compaction_is_mirrored_across_the_gap_and_a_restart(restored, last_values):
    last = last_values | fill(restored, "t", 100, seed=3)
    compact_all(restored)
    offload(restored, "t")
    assert last_of(cold_records(restored, "t")) == last
    restored.restart()
    last |= fill(restored, "t", 300, seed=4)
    compact_all(restored)
    offload(restored, "t")
    assert last_of(restored.records("t")) == last_of(cold_records(restored, "t")) == last
    gap_end = partition_of(restored).manifest.gaps[0].end_offset
    entries = partition_of(restored).cold_entries(0)
    assert not [one for one in entries if one.base_offset < gap_end <= one.last_offset]
    report = verify_topic(restored.broker, "t", deep=True)
    assert [p for p in report.problems if p.kind != "gap"] == []


def compact_all(harness):
    partition_of(harness).upkeep.roll()
    harness.broker.background.compactor.run_round()


def test_a_segment_rehydrated_from_before_its_compaction_is_compacted_again(harness):
    harness.broker.create_topic("t", config=COMPACT)
    last = fill(harness, "t", 300)
    partition_of(harness).upkeep.roll()
    offload(harness, "t")
    harness.stop_copying()  # compaction is not mirrored
    folder = compacted(harness, "t").folder
    harness.broker.close()
    oldest = min(folder.glob("*.log")).stem
    for file in folder.glob(f"{oldest}.*"):
        file.unlink()
    harness.broker = harness.open()
    partition = partition_of(harness)
    assert partition.compaction.has_cold_only()
    harness.broker.background.compactor.run_round()
    assert not partition.compaction.has_cold_only()
    records = harness.records("t")
    assert last_of(records) == last
    assert len(records) == len(last), "no old value came back"


def test_rehydrated_segments_match_the_manifest(restored):
    partition = partition_of(restored)
    in_bucket = list(partition.compaction.cold_only())
    first_local = partition.first_local_offset
    assert len(in_bucket) > 3
    restored.broker.background.compactor._rehydrate(partition, stopping=lambda: False)
    local = [view for view in partition.local_segments() if view.base_offset < first_local]
    assert [view.base_offset for view in local] == [entry.base_offset for entry in in_bucket]
    for view, entry in zip(local, in_bucket, strict=True):
        assert partition._log.sealed.crc32c(view.base_offset) == entry.log_crc32c
        assert view.path.stat().st_mtime_ns // 1_000_000 == entry.modified_ms
    assert partition.is_mirrored
    assert partition._log.epochs[0].epoch == in_bucket[0].leader_epoch


def test_a_deleted_value_that_is_rehydrated_does_not_come_back_in_the_bucket(harness, tmp_path):
    """The bucket has the value, and the old disk's tail its tombstone, past its delete horizon."""
    harness.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    harness.stop_copying()
    harness.broker.bucket.publish_topics(harness.broker.registry)
    put(harness, "t", [(b"deleted", b"d" * 2500), (b"kept", b"k")])
    partition_of(harness).upkeep.roll()
    harness.copy_sealed()
    deletion = put(harness, "t", [(b"deleted", None), (b"last", b"k")])
    compacted(harness, "t")
    put(harness, "t", [(b"new", b"n")])
    partition_of(harness).upkeep.roll()
    harness.broker.close()
    new = Restored(tmp_path / "new", harness, tail=harness.root / "data", start=False)
    settings = BrokerSettings(data_dir=new.root / "data", disk_reserve_bytes=0)
    new.broker = Broker.open_idle(settings, store=open_store(f"file://{new.root / 'bucket'}"))
    cold, found = partition_of(new)._cold, []
    record_manifest = cold.bucket_state.record_manifest

    def look(manifest):
        record_manifest(manifest)
        if manifest.end_offset > deletion.base_offset:
            found.append(last_of(cold_records(new, "t")).get(b"deleted", (0, None)))

    cold.bucket_state.record_manifest = look
    new.broker.background.compactor.run_round()
    new.copy_sealed()
    assert found
    assert [value for _, value in found if value] == []
    new.broker.close()


def test_a_crash_during_rehydration_leaves_only_whole_segments(restored, tmp_path, monkeypatch):
    """At each rename and sync the folder is copied; each copy opens without a hole."""
    partition, copies = partition_of(restored), []
    records = restored.records("t")

    def copy_folder():
        if len(copies) == 16:  # three segments and the start of a fourth
            return
        copies.append(tmp_path / f"copy-{len(copies)}" / partition.folder.name)
        shutil.copytree(partition.folder, copies[-1])

    class WatchedDisk(type(REAL_DISK)):
        def rename(self, source, target):
            copy_folder()
            super().rename(source, target)

        def sync_folder(self, path):
            copy_folder()
            super().sync_folder(path)

    monkeypatch.setattr(partition._log._state, "disk", WatchedDisk())
    entries = list(partition.compaction.cold_only())
    restored.broker.background.compactor._rehydrate(partition, stopping=lambda: False)
    bases = {entry.base_offset for entry in entries} | {partition._log._state.segments.bases[-1]}
    assert len(copies) == 16
    for copy in copies:
        log = PartitionLog.open(
            copy,
            topic="t",
            partition=0,
            topic_id=partition.topic_id,
            config=partition.config,
            clock=lambda: 0,
            request=OpenRequest(
                clean=False, recovery_point=partition.high_watermark, log_start_offset=0
            ),
        )
        assert log.first_local_offset in bases
        offset, end = log.first_local_offset, log.high_watermark
        assert read_all(log, offset) == [r for r in records if offset <= r.offset < end]
        assert not list(copy.glob("*.tmp"))
        log.close()


def read_all(log, offset):
    found = []
    while offset < log.high_watermark:
        read = log.read_hot(offset, max_bytes=1 << 20)
        found += iter_records(b"".join(piece.read() for piece in read.slices), from_offset=offset)
        if read.next_offset == offset:
            break
        offset = read.next_offset
    return found


def test_a_corrupt_object_is_rejected_and_later_ones_are_rehydrated(restored, last_values):
    partition = partition_of(restored)
    entries = list(partition.compaction.cold_only())
    path = restored.root / "bucket" / partition.object_key(entries[1].log_key)
    path.chmod(0o644)
    flip(path, -1)
    restored.broker.background.compactor.run_round()
    assert partition.first_local_offset == entries[2].base_offset
    assert restored.broker.background.compactor._backoff
    assert not list((restored.root / "data" / "tierlog" / "scratch" / "bring-back").glob("*"))


def test_rehydration_is_retried_after_a_store_outage_or_a_full_disk(restored, monkeypatch):
    partition = partition_of(restored)
    entries = list(partition.compaction.cold_only())
    restored.set_down(True)
    restored.broker.background.compactor.run_round()
    assert list(partition.compaction.cold_only()) == entries
    restored.set_down(False)
    restored.broker.background.compactor._backoff.clear()

    def no_room(size_bytes):
        raise DiskFull(f"{size_bytes} do not fit")

    monkeypatch.setattr(restored.broker.background.compactor._rehydrate, "_check_room", no_room)
    restored.broker.background.compactor.run_round()
    assert list(partition.compaction.cold_only()) == entries
    monkeypatch.undo()
    restored.broker.background.compactor._backoff.clear()
    restored.broker.background.compactor.run_round()
    assert not partition.compaction.has_cold_only()


def test_trimmed_segments_are_not_rehydrated(restored):
    partition = partition_of(restored)
    entries = list(partition.compaction.cold_only())
    rehydrate = restored.broker.background.compactor._rehydrate
    middle = entries[2]
    check_room = rehydrate._check_room

    def trim_first(size_bytes):
        check_room(size_bytes)
        restored.broker.background.janitor.trim_partition(partition, middle.base_offset)

    rehydrate._check_room = trim_first
    rehydrate(partition, stopping=lambda: False)
    assert partition.first_local_offset == middle.base_offset
    assert not partition.compaction.has_cold_only()


def test_restored_group_offsets_are_compacted_again(harness, tmp_path):
    harness.broker.create_topic("t")
    harness.produce("t", [b"x"] * 10)
    for offset in range(10):
        harness.broker.groups.commit_offsets("g", [NewOffset("t", 0, offset)])
    harness.offload(OFFSETS_TOPIC)
    harness.broker.close()
    restored = Restored(tmp_path / "restored", harness)
    restored.broker.background.compactor.run_round()
    offsets = restored.broker.partition(OFFSETS_TOPIC, 0)
    assert not offsets.compaction.has_cold_only()
    assert offsets.first_local_offset == 0
    restored.restart()
    assert restored.broker.groups.group("g")[0].offset == 9
    restored.broker.close()
