"""On a disk without room for a single chunk, cold reads continue in memory."""

import errno
import os
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.fakes.cold_segments import upload
from tests.fakes.faulty_object_store import FailsBefore, WrongBytes
from tests.fakes.small_disk import small_disk
from tierlog.cold_tier.chunk_cache import ChunkCache
from tierlog.cold_tier.chunk_fills import ChunkFills
from tierlog.cold_tier.cold_reader import ColdReader
from tierlog.cold_tier.ranged_reader import RangedReader
from tierlog.host.retry import RetryPolicy
from tierlog.record_format.errors import (
    CorruptObject,
    DiskFull,
    StoreUnavailable,
    Throttled,
    TooManyOpenFiles,
)

QUICK = RetryPolicy(attempts=2, sleep=lambda _: None)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")


@pytest.fixture
def segment(store, written):
    return upload(store, written)


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "small") as disk:
        yield disk


@pytest.fixture
def cache(disk):
    return ChunkCache(disk.path / "cache", limit_bytes=1 << 20)


@pytest.fixture
def reader(store, cache):
    store.read_policy = QUICK
    ranged = RangedReader(store, requests_max=4)
    with closing(ColdReader(store, cache, reader=ranged)) as cold_reader:
        yield cold_reader


def read_log(reader, segment, **limits):
    offset, body = 0, b""
    while offset <= segment.last_offset:
        read = reader.read_segments(segment, offset, **limits)
        body += b"".join(piece.read() for piece in read.slices)
        offset = read.next_offset
    return body


def log_gets(store):
    return [key for call, key in store.calls if call == "get_range" and key.endswith(".log")]


def in_memory(reader):
    return reader._fills._in_memory._used_bytes


FULL = {
    "no space": lambda disk: disk.fill(),
    "no inode": lambda disk: disk.fill_with_files(),
    "one inode": lambda disk: disk.fill_with_files(but=1),
}


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
@pytest.mark.parametrize("full", FULL)
def test_a_log_is_read_completely(disk, cache, reader, segment, written, full, max_bytes):
    FULL[full](disk)
    assert read_log(reader, segment, max_bytes=max_bytes) == written.body
    pieces = reader.byte_range(segment, start=0, end=segment.size_bytes)
    assert b"".join(piece.read() for piece in pieces) == written.body
    usage = cache.usage()
    assert (usage.chunks, usage.reserved_bytes) == (0, 0)
    assert list((disk.path / "cache" / ".filling").iterdir()) == []


def test_a_log_is_read_completely_if_the_disk_becomes_read_only(
    disk, cache, reader, segment, written
):
    assert reader.read_segments(segment, 0, max_bytes=1).slices
    usage = cache.usage()
    assert usage.chunks == 1
    disk.make_read_only()
    for _ in range(2):
        assert read_log(reader, segment, max_bytes=4096) == written.body
    after = cache.usage()
    assert (after.chunks, after.evicted_chunks, after.reserved_bytes) == (1, 0, 0)
    assert after.hits >= usage.hits + 2, "what is cached is still read from there"


def test_cached_chunks_are_evicted_first_and_new_ones_cached_when_there_is_room(
    disk, cache, reader, segment, written
):
    read_log(reader, segment, max_bytes=1)
    cached = cache.usage().chunks
    assert cached > 4
    disk.fill()
    reader._fills.prefetch(
        reader._indexes.load_index(segment).chunks[0]
    )  # is cached: evicts nothing
    assert cache.usage().chunks == cached
    cache.shrink(1 << 20)
    assert read_log(reader, segment, max_bytes=1) == written.body
    assert cache.usage().chunks > 0, "the space of evicted chunks is used again"


def test_nothing_is_prefetched_that_cannot_be_kept(disk, store, reader, segment):
    disk.fill()
    chunks = len(reader._indexes.load_index(segment).chunks)
    read_log(reader, segment, max_bytes=4096)
    assert len(log_gets(store)) <= 2 * chunks
    for number in range(chunks):
        reader._fills.prefetch(reader._indexes.load_index(segment).chunks[number])
    reader.close()
    assert len(log_gets(store)) <= 2 * chunks


