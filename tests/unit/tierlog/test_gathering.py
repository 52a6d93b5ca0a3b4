"""Input of `tierlog produce` that comes bit by bit."""

import io
import os

from tierlog.cli.gathering import Gathering, LiveInput


def test_a_pipe_that_does_not_block_is_not_at_its_end_while_nothing_comes():
    """As a parent may leave it that runs an event loop, node for one."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    sent = []

    class Due(Gathering):
        def patience_s(self) -> float | None:
            if not sent:
                return 0.0
            os.write(write, b"more")  # once what was held has gone out
            return None

    gathering = Due(sent.append, max_records=9, max_bytes=99)
    gathering.add(1, b"held")
    try:
        with LiveInput(io.FileIO(read), gathering) as live:
            assert live.readinto(memoryview(bytearray(10))) == len(b"more")
    finally:
        os.close(write)
    assert sent == [[b"held"]]
