"""What many partitions write for the bucket: few objects, which have all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.faulty_object_store import FailsBefore, FaultyObjectStore
from tests.fakes.partition_logs import append_values
from tests.fakes.replicas import begin_to_lead
from tests.fakes.waiting import until
from tierlog.broker.replication.store_writer import Feed, Said, StoreWriter
from tierlog.broker.replication.write_ahead_chain import ClosedChain, chain_folder
from tierlog.cold_tier.write_ahead_object import Place
from tierlog.hot_tier.log import PartitionLog
from tierlog.object_store.memory import MemoryStore

FLUSH_MS = 100
OBJECT_BYTES = 2_000


def place(number: int) -> Place:
    return Place(b"\1" * 16, number)


@pytest.fixture
def store() -> FaultyObjectStore:
    return FaultyObjectStore(MemoryStore())


@pytest.fixture
def writer(store: FaultyObjectStore) -> Iterator[StoreWriter]:
    writer = StoreWriter(store, "a", flush_ms=FLUSH_MS, object_max_bytes=OBJECT_BYTES)
    yield writer
    writer.close()


@pytest.fixture
def logs(open_log: Callable[..., PartitionLog], tmp_path: Path) -> list[PartitionLog]:
    return [begin_to_lead(open_log(tmp_path / f"t-{n}")) for n in range(20)]


def feeds_of(writer: StoreWriter, logs: list[PartitionLog]) -> list[Feed]:
    return [writer.open_feed(one, place(n), 1, start_offset=0) for n, one in enumerate(logs)]


def append(log: PartitionLog, value: bytes) -> None:
    append_values(log, value)
    log.writer.flush()


def is_stored(feeds: list[Feed]) -> bool:
    return all(feed.stored == feed.log.flushed_end for feed in feeds)


def test_all_partitions_are_in_one_object_each_time(
    store: FaultyObjectStore, writer: StoreWriter, logs: list[PartitionLog]
) -> None:
    feeds, began_s = feeds_of(writer, logs), time.monotonic()
    for turn in range(30):
        for log in logs:
            append(log, b"%d" % turn)
    until(lambda: is_stored(feeds))
    took_s = time.monotonic() - began_s
    most = took_s * 1000 / FLUSH_MS + 1 + writer.written_bytes / OBJECT_BYTES
    assert writer.written_objects <= most
    closed = ClosedChain(store, chain_folder(writer.chain))
    for number, log in enumerate(logs):
        parts = closed.parts(place(number), epoch=1, end_offset=0)
        with_bytes = b"".join(closed.read(n, one) for n, one in parts)
        assert with_bytes == (log.folder / "00000000000000000000.log").read_bytes()


def test_nothing_is_written_while_nothing_is_new(
    writer: StoreWriter, logs: list[PartitionLog]
) -> None:
    feed = feeds_of(writer, logs[:1])[0]
    append(logs[0], b"0")
    until(lambda: is_stored([feed]))
    assert writer.written_objects == 1
    feed.say = lambda: Said(7, 3)
    feed.ask()  # somebody wants to know whether it leads
    until(lambda: feed.said == Said(7, 3))
    assert (writer.written_objects, feed.stored) == (2, 1)


def test_what_is_trimmed_leaves_no_hole_between_the_manifest_and_a_chain(
    store: FaultyObjectStore, writer: StoreWriter, logs: list[PartitionLog]
) -> None:
    log = logs[0]
    for value in (b"0", b"1"):
        append(log, value)
        log.roll()
    append(log, b"2")
    log.commit_up_to(2)
    log.trim(2)
    log.delete_local(2)
    feed = feeds_of(writer, [log])[0]
    until(lambda: is_stored([feed]))
    parts = ClosedChain(store, chain_folder(writer.chain)).parts(place(0), epoch=1, end_offset=0)
    extents = [(one.base_offset, one.end_offset, one.size_bytes > 0) for _, one in parts]
    assert extents == [(0, 2, False), (2, 3, True)]


def test_a_fence_ends_every_feed_and_begins_another_chain(
    store: FaultyObjectStore, writer: StoreWriter, logs: list[PartitionLog]
) -> None:
    feeds, chain = feeds_of(writer, logs[:2]), writer.chain
    ClosedChain(store, chain_folder(chain))
    append(logs[0], b"0")
    until(lambda: all(feed.is_over for feed in feeds))
    assert writer.chain != chain
    assert not writer.wait_until_stored(feeds[0], 1, patience_s=10)
    again = feeds_of(writer, logs[:2])
    until(lambda: is_stored(again))


def test_how_long_the_bucket_is_behind_is_known(
    store: FaultyObjectStore, writer: StoreWriter, logs: list[PartitionLog]
) -> None:
    feed = feeds_of(writer, logs[:1])[0]
    assert feed.behind_ms() == 0
    store.fail("put", FailsBefore(), times=10**6)
    append(logs[0], b"0")
    until(lambda: feed.behind_ms() > 50)
    assert not writer.wait_until_stored(feed, 1, patience_s=0.05)
    store.heal()
    until(lambda: feed.behind_ms() == 0)
