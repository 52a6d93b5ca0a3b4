"""A slice stays readable after its file is renamed and unlinked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierlog.host.file_slice import FileSlice, OpenFile


def test_a_slice_of_an_unlinked_file_is_still_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"0123456789")
    piece = FileSlice(OpenFile(path), 3, 4)
    path.rename(tmp_path / "a.log.deleted")
    (tmp_path / "a.log.deleted").unlink()
    assert piece.read() == b"3456"


def test_the_last_holder_closes_the_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x")
    piece = FileSlice(OpenFile(path), 0, 1)
    another = piece.file.share()
    fd = piece.file.fileno()
    piece.close()
    os.fstat(fd)
    another.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_a_file_shorter_than_the_slice_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"0123456789")
    with pytest.raises(EOFError):
        FileSlice(OpenFile(path), 8, 3).read()


def test_a_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OpenFile(tmp_path / "none")


def test_a_file_is_closed_by_each_holder_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x")
    file = OpenFile(path)
    file.close()
    with pytest.raises(AssertionError, match="closed"):
        file.close()
    with pytest.raises(AssertionError, match="closed"):
        file.share()
