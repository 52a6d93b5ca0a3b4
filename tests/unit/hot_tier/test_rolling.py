import os

import pytest

from tests.fakes.clock import Clock
from tierlog.record_format.batch import stamp
from tierlog.record_format.errors import DiskFull, UnknownSegment
from tierlog.record_format.index_layouts import OFFSET_ENTRY

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS


def bases(log) -> list[int]:
    return [segment.base_offset for segment in log.segments()]


def test_a_segment_is_rolled_before_it_would_grow_beyond_its_size(open_log, append_values):
    log = open_log(config={"segment.bytes": 1024})
    for _ in range(30):
        append_values(log, b"v" * 100)
    sizes = [segment.size_bytes for segment in log.segments()]
    one = sizes[-1] // (30 - bases(log)[-1])
    assert all(size == 1024 // one * one for size in sizes[:-1])


def test_an_append_larger_than_a_segment_gets_its_own(open_log, append_values):
    log = open_log(config={"segment.bytes": 1024})
    append_values(log, b"small")
    append_values(log, b"v" * 5000)
    append_values(log, b"small")
    assert bases(log) == [0, 1, 2]


def test_a_segment_is_rolled_by_its_records_timestamps(open_log, append_values):
    log = open_log(config={"segment.ms": HOUR_MS})
    append_values(log, b"a", timestamps=[NOW_MS])
    append_values(log, b"b", timestamps=[NOW_MS + HOUR_MS])  # exactly an hour
    assert bases(log) == [0]
    append_values(log, b"c", timestamps=[NOW_MS + HOUR_MS + 1])
    append_values(log, b"d", timestamps=[NOW_MS - 10 * HOUR_MS])  # older ones do not roll
    assert bases(log) == [0, 2]


def test_records_without_timestamps_roll_by_the_clock(open_log, append_values, clock):
    log = open_log(config={"segment.ms": HOUR_MS})
    append_values(log, b"a", timestamps=[-1])
    clock.now_ms += HOUR_MS
    append_values(log, b"b", timestamps=[-1])
    assert bases(log) == [0]
    clock.now_ms += 1
    append_values(log, b"c", timestamps=[-1])
    assert bases(log) == [0, 2]


def test_the_first_timestamp_is_known_after_a_restart(open_log, append_values):
    log = open_log(config={"segment.ms": HOUR_MS})
    append_values(log, b"a", timestamps=[NOW_MS])
    log.close()
    log = open_log(config={"segment.ms": HOUR_MS})
    append_values(log, b"b", timestamps=[NOW_MS + HOUR_MS + 1])
    assert bases(log) == [0, 1]


def test_jitter_differs_between_partitions_and_is_bounded(open_log, append_values, tmp_path):
    def rolled_after(folder: str, partition: int) -> int:
        log = open_log(
            tmp_path / folder,
            config={"segment.ms": 1000, "segment.jitter.ms": 900},
            partition=partition,
        )
        for ms in range(1002):
            append_values(log, b"", timestamps=[NOW_MS + ms])
            if len(log.segments()) > 1:
                return ms
        raise AssertionError("never rolled")

    waits = {number: rolled_after(f"a{number}", number) for number in range(5)}
    assert all(100 < wait <= 1001 for wait in waits.values())
    assert len(set(waits.values())) > 1
    assert rolled_after("again", 3) == waits[3]


def test_relative_offsets_of_a_segment_fit_31_bits(open_log, make_batch, append_values, tmp_path):
    # Compaction leaves such gaps between the batches of a segment.
    last = 2**31 - 3
    folder = tmp_path / "sparse"
    folder.mkdir()
    batches = []
    for base_offset in (0, last):
        batches.append(make_batch([b"v"]))
        stamp(batches[-1], 0, base_offset=base_offset, leader_epoch=0)
    (folder / f"{0:020d}.log").write_bytes(b"".join(batches))
    log = open_log(folder, config={"cleanup.policy": "compact"}, clean=False)
    assert log.log_end_offset == last + 1
    append_values(log, b"a")  # at 2**31 - 2
    append_values(log, b"b")  # at 2**31 - 1, the largest relative offset
    assert bases(log) == [0]
    append_values(log, b"c")
    assert bases(log) == [0, 2**31]


def test_a_full_index_rolls(open_log, append_values):
    log = open_log(config={"segment.index.bytes": 48, "index.interval.bytes": 0})
    for number in range(20):
        append_values(log, b"v", timestamps=[NOW_MS + number])
    # 4 time entries fit, one reserved for the seal: 3 entries, added before batches 2, 3 and 4
    assert bases(log) == [0, 4, 8, 12, 16]


def test_a_sealed_index_has_the_entries_that_did_not_fit_a_lowered_limit(
    open_log, append_values, tmp_path
):
    config = {"index.interval.bytes": 0, "segment.index.bytes": 800}
    log = open_log(config=config)
    for _ in range(30):
        append_values(log, b"x")
    log.close()
    log = open_log(config=config | {"segment.index.bytes": 80})
    log.roll()
    index = (tmp_path / "t-0" / f"{0:020d}.index").read_bytes()
    assert [relative for relative, _ in OFFSET_ENTRY.iter_unpack(index)] == list(range(1, 30))


def test_an_idle_segment_is_rolled_for_offload(open_log, append_values, clock):
    log = open_log(config={"offload.max.lag.ms": 1000})
    clock.now_ms += 10_000
    assert not log.maybe_roll()
    append_values(log, b"a")
    clock.now_ms += 500
    append_values(log, b"b")
    clock.now_ms += 499
    assert not log.maybe_roll()
    clock.now_ms += 1
    assert log.maybe_roll()
    assert bases(log) == [0, 2]
    assert log.segments()[0].sealed
    assert log.high_watermark == 2


def test_a_sealed_segment_is_as_old_as_its_first_record(open_log, append_values, clock):
    log = open_log()
    assert log.segments()[0].age_ms is None
    append_values(log, b"a")
    clock.now_ms += 300
    log.roll()
    clock.now_ms += 400
    assert [view.age_ms for view in log.segments()] == [700, None]
    log.close()
    assert [view.age_ms for view in open_log().segments()] == [None, None]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    ("claimed_ms", "age_ms"),
    [(400, 600), (-YEAR_MS, 900), (-NOW_MS - 1, 900), (YEAR_MS, 300)],
    ids=["plausible", "older than the segment", "none", "after its last write"],
)
def test_the_age_of_a_segment_survives_a_restart(
    open_log, append_values, clock, tmp_path, clean, claimed_ms, age_ms
):
    """By the first record's timestamp, if it is plausible."""
    config = {"offload.max.lag.ms": 1000}
    log = open_log(config=config)
    append_values(log, b"before", timestamps=[NOW_MS - YEAR_MS])
    log.roll()
    base = log.log_end_offset
    append_values(log, b"a", timestamps=[NOW_MS + claimed_ms])
    log.close()
    for offset, written_ms in ((0, 100), (base, 700)):
        written = (NOW_MS + written_ms) * 1_000_000
        os.utime(tmp_path / "t-0" / f"{offset:020d}.log", ns=(written, written))
    clock.now_ms = NOW_MS + 1000
    log = open_log(config=config, clean=clean, recovery_point=base)
    assert log.active_ms == age_ms
    clock.now_ms += 999 - age_ms
    assert not log.maybe_roll()
    clock.now_ms += 1
    assert log.maybe_roll()


