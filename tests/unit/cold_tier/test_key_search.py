"""A search for a key over many segments: what is loaded ahead, how much of it at once, and when."""

import dataclasses
import threading
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest

from tests.fakes.cold_segments import upload, write_segment
from tests.fakes.waiting import until
from tests.unit.cold_tier.test_cold_reader import QUICK, bytes_of, gets
from tierlog.cold_tier import key_search
from tierlog.cold_tier.cold_reader import ColdReader
from tierlog.cold_tier.key_search import AHEAD_MAX, KeySearch
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import StoreUnavailable

MANY = 100
WAIT_S = 10


@pytest.fixture
def reader(store, cache):
    store.read_policy = QUICK
    with closing(ColdReader(store, cache)) as cold_reader:
        yield cold_reader


def segments_of(store, folder, keys):
    """A segment for each key, of one record."""
    found = []
    for number, key in enumerate(keys):
        written = write_segment(folder, base_offset=number, batches=1, records=1)
        body = encode_batch([b"v"], keys=[key], timestamps=[1], base_offset=number)
        written.files.log.write_bytes(body)
        found.append(upload(store, dataclasses.replace(written, body=bytes(body))))
    store.calls.clear()
    return found


@pytest.fixture
def segments(store, tmp_path):
    return segments_of(store, tmp_path / "log", [b"%d" % number for number in range(MANY)])


def run(reader, segments, search, *, most=10**9):
    """The segments that may have the key, in the order of the search; `most` are looked at."""
    ordered = segments if search.backward_to is None else segments[::-1]
    beyond = {one.base_offset: after for one, after in pairwise(ordered)}
    found = []
    for segment in ordered[:most]:
        start, end = reader.find_chunk_with_key(
            segment, segment.base_offset, search, beyond=lambda one: beyond.get(one.base_offset)
        )
        if start < end:
            found.append(segment)
            bytes_of(reader.read_segments(segment, start, max_bytes=1 << 20, end_offset=end))
        else:
            assert (start, end) == (segment.next_offset, segment.next_offset)
    return found


@contextmanager
def together(store, segments, parties):
    """GETs of the indexes of these segments return once so many of them were in flight. Yields how
    many there were at once at most.
    """
    keys, reached = {one.indexes_key for one in segments}, threading.Event()
    lock, in_flight, most = threading.Lock(), [0], [0]

    def count(step):
        with lock:
            in_flight[0] += step
            most[0] = max(most[0], in_flight[0])
            if most[0] >= parties:
                reached.set()

    get_range = store._store.get_range

    def counted(key, start, end):
        count(1)
        try:
            if key in keys:
                assert reached.wait(WAIT_S)
            yield from get_range(key, start, end)
        finally:
            count(-1)

    store._store.get_range = counted
    yield most
    del store._store.get_range


@pytest.mark.parametrize("backward_to", [None, 0])
def test_a_search_loads_the_filters_of_many_segments_at_once(store, reader, segments, backward_to):
    search = KeySearch(b"no such key", backward_to=backward_to)
    with together(store, segments[30:-30], AHEAD_MAX // 2) as most:
        assert run(reader, segments, search) == []
    assert AHEAD_MAX // 2 <= most[0] <= AHEAD_MAX + 1
    assert sorted(gets(store)) == sorted(one.indexes_key for one in segments)  # each once


def test_no_more_is_loaded_in_vain_than_was_looked_at_in_vain(store, reader, segments):
    for looked_at in (1, 2, 5, 40):
        store.calls.clear()
        search = KeySearch(b"no such key")
        with closing(ColdReader(store, reader._fills._cache)) as another:
            run(another, segments, search, most=looked_at)
        assert len(gets(store)) <= looked_at + min(looked_at - 1, AHEAD_MAX)


def test_a_search_that_finds_the_key_everywhere_loads_nothing_ahead(store, reader, tmp_path):
    segments = segments_of(store, tmp_path / "log", [b"wanted"] * 10)
    assert run(reader, segments, KeySearch(b"wanted"), most=4) == segments[:4]
    assert len(gets(store)) == 2 * 4


@pytest.mark.parametrize("backward_to", [None, 20])
def test_a_key_in_a_few_segments_is_found_and_costs_one_more_request_each(
    store, reader, tmp_path, backward_to
):
    keys = [b"wanted" if number in (3, 4, 30, 59) else b"%d" % number for number in range(60)]
    segments = segments_of(store, tmp_path / "log", keys)
    found = run(reader, segments, KeySearch(b"wanted", backward_to=backward_to))
    assert sorted(one.base_offset for one in found) == [3, 4, 30, 59]
    assert sorted(gets(store, ".indexes")) == sorted(one.indexes_key for one in segments)
    assert len(gets(store, ".log")) == 4


def test_a_backward_search_loads_nothing_from_before_its_end(store, reader, segments):
    run(reader, segments, KeySearch(b"no such key", backward_to=60), most=40)
    reader.close()
    assert sorted(gets(store)) == sorted(one.indexes_key for one in segments[60:])


def test_what_is_loaded_ahead_of_a_search_has_a_limit_of_bytes(
    store, reader, segments, monkeypatch
):
    size_bytes = max(one.indexes_size_bytes for one in segments)
    monkeypatch.setattr(key_search, "AHEAD_BYTES", 3 * size_bytes)
    run(reader, segments, KeySearch(b"no such key"), most=50)
    until(lambda: len(gets(store)) >= 50 + 3)
    assert len(gets(store)) == 50 + 3


def test_an_error_ahead_is_met_when_the_search_comes_there(store, reader, segments):
    broken, failed = segments[40].indexes_key, []

    def fail(_call, key):
        if key == broken:
            failed.append(key)
            raise StoreUnavailable("down")

    store.before_call = fail
    search = KeySearch(b"no such key")
    assert run(reader, segments, search, most=40) == []
    until(lambda: failed)
    with pytest.raises(StoreUnavailable, match="down"):
        run(reader, segments[40:], search)
    store.before_call = lambda *_: None
    assert run(reader, segments[40:], search) == []


def test_searches_of_a_reader_that_is_closed_end(store, reader, segments):
    reader.close()
    assert run(reader, segments, KeySearch(b"no such key")) == []
