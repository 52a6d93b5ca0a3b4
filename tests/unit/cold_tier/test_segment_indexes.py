"""Loads of index objects that wait for a turn."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from cold_tier.memory import MemoryStore
from cold_tier.retry import RetryPolicy
from cold_tier.segment_indexes import SegmentIndexes
from record_format.errors import MissingObject, StoreUnavailable
from tests.fakes.waiting import until


def segment(number):
    return SimpleNamespace(
        indexes_key=f"{number}.indexes", chunk_table_position=0, chunk_table_size=10
    )


class Held(MemoryStore):
    """Answers when it is let; `asked` says for what."""

    def __init__(self, error):
        super().__init__()
        self.gate, self.asked, self.error = threading.Event(), [], error

    def get_range(self, key, start, end):
        self.asked.append(key)
        self.gate.wait(30)
        raise self.error


@pytest.mark.parametrize("error", [StoreUnavailable("down"), MissingObject("k", file="k")])
def test_who_waited_for_a_turn_in_vain_does_not_ask_a_store_that_is_down(error):
    store = Held(error)
    indexes = SegmentIndexes(store, loads_max=1, policy=RetryPolicy(attempts=1))
    with ThreadPoolExecutor(3) as readers:
        first = readers.submit(indexes.get, segment(1))
        until(lambda: store.asked)
        others = [readers.submit(indexes.get, segment(number)) for number in (2, 3)]
        until(lambda: len(indexes._loading) == 3)
        store.gate.set()
        refusals = [one.exception(30) for one in (first, *others)]
    is_down = isinstance(error, StoreUnavailable)
    assert [type(one) for one in refusals] == [type(error)] * 3
    assert len(store.asked) == (1 if is_down else 3)
    with pytest.raises(type(error)):
        indexes.get(segment(4))
    assert store.asked[-1] == "4.indexes", "who comes later asks again"
