"""One partition with corrupt flushed bytes: it is reported and kept, others are served."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.compacted_topics import COMPACT, compacted, fill
from tests.fakes.damage import flip
from tests.fakes.faulty_disk import FaultyDisk
from tierlog.broker.data_folder.data_folder import HIGH_WATERMARKS
from tierlog.broker.group_coordinator.groups import NewOffset, OffsetState
from tierlog.hot_tier.open_files import OpenFiles
from tierlog.record_format.errors import (
    CorruptBatch,
    CorruptDataError,
    LogOfflineError,
    UnknownTopic,
)
from tierlog.repair.repair import repair_topic
from tierlog.repair.verify import verify_topic

CLEAN_MARKER = ".kafka_cleanshutdown"


def crash(harness) -> None:
    """Leave the folder as a kill does: checkpoints, but no clean shutdown marker."""
    harness.broker.close()
    (harness.root / "data" / CLEAN_MARKER).unlink()


@pytest.fixture
def damaged(harness):
    """Topic `t` of three partitions; partition 1 has a flipped byte in flushed data."""
    harness.broker.create_topic("t", partitions=3)
    for partition in range(3):
        for number in range(5):
            harness.produce("t", [b"%d-%d" % (partition, number)], partition=partition)
    crash(harness)
    flip(harness.root / "data" / "t-1" / "00000000000000000000.log", 100)
    harness.broker = harness.open()
    return harness


def test_other_partitions_are_served_and_the_damaged_one_reports_why(damaged):
    for partition in (0, 2):
        damaged.produce("t", [b"more"], partition=partition)
        assert len(damaged.records("t", partition=partition)) == 6
    with pytest.raises(CorruptBatch, match="was flushed") as refused:
        damaged.broker.partition("t", 1)
    assert refused.value.file.endswith("t-1/00000000000000000000.log")
    assert (refused.value.position, refused.value.offset) == (71, 1)
    (reason,) = damaged.broker.readiness().reasons
    assert reason.startswith("t-1: ")
    described = damaged.broker.topic("t").describe()
    assert [one.partition for one in described.partitions] == [0, 2]
    assert [one.partition for one in described.damaged_partitions] == [1]


def test_files_and_checkpoints_of_a_damaged_partition_are_kept(damaged):
    log = damaged.root / "data" / "t-1" / "00000000000000000000.log"
    before = log.read_bytes()
    for _ in range(2):  # a clean stop of the others does not make it clean
        damaged.broker.checkpoints.save()
        damaged.restart()
        assert damaged.broker.topic("t").damaged[1].recovery_point == 5
    assert log.read_bytes() == before


def test_a_damaged_partition_keeps_its_rows_also_if_its_log_starts_at_0_in_the_bucket(harness):
    """Without the row, and with the manifest's copy lost too, the log would start on disk."""
    limits = {"segment.bytes": 4096, "retention.ms": -1, "local.retention.bytes": 8192}
    harness.broker.create_topic("t", config=limits)
    harness.fill(200)
    harness.offload()
    assert harness.broker.partition("t", 0).first_local_offset > 0
    harness.fill(10)
    crash(harness)
    flip(max((harness.root / "data" / "t-0").glob("*.log")), 100)
    harness.broker = harness.open()
    for _ in range(2):
        assert harness.broker.topic("t").damaged[0].log_start_offset == 0
        rows = harness.broker.folder.read_checkpoint(HIGH_WATERMARKS)
        assert rows == {("t", 0): 210}, "the remedy for lost recovery points is a copy of these"
        harness.restart()


def test_the_cleaner_checkpoint_of_a_damaged_partition_is_kept(harness):
    """Otherwise the gaps of a topic that is no longer compacted count as lost files."""
    for topic in ("bad", "good", "gone"):
        harness.broker.create_topic(topic, config=COMPACT)
        fill(harness, topic, 300)
        compacted(harness, topic)
    harness.broker.delete_topic("gone")
    harness.produce("bad", [b"one more" * 20])
    crash(harness)
    flip(max((harness.root / "data" / "bad-0").glob("*.log")), 100)
    harness.broker = harness.open()
    assert harness.broker.topic("bad").damaged
    fill(harness, "good", 300, seed=2)
    compacted(harness, "good")
    for name in ("cleaner-offset-checkpoint", "tierlog/compaction-reached"):
        rows = (harness.root / "data" / name).read_text().splitlines()[2:]
        assert [row.split()[0] for row in sorted(rows)] == ["bad", "good"], name


