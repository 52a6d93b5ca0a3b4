"""What a replica keeps, apart from its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierlog.broker.replicas.kept_file import KeptFiles
from tierlog.broker.replication.election import Kept, renew
from tierlog.record_format.errors import CorruptDataError

PLACE = ("AAAAAAAAAAAAAAAAAAAAAA", 3)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, folder_id="f")
    assert files.read_kept(PLACE) == (Kept("f.0"), False)
    kept = Kept("f.2", seen=7, version=9, members=frozenset({"f.2", "g.0"}))
    files.write_kept(PLACE, kept, was_opened=True)
    assert files.read_kept(PLACE) == (kept, True)
    assert list(files.places()) == [PLACE]
    files.forget(PLACE)
    assert list(files.places()) == []


def test_a_copy_of_the_folder_answers_for_nothing_but_has_seen_the_same(tmp_path: Path) -> None:
    kept = Kept("f.2", seen=7, version=9, members=frozenset({"f.2"}))
    KeptFiles(tmp_path, folder_id="f").write_kept(PLACE, kept, was_opened=True)
    copied = KeptFiles(tmp_path, folder_id="copy")
    assert copied.read_kept(PLACE) == (Kept("copy.0", seen=7, version=9), False)


def test_a_log_that_is_gone_is_of_another_replica() -> None:
    kept = Kept("f.2", seen=7, version=9, members=frozenset({"f.2"}))
    assert renew(kept) == Kept("f.3", seen=7, version=9)


def test_a_damaged_file_is_no_promise_that_is_forgotten(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, folder_id="f")
    files.write_kept(PLACE, Kept("f.0"), was_opened=True)
    (path,) = (tmp_path / "tierlog/replicas").iterdir()
    path.write_bytes(path.read_bytes().replace(b"f.0", b"f.1"))
    with pytest.raises(CorruptDataError):
        files.read_kept(PLACE)
