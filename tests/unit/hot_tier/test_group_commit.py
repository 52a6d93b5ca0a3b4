import errno
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.waiting import until
from tierlog.host.threads import Threads
from tierlog.hot_tier.group_commit import FlushTimer, GroupCommit
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import Acks, Append
from tierlog.record_format.errors import DiskFull, LogOfflineError, OffsetMismatch, ShuttingDown

TIMEOUT_S = 10


@pytest.fixture
def executor():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def timer():
    timer = FlushTimer()
    yield timer
    timer.close()


@pytest.fixture
def one(produced, make_batch):
    return lambda value=b"x", expected=None, **fields: Append(
        produced(make_batch([value], **fields)), expected
    )


def hold_syncs(disk) -> tuple[threading.Event, threading.Event]:
    """(set when a sync has begun, set it to let syncs continue)."""
    begun, go_on = threading.Event(), threading.Event()
    real = disk.sync_bytes

    def slow(fd: int) -> None:
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        real(fd)

    disk.sync_bytes = slow
    return begun, go_on


def test_acks_all_completes_once_flushed(open_log, executor, timer, one):
    log = open_log()
    commits = GroupCommit(log.writer, executor.submit, timer)
    result = commits.submit(one(), acks=Acks.ALL).result(TIMEOUT_S)
    assert result.base_offset == 0
    assert log.high_watermark == 1


def test_acks_leader_completes_before_the_flush_and_is_flushed_in_time(
    open_log, executor, timer, one
):
    log = open_log(config={"flush.ms": 20})
    flushed = threading.Event()
    log.writer.on_high_watermark.append(lambda _: flushed.set())
    commits = GroupCommit(log.writer, executor.submit, timer)
    assert commits.submit(one(), acks=Acks.LEADER).result(TIMEOUT_S).base_offset == 0
    assert flushed.wait(TIMEOUT_S)
    assert log.high_watermark == 1


def test_an_endless_flush_ms_blocks_no_other_and_ends_when_lowered(
    open_log, executor, timer, one, tmp_path
):
    flushed = threading.Event()
    log = open_log(config={"flush.ms": 2**63 - 1})
    log.writer.on_high_watermark.append(lambda _: flushed.set())
    commits = GroupCommit(log.writer, executor.submit, timer)
    commits.submit(one(), acks=Acks.LEADER).result(TIMEOUT_S)
    test_acks_leader_completes_before_the_flush_and_is_flushed_in_time(
        lambda **given: open_log(tmp_path / "other-0", **given), executor, timer, one
    )
    assert not flushed.is_set()
    log.update_config(LogConfig.parse({"flush.ms": 20}))
    commits.submit(one(), acks=Acks.LEADER).result(TIMEOUT_S)
    assert flushed.wait(TIMEOUT_S)


def test_flush_messages_unflushed_records_trigger_a_flush(open_log, executor, timer, one):
    log = open_log(config={"flush.ms": 10**9, "flush.messages": 3})
    flushed = threading.Event()
    log.writer.on_high_watermark.append(lambda _: flushed.set())
    commits = GroupCommit(log.writer, executor.submit, timer)
    for _ in range(2):
        commits.submit(one(), acks=Acks.NONE).result(TIMEOUT_S)
    assert log.high_watermark == 0
    commits.submit(one(), acks=Acks.NONE).result(TIMEOUT_S)
    assert flushed.wait(TIMEOUT_S)


def test_appends_queued_during_a_flush_share_the_next_one(open_log, executor, timer, one, disk):
    log = open_log(disk=disk)
    commits = GroupCommit(log.writer, executor.submit, timer)
    commits.submit(one(), acks=Acks.ALL).result(TIMEOUT_S)
    disk.calls.clear()
    begun, go_on = hold_syncs(disk)
    first = commits.submit(one(), acks=Acks.ALL)
    assert begun.wait(TIMEOUT_S)
    others = [commits.submit(one(), acks=Acks.ALL) for _ in range(100)]
    written = commits.submit(one(), acks=Acks.LEADER)
    assert written.result(TIMEOUT_S).base_offset == 102  # writes continue during a flush
    assert not any(future.done() for future in (first, *others))
    go_on.set()
    assert [f.result(TIMEOUT_S).base_offset for f in (first, *others)] == list(range(1, 102))
    assert len([call for call in disk.calls if call.name == "sync_bytes"]) <= 5


