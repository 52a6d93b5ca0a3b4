import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tierlog.cold_tier.chunk_cache import ChunkCache
from tierlog.cold_tier.ranged_reader import ChunkRef
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import Throttled

SIZE = 1000


def body_of(number, unique="seg"):
    return (b"%s/%d " % (unique.encode(), number) * SIZE)[:SIZE]


def ref(number, unique="seg"):
    return ChunkRef(
        "k.log", (unique, number), number * SIZE, SIZE, crc32c_of(body_of(number, unique))
    )


def fill(cache, number, unique="seg", *, read=True):
    opened(cache, number, unique, read=read).close()


def is_found(cache, chunk):
    found = cache.lookup(chunk)
    if found is not None:
        found.close()
    return found is not None


def opened(cache, number, unique="seg", *, read=True):
    """A filled chunk, whose file the caller closes."""
    chunk = ref(number, unique)
    cache.reserve(SIZE)
    temp = cache.new_temp_path()
    temp.write_bytes(body_of(number, unique))
    handle = cache.publish(chunk, temp)
    if read:
        cache.mark_read(chunk)
    return handle


def make(folder, chunks=4):
    return ChunkCache(folder, limit_bytes=chunks * SIZE)


def content(opened):
    with open(opened.path, "rb") as file:
        return file.read()


def test_a_filled_chunk_is_found_and_an_unknown_one_is_a_miss(tmp_path):
    cache = make(tmp_path)
    assert cache.lookup(ref(1)) is None
    fill(cache, 1)
    found = cache.lookup(ref(1))
    assert found is not None
    assert os.pread(found.fd, 2 * SIZE, 0) == body_of(1)
    assert (tmp_path / "seg" / "1").read_bytes() == body_of(1)
    usage = cache.usage()
    assert (usage.hits, usage.misses, usage.cached_bytes) == (1, 1, SIZE)


def test_cached_and_reserved_bytes_stay_within_the_limit(tmp_path):
    cache = make(tmp_path)
    for number in range(20):
        fill(cache, number)
        usage = cache.usage()
        assert usage.cached_bytes + usage.reserved_bytes + usage.lingering_bytes <= 4 * SIZE
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 4


def test_a_cancelled_reservation_frees_its_space(tmp_path):
    cache = make(tmp_path, chunks=1)
    for _ in range(3):
        cache.reserve(SIZE)
        cache.unreserve(SIZE)
    fill(cache, 1)


def test_open_chunks_are_not_evicted_and_a_full_cache_raises(tmp_path):
    cache = make(tmp_path, chunks=2)
    opened_chunks = [opened(cache, 0), opened(cache, 1)]
    with pytest.raises(Throttled):
        cache.reserve(SIZE)
    assert (tmp_path / "seg" / "0").exists()
    opened_chunks.pop().close()
    cache.reserve(SIZE)
    assert cache.usage().chunks == 1


def test_a_waiting_fill_continues_when_a_reader_closes_its_chunk(tmp_path):
    cache = make(tmp_path, chunks=1)
    threading.Timer(0.1, opened(cache, 0).close).start()
    cache.reserve(SIZE, wait_s=10)
    assert cache.usage().reserved_bytes == SIZE


@pytest.mark.parametrize("limit_bytes", [0, SIZE - 1])
def test_a_chunk_larger_than_the_cache_has_it_to_itself(tmp_path, limit_bytes):
    cache = ChunkCache(tmp_path, limit_bytes=limit_bytes)
    opened_chunk = opened(cache, 0)
    with pytest.raises(Throttled):
        cache.reserve(SIZE)
    opened_chunk.close()
    assert os.pread(opened(cache, 1).fd, SIZE, 0) == body_of(1)
    usage = cache.usage()
    assert (usage.chunks, usage.cached_bytes) == (1, SIZE)


def test_a_chunk_dropped_while_open_counts_until_it_is_closed(tmp_path):
    cache = make(tmp_path, chunks=2)
    opened_chunk = opened(cache, 0)
    (tmp_path / "seg" / "0").write_bytes(bytes(SIZE))
    opened_chunk.report_corrupt()
    assert cache.lookup(ref(0)) is None
    assert cache.usage().lingering_bytes == SIZE
    fill(cache, 1)
    with pytest.raises(Throttled):
        cache.reserve(2 * SIZE)
    assert cache.usage().chunks == 1, "nothing is evicted if that would not be enough"
    opened_chunk.close()
    assert cache.usage().lingering_bytes == 0
    cache.reserve(2 * SIZE)


def test_a_missing_file_is_a_miss(tmp_path):
    cache = make(tmp_path)
    fill(cache, 0)
    (tmp_path / "seg" / "0").unlink()
    assert cache.lookup(ref(0)) is None
    assert cache.usage().chunks == 0
    fill(cache, 0)
    assert cache.lookup(ref(0)) is not None


