"""What compaction may work on, and when a round is due."""

import os
import threading
from contextlib import nullcontext

import pytest

from tests.fakes.bad_sectors import cannot_read
from tests.fakes.clock import NOW_MS
from tests.fakes.damage import flip
from tests.fakes.partition_logs import batch, produced, unchecked
from tierlog.hot_tier.cleaner import (
    Cleanable,
    CleanerHooks,
    GroupLimits,
    Interrupted,
    group_segments,
)
from tierlog.hot_tier.log_folder import UNMIRRORED
from tierlog.hot_tier.log_writer import Append
from tierlog.hot_tier.segment import Segment, SegmentEnd
from tierlog.record_format.batch import NO_TIMESTAMP, iter_headers, set_max_timestamp
from tierlog.record_format.compaction import PlainKeyTable, make_key_table
from tierlog.record_format.errors import CorruptBatch, LogOfflineError

COMPACT = {"cleanup.policy": "compact", "flush.ms": 10**9}


def put(log, *pairs, **fields):
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    (result,) = log.writer.append([Append(produced(batch(values, keys=keys, **fields)))])
    return result


def test_the_active_segment_is_never_cleaned(open_log):
    log = open_log(config=COMPACT)
    put(log, (b"a", b"1"))
    log.writer.flush()
    assert log.sealed.cleanable(None).dirty_bytes == 0
    log.roll()
    assert log.sealed.cleanable(None).end_offset == 1


def test_records_younger_than_the_minimum_lag_and_all_after_them_are_not_cleaned(open_log):
    log = open_log(config=COMPACT | {"min.compaction.lag.ms": 1000})
    for age_ms in (5000, 100, 5000):
        put(log, (b"a", b"1"), timestamps=[NOW_MS - age_ms])
        log.roll()
    assert log.sealed.cleanable(None).end_offset == 1


def test_records_without_a_timestamp_are_as_old_as_their_file(open_log, tmp_path):
    log = open_log(config=COMPACT | {"min.compaction.lag.ms": 1000})
    put(log, (b"a", b"1"), timestamps=[NO_TIMESTAMP])
    log.roll()
    file = tmp_path / "t-0" / f"{0:020d}.log"
    for age_ms, end_offset in ((100, 0), (5000, 1)):
        modified_s = (NOW_MS - age_ms) / 1000
        os.utime(file, (modified_s, modified_s))
        assert log.sealed.cleanable(None).end_offset == end_offset


def test_an_open_transaction_blocks_compaction(open_log):
    log = open_log(config=COMPACT)
    put(log, (b"a", b"1"))
    log.roll()
    producer = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 0}
    sent = unchecked(batch([b"x"], keys=[b"a"], transactional=True, **producer))
    log.writer.append([Append(sent, verify=lambda _: None)])
    log.roll()
    assert log.sealed.cleanable(None).end_offset == 1
    found = []
    asking = threading.Thread(target=lambda: found.append(log.offsets), daemon=True)
    with log._state.lock:  # held as by an append while the event loop reads the offsets
        asking.start()
        asking.join(10)
        assert [txn.last_stable_offset for txn in found] == [1]


def test_a_checkpoint_outside_the_log_is_ignored(open_log):
    log = open_log(config=COMPACT)
    for _ in range(3):
        put(log, (b"a", b"1"))
        log.roll()
    assert log.sealed.cleanable(2).first_dirty_offset == 2
    assert log.sealed.cleanable(99).first_dirty_offset == 0


@pytest.mark.parametrize(
    ("clean", "dirty", "ratio", "due"),
    [(0, 0, 0.0, False), (50, 50, 0.5, False), (49, 51, 0.5, True), (99, 1, 0.0, True)],
)
def test_a_round_is_due_above_the_dirty_ratio(clean, dirty, ratio, due):
    cleanable = Cleanable(0, 10, clean, dirty, None)
    assert cleanable.is_due(min_dirty_ratio=ratio, max_lag_ms=2**63 - 1, now_ms=NOW_MS) is due


def test_a_round_is_due_after_the_maximum_lag_whatever_the_ratio(open_log):
    log = open_log(config=COMPACT | {"max.compaction.lag.ms": 1000})
    put(log, (b"a", b"1"), timestamps=[NOW_MS - 2000])
    log.roll()
    cleanable = log.sealed.cleanable(None)
    assert cleanable.oldest_dirty_ms == NOW_MS - 2000
    assert cleanable.is_due(min_dirty_ratio=1.0, max_lag_ms=1000, now_ms=NOW_MS)
    assert not cleanable.is_due(min_dirty_ratio=1.0, max_lag_ms=3000, now_ms=NOW_MS)


