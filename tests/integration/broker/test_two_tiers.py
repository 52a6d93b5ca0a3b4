"""One log over two tiers, on real files: roll, offload, let go, read across the seam, restart."""

import errno
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from broker.background.janitor import cold_facts, local_facts, total_bytes
from broker.data_folder import HIGH_WATERMARKS, LOG_STARTS, RECOVERY_POINTS
from broker.segment_listing import (
    iter_segments,
    open_segment,
    peek_segments,
    slices_of,
    try_open_segment,
    try_slices_of,
)
from broker.tier_sizes import tier_sizes
from hot_tier.append import Acks
from hot_tier.file_names import file_name
from hot_tier.log import PartitionLog
from hot_tier.open_files import FileReader
from record_format.decode import Record
from record_format.errors import OffsetTrimmed, OutOfOrderSequence, ShuttingDown
from record_format.page_cache import NOWAIT
from record_format.produced import build_produced
from tests.fakes.faulty_disk import FaultyDisk
from tests.fakes.house import tidy

SMALL = {"segment.bytes": 4096, "retention.ms": -1, "local.retention.bytes": 8192}


def test_what_was_let_go_locally_reads_the_same_from_the_bucket(house):
    house.broker.create_topic("t", config=SMALL)
    values = house.fill(400)
    before = house.records("t")
    house.offload()  # some may have gone up before it was asked for
    log = house.broker.partition("t", 0)
    assert log.cold.manifest.segment_count > 5
    assert log.offsets().local_log_start_offset > 0, "most of it must be cold"
    after = house.records("t")
    assert after == before
    assert [record.value for record in after] == values
    assert log.read(0, max_bytes=8192).tier == "cold"


