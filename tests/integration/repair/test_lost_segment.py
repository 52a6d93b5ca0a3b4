"""A local segment file is missing in the middle of a log: its records are read from the bucket, or
reported as lost.
"""

import errno
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fakes.broker_harness import run_janitor
from tests.fakes.compacted_topics import COMPACT, cold_records, compacted, put
from tierlog.broker.broker import Broker
from tierlog.broker.partition.segment_listing import iter_segments
from tierlog.hot_tier.log import PartitionLog
from tierlog.record_format.errors import CorruptDataError, DiskFull
from tierlog.repair.repair import repair_topic
from tierlog.repair.verify import verify_topic

CONFIG = {"segment.bytes": 1024, "retention.ms": -1, "local.retention.ms": -1}


def fill(harness, segments, **config):
    """Create the topic with sealed segments of ten records."""
    harness.broker.create_topic("t", config={**CONFIG, **config})
    harness.stop_copying()
    produce(harness, segments)


def produce(harness, segments):
    for _ in range(segments):
        harness.produce("t", [b"x" * 60] * 10)
        harness.broker.partition("t", 0).upkeep.roll()


def lose(harness, *base_offsets, suffixes=("log", "index", "timeindex", "snapshot")):
    harness.broker.close()
    for base_offset in base_offsets:
        for suffix in suffixes:
            (harness.root / "data" / "t-0" / f"{base_offset:020d}.{suffix}").unlink(missing_ok=True)
    harness.broker = harness.open()
    harness.stop_copying()


def segment_objects(harness):
    return sorted(harness.root.glob("bucket/topics/t/*/0/segments/*"))


def offsets(harness):
    return [one.offset for one in harness.records("t")]


@pytest.mark.parametrize(
    ("inline", "page", "local_start", "after_start"),
    [
        pytest.param(256, 128, 0, 20, id="entry inline in the manifest"),
        pytest.param(1, 2, 0, 20, id="entry in a page"),
        pytest.param(3, 4, 5, 5, id="page begins before the first file"),
    ],
)
def test_a_lost_segment_is_read_from_the_bucket(
    harness, monkeypatch, inline, page, local_start, after_start
):
    monkeypatch.setattr("tierlog.manifest.codec.INLINE_MAX", inline)
    monkeypatch.setattr("tierlog.manifest.codec.SMALL_PAGE", page)
    harness.broker.create_topic("t", config=CONFIG)
    harness.stop_copying()
    harness.produce("t", [b"x"] * 5)
    harness.broker.partition("t", 0).upkeep.roll()
    harness.produce("t", [b"x"] * 5)
    harness.broker.partition("t", 0).upkeep.roll()
    produce(harness, 4)
    harness.copy_sealed()
    harness.broker.partition("t", 0).upkeep.delete_local(local_start)
    lose(harness, 10)
    partition = harness.copy_sealed()
    assert partition.first_local_offset == after_start
    run_janitor(harness.broker)
    assert partition.first_local_offset == 20
    assert offsets(harness) == list(range(50))
    assert harness.broker.readiness().degraded == []
    assert verify_topic(harness.broker, "t", deep=True).ok


