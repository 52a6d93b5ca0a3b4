"""Problems found by verification are repaired if the bytes still exist, and reported if not."""

import errno
import os

import pytest

from tests.fakes.bad_sectors import cannot_read
from tests.fakes.broker_harness import BrokerHarness
from tests.fakes.compacted_topics import (
    COMPACT,
    cold_records,
    compacted,
    fill,
    last_of,
    offload,
)
from tests.fakes.damage import cut, flip
from tests.fakes.faulty_object_store import FailsBefore
from tests.integration.broker.test_adopt import copy_of_kafka
from tests.integration.repair.test_verify import entries, filled, path_of
from tierlog.broker.broker import Broker
from tierlog.broker.partition.upkeep import PartitionUpkeep
from tierlog.broker.settings import BrokerSettings
from tierlog.manifest.invariants import InvalidTransition
from tierlog.object_store.open import open_store
from tierlog.record_format.batch import HEADER_SIZE, iter_headers
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    MissingObject,
    Throttled,
)
from tierlog.repair import bucket_repair, repair
from tierlog.repair.bucket_repair import ObjectSalvage
from tierlog.repair.repair import repair_topic
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.repair.verify import verify_topic

__all__ = ["filled"]


def steps(harness, **options):
    return [
        (step.action, step.base_offset) for step in repair_topic(harness.broker, "t", **options)
    ]


def covered_locally(harness):
    """An entry whose records are also on local disk."""
    start = harness.broker.partition("t", 0).offsets().local_log_start_offset
    return next(entry for entry in entries(harness) if entry.base_offset >= start)


def corrupt_local_copy(harness, entry):
    log = harness.broker.partition("t", 0)._log
    flip(next(one.path for one in log.segments() if one.base_offset == entry.base_offset), 15)


def test_an_intact_topic_needs_no_repair(filled):
    assert steps(filled, deep=True) == []


@pytest.mark.parametrize("apply", [False, True])
def test_segments_that_left_the_disk_during_the_check_are_not_lost(filled, monkeypatch, apply):
    """A check may take hours, and the broker goes on offloading."""
    check = bucket_repair.check_partition

    def slow(*args):
        found = check(*args)
        filled.fill(200)
        filled.offload()
        log = filled.broker.partition("t", 0)._log
        log.delete_local(log.active_base_offset)
        return found

    monkeypatch.setattr(bucket_repair, "check_partition", slow)
    assert steps(filled, deep=True, apply=apply) == []


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), cut, lambda path: flip(path, 99)])
def test_a_log_object_is_uploaded_again_from_the_local_segment(filled, damage):
    entry, before = covered_locally(filled), filled.records("t")
    damage(path_of(filled, entry.log_key))
    expected = [("upload-again", entry.base_offset)]
    assert steps(filled, deep=True) == expected
    assert not verify_topic(filled.broker, "t", deep=True).ok, "a plan changes nothing"
    assert [one.done for one in repair_topic(filled.broker, "t", deep=True, apply=True)] == [True]
    assert verify_topic(filled.broker, "t", deep=True).ok
    (new,) = [e for e in entries(filled) if e.base_offset == entry.base_offset]
    assert new.log_key != entry.log_key
    assert new.same_bytes(entry)
    assert new.modified_ms == entry.modified_ms
    cold = filled.broker.partition("t", 0)._cold
    assert cold.manifest.compacted_before == 0
    assert entry.log_key in {removed.key for removed in cold.manifest.removed}
    assert filled.records("t") == before
    assert steps(filled, deep=True) == []