def test_a_read_of_what_is_committed_does_not_ask_for_all_that_follows(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(800)
    house.offload()
    house.restart()
    log = house.broker.partition("t", 0)
    assert log.cold.manifest.segment_count > 10
    asked = house.store.ledger.requests("cold_read")
    assert log.read(0, max_bytes=1, committed=True).tier == "cold"
    assert house.store.ledger.requests("cold_read") - asked == 3  # table, chunk, producers


def test_a_read_across_the_seam_is_mixed_and_whole(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    log = house.broker.partition("t", 0)
    start = log.offsets().local_log_start_offset
    fetched = log.read(start - 1, max_bytes=1 << 20)
    assert fetched.tier == "mixed"
    assert fetched.next_offset > start
    few = log.read(start - 1, max_bytes=fetched.slices[0].size_bytes + 1)
    assert few.tier == "cold", "what does not fit is not put on top"
    assert few.next_offset == start


def test_one_read_takes_what_it_wants_from_many_cold_segments(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    log = house.broker.partition("t", 0)
    start, first = log.offsets().local_log_start_offset, next(log.cold.entries(0))
    fetched = log.read(0, max_bytes=4 * first.size_bytes)
    assert fetched.tier == "cold"
    assert 2 * first.size_bytes < fetched.size_bytes <= 4 * first.size_bytes
    whole = log.read(0, max_bytes=1 << 20)
    assert (whole.tier, whole.next_offset) == ("mixed", log.offsets().high_watermark)
    assert start > 4 * first.next_offset


def test_pages_of_the_manifest_come_together_and_lose_nothing(house, monkeypatch):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 1, "RUN_MAX": 4, "PAGE_ENTRIES": 4}.items():
        monkeypatch.setattr(f"manifest.paging.{name}", small)
    house.broker.create_topic("t", config=SMALL)
    values = house.fill(400)
    house.offload()
    cold = house.broker.partition("t", 0).cold
    house.broker.background.janitor.maintain(house.broker.partition("t", 0))
    assert max(page.entry_count for page in cold.manifest.pages) == 4
    assert [record.value for record in house.records("t")] == values


def test_time_lookup_in_the_cold_tier_finds_the_record(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    log = house.broker.partition("t", 0)
    assert log.offset_for_timestamp(5) == (5, 5)
    assert log.offset_for_timestamp(-1) == (0, 0)
    assert log.offset_for_timestamp(10_000) is None


def test_a_restart_keeps_everything_and_raises_the_epoch(house):
    house.broker.create_topic("t", partitions=2, config=SMALL)
    house.fill(200)
    house.offload()
    before, epoch = house.records("t"), house.broker.partition("t", 0).offsets().leader_epoch
    broker = house.restart()
    assert house.records("t") == before
    assert broker.partition("t", 0).offsets().leader_epoch > epoch
    house.produce("t", [b"more"])
    assert house.records("t")[-1] == Record(200, 0, None, b"more", ())
    house.offload()


def test_segments_are_listed_once_over_both_tiers(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    house.produce("t", [b"active"])
    log = house.broker.partition("t", 0)
    listed = list(iter_segments(log))
    assert listed[0].base_offset == 0
    assert [one.base_offset for one in listed[1:]] == [one.last_offset + 1 for one in listed[:-1]]
    assert {one.tier for one in listed} == {"cold", "both", "hot"}
    assert sum(one.records for one in listed) == 401
    for one in listed:
        opened = open_segment(log, one.base_offset)
        data = b"".join(p.read() for p in slices_of(log, opened, start=0, end=opened.size_bytes))
        assert len(data) == one.size_bytes


def test_after_a_restart_a_glance_knows_what_the_manifest_knows(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    whole = list(peek_segments(house.broker.partition("t", 0)))
    house.restart()
    glanced = [one for one in peek_segments(house.broker.partition("t", 0)) if not one.active]
    assert "both" in {one.tier for one in glanced}
    assert glanced == [one for one in whole if not one.active]


def test_after_a_restart_a_listing_reads_no_segment_that_the_manifest_knows(house, monkeypatch):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    partition = house.broker.partition("t", 0)
    whole = list(iter_segments(partition))
    house.restart()
    partition = house.broker.partition("t", 0)
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


def test_trim_moves_the_start_in_both_tiers_and_survives(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    assert house.broker.trim("t", 0, 35) == 35
    assert house.broker.trim("t", 0, 10) == 35
    cold = house.broker.partition("t", 0).cold
    assert cold.manifest.log_start_offset == 35
    house.restart()
    assert house.broker.partition("t", 0).offsets().log_start_offset == 35
    assert house.records("t", offset=35)[0].offset == 35


def test_a_trim_into_a_segment_that_was_not_uploaded_does_not_keep_it_from_the_bucket(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(10)
    house.claim()
    house.broker.trim("t", 0, 5)
    assert house.offload().uploaded_segments == 1
    house.fill(10)
    assert house.offload().uploaded_segments == 1
    assert house.broker.partition("t", 0).cold.end_offset == 20


def test_deleting_a_topic_leaves_nothing_and_the_name_is_free(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(100)
    house.offload()
    first = house.broker.topic("t").record.topic_id
    house.broker.delete_topic("t")
    house.broker.create_topic("t")
    assert house.broker.topic("t").record.topic_id != first
    assert house.records("t") == []
    house.wait_for(lambda: not house.broker.registry.deleted())
    assert not [p for p in (house.root / "bucket").rglob("*") if p.is_file() and first in str(p)]
    assert not list((house.root / "data").glob("*-delete"))


def test_a_topic_of_a_deleted_ones_name_starts_at_zero_also_after_a_crash(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(100)
    house.broker.trim("t", 0, 50)
    house.broker.background.checkpoints.save()
    house.restart()
    house.broker.delete_topic("t")
    house.broker.create_topic("t")
    house.produce("t", [b"new"])
    assert [record.offset for record in house.records("t")] == [0]
    crashed = house.broker
    crashed.background.copying.stop(10)  # two that write to one folder
    crashed.background.deleting.stop(10)
    crashed.folder.close()  # the lock goes as with the process; nothing else is tidied
    house.broker = house.open()
    assert [record.offset for record in house.records("t")] == [0]
    crashed.folder = house.broker.folder  # its close finds a lock that is gone already


def test_checkpoints_that_a_full_disk_broke_off_say_nothing_of_the_next_topic(house, monkeypatch):
    house.broker.create_topic("t", config=SMALL)
    house.fill(100)
    write = house.broker.folder.write_checkpoint

    def full_after_the_first(name, offsets):
        if name == HIGH_WATERMARKS:
            raise OSError(errno.ENOSPC, "full", name)
        write(name, offsets)

    with monkeypatch.context() as patched:
        patched.setattr(house.broker.folder, "write_checkpoint", full_after_the_first)
        with pytest.raises(OSError, match="full"):
            house.broker.background.checkpoints.save()
    house.broker.delete_topic("t")
    house.broker.create_topic("t")
    assert house.broker.folder.read_checkpoint(RECOVERY_POINTS).get(("t", 0), 0) == 0


def test_a_trim_is_durable_whoever_else_writes_checkpoints_just_then(house, monkeypatch):
    house.broker.create_topic("t", config=SMALL)
    house.fill(100)
    write, trims = house.broker.folder.write_checkpoint, []

    def overtaken(name, offsets):
        if name == LOG_STARTS and not trims:  # what it writes was looked up already
            trims.append(threading.Thread(target=house.broker.trim, args=("t", 0, 50)))
            trims[0].start()
            trims[0].join(0.1)
        write(name, offsets)

    monkeypatch.setattr(house.broker.folder, "write_checkpoint", overtaken)
    house.broker.background.checkpoints.save()
    trims[0].join()
    assert house.broker.folder.read_checkpoint(LOG_STARTS) == {("t", 0): 50}
    house.broker.background.janitor.trim(
        house.broker.partition("t", 0), 20
    )  # by a look before that
    assert house.broker.folder.read_checkpoint(LOG_STARTS) == {("t", 0): 50}


def test_retention_by_size_drops_from_both_tiers(house):
    house.broker.create_topic("t", config={**SMALL, "retention.bytes": 16384})
    house.fill(400)
    house.offload()
    now = house.broker.partition("t", 0).offsets()
    assert now.log_start_offset > 0
    sizes = tier_sizes(house.broker.partition("t", 0))
    assert sizes.cold_bytes < 16384 + 2 * 4096
    assert house.records("t", offset=now.log_start_offset)[0].offset <= now.log_start_offset + 9


def test_retention_frees_a_disk_that_is_too_full_for_a_new_segment(house, monkeypatch):
    """All has expired, but the active segment cannot be rolled."""
    disk = FaultyDisk()
    monkeypatch.setattr(house.broker._opener, "_disk", disk)
    house.broker.create_topic("t", config={**SMALL, "remote.storage.enable": False})
    house.fill(200)
    log = house.broker.partition("t", 0).log
    disk.fail("open", errno.ENOSPC, suffix=".log")
    house.broker.alter_topic("t", config={"retention.ms": 1000})
    tidy(house.broker)
    assert log.log_start_offset == log.active_base_offset > 0
    disk.heal()
    tidy(house.broker)
    assert log.log_start_offset == log.log_end_offset == 200


@pytest.mark.parametrize("limit", ["retention.bytes", "retention.ms"])
def test_a_round_in_which_all_stays_reads_no_page_of_the_manifest(house, monkeypatch, limit):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 2}.items():
        monkeypatch.setattr(f"manifest.paging.{name}", small)
    far = 16384 if limit == "retention.bytes" else 1 << 60
    house.broker.create_topic("t", config={**SMALL, limit: far})
    house.fill(600)
    house.offload()
    partition = house.broker.partition("t", 0)
    house.broker.trim("t", 0, partition.log.log_start_offset + 25)  # into the midst of a page
    house.broker.background.janitor.maintain(partition)
    local = local_facts(partition)
    every = [*cold_facts(partition, local), *local]
    assert total_bytes(partition, local) == sum(one.size_bytes for one in every)
    assert partition.cold.manifest.pages[-1].base_offset < local[0].base_offset
    partition.cold._manifests._cache._pages.clear()
    before, house.store.calls = partition.log.log_start_offset, []
    house.broker.background.janitor.maintain(partition)
    assert not [call for call in house.store.calls if call[0].startswith("get")]
    assert partition.log.log_start_offset == before
    if limit == "retention.bytes":
        house.fill(100)
        house.broker.background.janitor.maintain(partition)
        assert partition.log.log_start_offset > before


@pytest.mark.parametrize("call", ["read", "try_read"])
def test_a_cold_read_that_retention_overtakes_is_trimmed_and_skips_nothing(
    house, monkeypatch, call
):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    log = house.broker.partition("t", 0)
    house.records("t")  # so that all of it is cached
    (first, *_) = log.cold.entries(0)
    found = getattr(log.cold, call)

    def overtaken(offset, **limits):
        monkeypatch.undo()
        house.broker.background.janitor.trim(log, first.next_offset)
        return found(offset, **limits)

    monkeypatch.setattr(log.cold, call, overtaken)
    with pytest.raises(OffsetTrimmed, match="below the log start"):
        getattr(log, call)(0, max_bytes=100)


def test_a_committed_read_looks_for_aborted_transactions_where_its_records_came_from(
    house, monkeypatch
):
    house.broker.create_topic("t", config={**SMALL, "local.retention.bytes": -2})
    house.fill(100)
    house.offload()
    log = house.broker.partition("t", 0)
    look_up = log.log.aborted_transactions

    def delete_local_first(*offsets, blocking):
        monkeypatch.undo()
        assert log.log.delete_local(log.cold.end_offset)
        return look_up(*offsets, blocking=blocking)

    monkeypatch.setattr(log.log, "aborted_transactions", delete_local_first)
    assert log.read(0, max_bytes=100, committed=True).tier == "cold"


def test_records_without_a_time_are_as_old_as_their_file(house):
    config = {"segment.bytes": 1024, "retention.ms": 60_000, "local.retention.ms": 60_000}
    house.broker.create_topic("t", config={**config, "remote.storage.enable": False})
    for _ in range(10):
        house.produce("t", [b"v" * 200], at=-1)
    log = house.broker.partition("t", 0).log
    tidy(house.broker)
    assert len(house.records("t")) == 10
    oldest, following = log.segments()[:2]
    os.utime(oldest.path, (1, 1))
    tidy(house.broker)
    assert log.log_start_offset == following.base_offset


def test_segment_that_was_opened_once_is_given_without_waiting(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    house.produce("t", [b"active"])
    log = house.broker.partition("t", 0)
    for one in iter_segments(log):
        opened = open_segment(log, one.base_offset)
        waited = list(slices_of(log, opened, start=1, end=opened.size_bytes))
        at_once = try_open_segment(log, one.base_offset)
        if one.active:
            assert at_once is None
            continue
        assert at_once[:3] == opened[:3]
        slices = try_slices_of(log, at_once, start=1, end=at_once.size_bytes)
        assert [piece.read() for piece in slices] == [piece.read() for piece in waited]
    assert try_open_segment(log, 1) is None


def test_segment_that_left_the_disk_is_not_given_from_a_file_kept_open(house):
    from broker.segment_listing import open_segment, try_open_segment

    house.broker.create_topic("t", config={**SMALL, "local.retention.bytes": -2})
    house.fill(400)
    log = house.broker.partition("t", 0)
    assert open_segment(log, 0).tier == "hot"
    assert try_open_segment(log, 0).tier == "hot"
    log.log.delete_local(log.log.active_base_offset)
    at_once = try_open_segment(log, 0)
    assert at_once is None or at_once.tier == "cold"


@pytest.mark.skipif(not NOWAIT, reason="no RWF_NOWAIT on this system")
def test_cached_cold_reads_need_no_thread_and_say_the_same(house):
    house.broker.create_topic("t", config=SMALL)
    house.fill(400)
    house.offload()
    log = house.broker.partition("t", 0)
    assert log.try_read(5, max_bytes=2000) is None, "nothing is cached yet"
    waited = log.read(5, max_bytes=2000)
    at_once = log.try_read(5, max_bytes=2000)
    assert at_once is not None
    assert [piece.read() for piece in at_once.slices] == [p.read() for p in waited.slices]
    assert at_once._replace(slices=()) == waited._replace(slices=())
    seam = log.offsets().local_log_start_offset - 1
    assert log.read(seam, max_bytes=1).tier == log.try_read(seam, max_bytes=1).tier == "cold"
    waited = log.read(seam, max_bytes=1 << 20)
    at_once = log.try_read(seam, max_bytes=1 << 20)
    assert waited.tier == "mixed"
    assert [piece.read() for piece in at_once.slices] == [p.read() for p in waited.slices]
    assert at_once._replace(slices=()) == waited._replace(slices=())


def test_an_idle_producer_is_forgotten_by_the_janitor(house):
    house.broker.create_topic("t")
    partition = house.broker.partition("t", 0)

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

    janitor = house.broker.background.janitor
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


def test_what_was_taken_before_the_close_is_answered_and_nothing_after_it(house):
    house.broker.create_topic("t", partitions=3)
    partitions = [house.broker.partition("t", number) for number in range(3)]

    def append(partition):
        batches = build_produced([b"v"], timestamps=[1], max_message_bytes=1 << 20)
        return partition.append(batches, acks=Acks.ALL)

    taken = [append(partition) for _ in range(200) for partition in partitions]
    house.broker.close()
    assert all(future.done() for future in taken)
    assert {future.result().last_offset for future in taken} == set(range(200))
    with pytest.raises(ShuttingDown):
        append(partitions[0]).result(10)
    house.broker = house.open()
    assert house.broker.partition("t", 2).log.log_end_offset == 200


def test_who_goes_over_the_partitions_is_not_disturbed_by_new_ones(house):
    house.broker.create_topic("t", partitions=2)
    partitions = house.broker.partitions()
    assert next(partitions).number == 0
    house.broker.alter_topic("t", partitions=3)
    assert [partition.number for partition in partitions] == [1]
    assert [partition.number for partition in house.broker.partitions()] == [0, 1, 2]


def test_appends_do_not_wait_for_partitions_that_are_made(house, monkeypatch):
    house.restart(append_threads=1)
    house.broker.create_topic("t")
    making, may_end = threading.Event(), threading.Event()
    open_log = PartitionLog.open

    def open_slowly(*args, **kwargs):
        making.set()
        assert may_end.wait(20)
        return open_log(*args, **kwargs)

    monkeypatch.setattr(PartitionLog, "open", open_slowly)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(house.broker.create_topic, "many", partitions=20)
        try:
            assert making.wait(10)
            assert house.produce("t", [b"meanwhile"]).base_offset == 0
            assert not made.done()
        finally:
            may_end.set()
        assert len(made.result().partitions) == 20