def test_the_maximum_lag_rolls_the_active_segment(open_log):
    log = open_log(config=COMPACT | {"max.compaction.lag.ms": 1000})
    put(log, (b"a", b"1"), timestamps=[NOW_MS - 5000])
    put(log, (b"a", b"2"), timestamps=[NOW_MS - 3000])
    assert [segment.base_offset for segment in log.segments()] == [0, 1]


@pytest.mark.parametrize("byte", [0, 3, 6])
def test_a_wrong_base_offset_ends_a_round_before_it_chooses_the_wrong_record(
    open_log, tmp_path, byte
):
    log = open_log(config=COMPACT)
    put(log, (b"a", b"old"))
    put(log, (b"a", b"new"))
    log.roll()
    log_file = tmp_path / "t-0" / f"{0:020d}.log"
    flip(log_file, byte)
    before = log_file.read_bytes()
    with pytest.raises(CorruptBatch, match="offset"):
        log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20))
    assert log_file.read_bytes() == before


def test_groups_respect_segment_size_index_size_and_borders(tmp_path):
    sizes = [40, 40, 40, 90, 10, 10]
    segments = []
    for number, size in enumerate(sizes):
        segments.append(Segment(tmp_path, number * 10, SegmentEnd(size, number * 10 + 10)))
        (tmp_path / f"{number * 10:020d}.index").write_bytes(bytes(8))

    def bases(**limits):
        given = {"segment_bytes": 100, "index_bytes": 80, "borders": frozenset(), **limits}
        groups = group_segments(segments, GroupLimits(**given))
        return [[segment.base_offset for segment in group] for group in groups]

    assert bases() == [[0, 10], [20], [30, 40], [50]]
    assert bases(index_bytes=8) == [[0], [10], [20], [30], [40], [50]]
    assert bases(borders=frozenset((10, 50))) == [[0], [10, 20], [30, 40], [50]]


def test_relative_offsets_of_a_group_fit_31_bits(tmp_path):
    first = Segment(tmp_path, 0, SegmentEnd(10, 2**31 - 5))
    second = Segment(tmp_path, 2**31 - 5, SegmentEnd(10, 2**31 + 5))
    limits = GroupLimits(1000, 1000, frozenset())
    assert len(group_segments([first, second], limits)) == 2


def test_segments_are_grouped_and_none_is_empty(open_log, records_of):
    log = open_log(config=COMPACT | {"segment.bytes": 1024})
    for number in range(40):
        put(log, (b"key", b"%0200d" % number))
    log.roll()
    assert len(log.segments()) > 5
    done = log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20))
    assert done.complete
    views = log.segments()
    assert all(view.size_bytes for view in views[:-1])
    assert [record.value for record in records_of(log)] == [b"%0200d" % 39]
    assert views[-2].last_offset == 39
    assert log.log_end_offset == 40


def test_an_idempotent_producer_continues_after_its_records_were_compacted_away(open_log):
    log = open_log(config=COMPACT)
    fields = {"producer_id": 7, "producer_epoch": 0}
    put(log, (b"a", b"1"), base_sequence=0, **fields)
    put(log, (b"a", b"2"), base_sequence=1, **fields)
    put(log, (b"a", b"3"))
    log.roll()
    log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20))
    log.close()
    again = open_log(config=COMPACT, clean=False)
    assert put(again, (b"a", b"2"), base_sequence=1, **fields).duplicate
    assert put(again, (b"a", b"4"), base_sequence=2, **fields).base_offset == 3


def test_a_segment_emptied_before_is_not_rewritten(open_log):
    log = open_log(config=COMPACT)
    put(
        log, (b"a", b"1"), producer_id=7, producer_epoch=0, base_sequence=0
    )  # its last batch is kept
    log.roll()
    put(log, (b"a", b"2"))  # a segment keeps its last batch
    log.roll()
    put(log, (b"a", b"3"), (b"b", b"4"))
    log.roll()
    apart = CleanerHooks(swapping=lambda: nullcontext(frozenset((1, 2))))
    log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20), apart)
    assert [view.size_bytes for view in log.segments()[:2]] == [61, 61]
    before = log.sealed.swap_sequence
    done = log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20), apart)
    assert done.complete
    assert (log.sealed.swap_sequence, done.written_bytes) == (before, 0)


@pytest.mark.parametrize("border", [1, 2])
def test_a_group_is_not_merged_across_the_bucket_end_as_of_its_swap(open_log, border):
    log = open_log(config=COMPACT)
    for value in (b"1", b"2", b"3"):
        put(log, (b"a", value))
        log.roll()
    found = iter([frozenset(), frozenset((border,))])  # when planned, and at the swap
    hooks = CleanerHooks(swapping=lambda: nullcontext(next(found)))
    with pytest.raises(Interrupted):
        log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20), hooks)
    assert log.base_offsets == (0, 1, 2, 3)


