import random
from itertools import product

import pytest

from tierlog.spark_reader.splits import count_offsets, first_lost, ranges_outside, skip_gap
from tierlog.spark_reader.stream_offsets import (
    Backlog,
    CorruptCheckpoint,
    StreamOffsets,
    end_within_bytes,
    from_document,
    limit_offsets,
)


def test_offsets_round_trip_through_the_checkpoint():
    offsets = StreamOffsets({"a": "id-a", "b": "id-b"}, {("a", 0): 5, ("a", 11): 7, ("b", 2): 0})
    document = offsets.to_document()
    assert document == {
        "a": {"id": "id-a", "offsets": {"0": 5, "11": 7}},
        "b": {"id": "id-b", "offsets": {"2": 0}},
    }
    assert from_document(document) == offsets


def test_the_end_of_a_first_batch_tells_where_it_began():
    begun = StreamOffsets({"a": "id-a", "b": "id-b"}, {("a", 0): 5, ("b", 2): 4})
    reached = StreamOffsets({"a": "id-a", "b": "new", "c": "id-c"}, {("a", 0): 9, ("c", 0): 1})
    end = reached.ending_the_first_batch(begun)
    assert end.to_document() == {
        "a": {"id": "id-a", "offsets": {"0": 9}, "from": {"0": 5}},
        "b": {"id": "new", "offsets": {}, "from": {}},  # of the other topic of that name
        "c": {"id": "id-c", "offsets": {"0": 1}, "from": {}},
    }
    assert from_document(end.to_document()) == end
    asked_again = StreamOffsets({"a": "id-a"}, {("a", 0): 9})
    assert end.start_of_batch(asked_again).offsets == {("a", 0): 5}
    assert end.start_of_batch(end) == end
    assert reached.start_of_batch(end) == end


@pytest.mark.parametrize("document", [{"a": {"0": 5}}, {"a": 5}, {"a": {"id": "x", "offsets": 3}}])
def test_offsets_of_another_source_are_refused(document):
    with pytest.raises(CorruptCheckpoint):
        from_document(document)


def test_a_limit_is_shared_and_every_partition_advances():
    rng = random.Random(1)
    for _ in range(100):
        backlogs = []
        for number in range(rng.randrange(1, 8)):
            start = rng.randrange(100)
            backlogs.append(Backlog(("t", number), start, start + rng.choice((0, 1, 50, 10**9))))
        limit = rng.randrange(1, 200)
        ends = limit_offsets(backlogs, limit)
        taken = [ends[backlog.name] - backlog.start_offset for backlog in backlogs]
        assert sum(taken) <= max(limit, len(backlogs)) + len(backlogs), (backlogs, limit)
        for backlog, count in zip(backlogs, taken, strict=True):
            assert (1 if backlog.offsets else 0) <= count <= backlog.offsets, (backlog, limit)


def test_byte_limits_become_offsets_by_segment_sizes():
    sizes = [(0, 100, 1000), (100, 200, 10_000), (250, 300, 50)]
    whole = Backlog(("t", 0), 0, 300)
    assert [end_within_bytes(whole, sizes, limit) for limit in (0, 10, 1000, 2000, 10**6)] == [
        *(1, 1, 100, 110, 300)
    ]
    assert end_within_bytes(Backlog(("t", 0), 150, 160), sizes, 500) == 155


def test_an_offset_in_a_gap_is_skipped():
    assert [skip_gap(offset, [(10, 20)]) for offset in (9, 10, 19, 20)] == [9, 20, 20, 20]


def test_a_range_that_ends_in_a_gap_has_lost_what_the_gap_has_of_it():
    gaps = [(10, 20), (20, 30)]
    ends = (10, 11, 20, 25, 30)
    assert [first_lost(5, end, gaps) for end in ends] == [None, 10, None, 20, None]
    assert [first_lost(start, 15, gaps) for start in (12, 15)] == [12, None]


def test_offsets_in_gaps_are_not_counted():
    gaps = ((5, 10), (10, 12), (30, 33))
    for start, end in product(range(0, 32, 3), range(0, 40, 3)):
        expected = [n for n in range(start, end) if not any(low <= n < high for low, high in gaps)]
        assert [n for a, b in ranges_outside(start, end, gaps) for n in range(a, b)] == expected
        assert count_offsets(start, end, gaps) == len(expected)
        backlog = Backlog(("t", 0), start, end, gaps)
        for count in range(1, len(expected) + 1):
            assert [n for n in expected if n < backlog.end_of_first(count)] == expected[:count]


def test_a_gap_takes_no_share_of_the_limit():
    restored = Backlog(("t", 0), 0, 10**9 + 200, ((100, 10**9 + 100),))
    ends = limit_offsets([restored, Backlog(("t", 1), 0, 200)], 100)
    assert ends == {("t", 0): 50, ("t", 1): 50}
    ends = limit_offsets([restored, Backlog(("t", 1), 0, 200)], 300)
    assert ends == {("t", 0): 10**9 + 150, ("t", 1): 150}
