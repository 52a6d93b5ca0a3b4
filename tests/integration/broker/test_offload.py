"""When segments are uploaded: partitions in turn, idle ones by time, at the configured rate."""

import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.fakes.broker_harness import run_janitor
from tests.fakes.damage import flip
from tests.fakes.faulty_object_store import FailsBefore, WrongBytes
from tests.fakes.small_disk import no_room
from tierlog.broker.background.background_tasks import BackgroundTasks
from tierlog.broker.background.copier import Copier
from tierlog.broker.background.janitor import removable_end
from tierlog.broker.bucket import bucket
from tierlog.host.clock import wall_clock_ms
from tierlog.hot_tier import roll, sealed_segments
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_writer import Acks
from tierlog.manifest.store import DAY_MS
from tierlog.record_format.errors import (
    CorruptManifest,
    DiskFull,
    InvalidConfig,
    ShuttingDown,
    UnknownTopic,
)
from tierlog.record_format.produced import build_produced
from tierlog.repair.verify import verify_topic

SMALL = {"segment.bytes": 4096, "retention.ms": -1}
LOCAL_ONLY = {"remote.storage.enable": False}
LITTLE_LOCAL = {"segment.bytes": 2048, "retention.ms": -1, "local.retention.bytes": 2048}


def fill(harness, topic, *, segments):
    for number in range(segments * 4):
        harness.produce(topic, [b"x" * 100] * 10, at=number)


@pytest.fixture
def copier_of(harness):
    """Make copiers; the broker's own is closed."""
    copiers = []
    harness.broker.background.copier.close()
    for topic in ("a", "b"):
        harness.broker.create_topic(topic, config=SMALL)
        fill(harness, topic, segments=4)
    harness.wait_for(lambda: harness.broker.bucket.store_status.is_verified)

    def make(concurrency):
        copiers.append(
            Copier(
                harness.broker.partitions,
                concurrency=concurrency,
                holes=harness.broker.background.holes,
                failures=harness.broker.background.failures,
            )
        )
        return copiers[-1]

    yield make
    for copier in copiers:
        copier.close()


def partitions(harness, topic):
    return list(harness.broker.topic(topic).partitions.values())


def test_a_backlog_does_not_starve_other_partitions(harness, copier_of):
    copier = copier_of(1)
    with capture_logs() as lines:
        copier.run_round()
        assert copier.wait_until_done(harness.broker.partitions(), timeout_s=20)
    offloaded = [line["partition"] for line in lines if line["event"] == "segment offloaded"]
    assert min(offloaded.count("a-0"), offloaded.count("b-0")) > 2
    assert set(offloaded[:2]) == {"a-0", "b-0"}


def test_a_store_outage_is_logged_once_and_its_end_once(harness, copier_of):
    """Not one per partition: there may be a thousand, waiting for the same store."""
    copier, status = copier_of(4), harness.broker.bucket.store_status
    harness.broker.create_topic("many", partitions=20)
    harness.set_down(True)
    with capture_logs() as lines:
        copier.run_round()
        assert copier.wait_until_idle(timeout_s=20)
        harness.set_down(False)
        harness.wait_for(lambda: status.is_reachable)
    events = [line["event"] for line in lines if line["event"].startswith(("store", "offload"))]
    assert events == ["store unavailable", "store available again"]


def test_a_failed_upload_of_one_partition_is_logged(harness, copier_of):
    copier = copier_of(1)
    harness.store.fail("put", FailsBefore(), times=10**9, when=lambda key: "/b/" in key)
    with capture_logs() as lines:
        copier.run_round()
        assert copier.wait_until_done(partitions(harness, "a"), timeout_s=20)
        assert copier.wait_until_idle(timeout_s=20)
    waits = [line["partition"] for line in lines if line["event"] == "offload failed, will retry"]
    assert waits == ["b-0"]
    assert harness.broker.bucket.store_status.is_reachable


