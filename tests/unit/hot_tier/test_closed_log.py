from __future__ import annotations

from pathlib import Path

import pytest

from tierlog.host.durable_file import REAL_DISK
from tierlog.hot_tier.batch_walk import end_offset_of
from tierlog.hot_tier.closed_log import base_offsets, locate_cut, move_segments, split_at
from tierlog.hot_tier.log_folder import LOG, LogFolder, path_of
from tierlog.record_format.encode import encode_batch


@pytest.mark.parametrize(
    ("offset", "begins"),
    [
        pytest.param(10, 10, id="at a batch"),
        pytest.param(12, 10, id="within a batch"),
        pytest.param(14, 10, id="at a batch's last record"),
        pytest.param(7, 7, id="where compaction took what was there"),
    ],
)
def test_a_log_is_split_at_an_offset_or_with_the_batch_that_contains_it(
    tmp_path: Path, offset: int, begins: int
) -> None:
    batches = [
        encode_batch([b"x"] * 5, timestamps=[1] * 5, base_offset=base_offset)
        for base_offset in (0, 10)
    ]
    path_of(tmp_path, 0, LOG).write_bytes(b"".join(batches))
    assert split_at(tmp_path, offset) == 0
    assert base_offsets(tmp_path) == [0, begins]
    assert path_of(tmp_path, 0, LOG).read_bytes() == batches[0]
    assert path_of(tmp_path, begins, LOG).read_bytes() == batches[1]


@pytest.mark.parametrize(
    ("rotten", "offset", "number", "begins"),
    [
        pytest.param([], 10, 2, 10, id="at a batch"),
        pytest.param([], 12, 2, 10, id="within a batch"),
        pytest.param([], 20, 4, 20, id="nothing there"),
        pytest.param([1], 10, 2, 10, id="what is below is rotten"),
        pytest.param([2], 10, 2, 10, id="what is there is rotten"),
        pytest.param([1, 2], 12, 1, 12, id="both are"),
        pytest.param([1, 2, 3], 10, 1, 10, id="nothing good is behind"),
    ],
)
def test_corrupt_batches_do_not_hide_where_the_rest_of_a_log_begins(
    tmp_path: Path, rotten: list[int], offset: int, number: int, begins: int
) -> None:
    batches = [
        bytearray(encode_batch([b"x"] * 5, timestamps=[1] * 5, base_offset=base_offset))
        for base_offset in (0, 5, 10, 15)
    ]
    for damaged in rotten:
        batches[damaged][16] = 0  # the magic
    log = path_of(tmp_path, 0, LOG)
    log.write_bytes(b"".join(batches))
    assert locate_cut(log, offset, base_offset=0) == (number * len(batches[0]), begins)


@pytest.mark.parametrize("wrong", [37, 11, 5 + 2**40])
def test_a_batch_with_a_wrong_base_offset_is_not_taken_for_where_the_rest_begins(
    tmp_path: Path, wrong: int
) -> None:
    """No checksum covers it. The batches after it are whole, and only those are wanted."""
    batches = [
        bytearray(encode_batch([b"x"] * 5, timestamps=[1] * 5, base_offset=base_offset))
        for base_offset in (0, wrong, 10, 15)
    ]
    log = path_of(tmp_path, 0, LOG)
    log.write_bytes(b"".join(batches))
    assert locate_cut(log, 10, base_offset=0) == (2 * len(batches[0]), 10)


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        pytest.param((0, 5, 3), 10, id="too low"),
        pytest.param((0, 5, 10 + 2**40), 10, id="impossible"),
        pytest.param((0, 2**20, 10), 15, id="too high, before another"),
        pytest.param((0, 7, 14), 19, id="gaps, which compaction leaves"),
    ],
)
def test_a_log_does_not_end_where_a_wrong_base_offset_says(
    tmp_path: Path, starts: tuple[int, ...], ends: int
) -> None:
    """An interrupted swap would else be finished by removing all segments up to that offset."""
    batches = [encode_batch([b"x"] * 5, timestamps=[1] * 5, base_offset=one) for one in starts]
    path_of(tmp_path, 0, ".log.swap").write_bytes(b"".join(batches))
    for base_offset in (ends - 5, ends, ends + 5):
        path_of(tmp_path, base_offset, LOG).write_bytes(b"")
    found = LogFolder.open(tmp_path, disk=REAL_DISK)
    assert sorted(found.log_sizes) == [0, ends, ends + 5]
    assert end_offset_of(path_of(tmp_path, 0, LOG), 0) == ends


def test_moving_the_tail_of_a_log_never_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery would remove everything after one."""
    folder, moved = tmp_path / "t-0", tmp_path / "apart"
    folder.mkdir()
    for base_offset in (0, 10, 20, 30):
        path_of(folder, base_offset, LOG).touch()
    rename, left = REAL_DISK.rename, []

    def watched(source: Path, target: Path) -> None:
        rename(source, target)
        left.append(base_offsets(folder))

    monkeypatch.setattr(REAL_DISK, "rename", watched)
    move_segments(folder, 10, moved)
    assert left == [[0, 10, 20], [0, 10], [0]]
    assert base_offsets(moved) == [10, 20, 30]
