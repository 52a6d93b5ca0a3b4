"""Compaction in a broker: local disk first, then the bucket, one transition per segment."""

import dataclasses
import itertools
import shutil
import threading

import pytest
from structlog.testing import capture_logs

from tests.fakes.compacted_topics import (
    COMPACT,
    cleaned,
    cold_records,
    compacted,
    fill,
    last_of,
    offload,
    put,
)
from tierlog.broker.broker import Broker
from tierlog.broker.data_folder.data_folder import RECOVERY_POINTS
from tierlog.broker.partition.compaction import PartitionCompaction
from tierlog.broker.settings import BrokerSettings
from tierlog.hot_tier import cleaner
from tierlog.hot_tier.cleaner import Interrupted
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.errors import CorruptDataError, StoreUnavailable
from tierlog.repair.repair import repair_topic
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.repair.verify import verify_topic


def test_compaction_keeps_the_last_value_of_each_key_at_its_offset(harness):
    harness.broker.create_topic("t", config=COMPACT)
    last = fill(harness, "t", 400)
    compacted(harness, "t")
    records = harness.records("t")
    assert last_of(records) == last
    assert len(records) == len(last)
    harness.restart()
    assert last_of(harness.records("t")) == last


def test_no_wrong_offset_is_served_from_a_compacted_segment(harness):
    """No checksum of a batch covers it, and with gaps around it a wrong one may be in order."""
    harness.broker.create_topic("t", config=COMPACT)
    for number in range(150):
        put(harness, "t", [(b"%d" % (number if number % 5 else 0), b"v" * 100)])
    offload(harness, "t")
    compacted(harness, "t")
    offload(harness, "t")
    before = {record.offset: record for record in harness.records("t")}
    log = harness.broker.partition("t", 0).local_segments()[0].path
    whole, refused = log.read_bytes(), 0
    headers = list(iter_headers(whole))
    assert any(one.next_offset < two.base_offset for one, two in itertools.pairwise(headers))
    flips = [(header, bit) for header in headers[-8:] for bit in (0, 2, 40)]
    for header, bit in flips:
        harness.broker.close()
        damaged = bytearray(whole)
        damaged[header.position + 7 - bit // 8] ^= 1 << bit % 8
        log.write_bytes(damaged)
        harness.broker = harness.open()
        try:
            found = harness.records("t")
        except CorruptDataError:
            refused += 1
        else:
            assert {record.offset: record for record in found} == before, (header, bit)
    assert refused == len(flips) > 9
    (step,) = [one for one in repair_topic(harness.broker, "t", apply=True, deep=True) if one.done]
    assert step.action == "set-aside"
    assert {record.offset: record for record in harness.records("t")} == before


def test_compaction_is_mirrored_to_the_bucket(harness):
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 400)
    offload(harness, "t")
    partition = harness.broker.partition("t", 0)
    before = {entry.log_key for entry in partition.cold_entries(0)}
    last = fill(harness, "t", 200, seed=2)
    log = compacted(harness, "t")
    assert not log.sealed.mirrored
    offload(harness, "t")
    entries = list(partition.cold_entries(0))
    assert before.isdisjoint(entry.log_key for entry in entries)
    assert before <= {removed.key for removed in partition.manifest.removed}
    assert cold_records(harness, "t") == harness.records("t")
    assert last.items() <= last_of(harness.records("t")).items()
    report = verify_topic(harness.broker, "t", deep=True)
    assert not report.problems


def test_a_sealed_but_unflushed_segment_is_compacted_correctly(harness):
    harness.broker.create_topic("t", config={**COMPACT, "flush.ms": 86_400_000})
    put(harness, "t", [(b"key", b"v" * 100)] * 10)
    put(harness, "t", [(b"key", b"v" * 4096)], acks=Acks.LEADER)
    harness.broker.background.compactor.run_round()
    log = harness.broker.partition("t", 0)._log
    assert (log.high_watermark, log.log_end_offset, log.sealed.swap_sequence > 0) == (10, 11, True)
    assert verify_topic(harness.broker, "t", deep=True).ok
    assert [record.offset for record in harness.records("t")] == [9]


def test_segment_files_are_not_replaced_during_their_upload(harness, monkeypatch):
    harness.broker.create_topic("t", config=COMPACT)
    sealed, put_file, locked = (
        harness.broker.partition("t", 0)._log.sealed,
        harness.store.put_file,
        [],
    )

    def put_and_record(*args, **options):
        locked.append(sealed.lock.locked())
        return put_file(*args, **options)

    monkeypatch.setattr(harness.store, "put_file", put_and_record, raising=False)
    fill(harness, "t", 200)
    offload(harness, "t")
    fill(harness, "t", 200, seed=2)
    compacted(harness, "t")
    offload(harness, "t")
    assert len(locked) > 4
    assert all(locked)