def test_a_corrupt_segment_is_read_again_less_and_less_often(harness, copier_of):
    copier, partition = copier_of(1), harness.broker.partition("a", 0)
    flip(partition.local_segments()[0].path, 100)
    waits = []
    for _ in range(12):
        with capture_logs() as lines:
            copier.reset_backoff([partition])
            copier.run_round()
            assert copier.wait_until_idle(timeout_s=20)
        waits += [line["retry_in_s"] for line in lines if line["event"].endswith("will retry")]
    assert len(waits) == 12
    assert waits[0] < 1
    assert waits[-1] > 250


def test_segments_after_a_corrupt_one_do_not_wait_once_it_is_trimmed(
    harness, copier_of, monkeypatch
):
    monkeypatch.setattr("tierlog.broker.background.copier.FIRST_WAIT_S", 600.0)
    copier, partition = copier_of(1), harness.broker.partition("a", 0)
    flip(partition.local_segments()[0].path, 100)
    copier.run_round()
    assert copier.wait_until_idle(timeout_s=20)
    assert copier.blocked().keys() == {partition}
    harness.broker.trim("a", 0, partition._log.base_offsets[1])
    copier.run_round()
    assert copier.wait_until_done([partition], timeout_s=20)
    assert not copier.blocked()


def test_an_offload_that_waits_collects_no_garbage(harness, monkeypatch):
    """That may take minutes, and nobody waits for it."""
    harness.broker.create_topic("t", config=SMALL)
    fill(harness, "t", segments=3)
    partition, janitor = harness.broker.partition("t", 0), harness.broker.background.janitor
    janitor.bucket_round()
    monkeypatch.setattr(janitor, "_clock", lambda: wall_clock_ms() + 2 * DAY_MS)  # it is due
    collected = []
    monkeypatch.setattr(
        partition._cold, "collect_garbage", lambda policy: collected.append(policy) or 0
    )
    harness.offload()
    assert not collected
    janitor.bucket_round()
    assert len(collected) == 1


def test_segments_after_a_trim_are_uploaded_before_the_trim_reaches_the_bucket(harness, copier_of):
    """The log start has moved and local files are deleted; the bucket has no trim yet."""
    copier, partition = copier_of(concurrency=1), harness.broker.partition("a", 0)
    partition.claim()
    start = partition._log.base_offsets[1]
    harness.broker.checkpoints.move_log_start(
        partition, start, move=partition.upkeep.move_log_start
    )
    partition.upkeep.delete_local(start)
    with capture_logs() as lines:
        copier.run_round()
        assert copier.wait_until_done([partition], timeout_s=20)
    assert not [line for line in lines if line["event"] == "offload failed, will retry"]
    assert partition.manifest.log_start_offset == start


def test_a_sealed_but_unflushed_segment_waits_without_an_error(harness, copier_of):
    harness.broker.create_topic("c", config={**SMALL, "flush.ms": 3_600_000})
    copier, partition = copier_of(1), harness.broker.partition("c", 0)
    for _ in range(8):
        batches = build_produced([b"x" * 100] * 10, timestamps=[0] * 10, max_message_bytes=4096)
        partition.append(batches, acks=Acks.LEADER).result(10)
    copier.run_round()
    assert copier.wait_until_idle(timeout_s=20)
    assert (copier.blocked(), partition.cold_end_offset) == ({}, 0)
    partition._log.writer.flush()
    copier.run_round()
    assert copier.wait_until_done([partition], timeout_s=20)
    assert partition.cold_end_offset == partition._log.active_base_offset > 0


def test_a_commit_stored_with_wrong_bytes_does_not_count(harness, copier_of):
    copier_of(concurrency=1)  # the only one
    partition = harness.broker.partition("a", 0)
    partition.claim()
    harness.store.fail("put", WrongBytes(200), when=lambda key: "/manifest/" in key)
    with pytest.raises(CorruptManifest):
        partition._cold.offload(partition._log.sealed.prepare_upload(0))
    assert partition.cold_end_offset == removable_end(partition) == 0


