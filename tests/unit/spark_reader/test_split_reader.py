import queue

import pytest

from spark_reader.plan import Split
from spark_reader.split_reader import one_ahead, tail_bytes


def test_the_next_piece_is_fetched_while_one_is_decoded_and_no_more_than_that():
    begun: queue.Queue[int] = queue.Queue()

    def pieces():
        for number in range(4):
            begun.put(number)
            yield number

    ahead = one_ahead(pieces())
    assert next(ahead) == 0
    assert [begun.get(timeout=10) for _ in range(2)] == [0, 1]  # nobody has asked for 1 yet
    assert begun.empty()
    assert list(ahead) == [1, 2, 3]


def test_what_a_fetch_raises_comes_after_the_pieces_before_it():
    def pieces():
        yield 0
        raise OSError("the store went away")

    ahead = one_ahead(pieces())
    assert next(ahead) == 0
    with pytest.raises(OSError, match="went away"):
        next(ahead)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("size_bytes", "at", "fetches"),
    [
        (20 * MIB, lambda position: position * 1000 // (20 * MIB), 3),
        (20 * MIB, lambda position: position * 1000 // (30 * MIB), 8),  # half as much again
        (20 * MIB, lambda position: 900 + position * 100 // (20 * MIB), 3),  # behind a gap
        (1, lambda position: position * 1000 // MIB, 16),  # nothing was known
    ],
)
def test_a_split_of_the_tail_takes_few_fetches_wherever_its_bytes_lie(size_bytes, at, fetches):
    """`at`: the offset that lies at a position."""
    split = Split(
        topic="t",
        topic_id="id",
        partition=0,
        start_offset=0,
        end_offset=1000,
        size_bytes=size_bytes,
    )
    offset = position = count = 0
    while offset < 1000:
        position += tail_bytes(split, offset, left_bytes=size_bytes - position)
        offset, count = at(position), count + 1
    assert count <= fetches
