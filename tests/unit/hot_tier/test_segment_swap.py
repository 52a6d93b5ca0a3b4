"""Compaction and repair rewrite a segment under the same names, so only one may run at a time."""

import threading
from contextlib import suppress

import pytest

from tests.fakes.at_once import at_once
from tests.fakes.damage import flip
from tests.fakes.faulty_disk import FaultyDisk
from tierlog.hot_tier.cleaner import CleanerHooks, Interrupted
from tierlog.hot_tier.log_state import read_consistently, replacing_segments
from tierlog.hot_tier.segment import Segment
from tierlog.record_format.compaction import PlainKeyTable
from tierlog.record_format.errors import CorruptBatch, Throttled, UnknownSegment


class Meanwhile(FaultyDisk):
    """Calls `then`, once, before a rewritten segment's bytes are written."""

    then = None

    def write_at(self, fd, buffers, position):
        if self._paths[fd].endswith(".log.cleaned") and self.then is not None:
            then, self.then = self.then, None
            then()
        return super().write_at(fd, buffers, position)


@pytest.fixture
def log(open_log, append_values):
    """Five compacted batches, the fourth of which is corrupt, in one segment; a second segment is
    dirty.
    """
    log = open_log(config={"cleanup.policy": "compact"}, disk=Meanwhile())
    positions = []
    for number in range(5):
        positions.append(log.size_bytes)
        append_values(log, b"value %d" % number, keys=[b"%d" % number])
    log.roll()
    append_values(log, b"newer", keys=[b"0"])
    log.roll()
    path = log.segments()[0].path
    flip(path, positions[3] + 70)
    return log


def repair(log):
    log.sealed.salvage(0, reaches_end=False).rewrite()


def compact(log):
    log.sealed.clean(log.sealed.cleanable(5), PlainKeyTable(1 << 20))


def test_a_segment_is_not_compacted_while_it_is_repaired(log, records_of):
    def meanwhile():
        with suppress(CorruptBatch, Throttled):
            compact(log)

    log._state.disk.then = meanwhile
    repair(log)
    assert [r.offset for r in records_of(log)] == [0, 1, 2, 4, 5]
    compact(log)
    assert [r.offset for r in records_of(log)] == [1, 2, 4, 5]


def test_a_segment_is_not_repaired_while_it_is_compacted(log, records_of):
    repair(log)
    refused = []

    def meanwhile():
        with pytest.raises(Throttled) as refusal:
            repair(log)
        refused.append(refusal.value)

    log._state.disk.then = meanwhile
    compact(log)
    assert len(refused) == 1
    repair(log)
    assert [r.offset for r in records_of(log)] == [1, 2, 4, 5]


def test_a_segment_deleted_during_its_repair_is_not_a_disk_failure(log, monkeypatch):
    opened, end = log._state.disk.open, log.log_end_offset

    def deleted_first(path, flags):
        if path.name.endswith(".log.cleaned"):
            log.delete_local(end)
        return opened(path, flags)

    monkeypatch.setattr(log._state.disk, "open", deleted_first)
    with pytest.raises(UnknownSegment):
        repair(log)
    assert not log.offline


class WhileFilesAreRenamed(FaultyDisk):
    """Calls `then`, once, while a swap renames files."""

    then = None

    def rename(self, source, target):
        if source.suffix == ".swap" and self.then is not None:
            then, self.then = self.then, None
            then()
        super().rename(source, target)


def test_a_nonblocking_read_does_not_wait_for_a_swap(open_log, append_values):
    log = open_log(config={"cleanup.policy": "compact"}, disk=WhileFilesAreRenamed())
    for _ in range(2):
        append_values(log, b"v", keys=[b"k"])
    log.roll()
    append_values(log, b"v", keys=[b"k"])
    log.writer.flush()
    assert at_once(log.read_hot, 2, max_bytes=1) is not None
    found = []

    def meanwhile():
        def ask():
            found.append(at_once(log.read_hot, 2, max_bytes=1))
            found.append(at_once(log.sealed.open, 0))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(10)

    log._state.disk.then = meanwhile
    log.sealed.clean(log.sealed.cleanable(None), PlainKeyTable(1 << 20))
    assert found == [None, None]
    assert at_once(log.read_hot, 2, max_bytes=1) is not None


def test_a_look_up_that_a_swap_overlapped_is_retried(open_log):
    state, found = open_log()._state, ["new", "old"]

    def look_up():
        if len(found) == 2:
            with state.lock, replacing_segments(state):
                pass
        return found.pop()

    assert read_consistently(state, look_up) == "new"


def test_a_round_ends_at_a_segment_that_was_repaired_meanwhile(log, append_values):
    repair(log)
    append_values(log, b"newest", keys=[b"0"])
    log.roll()
    repairs = [lambda: log.sealed.salvage(5, reaches_end=False).rewrite()]

    def meanwhile():
        while repairs:
            repairs.pop()()
        return False

    dirty = log.sealed.cleanable(0)
    with pytest.raises(Interrupted):
        log.sealed.clean(dirty, PlainKeyTable(1 << 20), CleanerHooks(stopping=meanwhile))
    assert log.sealed.clean(dirty, PlainKeyTable(1 << 20)).complete


def test_a_round_waits_for_the_swap_of_a_repair(log, monkeypatch):
    repair(log)
    state, opened, first = log._state, Segment.log_reader, [0]

    def in_a_swap(segment, files):
        if first:
            first.pop()
            with state.lock, replacing_segments(state):
                pass
            raise FileNotFoundError  # its files were just being renamed
        return opened(segment, files)

    monkeypatch.setattr(Segment, "log_reader", in_a_swap)
    compact(log)
    assert not first


def test_a_segment_deleted_while_its_indexes_are_checked_is_unknown(log, monkeypatch):
    checked, end = Segment.check_index_files, log.log_end_offset

    def deleted_first(segment):
        log.delete_local(end)
        checked(segment)

    monkeypatch.setattr(Segment, "check_index_files", deleted_first)
    with pytest.raises(UnknownSegment):
        log.sealed.prepare_upload(5)
