"""Compaction in a broker: local disk first, then the bucket, one transition per segment."""

import dataclasses
import shutil
import threading

import pytest
from structlog.testing import capture_logs

from broker.background import mirror
from broker.broker import Broker
from broker.repair.restore import RestoreOptions, restore
from broker.settings import BrokerSettings
from cold_tier.open import open_store
from hot_tier import cleaner
from hot_tier.append import Acks
from hot_tier.cleaner import Interrupted
from record_format.errors import CorruptDataError, StoreUnavailable
from tests.fakes.compacted_topics import (
    COMPACT,
    cold_records,
    compacted,
    fill,
    last_of,
    offload,
    put,
)


def test_compaction_keeps_the_last_value_of_each_key_at_its_offset(house):
    house.broker.create_topic("t", config=COMPACT)
    last = fill(house, "t", 400)
    compacted(house, "t")
    records = house.records("t")
    assert last_of(records) == last
    assert len(records) == len(last)
    house.restart()
    assert last_of(house.records("t")) == last


def test_compaction_is_mirrored_to_the_bucket(house):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 400)
    offload(house, "t")
    partition = house.broker.partition("t", 0)
    before = {entry.log_key for entry in partition.cold.entries(0)}
    last = fill(house, "t", 200, seed=2) | {}
    log = compacted(house, "t")
    assert not log.sealed.mirrored
    offload(house, "t")
    entries = list(partition.cold.entries(0))
    assert before.isdisjoint(entry.log_key for entry in entries)
    assert before <= {removed.key for removed in partition.cold.manifest.removed}
    assert cold_records(house, "t") == house.records("t")
    assert last.items() <= last_of(house.records("t")).items()
    report = house.broker.verify("t", deep=True)
    assert not report.problems


def test_a_sealed_but_unflushed_segment_is_compacted_correctly(house):
    house.broker.create_topic("t", config={**COMPACT, "flush.ms": 86_400_000})
    put(house, "t", [(b"key", b"v" * 100)] * 10)
    put(house, "t", [(b"key", b"v" * 4096)], acks=Acks.LEADER)
    house.broker.background.compactor.run_round()
    log = house.broker.partition("t", 0).log
    assert (log.high_watermark, log.log_end_offset, log.sealed.swap_sequence > 0) == (10, 11, True)
    assert house.broker.verify("t", deep=True).ok
    assert [record.offset for record in house.records("t")] == [9]


def test_segment_files_are_not_replaced_during_their_upload(house, monkeypatch):
    house.broker.create_topic("t", config=COMPACT)
    sealed, put_file, locked = house.broker.partition("t", 0).log.sealed, house.store.put_file, []

    def put_and_record(*args, **options):
        locked.append(sealed.lock.locked())
        return put_file(*args, **options)

    monkeypatch.setattr(house.store, "put_file", put_and_record, raising=False)
    fill(house, "t", 200)
    offload(house, "t")
    fill(house, "t", 200, seed=2)
    compacted(house, "t")
    offload(house, "t")
    assert len(locked) > 4
    assert all(locked)


def test_tiers_agree_after_several_rounds(house):
    house.broker.create_topic("t", config=COMPACT)
    last = {}
    for seed in range(5):
        last |= fill(house, "t", 150, seed=seed)
        if seed % 2:
            offload(house, "t")
        house.broker.partition("t", 0).log.roll()
        house.broker.background.compactor.run_round()
    offload(house, "t")
    assert last_of(house.records("t")) == last
    assert cold_records(house, "t") == house.records("t")
    assert not house.broker.verify("t", deep=True).problems


def test_compaction_continues_while_the_store_is_down(house):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 300)
    offload(house, "t")
    house.set_down(True)
    last = fill(house, "t", 300, seed=3)
    compacted(house, "t")
    assert last.items() <= last_of(house.records("t")).items()
    with pytest.raises(StoreUnavailable):
        house.broker.partition("t", 0).cold.ownership.check_fence(log_end_offset=0)
    house.set_down(False)
    offload(house, "t")
    assert cold_records(house, "t") == house.records("t")


def test_mirroring_resumes_after_a_crash(house):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 300)
    offload(house, "t")
    house.set_down(True)
    compacted(house, "t")
    expected = house.records("t")
    house.restart()
    assert house.records("t") == expected
    offload(house, "t")
    assert cold_records(house, "t") == expected
    assert not house.broker.verify("t", deep=True).problems


