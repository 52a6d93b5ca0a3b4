import os

import pytest

from tests.fakes.flush import fsync
from tierlog.host import page_cache
from tierlog.host.page_cache import is_resident, pread_nowait, resident_bytes


@pytest.fixture
def fd(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.mark.skipif(not page_cache.NOWAIT, reason="no RWF_NOWAIT on this system")
def test_pread_nowait_reads_pages_in_memory(fd):
    assert pread_nowait(fd, 10, 5) == bytes(range(5, 15))
    assert pread_nowait(fd, 10, 95) == bytes(range(95, 100)), "short at the end of the file"
    assert pread_nowait(fd, 10, 100) == b""


@pytest.mark.skipif(not page_cache.NOWAIT, reason="no RWF_NOWAIT on this system")
def test_a_partial_read_is_continued(fd, monkeypatch):
    preadv = os.preadv

    def read_20_bytes(fd, buffers, *rest):
        (buffer,) = buffers
        return preadv(fd, [memoryview(buffer)[:20]], *rest)

    monkeypatch.setattr(os, "preadv", read_20_bytes)
    assert pread_nowait(fd, 50, 5) == bytes(range(5, 55))
    assert pread_nowait(fd, 50, 75) == bytes(range(75, 100)), "short at the end of the file"


def test_without_rwf_nowait_every_read_would_block(fd, monkeypatch):
    monkeypatch.setattr(page_cache, "NOWAIT", 0)
    with pytest.raises(BlockingIOError):
        pread_nowait(fd, 10, 0)


def test_without_support_of_the_file_system_every_read_would_block(fd, monkeypatch):
    monkeypatch.setattr(page_cache, "NOWAIT", 1 << 30)  # a flag that no kernel knows
    with pytest.raises(BlockingIOError):
        pread_nowait(fd, 10, 0)


@pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise to drop the page cache"
)
def test_resident_bytes_are_counted_by_pages(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1_000_003))
    opened = os.open(path, os.O_RDWR)
    fsync(opened)
    assert resident_bytes(opened) == 1_000_003
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = resident_bytes(opened)
    os.pread(opened, 1_000_003, 0)
    assert dropped <= resident_bytes(opened) == 1_000_003  # tmpfs drops nothing
    os.ftruncate(opened, 0)
    assert resident_bytes(opened) == 0
    os.close(opened)


def _drop_from_page_cache(fd):
    """Drop the file's pages and switch readahead off. Skips the test on tmpfs, which drops none."""
    fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    if resident_bytes(fd):
        pytest.skip("this file system drops no pages")


@pytest.fixture
def large_fd(tmp_path):
    (tmp_path / "large").write_bytes(os.urandom(LARGE_BYTES))
    opened = os.open(tmp_path / "large", os.O_RDWR)
    yield opened
    os.close(opened)


LARGE_BYTES = 3_000_003


@pytest.mark.skipif(not page_cache.NOWAIT, reason="no RWF_NOWAIT on this system")
@pytest.mark.parametrize("has_cachestat", [True, False])
def test_a_range_is_resident_after_it_was_read(large_fd, has_cachestat, monkeypatch):
    if not has_cachestat:
        monkeypatch.setattr(page_cache, "_syscall", lambda *_: -1)
    _drop_from_page_cache(large_fd)
    assert not is_resident(large_fd, 0, LARGE_BYTES)
    os.pread(large_fd, 1_000_000, 500_000)
    assert is_resident(large_fd, 500_000, 1_000_000)
    assert not is_resident(large_fd, 100_000, 1_000_000)
    assert not is_resident(large_fd, 1_000_000, 1_900_000)
    os.pread(large_fd, LARGE_BYTES, 0)
    assert is_resident(large_fd, 0, LARGE_BYTES)


@pytest.mark.skipif(not page_cache.NOWAIT, reason="no RWF_NOWAIT on this system")
def test_a_page_missing_between_samples_is_noticed(large_fd):
    if page_cache._cached_pages(large_fd, 0, LARGE_BYTES) is None:
        pytest.skip("no cachestat on this system")
    _drop_from_page_cache(large_fd)
    for sample in (*range(0, LARGE_BYTES, page_cache.SAMPLE_BYTES), LARGE_BYTES - 1):
        os.pread(large_fd, 1, sample)
    if resident_bytes(large_fd) == LARGE_BYTES:
        pytest.skip("this file system reads many pages at a time")
    assert not is_resident(large_fd, 0, LARGE_BYTES)
