"""Bad bytes above the recovery point: the torn end of the last write is cut and kept, a hole that a
power failure left too; damage to batches that others follow is refused.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.damage import flip
from tests.fakes.partition_logs import batch
from tierlog.hot_tier import torn_tail
from tierlog.record_format.batch import HEADER_SIZE, BatchHeader, iter_headers, stamp
from tierlog.record_format.errors import CorruptBatch

CONFIG = {"segment.bytes": 16384}
VALUES = [b"%d-" % n + b"v" * (700 + n) for n in range(40)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "t-0"


@pytest.fixture
def write(open_log, append_values, folder):
    """A log of these values, a batch each; gives its files."""

    def written(values: list[bytes]) -> list[Path]:
        log = open_log(config=CONFIG)
        for value in values:
            append_values(log, value)
        log.close()
        return [view.path for view in log.segments()]

    return written


def headers_of(log: Path) -> list[BatchHeader]:
    return list(iter_headers(log.read_bytes()))


def overwrite(log: Path, position: int, data: bytes) -> None:
    with log.open("r+b") as file:
        file.seek(position)
        file.write(data)


def cut_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.cut*"))}


def check_refused(open_log, folder: Path, log: Path, bad: BatchHeader) -> None:
    before = {path.name: path.read_bytes() for path in folder.glob("*.log")}
    with pytest.raises(CorruptBatch, match="whole batches that continue the log follow") as refusal:
        open_log(folder, config=CONFIG, clean=False, recovery_point=0)
    found = refusal.value
    assert (found.file, found.position, found.offset) == (str(log), bad.position, bad.base_offset)
    assert {path.name: path.read_bytes() for path in folder.glob("*.log")} == before
    assert not cut_files(folder)


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("byte", range(HEADER_SIZE + 2))
def test_a_flipped_bit_in_a_batch_that_others_follow_is_refused(open_log, write, folder, byte, bit):
    (log, *_) = write(VALUES[:6])
    bad = headers_of(log)[2]
    data = bytearray(log.read_bytes())
    data[bad.position + byte] ^= 1 << bit
    log.write_bytes(data)
    if 12 <= byte < 16:  # the checksum excludes the leader epoch: the batch stays valid
        assert open_log(config=CONFIG, clean=False).log_end_offset == 6
    else:
        check_refused(open_log, folder, log, bad)


@pytest.mark.parametrize("value", [bytes(3000), b"x" + bytes(1200) + b"x", bytes(12_000)])
def test_zeros_in_a_value_are_no_hole_if_one_bit_is_wrong(open_log, write, folder, value):
    (log, *_) = write([b"a", value, b"b"])
    bad = headers_of(log)[1]
    for position in (bad.position + 17, bad.position + 25, bad.position + bad.size_bytes - 500):
        flip(log, position)
        check_refused(open_log, folder, log, bad)
        flip(log, position)


def test_the_last_batch_of_a_segment_is_followed_by_the_next_segment(open_log, write, folder):
    first, *_ = write(VALUES)
    bad = headers_of(first)[-1]
    flip(first, bad.position + 70)
    check_refused(open_log, folder, first, bad)


def test_several_damaged_batches_are_refused_at_the_first(open_log, write, folder):
    (log, *_) = write(VALUES[:8])
    headers = headers_of(log)
    overwrite(log, headers[2].position + 20, b"\xaa" * 1500)  # over two headers
    flip(log, headers[6].position + 80)
    flip(log, headers[6].position + 81)
    check_refused(open_log, folder, log, headers[2])


def test_preallocated_space_after_the_last_batch_is_an_end_too(open_log, write, folder):
    (log, *_) = write(VALUES[:5])
    bad = headers_of(log)[1]
    overwrite(log, bad.position + 16, b"\x07")
    os.truncate(log, 1 << 20)
    check_refused(open_log, folder, log, bad)


def test_an_accepted_loss_is_cut_and_kept(open_log, write, records_of, folder):
    (log, *_) = write(VALUES[:6])
    bad = headers_of(log)[2]
    flip(log, bad.position + 70)
    behind = log.read_bytes()[bad.position :]
    opened = open_log(config=CONFIG, clean=False, may_cut_from=2)
    assert [record.value for record in records_of(opened)] == VALUES[:2]
    assert cut_files(folder) == {f"{2:020d}.log.cut": behind}


# --- the torn last write, and holes ---------------------------------------------------------------


def embedding(base_offset: int, *, more: bytes = b"") -> bytes:
    """A value that holds a whole batch with that offset."""
    inner = batch([b"inner"])
    stamp(inner, 0, base_offset=base_offset, leader_epoch=9)
    return b"before" + bytes(inner) + more


@pytest.mark.parametrize("base_offset", [2, 3, 900])
def test_a_batch_in_a_value_does_not_follow(open_log, write, records_of, folder, base_offset):
    value = embedding(base_offset, more=b"after" * 9)
    (log, *_) = write([b"a", b"b", value])
    outer, size = headers_of(log)[-1], log.stat().st_size
    ends_inner = outer.position + log.read_bytes()[outer.position :].index(b"after")
    for length in (ends_inner, ends_inner + 3, size):
        copy = folder.with_name(f"copy-{length}")
        shutil.copytree(folder, copy)
        os.truncate(copy / log.name, length)
        if length == size:
            flip(copy / log.name, outer.position + 62)
        opened = open_log(copy, config=CONFIG, clean=False)
        assert [record.value for record in records_of(opened)] == [b"a", b"b"]


@pytest.mark.parametrize("hole", [(0, 1), (0, 3), (1, 2), (2, 3)])
def test_a_hole_before_whole_batches_is_cut(open_log, write, records_of, folder, hole):
    # Three writes wait for one flush; the power fails when pages of the last were written first.
    (log, *_) = write([*VALUES[:2], b"w" * 1800, b"w" * 1700, b"w" * 1900])
    headers = headers_of(log)
    written, lost = headers[1].position + headers[1].size_bytes, [512 * at for at in hole]
    start = max(written, written - written % 512 + lost[0])
    behind_start = written - written % 512 + lost[1]
    overwrite(log, start, bytes(behind_start - start))
    cut_at = next(header for header in headers if header.position + header.size_bytes > start)
    behind = log.read_bytes()[cut_at.position :]
    opened = open_log(config=CONFIG, clean=False, recovery_point=2, flushed_end=2)
    assert [record.value for record in records_of(opened)] == VALUES[: cut_at.base_offset]
    assert list(cut_files(folder).values()) == [behind]


def test_lost_writes_before_whole_ones_are_cut(open_log, write, records_of):
    (log, *_) = write(VALUES[:6])
    headers = headers_of(log)
    for lost in (headers[2], headers[4]):
        overwrite(log, lost.position, bytes(lost.size_bytes))
    opened = open_log(config=CONFIG, clean=False)
    assert [record.value for record in records_of(opened)] == VALUES[:2]


# --- what is kept ---------------------------------------------------------------------------------


def test_what_is_cut_is_kept_once_and_reported_until_it_is_deleted(
    open_log, write, folder, monkeypatch
):
    (log, *_) = write(VALUES[:3])
    whole = log.read_bytes()
    os.truncate(log, len(whole) - 5)
    torn = log.read_bytes()[headers_of_torn(whole)[-1].position :]
    with monkeypatch.context() as patched:  # a crash after the copy
        patched.setattr(
            torn_tail.CutFiles, "keep_tail", keep_and_fail(torn_tail.CutFiles.keep_tail)
        )
        with pytest.raises(KeyboardInterrupt):
            open_log(config=CONFIG, clean=False)
    opened = open_log(config=CONFIG, clean=False)
    (kept,) = opened.recovery.cut_files
    assert cut_files(folder) == {kept.name: torn}
    opened.close()
    assert open_log(config=CONFIG, clean=True, recovery_point=2).recovery.cut_files == [kept]
    log.write_bytes(whole[:-9])  # another tear at the same offset
    assert len(open_log(config=CONFIG, clean=False).recovery.cut_files) == 2


def headers_of_torn(whole: bytes) -> list[BatchHeader]:
    return list(iter_headers(whole))


def keep_and_fail(keep):
    def failing(*args):
        keep(*args)
        raise KeyboardInterrupt

    return failing


def test_removed_segments_are_kept_by_another_name(open_log, write, folder):
    logs = write(VALUES)
    removed = {f"{path.stem}.log.cut": path.read_bytes() for path in logs[1:]}
    os.truncate(logs[0], logs[0].stat().st_size - 1)
    opened = open_log(config=CONFIG, clean=False)
    kept = cut_files(folder)
    assert {name: kept[name] for name in removed} == removed
    assert len(kept) == len(removed) + 1
    assert not [path for path in folder.glob("*index") if path.stem > logs[0].stem]
    opened.close()


def test_zeros_are_not_kept_nor_more_than_the_limit(open_log, write, folder, monkeypatch):
    (log, *_) = write(VALUES[:3])
    whole = log.read_bytes()
    os.truncate(log, 1 << 16)
    open_log(config=CONFIG, clean=False).close()
    monkeypatch.setattr(torn_tail, "KEPT_MAX_BYTES", 1000)
    log.write_bytes(whole + b"\xff" * 1001)
    open_log(config=CONFIG, clean=False).close()
    assert not cut_files(folder)
    log.write_bytes(whole + b"\xff" * 999)
    open_log(config=CONFIG, clean=False).close()
    assert [len(data) for data in cut_files(folder).values()] == [999]