def test_a_partition_with_a_missing_file_blocks_no_other(house):
    for topic in ("gone", "t"):
        house.broker.create_topic(topic, config={**COMPACT, "max.compaction.lag.ms": 3_600_000})
        last = fill(house, topic, 200)
    house.restart()
    (house.root / "data" / "gone-0" / f"{0:020d}.log").unlink()
    compacted(house, "t")
    assert last_of(house.records("t")) == last


def test_a_tombstone_is_removed_after_its_delete_horizon(house):
    config = COMPACT | {"delete.retention.ms": 0}
    house.broker.create_topic("t", config=config)
    fill(house, "t", 200, keys=5)
    put(house, "t", [(b"key-1", None)])
    compacted(house, "t")
    assert [r.value for r in house.records("t") if r.key == b"key-1"] == [None]
    offload(house, "t")
    fill(house, "t", 100, keys=1)
    compacted(house, "t")
    assert b"key-1" not in last_of(house.records("t"))


def test_a_small_dedupe_buffer_takes_more_rounds_with_the_same_result(house):
    house.restart(log_cleaner_dedupe_buffer_bytes=12 * 40)
    house.broker.create_topic("t", config=COMPACT)
    last = fill(house, "t", 600, keys=200)
    log = compacted(house, "t")
    cleaned_to = log.active_base_offset
    assert house.broker.background.compactor._cleaned.offsets["t", 0] == cleaned_to
    assert last_of(house.records("t")) == last
    assert len(house.records("t")) == len(last)


def test_readers_see_whole_batches_while_segments_are_replaced(house):
    house.broker.create_topic("t", config=COMPACT)
    last, stop, failures, reads = {}, threading.Event(), [], [0]

    def read_repeatedly():
        while not stop.is_set():
            try:
                records = house.records("t")
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
        last |= fill(house, "t", 100, seed=seed)
        house.broker.partition("t", 0).log.roll()
        house.broker.background.compactor.run_round()
        house.broker.partition("t", 0).log.reap(at_once=True)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert reads[0] > 0
    assert last_of(house.records("t")) == last


def test_the_cleaner_checkpoint_survives_a_restart(house):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 300)
    compacted(house, "t")
    at = house.broker.background.compactor._cleaned.offsets["t", 0]
    house.restart()
    log = house.broker.partition("t", 0).log
    assert (
        log.sealed.cleanable(
            house.broker.background.compactor._cleaned.offsets["t", 0]
        ).first_dirty_offset
        == at
    )
    text = (house.root / "data" / "cleaner-offset-checkpoint").read_text()
    assert text == f"0\n1\nt 0 {at}\n"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_re_created_topic_is_compacted_from_its_start(house, restarted):
    """The old topic's cleaner checkpoint would protect values that a tombstone deletes."""
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 400)
    compacted(house, "t")
    house.broker.delete_topic("t")
    house.broker.create_topic("t", config=COMPACT)
    if restarted:
        house.restart()
    last = fill(house, "t", 400) | fill(house, "t", 200, keys=1)
    compacted(house, "t")
    assert last_of(house.records("t")) == last
    assert len(house.records("t")) == len(last)


def test_gaps_compacted_after_the_checkpoints_are_not_a_loss(house, tmp_path):
    """Otherwise a topic that is no longer compacted is truncated there after a crash."""
    house.broker.create_topic("t", config=COMPACT | {"remote.storage.enable": False})
    log, compactor = house.broker.partition("t", 0).log, house.broker.background.compactor
    save, last = compactor._save_recovery_points, fill(house, "t", 100)
    log.roll()

    def save_while_more_comes():
        compactor._save_recovery_points = save
        save()
        last.update(fill(house, "t", 300, seed=2))
        log.roll()

    compactor._save_recovery_points = save_while_more_comes
    compactor.run_round()
    house.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    shutil.copytree(house.root / "data", tmp_path / "after the crash")
    house.broker.close()
    settings = BrokerSettings(data_dir=tmp_path / "after the crash", disk_reserve_bytes=0)
    house.broker = Broker.open_idle(settings, store=None)
    assert last_of(house.records("t")) == last