def test_tiers_agree_after_several_rounds(harness):
    harness.broker.create_topic("t", config=COMPACT)
    last = {}
    for seed in range(5):
        last |= fill(harness, "t", 150, seed=seed)
        if seed % 2:
            offload(harness, "t")
        harness.broker.partition("t", 0).upkeep.roll()
        harness.broker.background.compactor.run_round()
    offload(harness, "t")
    assert last_of(harness.records("t")) == last
    assert cold_records(harness, "t") == harness.records("t")
    assert not verify_topic(harness.broker, "t", deep=True).problems


def test_compaction_continues_while_the_store_is_down(harness):
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 300)
    offload(harness, "t")
    harness.set_down(True)
    last = fill(harness, "t", 300, seed=3)
    compacted(harness, "t")
    assert last.items() <= last_of(harness.records("t")).items()
    with pytest.raises(StoreUnavailable):
        harness.broker.partition("t", 0)._cold.ownership.check_fence(log_end_offset=0)
    harness.set_down(False)
    offload(harness, "t")
    assert cold_records(harness, "t") == harness.records("t")


def test_mirroring_resumes_after_a_crash(harness):
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 300)
    offload(harness, "t")
    harness.set_down(True)
    compacted(harness, "t")
    expected = harness.records("t")
    harness.restart()
    assert harness.records("t") == expected
    offload(harness, "t")
    assert cold_records(harness, "t") == expected
    assert not verify_topic(harness.broker, "t", deep=True).problems


def test_a_partition_with_a_missing_file_blocks_no_other(harness):
    for topic in ("gone", "t"):
        harness.broker.create_topic(topic, config={**COMPACT, "max.compaction.lag.ms": 3_600_000})
        last = fill(harness, topic, 200)
    harness.restart()
    (harness.root / "data" / "gone-0" / f"{0:020d}.log").unlink()
    compacted(harness, "t")
    assert last_of(harness.records("t")) == last


def test_a_tombstone_is_removed_after_its_delete_horizon(harness):
    config = COMPACT | {"delete.retention.ms": 0}
    harness.broker.create_topic("t", config=config)
    fill(harness, "t", 200, keys=5)
    put(harness, "t", [(b"key-1", None)])
    compacted(harness, "t")
    assert [r.value for r in harness.records("t") if r.key == b"key-1"] == [None]
    offload(harness, "t")
    fill(harness, "t", 100, keys=1)
    compacted(harness, "t")
    assert b"key-1" not in last_of(harness.records("t"))


def test_a_small_dedupe_buffer_takes_more_rounds_with_the_same_result(harness):
    harness.restart(log_cleaner_dedupe_buffer_bytes=12 * 40)
    harness.broker.create_topic("t", config=COMPACT)
    last = fill(harness, "t", 600, keys=200)
    compacted(harness, "t")
    assert last_of(harness.records("t")) == last
    assert len(harness.records("t")) == len(last)


def test_readers_see_whole_batches_while_segments_are_replaced(harness):
    harness.broker.create_topic("t", config=COMPACT)
    last, stop, failures, reads = {}, threading.Event(), [], [0]

    def read_repeatedly():
        while not stop.is_set():
            try:
                records = harness.records("t")
                offsets = [record.offset for record in records]
                assert offsets == sorted(set(offsets))
                reads[0] += 1
            except BaseException as failure:
                failures.append(failure)
                return

    threads = [threading.Thread(target=read_repeatedly) for _ in range(3)]
    for thread in threads:
        thread.start()
    for seed in range(3):
        last |= fill(harness, "t", 100, seed=seed)
        harness.broker.partition("t", 0).upkeep.roll()
        harness.broker.background.compactor.run_round()
        harness.broker.partition("t", 0).upkeep.reap(at_once=True)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert reads[0] > 0
    assert last_of(harness.records("t")) == last


def test_the_cleaner_checkpoint_survives_a_restart(harness):
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 300)
    compacted(harness, "t")
    at = cleaned(harness)
    harness.restart()
    log = harness.broker.partition("t", 0)._log
    assert log.sealed.cleanable(cleaned(harness)).first_dirty_offset == at
    text = (harness.root / "data" / "cleaner-offset-checkpoint").read_text()
    assert text == f"0\n1\nt 0 {at}\n"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_re_created_topic_is_compacted_from_its_start(harness, restarted):
    """The old topic's cleaner checkpoint would protect values that a tombstone deletes."""
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 400)
    compacted(harness, "t")
    harness.broker.delete_topic("t")
    harness.broker.create_topic("t", config=COMPACT)
    if restarted:
        harness.restart()
    last = fill(harness, "t", 400) | fill(harness, "t", 200, keys=1)
    compacted(harness, "t")
    assert last_of(harness.records("t")) == last
    assert len(harness.records("t")) == len(last)


