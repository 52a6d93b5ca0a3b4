import pytest

from tests.fakes.bad_sectors import cannot_read
from tests.fakes.damage import flip
from tests.fakes.partition_logs import first_offset
from tierlog.host.waiting import Wait
from tierlog.hot_tier import border_check
from tierlog.hot_tier.log_writer import Append
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.errors import (
    CorruptBatch,
    CorruptDataError,
    InvalidRecord,
    OffsetMismatch,
    OffsetPastEnd,
    OffsetTrimmed,
)
from tierlog.record_format.index_layouts import parse_offset_index, parse_time_index
from tierlog.record_format.produced import ProducedBatches

NOW_MS = 1_700_000_000_000


def test_offsets_are_assigned_in_order_and_read_back(open_log, append_values, records_of):
    log = open_log()
    assert append_values(log, b"a", b"b").last_offset == 1
    assert append_values(log, b"c").base_offset == 2
    assert log.log_end_offset == 3
    log.writer.flush()
    assert [(r.offset, r.value) for r in records_of(log)] == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_records_are_not_visible_before_they_are_flushed(open_log, append_values):
    log = open_log()
    append_values(log, b"a")
    assert log.high_watermark == 0
    assert log.read_hot(0, max_bytes=100).slices == ()
    with pytest.raises(OffsetPastEnd):
        log.read_hot(1, max_bytes=100)
    assert log.writer.flush() == 1
    assert len(log.read_hot(0, max_bytes=100).slices) == 1
    assert log.read_hot(1, max_bytes=100).slices == ()
    with pytest.raises(OffsetPastEnd):
        log.read_hot(2, max_bytes=100)


def test_many_appends_are_one_write(open_log, produced, make_batch, disk, records_of):
    log = open_log(disk=disk)
    disk.calls.clear()
    appends = [Append(produced(make_batch([b"%d" % n]))) for n in range(3000)]
    outcomes = log.writer.append(appends)
    assert [outcome.base_offset for outcome in outcomes] == list(range(3000))
    log_writes = [call for call in disk.calls if call.name == "write_at" and call.suffix == ".log"]
    assert len(log_writes) == 3  # one call takes at most 1024 buffers
    log.writer.flush()
    assert [r.value for r in records_of(log)] == [b"%d" % n for n in range(3000)]


def test_short_writes_are_completed(open_log, append_values, disk, records_of):
    log = open_log(disk=disk)
    disk.most_bytes_a_write = 7
    append_values(log, b"a" * 100, b"b")
    log.writer.flush()
    assert [r.value for r in records_of(log)] == [b"a" * 100, b"b"]


def test_a_conditional_append_sees_the_appends_before_it(open_log, produced, make_batch):
    log = open_log()
    one, two, three = (produced(make_batch([b"x"])) for _ in range(3))
    outcomes = log.writer.append([Append(one, 0), Append(two, 0), Append(three, 1)])
    assert [getattr(outcome, "base_offset", None) for outcome in outcomes] == [0, None, 1]
    assert isinstance(outcomes[1], OffsetMismatch)
    assert outcomes[1].log_end_offset == 1


def test_an_append_without_a_batch_is_rejected(open_log):
    (outcome,) = open_log().writer.append([Append(ProducedBatches(bytearray(), [], []))])
    assert isinstance(outcome, InvalidRecord)


def test_bytes_are_stored_as_sent_except_for_offset_and_epoch(open_log, produced, make_batch):
    log = open_log()
    log.bump_epoch(7)
    sent = make_batch([b"v"], producer_id=5, producer_epoch=1, base_sequence=0)
    log.writer.append([Append(produced(make_batch([b"first"]))), Append(produced(sent))])
    log.writer.flush()
    data = b"".join(piece.read() for piece in log.read_hot(0, max_bytes=1 << 20).slices)
    stored = list(iter_headers(data))[1]
    assert (stored.base_offset, stored.leader_epoch) == (1, 7)
    at = stored.position
    assert data[at + 8 : at + 12] == sent[8:12]
    assert data[at + 16 :] == sent[16:]


