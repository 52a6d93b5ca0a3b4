import queue

import pytest

from tierlog.spark_reader.split_reader import one_ahead, tail_bytes
from tierlog.spark_reader.splits import Split


def test_exactly_one_piece_is_fetched_ahead():
    begun: queue.Queue[int] = queue.Queue()

    def pieces():
        for number in range(4):
            begun.put(number)
            yield number

    ahead = one_ahead(pieces())
    assert next(ahead) == 0
    assert [begun.get(timeout=10) for _ in range(2)] == [0, 1]  # 1 was not requested yet
    assert begun.empty()
    assert list(ahead) == [1, 2, 3]


def test_an_error_is_raised_after_the_pieces_before_it():
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
        (20 * MIB, lambda position: position * 1000 // (30 * MIB), 8),  # half as many bytes again
        (20 * MIB, lambda position: 900 + position * 100 // (20 * MIB), 3),  # after a gap
        (1, lambda position: position * 1000 // MIB, 16),  # unknown size
    ],
)
def test_a_split_of_the_tail_takes_few_fetches_however_its_bytes_are_distributed(
    size_bytes, at, fetches
):
    """`at`: the offset at a position."""
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
