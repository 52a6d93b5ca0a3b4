"""A local segment file is missing in the middle of a log: its records are read from the bucket, or
reported as lost.
"""

import errno
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from broker.broker import Broker
from broker.segment_listing import iter_segments
from hot_tier.log import PartitionLog
from record_format.errors import CorruptDataError, DiskFull
from tests.fakes.compacted_topics import COMPACT, cold_records, compacted, put
from tests.fakes.house import tidy

CONFIG = {"segment.bytes": 1024, "retention.ms": -1, "local.retention.ms": -1}


def fill(house, segments, **config):
    """Create the topic with sealed segments of ten records."""
    house.broker.create_topic("t", config={**CONFIG, **config})
    house.stop_copying()
    produce(house, segments)


def produce(house, segments):
    for _ in range(segments):
        house.produce("t", [b"x" * 60] * 10)
        house.broker.partition("t", 0).log.roll()


def lose(house, *base_offsets, suffixes=("log", "index", "timeindex", "snapshot")):
    house.broker.close()
    for base_offset in base_offsets:
        for suffix in suffixes:
            (house.root / "data" / "t-0" / f"{base_offset:020d}.{suffix}").unlink(missing_ok=True)
    house.broker = house.open()
    house.stop_copying()


def segment_objects(house):
    return sorted(house.root.glob("bucket/topics/t/*/0/segments/*"))


def offsets(house):
    return [one.offset for one in house.records("t")]


@pytest.mark.parametrize(
    ("inline", "page", "local_start", "after_start"),
    [
        pytest.param(256, 128, 0, 20, id="entry inline in the manifest"),
        pytest.param(1, 2, 0, 20, id="entry in a page"),
        pytest.param(3, 4, 5, 5, id="page begins before the first file"),
    ],
)
def test_a_lost_segment_is_read_from_the_bucket(
    house, monkeypatch, inline, page, local_start, after_start
):
    monkeypatch.setattr("manifest.paging.INLINE_MAX", inline)
    monkeypatch.setattr("manifest.paging.SMALL_PAGE", page)
    house.broker.create_topic("t", config=CONFIG)
    house.stop_copying()
    house.produce("t", [b"x"] * 5)
    house.broker.partition("t", 0).log.roll()
    house.produce("t", [b"x"] * 5)
    house.broker.partition("t", 0).log.roll()
    produce(house, 4)
    house.copy_sealed()
    house.broker.partition("t", 0).log.delete_local(local_start)
    lose(house, 10)
    partition = house.copy_sealed()
    assert partition.log.first_local_offset == after_start
    tidy(house.broker)
    assert partition.log.first_local_offset == 20
    assert offsets(house) == list(range(50))
    assert house.broker.readiness().degraded == []
    assert house.broker.verify("t", deep=True).ok


@pytest.mark.parametrize(
    ("inline", "page", "first_local"),
    [
        pytest.param(256, 128, 30, id="entry inline in the manifest"),
        pytest.param(1, 2, 40, id="entry in a page"),
    ],
)
@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_a_lost_segment_of_a_compacted_log_is_read_from_the_bucket(
    house, monkeypatch, inline, page, first_local, policy
):
    """The next compaction would remove it from the bucket."""
    monkeypatch.setattr("manifest.paging.INLINE_MAX", inline)
    monkeypatch.setattr("manifest.paging.SMALL_PAGE", page)
    house.broker.create_topic("t", config={**COMPACT, "retention.ms": -1})
    house.stop_copying()
    for number in range(6):
        put(
            house,
            "t",
            [(b"%d" % (number * 10 + n), b"x" * 400) for n in range(8)] + [(b"k", b"x")] * 2,
        )
        house.broker.partition("t", 0).log.roll()
    house.copy_sealed()
    compacted(house, "t")
    assert house.copy_sealed().log.sealed.mirrored
    house.broker.alter_topic("t", config={"cleanup.policy": policy})
    before = house.records("t")
    assert len(before) == 49
    lose(house, 20)
    partition = house.broker.partition("t", 0)
    assert partition.log.first_local_offset == first_local
    assert house.records("t") == before
    house.broker.background.compactor.run_round()
    house.copy_sealed()
    assert house.records("t") == before == cold_records(house, "t")
    assert house.broker.verify("t", deep=True).ok


def test_a_segment_in_neither_tier_blocks_offload_until_its_loss_is_accepted(house):
    fill(house, 5)
    lose(house, 20)
    partition = house.copy_sealed()
    partition = house.copy_sealed()
    assert partition.cold.end_offset == 10, "the segment before the hole is uploaded"
    (degraded,) = house.broker.readiness().degraded
    assert "offsets 20 to 29 are missing" in degraded
    tidy(house.broker)
    (step,) = house.broker.repair("t", apply=True)
    assert (step.action, step.done) == ("drop-batches", False)
    assert "offsets 20 to 29 are lost" in step.detail
    (step,) = house.broker.repair("t", apply=True, accept_loss=True)
    assert step.done
    assert house.copy_sealed().cold.end_offset == 50
    assert offsets(house) == [*range(20), *range(30, 50)]
    assert house.broker.readiness().degraded == []
    assert house.broker.verify("t", deep=True).ok
    partition.log.delete_local(50)
    assert offsets(house) == [*range(20), *range(30, 50)]