@pytest.mark.parametrize(
    ("inline", "page", "first_local"),
    [
        pytest.param(256, 128, 30, id="entry inline in the manifest"),
        pytest.param(1, 2, 40, id="entry in a page"),
    ],
)
@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_a_lost_segment_of_a_compacted_log_is_read_from_the_bucket(
    harness, monkeypatch, inline, page, first_local, policy
):
    """The next compaction would remove it from the bucket."""
    monkeypatch.setattr("tierlog.manifest.codec.INLINE_MAX", inline)
    monkeypatch.setattr("tierlog.manifest.codec.SMALL_PAGE", page)
    harness.broker.create_topic("t", config={**COMPACT, "retention.ms": -1})
    harness.stop_copying()
    for number in range(6):
        put(
            harness,
            "t",
            [(b"%d" % (number * 10 + n), b"x" * 400) for n in range(8)] + [(b"k", b"x")] * 2,
        )
        harness.broker.partition("t", 0).upkeep.roll()
    harness.copy_sealed()
    compacted(harness, "t")
    assert harness.copy_sealed().is_mirrored
    harness.broker.alter_topic("t", config={"cleanup.policy": policy})
    before = harness.records("t")
    assert len(before) == 49
    lose(harness, 20)
    partition = harness.broker.partition("t", 0)
    assert partition.first_local_offset == first_local
    assert harness.records("t") == before
    harness.broker.background.compactor.run_round()
    harness.copy_sealed()
    assert harness.records("t") == before == cold_records(harness, "t")
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_a_segment_in_neither_tier_blocks_offload_until_its_loss_is_accepted(harness):
    fill(harness, 5)
    lose(harness, 20)
    partition = harness.copy_sealed()
    partition = harness.copy_sealed()
    assert partition.cold_end_offset == 10, "the segment before the hole is uploaded"
    (degraded,) = harness.broker.readiness().degraded
    assert "offsets 20 to 29 are missing" in degraded
    run_janitor(harness.broker)
    (step,) = repair_topic(harness.broker, "t", apply=True)
    assert (step.action, step.done) == ("drop-batches", False)
    assert "offsets 20 to 29 are lost" in step.detail
    (step,) = repair_topic(harness.broker, "t", apply=True, accept_loss=True)
    assert step.done
    assert harness.copy_sealed().cold_end_offset == 50
    assert offsets(harness) == [*range(20), *range(30, 50)]
    assert harness.broker.readiness().degraded == []
    assert verify_topic(harness.broker, "t", deep=True).ok
    partition.upkeep.delete_local(50)
    assert offsets(harness) == [*range(20), *range(30, 50)]


@pytest.mark.parametrize("front_is_local", [True, False])
def test_a_hole_at_the_end_of_the_bucket_becomes_a_gap(harness, front_is_local):
    fill(harness, 2)
    partition = harness.copy_sealed()
    produce(harness, 3)
    if not front_is_local:
        partition.upkeep.delete_local(20)
    lose(harness, 20, 30)
    before = segment_objects(harness)
    assert harness.copy_sealed().cold_end_offset == 20
    assert segment_objects(harness) == before, "nothing is uploaded in vain"
    (degraded,) = harness.broker.readiness().degraded
    assert "offsets 20 to 39 are missing" in degraded
    (step,) = repair_topic(harness.broker, "t")
    assert (step.action, step.base_offset, step.last_offset) == ("drop", 20, 39)
    (step,) = repair_topic(harness.broker, "t", apply=True)
    assert step.done
    assert harness.copy_sealed().cold_end_offset == 50
    assert harness.broker.readiness().degraded == []
    run_janitor(harness.broker)
    assert offsets(harness) == [*range(20), *range(40, 50)]
    assert verify_topic(harness.broker, "t", deep=True).ok


def mark_compacted(harness):
    harness.broker._topics.compaction_offsets.end_round(harness.broker.partition("t", 0), 50)


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_compacted_offsets_are_not_a_loss(harness, policy):
    fill(harness, 5, **{"cleanup.policy": "compact"})
    lose(harness, 20)
    if policy == "compact":
        mark_compacted(harness)
    harness.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    harness.copy_sealed()
    harness.copy_sealed()
    partition = harness.copy_sealed()
    assert partition.cold_end_offset == (50 if policy == "compact" else 10)
    assert verify_topic(harness.broker, "t", deep=True).ok is (policy == "compact")


def test_compacted_offsets_of_a_local_topic_are_not_a_loss(harness):
    fill(harness, 5, **{"cleanup.policy": "compact", "remote.storage.enable": "false"})
    lose(harness, 20)
    mark_compacted(harness)
    harness.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_a_lost_segment_of_a_local_topic_is_reported(harness):
    fill(harness, 4, **{"remote.storage.enable": "false"})
    lose(harness, 10)
    for _ in range(2):
        run_janitor(harness.broker)
    (degraded,) = harness.broker.readiness().degraded
    assert "t-0: offsets 10 to 19 are missing between two segments: a file was lost" in degraded
    assert offsets(harness) == [*range(10), *range(20, 40)]
    harness.broker.trim("t", 0, 20)
    assert harness.broker.readiness().degraded == []