def test_no_segment_is_deleted_by_a_commit_that_is_not_recorded_locally(harness, monkeypatch):
    """After a crash the folder would not know what the bucket has."""
    harness.broker.create_topic("t", config={**LITTLE_LOCAL, "local.retention.ms": 0})
    harness.claim()
    harness.stop_copying()
    fill(harness, "t", segments=3)
    partition = harness.broker.partition("t", 0)
    with monkeypatch.context() as disk:
        disk.setattr(partition._cold.bucket_state, "_write", no_room)
        harness.copy_sealed()
        run_janitor(harness.broker)
        assert (partition.cold_end_offset, partition.first_local_offset) == (0, 0)
    harness.copy_sealed()
    run_janitor(harness.broker)
    assert partition.cold_end_offset == partition.first_local_offset > 0


def test_a_hanging_upload_does_not_block_other_partitions(harness, copier_of, monkeypatch):
    copier, released = copier_of(2), threading.Event()
    (stuck,) = partitions(harness, "a")
    offload = stuck._cold.offload
    monkeypatch.setattr(stuck._cold, "offload", lambda files: released.wait(20) and offload(files))
    copier.run_round()
    assert copier.wait_until_done(partitions(harness, "b"), timeout_s=10)
    assert copier.progress([stuck]).uploaded_segments == 0
    released.set()
    assert copier.wait_until_done([stuck], timeout_s=20)


def test_what_is_to_be_uploaded_is_found_without_the_disk(harness, copier_of, monkeypatch):
    """It is found under the lock that readiness needs."""
    copier = copier_of(2)
    monkeypatch.setattr(sealed_segments, "_largest_timestamp", no_room)
    copier.run_round()
    assert copier.wait_until_done(harness.broker.partitions(), timeout_s=20)


def test_an_idle_partition_is_offloaded_within_offload_max_lag_ms(harness):
    harness.restart(retention_check_interval_ms=20)
    harness.broker.create_topic("t", config={"offload.max.lag.ms": 20})
    harness.produce("t", [b"the last for a long while"])
    cold = harness.broker.partition("t", 0)._cold
    harness.wait_for(lambda: cold.end_offset == 1)
    assert harness.broker.storage_report().offload_lag_ms == 0


@pytest.mark.parametrize("fails", [True, False])
def test_a_log_that_frees_nothing_does_not_keep_others_from_freeing_disk(
    harness, monkeypatch, fails
):
    for topic in ("a", "b"):
        harness.broker.create_topic(topic, config=SMALL)
        fill(harness, topic, segments=2)
        harness.offload(topic)
    delete_local = PartitionLog.delete_local

    def delete_local_except_a(log, before_offset):
        if log.topic == "a" and fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return delete_local(log, before_offset) if log.topic == "b" else []

    monkeypatch.setattr(PartitionLog, "delete_local", delete_local_except_a)
    assert harness.broker.background.janitor.relieve_disk(1)
    assert harness.broker.partition("a", 0).first_local_offset == 0
    assert harness.broker.partition("b", 0).first_local_offset > 0


@pytest.mark.parametrize(
    ("kept", "limit"),
    [({}, "local.retention.bytes"), (LOCAL_ONLY, "retention.bytes")],
)
def test_a_due_roll_that_a_full_disk_refuses_does_not_stop_retention(
    harness, monkeypatch, kept, limit
):
    harness.broker.create_topic("a", config={**SMALL, **kept})
    fill(harness, "a", segments=2)
    harness.offload("a")
    harness.produce("a", [b"due"])
    harness.broker.alter_topic("a", config={limit: 1, "offload.max.lag.ms": 0})
    with monkeypatch.context() as disk:
        disk.setattr(roll, "create_segment", no_room)
        run_janitor(harness.broker)
    left = harness.broker.partition("a", 0).local_segments()
    assert [view.active for view in left] == [True]
    run_janitor(harness.broker)
    assert harness.broker.partition("a", 0)._log.active_ms == 0  # rolled


