"""Compaction in a broker: local disk first, the bucket after it, in one transition a segment."""

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


def test_the_last_value_of_each_key_stays_at_its_offset(house):
    house.broker.create_topic("t", config=COMPACT)
    last = fill(house, "t", 400)
    compacted(house, "t")
    records = house.records("t")
    assert last_of(records) == last
    assert len(records) == len(last)
    house.restart()
    assert last_of(house.records("t")) == last


def test_the_bucket_follows_and_both_tiers_agree(house):
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


def test_a_segment_whose_seal_is_yet_to_be_flushed_is_sound_once_it_is_compacted(house):
    house.broker.create_topic("t", config={**COMPACT, "flush.ms": 86_400_000})
    put(house, "t", [(b"key", b"v" * 100)] * 10)
    put(house, "t", [(b"key", b"v" * 4096)], acks=Acks.LEADER)
    house.broker.background.compactor.run_round()
    log = house.broker.partition("t", 0).log
    assert (log.high_watermark, log.log_end_offset, log.sealed.swap_sequence > 0) == (10, 11, True)
    assert house.broker.verify("t", deep=True).ok
    assert [record.offset for record in house.records("t")] == [9]


def test_nothing_takes_the_place_of_files_that_are_going_up(house, monkeypatch):
    house.broker.create_topic("t", config=COMPACT)
    sealed, put_file, held = house.broker.partition("t", 0).log.sealed, house.store.put_file, []

    def put_and_look(*given, **options):
        held.append(sealed.lock.locked())
        return put_file(*given, **options)

    monkeypatch.setattr(house.store, "put_file", put_and_look, raising=False)
    fill(house, "t", 200)
    offload(house, "t")
    fill(house, "t", 200, seed=2)
    compacted(house, "t")
    offload(house, "t")
    assert len(held) > 4
    assert all(held)


def test_the_next_rounds_keep_both_tiers_together(house):
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


def test_a_store_that_is_down_does_not_hold_compaction_up(house):
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


def test_a_crash_before_the_bucket_followed_is_made_up_for(house):
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


def test_a_partition_whose_file_is_gone_does_not_hold_up_the_others(house):
    for topic in ("gone", "t"):
        house.broker.create_topic(topic, config={**COMPACT, "max.compaction.lag.ms": 3_600_000})
        last = fill(house, topic, 200)
    house.restart()
    (house.root / "data" / "gone-0" / f"{0:020d}.log").unlink()
    compacted(house, "t")
    assert last_of(house.records("t")) == last


def test_a_tombstone_takes_its_key_away_after_its_horizon(house):
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


def test_a_small_buffer_takes_more_rounds_and_leaves_the_same(house):
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

    def read_on():
        while not stop.is_set():
            try:
                records = house.records("t")
                offsets = [record.offset for record in records]
                assert offsets == sorted(set(offsets))
                reads[0] += 1
            except BaseException as failure:
                failures.append(failure)
                return

    threads = [threading.Thread(target=read_on) for _ in range(3)]
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


def test_where_compaction_came_to_survives_a_restart(house):
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
def test_a_topic_of_a_deleted_ones_name_is_compacted_from_its_start(house, restarted):
    """What counted as clean of the old one would keep values that a tombstone was to take away."""
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


def test_gaps_of_segments_that_came_after_the_checkpoints_are_no_loss(house, tmp_path):
    """Else a topic that is no longer compacted is cut there after a crash."""
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


def sealed(house, pairs):
    put(house, "t", pairs)
    house.broker.partition("t", 0).log.roll()