@pytest.mark.parametrize("front_is_local", [True, False])
def test_a_hole_at_the_end_of_the_bucket_becomes_a_gap(house, front_is_local):
    fill(house, 2)
    partition = house.copy_sealed()
    produce(house, 3)
    if not front_is_local:
        partition.log.delete_local(20)
    lose(house, 20, 30)
    before = segment_objects(house)
    assert house.copy_sealed().cold.end_offset == 20
    assert segment_objects(house) == before, "nothing is uploaded in vain"
    (degraded,) = house.broker.readiness().degraded
    assert "offsets 20 to 39 are missing" in degraded
    (step,) = house.broker.repair("t")
    assert (step.action, step.base_offset, step.last_offset) == ("drop", 20, 39)
    (step,) = house.broker.repair("t", apply=True)
    assert step.done
    assert house.copy_sealed().cold.end_offset == 50
    assert house.broker.readiness().degraded == []
    tidy(house.broker)
    assert offsets(house) == [*range(20), *range(40, 50)]
    assert house.broker.verify("t", deep=True).ok


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_compacted_offsets_are_not_a_loss(house, policy):
    fill(house, 5, **{"cleanup.policy": "compact"})
    lose(house, 20)
    if policy == "compact":
        house.broker.background.compactor._cleaned.save({("t", 0): 50})
    house.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    house.copy_sealed()
    house.copy_sealed()
    partition = house.copy_sealed()
    assert partition.cold.end_offset == (50 if policy == "compact" else 10)
    assert house.broker.verify("t", deep=True).ok is (policy == "compact")


def test_compacted_offsets_of_a_local_topic_are_not_a_loss(house):
    fill(house, 5, **{"cleanup.policy": "compact", "remote.storage.enable": "false"})
    lose(house, 20)
    house.broker.background.compactor._cleaned.save({("t", 0): 50})
    house.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    assert house.broker.verify("t", deep=True).ok


def test_a_lost_segment_of_a_local_topic_is_reported(house):
    fill(house, 4, **{"remote.storage.enable": "false"})
    lose(house, 10)
    for _ in range(2):
        tidy(house.broker)
    (degraded,) = house.broker.readiness().degraded
    assert "t-0: offsets 10 to 19 are missing between two segments: a file was lost" in degraded
    assert offsets(house) == [*range(10), *range(20, 40)]
    house.broker.trim("t", 0, 20)
    assert house.broker.readiness().degraded == []


@pytest.mark.parametrize("has_bucket", [False, True])
def test_a_lost_segment_of_a_local_topic_is_repaired(house, has_bucket):
    fill(house, 4, **{"remote.storage.enable": "false"})
    lose(house, 10)
    if not has_bucket:
        house.broker.close()
        house.broker = Broker.open_idle(house.broker.settings, store=None)
    (step,) = house.broker.repair("t", deep=True, apply=True)
    assert (step.action, step.base_offset, step.done) == ("drop-batches", 0, False)
    (step,) = house.broker.repair("t", deep=True, apply=True, accept_loss=True)
    assert step.done
    tidy(house.broker)
    assert house.broker.readiness().degraded == []
    assert house.broker.repair("t", deep=True) == []
    assert house.broker.verify("t", deep=True).ok
    assert offsets(house) == [*range(10), *range(20, 40)]


def test_a_lost_segment_is_reported_once_remote_storage_is_disabled(house):
    fill(house, 5)
    lose(house, 20)
    house.broker.background.copier.claim(house.broker.partition("t", 0))
    tidy(house.broker)
    assert house.broker.readiness().degraded == [], "the copier reports it when it gets there"
    house.broker.alter_topic("t", config={"remote.storage.enable": "false"})
    (degraded,) = house.broker.readiness().degraded
    assert "offsets 20 to 29 are missing" in degraded
    house.broker.delete_topic("t")
    assert house.broker.readiness().degraded == []


def test_no_local_segment_is_deleted_before_compaction_is_mirrored(house, monkeypatch):
    """The bucket still has the state before compaction."""
    monkeypatch.setattr("manifest.paging.INLINE_MAX", 3)
    monkeypatch.setattr("manifest.paging.SMALL_PAGE", 4)
    fill(house, 5)
    house.copy_sealed().log.delete_local(10)
    lose(house, 20)
    partition = house.copy_sealed()
    partition.log._state.unmirrored = True
    tidy(house.broker)
    assert partition.log.first_local_offset == 10
    partition.log._state.unmirrored = False
    tidy(house.broker)
    assert partition.log.first_local_offset == 30


