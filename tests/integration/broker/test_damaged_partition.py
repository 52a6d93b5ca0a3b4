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