@pytest.mark.parametrize("tombstone_stays", [True, False])
def test_a_deleted_key_never_comes_back_in_the_bucket(house, monkeypatch, tombstone_stays):
    """A round of compaction merges the segments that the bucket is just following, and drops the
    tombstone behind them: the value that it deleted must go from the bucket first.
    """
    house.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    house.stop_copying()
    partition = house.broker.partition("t", 0)
    sealed(house, [(b"kept", b"k" * 2000)])
    sealed(house, [(b"deleted", b"d" * 2500), (b"too", b"k" * 500)])
    sealed(house, [(b"deleted", None), (b"last", b"k" * 2500)])
    house.broker.background.copier.run_round()
    assert house.broker.background.copier.wait_until_done([partition], timeout_s=20)
    compacted(house, "t")  # the value goes from the disk, the tombstone gets its horizon
    sealed(house, [(b"new", b"n")])
    follow, rounds = mirror._follow, []

    def overtaken(*view, **seen):
        found = follow(*view, **seen)
        if not rounds:
            rounds.append(house.broker.background.compactor.run_round())
            held = [record.key for record in house.records("t")]
            assert (b"deleted" in held) == tombstone_stays
        return found

    def in_bucket():
        found = last_of(cold_records(house, "t"))
        return found[b"deleted"][1] if b"deleted" in found else None

    if not tombstone_stays:  # then the order alone has to hold
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


def test_a_segment_that_a_trim_takes_while_the_bucket_follows_is_no_fault(house, monkeypatch):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 400)
    offload(house, "t")
    house.stop_copying()
    log = compacted(house, "t")
    put_file = house.store.put_file

    def trim_and_put(*given, **options):
        house.broker.trim("t", 0, log.active_base_offset)
        return put_file(*given, **options)

    monkeypatch.setattr(house.store, "put_file", trim_and_put, raising=False)
    copier = house.broker.background.copier
    copier.run_round()
    assert copier.wait_until_idle(timeout_s=20)
    assert house.broker.readiness().degraded == []
    assert log.sealed.mirrored


def test_a_trim_that_takes_what_a_round_is_to_read_ends_the_round(house, monkeypatch):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 200)
    log = house.broker.partition("t", 0).log
    log.roll()
    expanded = cleaner.expand

    def trim_and_expand(*given):
        house.broker.trim("t", 0, log.active_base_offset)
        return expanded(*given)

    monkeypatch.setattr(cleaner, "expand", trim_and_expand)
    with capture_logs() as logs:
        house.broker.background.compactor.run_round()
    assert not [line for line in logs if line["log_level"] in {"warning", "error"}]
    assert log.first_local_offset == log.active_base_offset


def test_a_tombstone_stays_while_the_bucket_has_not_followed(house, tmp_path):
    """Else the value that it deleted is alone in the bucket, and comes back with the disk's
    tail.
    """
    house.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    house.stop_copying()
    house.broker.bucket.publish_topics(house.broker.registry)
    partition = house.broker.partition("t", 0)
    sealed(house, [(b"deleted", b"d" * 2500), (b"kept", b"k")])
    house.broker.background.copier.run_round()
    assert house.broker.background.copier.wait_until_done([partition], timeout_s=20)
    sealed(house, [(b"deleted", None), (b"last", b"k")])
    for number in range(2):
        compacted(house, "t") if not number else house.broker.background.compactor.run_round()
        sealed(house, [(b"new", b"n%d" % number)])
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


def test_a_local_segment_takes_the_place_of_whole_objects_alone(house, monkeypatch):
    """Of an older copy of the folder the segments may have other borders."""
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 300)
    offload(house, "t")
    compacted(house, "t")
    offload(house, "t")
    partition = house.broker.partition("t", 0)
    before = list(partition.cold.entries(0))
    half = next(view for view in partition.log.segments() if view.sealed)
    files = partition.log.sealed.files
    shorter = before[0].last_offset - 1
    monkeypatch.setattr(
        partition.log.sealed,
        "files",
        lambda base: dataclasses.replace(files(base), last_offset=shorter),
    )
    monkeypatch.setattr(partition.log.sealed, "crc32c", lambda base: 1)
    assert before[0].base_offset == half.base_offset
    with pytest.raises(CorruptDataError, match="the bucket has segments of offsets 0 to"):
        mirror.follow_compaction(partition, stopping=lambda: False)
    assert list(partition.cold.entries(0)) == before


def test_what_the_bucket_has_not_followed_yet_stays_on_disk(house):
    """Else what compaction had taken away is read again, from the bucket."""
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


