"""Write-ahead chains over stores that lose answers, are late, and are read by others meanwhile."""

import random
import threading
from concurrent.futures import Future, wait
from functools import partial

import pytest

from tests.fakes.faulty_object_store import FailsAfter, FailsBefore, FaultyObjectStore, Slow
from tests.fakes.waiting import until
from tierlog.broker.replication.write_ahead import IN_FLIGHT_MAX
from tierlog.broker.replication.write_ahead_chain import (
    ChainWriter,
    ClosedChain,
    chain_folder,
    chains_of,
    collect,
    remaining,
)
from tierlog.cold_tier.write_ahead_object import (
    FENCE,
    FIRST_READ_BYTES,
    Part,
    Place,
    pack_parts,
    read_parts,
)
from tierlog.object_store.folder import FolderStore
from tierlog.object_store.memory import MemoryStore
from tierlog.record_format.errors import (
    CorruptObject,
    FencedError,
    MissingObject,
    ShuttingDown,
    StoreUnavailable,
    UnknownFormatVersion,
)

FOLDER = chain_folder("a/1")
HERE, THERE = Place(b"\1" * 16, 0), Place(b"\2" * 16, 7)
PATIENCE_S = 30


def part(base, end, *, place=HERE, epoch=3, data=None):
    return Part(place, epoch, base, end, 0, f"{base}-{end}".encode() if data is None else data)


def key(number):
    return f"{FOLDER}{number:020}.wal"


@pytest.fixture
def store():
    return FaultyObjectStore(MemoryStore())


@pytest.fixture
def writer(store):
    writer = ChainWriter(store, FOLDER, pause=lambda _: None)
    yield writer
    writer.close()


def found(store, *, place=HERE, epoch=3, end_offset=0):
    chain = ClosedChain(store, FOLDER)
    parts = chain.parts(place, epoch=epoch, end_offset=end_offset)
    return [(one.base_offset, one.end_offset, chain.read(n, one)) for n, one in parts]


# --- objects --------------------------------------------------------------------------------------


def parse(data, size_bytes=None):
    return read_parts(lambda a, b: data[a:b], size_bytes=size_bytes or len(data), file="f")


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_an_object_tells_where_each_part_lies(count):
    parts = [part(n, n + 2, place=Place(bytes([n % 256]) * 16, n)) for n in range(count)]
    data = pack_parts(parts)
    stored = parse(data)
    assert [data[one.position :][: one.size_bytes] for one in stored] == [p.data for p in parts]
    assert [tuple(one)[:5] for one in stored] == [tuple(one)[:5] for one in parts]
    assert (count == 1000) == any(one.position > FIRST_READ_BYTES for one in stored[:1])