@pytest.mark.parametrize("has_bucket", [False, True])
def test_a_lost_segment_of_a_local_topic_is_repaired(harness, has_bucket):
    fill(harness, 4, **{"remote.storage.enable": "false"})
    lose(harness, 10)
    if not has_bucket:
        harness.broker.close()
        harness.broker = Broker.open_idle(harness.broker.settings, store=None)
    (step,) = repair_topic(harness.broker, "t", deep=True, apply=True)
    assert (step.action, step.base_offset, step.done) == ("drop-batches", 0, False)
    (step,) = repair_topic(harness.broker, "t", deep=True, apply=True, accept_loss=True)
    assert step.done
    run_janitor(harness.broker)
    assert harness.broker.readiness().degraded == []
    assert repair_topic(harness.broker, "t", deep=True) == []
    assert verify_topic(harness.broker, "t", deep=True).ok
    assert offsets(harness) == [*range(10), *range(20, 40)]


def test_a_lost_segment_is_reported_once_remote_storage_is_disabled(harness):
    fill(harness, 5)
    lose(harness, 20)
    harness.broker.partition("t", 0).claim()
    run_janitor(harness.broker)
    assert harness.broker.readiness().degraded == [], "the copier reports it when it gets there"
    harness.broker.alter_topic("t", config={"remote.storage.enable": "false"})
    (degraded,) = harness.broker.readiness().degraded
    assert "offsets 20 to 29 are missing" in degraded
    harness.broker.delete_topic("t")
    assert harness.broker.readiness().degraded == []


def test_no_local_segment_is_deleted_before_compaction_is_mirrored(harness, monkeypatch):
    """The bucket still has the state before compaction."""
    monkeypatch.setattr("tierlog.manifest.codec.INLINE_MAX", 3)
    monkeypatch.setattr("tierlog.manifest.codec.SMALL_PAGE", 4)
    fill(harness, 5)
    harness.copy_sealed().upkeep.delete_local(10)
    lose(harness, 20)
    partition = harness.copy_sealed()
    partition._log._state.unmirrored = True
    run_janitor(harness.broker)
    assert partition.first_local_offset == 10
    partition._log._state.unmirrored = False
    run_janitor(harness.broker)
    assert partition.first_local_offset == 30


