import queue

import pytest

from spark_reader.reading import one_ahead


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
