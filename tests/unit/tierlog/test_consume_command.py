"""What `tierlog consume` reads of a log that grows meanwhile."""

from types import SimpleNamespace

import pytest

from record_format.encode import encode_batch
from tierlog.cli import consume
from tierlog.client.responses import FetchedBatches


def batch(base_offset: int) -> bytes:
    """Two records."""
    return bytes(encode_batch([b"x", b"y"], timestamps=[1, 2], base_offset=base_offset))


@pytest.mark.parametrize("batches_per_fetch", [1, 2, 3, 10])
def test_batches_end_where_the_log_ended_at_the_start(
    capfdbinary: pytest.CaptureFixture[bytes], batches_per_fetch: int
) -> None:
    """A producer appends a batch after every fetch."""
    log = [batch(2 * n) for n in range(4)]

    def fetch(*_: object, offset: object, **__: object) -> FetchedBatches:
        first = 0 if offset == "earliest" else int(str(offset)) // 2
        found = log[first : first + batches_per_fetch]
        next_offset = 2 * (first + len(found))
        end = 2 * len(log)
        log.append(batch(end))
        assert len(log) < 20, "it never ends"
        return FetchedBatches(b"".join(found), next_offset, 0, end, False, "hot", "id")

    client = SimpleNamespace(fetch_batches=fetch)
    start = consume._start(None, None, None)
    consume._batches(client, "t", 0, start=start, limits=None)  # type: ignore[arg-type]
    assert capfdbinary.readouterr().out == b"".join(log[:4])