@pytest.mark.parametrize("clean", [True, False])
def test_a_segment_alone_on_disk_is_not_older_than_its_creation(
    open_log, append_values, clock, tmp_path, clean
):
    log = open_log()
    append_values(log, b"before")
    log.roll()
    base = log.log_end_offset
    append_values(log, b"a", timestamps=[NOW_MS - YEAR_MS])
    log.delete_local(base)
    log.close()
    times = {"partition.metadata": -YEAR_MS, f"{base:020d}.snapshot": 200, f"{base:020d}.log": 700}
    for name, written_ms in times.items():
        written = (NOW_MS + written_ms) * 1_000_000
        os.utime(tmp_path / "t-0" / name, ns=(written, written))
    clock.now_ms = NOW_MS + 1000
    log = open_log(clean=clean, recovery_point=base, log_start_offset=0, start_offset=base)
    assert log.active_ms == 800


def test_a_first_segment_is_not_older_than_its_partition(open_log, append_values, clock, tmp_path):
    log = open_log()
    append_values(log, b"a", timestamps=[NOW_MS - YEAR_MS])
    log.close()
    for name, written_ms in (("partition.metadata", 0), (f"{0:020d}.log", 700)):
        written = (NOW_MS + written_ms) * 1_000_000
        os.utime(tmp_path / "t-0" / name, ns=(written, written))
    clock.now_ms = NOW_MS + 1000
    assert open_log().active_ms == 1000


