"""One log over two tiers, on real files: roll, offload, local retention, reads, restart."""

import errno
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.fakes.at_once import at_once
from tests.fakes.broker_harness import run_janitor
from tests.fakes.faulty_disk import FaultyDisk
from tierlog.broker.background.retention import cold_facts, local_facts, total_bytes
from tierlog.broker.bucket.cold_log import ColdLog
from tierlog.broker.bucket.cold_reads import ColdReads
from tierlog.broker.data_folder.data_folder import HIGH_WATERMARKS, LOG_STARTS, RECOVERY_POINTS
from tierlog.broker.partition.segment_listing import (
    iter_segments,
    open_segment,
    peek_segments,
    slices_of,
    tier_sizes,
)
from tierlog.broker.partition.tiered_reads import TieredReads
from tierlog.host.waiting import Wait
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_folder import file_name
from tierlog.hot_tier.log_writer import Acks, LogWriter
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.sealed_segments import SealedSegments
from tierlog.record_format.decode import Record
from tierlog.record_format.errors import OffsetTrimmed, OutOfOrderSequence, ShuttingDown
from tierlog.record_format.produced import build_produced

SMALL = {"segment.bytes": 4096, "retention.ms": -1, "local.retention.bytes": 8192}


def test_a_partition_gives_no_tier_away(harness):
    """What it has in private, ruff (SLF001) keeps others from."""
    harness.broker.create_topic("t")
    partition = harness.broker.partition("t", 0)
    tiers = (PartitionLog, LogWriter, SealedSegments, ColdLog, ColdReads, TieredReads)
    for one in (partition, partition.upkeep, partition.compaction):
        public = [name for name in dir(one) if not name.startswith("_")]
        assert [name for name in public if isinstance(getattr(one, name), tiers)] == []


def test_records_deleted_locally_read_the_same_from_the_bucket(harness):
    harness.broker.create_topic("t", config=SMALL)
    values = harness.fill(400)
    before = harness.records("t")
    harness.offload()  # some segments may have been uploaded before
    log = harness.broker.partition("t", 0)
    assert log.manifest.segment_count > 5
    assert log.offsets().local_log_start_offset > 0, "most of it must be cold"
    after = harness.records("t")
    assert after == before
    assert [record.value for record in after] == values
    assert log.read(0, max_bytes=8192).tier == "cold"