def test_a_partly_trimmed_segment_is_uploaded_again(filled):
    entry = covered_locally(filled)
    filled.broker.trim("t", 0, entry.base_offset + 1)
    path_of(filled, entry.log_key).unlink()
    assert steps(filled) == [("upload-again", entry.base_offset)]
    assert [one.done for one in repair_topic(filled.broker, "t", apply=True)] == [True]
    assert verify_topic(filled.broker, "t", deep=True).ok
    filled.broker.partition("t", 0).upkeep.delete_local(entry.next_offset)
    start = entry.base_offset + 1
    assert filled.records("t", offset=start)[0].offset == start


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), cut, lambda path: flip(path, 99)])
@pytest.mark.parametrize("number", [0, 1])
def test_an_indexes_object_is_rebuilt_from_the_log_object(filled, damage, number):
    entry, before = entries(filled)[number], filled.records("t")
    whole = path_of(filled, entry.indexes_key).read_bytes()
    damage(path_of(filled, entry.indexes_key))
    assert steps(filled) == [("make-indexes", entry.base_offset)]
    repair_topic(filled.broker, "t", apply=True)
    assert verify_topic(filled.broker, "t", deep=True).ok
    (new,) = [e for e in entries(filled) if e.base_offset == entry.base_offset]
    assert path_of(filled, new.indexes_key).read_bytes() == whole
    assert filled.records("t") == before


def test_a_segment_in_neither_tier_is_dropped_with_its_offsets_named(filled):
    entry, before = entries(filled)[1], filled.records("t")
    path_of(filled, entry.log_key).unlink()
    (step,) = repair_topic(filled.broker, "t")
    assert (step.action, step.base_offset, step.last_offset) == ("drop", 30, 59)
    assert "offsets 30 to 59 (30 records) are lost" in step.detail
    repair_topic(filled.broker, "t", apply=True)
    assert verify_topic(filled.broker, "t", deep=True).ok
    cold = filled.broker.partition("t", 0)._cold
    assert [(gap.start_offset, gap.end_offset) for gap in cold.manifest.gaps] == [(30, 60)]
    assert filled.records("t") == [one for one in before if not 30 <= one.offset < 60]


def test_only_the_corrupt_batch_of_an_object_is_dropped(filled):
    entry, before = entries(filled)[1], filled.records("t")
    flip(path_of(filled, entry.log_key), 99)
    (step,) = repair_topic(filled.broker, "t", apply=True, deep=True)
    assert (step.action, step.done) == ("drop-batches", False)
    assert "offsets 30 to 39 are lost, all others are kept; requires --accept-loss" in step.detail
    assert entry.log_key in [one.log_key for one in entries(filled)]
    flip(path_of(filled, entry.log_key), 99)
    assert filled.records("t") == before
    flip(path_of(filled, entry.log_key), 99)
    (step,) = repair_topic(filled.broker, "t", apply=True, deep=True, accept_loss=True)
    assert (step.done, "--accept-loss" in step.detail) == (True, False)
    assert verify_topic(filled.broker, "t", deep=True).ok
    (new,) = [e for e in entries(filled) if e.base_offset == 30]
    assert (new.last_offset, new.record_count, new.modified_ms) == (59, 20, entry.modified_ms)
    cold = filled.broker.partition("t", 0)._cold
    assert cold.manifest.compacted_before == 0
    assert set(entry.keys) <= {removed.key for removed in cold.manifest.removed}
    assert filled.records("t") == [one for one in before if not 30 <= one.offset < 40]
    assert steps(filled, deep=True) == []


def test_complete_batches_of_a_truncated_object_are_kept(filled):
    entry, before = entries(filled)[1], filled.records("t")
    cut(path_of(filled, entry.log_key))
    (step,) = repair_topic(filled.broker, "t", apply=True, accept_loss=True)
    assert (step.action, step.done) == ("drop-batches", True)
    assert "offsets 50 to 59 are lost, all others are kept" in step.detail
    assert verify_topic(filled.broker, "t", deep=True).ok
    assert filled.records("t") == [one for one in before if not 50 <= one.offset < 60]


def test_batches_of_an_object_beside_a_bad_sector_are_kept(filled, monkeypatch):
    entry, before = entries(filled)[1], filled.records("t")
    path = path_of(filled, entry.log_key)
    with monkeypatch.context() as disk:
        disk.setattr(bucket_repair, "SECTOR_BYTES", 64)
        cannot_read(disk, path, kept=filled.root / "kept", where=range(99, 100))
        (step,) = repair_topic(filled.broker, "t", apply=True, deep=True, accept_loss=True)
    assert (step.action, step.done) == ("drop-batches", True)
    assert "offsets 30 to 39 are lost, all others are kept" in step.detail
    assert verify_topic(filled.broker, "t", deep=True).ok
    assert filled.records("t") == [one for one in before if not 30 <= one.offset < 40]