def test_a_start_succeeds_even_if_earlier_segments_cannot_be_deleted(house, monkeypatch):
    fill(house, 5)
    house.copy_sealed()

    def full(*_):
        raise DiskFull("t-0: no space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(PartitionLog, "delete_local", full)
        lose(house, 10)
    partition = house.copy_sealed()
    assert partition.log.first_local_offset == 0
    tidy(house.broker)
    assert partition.log.first_local_offset == 20
    assert offsets(house) == list(range(50))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_segment_lost_at_runtime_is_reported_not_a_bug(house, restarted):
    fill(house, 2)
    if restarted:  # closes all files
        house.restart(down=True, store_start_timeout_ms=200)
        house.stop_copying()
        house.set_down(False)
        house.broker.bucket.publish_topics(house.broker.registry)
    (house.root / "data" / "t-0" / f"{0:020d}.log").unlink()
    with capture_logs() as logs:
        partition = house.copy_sealed()
    assert not [line for line in logs if "bug" in line["event"]]
    (degraded,) = house.broker.readiness().degraded
    assert f"{0:020d}.log: {'is missing' if restarted else 'cannot be read'}" in degraded
    if restarted:
        with pytest.raises(CorruptDataError, match="the file was lost"):
            partition.read(0, max_bytes=1)


def corrupt_the_last_batch(path):
    """Corrupt its length, at a position that the time index points to."""
    data = bytearray(path.read_bytes())
    data[len(data) * 4 // 5 + 8] ^= 0x7F
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, corrupt_the_last_batch])
def test_a_damaged_segment_blocks_no_other(house, damage):
    """A clean start only lists the files; the damage is found when segments are read."""
    for topic in ("t", "u"):
        house.broker.create_topic(topic, config=CONFIG)
        house.stop_copying()
        for segment in range(4):
            for batch in range(5):
                house.produce(topic, [b"x" * 60] * 2, at=10 * segment + 2 * batch)
            house.broker.partition(topic, 0).log.roll()
    house.restart()
    house.stop_copying()
    damage(house.root / "data" / "t-0" / f"{20:020d}.log")
    for _ in range(2):  # the first round may only claim
        partition = house.copy_sealed()
    assert partition.cold.end_offset == 20
    assert house.broker.partition("u", 0).cold.end_offset == 40
    house.broker.storage_report()
    assert [one.base_offset for one in iter_segments(partition)] == [0, 10, 20, 30]
    (degraded,) = house.broker.readiness().degraded
    assert f"{20:020d}.log" in degraded
    for deep in (False, True):
        problems = house.broker.verify("t", deep=deep).problems
        assert [one.base_offset for one in problems] == (
            [20] if deep or damage is Path.unlink else []
        )
    (step,) = house.broker.repair("t", deep=True)
    assert step.base_offset == 20
    if damage is Path.unlink:
        assert partition.read(0, max_bytes=1 << 20).next_offset == 20
    with capture_logs() as logs:
        tidy(house.broker)
    assert not [line for line in logs if line["log_level"] in {"warning", "error"}]


def test_a_file_lost_at_runtime_is_read_from_the_bucket_after_a_repair(house):
    fill(house, 4)
    house.copy_sealed()
    house.restart()
    (house.root / "data" / "t-0" / f"{10:020d}.log").unlink()
    (problem,) = house.broker.verify("t").problems
    assert (problem.base_offset, problem.detail) == (10, "the file is missing")
    (step,) = house.broker.repair("t", apply=True, deep=True)
    assert (step.action, step.done) == ("set-aside", True)
    assert offsets(house) == list(range(40))
    assert house.broker.verify("t", deep=True).ok


def test_trimming_a_segment_during_its_upload_is_not_an_error(house, monkeypatch):
    fill(house, 2)
    put_file = house.store.put_file

    def trim_and_put(*args, **options):
        house.broker.trim("t", 0, 10)
        return put_file(*args, **options)

    monkeypatch.setattr(house.store, "put_file", trim_and_put, raising=False)
    with capture_logs() as logs:
        partition = house.copy_sealed()
    assert not [line for line in logs if line["log_level"] in {"warning", "error"}]
    assert partition.cold.end_offset == 20
    assert [entry.base_offset for entry in partition.cold.entries(0)] == [10]


def test_a_lack_of_file_descriptors_is_not_a_lost_file(house, monkeypatch):
    fill(house, 1)

    def refused(*_given, **_options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(house.store, "put_file", refused, raising=False)
    partition = house.copy_sealed()
    assert house.broker.readiness().degraded == []
    monkeypatch.undo()
    assert house.copy_sealed().cold.end_offset == 10
    assert partition.cold.end_offset == 10


def test_deleting_a_topic_during_its_upload_is_not_a_lost_file(house, monkeypatch):
    fill(house, 1)
    put_file = house.store.put_file

    def delete_and_put(*args, **options):
        house.broker.delete_topic("t")
        house.broker._topics.remove_files()
        return put_file(*args, **options)

    monkeypatch.setattr(house.store, "put_file", delete_and_put, raising=False)
    copier = house.broker.background.copier
    with capture_logs() as logs:
        copier.run_round()
        assert copier.wait_until_idle(timeout_s=20)
    assert not [line for line in logs if line["log_level"] in {"warning", "error"}]
    assert house.broker.readiness().degraded == []
