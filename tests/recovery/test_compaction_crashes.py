"""A crash at every step of a swap: the old segments or the new one, and each key's last record.

A disk that copies the folder before each call that changes names gives every state that a crash
can find; each is opened as after a crash, and cleaned again.
"""

import errno
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fakes.compacted_topics import last_of
from tests.fakes.faulty_disk import FaultyDisk
from tests.fakes.partition_logs import batch, produced
from tierlog.host.disk import Disk
from tierlog.hot_tier import segment_swap
from tierlog.hot_tier.cleaner import Interrupted
from tierlog.hot_tier.log_writer import Append
from tierlog.hot_tier.open_files import OpenFiles
from tierlog.hot_tier.reaper import FIRST_REPLACED_IN_ORDER
from tierlog.record_format.compaction import PlainKeyTable
from tierlog.record_format.errors import DiskFull, LogOfflineError

CONFIG = {"segment.bytes": 2048, "cleanup.policy": "compact", "index.interval.bytes": 300}


class CopyingDisk(Disk):
    """Copies the folder before each rename, unlink and sync."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies, self.on = folder, copies, False
        self.steps: list[str] = []

    def _copy(self, step: str) -> None:
        if self.on:
            shutil.copytree(self.folder, self.copies / str(len(self.steps)))
            self.steps.append(step)

    def rename(self, source: Path, target: Path) -> None:
        self._copy(f"rename {target.name}")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        if path.exists():
            self._copy(f"unlink {path.name}")
        super().unlink(path)

    def sync_folder(self, path: Path) -> None:
        self._copy("sync")
        super().sync_folder(path)

    def sync_bytes(self, fd: int) -> None:
        self._copy("sync bytes")
        super().sync_bytes(fd)


def fill(log, seed: int, count: int = 25) -> dict:
    rng, last = random.Random(seed), {}
    for _ in range(count):
        keys = [b"k%d" % rng.randrange(12) for _ in range(rng.randint(1, 4))]
        values = [rng.randbytes(30) for _ in keys]
        (result,) = log.writer.append([Append(produced(batch(values, keys=keys)))])
        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            last[key] = (result.base_offset + number, value)
    log.roll()
    return last


def clean(log, checkpoint=None):
    return log.sealed.clean(log.sealed.cleanable(checkpoint), PlainKeyTable(1 << 20))


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.suffix in (".cleaned", ".swap", ".deleted")]


@pytest.mark.parametrize("recovery_point", [0, 10**6])  # 0: as in the middle of a take-over
def test_every_crash_state_opens_and_keeps_the_last_record_of_each_key(
    recovery_point, open_log, records_of, tmp_path
):
    folder, copies = tmp_path / "t-0", tmp_path / "copies"
    disk = CopyingDisk(folder, copies)
    log = open_log(folder, config=CONFIG, disk=disk)
    last = fill(log, 1)
    clean(log)
    last |= fill(log, 2)
    before = {record.offset: record.value for record in records_of(log)}
    log.sealed.mark_mirrored(swap_sequence=log.sealed.swap_sequence)
    disk.on = True
    clean(log)
    disk.on = False
    after = records_of(log)
    assert last_of(after) == last
    assert len(disk.steps) > 20
    for step, then in pairwise(disk.steps):
        if step.endswith(".swap") and not then.endswith(".swap"):
            assert then == "sync", "the names are durable before the old ones go"
    known = {"recovery_point": recovery_point, "flushed_end": log.high_watermark}
    for number, step in enumerate(disk.steps):
        copy = copies / str(number)
        again = open_log(copy, config=CONFIG, clean=False, **known)
        assert not again.recovery.truncated_file, step
        found = records_of(again)
        assert last_of(found) == last, step
        assert all(before[record.offset] == record.value for record in found), step
        assert not leftovers(copy), step
        assert again.log_end_offset == log.log_end_offset
        assert len(found) == len(before) or not again.sealed.mirrored, "the bucket has to follow"
        for left, right in pairwise(again.segments()):
            assert left.last_offset + 1 == right.base_offset, step
        clean(again)
        assert records_of(again) == after, step
        again.close()


@pytest.mark.parametrize("both_names", [False, True])  # if the crash interrupted a rename
def test_indexes_of_an_interrupted_swap_are_published_with_their_log(
    open_log, tmp_path, both_names
):
    folder, copies = tmp_path / "t-0", tmp_path / "copies"
    disk = CopyingDisk(folder, copies)
    log = open_log(folder, config=CONFIG, disk=disk)
    fill(log, 1)
    disk.on = True
    clean(log)
    disk.on = False
    index = sorted(folder.glob("*.timeindex"))[0].read_bytes()
    assert index
    half = disk.steps.index("rename 00000000000000000000.index.swap")
    copy = copies / str(half)
    assert (copy / "00000000000000000000.log.swap").exists()
    if both_names:
        cleaned = copy / "00000000000000000000.index.cleaned"
        shutil.copy(cleaned, cleaned.with_suffix(".swap"))
    open_log(copy, config=CONFIG, clean=False, recovery_point=10**6).close()
    assert (copy / "00000000000000000000.timeindex").read_bytes() == index


CALLS = ("open", "write_at", "sync_bytes", "rename", "unlink", "sync_folder")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", CALLS)
def test_a_failed_disk_call_during_a_round_loses_nothing(
    call, number, open_log, records_of, tmp_path
):
    for after in (0, 1, 2, 4, 7, 12, 20):
        disk, folder = FaultyDisk(), tmp_path / str(after)
        log = open_log(folder, config=CONFIG, disk=disk)
        last = fill(log, after)
        disk.fail(call, number, after=after)
        try:
            clean(log)
        except (LogOfflineError, DiskFull, Interrupted, OSError):
            pass
        else:
            assert after, "no call has failed"
            disk.heal()
            assert last_of(records_of(log)) == last
            log.close()
            break
        disk.heal()
        assert last_of(records_of(log)) == last, "reads continue"
        if not log.offline:
            log.close()
        again = open_log(folder, config=CONFIG, clean=False, recovery_point=10**6)
        assert last_of(records_of(again)) == last
        assert not leftovers(folder)
        clean(again)
        assert last_of(records_of(again)) == last
        assert len(records_of(again)) == len(last)
        again.close()


def test_closing_a_log_does_not_affect_one_with_an_interrupted_swap(open_log, records_of, tmp_path):
    """Until it is reopened, only pinned descriptors find the interrupted one's files."""
    disk, files = FaultyDisk(), OpenFiles()
    log = open_log(config=CONFIG, disk=disk, open_files=files)
    other = open_log(tmp_path / "other", config=CONFIG, open_files=files)
    last = fill(log, 1)
    disk.fail("rename", errno.EIO, suffix=".index")
    with pytest.raises(LogOfflineError):
        clean(log)
    assert last_of(records_of(log)) == last
    other.close()
    assert last_of(records_of(log)) == last