@pytest.mark.parametrize("count", [1, 400])
def test_what_an_interrupted_put_left_has_no_parts(count):
    data = pack_parts([part(n, n + 1) for n in range(count)])
    for size_bytes in {*range(1, 87), len(data) // 2, len(data) - 1}:
        assert parse(data[:size_bytes]) == []


def test_a_changed_byte_is_found_and_never_taken_for_an_interrupted_put():
    data = pack_parts([part(0, 1), part(1, 2)])
    head_bytes = parse(data)[0].position
    for position in range(head_bytes):
        bad = bytearray(data)
        bad[position] ^= 0x40
        with pytest.raises((CorruptObject, UnknownFormatVersion)):
            parse(bytes(bad))
    with pytest.raises(CorruptObject):
        parse(data + b"x")


# --- writing --------------------------------------------------------------------------------------


def test_objects_are_acknowledged_in_order_whichever_lands_first(store, writer):
    late = Slow()
    store.fail("put", late, when=lambda one: one == key(0))
    futures = [writer.send([part(n, n + 1)]) for n in range(IN_FLIGHT_MAX)]
    until(lambda: store.head(key(IN_FLIGHT_MAX - 1)) is not None)
    assert not any(one.done() for one in futures)
    assert not writer.has_room
    late.gate.set()
    assert [one.result(PATIENCE_S) for one in futures] == [None] * IN_FLIGHT_MAX
    until(lambda: writer.has_room)


@pytest.mark.parametrize("fault", [FailsBefore, FailsAfter])
def test_a_lost_answer_is_repeated_until_the_store_says_what_is_there(store, writer, fault):
    store.fail("put", fault(), times=3)
    store.fail("get", FailsBefore(), times=3)
    writer.send([part(0, 1)]).result(PATIENCE_S)
    store.heal()
    assert found(store) == [(0, 1, b"0-1")]


@pytest.mark.parametrize("there", [FENCE, b"", pack_parts([part(5, 6)]), b"x" * 500])
def test_a_number_that_something_else_has_ends_the_chain(store, writer, there):
    store.put(key(1), there)
    futures = [writer.send([part(n, n + 1)]) for n in range(3)]
    wait(futures, PATIENCE_S)
    assert futures[1].exception().__class__ is FencedError
    assert futures[2].exception().__class__ is FencedError
    assert writer.send([part(9, 10)]).exception().__class__ is FencedError


def test_what_was_on_its_way_when_the_broker_stopped_is_not_acknowledged(store):
    store.fail("put", FailsAfter(), times=10**6)
    store.fail("get", FailsBefore(), times=10**6)
    writer = ChainWriter(store, FOLDER, pause=lambda _: None)
    future = writer.send([part(0, 1)])
    writer.close()
    assert future.exception().__class__ is ShuttingDown


# --- closing, reading -----------------------------------------------------------------------------


def test_a_closed_chain_has_what_continues_the_manifest_and_is_of_the_epoch(store, writer):
    rows = [[part(0, 5)], [part(5, 8), part(0, 2, place=THERE)], [part(8, 8 + 4, epoch=4)]]
    for parts in rows:
        writer.send(parts).result(PATIENCE_S)
    assert found(store) == [(0, 5, b"0-5"), (5, 8, b"5-8")]
    assert found(store, end_offset=6) == [(5, 8, b"5-8")]
    assert found(store, place=THERE) == [(0, 2, b"0-2")]
    assert found(store, epoch=4, end_offset=8) == [(8, 12, b"8-12")]
    assert found(store, epoch=4) == []
    assert writer.send([part(12, 13)]).exception(PATIENCE_S).__class__ is FencedError


def test_a_part_that_changed_in_the_bucket_is_refused(store, writer):
    writer.send([part(0, 1)]).result(PATIENCE_S)
    body = bytearray(store.get(key(0), max_bytes=1000))
    body[-1] ^= 1
    store.put(key(0), bytes(body))
    with pytest.raises(CorruptObject, match="fails its CRC-32C"):
        found(store)


def test_a_chain_that_was_never_written_to_is_closed_by_a_fence(store, writer):
    assert found(store) == []
    assert store.get(key(0), max_bytes=100) == FENCE
    assert writer.send([part(0, 1)]).exception(PATIENCE_S).__class__ is FencedError


def numbers(store):
    return [int(stat.key[-24:-4]) for stat in store.list(FOLDER, limit=1000)]


def test_the_newest_object_is_kept_until_the_chain_is_closed(store, writer):
    for n in range(5):
        writer.send([part(n, n + 1)]).result(PATIENCE_S)
    assert collect(store, FOLDER, lambda parts: all(one.end_offset <= 3 for one in parts)) == 3
    assert numbers(store) == [3, 4]
    ClosedChain(store, FOLDER)
    assert collect(store, FOLDER, lambda _: True) == 2  # nobody writes it any more
    assert numbers(store) == [1, 2, 5]  # fences
    assert found(store) == []


def test_what_remains_of_a_chain_is_told(store, writer):
    writer.send([part(0, 1)]).result(PATIENCE_S)
    writer.send([part(1, 2)]).result(PATIENCE_S)
    assert [one.is_newest for one in remaining(store, "a/1")] == [False, True]
    ClosedChain(store, FOLDER)
    assert list(chains_of(store)) == list(chains_of(store, "a")) == ["a/1"]
    assert list(chains_of(store, "b")) == []
    rows = [(one.is_fence, one.is_newest, len(one.parts)) for one in remaining(store, "a/1")]
    assert rows == [(False, False, 1), (False, False, 1), (True, False, 0)]


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_nothing_that_was_acknowledged_is_missing_whoever_closes_it_when(tmp_path, kind):
    seed = random.randrange(10**6)
    print("seed", seed)
    for round_number in range(30):
        dice = random.Random(seed + round_number)
        inner = MemoryStore() if kind == "memory" else FolderStore(tmp_path / str(round_number))
        _close_while_it_is_written(FaultyObjectStore(inner), dice)


def _is_covered(end_offset, parts):
    return all(one.end_offset <= end_offset for one in parts)


def _close_while_it_is_written(store, dice):
    faults = [(call, FailsBefore()) for call in ("put", "list", "get_range")]
    for call, fault in dice.choices([*faults, ("put", FailsAfter())], k=dice.randrange(6)):
        store.fail(call, fault)
    slow, late = Slow(), key(dice.randrange(8))
    is_late = dice.random() < 0.5
    if is_late:
        store.fail("put", slow, when=late.__eq__)
    writer = ChainWriter(store, FOLDER, pause=lambda _: None)
    sent: list[Future] = []
    covered = 0  # what the manifest reaches, which is acknowledged
    chains: list[ClosedChain] = []
    closers = [threading.Thread(target=lambda: chains.append(_closed(store))) for _ in range(2)]
    starts = sorted(dice.choices(range(12), k=2))
    for n in range(12):
        for closer, start in zip(closers, starts, strict=True):
            if start == n:
                closer.start()
        if not writer.has_room:
            slow.gate.set()
            until(lambda: writer.has_room)
        sent.append(writer.send([part(n, n + 1)]))
        if dice.random() < 0.3 and not is_late:
            covered = len(_acked(sent))
            with store.faultless():
                collect(store, FOLDER, partial(_is_covered, covered))
    slow.gate.set()
    for closer in closers:
        closer.join(PATIENCE_S)
    wait(sent, PATIENCE_S)
    writer.close()
    for chain in chains:
        end = covered
        for number, one in chain.parts(HERE, epoch=3, end_offset=covered):
            assert chain.read(number, one)
            end = one.end_offset
        assert end >= len(_acked(sent))
    assert len(chains) == 2


def _closed(store):
    while True:
        try:
            return ClosedChain(store, FOLDER)
        except (StoreUnavailable, MissingObject):
            pass


def _acked(sent):
    """They are the first ones."""
    return [one for one in sent if one.done() and one.exception() is None]