@pytest.mark.parametrize("policy", ["compact", "delete"])
@pytest.mark.parametrize("is_lost", [False, True])  # the file with the recovery points
def test_gaps_compacted_after_the_checkpoints_are_not_a_loss(harness, tmp_path, is_lost, policy):
    """Otherwise the log is truncated there after a crash."""
    harness.broker.create_topic("t", config=COMPACT | {"remote.storage.enable": False})
    log, compactor = harness.broker.partition("t", 0)._log, harness.broker.background.compactor
    checkpoints, last = harness.broker.checkpoints, fill(harness, "t", 100)
    log.roll()

    def save_while_more_comes():
        del checkpoints.save
        checkpoints.save()
        last.update(fill(harness, "t", 300, seed=2))
        log.roll()

    checkpoints.save = save_while_more_comes
    compactor.run_round()
    harness.broker.alter_topic("t", config={"cleanup.policy": policy})
    crashed = tmp_path / "after the crash"
    shutil.copytree(harness.root / "data", crashed)
    if is_lost:
        (crashed / RECOVERY_POINTS).unlink()
    harness.broker.close()
    settings = BrokerSettings(data_dir=crashed, disk_reserve_bytes=0)
    harness.broker = Broker.open_idle(settings, store=None)
    assert last_of(harness.records("t")) == last


def seal(harness, pairs):
    put(harness, "t", pairs)
    harness.broker.partition("t", 0).upkeep.roll()


@pytest.mark.parametrize("tombstone_stays", [True, False])
def test_a_deleted_key_never_comes_back_in_the_bucket(harness, monkeypatch, tombstone_stays):
    """A compaction round merges the segments that are just being mirrored to the bucket, and drops
    the tombstone after them: the deleted value must leave the bucket first.
    """
    harness.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    harness.stop_copying()
    partition = harness.broker.partition("t", 0)
    seal(harness, [(b"kept", b"k" * 2000)])
    seal(harness, [(b"deleted", b"d" * 2500), (b"too", b"k" * 500)])
    seal(harness, [(b"deleted", None), (b"last", b"k" * 2500)])
    harness.upload_sealed()
    compacted(harness, "t")  # removes the local value; the tombstone gets its delete horizon
    seal(harness, [(b"new", b"n")])
    follow, rounds = PartitionCompaction._follow, []

    def overtaken(*view, **kwargs):
        found = follow(*view, **kwargs)
        if not rounds:
            rounds.append(harness.broker.background.compactor.run_round())
            keys = [record.key for record in harness.records("t")]
            assert (b"deleted" in keys) == tombstone_stays
        return found

    def in_bucket():
        found = last_of(cold_records(harness, "t"))
        return found[b"deleted"][1] if b"deleted" in found else None

    if not tombstone_stays:  # then only the order of commits protects
        clean = partition._log.sealed.clean
        monkeypatch.setattr(
            partition._log.sealed,
            "clean",
            lambda cleanable, table, hooks: clean(
                cleanable, table, hooks._replace(may_forget=True)
            ),
        )
    monkeypatch.setattr(PartitionCompaction, "_follow", overtaken)
    assert in_bucket() is None
    partition.compaction.follow(stopping=lambda: False)
    assert rounds
    assert in_bucket() is None
    harness.upload_sealed()
    assert cold_records(harness, "t") == harness.records("t")


def test_trimming_a_segment_during_mirroring_is_not_an_error(harness, monkeypatch):
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 400)
    offload(harness, "t")
    harness.stop_copying()
    log = compacted(harness, "t")
    put_file = harness.store.put_file

    def trim_and_put(*args, **options):
        harness.broker.trim("t", 0, log.active_base_offset)
        return put_file(*args, **options)

    monkeypatch.setattr(harness.store, "put_file", trim_and_put, raising=False)
    copier = harness.broker.background.copier
    copier.run_round()
    assert copier.wait_until_idle(timeout_s=20)
    assert harness.broker.readiness().degraded == []
    assert log.sealed.mirrored


