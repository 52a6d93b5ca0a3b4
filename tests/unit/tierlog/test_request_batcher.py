"""Input of `tierlog produce` that arrives bit by bit."""

import fcntl
import io
import os
import resource

from tierlog.cli.request_batcher import LiveInput, RequestBatcher


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
    batcher.add(1, b"pending")
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