def test_no_segment_is_deleted_below_a_log_start_that_is_not_durable(harness, monkeypatch):
    """The checkpoint of a trim could not be written to a full disk."""
    harness.broker.create_topic("a", config=SMALL)
    harness.wait_for(lambda: harness.broker.partition("a", 0).is_claimed)
    for task in harness.broker.background._tasks:
        task.stop(10)
    assert harness.broker.background.copier.wait_until_idle(timeout_s=20)
    fill(harness, "a", segments=3)
    partition, janitor = harness.broker.partition("a", 0), harness.broker.background.janitor
    before = [one.base_offset for one in partition.local_segments()]

    with monkeypatch.context() as disk:
        disk.setattr(harness.broker.folder, "write_checkpoint", no_room)
        with pytest.raises(DiskFull):
            harness.broker.trim("a", 0, before[1])
        assert not janitor.relieve_disk(1)
        assert partition.first_local_offset == 0
    shutil.copytree(harness.root / "data", harness.root / "crashed")
    harness.broker.close()
    shutil.rmtree(harness.root / "data")
    (harness.root / "crashed").rename(harness.root / "data")
    harness.broker = harness.open()
    assert len(harness.records("a")) == 10 * 3 * 4
    harness.broker.trim("a", 0, before[1])
    assert harness.broker.partition("a", 0).first_local_offset == before[1]


def test_a_topic_trimmed_within_a_segment_can_become_compacted(harness):
    harness.broker.create_topic("a", config=SMALL)
    fill(harness, "a", segments=2)
    harness.offload("a")
    harness.broker.trim("a", 0, 5)
    harness.broker.alter_topic("a", config={"cleanup.policy": "compact"})
    partition = harness.broker.partition("a", 0)
    partition.upkeep.delete_local(partition.local_segments()[1].base_offset)
    harness.broker.alter_topic("a", config={"cleanup.policy": "delete"})
    with pytest.raises(InvalidConfig, match="only in the bucket") as refused:
        harness.broker.alter_topic("a", config={"cleanup.policy": "compact"})
    assert [one.loc for one in refused.value.problems] == ["config.cleanup.policy"]


def test_altering_a_configuration_is_one_write(harness, monkeypatch):
    """Which a full disk accepts or refuses as a whole."""
    harness.broker.create_topic("a", config=SMALL)
    harness.wait_for(lambda: not harness.broker.registry.by_name("a").dirty)

    monkeypatch.setattr(harness.broker.folder, "write", no_room)
    harness.broker.alter_topic("a", config={"segment.bytes": 2048})
    assert harness.broker.topic("a").config.segment_bytes == 2048


def test_a_corrupt_segment_that_was_uploaded_frees_disk(harness):
    harness.broker.create_topic("a", config=SMALL)
    fill(harness, "a", segments=2)
    harness.offload("a")
    harness.broker.close()
    rotten = harness.root / "data" / "a-0" / f"{0:020d}.log"
    rotten.with_suffix(".timeindex").unlink()
    rotten.write_bytes(bytes(64) + rotten.read_bytes()[64:])
    harness.broker = harness.open()
    assert harness.broker.background.janitor.relieve_disk(1)
    assert harness.broker.partition("a", 0).first_local_offset > 0


def test_all_uploads_pass_the_configured_throttle(harness, monkeypatch):
    throttles = []

    class Recorded:
        def __init__(self, bytes_per_second):
            self.rate, self.sent_bytes = bytes_per_second, 0
            throttles.append(self)

        def __call__(self, size_bytes):
            self.sent_bytes += size_bytes

        def stop(self):
            pass

    monkeypatch.setattr(bucket, "UploadThrottle", Recorded)
    harness.restart(offload_bandwidth=12_345)
    harness.broker.create_topic("t", config=SMALL)
    fill(harness, "t", segments=2)
    harness.offload()
    (throttle,) = throttles
    entries = harness.broker.partition("t", 0).cold_entries(0)
    expected = sum(entry.size_bytes + entry.indexes_size_bytes for entry in entries)
    assert (throttle.rate, throttle.sent_bytes) == (12_345, expected)


def claimed_topic(harness):
    """An offloaded topic, and a function that turns its remote storage off."""
    harness.broker.create_topic("t", config=LITTLE_LOCAL)
    harness.wait_for(lambda: harness.broker.partition("t", 0).is_claimed)
    return lambda: harness.broker.alter_topic("t", config={"remote.storage.enable": False})