def test_a_start_succeeds_even_if_earlier_segments_cannot_be_deleted(harness, monkeypatch):
    fill(harness, 5)
    harness.copy_sealed()

    def full(*_):
        raise DiskFull("t-0: no space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(PartitionLog, "delete_local", full)
        lose(harness, 10)
    partition = harness.copy_sealed()
    assert partition.first_local_offset == 0
    run_janitor(harness.broker)
    assert partition.first_local_offset == 20
    assert offsets(harness) == list(range(50))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_segment_lost_at_runtime_is_reported_not_a_bug(harness, restarted):
    fill(harness, 2)
    if restarted:  # closes all files
        harness.restart(down=True, store_start_timeout_ms=200)
        harness.stop_copying()
        harness.set_down(False)
        harness.broker.bucket.publish_topics(harness.broker.registry)
    (harness.root / "data" / "t-0" / f"{0:020d}.log").unlink()
    with capture_logs() as logs:
        partition = harness.copy_sealed()
    assert not [line for line in logs if "bug" in line["event"]]
    (degraded,) = harness.broker.readiness().degraded
    assert f"{0:020d}.log: is missing" in degraded
    if restarted:
        with pytest.raises(CorruptDataError, match="the file was lost"):
            partition.read(0, max_bytes=1)


def corrupt_the_last_batch(path):
    """Corrupt its length, at a position that the time index points to."""
    data = bytearray(path.read_bytes())
    data[len(data) * 4 // 5 + 8] ^= 0x7F
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, corrupt_the_last_batch])
def test_a_damaged_segment_blocks_no_other(harness, damage):
    """A clean start only lists the files; the damage is found when segments are read."""
    for topic in ("t", "u"):
        harness.broker.create_topic(topic, config=CONFIG)
        harness.stop_copying()
        for segment in range(4):
            for batch in range(5):
                harness.produce(topic, [b"x" * 60] * 2, at=10 * segment + 2 * batch)
            harness.broker.partition(topic, 0).upkeep.roll()
    harness.restart()
    harness.stop_copying()
    damage(harness.root / "data" / "t-0" / f"{20:020d}.log")
    for _ in range(2):  # the first round may only claim
        partition = harness.copy_sealed()
    assert partition.cold_end_offset == 20
    assert harness.broker.partition("u", 0).cold_end_offset == 40
    harness.broker.storage_report()
    assert [one.base_offset for one in iter_segments(partition)] == [0, 10, 20, 30]
    (degraded,) = harness.broker.readiness().degraded
    assert f"{20:020d}.log" in degraded
    for deep in (False, True):
        problems = verify_topic(harness.broker, "t", deep=deep).problems
        assert [one.base_offset for one in problems] == (
            [20] if deep or damage is Path.unlink else []
        )
    (step,) = repair_topic(harness.broker, "t", deep=True)
    assert step.base_offset == 20
    if damage is Path.unlink:
        assert partition.read(0, max_bytes=1 << 20).next_offset == 20
    with capture_logs() as logs:
        run_janitor(harness.broker)
    assert not [line for line in logs if line["log_level"] in {"warning", "error"}]


def test_a_file_lost_at_runtime_is_read_from_the_bucket_after_a_repair(harness):
    fill(harness, 4)
    harness.copy_sealed()
    harness.restart()
    (harness.root / "data" / "t-0" / f"{10:020d}.log").unlink()
    (problem,) = verify_topic(harness.broker, "t").problems
    assert (problem.base_offset, problem.detail) == (10, "the file is missing")
    (step,) = repair_topic(harness.broker, "t", apply=True, deep=True)
    assert (step.action, step.done) == ("set-aside", True)
    assert offsets(harness) == list(range(40))
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_trimming_a_segment_during_its_upload_is_not_an_error(harness, monkeypatch):
    fill(harness, 2)
    put_file = harness.store.put_file

    def trim_and_put(*args, **options):
        harness.broker.trim("t", 0, 10)
        return put_file(*args, **options)

    monkeypatch.setattr(harness.store, "put_file", trim_and_put, raising=False)
    with capture_logs() as logs:
        partition = harness.copy_sealed()
    assert not [line for line in logs if line["log_level"] in {"warning", "error"}]
    assert partition.cold_end_offset == 20
    assert [entry.base_offset for entry in partition.cold_entries(0)] == [10]


def test_a_lack_of_file_descriptors_is_not_a_lost_file(harness, monkeypatch):
    fill(harness, 1)

    def refused(*_given, **_options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(harness.store, "put_file", refused, raising=False)
    partition = harness.copy_sealed()
    assert harness.broker.readiness().degraded == []
    monkeypatch.undo()
    assert harness.copy_sealed().cold_end_offset == 10
    assert partition.cold_end_offset == 10


def test_deleting_a_topic_during_its_upload_is_not_a_lost_file(harness, monkeypatch):
    fill(harness, 1)
    put_file = harness.store.put_file

    def delete_and_put(*args, **options):
        harness.broker.delete_topic("t")
        (record,) = harness.broker.registry.deleted()
        harness.broker._topics.remove_files(record)
        return put_file(*args, **options)

    monkeypatch.setattr(harness.store, "put_file", delete_and_put, raising=False)
    copier = harness.broker.background.copier
    with capture_logs() as logs:
        copier.run_round()
        assert copier.wait_until_idle(timeout_s=20)
    assert not [line for line in logs if line["log_level"] in {"warning", "error"}]
    assert harness.broker.readiness().degraded == []
