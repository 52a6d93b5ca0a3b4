"""Reads take no lock: state read first may be older than state read next."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.clock import NOW_MS
from tests.fakes.faulty_disk import FaultyDisk
from tierlog.hot_tier.open_files import OpenFiles
from tierlog.hot_tier.segment_lookup import SegmentLookup
from tierlog.record_format.errors import OffsetTrimmed


class SeenBefore:
    """A segment whose end was read before everything else."""

    def __init__(self, segment):
        self._segment, self.end = segment, segment.end

    def __getattr__(self, name):
        return getattr(self._segment, name)


class Watched:
    """Columns of an index that do something after each entry."""

    def __init__(self, columns, then):
        self._columns, self._then = columns, then

    def append(self, *entry):
        self._columns.append(*entry)
        self._then()

    def __len__(self):
        return len(self._columns)

    def __getitem__(self, number):
        return self._columns[number]

    def __getattr__(self, name):
        return getattr(self._columns, name)


def test_an_index_entry_past_the_end_a_reader_saw_is_not_corruption(open_log, append_values):
    log = open_log(config={"index.interval.bytes": 4096})
    for size in (5000, 3000, 10_000):  # the last has no index entry
        append_values(log, b"x" * size)
    lookup = SegmentLookup(SeenBefore(log._state.active.segment), log._state.files)
    append_values(log, b"x" * 10_000)
    assert lookup.find_offset(2).base_offset == 2


def test_a_timestamp_whose_batch_is_being_appended_is_not_corruption(open_log, append_values):
    log = open_log(config={"index.interval.bytes": 0})
    append_values(log, b"a")
    seen = []
    times = log._state.active.times
    times.columns = Watched(
        times.columns, lambda: seen.append(log.offset_for_timestamp(NOW_MS + 1, end_offset=2))
    )
    append_values(log, b"b", timestamps=[NOW_MS + 1])
    assert seen == [(1, NOW_MS + 1)]


def test_a_look_up_in_an_empty_active_segment_stores_nothing(open_log, append_values):
    """Stored after the first append, it would overwrite that append's largest timestamp."""
    log = open_log()
    append_values(log, b"a")
    log.roll()
    before = log._state.active.segment.largest
    assert [view.max_timestamp for view in log.segments()] == [NOW_MS, -1]
    assert log._state.active.segment.largest is before


class ReadBeforeRename(FaultyDisk):
    """Opens each file for a reader just before it is renamed."""

    def __init__(self, files):
        super().__init__()
        self._files = files

    def rename(self, source, target):
        self._files.open(source)
        super().rename(source, target)


def test_a_file_opened_during_its_deletion_is_not_cached(open_log, append_values):
    """Its disk space would never be freed."""
    files = OpenFiles()
    log = open_log(open_files=files, disk=ReadBeforeRename(files))
    append_values(log, b"a")
    log.roll()
    path = log.segments()[0].path
    assert log.delete_local(1) == [0]
    assert files.get(path) is None


def is_free(lock):
    """Whether another thread could take it."""

    def attempt():
        return lock.acquire(blocking=False) and not lock.release()

    with ThreadPoolExecutor(1) as other:
        return other.submit(attempt).result()


class SeesWhetherFree(FaultyDisk):
    """Notes at each rename whether another thread could take the log's lock."""

    def __init__(self):
        super().__init__()
        self.lock, self.was_free = None, []

    def rename(self, source, target):
        self.was_free.append(is_free(self.lock))
        super().rename(source, target)


def test_an_upload_rebuilds_no_index_while_a_reader_may(open_log, append_values):
    """Both would write the same temporary file."""
    disk = SeesWhetherFree()
    log = open_log()
    append_values(log, b"a")
    log.roll()
    log._state.disk, disk.lock = disk, log._state.lock
    log.segments()[0].path.with_suffix(".index").unlink()
    log.sealed.prepare_upload(0)
    assert disk.was_free == [False, False]  # both indexes


