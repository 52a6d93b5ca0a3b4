import errno
import os
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fakes.clock import NOW_MS
from tests.fakes.partition_logs import first_offset
from tierlog.hot_tier import active_segment
from tierlog.hot_tier.log_writer import Append
from tierlog.record_format.errors import DiskFull, LogOfflineError


def open_below(folder):
    """Names of the open files there, including unlinked ones."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(fd.readlink())
    return sorted(path.name for path in found if path.parent == folder)


def test_a_full_disk_rejects_the_write_and_nothing_else(
    open_log, append_values, records_of, disk, tmp_path
):
    log = open_log(disk=disk)
    append_values(log, b"before")
    log.writer.flush()
    disk.fail("write_at", errno.ENOSPC, suffix=".log", bytes_first=30)
    for _ in range(3):
        with pytest.raises(DiskFull):
            append_values(log, b"refused")
    assert not log.offline
    assert [r.value for r in records_of(log)] == [b"before"]
    assert (tmp_path / "t-0" / f"{0:020d}.log").stat().st_size == log.size_bytes
    disk.heal()
    assert append_values(log, b"after").base_offset == 1
    log.writer.flush()
    assert [r.value for r in records_of(log)] == [b"before", b"after"]


def test_a_full_disk_rejects_all_appends_in_the_write(open_log, produced, make_batch, disk):
    log = open_log(disk=disk)
    disk.fail("write_at", errno.ENOSPC, suffix=".log")
    appends = [Append(produced(make_batch([b"x"]))) for _ in range(3)]
    assert [type(outcome) for outcome in log.writer.append(appends)] == [DiskFull] * 3
    assert log.log_end_offset == 0
    disk.heal()
    assert [outcome.base_offset for outcome in log.writer.append(appends)] == [0, 1, 2]


def test_a_write_that_fails_before_a_roll_rejects_the_appends_after_it(
    open_log, append_values, produced, make_batch, disk, monkeypatch
):
    log = open_log(config={"segment.bytes": 1024}, disk=disk)
    append_values(log, b"before")

    def full_once(*_):
        monkeypatch.undo()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "write_at", full_once)
    appends = [Append(produced(make_batch([b"x" * 600]))) for _ in range(2)]
    assert [type(outcome) for outcome in log.writer.append(appends)] == [DiskFull] * 2
    assert [outcome.base_offset for outcome in log.writer.append(appends)] == [1, 2]


def test_a_failed_write_leaves_the_producer_unchanged(open_log, append_values, disk):
    log = open_log(disk=disk)
    fields = {"producer_id": 1, "producer_epoch": 0}
    append_values(log, b"a", base_sequence=0, **fields)
    disk.fail("write_at", errno.ENOSPC, suffix=".log")
    with pytest.raises(DiskFull):
        append_values(log, b"b", base_sequence=1, **fields)
    disk.heal()
    assert not append_values(log, b"b", base_sequence=1, **fields).duplicate
    assert append_values(log, b"b", base_sequence=1, **fields).duplicate


@pytest.mark.parametrize(
    ("number", "failure"), [(errno.ENOSPC, DiskFull), (errno.EIO, LogOfflineError)]
)
def test_outcomes_that_depend_on_an_unwritten_append_fail_with_it(
    open_log, produced, make_batch, disk, number, failure
):
    log = open_log(disk=disk)
    fields = {"producer_id": 1, "producer_epoch": 1}
    group = [
        Append(produced(make_batch([b"first"], base_sequence=0, **fields))),
        Append(produced(make_batch([b"first"], base_sequence=0, **fields))),  # a duplicate
        Append(produced(make_batch([b"gap"], base_sequence=2, **fields))),
        Append(produced(make_batch([b"old"], producer_id=1, producer_epoch=0, base_sequence=0))),
        Append(produced(make_batch([b"conditional"])), expected_offset=0),
    ]
    disk.fail("write_at", number, suffix=".log")
    assert [type(outcome) for outcome in log.writer.append(group)] == [failure] * len(group)
    assert log.log_end_offset == 0


def test_a_plan_that_failed_before_a_roll_is_not_reused(
    open_log, produced, make_batch, append_values, records_of, disk
):
    log = open_log(config={"segment.bytes": 2000}, disk=disk)
    append_values(log, b"before")
    fields = {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}
    first, again = (Append(produced(make_batch([b"first"], **fields))) for _ in range(2))
    disk.fail("write_at", errno.ENOSPC, suffix=".log", times=1)
    refused, rolling, written = log.writer.append(
        [first, Append(produced(make_batch([bytes(1900)]))), again]
    )
    assert (type(refused), type(rolling)) == (DiskFull, DiskFull)
    assert (written.base_offset, written.duplicate) == (1, False)
    log.writer.flush()
    assert [r.value for r in records_of(log)] == [b"before", b"first"]


def test_appends_written_before_a_roll_succeed_even_if_the_rest_fail(
    open_log, produced, make_batch, records_of, disk
):
    log = open_log(config={"segment.bytes": 2000}, disk=disk)
    group = [Append(produced(make_batch([value]))) for value in (b"first", bytes(1900))]
    disk.fail("write_at", errno.ENOSPC, suffix=".log", after=1)
    first, refused = log.writer.append(group)
    assert first.base_offset == 0
    assert isinstance(refused, DiskFull)
    disk.heal()
    log.writer.flush()
    assert [r.value for r in records_of(log)] == [b"first"]


def test_a_failed_write_that_cannot_be_truncated_takes_the_log_offline(
    open_log, append_values, disk
):
    log = open_log(disk=disk)
    disk.fail("write_at", errno.ENOSPC, suffix=".log", bytes_first=30)
    disk.fail("truncate", suffix=".log")
    with pytest.raises(LogOfflineError):
        append_values(log, b"a")


def test_a_duplicate_of_a_written_batch_needs_no_space(
    open_log, append_values, produced, make_batch, disk
):
    log = open_log(disk=disk)
    fields = {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}
    append_values(log, b"a", **fields)
    disk.fail("write_at", errno.ENOSPC, suffix=".log")
    group = [Append(produced(make_batch([b"b"]))), Append(produced(make_batch([b"a"], **fields)))]
    refused, repeat = log.writer.append(group)
    assert isinstance(refused, DiskFull)
    assert (repeat.duplicate, repeat.base_offset) == (True, 0)


def test_bytes_of_a_failed_write_in_preallocated_space_are_never_recovered(
    open_log, append_values, records_of, produced, make_batch, disk, tmp_path
):
    log = open_log(config={"preallocate": True, "segment.bytes": 1 << 20}, disk=disk)
    group = [Append(produced(make_batch([value]))) for value in (b"A1", b"A2", b"A3")]
    disk.fail("write_at", errno.ENOSPC, suffix=".log", bytes_first=2 * len(group[0].batches.body))
    assert [type(outcome) for outcome in log.writer.append(group)] == [DiskFull] * 3
    disk.heal()
    append_values(log, b"B1")
    log.writer.flush()
    shutil.copytree(log.folder, tmp_path / "after the crash")
    log = open_log(tmp_path / "after the crash", clean=False)
    assert [r.value for r in records_of(log)] == [b"B1"]


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_a_failed_roll_leaves_no_file_open(open_log, append_values, disk, suffix):
    log = open_log(config={"segment.bytes": 1024}, disk=disk)
    append_values(log, b"x" * 1000)
    disk.fail("open", errno.ENOSPC, suffix=suffix)
    for _ in range(3):
        with pytest.raises(DiskFull):
            append_values(log, b"x" * 1000)
    assert open_below(log.folder) == [
        f"{0:020d}{kind}" for kind in (".index", ".log", ".timeindex")
    ]


@pytest.mark.parametrize("failing", ["create", "snapshot"])
@pytest.mark.parametrize("how", ["append", "roll"])
def test_a_log_with_a_new_segment_that_cannot_be_removed_goes_offline(
    open_log, append_values, records_of, disk, failing, how
):
    # A file system that copies on write needs space to unlink a file too.
    log = open_log(config={"segment.bytes": 1024}, disk=disk)
    append_values(log, b"v" * 600)
    log.writer.flush()
    if failing == "create":
        disk.fail("open", errno.ENOSPC, suffix=".timeindex")
    else:
        disk.fail("rename", errno.ENOSPC, suffix=".snapshot")
    disk.fail("unlink", errno.ENOSPC)
    with pytest.raises(LogOfflineError):
        append_values(log, b"w" * 600) if how == "append" else log.roll()
    disk.heal()
    with pytest.raises(LogOfflineError):
        append_values(log, b"x")
    log.close()
    log = open_log(clean=False, recovery_point=1)
    assert append_values(log, b"y").base_offset == 1
    log.writer.flush()
    assert [record.value for record in records_of(log)] == [b"v" * 600, b"y"]


def test_a_file_that_cannot_be_unlinked_blocks_no_other_and_is_retried(
    open_log, append_values, tmp_path
):
    log = open_log(config={"segment.bytes": 1024})
    for _ in range(4):
        append_values(log, b"x" * 1000)
    log.writer.flush()
    assert log.delete_local(3) == [0, 1, 2]
    stays = tmp_path / "t-0" / f"{0:020d}.log.deleted"
    stays.unlink()
    stays.mkdir()
    with pytest.raises(OSError, match="directory"):
        log.reap(at_once=True)
    assert [path.name[:20] for path in (tmp_path / "t-0").glob("*.log.deleted")] == [f"{0:020d}"]
    stays.rmdir()
    assert log.reap(at_once=True) == 1
    assert log.reap(at_once=True) == 0


def test_a_full_disk_does_not_block_deletion(open_log, append_values, disk, tmp_path):
    log = open_log(config={"segment.bytes": 1024}, disk=disk)
    for _ in range(3):
        append_values(log, b"x" * 1000)
    log.writer.flush()
    disk.fail("open", errno.ENOSPC, suffix=".tmp")
    assert log.delete_local(2) == [0, 1]
    assert log.reap(at_once=True) == 2
    assert len(list((tmp_path / "t-0").glob("*.log*"))) == 1
    disk.heal()
    append_values(log, b"x" * 1000)
    log.writer.flush()
    assert log.delete_local(3) == [2]
    assert [entry.start_offset for entry in log.epochs] == [3], "what was too much is gone"


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize(
    ("number", "failure"), [(errno.ENOSPC, DiskFull), (errno.EIO, LogOfflineError)]
)
def test_segments_are_deleted_in_order_even_if_one_cannot_be(
    open_log, append_values, records_of, disk, tmp_path, number, failure, after
):
    """A gap between the remaining segments would be corruption to the next start."""
    log = open_log(config={"segment.bytes": 1024}, disk=disk)
    for _ in range(4):
        append_values(log, b"x" * 1000)
    end = log.writer.flush()
    disk.fail("rename", number, suffix=".deleted", after=after)
    with pytest.raises(failure):
        log.delete_local(2)
    disk.heal()
    logs = [int(path.stem) for path in sorted(log.folder.glob("*.log"))]
    assert [view.base_offset for view in log.segments()] == logs
    assert [r.offset for r in records_of(log)] == [n for n in range(4) if n >= logs[0]]
    assert log.delete_local(3) == [n for n in logs if n < 3]
    log.reap(at_once=True)
    assert not list(log.folder.glob("*.deleted")), "what was renamed before the error takes room"
    shutil.copytree(log.folder, tmp_path / "after the crash")
    log = open_log(tmp_path / "after the crash", clean=False, recovery_point=end)
    assert [r.offset for r in records_of(log)] == [3]


def test_index_entries_are_written_a_block_at_a_time_and_all_when_it_closes(
    open_log, append_values, disk, tmp_path
):
    def writes() -> int:
        return sum((one.name, one.suffix) == ("write_at", ".index") for one in disk.calls)

    log = open_log(config={"index.interval.bytes": 0}, disk=disk)
    for _ in range(active_segment.INDEX_WRITE_BYTES // 8):
        append_values(log, b"a")
    assert writes() == 0
    append_values(log, b"a")
    append_values(log, b"a")
    assert writes() == 1
    log.close()
    assert writes() == 2
    index = tmp_path / "t-0" / f"{0:020d}.index"
    assert index.stat().st_size == active_segment.INDEX_WRITE_BYTES + 8


@pytest.fixture
def index_written_at_once(monkeypatch):
    monkeypatch.setattr(active_segment, "INDEX_WRITE_BYTES", 1)


@pytest.mark.usefixtures("index_written_at_once")
def test_an_index_without_space_rejects_no_append(open_log, append_values, disk, tmp_path):
    config = {"index.interval.bytes": 0}
    log = open_log(config=config, disk=disk)
    append_values(log, b"a")
    disk.fail("write_at", errno.ENOSPC, suffix=".index")
    for _ in range(5):
        append_values(log, b"b")
    disk.heal()
    append_values(log, b"c")
    log.writer.flush()
    for offset in range(7):
        assert first_offset(log.read_hot(offset, max_bytes=1)) == offset
    log.close()
    good = {path.name: path.read_bytes() for path in (tmp_path / "t-0").glob("*index")}
    assert len(good[f"{0:020d}.index"]) == 6 * 8
    open_log(config=config, clean=False).close()
    assert {p.name: p.read_bytes() for p in (tmp_path / "t-0").glob("*index")} == good


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_a_lost_index_that_cannot_be_written_anew_fails_no_read(
    open_log, append_a_record_per_ms, disk, tmp_path, suffix, number
):
    config = {"index.interval.bytes": 100}
    log = open_log(config=config)
    append_a_record_per_ms(log, 20)
    log.roll()
    log.close()
    index = tmp_path / "t-0" / f"{0:020d}{suffix}"
    good = index.read_bytes()
    index.unlink()
    log = open_log(config=config, disk=disk)
    disk.fail("open", number, suffix=".tmp")
    assert [view.max_timestamp for view in log.segments()] == [NOW_MS + 19, -1]
    for offset in range(20):
        assert first_offset(log.read_hot(offset, max_bytes=1)) == offset
        assert log.offset_for_timestamp(NOW_MS + offset) == (offset, NOW_MS + offset)
    assert not log.offline
    with pytest.raises(OSError, match=os.strerror(number)):
        log.sealed.prepare_upload(0)  # an upload needs the file
    disk.heal()
    log.sealed.prepare_upload(0)
    assert index.read_bytes() == good


@pytest.mark.usefixtures("index_written_at_once")
@pytest.mark.parametrize("suffix", [".log", ".index"])
def test_an_io_error_on_write_takes_the_log_offline(
    open_log, append_values, records_of, disk, suffix
):
    log = open_log(config={"index.interval.bytes": 0}, disk=disk)
    append_values(log, b"a")
    log.writer.flush()
    disk.fail("write_at", errno.EIO, suffix=suffix)
    with pytest.raises(LogOfflineError):
        append_values(log, b"b")
    disk.heal()
    assert log.offline
    with pytest.raises(LogOfflineError):
        append_values(log, b"c")
    with pytest.raises(LogOfflineError):
        log.writer.flush()
    with pytest.raises(LogOfflineError):
        log.roll()
    assert [r.value for r in records_of(log)] == [b"a"]
    assert not log.close()


def test_a_failed_flush_takes_the_log_offline_permanently(
    open_log, append_values, records_of, disk
):
    log = open_log(disk=disk)
    append_values(log, b"a")
    log.writer.flush()
    append_values(log, b"b")
    disk.fail("sync_bytes", suffix=".log")
    with pytest.raises(LogOfflineError):
        log.writer.flush()
    disk.heal()
    syncs = len([call for call in disk.calls if call.name == "sync_bytes"])
    with pytest.raises(LogOfflineError):
        log.writer.flush()
    assert len([call for call in disk.calls if call.name == "sync_bytes"]) == syncs
    assert log.high_watermark == 1
    assert [r.value for r in records_of(log)] == [b"a"]
    assert not log.close()


@pytest.mark.parametrize(("name", "suffix"), [("sync_folder", None), ("sync_bytes", ".index")])
def test_a_roll_whose_names_or_indexes_cannot_be_synced_is_not_acknowledged(
    open_log, append_values, disk, name, suffix
):
    log = open_log(config={"segment.bytes": 1024}, disk=disk)
    append_values(log, b"a" * 900)
    log.writer.flush()
    append_values(log, b"b" * 900)
    disk.fail(name, suffix=suffix)
    with pytest.raises(LogOfflineError):
        log.writer.flush()
    assert log.high_watermark == 1


def test_a_segment_that_is_sealed_during_a_flush_is_flushed_by_the_next(
    open_log, append_values, disk, monkeypatch
):
    log = open_log(config={"segment.bytes": 1024}, disk=disk)
    append_values(log, b"x" * 600)
    sync = disk.sync_bytes

    def rolled_meanwhile(fd):
        monkeypatch.undo()
        append_values(log, b"y" * 600)
        sync(fd)

    monkeypatch.setattr(disk, "sync_bytes", rolled_meanwhile)
    log.writer.flush()
    assert (log.high_watermark, log.base_offsets) == (1, (0, 1))
    disk.fail("sync_bytes", suffix=".index")
    with pytest.raises(LogOfflineError):
        log.writer.flush()


def test_a_flush_gets_a_descriptor_when_clients_used_all(open_log, append_values, records_of):
    log = open_log(config={"segment.bytes": 1024})
    for _ in range(3):
        append_values(log, b"v" * 600)  # rolls: files and the folder must be opened for a sync
    for _ in range(2):
        with no_descriptor_left():
            log.writer.flush()
            assert not log.offline
        append_values(log, b"v" * 600)
    assert len(records_of(log)) == 4


@contextmanager
def no_descriptor_left():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_the_folder_is_synced_before_the_first_flush_of_a_new_segment_ends(
    open_log, append_values, disk, tmp_path
):
    log = open_log(config={"segment.bytes": 1024}, disk=disk)
    append_values(log, b"a" * 900)
    log.writer.flush()
    disk.calls.clear()
    append_values(log, b"b" * 100)
    log.writer.flush()
    folder = str(tmp_path / "t-0")
    assert ("sync_folder", folder) in disk.calls
    disk.calls.clear()
    append_values(log, b"b")
    log.writer.flush()
    assert ("sync_folder", folder) not in disk.calls


def test_a_sealed_segment_is_closed_once_it_is_flushed(open_log, append_values, tmp_path):
    log = open_log()
    append_values(log, b"v")
    before = len(open_below(tmp_path / "t-0"))
    for _ in range(3):
        log.roll()
        append_values(log, b"v")
    assert len(open_below(tmp_path / "t-0")) == before


def test_an_epoch_is_durable_before_its_first_record(open_log, append_values, disk, tmp_path):
    log = open_log(disk=disk)
    log.bump_epoch(3)
    disk.fail("sync_bytes", errno.ENOSPC, suffix=".tmp")
    with pytest.raises(DiskFull):
        append_values(log, b"a")
    disk.heal()
    append_values(log, b"a")
    assert (tmp_path / "t-0/leader-epoch-checkpoint").read_bytes() == b"0\n1\n3 0\n"
    assert log.epochs == ((3, 0),)


@pytest.mark.parametrize("preallocate", [False, True])
def test_a_clean_close_syncs_no_file_twice(open_log, append_values, disk, preallocate):
    log = open_log(disk=disk, config={"preallocate": preallocate})
    append_values(log, b"a")
    log.writer.flush()
    disk.calls.clear()
    assert log.close()
    synced = sorted(call.suffix for call in disk.calls if call.name.startswith("sync"))
    # The folder, the snapshot before its rename, and a log that got shorter after its last flush.
    assert synced == ["", ".index", *[".log"] * preallocate, ".timeindex", ".tmp"]


def test_a_failed_close_is_not_a_clean_shutdown(open_log, append_values, disk):
    log = open_log(disk=disk)
    append_values(log, b"a")
    log.writer.flush()
    disk.fail("sync_bytes", suffix=".index")
    with pytest.raises(LogOfflineError):
        log.close()
    assert log.offline


def test_a_log_that_cannot_be_opened_leaves_no_file_open(open_log, append_values, disk, tmp_path):
    log = open_log()
    append_values(log, b"v")
    log.close()
    disk.fail("sync_bytes", suffix=".log")
    with pytest.raises(LogOfflineError):
        open_log(disk=disk, clean=False)
    assert ("open", ".index") in [(call.name, call.suffix) for call in disk.calls]
    assert open_below(tmp_path / "t-0") == []


def test_closing_a_log_waits_for_a_flush_in_progress(open_log, append_values, monkeypatch):
    """As at a topic's deletion: its last producers must not get EBADF."""
    log, flushing, may_go_on = open_log(), threading.Event(), threading.Event()
    close_clean = log._close_clean
    append_values(log, b"one")

    def waiting_sync(target):
        flushing.set()
        assert may_go_on.wait(10)
        target.active.sync_log()

    def one_more_flush():
        clean = close_clean()
        monkeypatch.setattr(log.writer, "_sync", waiting_sync)
        flushes.append(pool.submit(log.writer.flush))
        assert flushing.wait(10)
        return clean

    flushes = []
    monkeypatch.setattr(log, "_close_clean", one_more_flush)
    with ThreadPoolExecutor(2) as pool:
        closing = pool.submit(log.close)
        assert flushing.wait(10)
        assert not wait([closing], timeout=0.2).done
        may_go_on.set()
        assert flushes[0].result(10) == 1
        assert closing.result(10)


def test_nothing_starts_in_a_log_that_is_closing(open_log, append_values, monkeypatch):
    """By a task that outlives the stop, such as an offload: the next start trusts the close."""
    log = open_log()
    append_values(log, b"one")
    flush, close_clean, refused = log.writer.flush, log._close_clean, []

    def begin() -> None:
        for what in (lambda: append_values(log, b"two"), log.roll):
            with pytest.raises(LogOfflineError, match="was closed") as refusal:
                what()
            refused.append(refusal)

    def flush_and_begin():
        flush()
        begin()

    def close_and_begin():
        clean = close_clean()
        begin()
        return clean

    monkeypatch.setattr(log.writer, "flush", flush_and_begin)
    monkeypatch.setattr(log, "_close_clean", close_and_begin)
    assert log.close()
    assert len(refused) == 4
    again = open_log(clean=True)
    assert again.recovery.clean
    assert (again.base_offsets, again.high_watermark) == ((0,), 1)