def test_a_committed_read_makes_few_store_requests(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(800)
    harness.offload()
    harness.restart()
    log = harness.broker.partition("t", 0)
    assert log.manifest.segment_count > 10
    before = harness.store.ledger.requests("cold_read")
    assert log.read(0, max_bytes=1, committed=True).tier == "cold"
    assert harness.store.ledger.requests("cold_read") - before == 3  # table, chunk, producers


def test_a_read_across_the_tiers_is_mixed_and_complete(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    log = harness.broker.partition("t", 0)
    start = log.offsets().local_log_start_offset
    fetched = log.read(start - 1, max_bytes=1 << 20)
    assert fetched.tier == "mixed"
    assert fetched.next_offset > start
    few = log.read(start - 1, max_bytes=fetched.slices[0].size_bytes + 1)
    assert few.tier == "cold", "a hot part that does not fit is left out"
    assert few.next_offset == start


def test_one_read_spans_many_cold_segments(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    log = harness.broker.partition("t", 0)
    start, first = log.offsets().local_log_start_offset, next(log.cold_entries(0))
    fetched = log.read(0, max_bytes=4 * first.size_bytes)
    assert fetched.tier == "cold"
    assert 2 * first.size_bytes < fetched.size_bytes <= 4 * first.size_bytes
    whole = log.read(0, max_bytes=1 << 20)
    assert (whole.tier, whole.next_offset) == ("mixed", log.offsets().high_watermark)
    assert start > 4 * first.next_offset


def test_merging_manifest_pages_loses_nothing(harness, monkeypatch):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 1, "RUN_MAX": 4, "PAGE_ENTRIES": 4}.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", small)
    harness.broker.create_topic("t", config=SMALL)
    values = harness.fill(400)
    harness.offload()
    cold = harness.broker.partition("t", 0)._cold
    harness.broker.background.janitor.maintain(harness.broker.partition("t", 0))
    assert max(page.entry_count for page in cold.manifest.pages) == 4
    assert [record.value for record in harness.records("t")] == values


def test_time_lookup_in_the_cold_tier_finds_the_record(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    log = harness.broker.partition("t", 0)
    assert log.offset_for_timestamp(5) == (5, 5)
    assert log.offset_for_timestamp(-1) == (0, 0)
    assert log.offset_for_timestamp(10_000) is None


def test_time_lookup_does_not_open_a_cold_segment_without_timestamps(harness):
    harness.broker.create_topic("t", config=SMALL)
    for _ in range(20):
        harness.produce("t", [b"v" * 1000], at=-1)
    harness.offload()
    log, before = harness.broker.partition("t", 0), len(harness.store.calls)
    assert {entry.max_timestamp for entry in log.manifest.segments} == {-1}
    assert log.offset_for_timestamp(0) is None
    assert not [call for call in harness.store.calls[before:] if "/segments/" in call[1]]
    assert log.offset_for_timestamp(-1) == (0, -1)


def test_a_restart_keeps_everything_and_raises_the_epoch(harness):
    harness.broker.create_topic("t", partitions=2, config=SMALL)
    harness.fill(200)
    harness.offload()
    before, epoch = harness.records("t"), harness.broker.partition("t", 0).offsets().leader_epoch
    broker = harness.restart()
    assert harness.records("t") == before
    assert broker.partition("t", 0).offsets().leader_epoch > epoch
    harness.produce("t", [b"more"])
    assert harness.records("t")[-1] == Record(200, 0, None, b"more", ())
    harness.offload()


def test_each_segment_is_listed_once_across_tiers(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    harness.produce("t", [b"active"])
    log = harness.broker.partition("t", 0)
    listed = list(iter_segments(log))
    assert listed[0].base_offset == 0
    assert [one.base_offset for one in listed[1:]] == [one.last_offset + 1 for one in listed[:-1]]
    assert {one.tier for one in listed} == {"cold", "both", "hot"}
    assert sum(one.records for one in listed) == 401
    for one in listed:
        opened = open_segment(log, one.base_offset)
        data = b"".join(p.read() for p in slices_of(log, opened, start=0, end=opened.size_bytes))
        assert len(data) == one.size_bytes


def test_after_a_restart_peek_segments_uses_the_manifest(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    whole = list(peek_segments(harness.broker.partition("t", 0)))
    harness.restart()
    peeked = [one for one in peek_segments(harness.broker.partition("t", 0)) if not one.active]
    assert "both" in {one.tier for one in peeked}
    assert peeked == [one for one in whole if not one.active]


def test_after_a_restart_a_listing_reads_no_uploaded_segment(harness, monkeypatch):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    partition = harness.broker.partition("t", 0)
    whole = list(iter_segments(partition))
    harness.restart()
    partition = harness.broker.partition("t", 0)
    read, counted = FileReader.read, Counter()

    def counting(self, size, position):
        counted[self.file.path.name] += size
        return read(self, size, position)

    monkeypatch.setattr(FileReader, "read", counting)
    listed = list(iter_segments(partition))
    both = [one for one in listed if one.tier == "both"]
    assert both
    for one in both:
        assert counted[file_name(one.base_offset, ".log")] < one.size_bytes
    assert [one for one in listed if not one.active] == [one for one in whole if not one.active]


def test_trim_moves_the_start_in_both_tiers_and_survives(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    assert harness.broker.trim("t", 0, 35) == 35
    assert harness.broker.trim("t", 0, 10) == 35
    cold = harness.broker.partition("t", 0)._cold
    assert cold.manifest.log_start_offset == 35
    harness.restart()
    assert harness.broker.partition("t", 0).offsets().log_start_offset == 35
    assert harness.records("t", offset=35)[0].offset == 35


def test_a_trim_into_a_segment_does_not_prevent_its_upload(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(10)
    harness.claim()
    harness.broker.trim("t", 0, 5)
    assert harness.offload().uploaded_segments == 1
    harness.fill(10)
    assert harness.offload().uploaded_segments == 1
    assert harness.broker.partition("t", 0).cold_end_offset == 20


def test_deleting_a_topic_leaves_nothing_and_the_name_is_free(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(100)
    harness.offload()
    first = harness.broker.topic("t").record.topic_id
    harness.broker.delete_topic("t")
    harness.broker.create_topic("t")
    assert harness.broker.topic("t").record.topic_id != first
    assert harness.records("t") == []
    harness.wait_for(lambda: not harness.broker.registry.deleted())
    assert not [p for p in (harness.root / "bucket").rglob("*") if p.is_file() and first in str(p)]
    assert not list((harness.root / "data").glob("*-delete"))


def test_a_re_created_topic_starts_at_zero_even_after_a_crash(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(100)
    harness.broker.trim("t", 0, 50)
    harness.broker.checkpoints.save()
    harness.restart()
    harness.broker.delete_topic("t")
    harness.broker.create_topic("t")
    harness.produce("t", [b"new"])
    assert [record.offset for record in harness.records("t")] == [0]
    crashed = harness.broker
    crashed.background.stop(time.monotonic() + 10)  # two brokers share the folder
    crashed.folder.close()  # only the lock is released, as when the process dies
    harness.broker = harness.open()
    assert [record.offset for record in harness.records("t")] == [0]
    crashed.folder = harness.broker.folder  # its close must not fail on the lock


def test_checkpoints_interrupted_by_a_full_disk_do_not_apply_to_the_next_topic(
    harness, monkeypatch
):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(100)
    write = harness.broker.folder.write_checkpoint

    def full_after_the_first(name, offsets):
        if name == HIGH_WATERMARKS:
            raise OSError(errno.ENOSPC, "full", name)
        write(name, offsets)

    with monkeypatch.context() as patched:
        patched.setattr(harness.broker.folder, "write_checkpoint", full_after_the_first)
        with pytest.raises(OSError, match="full"):
            harness.broker.checkpoints.save()
    harness.broker.delete_topic("t")
    harness.broker.create_topic("t")
    assert harness.broker.folder.read_checkpoint(RECOVERY_POINTS).get(("t", 0), 0) == 0


def test_an_idle_broker_rewrites_no_checkpoint(harness, monkeypatch):
    harness.broker.create_topic("t")
    harness.broker.background._tasks[-1].stop(10)  # it saves them too
    harness.broker.checkpoints.save()
    write, written = harness.broker.folder.write_checkpoint, []

    def listed(name, offsets):
        written.append(name)
        write(name, offsets)

    monkeypatch.setattr(harness.broker.folder, "write_checkpoint", listed)
    harness.broker.checkpoints.save()
    assert written == []
    harness.produce("t", [b"v"])
    harness.broker.checkpoints.save()
    assert written == [RECOVERY_POINTS, HIGH_WATERMARKS]
    assert harness.broker.folder.read_checkpoint(RECOVERY_POINTS) == {("t", 0): 1}


def test_a_trim_is_durable_despite_concurrent_checkpoints(harness, monkeypatch):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(100)
    harness.broker.partition("t", 0)._log.trim(10)  # so that there is something to save
    write, trims = harness.broker.folder.write_checkpoint, []

    def overtaken(name, offsets):
        if name == LOG_STARTS and not trims:  # its offsets were read already
            trims.append(threading.Thread(target=harness.broker.trim, args=("t", 0, 50)))
            trims[0].start()
            trims[0].join(0.1)
        write(name, offsets)

    monkeypatch.setattr(harness.broker.folder, "write_checkpoint", overtaken)
    harness.broker.checkpoints.save()
    trims[0].join()
    assert harness.broker.folder.read_checkpoint(LOG_STARTS) == {("t", 0): 50}
    harness.broker.background.janitor.trim_partition(
        harness.broker.partition("t", 0), 20
    )  # from an earlier read
    assert harness.broker.folder.read_checkpoint(LOG_STARTS) == {("t", 0): 50}


def test_retention_by_size_drops_from_both_tiers(harness):
    harness.broker.create_topic("t", config={**SMALL, "retention.bytes": 16384})
    harness.fill(400)
    harness.offload()
    now = harness.broker.partition("t", 0).offsets()
    assert now.log_start_offset > 0
    sizes = tier_sizes(harness.broker.partition("t", 0))
    assert sizes.cold_bytes < 16384 + 2 * 4096
    assert harness.records("t", offset=now.log_start_offset)[0].offset <= now.log_start_offset + 9


def test_retention_frees_a_disk_too_full_for_a_new_segment(harness, monkeypatch):
    """Everything has expired, but the active segment cannot be rolled."""
    disk = FaultyDisk()
    monkeypatch.setattr(harness.broker._opener, "_disk", disk)
    harness.broker.create_topic("t", config={**SMALL, "remote.storage.enable": False})
    harness.fill(200)
    log = harness.broker.partition("t", 0)._log
    disk.fail("open", errno.ENOSPC, suffix=".log")
    harness.broker.alter_topic("t", config={"retention.ms": 1000})
    run_janitor(harness.broker)
    assert log.log_start_offset == log.active_base_offset > 0
    disk.heal()
    run_janitor(harness.broker)
    assert log.log_start_offset == log.log_end_offset == 200


@pytest.mark.parametrize("limit", ["retention.bytes", "retention.ms"])
def test_retention_that_deletes_nothing_reads_no_manifest_page(harness, monkeypatch, limit):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 2}.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", small)
    far = 16384 if limit == "retention.bytes" else 1 << 60
    harness.broker.create_topic("t", config={**SMALL, limit: far})
    harness.fill(600)
    harness.offload()
    partition = harness.broker.partition("t", 0)
    harness.broker.trim("t", 0, partition.log_start_offset + 25)  # into the middle of a page
    harness.broker.background.janitor.maintain(partition)
    local = local_facts(partition)
    every = [*cold_facts(partition, local), *local]
    assert total_bytes(partition, local) == sum(one.size_bytes for one in every)
    assert partition.manifest.pages[-1].base_offset < local[0].base_offset
    partition._cold._manifests._cache._pages.clear()
    before, harness.store.calls = partition.log_start_offset, []
    harness.broker.background.janitor.maintain(partition)
    assert not [call for call in harness.store.calls if call[0].startswith("get")]
    assert partition.log_start_offset == before
    if limit == "retention.bytes":
        harness.fill(100)
        harness.broker.background.janitor.maintain(partition)
        assert partition.log_start_offset > before


def test_retention_by_time_does_not_sum_up_manifest_pages(harness, monkeypatch):
    """While the bucket has yet to follow a log start, their sums are too high."""
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 2}.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", small)
    harness.broker.create_topic("t", config={**SMALL, "retention.ms": 1 << 60})
    harness.fill(600)
    harness.offload()
    partition = harness.broker.partition("t", 0)
    harness.broker.checkpoints.move_log_start(partition, 5, move=partition.upkeep.move_log_start)
    harness.broker.background.janitor._apply_retention(partition)
    partition._cold._manifests._cache._pages.clear()
    harness.store.calls.clear()
    harness.broker.background.janitor._apply_retention(partition)
    assert not harness.store.calls


@pytest.mark.usefixtures("nowait_reads")
@pytest.mark.parametrize("wait", Wait)
def test_a_cold_read_overtaken_by_retention_raises_offset_trimmed(harness, monkeypatch, wait):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    log = harness.broker.partition("t", 0)
    harness.records("t")  # fills the cache
    (first, *_) = log.cold_entries(0)
    found = log._cold.reads.read_cold

    def overtaken(offset, **limits):
        monkeypatch.undo()
        harness.broker.background.janitor.trim_partition(log, first.next_offset)
        return found(offset, **limits)

    monkeypatch.setattr(log._cold.reads, "read_cold", overtaken)
    with pytest.raises(OffsetTrimmed, match="below the log start"):
        log.read(0, max_bytes=100, wait=wait)


def test_a_committed_read_looks_up_aborted_transactions_in_the_tier_of_its_records(
    harness, monkeypatch
):
    harness.broker.create_topic("t", config={**SMALL, "local.retention.bytes": -2})
    harness.fill(100)
    harness.offload()
    log = harness.broker.partition("t", 0)
    look_up = log._log.aborted_transactions

    def delete_local_first(*offsets):
        monkeypatch.undo()
        assert log.upkeep.delete_local(log.cold_end_offset)
        return look_up(*offsets)

    monkeypatch.setattr(log._log, "aborted_transactions", delete_local_first)
    assert log.read(0, max_bytes=100, committed=True).tier == "cold"


def test_records_without_a_timestamp_are_as_old_as_their_file(harness):
    config = {"segment.bytes": 1024, "retention.ms": 60_000, "local.retention.ms": 60_000}
    harness.broker.create_topic("t", config={**config, "remote.storage.enable": False})
    for _ in range(10):
        harness.produce("t", [b"v" * 200], at=-1)
    log = harness.broker.partition("t", 0)._log
    run_janitor(harness.broker)
    assert len(harness.records("t")) == 10
    oldest, following = log.segments()[:2]
    os.utime(oldest.path, (1, 1))
    run_janitor(harness.broker)
    assert log.log_start_offset == following.base_offset


def test_a_segment_opened_before_is_returned_without_blocking(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    harness.produce("t", [b"active"])
    log = harness.broker.partition("t", 0)
    for one in iter_segments(log):
        opened = open_segment(log, one.base_offset)
        blocking = list(slices_of(log, opened, start=1, end=opened.size_bytes))
        immediate = at_once(open_segment, log, one.base_offset)
        if one.active:
            assert immediate is None
            continue
        assert immediate[:3] == opened[:3]
        slices = tuple(
            slices_of(log, immediate, start=1, end=immediate.size_bytes, wait=Wait.NEVER)
        )
        assert [piece.read() for piece in slices] == [piece.read() for piece in blocking]
    assert at_once(open_segment, log, 1) is None


def test_a_segment_deleted_locally_is_not_served_from_an_open_file(harness):
    harness.broker.create_topic("t", config={**SMALL, "local.retention.bytes": -2})
    harness.fill(400)
    log = harness.broker.partition("t", 0)
    assert open_segment(log, 0).tier == "hot"
    assert at_once(open_segment, log, 0).tier == "hot"
    log.upkeep.delete_local(log._log.active_base_offset)
    immediate = at_once(open_segment, log, 0)
    assert immediate is None or immediate.tier == "cold"


@pytest.mark.usefixtures("nowait_reads")
def test_cached_cold_reads_without_blocking_return_the_same(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(400)
    harness.offload()
    log = harness.broker.partition("t", 0)
    assert at_once(log.read, 5, max_bytes=2000) is None, "nothing is cached yet"
    blocking = log.read(5, max_bytes=2000)
    immediate = at_once(log.read, 5, max_bytes=2000)
    assert immediate is not None
    assert [piece.read() for piece in immediate.slices] == [p.read() for p in blocking.slices]
    assert immediate._replace(slices=()) == blocking._replace(slices=())
    last_cold = log.offsets().local_log_start_offset - 1
    assert (
        log.read(last_cold, max_bytes=1).tier
        == at_once(log.read, last_cold, max_bytes=1).tier
        == "cold"
    )
    blocking = log.read(last_cold, max_bytes=1 << 20)
    immediate = at_once(log.read, last_cold, max_bytes=1 << 20)
    assert blocking.tier == "mixed"
    assert [piece.read() for piece in immediate.slices] == [p.read() for p in blocking.slices]
    assert immediate._replace(slices=()) == blocking._replace(slices=())


def test_the_janitor_expires_idle_producers(harness):
    harness.broker.create_topic("t")
    partition = harness.broker.partition("t", 0)

    def send(sequence):
        batches = build_produced(
            [b"v"],
            timestamps=[1],
            max_message_bytes=1 << 20,
            producer_id=7,
            producer_epoch=0,
            base_sequence=sequence,
        )
        return partition.append(batches, acks=Acks.LEADER).result(10)

    janitor = harness.broker.background.janitor
    send(0)
    janitor.disk_round()
    with pytest.raises(OutOfOrderSequence):
        send(5)
    now_ms, idle_ms = janitor._clock(), janitor._settings.producer_id_expiration_ms
    janitor._clock = lambda: now_ms + idle_ms + 60_000
    janitor.disk_round()
    with pytest.raises(OutOfOrderSequence):  # only the wall clock jumped
        send(5)
    janitor._settings = replace(janitor._settings, producer_id_expiration_ms=0)
    janitor.disk_round()
    assert send(5).base_offset == 1


def test_appends_before_close_complete_and_later_ones_are_refused(harness):
    harness.broker.create_topic("t", partitions=3)
    partitions = [harness.broker.partition("t", number) for number in range(3)]

    def append(partition):
        batches = build_produced([b"v"], timestamps=[1], max_message_bytes=1 << 20)
        return partition.append(batches, acks=Acks.ALL)

    futures = [append(partition) for _ in range(200) for partition in partitions]
    harness.broker.close()
    assert all(future.done() for future in futures)
    assert {future.result().last_offset for future in futures} == set(range(200))
    with pytest.raises(ShuttingDown):
        append(partitions[0]).result(10)
    harness.broker = harness.open()
    assert harness.broker.partition("t", 2).log_end_offset == 200


def test_iterating_partitions_is_not_disturbed_by_new_ones(harness):
    harness.broker.create_topic("t", partitions=2)
    partitions = harness.broker.partitions()
    assert next(partitions).number == 0
    harness.broker.alter_topic("t", partitions=3)
    assert [partition.number for partition in partitions] == [1]
    assert [partition.number for partition in harness.broker.partitions()] == [0, 1, 2]


def test_appends_do_not_wait_for_partition_creation(harness, monkeypatch):
    harness.restart(append_threads=1)
    harness.broker.create_topic("t")
    opening, may_end = threading.Event(), threading.Event()
    open_log = PartitionLog.open

    def open_slowly(*args, **kwargs):
        opening.set()
        assert may_end.wait(20)
        return open_log(*args, **kwargs)

    monkeypatch.setattr(PartitionLog, "open", open_slowly)
    with ThreadPoolExecutor(1) as pool:
        creating = pool.submit(harness.broker.create_topic, "many", partitions=20)
        try:
            assert opening.wait(10)
            assert harness.produce("t", [b"meanwhile"]).base_offset == 0
            assert not creating.done()
        finally:
            may_end.set()
        assert len(creating.result().partitions) == 20


def test_a_lowered_flush_ms_applies_to_what_is_unflushed(harness):
    harness.broker.create_topic("t", config={"flush.ms": 86_400_000})
    harness.produce("t", [b"waiting"], acks=Acks.LEADER)
    assert harness.broker.partition("t", 0).offsets().high_watermark == 0
    harness.broker.alter_topic("t", config={"flush.ms": 5})
    harness.wait_for(lambda: harness.broker.partition("t", 0).offsets().high_watermark == 1)


def test_a_broker_that_may_start_no_more_threads_uploads_reads_trims_and_stops(
    harness, monkeypatch
):
    harness.broker.create_topic("t", config=SMALL)
    values = harness.fill(200)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        harness.offload()
        run_janitor(harness.broker)
        assert harness.broker.partition("t", 0).offsets().local_log_start_offset > 55
        assert [record.value for record in harness.records("t")] == values
        assert harness.broker.trim("t", 0, 55) == 55
        assert harness.broker.partition("t", 0).manifest.log_start_offset == 55
        harness.broker.background.fence_checker.run_round()
        harness.broker.close()
    assert (harness.root / "data" / ".kafka_cleanshutdown").exists()