@pytest.mark.parametrize("size_bytes", [0, None])
def test_an_object_without_a_valid_batch_is_dropped_with_accept_loss(filled, size_bytes):
    path = path_of(filled, entries(filled)[1].log_key)
    path.write_bytes(bytes(path.stat().st_size if size_bytes is None else size_bytes))
    (step,) = repair_topic(filled.broker, "t", apply=True, deep=True)
    assert (step.action, step.done) == ("drop", False)
    assert "offsets 30 to 59 (30 records) are lost; requires --accept-loss" in step.detail
    (step,) = repair_topic(filled.broker, "t", apply=True, deep=True, accept_loss=True)
    assert step.done
    assert verify_topic(filled.broker, "t", deep=True).ok


def test_an_object_that_reads_differently_each_time_is_not_dropped(filled, monkeypatch):
    entry, check = entries(filled)[1], bucket_repair.check_segment
    path = path_of(filled, entry.log_key)
    flip(path, 99)

    def corrupt_and_check(*args, **options):
        flip(path, -9)
        return check(*args, **options)

    monkeypatch.setattr(bucket_repair, "check_segment", corrupt_and_check)
    (step,) = repair_topic(filled.broker, "t", apply=True, deep=True, accept_loss=True)
    assert (step.action, step.done) == ("drop-batches", False)
    assert "reads differently each time" in step.detail
    assert entry in entries(filled)


def test_a_batch_that_turns_corrupt_during_the_salvage_fails_it(filled):
    entry = entries(filled)[1]
    path = path_of(filled, entry.log_key)
    flip(path, 99)
    salvage = ObjectSalvage(filled.store, entry, size_bytes=entry.size_bytes)
    assert len(list(salvage.batches())) == 3
    flip(path, -9)
    with pytest.raises(CorruptDataError, match="reads differently"):
        list(salvage.batches())


def test_a_transaction_stays_aborted_if_its_marker_is_lost(tmp_path):
    harness = BrokerHarness(copy_of_kafka(tmp_path, "txn-0", clean=True))
    partition = harness.broker.partition("txn", 0)
    partition.upkeep.roll()
    offload(harness, "txn")
    end = partition.high_watermark
    assert partition.upkeep.delete_local(end)
    before = partition._cold.reads.aborted_transactions(0, end)
    for entry in partition.cold_entries(0):
        path = path_of(harness, entry.log_key)
        markers = [one.position for one in iter_headers(path.read_bytes()) if one.is_control]
        for position in markers:
            flip(path, position + HEADER_SIZE)
    found = repair_topic(harness.broker, "txn", apply=True, deep=True, accept_loss=True)
    assert {(step.action, step.done) for step in found} == {("drop-batches", True)}
    assert verify_topic(harness.broker, "txn", deep=True).ok
    assert before
    assert partition._cold.reads.aborted_transactions(0, end) == before
    harness.broker.close()


def test_a_scratch_disk_that_fails_is_not_called_full(filled, monkeypatch):
    path_of(filled, covered_locally(filled).log_key).unlink()

    def fails(*_):
        yield b""
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(PartitionUpkeep, "local_pieces", fails)
    monkeypatch.setattr(bucket_repair.BucketRepair, "_is_local", lambda *_: True)
    with pytest.raises(OSError, match="Input/output error"):
        repair_topic(filled.broker, "t", apply=True)


def test_an_object_that_reappears_is_not_dropped(filled, monkeypatch):
    """The store briefly reported the object as missing."""
    entry, head = entries(filled)[1], filled.store.head
    requested = []

    def forgetful(key):
        requested.append(key)
        return None if key == entry.log_key and requested.count(key) == 1 else head(key)

    monkeypatch.setattr(filled.store, "head", forgetful, raising=False)
    missing = FailsBefore(lambda key: MissingObject("it is not there", file=key))
    filled.store.fail("get_range", missing, when=lambda key: key == entry.log_key)
    (step,) = repair_topic(filled.broker, "t", apply=True)
    assert (step.action, step.done) == ("drop", False)
    assert "nothing is lost" in step.detail
    assert verify_topic(filled.broker, "t", deep=True).ok