def test_trimming_the_segments_of_a_round_ends_the_round(harness, monkeypatch):
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 200)
    log = harness.broker.partition("t", 0)._log
    log.roll()
    expanded = cleaner.expand

    def trim_and_expand(*args):
        harness.broker.trim("t", 0, log.active_base_offset)
        return expanded(*args)

    monkeypatch.setattr(cleaner, "expand", trim_and_expand)
    with capture_logs() as logs:
        harness.broker.background.compactor.run_round()
    assert not [line for line in logs if line["log_level"] in {"warning", "error"}]
    assert log.first_local_offset == log.active_base_offset


def test_a_tombstone_is_kept_until_compaction_is_mirrored(harness, tmp_path):
    """Otherwise the deleted value, still in the bucket, comes back in a restore with the tail."""
    harness.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    harness.stop_copying()
    harness.broker.bucket.publish_topics(harness.broker.registry)
    seal(harness, [(b"deleted", b"d" * 2500), (b"kept", b"k")])
    harness.upload_sealed()
    seal(harness, [(b"deleted", None), (b"last", b"k")])
    for number in range(2):
        compacted(harness, "t") if not number else harness.broker.background.compactor.run_round()
        seal(harness, [(b"new", b"n%d" % number)])
    assert last_of(harness.records("t"))[b"deleted"][1] is None
    harness.broker.close()
    options = RestoreOptions(
        data_dir=tmp_path / "new", gap=0, clock=lambda: 0, tail=harness.root / "data"
    )
    restore(open_store(f"file://{harness.root / 'bucket'}"), options)
    settings = BrokerSettings(data_dir=tmp_path / "new", disk_reserve_bytes=0)
    store = open_store(f"file://{harness.root / 'bucket'}")
    (harness.root / "data").rename(harness.root / "lost")
    harness.broker = Broker.open(settings, store=store)
    found = last_of(harness.records("t"))
    assert found.get(b"deleted", (0, None))[1] is None
    assert found[b"last"][1] == b"k"


def test_a_local_segment_replaces_only_whole_objects(harness, monkeypatch):
    """The segments of an older copy of the folder may have other bounds."""
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 300)
    offload(harness, "t")
    compacted(harness, "t")
    offload(harness, "t")
    partition = harness.broker.partition("t", 0)
    before = list(partition.cold_entries(0))
    segment = next(view for view in partition.local_segments() if view.sealed)
    files = partition._log.sealed.prepare_upload
    shorter = before[0].last_offset - 1
    monkeypatch.setattr(
        partition._log.sealed,
        "prepare_upload",
        lambda base: dataclasses.replace(files(base), last_offset=shorter),
    )
    monkeypatch.setattr(partition._log.sealed, "crc32c", lambda base: 1)
    assert before[0].base_offset == segment.base_offset
    with pytest.raises(CorruptDataError, match="the bucket has segments of offsets 0 to"):
        partition.compaction.follow(stopping=lambda: False)
    assert list(partition.cold_entries(0)) == before


def test_segments_are_kept_locally_until_compaction_is_mirrored(harness):
    """Otherwise records that compaction removed are read again, from the bucket."""
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 400)
    offload(harness, "t")
    harness.set_down(True)
    log = compacted(harness, "t")
    before = harness.records("t")
    settings = {"cleanup.policy": "delete", "local.retention.bytes": 1}
    harness.broker.alter_topic("t", config=settings)
    partition = harness.broker.partition("t", 0)
    harness.broker.background.janitor.maintain(partition)
    harness.broker.background.janitor.relieve_disk(1 << 40)
    harness.set_down(False)
    assert harness.records("t") == before
    offload(harness, "t")
    harness.broker.background.janitor.maintain(partition)
    assert log.first_local_offset > 0
    assert harness.records("t") == before


def test_gaps_of_an_interrupted_round_are_not_lost_files(harness, monkeypatch):
    """Otherwise a topic that is no longer compacted would never be offloaded again."""
    harness.broker.create_topic("t", config=COMPACT)
    harness.stop_copying()
    last = fill(harness, "t", 800, keys=300)
    harness.broker.partition("t", 0).upkeep.roll()

    compactor = harness.broker.background.compactor

    def stopped(*_):
        raise Interrupted  # the broker stops before the round ends

    monkeypatch.setattr(compactor._offsets, "end_round", stopped)
    compactor.run_round()
    harness.restart()
    harness.stop_copying()
    harness.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    partition = harness.broker.partition("t", 0)
    bases = [view.base_offset for view in partition.local_segments()[:-1]]
    assert any(partition.upkeep.gap_after(base) for base in bases)
    harness.upload_sealed()
    assert not harness.broker.background.copier.blocked()
    assert last_of(harness.records("t")) == last