def test_the_gaps_of_a_round_that_did_not_end_are_no_lost_files(house, monkeypatch):
    """Else nothing would go up any more of a topic that is no longer compacted."""
    house.broker.create_topic("t", config=COMPACT)
    house.stop_copying()
    last = fill(house, "t", 800, keys=300)
    house.broker.partition("t", 0).log.roll()

    compactor = house.broker.background.compactor
    note = compactor._record

    def stopped(marks, *noted):
        if marks is compactor._cleaned:
            raise Interrupted  # the broker stops before the round ends
        note(marks, *noted)

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
def test_what_takes_all_that_a_round_is_to_read_puts_nothing_off(
    house, monkeypatch, remote, overtake
):
    """It, or the next of its name, would wait for a minute."""
    house.broker.create_topic("t", config={**COMPACT, "remote.storage.enable": remote})
    fill(house, "t", 300)
    log, compactor = house.broker.partition("t", 0).log, house.broker.background.compactor
    log.roll()
    clean = type(log.sealed).clean

    def overtaken(sealed, *how):
        overtake(house.broker, log)
        return clean(sealed, *how)

    monkeypatch.setattr(type(log.sealed), "clean", overtaken)
    with capture_logs() as lines:
        compactor.run_round()
    assert not [line for line in lines if line["event"] == "compaction failed, will retry"]
    assert not compactor._backoff


def test_what_comes_in_place_of_what_was_cut_is_not_clean(house):
    """Else its tombstones went in time, and the values that they delete stayed."""
    house.broker.create_topic("t", config={**COMPACT, "delete.retention.ms": 0})
    house.stop_copying()
    sealed(house, [(b"deleted", b"d"), (b"kept", b"k")])
    for number in range(4):
        sealed(house, [(b"%d" % number, b"v"), (b"new", b"n%d" % number)])
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
    sealed(house, [(b"deleted", None), (b"more", b"m")])
    for number in range(8):
        sealed(house, [(b"new", b"m%d" % number)])
    house.broker.background.copier.run_round()
    house.broker.background.copier.wait_until_done(house.broker.partitions(), timeout_s=20)
    for number in range(3):
        house.broker.background.compactor.run_round()
        house.broker.background.copier.run_round()
        assert house.broker.background.copier.wait_until_done(
            house.broker.partitions(), timeout_s=20
        )
        sealed(house, [(b"new", b"o%d" % number)])
    assert last_of(house.records("t")).get(b"deleted", (0, None))[1] is None


def test_a_partition_that_failed_is_tried_again_though_the_clock_was_set_back(house):
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 100)
    log, compactor = house.broker.partition("t", 0).log, house.broker.background.compactor
    log.roll()
    compactor._clock = lambda: 10**12
    compactor._back_off(house.broker.partition("t", 0), StoreUnavailable("for a moment"))
    before = log.size_bytes
    compactor.run_round()
    assert log.size_bytes == before, "it waits a minute"
    compactor._clock = lambda: 10**11
    compactor.run_round()
    assert log.size_bytes < before


def test_a_value_stays_in_the_bucket_until_the_newer_one_is_there(house, monkeypatch):
    """Else a disk that is lost just then takes the key away, older value and all."""
    house.broker.create_topic("t", config=COMPACT)
    house.stop_copying()
    partition, missing = house.broker.partition("t", 0), []
    sealed(house, [(b"key", b"older"), (b"other", b"o" * 100)])
    house.broker.background.copier.run_round()
    assert house.broker.background.copier.wait_until_done([partition], timeout_s=20)
    for number in range(3):
        sealed(house, [(b"more-%d" % number, b"m" * 3000)])
    sealed(house, [(b"key", b"newer"), (b"other", b"p")])
    compacted(house, "t")
    sealed(house, [(b"another", b"a")])
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


def test_a_log_is_compacted_also_where_the_manifests_pages_are_out_of_reach(house, monkeypatch):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 1}.items():
        monkeypatch.setattr(f"manifest.paging.{name}", small)
    house.broker.create_topic("t", config=COMPACT)
    fill(house, "t", 300)
    house.broker.partition("t", 0).log.roll()
    offload(house, "t")
    house.restart(down=True, store_start_timeout_ms=200, log_cleaner_backoff_ms=3_600_000)
    assert house.broker.partition("t", 0).cold.manifest.pages
    compacted(house, "t")