def test_a_folder_deleted_with_its_last_chunk_does_not_break_a_fill(tmp_path, monkeypatch):
    cache, mkdir = make(tmp_path), Path.mkdir
    gone = []

    def deleted_during_mkdir(self, *args, **options):
        if self.name == "seg" and not gone:
            gone.append(self)
            raise FileExistsError(errno.EEXIST, "and then it was gone", str(self))
        mkdir(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", deleted_during_mkdir)
    assert os.pread(opened(cache, 0).fd, SIZE, 0) == body_of(0)
    assert gone


def test_a_missing_folder_is_recreated(tmp_path):
    cache = make(tmp_path / "cache")
    fill(cache, 0)
    shutil.rmtree(tmp_path / "cache")
    assert cache.lookup(ref(0)) is None
    assert os.pread(opened(cache, 0).fd, SIZE, 0) == body_of(0)
    chunk, temp = ref(1), cache.new_temp_path()
    cache.reserve(SIZE)
    temp.write_bytes(body_of(1))
    temp.rename(tmp_path / "filled")
    shutil.rmtree(tmp_path / "cache")
    cache.publish(chunk, tmp_path / "filled")
    assert os.pread(cache.lookup(ref(1)).fd, SIZE, 0) == body_of(1)


@pytest.mark.parametrize("damage", ["none", "flip", "cut", "longer"])
def test_chunks_of_an_earlier_process_are_verified_before_use(tmp_path, damage):
    fill(make(tmp_path), 0)
    path = tmp_path / "seg" / "0"
    body = bytearray(path.read_bytes())
    if damage == "flip":
        body[17] ^= 1
    elif damage == "cut":
        body.pop()
    elif damage == "longer":
        body.append(0)
    path.write_bytes(body)
    found = make(tmp_path).lookup(ref(0))
    if damage == "none":
        assert found is not None
    else:
        assert found is None
        assert not path.exists()


def test_a_restart_removes_unfinished_fills_and_chunks_above_the_limit(tmp_path):
    cache = make(tmp_path, chunks=8)
    for number in range(8):
        fill(cache, number)
    cache.new_temp_path().write_bytes(b"half")
    again = make(tmp_path, chunks=3)
    assert again.usage().chunks == 3
    assert list((tmp_path / ".filling").iterdir()) == []
    assert len(list((tmp_path / "seg").iterdir())) == 3


def test_a_scan_does_not_evict_frequently_read_chunks(tmp_path):
    cache = make(tmp_path, chunks=20)
    for round_number in range(3):
        for number in range(4):
            if not is_found(cache, ref(number, "hot")):
                fill(cache, number, "hot")
        for number in range(15):
            fill(cache, round_number * 100 + number, "warm")
    for number in range(200):
        fill(cache, number, "scan")
    assert all(ref(number, "hot") in cache for number in range(4))


def test_a_repeated_scan_larger_than_the_cache_gets_some_hits(tmp_path):
    cache = make(tmp_path, chunks=50)
    hits = 0
    for _ in range(4):
        for number in range(75):
            if is_found(cache, ref(number)):
                hits += 1
            else:
                fill(cache, number)
    assert hits > 30


def test_unread_prefetched_chunks_do_not_fill_the_cache(tmp_path):
    cache = make(tmp_path, chunks=8)
    for number in range(4):
        fill(cache, number, "read")
    for number in range(100):
        fill(cache, number, "prefetched", read=False)
    assert cache.usage().chunks <= 8
    fill(cache, 1, "new")
    assert cache.lookup(ref(1, "new")) is not None


def test_shrink_evicts_closed_chunks(tmp_path):
    cache = make(tmp_path, chunks=8)
    opened_chunks = [opened(cache, number) for number in range(2)]
    for number in range(2, 8):
        fill(cache, number)
    assert cache.shrink(3 * SIZE) == 3 * SIZE
    assert cache.shrink(100 * SIZE) == 3 * SIZE
    assert cache.usage().chunks == len(opened_chunks)


def test_shrink_evicts_what_there_is_despite_reservations(tmp_path):
    """Otherwise a disk that lacks more than the cache holds would gain nothing."""
    cache = make(tmp_path, chunks=8)
    for number in range(4):
        fill(cache, number)
    cache.reserve(SIZE)
    assert cache.shrink(5 * SIZE) == 4 * SIZE
    assert cache.usage().chunks == 0


def test_concurrent_use_leaves_the_accounting_consistent(tmp_path):
    cache = make(tmp_path, chunks=10)

    def work(seed):
        for step in range(300):
            number = (seed * 7 + step * 13) % 40
            found = cache.lookup(ref(number))
            if found is None:
                try:
                    found = opened(cache, number)
                except Throttled:
                    continue
            assert os.pread(found.fd, SIZE, 0) == body_of(number)
            found.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    usage = cache.usage()
    assert (usage.reserved_bytes, usage.lingering_bytes) == (0, 0)
    assert usage.cached_bytes == usage.chunks * SIZE <= 10 * SIZE