def test_log_append_time_is_stamped(open_log, append_values, records_of, clock):
    log = open_log(config={"message.timestamp.type": "LogAppendTime"})
    clock.now_ms = NOW_MS + 5
    result = append_values(log, b"a", b"b", timestamps=[1, 2])
    log.writer.flush()
    assert result.log_append_time == NOW_MS + 5
    assert [r.timestamp for r in records_of(log)] == [NOW_MS + 5] * 2
    assert log.segment_stats(0).min_timestamp == NOW_MS + 5


def test_a_truncated_segment_is_reported_with_its_end(open_log, append_values):
    log = open_log()
    append_values(log, b"first")
    cut = log.size_bytes
    append_values(log, b"second")
    log.close()
    log = open_log()
    (view,) = log.segments()
    with view.path.open("r+b") as file:
        file.truncate(cut)
    with pytest.raises(CorruptBatch) as corrupt:
        log.segment_stats(0)
    assert (corrupt.value.file, corrupt.value.position) == (str(view.path), cut)


def test_a_read_returns_whole_batches_within_its_limit(open_log, append_values):
    log = open_log(config={"index.interval.bytes": 0})
    sizes = []
    for number in range(50):
        before = log.size_bytes
        append_values(log, b"v" * number)
        sizes.append(log.size_bytes - before)
    log.writer.flush()
    for start in range(50):
        for count in (1, 2, 7):
            wanted = sizes[start : start + count]
            read = log.read_hot(start, max_bytes=sum(wanted))
            assert first_offset(read) == start
            assert read.next_offset == start + len(wanted)
            assert read.slices[0].size_bytes == sum(wanted)
            short = log.read_hot(start, max_bytes=sum(wanted) - 1)
            assert short.next_offset == start + max(1, len(wanted) - 1)


@pytest.mark.parametrize("interval", [0, 100, 4096])
def test_a_read_ends_below_its_end_offset(open_log, append_values, interval):
    log = open_log(config={"index.interval.bytes": interval, "segment.bytes": 1024})
    for _ in range(30):
        append_values(log, b"1", b"2", b"3")
    log.writer.flush()
    for end in range(0, 91, 3):
        for start in range(0, end + 1, 5):
            position = start
            while position < end:
                read = log.read_hot(position, max_bytes=1 << 20, end_offset=end)
                assert position < read.next_offset <= end
                position = read.next_offset
            assert position == end


def test_a_read_continues_across_segments(open_log, append_values):
    log = open_log(config={"segment.bytes": 1024})
    for _ in range(40):
        append_values(log, b"v" * 100)
    log.writer.flush()
    read = log.read_hot(0, max_bytes=1 << 20)
    assert len(read.slices) == len(log.segments()) > 3
    assert read.next_offset == 40


def test_a_slice_outlives_the_deletion_of_its_segment(open_log, append_values, clock):
    log = open_log(config={"segment.bytes": 1024})
    for _ in range(40):
        append_values(log, b"v" * 100)
    log.writer.flush()
    piece = log.read_hot(0, max_bytes=1).slices[0]
    before = piece.read()
    assert log.delete_local(20)
    log.reap(at_once=True)
    assert piece.read() == before
    with pytest.raises(OffsetTrimmed):
        log.read_hot(0, max_bytes=1)


# --- indexes --------------------------------------------------------------------------------------


def test_index_entries_are_added_per_interval_with_last_offset_and_position(
    open_log, append_values, tmp_path
):
    log = open_log(config={"index.interval.bytes": 300})
    placed = []
    for number in range(42):
        position = log.size_bytes
        append_values(log, b"x" * 40, b"y", timestamps=[NOW_MS + number, NOW_MS])
        placed.append((position, number * 2 + 1, log.size_bytes - position))
    log.writer.flush()
    log.close()
    expected, since = [], 0
    for position, last_offset, size in placed:
        if since > 300:
            expected.append((last_offset, position))
            since = 0
        since += size
    name = tmp_path / "t-0" / f"{0:020d}"
    index = parse_offset_index(name.with_suffix(".index").read_bytes(), base_offset=0)
    assert [tuple(entry) for entry in index] == expected
    times = parse_time_index(name.with_suffix(".timeindex").read_bytes(), base_offset=0)
    assert [entry.offset for entry in times] == [offset for offset, _ in expected] + [83]
    assert times[-1].timestamp == NOW_MS + 41