def test_records_written_after_disabling_remote_storage_stay_on_disk(harness):
    claimed_topic(harness)()
    for number in range(20):
        harness.produce("t", [b"%d" % number * 100 for _ in range(10)])
    harness.offload()
    assert harness.broker.partition("t", 0).cold_end_offset == 0
    (reported,) = harness.broker.storage_report().topics
    assert (reported.offload_lag_bytes, reported.offload_lag_segments) == (0, 0)
    assert reported.offload_lag_ms == 0
    harness.restart()
    assert [record.offset for record in harness.records("t")] == list(range(200))
    assert verify_topic(harness.broker, "t", deep=True).ok


@pytest.mark.parametrize("was_claimed", [False, True])
def test_records_written_before_enabling_remote_storage_are_offloaded(harness, was_claimed):
    if was_claimed:
        claimed_topic(harness)()
        harness.restart()
    else:
        harness.broker.create_topic("t", config={**LITTLE_LOCAL, "remote.storage.enable": False})
    assert harness.broker.partition("t", 0).has_bucket is was_claimed
    for number in range(20):
        harness.produce("t", [b"%d" % number * 100 for _ in range(10)])
    harness.broker.trim("t", 0, 15)
    harness.broker.alter_topic("t", config={"remote.storage.enable": True})
    harness.offload()
    partition = harness.broker.partition("t", 0)
    assert partition.cold_end_offset == 200
    assert partition.offsets().local_log_start_offset > 15
    harness.restart()
    assert [record.offset for record in harness.records("t", offset=15)] == list(range(15, 200))
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_an_unrecorded_upload_is_found_again_after_disabling_remote_storage(harness, monkeypatch):
    """Otherwise trims and retention never reach it, and a restore brings it back."""
    turn_off = claimed_topic(harness)
    harness.stop_copying()
    for number in range(20):
        harness.produce("t", [b"%d" % number * 100 for _ in range(10)])

    with monkeypatch.context() as full:
        full.setattr("tierlog.broker.data_folder.data_folder.write_durably", no_room)
        cold = harness.copy_sealed()._cold
    assert (cold.end_offset, cold.load_newest().end_offset > 0) == (0, True)
    turn_off()
    harness.restart()
    harness.claim()
    harness.broker.trim("t", 0, 200)
    assert harness.broker.partition("t", 0)._cold.load_newest().log_start_offset == 200


def test_a_segment_uploaded_while_remote_storage_is_disabled_is_read_from_the_bucket(
    harness, monkeypatch
):
    turn_off, put = claimed_topic(harness), harness.store.put_file
    harness.stop_copying()
    for number in range(20):
        harness.produce("t", [b"%d" % number * 100 for _ in range(10)])

    def put_file(*args, **options):
        turn_off()
        return put(*args, **options)

    monkeypatch.setattr(harness.store, "put_file", put_file, raising=False)
    harness.upload_sealed()
    partition = harness.broker.partition("t", 0)
    harness.broker.background.janitor.maintain(partition)
    assert 0 < partition.offsets().local_log_start_offset == partition.cold_end_offset < 200
    harness.restart()
    assert [record.offset for record in harness.records("t")] == list(range(200))
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_work_that_waits_for_the_store_changes_nothing_after_a_stop(harness, monkeypatch):
    """Another broker may own the folder by then."""
    harness.broker.create_topic("t", partitions=2, config=SMALL)
    harness.stop_copying()
    fill(harness, "t", segments=3)
    harness.broker.alter_topic("t", config={"retention.bytes": 1024})
    waiting, released, calls = threading.Event(), threading.Event(), []

    def slow(offset):
        calls.append(offset)
        waiting.set()
        assert released.wait(20)

    for partition in partitions(harness, "t"):
        monkeypatch.setattr(partition._cold, "follow_log_start", slow)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(run_janitor, harness.broker)
        assert waiting.wait(20)
        harness.broker.close()
        before = files_of(harness)
        released.set()
        late.result(20)
    assert len(calls) == 1, "the next partition is not started"
    record = harness.broker.topic("t").record
    with pytest.raises(ShuttingDown):
        harness.broker.registry.put_topics(msgspec.structs.replace(record, deleted=True))
    with pytest.raises(ShuttingDown):
        harness.broker.checkpoints.save()
    with pytest.raises(ShuttingDown):
        harness.broker.folder.write(harness.root / "data" / "tierlog" / "epochs.json", b"")
    assert files_of(harness) == before


