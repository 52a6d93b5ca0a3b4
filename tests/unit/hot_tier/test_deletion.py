"""Deleting, trimming, truncating fully."""

import pytest

from tests.fakes.clock import Clock
from tests.fakes.lossy_disk import LossyDisk
from tests.fakes.partition_logs import first_offset
from tierlog.hot_tier.closed_log import base_offsets
from tierlog.record_format.errors import OffsetPastEnd, OffsetTrimmed

CONFIG = {"segment.bytes": 1024, "file.delete.delay.ms": 1000}


@pytest.fixture
def disk():
    return LossyDisk()


@pytest.fixture
def log(open_log, append_values, disk):
    log = open_log(config=CONFIG, disk=disk)
    for epoch in (0, 1, 2):
        log.bump_epoch(epoch)
        for _ in range(10):
            append_values(log, b"v" * 150, b"w")
    log.writer.flush()
    return log


def bases(log) -> list[int]:
    return [segment.base_offset for segment in log.segments()]


def test_only_whole_sealed_segments_below_the_offset_are_deleted(log):
    before = bases(log)
    assert log.delete_local(before[2] - 1) == before[:1]
    assert log.local_log_start_offset == before[1]
    assert log.log_start_offset == 0
    assert log.delete_local(log.log_end_offset) == before[1:-1]
    assert bases(log) == before[-1:]


def test_a_deleted_file_is_renamed_and_unlinked_after_its_delay(log, clock, tmp_path):
    second = bases(log)[1]
    log.delete_local(second)
    names = {path.name for path in (tmp_path / "t-0").iterdir() if path.name[:20] == f"{0:020d}"}
    assert names == {f"{0:020d}{suffix}.deleted" for suffix in (".log", ".index", ".timeindex")}
    clock.now_ms += 999
    assert log.reap() == 0
    clock.now_ms += 1
    assert log.reap() == 1
    assert not [path for path in (tmp_path / "t-0").iterdir() if path.name[:20] == f"{0:020d}"]


@pytest.mark.parametrize("jump_ms", [-1, 10**12])
def test_wall_clock_jumps_do_not_change_the_delete_delay(open_log, append_values, clock, jump_ms):
    monotonic = Clock()
    log = open_log(config=CONFIG, monotonic_clock=monotonic)
    append_values(log, b"v")
    log.roll()
    log.delete_local(log.high_watermark)
    clock.now_ms += jump_ms
    assert log.reap() == 0
    monotonic.now_ms += 1000
    assert log.reap() == 1


def test_deletion_truncates_the_epochs(log, tmp_path):
    assert log.epochs == ((0, 0), (1, 20), (2, 40))
    start = next(base for base in bases(log) if base > 20)
    log.delete_local(start)
    assert log.epochs == ((1, start), (2, 40))


def test_an_epoch_that_begins_where_the_deletion_ends_is_kept(open_log, append_values):
    log = open_log()
    for epoch in (0, 1):
        log.bump_epoch(epoch)
        append_values(log, b"v")
        log.roll()
    log.delete_local(1)
    assert log.epochs == ((1, 1),)


def test_trim_advances_the_log_start_and_never_moves_it_back(log, append_values):
    assert log.trim(13) == 13
    assert log.trim(5) == 13
    assert log.local_log_start_offset == 13
    with pytest.raises(OffsetTrimmed):
        log.read_hot(12, max_bytes=1)
    assert first_offset(log.read_hot(13, max_bytes=1)) <= 13
    assert log.trim(log.high_watermark) == 60
    append_values(log, b"not flushed")
    with pytest.raises(OffsetPastEnd):
        log.trim(61)


def test_a_log_start_beyond_the_end_starts_the_log_there(open_log, log, append_values):
    log.close()
    log = open_log(config=CONFIG, log_start_offset=100)
    assert (log.log_start_offset, log.log_end_offset, log.high_watermark) == (100, 100, 100)
    assert append_values(log, b"x").base_offset == 100


def test_truncating_fully_removes_all_earlier_state(
    open_log, log, append_values, records_of, tmp_path, disk
):
    found_after_a_crash = []
    disk.before_call = lambda _: found_after_a_crash.append(base_offsets(log.folder))
    log.truncate_fully_and_start_at(1_000_000, None)
    assert len(found_after_a_crash) > 10
    for bases in found_after_a_crash:  # what is between is only in the bucket
        assert bases in ([], [1_000_000]) or 1_000_000 not in bases
    assert (log.log_end_offset, log.high_watermark) == (1_000_000, 1_000_000)
    assert log.local_log_start_offset == 1_000_000
    assert append_values(log, b"x").base_offset == 1_000_000
    log.writer.flush()
    log.close()
    assert len(list((tmp_path / "t-0").glob("*.log"))) == 1
    log = open_log(config=CONFIG)
    assert [r.offset for r in records_of(log)] == [1_000_000]
    assert log.epochs == ((2, 1_000_000),)