def test_indexes_of_the_active_segment_are_preallocated_and_trimmed_at_the_seal(
    open_log, append_values, tmp_path
):
    log = open_log(config={"segment.index.bytes": 1001, "index.interval.bytes": 0})
    for _ in range(3):
        append_values(log, b"x")
    sizes = {path.suffix: path.stat().st_size for path in (tmp_path / "t-0").glob("0*.*index")}
    assert sizes == {".index": 1000, ".timeindex": 996}
    log.roll()
    sealed = {p.suffix: p.stat().st_size for p in (tmp_path / "t-0").glob(f"{0:020d}.*index")}
    assert sealed == {".index": 16, ".timeindex": 12}
    log.close()
    active = {p.suffix: p.stat().st_size for p in (tmp_path / "t-0").glob(f"{3:020d}.*index")}
    assert active == {".index": 0, ".timeindex": 0}


@pytest.mark.parametrize("sealed", [False, True])
def test_offsets_are_found_by_timestamp_even_if_timestamps_do_not_increase(
    open_log, append_values, sealed
):
    log = open_log(config={"index.interval.bytes": 200, "segment.bytes": 2048})
    times = [NOW_MS + (n * 7919) % 1000 for n in range(300)]
    for number in range(0, 300, 3):
        append_values(log, b"a", b"b", b"c", timestamps=times[number : number + 3])
    if sealed:
        log.roll()
    log.writer.flush()
    for timestamp in range(NOW_MS - 1, NOW_MS + 1001, 13):
        expected = next(((n, t) for n, t in enumerate(times) if t >= timestamp), None)
        assert log.offset_for_timestamp(timestamp) == expected
    log.trim(150)
    for timestamp in range(NOW_MS - 1, NOW_MS + 1001, 29):
        later = ((n, t) for n, t in enumerate(times) if t >= timestamp and n >= 150)
        assert log.offset_for_timestamp(timestamp) == next(later, None)


@pytest.mark.parametrize(
    "damage", ["missing", "short", "garbage", "zeros", "shifted", "unordered", "lying", "last lies"]
)
@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_a_corrupt_index_of_a_trusted_segment_is_rebuilt_on_use(
    open_log, append_a_record_per_ms, records_of, tmp_path, suffix, damage
):
    log = open_log(config={"index.interval.bytes": 100, "segment.bytes": 4096})
    append_a_record_per_ms(log, 100)
    log.close()
    path = tmp_path / "t-0" / f"{0:020d}{suffix}"
    good = path.read_bytes()
    size = 8 if suffix == ".index" else 12
    bad = {
        "missing": None,
        "short": good[: len(good) - 3],
        "garbage": b"\xff" * len(good),
        "zeros": bytes(len(good)),
        "shifted": good[:size] + good,
        "unordered": good[size : 2 * size] + good[:size] + good[2 * size :],
        "lying": b"".join(
            good[at : at + size - 1] + bytes([good[at + size - 1] ^ 2])
            for at in range(0, len(good), size)
        ),
        "last lies": good[: -size + 3] + b"\0" + good[-size + 4 :],
    }[damage]
    path.unlink() if bad is None else path.write_bytes(bad)
    log = open_log(config={"index.interval.bytes": 100, "segment.bytes": 4096})
    assert log.recovery.clean
    for number in range(100):
        assert first_offset(log.read_hot(number, max_bytes=1)) == number
    for number in range(100):
        assert log.offset_for_timestamp(NOW_MS + number) == (number, NOW_MS + number)
    log.sealed.prepare_upload(0)
    assert path.read_bytes() == good


