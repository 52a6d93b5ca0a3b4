"""What `tierlog consume` reads of a log that grows meanwhile, and how it ends if interrupted."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tierlog.cli import consume, program
from tierlog.cli.record_range import Range
from tierlog.client.progress import PartitionCursor
from tierlog.client.records import ConsumedRecord
from tierlog.client.responses import FetchedBatches
from tierlog.record_format.encode import encode_batch


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
    consume._batches(client, "t", 0, start=Range(), limits=None)  # type: ignore[arg-type]
    assert capfdbinary.readouterr().out == b"".join(log[:4])


def test_an_end_that_nobody_knows_ends_nothing(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Batches, and records too: the partition's leader answered again after the first fetch."""
    first = FetchedBatches(batch(0), 2, 0, 2, False, "cold", "id", is_end_known=False)
    answers = [first, FetchedBatches(batch(2), 4, 0, 4, True, "hot", "id")]
    client = SimpleNamespace(fetch_batches=lambda *_, **__: answers.pop(0))
    consume._batches(client, "t", 0, start=Range(), limits=None)  # type: ignore[arg-type]
    assert capfdbinary.readouterr().out == batch(0) + batch(2)
    cursor = PartitionCursor("t", partition=0)
    assert len(cursor.advance(first)) == 2
    assert (cursor.done, cursor.initial_end) == (False, None)


@pytest.mark.parametrize("group", [(), ("--group", "g")])
def test_a_consumer_that_was_interrupted_before_the_end_says_so(
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    group: tuple[str, ...],
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[ConsumedRecord]:
        yield ConsumedRecord("t", 0, 5, 1, None, b"v", ())
        raise KeyboardInterrupt

    client = nullcontext(SimpleNamespace(consume=interrupted))
    monkeypatch.setattr("tierlog.client.client.Client", lambda *_, **__: client)
    assert program.run_command(["consume", "t", "--raw", *group]) == program.INTERRUPTED
    program._flush_or_discard_output()
    assert capfdbinary.readouterr().out == b"v\n"