def test_a_lost_object_is_replaced_by_its_compacted_segment(harness):
    harness.broker.create_topic("t", config=COMPACT)
    last = fill(harness, "t", 400)
    offload(harness, "t")
    harness.stop_copying()
    compacted(harness, "t")
    lost = entries(harness)[1]
    path_of(harness, lost.log_key).unlink()
    assert ("none", lost.base_offset) in steps(harness, apply=True)
    harness.upload_sealed()
    assert last_of(cold_records(harness, "t")) == last
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_a_local_segment_with_different_bytes_does_not_replace_a_lost_object(filled):
    entry = covered_locally(filled)
    path_of(filled, entry.log_key).unlink()
    corrupt_local_copy(filled, entry)
    assert steps(filled) == [("drop", entry.base_offset)]


def test_a_local_segment_in_a_bad_sector_does_not_replace_a_lost_object(filled, monkeypatch):
    entry = covered_locally(filled)
    path_of(filled, entry.log_key).unlink()
    local = filled.root / "data" / "t-0" / f"{entry.base_offset:020d}.log"
    with monkeypatch.context() as disk:
        bad = range(local.stat().st_size // 2, local.stat().st_size // 2 + 1)
        cannot_read(disk, local, kept=filled.root / "kept", where=bad)
        assert steps(filled) == [("drop", entry.base_offset)]


def test_an_index_is_not_rebuilt_from_a_corrupt_log_object(filled):
    entry = entries(filled)[1]
    path_of(filled, entry.indexes_key).unlink()
    flip(path_of(filled, entry.log_key), 99)
    (step,) = repair_topic(filled.broker, "t", apply=True)
    assert (step.action, step.done) == ("make-indexes", False)
    assert "--deep" in step.detail
    assert steps(filled, deep=True) == [("drop-batches", entry.base_offset)]


def test_a_problem_that_cannot_be_repaired_is_reported(filled):
    cold = filled.broker.partition("t", 0)._cold
    flip(path_of(filled, cold._manifests.versions.key(cold.manifest.version)), 200)
    (step,) = repair_topic(filled.broker, "t", apply=True)
    assert (step.action, step.done) == ("none", False)
    assert "manifest-corrupt" in step.detail


def test_a_lost_topic_object_is_written_again(filled):
    folder = next((filled.root / "bucket").glob("topics/t/*/topic"))
    for path in folder.iterdir():
        path.unlink()
    (step,) = repair_topic(filled.broker, "t")
    assert (step.action, step.done) == ("write-topic", False)
    assert not folder.exists() or not list(folder.iterdir())
    (step,) = repair_topic(filled.broker, "t", apply=True)
    assert step.done
    assert verify_topic(filled.broker, "t", deep=True).ok


def test_one_repair_runs_at_a_time(filled, monkeypatch):
    check, refused = bucket_repair.check_partition, []

    def repair_meanwhile(*args):
        monkeypatch.undo()
        with pytest.raises(Throttled, match="a repair is in progress"):
            repair_topic(filled.broker, "t")
        refused.append(True)
        return check(*args)

    monkeypatch.setattr(bucket_repair, "check_partition", repair_meanwhile)
    for _ in range(2):
        assert steps(filled, apply=True) == []
    assert refused == [True]


def test_a_topic_that_is_altered_during_its_repair_stays_altered(filled, monkeypatch):
    filled.stop_copying()
    for path in (filled.root / "bucket").glob("topics/t/*/topic/*"):
        path.unlink()
    check = repair.check_topic_object

    def check_while_altering(store, record):
        filled.broker.alter_topic("t", partitions=2)
        return check(store, record)

    monkeypatch.setattr(repair, "check_topic_object", check_while_altering)
    repair_topic(filled.broker, "t", apply=True)
    monkeypatch.undo()
    assert filled.broker.registry.by_name("t").partitions == 2
    filled.restart()
    assert filled.broker.topic("t").numbers == [0, 1]


def test_a_corrupt_topic_object_is_superseded(filled, tmp_path):
    """Without it, a restore of the bucket skips the topic."""
    folder = next((filled.root / "bucket").glob("topics/t/*/topic"))
    (bad,) = folder.iterdir()
    flip(bad, 100)
    options = RestoreOptions(data_dir=tmp_path / "first", gap=0, clock=lambda: 0)
    report = restore(open_store(f"file://{filled.root / 'bucket'}"), options)
    assert [bad.name in one.unreadable for one in report.others] == [True]
    (problem,) = verify_topic(filled.broker, "t").problems
    assert (problem.kind, bad.name in problem.object_key) == ("topic-object", True)
    before = bad.read_bytes()
    (step,) = repair_topic(filled.broker, "t")
    assert (step.action, step.done, list(folder.iterdir())) == ("write-topic", False, [bad])
    (step,) = repair_topic(filled.broker, "t", apply=True)
    assert (step.action, step.done) == ("write-topic", True)
    assert bad.read_bytes() == before, "nothing is overwritten"
    assert verify_topic(filled.broker, "t", deep=True).ok
    assert repair_topic(filled.broker, "t") == []
    options = options._replace(data_dir=tmp_path / "second")
    report = restore(open_store(f"file://{filled.root / 'bucket'}"), options)
    assert [one.topic for one in report.partitions] == ["t"]


def test_orphans_are_collected_after_the_grace_period(filled):
    folder = path_of(filled, entries(filled)[0].log_key).parent
    orphan = folder / f"{7:020d}-1-abc.log"
    orphan.write_bytes(b"orphan")
    assert steps(filled) == [], "it may be an upload in progress"
    filled.restart(gc_grace_ms=0)
    (step,) = repair_topic(filled.broker, "t")
    assert (step.action, step.detail) == ("collect", "0 dropped objects and 1 orphans")
    assert filled.broker.collect_garbage("t")[0].orphans == (
        str(orphan.relative_to(filled.root / "bucket")),
    )
    assert orphan.exists()
    repair_topic(filled.broker, "t", apply=True)
    assert not orphan.exists()
    assert verify_topic(filled.broker, "t", deep=True).ok


def test_an_object_that_may_not_be_deleted_does_not_end_a_repair_or_a_collection(harness):
    """Neither for its own partition nor for those after it."""
    harness.broker.create_topic("t", partitions=2, config={"retention.ms": "-1"})
    harness.restart(gc_grace_ms=0)
    orphans = []
    for number in (0, 1):
        harness.fill(10, partition=number)
        harness.offload()
        (entry,) = harness.broker.partition("t", number).cold_entries(0)
        orphans.append(path_of(harness, entry.log_key).with_name(f"{7:020d}-1-abc.log"))

    def refusal(key):
        return ConfigurationError(f"no permission to delete {key}")

    is_locked = str(orphans[0]).endswith
    harness.store.fail("delete", FailsBefore(refusal), times=2, when=is_locked)
    for orphan in orphans:
        orphan.write_bytes(b"orphan")
    refused, done = repair_topic(harness.broker, "t", apply=True)
    assert (refused.done, done.done) == (False, True)
    assert "no permission to delete topics/t/" in refused.detail
    orphans[1].write_bytes(b"again")
    with pytest.raises(ConfigurationError, match="no permission to delete topics/t/"):
        harness.broker.collect_garbage("t", apply=True)
    assert [orphan.exists() for orphan in orphans] == [True, False]


def test_planted_a_repair_that_does_not_compare_checksums_is_refused_by_the_manifest(
    filled, monkeypatch
):
    entry = covered_locally(filled)
    path_of(filled, entry.log_key).unlink()
    corrupt_local_copy(filled, entry)
    monkeypatch.setattr(bucket_repair.BucketRepair, "_is_local", lambda self, entry: True)
    monkeypatch.setattr(bucket_repair, "verified_pieces", lambda pieces, entry: pieces)
    with pytest.raises(InvalidTransition, match="different bytes"):
        repair_topic(filled.broker, "t", apply=True)


def test_an_intact_local_log_needs_no_repair(tmp_path):
    settings = BrokerSettings(data_dir=tmp_path, cache_bytes=1 << 20, disk_reserve_bytes=0)
    broker = Broker.open(settings, store=None)
    broker.create_topic("t")
    assert repair_topic(broker, "t") == []
    broker.close()