def seal(house, pairs):
    put(house, "t", pairs)
    house.broker.partition("t", 0).log.roll()


@pytest.mark.parametrize("tombstone_stays", [True, False])
def test_a_deleted_key_never_comes_back_in_the_bucket(house, monkeypatch, tombstone_stays):
    """A compaction round merges the segments that are just being mirrored to the bucket, and drops
    the tombstone after them: the deleted value must leave the bucket first.
    """
    house.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    house.stop_copying()
    partition = house.broker.partition("t", 0)
    seal(house, [(b"kept", b"k" * 2000)])
    seal(house, [(b"deleted", b"d" * 2500), (b"too", b"k" * 500)])
    seal(house, [(b"deleted", None), (b"last", b"k" * 2500)])
    house.broker.background.copier.run_round()
    assert house.broker.background.copier.wait_until_done([partition], timeout_s=20)
    compacted(house, "t")  # removes the local value; the tombstone gets its delete horizon
    seal(house, [(b"new", b"n")])
    follow, rounds = mirror._follow, []

    def overtaken(*view, **kwargs):
        found = follow(*view, **kwargs)
        if not rounds:
            rounds.append(house.broker.background.compactor.run_round())
            keys = [record.key for record in house.records("t")]
            assert (b"deleted" in keys) == tombstone_stays
        return found

    def in_bucket():
        found = last_of(cold_records(house, "t"))
        return found[b"deleted"][1] if b"deleted" in found else None

    if not tombstone_stays:  # then only the order of commits protects
        clean, at_once = partition.log.sealed.clean, {"may_forget": lambda: True}
        monkeypatch.setattr(
            partition.log.sealed,
            "clean",
            lambda cleanable, table, hooks: clean(
                cleanable, table, dataclasses.replace(hooks, **at_once)
            ),
        )
    monkeypatch.setattr("broker.background.mirror._follow", overtaken)
    assert in_bucket() is None
    mirror.follow_compaction(partition, stopping=lambda: False)
    assert rounds
    assert in_bucket() is None
    house.broker.background.copier.run_round()
    assert house.broker.background.copier.wait_until_done([partition], timeout_s=20)
    assert cold_records(house, "t") == house.records("t")


def test_trimming_a_segment_during_mirroring_is_not_an_error(house, monkeypatch):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 400)
    offload(house, "t")
    house.stop_copying()
    log = compacted(house, "t")
    put_file = house.store.put_file

    def trim_and_put(*args, **options):
        house.broker.trim("t", 0, log.active_base_offset)
        return put_file(*args, **options)

    monkeypatch.setattr(house.store, "put_file", trim_and_put, raising=False)
    copier = house.broker.background.copier
    copier.run_round()
    assert copier.wait_until_idle(timeout_s=20)
    assert house.broker.readiness().degraded == []
    assert log.sealed.mirrored


def test_trimming_the_segments_of_a_round_ends_the_round(house, monkeypatch):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 200)
    log = house.broker.partition("t", 0).log
    log.roll()
    expanded = cleaner.expand

    def trim_and_expand(*args):
        house.broker.trim("t", 0, log.active_base_offset)
        return expanded(*args)

    monkeypatch.setattr(cleaner, "expand", trim_and_expand)
    with capture_logs() as logs:
        house.broker.background.compactor.run_round()
    assert not [line for line in logs if line["log_level"] in {"warning", "error"}]
    assert log.first_local_offset == log.active_base_offset


def test_a_tombstone_is_kept_until_compaction_is_mirrored(house, tmp_path):
    """Otherwise the deleted value, still in the bucket, comes back in a restore with the tail."""
    house.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    house.stop_copying()
    house.broker.bucket.publish_topics(house.broker.registry)
    partition = house.broker.partition("t", 0)
    seal(house, [(b"deleted", b"d" * 2500), (b"kept", b"k")])
    house.broker.background.copier.run_round()
    assert house.broker.background.copier.wait_until_done([partition], timeout_s=20)
    seal(house, [(b"deleted", None), (b"last", b"k")])
    for number in range(2):
        compacted(house, "t") if not number else house.broker.background.compactor.run_round()
        seal(house, [(b"new", b"n%d" % number)])
    assert last_of(house.records("t"))[b"deleted"][1] is None
    house.broker.close()
    options = RestoreOptions(
        data_dir=tmp_path / "new", gap=0, clock=lambda: 0, tail=house.root / "data"
    )
    restore(open_store(f"file://{house.root / 'bucket'}"), options)
    settings = BrokerSettings(data_dir=tmp_path / "new", disk_reserve_bytes=0)
    store = open_store(f"file://{house.root / 'bucket'}")
    (house.root / "data").rename(house.root / "lost")
    house.broker = Broker.open(settings, store=store)
    found = last_of(house.records("t"))
    assert found.get(b"deleted", (0, None))[1] is None
    assert found[b"last"][1] == b"k"


