import pytest

from tests.fakes.at_once import at_once
from tests.fakes.partition_logs import first_offset
from tierlog.host.waiting import WouldBlock
from tierlog.hot_tier import open_files
from tierlog.hot_tier.indexes import ENTRY_BYTES, SMALL_BYTES, IndexCache, IndexColumns
from tierlog.hot_tier.log_folder import OFFSET_INDEX
from tierlog.hot_tier.segment_lookup import SegmentLookup
from tierlog.record_format.index_layouts import OFFSET_ENTRY


def offsets(entry: tuple[int, int], *, count: int) -> IndexColumns:
    """An offset index that has one entry `count` times."""
    return IndexColumns(OFFSET_ENTRY, OFFSET_ENTRY.pack(*entry) * count)


def test_a_small_index_is_cached_at_its_first_use_and_a_large_one_at_its_second():
    cache = IndexCache()
    assert cache.should_cache("small", size_bytes=SMALL_BYTES)
    assert not cache.should_cache("large", size_bytes=SMALL_BYTES + 1)
    assert cache.should_cache("large", size_bytes=SMALL_BYTES + 1)


def test_an_invalidated_index_is_not_returned_and_starts_over():
    cache = IndexCache()
    cache.should_cache("large", size_bytes=1 << 16)
    cache.put_columns("large", offsets((1, 7), count=1 << 13))
    cache.invalidate("large")
    assert cache.get("large") is None
    assert not cache.should_cache("large", size_bytes=1 << 16)


def test_least_recently_used_indexes_are_evicted_at_the_limit():
    cache = IndexCache(limit_bytes=3 * (1000 + ENTRY_BYTES))
    for name in "abc":
        cache.put_columns(name, offsets((1, 7), count=125))
    cache.get("a")
    cache.put_columns("d", offsets((1, 7), count=125))
    assert [cache.get(name) is not None for name in "abcd"] == [True, False, True, True]


def test_an_index_of_a_large_share_of_the_limit_is_never_cached():
    cache = IndexCache(limit_bytes=1 << 20)
    for _ in range(3):
        assert not cache.should_cache("huge", size_bytes=1 << 19)


@pytest.fixture
def rolled(open_log, append_values):
    log = open_log(config={"segment.bytes": 2000, "index.interval.bytes": 1})
    for _ in range(40):
        append_values(log, b"v" * 200)
    log.writer.flush()
    return log


def test_a_sealed_segment_is_read_without_blocking_once_its_index_and_file_are_cached(rolled):
    assert at_once(rolled.read_hot, 1, max_bytes=1) is None
    read = rolled.read_hot(1, max_bytes=1)
    assert at_once(rolled.read_hot, 1, max_bytes=1) == read
    assert at_once(rolled.read_hot, 1, max_bytes=1 << 20) is None, "other segments hold the rest"
    whole = rolled.read_hot(1, max_bytes=1 << 20)
    assert len(whole.slices) > 3
    assert at_once(rolled.read_hot, 1, max_bytes=1 << 20) == whole


def test_pages_not_in_memory_make_a_nonblocking_read_fail(rolled, monkeypatch):
    rolled.read_hot(1, max_bytes=1)

    def evicted(*_):
        raise WouldBlock("evicted")

    monkeypatch.setattr(open_files, "pread_nowait", evicted)
    assert at_once(rolled.read_hot, 1, max_bytes=1) is None
    assert rolled.read_hot(1, max_bytes=1).slices


def test_a_corrupt_index_makes_a_nonblocking_read_fail(rolled):
    read = rolled.read_hot(3, max_bytes=1)
    path = rolled.folder / f"{0:020d}{OFFSET_INDEX}"
    cache = rolled._state.files.indexes
    good = cache.get(str(path))
    cache.put_columns(str(path), offsets((1, 7), count=len(good)))
    before = path.stat().st_ino
    assert at_once(rolled.read_hot, 3, max_bytes=1) is None
    assert path.stat().st_ino == before, "only a blocking read rebuilds it"
    assert rolled.read_hot(3, max_bytes=1) == read
    assert path.stat().st_ino != before


def test_a_cached_index_that_is_corrupt_is_rebuilt_on_use(rolled):
    before = rolled.read_hot(3, max_bytes=1)
    name = str(rolled.folder / f"{0:020d}{OFFSET_INDEX}")
    cache = rolled._state.files.indexes
    good = cache.get(name)
    cache.put_columns(name, offsets((1, 7), count=len(good)))
    after = rolled.read_hot(3, max_bytes=1)
    assert first_offset(after) == first_offset(before)
    assert after.next_offset == before.next_offset
    assert cache.get(name).floor(column=1, target=2**31 - 1) == good.floor(
        column=1, target=2**31 - 1
    )


def test_a_cached_index_is_dropped_with_its_segment(rolled):
    rolled.read_hot(0, max_bytes=1)
    name = str(rolled.folder / f"{0:020d}{OFFSET_INDEX}")
    assert rolled._state.files.indexes.get(name) is not None
    rolled.delete_local(rolled.active_base_offset)
    assert rolled._state.files.indexes.get(name) is None


def test_an_active_segment_may_be_sealed_between_two_steps_of_a_look_up(open_log, append_values):
    log = open_log()
    append_values(log, b"a", b"b")

    class SealedMeanwhile:
        offsets = property(lambda self: self.left.pop() if self.left else None)

        def __init__(self, segment):
            self.segment, self.left = segment, [segment.offsets]

        def __getattr__(self, name):
            return getattr(self.segment, name)

    active = SealedMeanwhile(log._state.active.segment)
    assert SegmentLookup(active, log._state.files).find_offset(1).base_offset == 0
