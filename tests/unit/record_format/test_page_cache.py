import os

import pytest

from record_format import page_cache
from record_format.page_cache import pread_nowait, resident_bytes


@pytest.fixture
def fd(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.mark.skipif(not page_cache.NOWAIT, reason="no RWF_NOWAIT on this system")
def test_what_was_just_written_is_read_without_waiting(fd):
    assert pread_nowait(fd, 10, 5) == bytes(range(5, 15))
    assert pread_nowait(fd, 10, 95) == bytes(range(95, 100)), "short at the file's end"
    assert pread_nowait(fd, 10, 100) == b""


@pytest.mark.skipif(not page_cache.NOWAIT, reason="no RWF_NOWAIT on this system")
def test_what_comes_into_memory_between_two_looks_is_no_end_of_the_file(fd, monkeypatch):
    look = os.preadv

    def first_a_little(fd, buffers, *rest):
        (buffer,) = buffers
        return look(fd, [memoryview(buffer)[:20]], *rest)

    monkeypatch.setattr(os, "preadv", first_a_little)
    assert pread_nowait(fd, 50, 5) == bytes(range(5, 55))
    assert pread_nowait(fd, 50, 75) == bytes(range(75, 100)), "short at the file's end"


def test_where_the_system_cannot_tell_every_read_would_wait(fd, monkeypatch):
    monkeypatch.setattr(page_cache, "NOWAIT", 0)
    with pytest.raises(BlockingIOError):
        pread_nowait(fd, 10, 0)


def test_where_the_file_system_cannot_tell_every_read_would_wait(fd, monkeypatch):
    monkeypatch.setattr(page_cache, "NOWAIT", 1 << 30)  # no flag that a kernel knows
    with pytest.raises(BlockingIOError):
        pread_nowait(fd, 10, 0)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs a cache that can be emptied")
def test_what_of_a_file_is_in_memory_is_counted_by_pages(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1_000_003))
    opened = os.open(path, os.O_RDWR)
    os.fsync(opened)
    assert resident_bytes(opened) == 1_000_003
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = resident_bytes(opened)
    os.pread(opened, 1_000_003, 0)
    assert dropped <= resident_bytes(opened) == 1_000_003  # tmpfs drops nothing
    os.ftruncate(opened, 0)
    assert resident_bytes(opened) == 0
    os.close(opened)