def test_its_topic_can_gain_partitions_and_be_deleted(damaged):
    grown = damaged.broker.alter_topic("t", partitions=4)
    assert [one.partition for one in grown.partitions] == [0, 2, 3]
    damaged.broker.delete_topic("t")
    damaged.wait_for(lambda: not list((damaged.root / "data").glob("t-*")))
    assert damaged.broker.readiness().reasons == []


def test_verify_reports_a_damaged_partition(damaged):
    problems = verify_topic(damaged.broker, "t").problems
    assert [(one.kind, one.partition) for one in problems] == [("segment-corrupt", 1)]


def test_group_lag_uses_the_checkpoint_of_a_damaged_partition(harness):
    harness.broker.create_topic("t", partitions=2)
    for partition in range(2):
        for _ in range(5):
            harness.produce("t", [b"v"], partition=partition)
    harness.broker.groups.commit_offsets("g", [NewOffset("t", 0, 2), NewOffset("t", 1, 3)])
    crash(harness)
    flip(harness.root / "data" / "t-1" / "00000000000000000000.log", 100)
    harness.broker = harness.open()
    shown = [OffsetState("t", 0, 2, 5, 3, ""), OffsetState("t", 1, 3, 5, 2, "")]
    assert harness.broker.groups.group("g") == shown
    assert list(harness.broker.groups.all_groups()) == [("g", shown)]


def test_a_partition_on_a_failing_disk_is_offline(harness, monkeypatch):
    harness.broker.create_topic("t", partitions=2)
    for partition in range(2):
        harness.produce("t", [b"fine"], partition=partition)
    harness.broker.close()

    def fail_for_t_1(fd, size_bytes, position):
        if Path(f"/proc/self/fd/{fd}").readlink().parent.name == "t-1":
            raise OSError(errno.EIO, "Input/output error")
        return os.pread(fd, size_bytes, position)

    monkeypatch.setattr(OpenFiles, "pread", staticmethod(fail_for_t_1))
    harness.broker = harness.open()
    assert [one.value for one in harness.records("t", partition=0)] == [b"fine"]
    with pytest.raises(LogOfflineError, match="t-1: the disk failed"):
        harness.broker.partition("t", 1)
    monkeypatch.undo()
    harness.restart()
    assert [one.value for one in harness.records("t", partition=1)] == [b"fine"]


def test_a_topic_is_not_created_if_the_disk_fails(harness, monkeypatch):
    disk = FaultyDisk()
    disk.fail("sync_folder")
    monkeypatch.setattr(harness.broker._opener, "_disk", disk)
    with pytest.raises(LogOfflineError, match="the disk failed"):
        harness.broker.create_topic("t", partitions=2)
    with pytest.raises(UnknownTopic):
        harness.broker.topic("t")
    disk.heal()
    harness.broker.create_topic("t", partitions=2)
    harness.produce("t", [b"fine"])