@pytest.mark.parametrize("damage", ["unordered", "lying", "far", "first lies"])
@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_a_corrupt_index_of_the_active_segment_is_rebuilt_on_use(
    open_log, append_a_record_per_ms, tmp_path, suffix, damage
):
    """After a clean shutdown only its end is compared with the log."""
    config = {"index.interval.bytes": 100}
    log = open_log(config=config)
    append_a_record_per_ms(log, 100)
    log.close()
    path = tmp_path / "t-0" / f"{0:020d}{suffix}"
    good = path.read_bytes()
    size = 8 if suffix == ".index" else 12
    entries = [good[at : at + size] for at in range(0, len(good), size)]
    tail = entries[-2:]  # the last offset entry; of times also the one that sealing added
    bad = {
        "unordered": [*reversed(entries[:-2]), *tail],
        "lying": [entry[:-1] + bytes([entry[-1] ^ 2]) for entry in entries[:-2]] + tail,
        "far": [entry[: size - 4] + b"\x7f" + entry[size - 3 :] for entry in entries[:-2]] + tail,
        "first lies": [b"\0" + entries[0][1:-1] + b"\xff", *entries[1:]],
    }[damage]
    path.write_bytes(b"".join(bad))
    log = open_log(config=config)
    assert log.recovery.clean
    for end in (log.roll, lambda: log.sealed.prepare_upload(0), lambda: None):
        for number in range(100):
            assert log.offset_for_timestamp(NOW_MS + number) == (number, NOW_MS + number)
            assert first_offset(log.read_hot(number, max_bytes=1)) == number
        end()
    if damage in ("lying", "first lies"):  # others may not be met by any look-up
        assert path.read_bytes() == good


