"""Cutting a follower's log: what is left is as if nothing had ever come after it."""

import errno
from random import Random

import pytest

from tests.fakes.clock import NOW_MS
from tests.fakes.lossy_disk import LossyDisk
from tests.fakes.partition_logs import append_values, batches_of, records_of
from tests.fakes.replicas import begin_to_follow, begin_to_lead, catch_up, copy_once, files_of
from tests.unit.hot_tier.test_replica_append import (
    append_of_all_kinds,
    end_of,
    put,
    transactional,
)
from tierlog.hot_tier.log_folder import SNAPSHOT
from tierlog.record_format.errors import DiskFull, LogOfflineError

CONFIG = {"segment.bytes": 2048, "index.interval.bytes": 300}


class Checkpoint:
    """Of the recovery point."""

    def __init__(self, log):
        self._log = log
        self.saved = log.flushed_end

    def save(self):
        self.saved = self._log.flushed_end


@pytest.fixture
def leader(open_log, tmp_path):
    """Nothing of it is committed, and what is not flushed is in several segments."""
    log = begin_to_lead(open_log(tmp_path / "leader-0", config=CONFIG))
    append_of_all_kinds(log, rounds=10)
    log.writer.flush()
    return log


def follow(leader, log, *, until=None, commit=0):
    """Copy in small pieces; the last ones are not flushed."""
    end = leader.log_end_offset if until is None else until
    while log.log_end_offset < end:
        assert copy_once(leader, log, max_bytes=1)
        if log.log_end_offset <= leader.log_end_offset * 2 // 3:
            log.writer.flush()
    log.commit_up_to(commit)
    return log


def borders_of(log):
    return [header.base_offset for header, _ in batches_of(log, 0, end_offset=log.log_end_offset)]


def last_batches(log):
    """Of older ones those of the last segment are remembered, as after a restart."""
    return {one.producer_id: one._replace(batches=one.batches[-1:]) for one in log.producers()}