def test_records_only_on_disk_are_truncated_only_with_accept_loss(damaged):
    data = damaged.root / "data"
    original = (data / "t-1" / "00000000000000000000.log").read_bytes()
    (step,) = [one for one in repair_topic(damaged.broker, "t", apply=True) if one.partition == 1]
    assert (step.action, step.done) == ("cut", False)
    assert "from 1 on (5 had been flushed) are lost" in step.detail
    with pytest.raises(CorruptBatch):
        damaged.broker.partition("t", 1)

    (step,) = [
        one for one in repair_topic(damaged.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert step.detail.endswith("set aside in t-1-1")
    assert [one.value for one in damaged.records("t", partition=1)] == [b"1-0"]
    aside = data / "tierlog" / "damaged" / "t-1-1" / "00000000000000000000.log"
    assert aside.read_bytes() == original
    assert damaged.broker.readiness().reasons == []
    damaged.produce("t", [b"next"], partition=1)
    damaged.restart()
    assert len(damaged.records("t", partition=1)) == 2
    crash(damaged)
    flip(data / "t-1" / "00000000000000000000.log", 100)  # a defect of the disk at that position
    damaged.broker = damaged.open()
    (step,) = [
        one for one in repair_topic(damaged.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert "t-1-1.2" in step.detail
    assert aside.read_bytes() == original


def test_a_corrupt_header_in_a_segment_ending_at_the_recovery_point_is_repaired(harness):
    harness.broker.create_topic("t", config={"remote.storage.enable": False})
    for number in range(5):
        harness.produce("t", [b"%d" % number])
    harness.broker.partition("t", 0).upkeep.roll()
    crash(harness)
    flip(harness.root / "data" / "t-0" / "00000000000000000000.log", 2 * 69 + 16)  # the magic
    harness.broker = harness.open()
    with pytest.raises(CorruptBatch, match="only version 2") as refused:
        harness.broker.partition("t", 0)
    assert refused.value.file.endswith("t-0/00000000000000000000.log")
    assert (refused.value.position, refused.value.offset) == (2 * 69, 2)
    (step,) = repair_topic(harness.broker, "t", apply=True, accept_loss=True)
    assert (step.action, step.done) == ("cut", True)
    assert [one.value for one in harness.records("t")] == [b"0", b"1"]


def crash_before_a_checkpoint(harness) -> None:
    crash(harness)
    for name in ("recovery-point-offset-checkpoint", HIGH_WATERMARKS):
        (harness.root / "data" / name).write_text("0\n0\n")


def test_whole_batches_behind_a_corrupt_one_are_kept_though_no_checkpoint_knows_them(harness):
    harness.broker.create_topic("t", partitions=2)
    for number in range(15):
        harness.produce("t", [b"%d" % number])
    harness.produce("t", [b"fine"], partition=1)
    crash_before_a_checkpoint(harness)
    log = harness.root / "data" / "t-0" / "00000000000000000000.log"
    flip(log, 69 + 65)
    before = log.read_bytes()
    harness.broker = harness.open()
    (reason,) = harness.broker.readiness().reasons
    assert reason.startswith("t-0: ")
    assert "offset 1: checksum is" in reason
    assert [(one.kind, one.partition) for one in verify_topic(harness.broker, "t").problems] == [
        ("segment-corrupt", 0)
    ]
    (step,) = [one for one in repair_topic(harness.broker, "t", apply=True) if one.partition == 0]
    assert (step.action, step.done) == ("cut", False)
    assert "offsets from 1 on" in step.detail
    assert "whole batches up to offset 14 go with the corrupt one" in step.detail
    with pytest.raises(CorruptBatch, match="whole batches that continue the log follow"):
        harness.produce("t", [b"at a used offset"])
    assert log.read_bytes() == before
    harness.restart()
    (step,) = [
        one for one in repair_topic(harness.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert harness.broker.readiness().reasons == []
    assert [one.value for one in harness.records("t")] == [b"0"]
    harness.produce("t", [b"next"])


def test_a_corrupt_commit_hides_no_later_one(harness):
    harness.broker.create_topic("t")
    harness.produce("t", [b"v"] * 9)
    for offset in (2, 3, 4):
        harness.broker.groups.commit_offsets("g", [NewOffset("t", 0, offset)])
    crash_before_a_checkpoint(harness)
    (log,) = (
        path
        for path in (harness.root / "data").glob("__consumer_offsets-*/*.log")
        if path.stat().st_size
    )
    before = log.read_bytes()
    flip(log, 70)
    harness.broker = harness.open()
    (reason,) = harness.broker.readiness().reasons
    assert reason.startswith("__consumer_offsets-")
    flip(log, 70)
    assert log.read_bytes() == before
    harness.restart()
    assert harness.broker.groups.group("g") == [OffsetState("t", 0, 4, 9, 5, "")]


def test_what_a_start_cut_is_reported_until_its_file_is_deleted(harness):
    harness.broker.create_topic("t")
    harness.produce("t", [b"whole"])
    crash(harness)
    log = harness.root / "data" / "t-0" / "00000000000000000000.log"
    log.write_bytes(log.read_bytes() + b"torn")
    harness.broker = harness.open()
    kept = log.with_name("00000000000000000001.log.cut")
    assert kept.read_bytes() == b"torn"
    for _ in range(2):
        reasons, (degraded,) = harness.broker.readiness()
        assert not reasons
        assert degraded.startswith("t-0: ")
        assert str(kept) in degraded
        harness.restart()
    kept.unlink()
    assert harness.broker.readiness().degraded == []


def test_a_segment_with_a_record_that_the_bucket_lacks_is_not_set_aside(harness):
    harness.broker.create_topic("t", config={"retention.ms": -1})
    harness.produce("t", [b"v"] * 10)
    harness.offload()
    harness.stop_copying()
    harness.produce("t", [b"only on disk"])
    harness.broker.partition("t", 0).upkeep.roll()
    crash(harness)
    flip(harness.root / "data" / "t-0" / f"{10:020d}.log", 16)  # the magic
    harness.broker = harness.open()
    (step,) = repair_topic(harness.broker, "t", apply=True)
    assert (step.action, step.base_offset, step.done) == ("cut", 10, False)


def test_a_crash_after_a_repair_reports_no_loss(damaged, tmp_path):
    """An earlier checkpoint says that the log had reached further."""
    repair_topic(damaged.broker, "t", apply=True, accept_loss=True)
    damaged.produce("t", [b"next"], partition=1)
    data = damaged.root / "data"
    shutil.copytree(data, tmp_path / "crashed", ignore=shutil.ignore_patterns(".lock"))
    damaged.broker.close()
    shutil.rmtree(data)
    (tmp_path / "crashed").rename(data)
    damaged.broker = damaged.open()
    assert [one.value for one in damaged.records("t", partition=1)] == [b"1-0", b"next"]


def test_corrupt_records_that_were_uploaded_are_read_from_the_bucket(harness):
    """The last checkpoint lies in the middle of a segment that was sealed and uploaded since."""
    harness.broker.create_topic("t", config={"segment.bytes": 1024, "retention.ms": -1})
    harness.produce("t", [b"first"])
    harness.broker.checkpoints.save()
    checkpoint = (harness.root / "data" / "recovery-point-offset-checkpoint").read_bytes()
    for number in range(40):
        harness.produce("t", [b"%d" % number * 40])
    harness.offload()
    harness.produce("t", [b"only hot"])
    before = [record.value for record in harness.records("t")]
    crash(harness)
    (harness.root / "data" / "recovery-point-offset-checkpoint").write_bytes(checkpoint)
    flip(harness.root / "data" / "t-0" / "00000000000000000000.log", 64)
    harness.broker = harness.open()
    assert "t-0" in harness.broker.readiness().reasons[0]

    (step,) = [one for one in repair_topic(harness.broker, "t") if one.action == "set-aside"]
    assert not step.done
    (step,) = [one for one in repair_topic(harness.broker, "t", apply=True) if one.done]
    assert step.action == "set-aside"
    assert [record.value for record in harness.records("t")] == before
    assert harness.broker.partition("t", 0).offsets().local_log_start_offset > 0


@pytest.fixture
def offloaded(harness):
    """Offsets 0 to 19 in the bucket, 20 to 39 only on disk, in segments of ten."""
    harness.broker.create_topic("t", config={"segment.bytes": 1024, "retention.ms": -1})
    for number in range(4):
        if number == 2:
            harness.offload()
            harness.stop_copying()
        harness.produce("t", [b"%d" % number * 60] * 10)
    return harness


def lose_the_last_segment(harness):
    max((harness.root / "data" / "t-0").glob("*.log")).unlink()


def lose_the_folder(harness):
    shutil.rmtree(harness.root / "data" / "t-0")


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize(("lose", "end"), [(lose_the_last_segment, 30), (lose_the_folder, 20)])
def test_a_log_that_lost_flushed_records_is_refused_and_reuses_no_offset(
    offloaded, lose, end, is_clean
):
    if is_clean:
        offloaded.broker.close()
    else:
        offloaded.broker.checkpoints.save()
        crash(offloaded)
    lose(offloaded)
    for _ in range(2):
        offloaded.restart()
        with pytest.raises(CorruptBatch, match=f"offset {end}: .* it had reached offset 40"):
            offloaded.broker.partition("t", 0)
    (step,) = repair_topic(offloaded.broker, "t", apply=True)
    assert (step.action, step.done) == ("cut", False)
    assert f"offsets from {end} on (40 had been flushed) are lost" in step.detail
    (step,) = [
        one for one in repair_topic(offloaded.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert offloaded.produce("t", [b"next"]).base_offset == end
    offloaded.restart()
    assert [record.offset for record in offloaded.records("t")] == list(range(end + 1))


def test_a_log_corrupt_below_the_buckets_end_and_without_its_end_continues_there(offloaded):
    offloaded.broker.checkpoints.save()
    crash(offloaded)
    _, second, *lost = sorted((offloaded.root / "data" / "t-0").glob("*.log"))
    for path in lost:
        path.unlink()
    flip(second, second.stat().st_size - 1)
    offloaded.broker = offloaded.open()
    (step,) = [
        one for one in repair_topic(offloaded.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert "offsets from the bucket's end 20 on are lost" in step.detail
    assert offloaded.produce("t", [b"next"]).base_offset == 20
    offloaded.restart()
    assert [record.offset for record in offloaded.records("t")] == list(range(21))


def test_a_log_whose_folder_was_lost_in_a_crash_reuses_no_offset(harness):
    """The last checkpoint was written before the records that only the disk had."""
    harness.broker.create_topic("t", config={"retention.ms": -1})
    harness.fill(20)
    harness.offload()
    harness.broker.checkpoints.save()
    checkpoint = harness.root / "data" / "recovery-point-offset-checkpoint"
    before = checkpoint.read_bytes()
    harness.stop_copying()
    harness.fill(20)
    crash(harness)
    checkpoint.write_bytes(before)
    lose_the_folder(harness)
    for _ in range(2):
        harness.restart()
        with pytest.raises(CorruptBatch, match="no segment is left, and it had reached offset 20"):
            harness.broker.partition("t", 0)
    (step,) = [
        one for one in repair_topic(harness.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert "offsets from 20 on (20 had been flushed) are lost" in step.detail
    assert harness.produce("t", [b"next"]).base_offset == 20
    harness.restart()
    assert [record.offset for record in harness.records("t")] == list(range(21))


def test_offsets_in_neither_tier_are_reported_and_repaired_into_a_gap(offloaded):
    """The first of the segments that only the disk had is lost."""
    offloaded.broker.close()
    for base in (0, 10, 20):
        (offloaded.root / "data" / "t-0" / f"{base:020d}.log").unlink()
    offloaded.broker = offloaded.open()
    assert len(offloaded.broker.partition("t", 0).read(0, max_bytes=1 << 20).slices) > 0
    with pytest.raises(CorruptDataError, match="offsets 20 to 29 are in neither tier"):
        offloaded.broker.partition("t", 0).read(20, max_bytes=1)
    (step,) = repair_topic(offloaded.broker, "t", apply=True)
    assert (step.action, step.base_offset, step.last_offset, step.done) == ("drop", 20, 29, True)
    assert [record.offset for record in offloaded.records("t")] == [*range(20), *range(30, 40)]
    offloaded.offload()
    assert verify_topic(offloaded.broker, "t", deep=True).ok
    assert repair_topic(offloaded.broker, "t") == []


def test_trimmed_offsets_are_not_reported_as_lost(offloaded):
    """The trim has not reached the bucket."""
    offloaded.set_down(True)
    offloaded.broker.trim("t", 0, 30)
    offloaded.set_down(False)
    assert offloaded.broker.partition("t", 0).first_local_offset == 30
    assert repair_topic(offloaded.broker, "t", apply=True) == []
    assert offloaded.broker.partition("t", 0).manifest.gaps == ()


def test_an_older_copy_of_a_folder_is_fenced_by_the_bucket(offloaded, tmp_path):
    """It knows the current epoch, and all but one commit under it."""
    data = offloaded.root / "data"
    offloaded.upload_sealed()
    offloaded.broker.checkpoints.save()
    shutil.copytree(data, tmp_path / "older")
    offloaded.produce("t", [b"4" * 60] * 10)
    offloaded.broker.partition("t", 0).upkeep.roll()
    offloaded.upload_sealed()
    offloaded.broker.close()
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "older", data)
    offloaded.broker = offloaded.open()
    partition = offloaded.broker.partition("t", 0)
    offloaded.wait_for(lambda: partition.leadership_lost is not None)
    assert "the bucket reaches offset 50, this folder only 40" in partition.leadership_lost
    offloaded.restart()
    with pytest.raises(CorruptBatch, match="it had reached offset 50"):
        offloaded.broker.partition("t", 0)
    (step,) = [
        one for one in repair_topic(offloaded.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert "offsets from the bucket's end 50 on are lost" in step.detail
    assert offloaded.produce("t", [b"next"]).base_offset == 50
    assert [record.offset for record in offloaded.records("t")] == list(range(51))


def test_a_lost_folder_is_re_created_if_the_bucket_has_everything(offloaded):
    offloaded.broker.background.copier.run_round()
    assert offloaded.broker.offload("t", wait_ms=10_000)
    offloaded.upload_sealed()
    offloaded.broker.close()
    lose_the_folder(offloaded)
    offloaded.broker = offloaded.open()
    assert offloaded.produce("t", [b"next"]).base_offset == 40
    assert [record.offset for record in offloaded.records("t")] == list(range(41))


METADATA = b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA"


@pytest.mark.parametrize("position", range(0, len(METADATA), 3))
def test_a_bit_of_its_metadata_stops_one_partition(harness, position):
    harness.broker.create_topic("t", partitions=2)
    for number in range(2):
        harness.produce("t", [b"v"], partition=number)
    crash(harness)
    metadata = harness.root / "data" / "t-1" / "partition.metadata"
    flip(metadata, position)
    harness.broker = harness.open()
    assert [one.value for one in harness.records("t", partition=0)] == [b"v"]
    with pytest.raises(CorruptDataError, match="`rm` the file if the folder is this topic's"):
        harness.broker.partition("t", 1)
    harness.broker.close()
    metadata.unlink()
    harness.broker = harness.open()
    assert [one.value for one in harness.records("t", partition=1)] == [b"v"]