def test_memory_is_limited_and_a_reader_waits_until_another_is_done(
    disk, store, cache, reader, segment
):
    disk.fill()
    chunks = reader._indexes.load_index(segment).chunks
    limit = chunks[0].size_bytes + chunks[1].size_bytes
    with (
        closing(RangedReader(store)) as ranged,
        closing(ChunkFills(cache, ranged, fills_max=4, memory_max_bytes=limit)) as fills,
    ):
        in_use = [fills.open_chunk(chunks[0]), fills.open_chunk(chunks[1])]
        with pytest.raises(Throttled):
            fills.open_chunk(chunks[2], space_wait_s=0)
        threading.Timer(0.1, in_use[0].close).start()
        assert os.pread(fills.open_chunk(chunks[2], space_wait_s=30).fd, 1, 0)


def test_a_chunk_above_the_limit_has_the_memory_to_itself(disk, store, cache, reader, segment):
    disk.fill()
    chunks = reader._indexes.load_index(segment).chunks
    with (
        closing(RangedReader(store)) as ranged,
        closing(ChunkFills(cache, ranged, fills_max=4, memory_max_bytes=1)) as fills,
    ):
        in_use = fills.open_chunk(chunks[0])
        with pytest.raises(Throttled):
            fills.open_chunk(chunks[1], space_wait_s=0)
        in_use.close()
        fills.open_chunk(chunks[1], space_wait_s=0)


def test_wrong_bytes_are_not_served(disk, store, reader, segment, written):
    disk.fill()
    log = lambda key: key.endswith(".log")  # noqa: E731
    store.fail("get_range", WrongBytes(5), when=log)
    assert read_log(reader, segment, max_bytes=1 << 20) == written.body
    store.fail("get_range", WrongBytes(5), times=2, when=log)
    with pytest.raises(CorruptObject):
        reader.read_segments(segment, 0, max_bytes=1)


def test_a_failed_read_keeps_no_memory(disk, store, reader, segment):
    disk.fill()
    reader._indexes.load_index(segment)
    store.fail("get_range", FailsBefore(), times=QUICK.attempts)
    with pytest.raises(StoreUnavailable):
        reader.read_segments(segment, 0, max_bytes=1)
    assert in_memory(reader) == 0
    read = reader.read_segments(segment, 0, max_bytes=1)
    assert in_memory(reader) > 0
    read.close()
    assert in_memory(reader) == 0


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EMFILE])
def test_a_failing_memfd_create_is_reported_with_its_cause(
    disk, reader, segment, monkeypatch, number
):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    disk.fill()
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(DiskFull, match=os.strerror(number)) as refused:
        reader.read_segments(segment, 0, max_bytes=1)
    assert isinstance(refused.value, TooManyOpenFiles) is (number == errno.EMFILE)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["posix_fallocate", "write", "mkdir", "rename"])
def test_a_log_is_readable_whichever_disk_call_fails(
    store, written, tmp_path, monkeypatch, call, number
):
    real, cache = getattr(os, call), ChunkCache(tmp_path / "cache", limit_bytes=1 << 20)
    (tmp_path / "cache" / ".filling").rmdir()

    def refused(of, *args, **options):
        path = str(Path(f"/proc/self/fd/{of}").readlink()) if isinstance(of, int) else str(of)
        if path.startswith(str(tmp_path / "cache")):
            raise OSError(number, os.strerror(number))
        return real(of, *args, **options)

    monkeypatch.setattr(os, call, refused)
    segment = upload(store, written)
    with closing(ColdReader(store, cache)) as reader:
        assert read_log(reader, segment, max_bytes=4096) == written.body
    assert (cache.usage().chunks, cache.usage().reserved_bytes) == (0, 0)
