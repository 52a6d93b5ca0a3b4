"""One partition whose flushed bytes are bad: it says so, is kept as it is, and the others serve."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from broker.groups.groups import OffsetState
from broker.groups.requests import NewOffset
from hot_tier.open_files import OpenFiles
from record_format.errors import CorruptBatch, CorruptDataError, LogOfflineError, UnknownTopic
from tests.fakes.compacted_topics import COMPACT, compacted, fill
from tests.fakes.damage import flip
from tests.fakes.faulty_disk import FaultyDisk

CLEAN_MARKER = ".kafka_cleanshutdown"


def crash(house) -> None:
    """What a kill leaves: checkpoints, and nothing that says that the stop was clean."""
    house.broker.close()
    (house.root / "data" / CLEAN_MARKER).unlink()


@pytest.fixture
def damaged(house):
    """Topic `t` of three partitions; partition 1 has a flipped byte in what was flushed."""
    house.broker.create_topic("t", partitions=3)
    for partition in range(3):
        for number in range(5):
            house.produce("t", [b"%d-%d" % (partition, number)], partition=partition)
    crash(house)
    flip(house.root / "data" / "t-1" / "00000000000000000000.log", 100)
    house.broker = house.open()
    return house


def test_the_others_serve_and_the_bad_one_says_why(damaged):
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


def test_its_checkpoints_and_files_stay_as_they_were(damaged):
    log = damaged.root / "data" / "t-1" / "00000000000000000000.log"
    before = log.read_bytes()
    for _ in range(2):  # a clean stop of the others makes nothing of it clean
        damaged.broker.background.checkpoints.save()
        damaged.restart()
        assert damaged.broker.topic("t").damaged[1].recovery_point == 5
    assert log.read_bytes() == before


def test_how_far_it_was_compacted_is_known_after_others_were(house):
    """Or the gaps of a topic that is no longer compacted would count as lost files."""
    for topic in ("bad", "good", "gone"):
        house.broker.create_topic(topic, config=COMPACT)
        fill(house, topic, 300)
        compacted(house, topic)
    house.broker.delete_topic("gone")
    house.produce("bad", [b"one more" * 20])
    crash(house)
    flip(max((house.root / "data" / "bad-0").glob("*.log")), 100)
    house.broker = house.open()
    assert house.broker.topic("bad").damaged
    fill(house, "good", 300, seed=2)
    compacted(house, "good")
    for name in ("cleaner-offset-checkpoint", "tierlog/compaction-reached"):
        rows = (house.root / "data" / name).read_text().splitlines()[2:]
        assert [row.split()[0] for row in sorted(rows)] == ["bad", "good"], name


def test_partitions_are_added_beside_it_and_its_topic_is_deleted(damaged):
    grown = damaged.broker.alter_topic("t", partitions=4)
    assert [one.partition for one in grown.partitions] == [0, 2, 3]
    damaged.broker.delete_topic("t")
    damaged.wait_for(lambda: not list((damaged.root / "data").glob("t-*")))
    assert damaged.broker.readiness().reasons == []


def test_verify_reports_it(damaged):
    problems = damaged.broker.verify("t").problems
    assert [(one.kind, one.partition) for one in problems] == [("segment-corrupt", 1)]


def test_groups_are_told_with_what_its_checkpoint_says(house):
    house.broker.create_topic("t", partitions=2)
    for partition in range(2):
        for _ in range(5):
            house.produce("t", [b"v"], partition=partition)
    house.broker.groups.commit("g", [NewOffset("t", 0, 2), NewOffset("t", 1, 3)])
    crash(house)
    flip(house.root / "data" / "t-1" / "00000000000000000000.log", 100)
    house.broker = house.open()
    shown = [OffsetState("t", 0, 2, 5, 3, ""), OffsetState("t", 1, 3, 5, 2, "")]
    assert house.broker.groups.group("g") == shown
    assert list(house.broker.groups.all_groups()) == [("g", shown)]


def test_a_partition_that_cannot_be_read_at_all_is_offline(house, monkeypatch):
    house.broker.create_topic("t", partitions=2)
    for partition in range(2):
        house.produce("t", [b"fine"], partition=partition)
    house.broker.close()

    def on_a_bad_disk(fd, size_bytes, position):
        if Path(f"/proc/self/fd/{fd}").readlink().parent.name == "t-1":
            raise OSError(errno.EIO, "Input/output error")
        return os.pread(fd, size_bytes, position)

    monkeypatch.setattr(OpenFiles, "pread", staticmethod(on_a_bad_disk))
    house.broker = house.open()
    assert [one.value for one in house.records("t", partition=0)] == [b"fine"]
    with pytest.raises(LogOfflineError, match="t-1: the disk failed"):
        house.broker.partition("t", 1)
    monkeypatch.undo()
    house.restart()
    assert [one.value for one in house.records("t", partition=1)] == [b"fine"]


def test_a_topic_whose_logs_the_disk_does_not_take_is_not_made(house, monkeypatch):
    disk = FaultyDisk()
    disk.fail("sync_folder")
    monkeypatch.setattr(house.broker._opener, "_disk", disk)
    with pytest.raises(LogOfflineError, match="the disk failed"):
        house.broker.create_topic("t", partitions=2)
    with pytest.raises(UnknownTopic):
        house.broker.topic("t")
    disk.heal()
    house.broker.create_topic("t", partitions=2)
    house.produce("t", [b"fine"])


def test_a_log_that_the_bucket_lacks_is_cut_only_where_the_loss_is_accepted(damaged):
    data = damaged.root / "data"
    original = (data / "t-1" / "00000000000000000000.log").read_bytes()
    (step,) = [one for one in damaged.broker.repair("t", apply=True) if one.partition == 1]
    assert (step.action, step.done) == ("cut", False)
    assert "from 1 on (5 had been flushed) are lost" in step.detail
    with pytest.raises(CorruptBatch):
        damaged.broker.partition("t", 1)

    (step,) = [one for one in damaged.broker.repair("t", apply=True, accept_loss=True) if one.done]
    assert step.detail.endswith("set aside in t-1-1")
    assert [one.value for one in damaged.records("t", partition=1)] == [b"1-0"]
    aside = data / "tierlog" / "damaged" / "t-1-1" / "00000000000000000000.log"
    assert aside.read_bytes() == original
    assert damaged.broker.readiness().reasons == []
    damaged.produce("t", [b"on it goes"], partition=1)
    damaged.restart()
    assert len(damaged.records("t", partition=1)) == 2
    crash(damaged)
    flip(data / "t-1" / "00000000000000000000.log", 100)  # the disk is bad there
    damaged.broker = damaged.open()
    (step,) = [one for one in damaged.broker.repair("t", apply=True, accept_loss=True) if one.done]
    assert "t-1-1.2" in step.detail
    assert aside.read_bytes() == original


def test_a_rotten_header_in_a_segment_that_ends_at_the_recovery_point_is_told_and_repaired(house):
    house.broker.create_topic("t", config={"remote.storage.enable": False})
    for number in range(5):
        house.produce("t", [b"%d" % number])
    house.broker.partition("t", 0).log.roll()
    crash(house)
    flip(house.root / "data" / "t-0" / "00000000000000000000.log", 2 * 69 + 16)  # the magic
    house.broker = house.open()
    with pytest.raises(CorruptBatch, match="only version 2") as refused:
        house.broker.partition("t", 0)
    assert refused.value.file.endswith("t-0/00000000000000000000.log")
    assert (refused.value.position, refused.value.offset) == (2 * 69, 2)
    (step,) = house.broker.repair("t", apply=True, accept_loss=True)
    assert (step.action, step.done) == ("cut", True)
    assert [one.value for one in house.records("t")] == [b"0", b"1"]


def test_the_one_record_that_the_bucket_lacks_is_not_set_aside_with_what_it_has(house):
    house.broker.create_topic("t", config={"retention.ms": -1})
    house.produce("t", [b"v"] * 10)
    house.offload()
    house.stop_copying()
    house.produce("t", [b"on disk alone"])
    house.broker.partition("t", 0).log.roll()
    crash(house)
    flip(house.root / "data" / "t-0" / f"{10:020d}.log", 16)  # the magic
    house.broker = house.open()
    (step,) = house.broker.repair("t", apply=True)
    assert (step.action, step.base_offset, step.done) == ("cut", 10, False)


def test_a_crash_after_a_repair_finds_nothing_missing(damaged, tmp_path):
    """The checkpoint of before says that the log had reached further."""
    damaged.broker.repair("t", apply=True, accept_loss=True)
    damaged.produce("t", [b"on it goes"], partition=1)
    data = damaged.root / "data"
    shutil.copytree(data, tmp_path / "crashed", ignore=shutil.ignore_patterns(".lock"))
    damaged.broker.close()
    shutil.rmtree(data)
    (tmp_path / "crashed").rename(data)
    damaged.broker = damaged.open()
    assert [one.value for one in damaged.records("t", partition=1)] == [b"1-0", b"on it goes"]


def test_what_the_bucket_has_is_set_aside_and_read_from_there(house):
    """The last checkpoint lies in the middle of a segment that was sealed and uploaded since."""
    house.broker.create_topic("t", config={"segment.bytes": 1024, "retention.ms": -1})
    house.produce("t", [b"first"])
    house.broker.background.checkpoints.save()
    checkpoint = (house.root / "data" / "recovery-point-offset-checkpoint").read_bytes()
    for number in range(40):
        house.produce("t", [b"%d" % number * 40])
    house.offload()
    house.produce("t", [b"hot alone"])
    before = [record.value for record in house.records("t")]
    crash(house)
    (house.root / "data" / "recovery-point-offset-checkpoint").write_bytes(checkpoint)
    flip(house.root / "data" / "t-0" / "00000000000000000000.log", 64)
    house.broker = house.open()
    assert "t-0" in house.broker.readiness().reasons[0]

    (step,) = [one for one in house.broker.repair("t") if one.action == "set-aside"]
    assert not step.done
    (step,) = [one for one in house.broker.repair("t", apply=True) if one.done]
    assert step.action == "set-aside"
    assert [record.value for record in house.records("t")] == before
    assert house.broker.partition("t", 0).offsets().local_log_start_offset > 0


@pytest.fixture
def filled(house):
    """Offsets 0 to 19 in the bucket, up to 39 on disk alone, in two segments of 10 each."""
    house.broker.create_topic("t", config={"segment.bytes": 1024, "retention.ms": -1})
    for number in range(4):
        if number == 2:
            house.offload()
            house.stop_copying()
        house.produce("t", [b"%d" % number * 60] * 10)
    return house


def lose_the_last_segment(house):
    max((house.root / "data" / "t-0").glob("*.log")).unlink()


def lose_the_folder(house):
    shutil.rmtree(house.root / "data" / "t-0")


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize(("lose", "end"), [(lose_the_last_segment, 30), (lose_the_folder, 20)])
def test_a_log_that_lost_flushed_records_is_refused_and_gives_no_offset_twice(
    filled, lose, end, is_clean
):
    if is_clean:
        filled.broker.close()
    else:
        filled.broker.background.checkpoints.save()
        crash(filled)
    lose(filled)
    for _ in range(2):
        filled.restart()
        with pytest.raises(CorruptBatch, match=f"offset {end}: .* it had reached offset 40"):
            filled.broker.partition("t", 0)
    (step,) = filled.broker.repair("t", apply=True)
    assert (step.action, step.done) == ("cut", False)
    assert f"offsets from {end} on (40 had been flushed) are lost" in step.detail
    (step,) = [one for one in filled.broker.repair("t", apply=True, accept_loss=True) if one.done]
    assert filled.produce("t", [b"on it goes"]).base_offset == end
    filled.restart()
    assert [record.offset for record in filled.records("t")] == list(range(end + 1))


def test_a_log_that_a_crash_took_as_a_whole_gives_no_offset_twice(house):
    """Its last checkpoint was written before the records that only the disk had."""
    house.broker.create_topic("t", config={"retention.ms": -1})
    house.fill(20)
    house.offload()
    house.broker.background.checkpoints.save()
    checkpoint = house.root / "data" / "recovery-point-offset-checkpoint"
    before = checkpoint.read_bytes()
    house.stop_copying()
    house.fill(20)
    crash(house)
    checkpoint.write_bytes(before)
    lose_the_folder(house)
    for _ in range(2):
        house.restart()
        with pytest.raises(CorruptBatch, match="no segment is left, and it had reached offset 20"):
            house.broker.partition("t", 0)
    (step,) = [one for one in house.broker.repair("t", apply=True, accept_loss=True) if one.done]
    assert "offsets from 20 on (20 had been flushed) are lost" in step.detail
    assert house.produce("t", [b"on it goes"]).base_offset == 20
    house.restart()
    assert [record.offset for record in house.records("t")] == list(range(21))


def test_offsets_that_neither_tier_has_are_told_and_repaired_into_a_gap(filled):
    """The first of the segments that only the disk had is gone."""
    filled.broker.close()
    for base in (0, 10, 20):
        (filled.root / "data" / "t-0" / f"{base:020d}.log").unlink()
    filled.broker = filled.open()
    assert len(filled.broker.partition("t", 0).read(0, max_bytes=1 << 20).slices) > 0
    with pytest.raises(CorruptDataError, match="offsets 20 to 29 are in neither tier"):
        filled.broker.partition("t", 0).read(20, max_bytes=1)
    (step,) = filled.broker.repair("t", apply=True)
    assert (step.action, step.base_offset, step.last_offset, step.done) == ("drop", 20, 29, True)
    assert [record.offset for record in filled.records("t")] == [*range(20), *range(30, 40)]
    filled.offload()
    assert filled.broker.verify("t", deep=True).ok
    assert filled.broker.repair("t") == []


def test_offsets_that_a_trim_took_are_not_told_as_lost(filled):
    """The bucket could not be told of it."""
    filled.set_down(True)
    filled.broker.trim("t", 0, 30)
    filled.set_down(False)
    assert filled.broker.partition("t", 0).log.first_local_offset == 30
    assert filled.broker.repair("t", apply=True) == []
    assert filled.broker.partition("t", 0).cold.manifest.gaps == ()


def test_an_older_copy_of_a_folder_is_refused_once_the_bucket_was_asked(filled, tmp_path):
    """It knows the epoch in force, and all but one commit under it."""
    data = filled.root / "data"
    filled.broker.background.copier.run_round()
    assert filled.broker.background.copier.wait_until_done(filled.broker.partitions(), timeout_s=20)
    filled.broker.background.checkpoints.save()
    shutil.copytree(data, tmp_path / "older")
    filled.produce("t", [b"4" * 60] * 10)
    filled.broker.partition("t", 0).log.roll()
    filled.broker.background.copier.run_round()
    assert filled.broker.background.copier.wait_until_done(filled.broker.partitions(), timeout_s=20)
    filled.broker.close()
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "older", data)
    filled.broker = filled.open()
    partition = filled.broker.partition("t", 0)
    filled.wait_for(lambda: partition.leadership_lost is not None)
    assert "the bucket reaches offset 50, this folder only 40" in partition.leadership_lost
    filled.restart()
    with pytest.raises(CorruptBatch, match="it had reached offset 50"):
        filled.broker.partition("t", 0)
    (step,) = [one for one in filled.broker.repair("t", apply=True, accept_loss=True) if one.done]
    assert "offsets from the bucket's end 50 on are lost" in step.detail
    assert filled.produce("t", [b"on it goes"]).base_offset == 50
    assert [record.offset for record in filled.records("t")] == list(range(51))


def test_a_folder_that_went_is_begun_anew_where_the_bucket_has_all_of_it(filled):
    filled.broker.background.copier.run_round()
    assert filled.broker.offload("t", wait_ms=10_000)
    filled.broker.background.copier.run_round()
    assert filled.broker.background.copier.wait_until_done(filled.broker.partitions(), timeout_s=20)
    filled.broker.close()
    lose_the_folder(filled)
    filled.broker = filled.open()
    assert filled.produce("t", [b"on it goes"]).base_offset == 40
    assert [record.offset for record in filled.records("t")] == list(range(41))
