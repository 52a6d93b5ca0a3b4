"""Folders written by a real Kafka: they open, serve what its consumer saw, and accept appends."""

import errno
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fakes.at_once import at_once
from tests.fakes.partition_logs import first_offset
from tests.unit.record_format import golden
from tierlog.broker.partition.partition import Partition
from tierlog.hot_tier.derived_files import read_entries
from tierlog.record_format.checkpoint_files import (
    format_topic_id,
    parse_epoch_checkpoint,
    parse_offset_checkpoint,
    parse_partition_metadata,
)
from tierlog.record_format.errors import CorruptDataError, DiskFull, OffsetTrimmed

FIXTURES = golden.ROOT
FOLDERS = sorted(path.parent.name for path in FIXTURES.glob("*/partition.metadata"))
# index.interval.bytes of the topics that did not have the default; the rebuilt index depends on it
INTERVALS = {"dense-index-0": 100, "index-full-roll-0": 256, "unclean-0": 512}
LOG_STARTS = {
    f"{entry.topic}-{entry.partition}": entry.offset
    for entry in parse_offset_checkpoint(
        (FIXTURES / "_broker/log-start-offset-checkpoint").read_bytes()
    )
}


@pytest.fixture(params=FOLDERS)
def name(request):
    return request.param


@pytest.fixture
def open_fixture(tmp_path, open_log):
    def _open(name: str, *, source: Path | None = None, **arguments):
        folder = tmp_path / "t-0"
        if not folder.exists():
            shutil.copytree(source or FIXTURES / name, folder)
        topic_id = parse_partition_metadata((folder / "partition.metadata").read_bytes())
        return open_log(
            folder,
            topic_id=format_topic_id(topic_id),
            config={"index.interval.bytes": INTERVALS.get(name, 4096)},
            log_start_offset=LOG_STARTS.get(name),
            **arguments,
        )

    return _open


def expected_records(name: str) -> list[dict]:
    return golden.expected_records(FIXTURES / name)


def expected_offsets(name: str) -> dict:
    return golden.offsets(FIXTURES / name)


def assert_same_records(records, expected) -> None:
    shown = [golden.as_expected(*pair) for pair in zip(records, expected, strict=True)]
    assert shown == expected


@pytest.mark.parametrize("clean", [True, False])
def test_a_kafka_folder_serves_what_its_consumer_saw(name, clean, open_fixture, records_of):
    # Only what was flushed may lack offsets, as compaction leaves it.
    expected = expected_offsets(name)
    recovery_point = expected["high_watermark"] if name.startswith("compacted") else 0
    log = open_fixture(name, clean=clean, recovery_point=recovery_point)
    assert log.recovery.clean == clean
    assert not log.recovery.truncated_file
    for max_bytes in (1, 1 << 30):
        assert_same_records(records_of(log, max_bytes=max_bytes), expected_records(name))
    for one in expected_records(name):
        read = log.read_hot(one["offset"], max_bytes=1)
        assert first_offset(read) <= one["offset"] < read.next_offset
    assert log.log_start_offset == expected["log_start_offset"]
    assert log.high_watermark == expected["high_watermark"]
    assert log.offsets.last_stable_offset == expected["last_stable_offset"]
    for timestamp, offset, found, _ in expected["offset_for_timestamp"]:
        assert (log.offset_for_timestamp(timestamp) or (-1, -1)) == (offset, found)


def test_a_kafka_folder_accepts_appends(name, open_fixture, append_values, records_of):
    log = open_fixture(name)
    before = records_of(log)
    result = append_values(log, b"one", b"two")
    assert result.base_offset == expected_offsets(name)["high_watermark"]
    log.writer.flush()
    after = records_of(log)
    assert after[: len(before)] == before
    assert [record.value for record in after[len(before) :]] == [b"one", b"two"]
    assert log.close()
    again = open_fixture(name, clean=True)
    assert again.recovery.clean
    assert records_of(again) == after


def test_opening_and_closing_preserves_kafkas_bytes(name, open_fixture, tmp_path):
    log = open_fixture(name)
    log.close()
    for path in (FIXTURES / name).iterdir():
        ours = tmp_path / "t-0" / path.name
        if path.suffix == ".snapshot" and not ours.exists():
            continue  # without a segment: Kafka removes it at a start too
        if path.name == "leader-epoch-checkpoint":
            # Kafka records an epoch when it begins, tierlog with its first record.
            theirs = parse_epoch_checkpoint(path.read_bytes())
            assert parse_epoch_checkpoint(ours.read_bytes()) == [
                entry for entry in theirs if entry.start_offset < log.log_end_offset
            ]
        else:
            assert ours.read_bytes() == path.read_bytes(), path.name


# Kafka's cleaner indexes by writes of several batches.
INDEXED_BY_BATCHES = [name for name in FOLDERS if not name.startswith("compacted")]