def test_an_error_reaches_only_its_own_append(open_log, executor, timer, one):
    commits = GroupCommit(open_log().writer, executor.submit, timer)
    good = commits.submit(one(), acks=Acks.ALL)
    bad = commits.submit(one(expected=77), acks=Acks.ALL)
    assert good.result(TIMEOUT_S).base_offset == 0
    with pytest.raises(OffsetMismatch):
        bad.result(TIMEOUT_S)


def test_a_failed_flush_fails_all_that_waited(open_log, executor, timer, one, disk):
    log = open_log(disk=disk)
    commits = GroupCommit(log.writer, executor.submit, timer)
    disk.fail("sync_bytes", suffix=".log")
    waiting = [commits.submit(one(), acks=Acks.ALL) for _ in range(10)]
    for future in waiting:
        with pytest.raises(LogOfflineError):
            future.result(TIMEOUT_S)
    disk.heal()
    with pytest.raises(LogOfflineError):
        commits.submit(one(), acks=Acks.LEADER).result(TIMEOUT_S)
    assert log.high_watermark == 0


def test_a_bug_takes_the_log_offline_and_fails_every_future(
    open_log, executor, timer, one, monkeypatch
):
    log = open_log()
    commits = GroupCommit(log.writer, executor.submit, timer)
    commits.submit(one(), acks=Acks.ALL).result(TIMEOUT_S)

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("tierlog.hot_tier.log_writer._Group", broken)
    with pytest.raises(ZeroDivisionError):
        commits.submit(one(), acks=Acks.ALL).result(TIMEOUT_S)
    monkeypatch.undo()
    with pytest.raises(LogOfflineError, match="failed unexpectedly"):
        commits.submit(one(), acks=Acks.ALL).result(TIMEOUT_S)
    assert log.read_hot(0, max_bytes=1).next_offset == 1, "reads continue"
    assert commits.close(TIMEOUT_S)


def test_a_duplicate_waits_for_the_flush_of_the_original(open_log, executor, timer, one, disk):
    log = open_log(config={"flush.ms": 10**9}, disk=disk)
    commits = GroupCommit(log.writer, executor.submit, timer)
    fields = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 0}
    commits.submit(one(**fields), acks=Acks.LEADER).result(TIMEOUT_S)
    assert log.high_watermark == 0
    again = commits.submit(one(**fields), acks=Acks.ALL).result(TIMEOUT_S)
    assert (again.duplicate, again.base_offset) == (True, 0)
    assert log.high_watermark == 1


def test_a_duplicate_of_an_unwritten_batch_fails_too(open_log, timer, one, disk):
    """The bug: acknowledged with acks=1, and never completed with acks=all."""
    log = open_log(disk=disk)
    fields = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 0}
    disk.fail("write_at", errno.ENOSPC, suffix=".log")
    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(release.wait, TIMEOUT_S)
        commits = GroupCommit(log.writer, pool.submit, timer)
        waiting = [
            commits.submit(one(**fields), acks=acks) for acks in (Acks.ALL, Acks.ALL, Acks.LEADER)
        ]
        release.set()
        for future in waiting:
            with pytest.raises(DiskFull):
                future.result(TIMEOUT_S)
        assert commits.close(TIMEOUT_S)


def test_a_submitted_append_cannot_be_cancelled(open_log, executor, timer, one):
    commits = GroupCommit(open_log().writer, executor.submit, timer)
    future = commits.submit(one(), acks=Acks.ALL)
    assert not future.cancel()
    assert future.result(TIMEOUT_S).base_offset == 0