def test_a_time_index_that_lost_its_last_entries_is_rebuilt_on_use(
    open_log, append_a_record_per_ms, tmp_path
):
    log = open_log(config={"index.interval.bytes": 100})
    append_a_record_per_ms(log, 20)
    log.roll()
    log.close()
    path = tmp_path / "t-0" / f"{0:020d}.timeindex"
    good = path.read_bytes()
    for left in range(len(good) // 12):
        path.write_bytes(good[: 12 * left])
        log = open_log(recovery_point=20, config={"index.interval.bytes": 100})
        assert log.recovery.clean
        assert [segment.max_timestamp for segment in log.segments()] == [NOW_MS + 19, -1]
        assert log.offset_for_timestamp(NOW_MS + 19) == (19, NOW_MS + 19)
        log.sealed.prepare_upload(0)
        assert path.read_bytes() == good
        path.write_bytes(good[: 12 * left])  # since the largest timestamp was looked up
        log.sealed.prepare_upload(0)
        assert path.read_bytes() == good
        log.close()


@pytest.mark.parametrize("byte", [0, 6])
def test_no_index_is_rebuilt_from_batches_out_of_order(
    open_log, append_a_record_per_ms, tmp_path, byte
):
    log = open_log()
    append_a_record_per_ms(log, 10)
    log.roll()
    end = log.log_end_offset
    log.close()
    log_file, index = (tmp_path / "t-0" / f"{0:020d}{suffix}" for suffix in (".log", ".timeindex"))
    third = list(iter_headers(log_file.read_bytes()))[3]
    flip(log_file, third.position + byte)
    index.unlink()
    log = open_log(recovery_point=end)
    for use in (lambda: log.offset_for_timestamp(NOW_MS + 5), lambda: log.sealed.prepare_upload(0)):
        with pytest.raises(CorruptBatch) as refusal:
            use()
        assert (refusal.value.position, refusal.value.offset) == (third.position, 3)
    assert [segment.base_offset for segment in log.segments()] == [0, end]
    assert not index.exists()


@pytest.mark.parametrize("interval", [4096, 1 << 20])
@pytest.mark.parametrize("byte", [0, 6, 10, 30, 70])
def test_a_corrupt_batch_of_a_segment_found_on_disk_is_neither_skipped_nor_mistaken(
    open_log, append_values, tmp_path, byte, interval
):
    """Its base offset becomes very large, or one that is below: 44; or its length, or a byte under
    its checksum is wrong.
    """
    log = open_log(config={"index.interval.bytes": interval})
    for _ in range(120):
        append_values(log, b"1", b"2", b"3", timestamps=[NOW_MS + log.log_end_offset] * 3)
    log.roll()
    log.close()
    log_file = tmp_path / "t-0" / f"{0:020d}.log"
    headers = list(iter_headers(log_file.read_bytes()))
    corrupt = headers[100]
    assert corrupt.base_offset == 300
    flip(log_file, corrupt.position + byte)
    log = open_log(config={"index.interval.bytes": interval}, recovery_point=360)
    for start in range(360):
        if start in range(300, 303):
            with pytest.raises(CorruptDataError) as refusal:
                log.read_hot(start, max_bytes=1)
            assert (refusal.value.position, refusal.value.offset) == (corrupt.position, 300)
        else:
            read = log.read_hot(start, max_bytes=1)
            assert (first_offset(read), read.next_offset) == (start // 3 * 3, start // 3 * 3 + 3)
    for last in range(96, 106):
        read = log.read_hot(270, max_bytes=headers[last].end_position - headers[90].position)
        assert read.next_offset == min(3 * (last + 1), 300)
    assert log.read_hot(303, max_bytes=1 << 20).next_offset == 360
    if byte >= 30:  # the segment's largest timestamp can be told
        assert log.offset_for_timestamp(NOW_MS + 297) == (297, NOW_MS + 297)
    with pytest.raises(CorruptDataError):
        log.offset_for_timestamp(NOW_MS + 330)
    for use in (log.sealed.open, log.sealed.prepare_upload):
        with pytest.raises(CorruptBatch):
            use(0)


def test_a_segment_is_checked_once_in_a_thread_before_its_first_read(
    open_log, append_values, monkeypatch
):
    log = open_log()
    for end in (log.roll, log.roll, log.close):
        append_values(log, b"1" * 200, b"2" * 200)
        end()
    checked = []
    find_damage = border_check.find_damage
    monkeypatch.setattr(
        border_check,
        "find_damage",
        lambda state, segment: checked.append(segment.base_offset) or find_damage(state, segment),
    )
    log = open_log(recovery_point=6)
    assert [view.base_offset for view in log.segments()] == [0, 2, 4]
    append_values(log, b"new")
    log.writer.flush()
    assert first_offset(log.read_hot(6, max_bytes=1, wait=Wait.NEVER)) == 6
    assert not checked
    for base_offset in (2, 0, 4):
        with pytest.raises(BlockingIOError):
            log.read_hot(base_offset, max_bytes=1, wait=Wait.NEVER)
        for _ in range(2):
            log.read_hot(base_offset, max_bytes=1)
            log.read_hot(base_offset, max_bytes=1, wait=Wait.NEVER)
    log.roll()
    log.read_hot(4, max_bytes=1 << 20)
    assert checked == [2, 0, 4]
    log.close()


def test_what_this_process_wrote_or_recovered_is_not_checked_again(
    open_log, append_values, records_of, monkeypatch
):
    monkeypatch.setattr(border_check, "find_damage", lambda *_: pytest.fail("checked again"))
    log = open_log()
    for _ in range(2):
        append_values(log, b"v")
        log.roll()
    log.writer.flush()
    assert len(records_of(log)) == 2
    log.close()
    log = open_log(clean=False)
    assert len(records_of(log)) == 2
    log.sealed.prepare_upload(0)


@pytest.mark.parametrize("opens", [True, False])
def test_an_unreadable_segment_is_corrupt_and_keeps_nobody_from_the_others(
    open_log, append_a_record_per_ms, tmp_path, monkeypatch, opens
):
    log = open_log(config={"index.interval.bytes": 100})
    for _ in range(2):
        append_a_record_per_ms(log, 10)
        log.roll()
    log.close()
    log = open_log(config={"index.interval.bytes": 100})
    log_file = tmp_path / "t-0" / f"{0:020d}.log"
    cannot_read(monkeypatch, log_file, kept=tmp_path / "bad sectors", opens=opens)
    assert [view.max_timestamp for view in log.segments()] == [-1, NOW_MS + 9, -1]
    for use in (
        lambda: log.read_hot(5, max_bytes=1),
        lambda: log.offset_for_timestamp(NOW_MS + 5),
        lambda: log.segment_stats(0),
        lambda: log.sealed.crc32c(0),
        lambda: log.sealed.open(0),
        lambda: log.sealed.prepare_upload(0),
    ):
        with pytest.raises(CorruptBatch, match="cannot be read") as refusal:
            use()
        assert refusal.value.file == str(log_file)
    assert first_offset(log.read_hot(15, max_bytes=1)) == 15
    assert not log.offline