@pytest.mark.parametrize("name", INDEXED_BY_BATCHES)
def test_rebuilt_indexes_are_those_that_kafka_wrote(name, open_fixture, tmp_path):
    open_fixture(name, clean=False).close()
    for path in (FIXTURES / name).iterdir():
        if path.suffix in (".index", ".timeindex", ".txnindex", ".log"):
            assert (tmp_path / "t-0" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_copy_of_a_running_brokers_folder_recovers(open_fixture, records_of, tmp_path):
    log = open_fixture("unclean-0", source=FIXTURES / "live-copy/unclean-0", clean=False)
    assert not log.recovery.truncated_file
    assert_same_records(records_of(log), expected_records("unclean-0"))
    log.close()
    for path in (FIXTURES / "unclean-0").glob("*.*index"):
        assert (tmp_path / "t-0" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_deleted_transaction_index_is_read_from_the_other_tier(open_fixture, monkeypatch):
    log = open_fixture("txn-0", recovery_point=expected_offsets("txn-0")["high_watermark"])
    log.roll()

    def deleted_first(segment):
        log.delete_local(log.log_end_offset)
        return read_entries(segment)

    monkeypatch.setattr("tierlog.hot_tier.log_reader.read_entries", deleted_first)
    with pytest.raises(OffsetTrimmed, match="was deleted"):
        log.aborted_transactions(log.log_start_offset, log.offsets.last_stable_offset)


def test_a_lost_transaction_index_is_corruption(open_fixture, tmp_path):
    log = open_fixture("txn-0", recovery_point=expected_offsets("txn-0")["high_watermark"])
    for index in (tmp_path / "t-0").glob("*.txnindex"):
        index.unlink()
    with pytest.raises(CorruptDataError, match=r"txnindex: is missing"):
        log.aborted_transactions(log.log_start_offset, log.offsets.last_stable_offset)


def test_reading_aborted_transactions_needs_a_blocking_call(open_fixture):
    end = expected_offsets("txn-0")["high_watermark"]
    log = open_fixture("txn-0", recovery_point=end)
    partition = Partition(log, None, commits=lambda _: None, check_room=lambda: None)
    assert partition.read(0, max_bytes=1 << 20, committed=True).aborted
    assert at_once(partition.read, 0, max_bytes=1 << 20) is not None
    assert at_once(partition.read, 0, max_bytes=1 << 20, committed=True) is None


def test_last_stable_offset_is_never_below_the_log_start(
    open_fixture,
):
    log = open_fixture("txn-0", recovery_point=expected_offsets("txn-0")["high_watermark"])
    partition = Partition(log, None, commits=lambda _: None, check_room=lambda: None)
    begun, start = log.offsets.last_stable_offset, log.high_watermark - 1
    assert begun < start
    log.trim(start)
    assert log.offsets.last_stable_offset == start
    fetched = partition.read(log.offsets.last_stable_offset, max_bytes=1 << 20, committed=True)
    assert (fetched.slices, fetched.next_offset) == ((), start)


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("crashes", [False, True])
def test_a_half_deleted_segment_keeps_its_aborted_transactions(
    open_fixture, disk, tmp_path, after, crashes
):
    """By a crash between two renames, or a rename that fails on a full disk."""
    end = expected_offsets("txn-0")["high_watermark"]
    log = open_fixture("txn-0", recovery_point=end, disk=disk)
    log.roll()
    aborted = log.aborted_transactions(0, end)
    assert aborted
    disk.fail("rename", errno.ENOSPC, suffix=".deleted", after=after)
    with suppress(DiskFull):
        log.delete_local(log.log_end_offset)
    disk.heal()
    if crashes:
        shutil.copytree(log.folder, tmp_path / "crashed")
        shutil.rmtree(log.folder)
        (tmp_path / "crashed").rename(log.folder)
        log = open_fixture("txn-0", clean=False, recovery_point=end)
    start = log.segments()[0].base_offset
    assert log.aborted_transactions(start, end) == [
        txn for txn in aborted if txn.last_offset >= start
    ]


@pytest.mark.parametrize("name", ["txn-0", "txn-multi-0", "txn-multi-1", "compacted-txn-0"])
@pytest.mark.parametrize("clean", [True, False])
def test_read_committed_sees_what_kafkas_consumer_saw(name, clean, open_fixture, batches_of):
    recovery_point = expected_offsets(name)["high_watermark"]
    log = open_fixture(name, clean=clean, recovery_point=recovery_point)
    end = log.offsets.last_stable_offset
    aborted = log.aborted_transactions(log.log_start_offset, end)
    offsets = []
    for header, records in batches_of(log, end_offset=end):
        gone = any(
            entry.producer_id == header.producer_id
            and entry.first_offset <= header.base_offset <= entry.last_offset
            for entry in aborted
        )
        if not (header.is_transactional and gone):
            offsets += [record.offset for record in records]
    assert offsets == golden.committed(FIXTURES / name)


@pytest.mark.parametrize("damage", [b"", b"\xff", b"cut"])
@pytest.mark.parametrize("clean", [True, False])
def test_a_corrupt_transaction_index_is_rebuilt(damage, clean, open_fixture, tmp_path):
    log = open_fixture("txn-0")
    log.close()
    files = sorted((tmp_path / "t-0").glob("*.txnindex"))
    good = [path.read_bytes() for path in files]
    for path, data in zip(files, good, strict=True):
        path.write_bytes(data[:-3] if damage == b"cut" else damage * len(data))
    open_fixture("txn-0", clean=clean, recovery_point=log.log_end_offset).close()
    assert [path.read_bytes() for path in files] == good
    assert len(files) > 1


SEEN_WHOLE = [name for name in FOLDERS if "txn" not in name and not name.startswith("deleted")]


@pytest.mark.parametrize("name", SEEN_WHOLE)
def test_statistics_of_a_segment_found_on_disk_are_counted(name, open_fixture):
    log = open_fixture(name)
    records = expected_records(name)
    count = 0
    for view in log.segments():
        facts = log.segment_stats(view.base_offset)
        inside = [r for r in records if view.base_offset <= r["offset"] <= view.last_offset]
        assert facts.record_count == len(inside)
        assert facts.min_timestamp == min((r["timestamp"] for r in inside), default=None)
        count += facts.record_count
    assert count == len(records)