@pytest.mark.parametrize("jump_ms", [-10 * YEAR_MS, -500, 10 * YEAR_MS])
def test_wall_clock_jumps_do_not_change_the_roll(open_log, append_values, clock, jump_ms):
    monotonic = Clock()
    log = open_log(config={"offload.max.lag.ms": 1000}, monotonic_clock=monotonic)
    append_values(log, b"a")
    clock.now_ms += 999 + jump_ms
    monotonic.now_ms += 999
    assert not log.maybe_roll()
    clock.now_ms += 1
    monotonic.now_ms += 1
    assert log.maybe_roll()


def test_the_offload_lag_can_be_disabled(open_log, append_values, clock):
    log = open_log(config={"offload.max.lag.ms": -1})
    append_values(log, b"a")
    clock.now_ms += 10**12
    assert not log.maybe_roll()


def test_an_empty_segment_is_not_rolled(open_log):
    log = open_log()
    assert not log.roll()
    assert bases(log) == [0]


def test_statistics_of_a_sealed_segment_are_correct(open_log, append_values, records_of):
    log = open_log(config={"segment.bytes": 1024})
    for number in range(60):
        times = [NOW_MS - number, NOW_MS + number]
        append_values(log, b"a", b"b", timestamps=times)
    log.writer.flush()
    views = log.segments()
    assert len(views) > 3
    for view in views:
        inside = [r for r in records_of(log) if view.base_offset <= r.offset <= view.last_offset]
        assert view.record_count == len(inside)
        assert view.min_timestamp == min(record.timestamp for record in inside)
        assert view.max_timestamp == max(record.timestamp for record in inside)
        assert view.path.stat().st_size == view.size_bytes
    assert [view.active for view in views] == [False] * (len(views) - 1) + [True]


def test_sealed_means_flushed(open_log, append_values):
    log = open_log(config={"segment.bytes": 1024})
    for _ in range(20):
        append_values(log, b"v" * 100)
    assert not any(view.sealed for view in log.segments())
    with pytest.raises(UnknownSegment, match="above the high watermark"):
        log.sealed.prepare_upload(0)
    log.writer.flush()
    assert [view.sealed for view in log.segments()] == [True] * (len(log.segments()) - 1) + [False]


def test_the_files_of_a_sealed_segment_include_the_snapshot_at_its_end(open_log, append_values):
    log = open_log(config={"segment.bytes": 1024})
    for _ in range(20):
        append_values(log, b"v" * 100)
    log.writer.flush()
    files = log.sealed.prepare_upload(0)
    following = log.segments()[1].base_offset
    assert files.last_offset == following - 1
    assert files.snapshot.name == f"{following:020d}.snapshot"
    assert all(path.exists() for path in (files.log, files.index, files.timeindex, files.snapshot))
    assert files.txnindex is None
    for base_offset in (1, log.active_base_offset):
        with pytest.raises(UnknownSegment):
            log.sealed.prepare_upload(base_offset)


def test_a_missing_snapshot_is_rebuilt_whatever_else_is_in_the_folder(open_log, append_values):
    log = open_log()
    append_values(log, b"v", producer_id=5, producer_epoch=0, base_sequence=0)
    log.roll()
    good = log.sealed.prepare_upload(0).snapshot.read_bytes()
    log.sealed.prepare_upload(0).snapshot.unlink()
    (log.folder / "before-the-move.snapshot").write_bytes(b"somebody's")
    assert log.sealed.prepare_upload(0).snapshot.read_bytes() == good


def test_a_roll_on_a_full_disk_leaves_the_segment_unchanged(
    open_log, append_values, disk, records_of
):
    log = open_log(disk=disk)
    append_values(log, b"a")
    for name in ("open", "truncate", "rename"):
        disk.fail(name, 28)
        with pytest.raises(DiskFull):
            log.roll()
        disk.heal()
        append_values(log, name.encode())
    assert log.roll()
    append_values(log, b"z")
    log.writer.flush()
    assert [r.value for r in records_of(log)] == [b"a", b"open", b"truncate", b"rename", b"z"]
    assert log.close()
    log = open_log(clean=False, recovery_point=0)
    assert [r.value for r in records_of(log)] == [b"a", b"open", b"truncate", b"rename", b"z"]


def test_preallocated_space_is_freed_at_the_seal(open_log, append_values, records_of, tmp_path):
    log = open_log(config={"preallocate": True, "segment.bytes": 100_000})
    append_values(log, b"a")
    path = tmp_path / "t-0" / f"{0:020d}.log"
    assert path.stat().st_size == 100_000
    log.writer.flush()
    log = open_log(config={"preallocate": True, "segment.bytes": 100_000}, clean=False)
    assert [r.value for r in records_of(log)] == [b"a"]
    log.roll()
    assert path.stat().st_size == log.segments()[0].size_bytes < 1000