class AtTheFirstByte(OpenFiles):
    """Calls `then`, once, when the start of a `.log` is read: a rebuild of its indexes begins."""

    def __init__(self):
        super().__init__()
        self.then = None

    def pread(self, fd, size_bytes, position):
        if position == 0 and self.then is not None:
            then, self.then = self.then, None
            then()
        return os.pread(fd, size_bytes, position)


@pytest.mark.parametrize("rolls", [False, True])
def test_appends_do_not_wait_for_the_rebuild_of_an_index(open_log, append_values, tmp_path, rolls):
    """It reads the whole segment. What was appended meanwhile is indexed too."""
    config, files = {"index.interval.bytes": 100}, AtTheFirstByte()
    log = open_log(config=config)
    for _ in range(50):
        append_values(log, b"v" * 40)
    log.close()
    index = tmp_path / "t-0" / f"{0:020d}.index"
    good = index.read_bytes()
    index.write_bytes(good[:7] + bytes([good[7] ^ 1]) + good[8:])
    log = open_log(config=config, open_files=files)
    assert log.recovery.clean
    found_free = []

    def append_more():
        found_free.append(is_free(log._state.lock))
        for _ in range(50):
            append_values(log, b"v" * 40)
        if rolls:
            log.roll()

    files.then = append_more
    log.read_hot(1, max_bytes=1)
    assert found_free == [True]
    log.roll()
    rebuilt = index.read_bytes()
    assert rebuilt.startswith(good)
    assert len(rebuilt) > len(good)
    index.unlink()
    files.then = lambda: found_free.append(is_free(log._state.lock))
    log.sealed.prepare_upload(0)
    assert found_free == [True, True]
    assert index.read_bytes() == rebuilt


def test_a_closed_log_rebuilds_no_index(open_log, append_values):
    """Its folder is deleted with its topic, and a new topic may have the same name."""
    log = open_log()
    append_values(log, b"a")
    log.roll()
    log.close()
    log.segments()[0].path.with_suffix(".index").unlink()
    with pytest.raises(OffsetTrimmed):
        log.read_hot(0, max_bytes=1 << 20)
    with pytest.raises(OffsetTrimmed):
        log.offset_for_timestamp(NOW_MS)


class DeletesBeforeItOpens(OpenFiles):
    """Retention deletes a file just before it is opened."""

    log = None

    def open(self, path, *wait):
        if self.log is not None:
            self.log.delete_local(1)
        return super().open(path, *wait)


def test_listing_segments_survives_a_concurrent_deletion(open_log, append_values):
    log = open_log()
    for value in (b"a", b"b"):
        append_values(log, value)
        log.roll()
    assert log.close()
    files = DeletesBeforeItOpens()
    files.log = log = open_log(open_files=files, clean=True)
    assert [(view.base_offset, view.max_timestamp) for view in log.segments()] == [
        (0, -1),
        (1, NOW_MS),
        (2, -1),
    ]


@pytest.mark.parametrize("read", ["log_start_offset", "segments", "flushed", "leader_epoch"])
def test_offsets_are_consistent_whatever_changes_while_they_are_read(
    open_log, append_values, monkeypatch, read
):
    log = open_log(config={"segment.bytes": 1024})
    append_values(log, b"a")
    log.writer.flush()
    state, moves = log._state, [1]

    def move_all() -> None:
        for _ in range(20):
            append_values(log, b"b" * 200)
        log.trim(log.writer.flush())
        log.delete_local(log.log_start_offset)

    def read_late(self):
        if moves:
            moves.pop()
            move_all()
        return self.__dict__[read]

    def write(self, value):
        self.__dict__[read] = value

    monkeypatch.setattr(type(state), read, property(read_late, write), raising=False)
    start, local_start, last_stable, high_watermark, log_end, _ = log.offsets
    assert not moves
    assert start <= local_start <= last_stable <= high_watermark <= log_end