def test_a_local_segment_replaces_only_whole_objects(house, monkeypatch):
    """The segments of an older copy of the folder may have other bounds."""
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 300)
    offload(house, "t")
    compacted(house, "t")
    offload(house, "t")
    partition = house.broker.partition("t", 0)
    before = list(partition.cold.entries(0))
    segment = next(view for view in partition.log.segments() if view.sealed)
    files = partition.log.sealed.files
    shorter = before[0].last_offset - 1
    monkeypatch.setattr(
        partition.log.sealed,
        "files",
        lambda base: dataclasses.replace(files(base), last_offset=shorter),
    )
    monkeypatch.setattr(partition.log.sealed, "crc32c", lambda base: 1)
    assert before[0].base_offset == segment.base_offset
    with pytest.raises(CorruptDataError, match="the bucket has segments of offsets 0 to"):
        mirror.follow_compaction(partition, stopping=lambda: False)
    assert list(partition.cold.entries(0)) == before


def test_segments_are_kept_locally_until_compaction_is_mirrored(house):
    """Otherwise records that compaction removed are read again, from the bucket."""
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 400)
    offload(house, "t")
    house.set_down(True)
    log = compacted(house, "t")
    before = house.records("t")
    settings = {"cleanup.policy": "delete", "local.retention.bytes": 1}
    house.broker.alter_topic("t", config=settings)
    partition = house.broker.partition("t", 0)
    house.broker.background.janitor.maintain(partition)
    house.broker.background.janitor.relieve_disk(1 << 40)
    house.set_down(False)
    assert house.records("t") == before
    offload(house, "t")
    house.broker.background.janitor.maintain(partition)
    assert log.first_local_offset > 0
    assert house.records("t") == before


def test_gaps_of_an_interrupted_round_are_not_lost_files(house, monkeypatch):
    """Otherwise a topic that is no longer compacted would never be offloaded again."""
    house.broker.create_topic("t", config=COMPACT)
    house.stop_copying()
    last = fill(house, "t", 800, keys=300)
    house.broker.partition("t", 0).log.roll()

    compactor = house.broker.background.compactor
    record = compactor._record

    def stopped(marks, *offsets):
        if marks is compactor._cleaned:
            raise Interrupted  # the broker stops before the round ends
        record(marks, *offsets)

    monkeypatch.setattr(compactor, "_record", stopped)
    compactor.run_round()
    house.restart()
    house.stop_copying()
    house.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    partition = house.broker.partition("t", 0)
    bases = [view.base_offset for view in partition.log.segments()[:-1]]
    assert any(partition.log.sealed.gap_after(base) for base in bases)
    house.broker.background.copier.run_round()
    assert house.broker.background.copier.wait_until_done([partition], timeout_s=20)
    assert not house.broker.background.copier.blocked()
    assert last_of(house.records("t")) == last


@pytest.mark.parametrize(
    ("remote", "overtake"),
    [
        pytest.param(True, lambda broker, log: broker.delete_topic("t"), id="deletion"),
        pytest.param(False, lambda broker, log: broker.trim("t", 0, log.high_watermark), id="trim"),
    ],
)
def test_a_deletion_or_trim_during_a_round_causes_no_backoff(house, monkeypatch, remote, overtake):
    """Otherwise it, or the next topic of its name, would wait for a minute."""
    house.broker.create_topic("t", config={**COMPACT, "remote.storage.enable": remote})
    fill(house, "t", 300)
    log, compactor = house.broker.partition("t", 0).log, house.broker.background.compactor
    log.roll()
    clean = type(log.sealed).clean

    def overtaken(sealed, *args):
        overtake(house.broker, log)
        return clean(sealed, *args)

    monkeypatch.setattr(type(log.sealed), "clean", overtaken)
    with capture_logs() as lines:
        compactor.run_round()
    assert not [line for line in lines if line["event"] == "compaction failed, will retry"]
    assert not compactor._backoff


