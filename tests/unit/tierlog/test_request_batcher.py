"""Requests of `tierlog produce`: input that arrives bit by bit, and the numbers in errors."""

import fcntl
import io
import os
import resource

import pytest

from tierlog.cli.produce_input import Item, LiveInput, RequestBatcher
from tierlog.record_format.errors import InvalidRecord, TierlogError, UnknownTopic


def test_an_empty_nonblocking_pipe_is_not_at_its_end():
    """As inherited from a parent with an event loop, such as Node.js."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    sent = []

    class Due(RequestBatcher):
        def remaining_linger_ms(self) -> float | None:
            if not sent:
                return 0.0
            os.write(write, b"more")  # once the pending records were sent
            return None

    batcher = Due(sent.append, max_records=9, max_bytes=99)
    batcher.add_item(1, b"pending")
    try:
        with LiveInput(io.FileIO(read), batcher) as live:
            assert live.readinto(memoryview(bytearray(10))) == len(b"more")
    finally:
        os.close(write)
    assert sent == [[b"pending"]]


def test_a_descriptor_above_the_limit_of_select_is_read():
    read, write = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        descriptor = fcntl.fcntl(read, fcntl.F_DUPFD, 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(read)
    with LiveInput(
        io.FileIO(descriptor), RequestBatcher(print, max_records=9, max_bytes=99)
    ) as live:
        os.write(write, b"more")
        os.close(write)
        assert live.readinto(memoryview(bytearray(10))) == len(b"more")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidRecord("records[1].key: bad"), "record 9.key: bad"),
        (InvalidRecord("line 2: bad"), "line 9: bad"),
        (UnknownTopic("records[2]"), "there is no topic 'records[2]'"),
        (InvalidRecord("line 0: bad"), "line 0: bad"),
        (InvalidRecord("line 3: bad"), "line 3: bad"),
    ],
)
def test_errors_name_records_by_their_number_in_the_input(error: TierlogError, message: str):
    def refuse(_: list[Item]) -> None:
        raise error

    batcher = RequestBatcher(refuse, max_records=10, max_bytes=1000)
    batcher.add_item(7, b"first")
    batcher.add_item(9, b"second")
    with pytest.raises(TierlogError) as refused:
        batcher.send_items()
    assert str(refused.value) == message
