import errno
import fcntl
import os
from types import SimpleNamespace

import pytest

from tierlog.host import medium
from tierlog.host.durable_file import write_durably
from tierlog.object_store.folder import FolderStore

MAC = 51  # F_FULLFSYNC


@pytest.fixture
def calls(monkeypatch):
    """The inodes flushed as on macOS; `answer` is the error that F_FULLFSYNC gives."""

    def full_sync(fd, command):
        assert command == MAC
        seen.full.append(os.fstat(fd).st_ino)
        if seen.answer:
            raise OSError(seen.answer, os.strerror(seen.answer))

    seen = SimpleNamespace(full=[], plain=[], answer=0)
    monkeypatch.setattr(medium, "_FULL_SYNC", MAC)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    monkeypatch.setattr(os, "fsync", lambda fd: seen.plain.append(os.fstat(fd).st_ino))
    monkeypatch.delattr(os, "fdatasync", raising=False)
    return seen


def test_on_macos_files_and_folders_of_both_tiers_are_flushed_to_the_medium(calls, tmp_path):
    write_durably(tmp_path / "file", b"x")
    store = FolderStore(tmp_path / "bucket")
    store.put("folder/key", b"x")
    bucket = tmp_path / "bucket"
    flushed = [tmp_path / "file", tmp_path, bucket / "folder" / "key", bucket / "folder", bucket]
    assert {path.stat().st_ino for path in flushed} <= set(calls.full)
    assert calls.plain == []


@pytest.mark.parametrize("missing", [errno.ENOTSUP, errno.ENOTTY, errno.EINVAL])
def test_a_network_share_of_macos_is_flushed_as_far_as_it_can(calls, tmp_path, missing):
    calls.answer = missing
    write_durably(tmp_path / "file", b"x")
    assert calls.plain == calls.full == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]


def test_a_failed_flush_of_macos_is_not_tried_again_by_other_means(calls, tmp_path):
    calls.answer = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        write_durably(tmp_path / "file", b"x")
    assert calls.plain == []
