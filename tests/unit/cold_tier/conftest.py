import pytest

from tests.fakes.cold_segments import write_segment
from tests.fakes.faulty_object_store import FaultyObjectStore
from tierlog.cold_tier.chunk_cache import ChunkCache
from tierlog.object_store.memory import MemoryStore


@pytest.fixture
def store():
    return FaultyObjectStore(MemoryStore())


@pytest.fixture
def written(tmp_path):
    return write_segment(tmp_path / "log")


@pytest.fixture
def cache(tmp_path):
    return ChunkCache(tmp_path / "cache", limit_bytes=1 << 20)