def test_the_unmirrored_marker_is_read_at_the_open(open_log):
    """Reading the folder later could race with a new marker and lose it."""
    log = open_log(config=COMPACT)
    put(log, (b"a", b"1"), (b"a", b"2"))
    log.roll()
    log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20))
    log.close()
    again = open_log(config=COMPACT)
    (again.folder / UNMIRRORED).unlink()
    assert not again.sealed.mirrored


@pytest.mark.parametrize("table", [PlainKeyTable, make_key_table])
def test_tombstones_can_be_kept_forever(open_log, records_of, clock, table):
    log = open_log(config=COMPACT | {"delete.retention.ms": 2**63 - 1})
    put(log, (b"a", b"1"), (b"b", b"2"))
    put(log, (b"a", None), (b"b", b"3"), timestamps=[NOW_MS - 7, NOW_MS])
    log.roll()
    for _ in range(2):
        clock.now_ms += 10**12
        log.sealed.clean(log.sealed.cleanable(None), table(1 << 20))
        found = [(r.offset, r.key, r.value, r.timestamp) for r in records_of(log)]
        assert found == [(2, b"a", None, NOW_MS - 7), (3, b"b", b"3", NOW_MS)]


def test_closing_the_log_interrupts_a_round(open_log):
    """As deleting the topic does."""
    log = open_log(config=COMPACT)
    for value in (b"1", b"2"):
        put(log, (b"a", value))
    log.roll()
    batches = iter(range(4))  # both for the keys, then both for the rewrite

    def close_at_the_last() -> bool:
        if next(batches) == 3:
            log.close()
        return False

    hooks = CleanerHooks(stopping=close_at_the_last)
    with pytest.raises(LogOfflineError, match="was closed"):
        log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20), hooks)


def test_records_that_do_not_decode_are_reported_with_their_position(open_log, monkeypatch):
    log = open_log(config=COMPACT)
    for key in (b"a", b"b"):
        put(log, (key, b"1"))
    log.roll()
    path = log.segments()[0].path
    data = bytearray(path.read_bytes())
    first, second = iter_headers(data)
    data[second.body_position] ^= 0x04  # the record's length, with a correct checksum
    set_max_timestamp(data, second, timestamp=second.max_timestamp)
    path.write_bytes(data)
    monkeypatch.setattr("tierlog.hot_tier.batch_walk.CHECK_CHUNK_BYTES", first.size_bytes)
    place = {"file": str(path), "position": second.position, "offset": 1}
    with pytest.raises(CorruptBatch) as bad:
        log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20))
    assert {name: getattr(bad.value, name) for name in place} == place
    log.close()
    log = open_log(config=COMPACT)
    with pytest.raises(CorruptBatch) as bad:
        log.segment_stats(0)
    assert {name: getattr(bad.value, name) for name in place} == place


def test_a_flipped_bit_ends_the_round_with_an_error_and_changes_nothing(open_log, records_of):
    log = open_log(config=COMPACT)
    for value in (b"1", b"2"):
        put(log, (b"a", value))
    log.roll()
    path = log.segments()[0].path
    flip(path, -2)
    flipped = path.read_bytes()
    with pytest.raises(CorruptBatch) as bad:
        log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20))
    assert str(path) in str(bad.value)
    assert path.read_bytes() == flipped
    assert not [p for p in path.parent.iterdir() if p.suffix == ".cleaned"]


@pytest.mark.parametrize("unreadable", [0, 1])
def test_a_segment_that_the_disk_cannot_read_ends_a_round_and_nothing_else(
    open_log, tmp_path, monkeypatch, unreadable
):
    log = open_log(config=COMPACT)
    for _ in range(2):
        put(log, (b"a", b"v"))
        log.roll()
    log_file = tmp_path / "t-0" / f"{unreadable:020d}.log"
    cannot_read(monkeypatch, log_file, kept=tmp_path / "bad sectors")
    with pytest.raises(CorruptBatch, match="cannot be read") as refusal:
        log.sealed.clean(log.sealed.cleanable(1), PlainKeyTable(1 << 20))
    assert refusal.value.file == str(log_file)
    assert put(log, (b"a", b"new")).base_offset == 2


def test_a_round_that_begins_within_a_segment_rebuilds_its_index(open_log, tmp_path):
    log = open_log(config=COMPACT | {"index.interval.bytes": 100})
    for number in range(20):
        put(log, (b"a", b"%d" % number))
    log.roll()
    log.trim(15)
    index = tmp_path / "t-0" / f"{0:020d}.index"
    index.unlink()
    cleanable = log.sealed.cleanable(None)
    assert cleanable.first_dirty_offset == 15
    assert log.sealed.clean(cleanable, PlainKeyTable(1 << 20)).complete
