import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from tests.fakes.waiting import until
from tierlog.cold_tier.chunk_fills import ChunkFills
from tierlog.cold_tier.ranged_reader import ChunkRef
from tierlog.host.waiting import Wait
from tierlog.record_format.errors import Throttled

CHUNK = ChunkRef("t/segments/a.log", ("a", 0), 0, 100, 0)
READERS = 8


class FullCache:
    """A cache whose chunks are all in use: a fill waits for the gate, and then finds no space."""

    def __init__(self) -> None:
        self.gate, self.lookups, self.waits = threading.Event(), 0, list[float]()

    def lookup(self, chunk: ChunkRef, wait: Wait) -> None:
        self.lookups += 1

    def __contains__(self, chunk: ChunkRef) -> bool:
        return False

    def reserve(self, size_bytes: int, *, wait_s: float) -> None:
        self.waits.append(wait_s)
        self.gate.wait(20)
        raise Throttled("full of chunks in use")


def fill_for_all(cache: FullCache, fills: ChunkFills) -> list[type[BaseException] | None]:
    """Readers that wait for one chunk together; how each of them ended."""
    with ThreadPoolExecutor(READERS) as threads:
        readers = [
            threads.submit(fills.open_chunk, CHUNK, space_wait_s=10.0) for _ in range(READERS)
        ]
        until(lambda: cache.lookups >= READERS)
        cache.gate.set()
        return [type(reader.exception(20)) for reader in readers]


def test_readers_of_one_chunk_wait_together_for_space() -> None:
    """One after the other they would block a thread each, the last of them for minutes."""
    cache = FullCache()
    with closing(ChunkFills(cache, None, fills_max=4, memory_max_bytes=100)) as fills:
        assert fill_for_all(cache, fills) == [Throttled] * READERS
    assert len(cache.waits) < READERS


def test_a_reader_waits_for_space_although_the_read_ahead_found_none() -> None:
    cache = FullCache()
    with closing(ChunkFills(cache, None, fills_max=4, memory_max_bytes=100)) as fills:
        assert fills.prefetch(CHUNK)
        until(lambda: cache.waits == [0.0])
        assert fill_for_all(cache, fills) == [Throttled] * READERS
    assert cache.waits[:2] == [0.0, 10.0]