def files_of(harness):
    paths = (path for path in (harness.root / "data").rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def test_a_stop_does_not_wait_for_uploads_and_the_next_start_resumes(harness):
    harness.restart(offload_bandwidth=1)
    harness.broker.create_topic("t", config=SMALL)
    fill(harness, "t", segments=2)
    (partition,) = partitions(harness, "t")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(harness.broker.offload, "t", wait_ms=3_600_000)
        harness.wait_for(lambda: bool(partition._cold._uploading))
        harness.broker.close()
        assert waiting.result(10).remaining_segments > 0
    harness.broker = harness.open()
    assert harness.broker.folder.was_clean
    harness.offload()


def test_a_stopped_copier_claims_no_more_partitions(harness, copier_of, monkeypatch):
    copier, entered, released = copier_of(1), threading.Event(), threading.Event()
    first, second = [*partitions(harness, "a"), *partitions(harness, "b")]
    for one in first, second:

        def slow_claim(claim=one._cold.ownership.claim, **ends):
            entered.set()
            return released.wait(20) and claim(**ends)

        monkeypatch.setattr(one._cold.ownership, "claim", slow_claim)
    copier.run_round()
    assert entered.wait(20)
    copier.stop()
    released.set()
    assert copier.wait_until_idle(timeout_s=20)
    assert [one.is_claimed for one in (first, second)].count(True) == 1


def test_logs_are_closed_in_parallel(harness, monkeypatch):
    """A disk does many syncs at a time; thousands of logs in sequence take minutes."""
    harness.broker.create_topic("t", partitions=8)
    barrier, close = threading.Barrier(8), PartitionLog.close
    monkeypatch.setattr(PartitionLog, "close", lambda log: barrier.wait(20) >= 0 and close(log))
    harness.broker.close()
    monkeypatch.undo()
    harness.broker = harness.open()
    assert harness.broker.folder.was_clean


def test_an_upload_retrying_against_the_store_does_not_delay_a_stop(harness):
    """The store is closed first, which ends uploads with their current request."""
    harness.restart(shutdown_timeout_ms=10)
    store, waits, closed, ends = harness.store, threading.Event(), threading.Event(), []

    def hang(*_, **__):
        waits.set()
        ends.append(closed.wait(20))
        raise ShuttingDown("closed")

    store.put_file, store.close = hang, closed.set
    harness.broker.create_topic("t", config=SMALL)
    fill(harness, "t", segments=2)
    assert waits.wait(20)
    harness.broker.close()
    assert ends == [True]


def test_background_work_stops_within_the_remaining_shutdown_timeout(harness, monkeypatch):
    stop, remaining_s = BackgroundTasks.stop, []

    def recording(background, deadline_s):
        remaining_s.append(deadline_s - time.monotonic())
        stop(background, deadline_s)

    harness.restart(shutdown_timeout_ms=50_000)
    monkeypatch.setattr(BackgroundTasks, "stop", recording)
    harness.broker.close()
    assert remaining_s[0] <= 10


def test_deleting_a_topic_ends_a_waiting_offload(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.wait_for(lambda: harness.broker.partition("t", 0).is_claimed)
    harness.set_down(True)
    fill(harness, "t", segments=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(harness.broker.offload, "t", wait_ms=60_000)
        harness.wait_for(lambda: harness.broker.partition("t", 0)._log.active_base_offset > 0)
        harness.broker.delete_topic("t")
        with pytest.raises(UnknownTopic):
            waiting.result(20)