def test_an_interrupted_swap_takes_the_log_offline_even_without_a_descriptor_left(
    open_log, records_of, tmp_path, monkeypatch
):
    disk = FaultyDisk()
    log = open_log(tmp_path / "t-0", config=CONFIG, disk=disk)
    last = fill(log, 1)
    disk.fail("rename", errno.EIO, suffix=".index")

    def no_descriptor(_path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("tierlog.hot_tier.segment_swap.OpenFile", no_descriptor)
    with pytest.raises(LogOfflineError):
        clean(log)
    disk.heal()
    again = open_log(tmp_path / "t-0", config=CONFIG, clean=False, recovery_point=10**6)
    assert last_of(records_of(again)) == last


def test_the_crash_tests_catch_a_swap_that_renames_the_log_last(
    open_log, records_of, tmp_path, monkeypatch
):
    """Planted bug: old segments are deleted before the swap's point of no return."""
    publish, rename = segment_swap._publish, segment_swap._rename

    def rename_old_first(state, reaper, old, cleaned, *, moved):
        for segment in old:
            reaper.rename_deleted(segment, FIRST_REPLACED_IN_ORDER)
        publish(state, cleaned)
        rename(state, reaper, old, cleaned, moved=moved)

    monkeypatch.setattr(segment_swap, "_publish", lambda state, cleaned: None)
    monkeypatch.setattr(segment_swap, "_rename", rename_old_first)
    with pytest.raises((AssertionError, KeyError)):
        test_every_crash_state_opens_and_keeps_the_last_record_of_each_key(
            10**6, open_log, records_of, tmp_path
        )