def test_a_cut_log_is_the_log_that_never_had_more(leader, open_log, tmp_path):
    """Cut at every batch, it has the same files and memory as one that came only there; then it
    takes the rest like that one.
    """
    borders = borders_of(leader)
    for number, border in enumerate(borders):
        cut, never = (
            begin_to_follow(open_log(tmp_path / f"{name}{number}-0", config=CONFIG))
            for name in ("cut", "never")
        )
        follow(leader, cut)
        follow(leader, never, until=border)
        cut.cut(border, lambda: None)
        assert (cut.log_end_offset, cut.epochs) == (border, never.epochs)
        assert cut.flushed_end <= border
        assert last_batches(cut) == last_batches(never)
        assert cut.offsets.last_stable_offset == never.offsets.last_stable_offset
        assert cut.max_timestamp() == never.max_timestamp()
        first_timestamps = {log._state.active.first_timestamp for log in (cut, never)}
        if cut.base_offsets == never.base_offsets:
            assert len(first_timestamps) == 1, "it rolls by the time of its first record"
        assert all(
            cut.aborted_transactions(0, end) == never.aborted_transactions(0, end)
            for end in (border // 2, border)
        )
        for log in (cut, never):
            catch_up(leader, log)
            assert log.close()
        assert files_of(cut) == files_of(never)


def test_a_cut_within_a_batch_takes_all_of_it(open_log, leader):
    log = begin_to_follow(open_log())
    append_values(leader, b"1", b"2", b"3")
    end = leader.log_end_offset
    follow(leader, log)
    log.cut(end - 1, lambda: None)
    assert log.log_end_offset == end - 3


def test_a_cut_at_or_above_the_end_only_drops_what_no_record_has(open_log, leader):
    log = follow(leader, begin_to_follow(open_log()))
    before = (log.offsets, log.epochs, files_of(log))
    log.cut(log.log_end_offset, lambda: None)
    log.cut(log.log_end_offset + 5, lambda: None)
    assert before == (log.offsets, log.epochs, files_of(log))


def test_the_recovery_point_goes_down_before_anything_is_removed(open_log, leader, tmp_path):
    log = follow(leader, begin_to_follow(open_log(config=CONFIG)))
    log.writer.flush()
    border, before, seen = borders_of(log)[5], files_of(log), []

    def refuse():
        seen.append(log.flushed_end)
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        log.cut(border, refuse)
    assert (seen, log.flushed_end) == ([border], log.log_end_offset)
    assert files_of(log) == before
    log.cut(border, lambda: seen.append(log.flushed_end))
    assert seen == [border, border]


def test_what_is_committed_is_never_cut(open_log, leader):
    log = follow(leader, begin_to_follow(open_log(config=CONFIG)))
    log.writer.flush()
    border = borders_of(log)[5]
    log.commit_up_to(border)
    with pytest.raises(AssertionError):
        log.cut(border - 1, lambda: None)
    log.cut(border, lambda: None)
    assert log.high_watermark == log.log_end_offset == border
    assert [record.offset for record in records_of(log)] != []


def test_a_transaction_that_was_cut_holds_nobody_back(open_log, tmp_path):
    leader = begin_to_lead(open_log(tmp_path / "leader-0"))
    put(leader, transactional(1), end_of(1, committed=True))
    log = follow(leader, begin_to_follow(open_log()))
    log.cut(0, lambda: None)
    log.begin_term(2)
    append_values(log, b"v")
    log.writer.flush()
    log.commit_up_to(1)
    assert log.offsets.last_stable_offset == 1


def test_readers_below_the_watermark_notice_nothing(open_log, leader):
    log = follow(leader, begin_to_follow(open_log(config=CONFIG)))
    log.writer.flush()
    border = borders_of(log)[12]
    log.commit_up_to(border)
    reads = [log.read_hot(offset, max_bytes=300) for offset in range(border)]
    expected = [[piece.read() for piece in read.slices] for read in reads]
    before = records_of(log)
    log.cut(border, lambda: None)
    assert [[piece.read() for piece in read.slices] for read in reads] == expected
    for read in reads:
        read.close()
    assert records_of(log) == before
    assert log.offset_for_timestamp(NOW_MS) is not None


def test_a_snapshot_above_the_cut_is_gone_before_the_log_comes_there_again(
    open_log, leader, tmp_path
):
    """A clean stop leaves one at the log's end, which is no segment's base."""
    log = follow(leader, begin_to_follow(open_log(config=CONFIG)))
    end = log.log_end_offset
    assert log.close()
    again = begin_to_follow(open_log(config=CONFIG))
    again.cut(borders_of(again)[-2], lambda: None)
    left = [int(path.stem) for path in again.folder.glob(f"*{SNAPSHOT}")]
    assert left
    assert max(left) < again.log_end_offset < end


@pytest.mark.parametrize("call", ["unlink", "truncate", "sync_bytes", "sync_folder", "open"])
def test_a_disk_that_fails_takes_the_log_offline(open_log, leader, disk, call):
    log = follow(leader, begin_to_follow(open_log(config=CONFIG, disk=disk)))
    border = borders_of(log)[5]
    log.commit_up_to(border)
    before = records_of(log)
    disk.fail(call)
    with pytest.raises(LogOfflineError):
        log.cut(border, lambda: None)
    disk.heal()
    assert log.offline
    assert records_of(log) == before, "reads continue"


def test_a_full_disk_cuts_nothing(open_log, leader, disk):
    log = follow(leader, begin_to_follow(open_log(config=CONFIG, disk=disk)))
    before = (records_of(log, 0, end_offset=log.log_end_offset), log.epochs)
    disk.fail("rename", errno.ENOSPC)
    with pytest.raises(DiskFull):
        log.cut(1, lambda: None)
    disk.heal()
    assert before == (records_of(log, 0, end_offset=log.log_end_offset), log.epochs)
    log.cut(1, lambda: None)
    assert log.log_end_offset == 1


# --- crashes --------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


def die_at(number):
    calls = iter(range(number + 1))

    def before_call(_):
        if next(calls) == number:
            raise Crash

    return before_call


def headers_of_all(log):
    found = batches_of(log, end_offset=log.log_end_offset)
    return [(header.crc, header.base_offset, header.leader_epoch) for header, _ in found]


def check_images(disk, log, open_log, place, *, checkpoint, was, kept):
    """After a crash at this moment the log is a beginning of what it was, and has what is kept."""
    for seed in range(4):
        image = place / f"image{seed}-0"
        disk.crash_into(image, Random(seed), of=log.folder)
        again = open_log(
            image,
            config=CONFIG,
            clean=False,
            recovery_point=checkpoint.saved,
            flushed_end=checkpoint.saved,
        )
        found = headers_of_all(again)
        assert found == was[: len(found)]
        assert again.log_end_offset >= kept
        epochs = [entry for entry in again.epochs if entry.start_offset >= again.log_end_offset]
        assert not epochs
        again.abandon()


def test_after_a_crash_in_a_cut_the_log_is_between_the_two(leader, open_log, tmp_path):
    border = borders_of(leader)[8]
    for number in range(1000):
        disk, place = LossyDisk(), tmp_path / str(number)
        place.mkdir()
        log = follow(leader, begin_to_follow(open_log(place / "t-0", config=CONFIG, disk=disk)))
        log.writer.flush()
        checkpoint, was = Checkpoint(log), headers_of_all(log)
        disk.before_call = die_at(number)
        try:
            log.cut(border, checkpoint.save)
        except Crash:
            disk.before_call = lambda _: None
            log.abandon()
            check_images(disk, log, open_log, place, checkpoint=checkpoint, was=was, kept=border)
        else:
            disk.before_call = lambda _: None
            break
    assert number > 10


def producers_of(log):
    return {one.producer_id for one in log.producers()}


@pytest.mark.parametrize("has_producers", [True, False])
@pytest.mark.parametrize("where", ["below its end", "at its end", "at its border", "above"])
def test_after_a_crash_a_log_that_begins_anew_is_the_old_one_or_has_begun(
    open_log, tmp_path, where, has_producers
):
    """Never none, and none that is refused; and if it has begun, the producers are those given."""
    leader = begin_to_lead(open_log(tmp_path / "leader-0", config=CONFIG))
    append_of_all_kinds(leader, rounds=4)
    leader.roll()
    snapshot = leader.folder / f"{leader.base_offsets[1]:020d}{SNAPSHOT}"
    given = snapshot.read_bytes() if has_producers else None
    end, border = leader.log_end_offset, borders_of(leader)[8]
    offset = {"below its end": border, "above": end + 5}.get(where, end)
    outcomes = set()
    for number in range(1000):
        disk, place = LossyDisk(), tmp_path / str(number)
        place.mkdir()
        log = begin_to_follow(open_log(place / "t-0", config=CONFIG, disk=disk))
        follow(leader, log, until=end)
        log.writer.flush()
        if where == "at its border":
            log.roll_at(end)
        checkpoint, was = Checkpoint(log), headers_of_all(log)
        disk.before_call = die_at(number)
        try:
            log.begin_anew_at(offset, given, checkpoint.save)
        except Crash:
            disk.before_call = lambda _: None
            log.abandon()
        else:
            break
        for seed in range(2):
            image = place / f"image{seed}-0"
            disk.crash_into(image, Random(seed), of=log.folder)
            known = {"recovery_point": checkpoint.saved, "flushed_end": checkpoint.saved}
            again = open_log(image, config=CONFIG, clean=False, **known)
            found = headers_of_all(again)
            has_begun = not found
            outcomes.add(has_begun)
            if has_begun:
                assert again.base_offsets == (offset,)
                assert bool(producers_of(again)) is has_producers
            else:
                first = was.index(found[0])
                assert found == was[first : first + len(found)]
                assert min(offset, end) <= again.log_end_offset <= end
            again.abandon()
    disk.before_call = lambda _: None
    assert outcomes == {True, False}
    assert number > 10
    assert (log.base_offsets, log.high_watermark, log.epochs) == ((offset,), offset, ())
    assert bool(producers_of(log)) is has_producers
    log.begin_term(7)
    append_values(log, b"v")
    assert log.writer.flush() == offset + 1


def test_a_full_disk_begins_nothing(open_log, leader, disk):
    log = follow(leader, begin_to_follow(open_log(config=CONFIG, disk=disk)))
    log.writer.flush()
    end, before = log.log_end_offset, headers_of_all(log)
    for call in ("open", "rename"):
        disk.fail(call, errno.ENOSPC)
        with pytest.raises(DiskFull):
            log.begin_anew_at(end + 5, None, lambda: None)
        disk.heal()
        assert (headers_of_all(log), log.log_end_offset) == (before, end)
    log.begin_anew_at(end + 5, None, lambda: None)
    assert log.base_offsets == (end + 5,)


def test_what_was_cut_does_not_come_back_once_there_are_other_records(leader, open_log, tmp_path):
    """Of another leader, at the same offsets."""
    other = begin_to_follow(open_log(tmp_path / "other-0", config=CONFIG))
    border = borders_of(leader)[30]
    follow(leader, other, until=border)
    other.begin_term(9)
    append_of_all_kinds(other, rounds=6, seed=9)
    was = headers_of_all(other)
    disk = LossyDisk()
    log = follow(leader, begin_to_follow(open_log(tmp_path / "t-0", config=CONFIG, disk=disk)))
    log.writer.flush()
    checkpoint, numbers = Checkpoint(log), iter(range(10_000))
    log.cut(border, checkpoint.save)

    def look(_):
        place = tmp_path / f"{next(numbers)}"
        place.mkdir()
        kept = log.flushed_end
        check_images(disk, log, open_log, place, checkpoint=checkpoint, was=was, kept=kept)

    disk.before_call = look
    while copy_once(other, log, max_bytes=300):
        pass
    log.writer.flush()
    disk.before_call = lambda _: None
    assert next(numbers) > 10


def test_after_a_crash_in_a_replicated_append_the_log_is_a_beginning_of_the_leaders(
    leader, open_log, tmp_path
):
    was = headers_of_all(leader)
    disk = LossyDisk()
    log = begin_to_follow(open_log(tmp_path / "t-0", config=CONFIG, disk=disk))
    checkpoint, numbers = Checkpoint(log), iter(range(10_000))

    def look(_):
        if log.log_end_offset > 40 and next(numbers) % 7 == 0:
            place = tmp_path / f"{next(numbers)}"
            place.mkdir()
            check_images(
                disk, log, open_log, place, checkpoint=checkpoint, was=was, kept=log.flushed_end
            )

    disk.before_call = look
    while copy_once(leader, log, max_bytes=900):
        log.writer.flush()
    assert next(numbers) > 50
