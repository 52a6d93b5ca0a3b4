"""A replicated log: its high watermark is given, and nobody sees or settles anything above it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.fakes.clock import NOW_MS
from tests.fakes.partition_logs import batch, produced, unchecked
from tierlog.hot_tier.group_commit import FlushTimer, GroupCommit
from tierlog.hot_tier.log_writer import Acks, Append
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import LeaderChanged, OffsetPastEnd, UnknownSegment
from tierlog.record_format.produced import build_marker

TIMEOUT_S = 10


@pytest.fixture
def commits():
    timer = FlushTimer()
    with ThreadPoolExecutor(4) as pool:
        yield lambda log: GroupCommit(log.writer, pool.submit, timer)
    timer.close()


@pytest.fixture
def open_leader(open_log):
    def _open(**arguments):
        log = open_log(**arguments)
        log.replicate(log.flushed_end)
        log.begin_term(log.leader_epoch + 1)
        return log

    return _open


def one(value=b"x", **fields):
    return Append(produced(batch([value], **fields)))


def transactional(producer):
    sent = batch(
        [b"v"], producer_id=producer, producer_epoch=0, base_sequence=0, transactional=True
    )
    return Append(unchecked(sent), verify=lambda _: None)


def end_of(producer, *, committed):
    marker = EndMarker(committed, 0)
    built = build_marker(marker, producer_id=producer, producer_epoch=0, timestamp=NOW_MS)
    return Append(built, marker=marker)


def put(log, *appends):
    for outcome in log.writer.append(appends):
        if isinstance(outcome, Exception):
            raise outcome
    log.writer.flush()


def test_readers_see_nothing_above_what_is_committed(open_leader, append_values, records_of):
    log = open_leader()
    for number in range(6):
        append_values(log, b"%d" % number, timestamps=[NOW_MS + number])
        if number == 3:
            log.roll()  # 4 and 5 are in the active segment
    log.writer.flush()
    assert (log.high_watermark, log.flushed_end, log.log_end_offset) == (0, 6, 6)
    for committed in range(7):
        log.commit_up_to(committed)
        assert log.high_watermark == log.offsets.last_stable_offset == committed
        assert [record.offset for record in records_of(log, 0)] == list(range(committed))
        found = log.offset_for_timestamp(NOW_MS + committed - 1)
        assert found is None if committed == 0 else found[0] == committed - 1
        assert log.offset_for_timestamp(NOW_MS + committed) is None
        with pytest.raises(OffsetPastEnd):
            log.read_hot(committed + 1, max_bytes=1)
        with pytest.raises(OffsetPastEnd):
            log.trim(committed + 1)
    log.commit_up_to(3)
    assert log.high_watermark == 6, "it never goes back"
    with pytest.raises(AssertionError):
        log.commit_up_to(7)


def test_only_what_is_committed_is_settled(open_leader, append_values):
    """Offered to be uploaded, cleaned, deleted or downloaded."""
    log = open_leader(config={"cleanup.policy": "compact"})
    for number in range(3):
        for _ in range(2):
            append_values(log, b"v" * 10, keys=[b"k%d" % number])
        log.roll()
    size_bytes = log.segments()[0].size_bytes
    for committed, settled in ((0, 0), (1, 0), (2, 1), (3, 1), (5, 2), (6, 3)):
        log.commit_up_to(committed)
        views = log.segments()
        assert [view.sealed for view in views] == [n < settled for n in range(4)]
        assert log.sealed.readable_ranges == [(0, 2), (2, 4), (4, 6)][:settled]
        assert log.sealed.cleanable(0).end_offset == 2 * settled
        for number, view in enumerate(views[:-1]):
            readable = min(max(committed - 2 * number, 0), 2) * size_bytes // 2
            assert log.readable_bytes(view) == readable
            with closing(log.sealed.open(view.base_offset)) as opened:
                assert opened.size_bytes == readable
                assert opened.next_offset == min(view.last_offset + 1, committed)
            if number >= settled:
                with pytest.raises(UnknownSegment):
                    log.sealed.prepare_upload(view.base_offset)
    assert log.sealed.prepare_upload(4).last_offset == 5


def test_local_segments_above_the_high_watermark_are_not_deleted(open_leader, append_values):
    log = open_leader()
    for _ in range(3):
        append_values(log, b"v")
        log.roll()
    log.commit_up_to(1)
    assert log.delete_local(3) == [0]
    log.commit_up_to(3)
    assert log.delete_local(3) == [1, 2]


def test_the_active_segment_is_open_up_to_what_is_committed(open_leader, append_values):
    log = open_leader()
    size_bytes = 0
    for _ in range(3):
        append_values(log, b"v")
        size_bytes = size_bytes or log.size_bytes
    log.writer.flush()
    for committed in range(4):
        log.commit_up_to(committed)
        with closing(log.open_active(0)) as opened:
            assert (opened.size_bytes, opened.next_offset) == (committed * size_bytes, committed)


def test_a_transaction_is_stable_once_its_end_is_committed(open_leader):
    """Another leader may not have the marker: its last stable offset must not be lower."""
    log = open_leader()
    put(log, transactional(1), transactional(2), end_of(1, committed=True))
    put(log, one(), end_of(2, committed=False))
    stable = []
    for committed in range(6):
        log.commit_up_to(committed)
        stable.append(log.offsets.last_stable_offset)
    assert stable == [0, 0, 0, 1, 1, 5]


def test_acks_all_completes_once_it_is_committed(open_leader, commits):
    log = open_leader()
    flushed, appended = threading.Event(), []
    log.writer.on_flushed.append(lambda offset: offset == 3 and flushed.set())
    log.writer.on_appended.append(appended.append)
    queue = commits(log)
    waiting = [queue.submit(one(), acks=Acks.ALL) for _ in range(3)]
    assert flushed.wait(TIMEOUT_S)
    assert appended[-1] == 3
    assert queue.submit(one(), acks=Acks.LEADER).result(TIMEOUT_S).base_offset == 3
    log.commit_up_to(2)
    assert [future.result(TIMEOUT_S).base_offset for future in waiting[:2]] == [0, 1]
    assert not waiting[2].done()
    assert not queue.close(0), "it waits for what is parked"
    log.commit_up_to(3)
    assert waiting[2].result(TIMEOUT_S).base_offset == 2
    assert queue.close(TIMEOUT_S)


def test_acks_all_completes_if_it_is_committed_by_the_flush_itself(open_leader, commits):
    """A set of one: nobody calls later."""
    log = open_leader()
    log.writer.on_flushed.append(log.commit_up_to)
    queue = commits(log)
    for number in range(20):
        assert queue.submit(one(), acks=Acks.ALL).result(TIMEOUT_S).base_offset == number


def test_a_duplicate_waits_until_the_original_is_committed(open_leader, commits):
    log = open_leader()
    put(log, one(producer_id=5, producer_epoch=0, base_sequence=0))
    queue = commits(log)
    again = queue.submit(one(producer_id=5, producer_epoch=0, base_sequence=0), acks=Acks.ALL)
    with pytest.raises(TimeoutError):
        again.result(0.1)
    log.commit_up_to(1)
    assert again.result(TIMEOUT_S).duplicate


def changed():
    return LeaderChanged("another broker leads")


def test_whoever_steps_down_fails_all_that_waits_and_all_that_comes(open_leader, commits, disk):
    log = open_leader(disk=disk)
    queue = commits(log)
    flushed, syncing, go_on = threading.Event(), threading.Event(), threading.Event()
    log.writer.on_flushed.append(lambda _: flushed.set())
    parked = queue.submit(one(), acks=Acks.ALL)
    assert flushed.wait(TIMEOUT_S)
    sync = disk.sync_bytes

    def hold(fd):
        syncing.set()
        assert go_on.wait(TIMEOUT_S)
        sync(fd)

    disk.sync_bytes = hold
    flushing = queue.submit(one(), acks=Acks.ALL)
    assert syncing.wait(TIMEOUT_S)
    unflushed = queue.submit(one(), acks=Acks.ALL)
    assert queue.submit(one(), acks=Acks.LEADER).result(TIMEOUT_S).base_offset == 3
    log.end_term()
    queue.fail_parked(changed)
    go_on.set()
    late = queue.submit(one(), acks=Acks.ALL)
    for future in (parked, flushing, unflushed, late):
        with pytest.raises(LeaderChanged):
            future.result(TIMEOUT_S)
    assert queue.close(TIMEOUT_S)
    queue.accept()
    with pytest.raises(LeaderChanged):
        queue.submit(one(), acks=Acks.LEADER).result(TIMEOUT_S)
    assert log.writer.on_high_watermark == []


def test_only_a_leader_appends(open_log):
    log = open_log()
    log.replicate(0)
    (refused,) = log.writer.append([one()])
    assert isinstance(refused, LeaderChanged)
    log.begin_term(7)
    put(log, one())
    assert [tuple(entry) for entry in log.epochs] == [(7, 0)]
    log.end_term()
    (refused,) = log.writer.append([one()])
    assert isinstance(refused, LeaderChanged)
    log.begin_term(8)
    assert log.base_offsets == (0, 1), "a new leader begins a segment"
    put(log, one())
    assert [tuple(entry) for entry in log.epochs] == [(7, 0), (8, 1)]
