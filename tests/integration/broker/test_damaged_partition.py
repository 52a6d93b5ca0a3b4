"""One partition whose flushed bytes are bad: it says so, is kept as it is, and the others serve."""

import errno
from pathlib import Path

import pytest

from hot_tier.log import PartitionLog
from record_format.errors import CorruptBatch, LogOfflineError

CLEAN_MARKER = ".kafka_cleanshutdown"


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


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
    flip_byte(house.root / "data" / "t-1" / "00000000000000000000.log", 100)
    house.broker = house.open()
    return house


def test_the_others_serve_and_the_bad_one_says_why(damaged):
    for partition in (0, 2):
        damaged.produce("t", [b"more"], partition=partition)
        assert len(damaged.records("t", partition=partition)) == 6
    with pytest.raises(CorruptBatch, match="had been flushed") as refused:
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
        damaged.broker.save_checkpoints()
        damaged.restart()
        assert damaged.broker.topic("t").damaged[1].recovery_point == 5
    assert log.read_bytes() == before


def test_partitions_are_added_beside_it_and_its_topic_is_deleted(damaged):
    grown = damaged.broker.alter_topic("t", partitions=4)
    assert [one.partition for one in grown.partitions] == [0, 2, 3]
    damaged.broker.delete_topic("t")
    damaged.wait_for(lambda: not list((damaged.root / "data").glob("t-*")))
    assert damaged.broker.readiness().reasons == []


def test_verify_reports_it(damaged):
    problems = damaged.broker.verify("t").problems
    assert [(one.kind, one.partition) for one in problems] == [("segment-corrupt", 1)]


def test_a_partition_that_cannot_be_read_at_all_is_offline(house, monkeypatch):
    house.broker.create_topic("t", partitions=2)
    house.broker.close()
    opened = PartitionLog.open

    def failing(folder, **options):
        if folder.name == "t-1":
            raise OSError(errno.EIO, "Input/output error", str(folder))
        return opened(folder, **options)

    monkeypatch.setattr(PartitionLog, "open", failing)
    house.broker = house.open()
    house.produce("t", [b"fine"], partition=0)
    with pytest.raises(LogOfflineError, match="t-1: its log could not be read"):
        house.broker.partition("t", 1)


def test_a_log_that_the_bucket_lacks_is_cut_only_where_the_loss_is_accepted(damaged):
    data = damaged.root / "data"
    original = (data / "t-1" / "00000000000000000000.log").read_bytes()
    (step,) = [one for one in damaged.broker.repair("t", apply=True) if one.partition == 1]
    assert (step.action, step.done) == ("cut", False)
    assert "from 1 on (5 had been flushed) are lost" in step.detail
    with pytest.raises(CorruptBatch):
        damaged.broker.partition("t", 1)

    (step,) = [one for one in damaged.broker.repair("t", apply=True, accept_loss=True) if one.done]
    assert [one.value for one in damaged.records("t", partition=1)] == [b"1-0"]
    aside = data / "tierlog" / "damaged" / "t-1-1" / "00000000000000000000.log"
    assert aside.read_bytes() == original
    assert damaged.broker.readiness().reasons == []
    damaged.produce("t", [b"on it goes"], partition=1)
    damaged.restart()
    assert len(damaged.records("t", partition=1)) == 2


def test_what_the_bucket_has_is_set_aside_and_read_from_there(house):
    """The last checkpoint lies in the middle of a segment that was sealed and uploaded since."""
    house.broker.create_topic("t", config={"segment.bytes": 1024, "retention.ms": -1})
    house.produce("t", [b"first"])
    house.broker.save_checkpoints()
    checkpoint = (house.root / "data" / "recovery-point-offset-checkpoint").read_bytes()
    for number in range(40):
        house.produce("t", [b"%d" % number * 40])
    assert house.broker.offload("t", wait_ms=10_000).remaining_segments == 0
    house.produce("t", [b"hot alone"])
    before = [record.value for record in house.records("t")]
    crash(house)
    (house.root / "data" / "recovery-point-offset-checkpoint").write_bytes(checkpoint)
    flip_byte(house.root / "data" / "t-0" / "00000000000000000000.log", 64)
    house.broker = house.open()
    assert "t-0" in house.broker.readiness().reasons[0]

    (step,) = [one for one in house.broker.repair("t") if one.action == "set-aside"]
    assert not step.done
    (step,) = [one for one in house.broker.repair("t", apply=True) if one.done]
    assert step.action == "set-aside"
    assert [record.value for record in house.records("t")] == before
    assert house.broker.partition("t", 0).offsets().local_log_start_offset > 0