def test_after_close_appends_are_refused_and_all_earlier_ones_complete(
    open_log, executor, timer, one
):
    commits = GroupCommit(open_log().writer, executor.submit, timer)
    before = [commits.submit(one(), acks=Acks.ALL) for _ in range(50)]
    assert commits.close(TIMEOUT_S)
    assert all(future.done() for future in before)
    with pytest.raises(ShuttingDown):
        commits.submit(one(), acks=Acks.ALL).result(TIMEOUT_S)


def test_close_waits_until_the_futures_of_a_flush_are_completed(open_log, executor, timer, one):
    log, added = open_log(), threading.Event()
    log.writer.on_high_watermark.append(lambda _: added.wait(TIMEOUT_S))
    commits = GroupCommit(log.writer, executor.submit, timer)
    telling, go_on = threading.Event(), threading.Event()

    def callback(_: object) -> None:  # runs before the next future is completed
        telling.set()
        assert go_on.wait(TIMEOUT_S)

    future = commits.submit(one(), acks=Acks.ALL)
    future.add_done_callback(callback)
    added.set()
    assert telling.wait(TIMEOUT_S)
    assert not commits.close(0)
    go_on.set()
    assert commits.close(TIMEOUT_S)


def test_a_flush_that_outlasts_the_executor_completes_and_so_does_the_next(
    open_log, timer, one, disk
):
    """The disk hangs for longer than a stopping broker waits."""
    log, pool = open_log(disk=disk), Threads(4, name="appends")
    commits = GroupCommit(log.writer, pool.submit, timer)
    commits.submit(one(), acks=Acks.ALL).result(TIMEOUT_S)  # includes a sync for the epoch
    begun, go_on = hold_syncs(disk)
    first = commits.submit(one(), acks=Acks.ALL)
    assert begun.wait(TIMEOUT_S)
    second = commits.submit(one(), acks=Acks.ALL)
    commits.submit(one(), acks=Acks.LEADER).result(TIMEOUT_S)  # and so was the second written
    assert not commits.close(0)
    pool.shutdown(wait=False)
    go_on.set()
    assert [future.result(TIMEOUT_S).base_offset for future in (first, second)] == [1, 2]
    assert commits.close(TIMEOUT_S)


def test_many_producers_get_distinct_offsets(open_log, executor, timer, one, records_of):
    log = open_log(config={"segment.bytes": 4096})
    commits = GroupCommit(log.writer, executor.submit, timer)
    placed: dict[int, bytes] = {}

    def produce(name: int) -> None:
        for number in range(40):
            value = b"%d-%d" % (name, number)
            result = commits.submit(one(value), acks=Acks.ALL).result(TIMEOUT_S)
            assert log.high_watermark > result.last_offset
            placed[result.base_offset] = value

    threads = [threading.Thread(target=produce, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(placed) == list(range(320))
    assert {r.offset: r.value for r in records_of(log)} == placed


def test_the_timer_runs_callbacks_in_order_and_drops_the_rest_at_close():
    timer = FlushTimer()
    called: list[int] = []
    done = threading.Event()
    timer.call_after(30, lambda: (called.append(2), done.set()))
    timer.call_after(5, lambda: called.append(1))
    timer.call_after(10**6, lambda: called.append(3))
    assert done.wait(TIMEOUT_S)
    timer.close()
    assert called == [1, 2]


def test_the_timer_keeps_no_callback_that_it_has_run(timer):
    done = threading.Event()
    kept = weakref.ref(done)
    timer.call_after(1, done.set)
    assert done.wait(TIMEOUT_S)
    del done
    until(lambda: kept() is None, patience_s=TIMEOUT_S)


def test_a_failing_callback_is_reported_and_affects_no_other(monkeypatch):
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    timer, done = FlushTimer(), threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    timer.call_after(1, fail)
    timer.call_after(2, done.set)
    assert done.wait(TIMEOUT_S)
    timer.close()
    assert [failure.exc_type for failure in raised] == [ZeroDivisionError]
