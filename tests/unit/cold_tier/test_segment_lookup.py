"""Limits on concurrent loads of index objects."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.fakes.waiting import until
from tierlog.cold_tier.segment_lookup import SegmentIndexes
from tierlog.host.retry import RetryPolicy
from tierlog.object_store.memory import MemoryStore
from tierlog.record_format.errors import MissingObject, StoreUnavailable


def segment(number):
    return SimpleNamespace(
        indexes_key=f"{number}.indexes", chunk_table_position=0, chunk_table_size=10
    )


class GatedStore(MemoryStore):
    """Raises `error` once its gate opens; `requested` lists the keys."""

    def __init__(self, error):
        super().__init__()
        self.gate, self.requested, self.error = threading.Event(), [], error

    def get_range(self, key, start, end):
        self.requested.append(key)
        self.gate.wait(30)
        raise self.error


@pytest.mark.parametrize("error", [StoreUnavailable("down"), MissingObject("k", file="k")])
def test_loads_that_waited_fail_with_the_store_without_a_request(error):
    store = GatedStore(error)
    store.read_policy = RetryPolicy(attempts=1)
    indexes = SegmentIndexes(store, loads_max=1)
    with ThreadPoolExecutor(3) as readers:
        first = readers.submit(indexes.load_index, segment(1))
        until(lambda: store.requested)
        others = [readers.submit(indexes.load_index, segment(number)) for number in (2, 3)]
        until(lambda: len(indexes._loading) == 3)
        store.gate.set()
        errors = [future.exception(30) for future in (first, *others)]
    is_down = isinstance(error, StoreUnavailable)
    assert [type(found) for found in errors] == [type(error)] * 3
    assert len(store.requested) == (1 if is_down else 3)
    with pytest.raises(type(error)):
        indexes.load_index(segment(4))
    assert store.requested[-1] == "4.indexes", "later loads send a request again"
