"""Input of `tierlog produce` that comes bit by bit."""

import fcntl
import io
import os
import resource

from tierlog.cli.request_batcher import LiveInput, RequestBatcher


def test_a_pipe_that_does_not_block_is_not_at_its_end_while_nothing_comes():
    """As a parent may leave it that runs an event loop, node for one."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    sent = []

    class Due(RequestBatcher):
        def remaining_linger_ms(self) -> float | None:
            if not sent:
                return 0.0
            os.write(write, b"more")  # once what was held has gone out
            return None

    batcher = Due(sent.append, max_records=9, max_bytes=99)
    batcher.add(1, b"held")
    try:
        with LiveInput(io.FileIO(read), batcher) as live:
            assert live.readinto(memoryview(bytearray(10))) == len(b"more")
    finally:
        os.close(write)
    assert sent == [[b"held"]]


def test_a_descriptor_beyond_those_that_select_takes_is_read():
    read, write = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        beyond = fcntl.fcntl(read, fcntl.F_DUPFD, 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(read)
    with LiveInput(io.FileIO(beyond), RequestBatcher(print, max_records=9, max_bytes=99)) as live:
        os.write(write, b"more")
        os.close(write)
        assert live.readinto(memoryview(bytearray(10))) == len(b"more")