def test_offsets_reused_after_a_truncation_are_dirty(house):
    """Otherwise its tombstones expire while the values that they delete stay."""
    house.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    house.stop_copying()
    seal(house, [(b"deleted", b"d"), (b"kept", b"k")])
    for number in range(4):
        seal(house, [(b"%d" % number, b"v"), (b"new", b"n%d" % number)])
    house.broker.background.compactor.run_round()
    assert house.broker.background.compactor.cleaned_before(house.broker.partition("t", 0)) == 10
    house.broker.close()
    for path in (house.root / "data" / "t-0").glob("*.log"):
        if int(path.stem) > 0:
            path.unlink()
    house.broker = house.open()
    house.stop_copying()
    (step,) = house.broker.repair("t", apply=True, accept_loss=True)
    assert step.done
    house.restart()
    house.stop_copying()
    end = house.broker.partition("t", 0).log.log_end_offset
    assert end < 10
    seal(house, [(b"deleted", None), (b"more", b"m")])
    for number in range(8):
        seal(house, [(b"new", b"m%d" % number)])
    house.broker.background.copier.run_round()
    house.broker.background.copier.wait_until_done(house.broker.partitions(), timeout_s=20)
    for number in range(3):
        house.broker.background.compactor.run_round()
        house.broker.background.copier.run_round()
        assert house.broker.background.copier.wait_until_done(
            house.broker.partitions(), timeout_s=20
        )
        seal(house, [(b"new", b"o%d" % number)])
    assert last_of(house.records("t")).get(b"deleted", (0, None))[1] is None


def test_a_failed_partition_is_retried_after_the_clock_was_set_back(house):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 100)
    log, compactor = house.broker.partition("t", 0).log, house.broker.background.compactor
    log.roll()
    compactor._clock = lambda: 10**12
    compactor._back_off(house.broker.partition("t", 0), StoreUnavailable("for a moment"))
    before = log.size_bytes
    compactor.run_round()
    assert log.size_bytes == before, "it backs off for a minute"
    compactor._clock = lambda: 10**11
    compactor.run_round()
    assert log.size_bytes < before


def test_a_value_stays_in_the_bucket_until_the_newer_one_is_uploaded(house, monkeypatch):
    """Otherwise losing the disk at that moment loses the key, older value and all."""
    house.broker.create_topic("t", config=COMPACT)
    house.stop_copying()
    partition, missing = house.broker.partition("t", 0), []
    seal(house, [(b"key", b"older"), (b"other", b"o" * 100)])
    house.broker.background.copier.run_round()
    assert house.broker.background.copier.wait_until_done([partition], timeout_s=20)
    for number in range(3):
        seal(house, [(b"more-%d" % number, b"m" * 3000)])
    seal(house, [(b"key", b"newer"), (b"other", b"p")])
    compacted(house, "t")
    seal(house, [(b"another", b"a")])
    publish = partition.cold.bucket_state.record_manifest

    def published(manifest):
        publish(manifest)
        missing.append({b"key", b"other"} - last_of(cold_records(house, "t")).keys())

    monkeypatch.setattr(partition.cold.bucket_state, "record_manifest", published)
    house.broker.background.copier.run_round()
    assert house.broker.background.copier.wait_until_done([partition], timeout_s=20)
    assert missing == [set()] * len(missing)
    assert len(missing) > 4
    assert cold_records(house, "t") == house.records("t")
    assert partition.log.sealed.mirrored


def test_a_log_is_compacted_while_manifest_pages_are_unreachable(house, monkeypatch):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 1}.items():
        monkeypatch.setattr(f"manifest.paging.{name}", small)
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 300)
    house.broker.partition("t", 0).log.roll()
    offload(house, "t")
    house.restart(down=True, store_start_timeout_ms=200, log_cleaner_backoff_ms=3_600_000)
    assert house.broker.partition("t", 0).cold.manifest.pages
    compacted(house, "t")