@pytest.mark.parametrize(
    ("remote", "overtake"),
    [
        pytest.param(True, lambda broker, log: broker.delete_topic("t"), id="deletion"),
        pytest.param(False, lambda broker, log: broker.trim("t", 0, log.high_watermark), id="trim"),
    ],
)
def test_a_deletion_or_trim_during_a_round_causes_no_backoff(
    harness, monkeypatch, remote, overtake
):
    """Otherwise it, or the next topic of its name, would wait for a minute."""
    harness.broker.create_topic("t", config={**COMPACT, "remote.storage.enable": remote})
    fill(harness, "t", 300)
    log, compactor = harness.broker.partition("t", 0)._log, harness.broker.background.compactor
    log.roll()
    clean = type(log.sealed).clean

    def overtaken(sealed, *args):
        overtake(harness.broker, log)
        return clean(sealed, *args)

    monkeypatch.setattr(type(log.sealed), "clean", overtaken)
    with capture_logs() as lines:
        compactor.run_round()
    assert not [line for line in lines if line["event"] == "compaction failed, will retry"]
    assert not compactor._backoff


def test_offsets_reused_after_a_truncation_are_dirty(harness):
    """Otherwise its tombstones expire while the values that they delete stay."""
    harness.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    harness.stop_copying()
    seal(harness, [(b"deleted", b"d"), (b"kept", b"k")])
    for number in range(4):
        seal(harness, [(b"%d" % number, b"v"), (b"new", b"n%d" % number)])
    harness.broker.background.compactor.run_round()
    assert cleaned(harness) == 10
    harness.broker.close()
    for path in (harness.root / "data" / "t-0").glob("*.log"):
        if int(path.stem) > 0:
            path.unlink()
    harness.broker = harness.open()
    harness.stop_copying()
    (step,) = repair_topic(harness.broker, "t", apply=True, accept_loss=True)
    assert step.done
    harness.restart()
    harness.stop_copying()
    end = harness.broker.partition("t", 0).log_end_offset
    assert end < 10
    seal(harness, [(b"deleted", None), (b"more", b"m")])
    for number in range(8):
        seal(harness, [(b"new", b"m%d" % number)])
    harness.upload_sealed()
    for number in range(3):
        harness.broker.background.compactor.run_round()
        harness.upload_sealed()
        seal(harness, [(b"new", b"o%d" % number)])
    assert last_of(harness.records("t")).get(b"deleted", (0, None))[1] is None


def test_a_failed_partition_is_retried_after_the_clock_was_set_back(harness):
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 100)
    log, compactor = harness.broker.partition("t", 0)._log, harness.broker.background.compactor
    log.roll()
    compactor._clock = lambda: 10**12
    compactor._back_off(harness.broker.partition("t", 0), StoreUnavailable("for a moment"))
    before = log.size_bytes
    compactor.run_round()
    assert log.size_bytes == before, "it backs off for a minute"
    compactor._clock = lambda: 10**11
    compactor.run_round()
    assert log.size_bytes < before


def test_a_value_stays_in_the_bucket_until_the_newer_one_is_uploaded(harness, monkeypatch):
    """Otherwise losing the disk at that moment loses the key, older value and all."""
    harness.broker.create_topic("t", config=COMPACT)
    harness.stop_copying()
    partition, missing = harness.broker.partition("t", 0), []
    seal(harness, [(b"key", b"older"), (b"other", b"o" * 100)])
    harness.upload_sealed()
    for number in range(3):
        seal(harness, [(b"more-%d" % number, b"m" * 3000)])
    seal(harness, [(b"key", b"newer"), (b"other", b"p")])
    compacted(harness, "t")
    seal(harness, [(b"another", b"a")])
    publish = partition._cold.bucket_state.record_manifest

    def published(manifest):
        publish(manifest)
        missing.append({b"key", b"other"} - last_of(cold_records(harness, "t")).keys())

    monkeypatch.setattr(partition._cold.bucket_state, "record_manifest", published)
    harness.upload_sealed()
    assert missing == [set()] * len(missing)
    assert len(missing) > 4
    assert cold_records(harness, "t") == harness.records("t")
    assert partition.is_mirrored


def test_a_log_is_compacted_while_manifest_pages_are_unreachable(harness, monkeypatch):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 1}.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", small)
    harness.broker.create_topic("t", config=COMPACT)
    fill(harness, "t", 300)
    harness.broker.partition("t", 0).upkeep.roll()
    offload(harness, "t")
    harness.restart(down=True, store_start_timeout_ms=200)
    assert harness.broker.partition("t", 0).manifest.pages
    compacted(harness, "t")
