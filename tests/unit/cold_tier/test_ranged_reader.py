import itertools
import threading

import pytest

from tests.fakes.faulty_object_store import (
    FailsBefore,
    ShortRead,
    SilentShortRead,
    Slow,
    WrongBytes,
    WrongRange,
)
from tierlog.cold_tier.ranged_reader import ChunkRef, Hedging, RangedReader, read_chunk
from tierlog.host.retry import RetryPolicy
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptObject,
    DiskFull,
    MissingObject,
    StoreUnavailable,
)

KEY = f"topics/t/id/0/segments/{0:020d}-1-abc.log"
BODY = bytes(range(256)) * 3000
QUICK = RetryPolicy(attempts=3, sleep=lambda _: None)


def ref(start=1000, end=700_000, body=BODY):
    return ChunkRef(KEY, ("u", 0), start, end - start, crc32c_of(body[start:end]))


@pytest.fixture
def store(store):
    store.put(KEY, BODY)
    store.read_policy = QUICK
    return store


@pytest.fixture
def fetch(store, tmp_path):
    """Fetches a chunk into a new file in `tmp_path`."""
    names = itertools.count()
    reader = RangedReader(store, requests_max=4)
    yield lambda chunk: reader.fetch_chunk(chunk, lambda: tmp_path / f"temp-{next(names)}")
    reader.close()


def gets(store):
    return sum(call == "get_range" for call, _ in store.calls)


def test_a_chunk_is_fetched_by_one_request(store, fetch):
    assert fetch(ref()).read_bytes() == BODY[1000:700_000]
    assert gets(store) == 1


@pytest.mark.parametrize(
    "fault",
    [
        FailsBefore(),
        ShortRead(0),
        ShortRead(300_000),
        SilentShortRead(300_000),
        WrongBytes(5),
        WrongRange(1),
    ],
)
def test_a_failed_fetch_is_retried_and_leaves_no_file(store, fetch, tmp_path, fault):
    store.fail("get_range", fault)
    path = fetch(ref())
    assert path.read_bytes() == BODY[1000:700_000]
    assert list(tmp_path.iterdir()) == [path]
    assert gets(store) == 2


def test_short_responses_are_not_corruption(store, fetch):
    store.fail("get_range", SilentShortRead(300_000), times=2)
    assert fetch(ref()).read_bytes() == BODY[1000:700_000]


def test_wrong_bytes_are_fetched_once_more_and_then_reported(store, fetch, tmp_path):
    bad = bytearray(BODY)
    bad[5000] ^= 1
    store.put(KEY, bytes(bad))
    with pytest.raises(CorruptObject) as corrupt:
        fetch(ref())
    assert (corrupt.value.file, corrupt.value.position) == (KEY, 1000)
    assert gets(store) == 2
    assert list(tmp_path.iterdir()) == []
    assert fetch(ref(10_000, 20_000)).read_bytes() == BODY[10_000:20_000]


def test_a_missing_object_is_reported_without_retry(store, fetch, tmp_path):
    store.delete([KEY])
    with pytest.raises(MissingObject) as missing:
        fetch(ref())
    assert missing.value.file == KEY
    assert gets(store) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_object_is_reported(store, fetch):
    store.put(KEY, BODY[:2000])
    with pytest.raises(CorruptObject):
        fetch(ref())


def test_attempts_are_limited_while_the_store_is_down(store, fetch):
    store.fail("get_range", FailsBefore(), times=100)
    with pytest.raises(StoreUnavailable):
        fetch(ref())
    assert gets(store) == 3


def test_a_configuration_error_is_not_retried(store, fetch):
    store.fail("get_range", FailsBefore(lambda key: ConfigurationError("no permission")))
    with pytest.raises(ConfigurationError):
        fetch(ref())
    assert gets(store) == 1


def test_a_file_that_cannot_be_created_is_reported_as_a_full_disk(store, fetch, tmp_path):
    reader = RangedReader(store, requests_max=1)
    with pytest.raises(DiskFull):
        reader.fetch_chunk(ref(), lambda: tmp_path / "no" / "such" / "folder")
    reader.close()


def test_the_deadline_covers_all_attempts(store, tmp_path):
    now = [0.0]
    store.read_policy = RetryPolicy(
        attempts=100,
        deadline_s=10,
        monotonic=lambda: now[0],
        sleep=lambda s: now.__setitem__(0, now[0] + s),
        jitter=lambda: 1.0,
    )
    store.fail("get_range", FailsBefore(), times=1000)
    reader = RangedReader(store, requests_max=1)
    with pytest.raises(StoreUnavailable):
        reader.fetch_chunk(ref(), lambda: tmp_path / "t")
    reader.close()
    assert now[0] < 10


def test_a_response_slower_than_the_deadline_is_abandoned(store, tmp_path):
    ticks = itertools.count(step=20)
    store.read_policy = RetryPolicy(attempts=1, deadline_s=30, monotonic=lambda: next(ticks))
    reader = RangedReader(store, requests_max=1)
    with pytest.raises(StoreUnavailable, match="too slow"):
        reader.fetch_chunk(ref(), lambda: tmp_path / "t")
    reader.close()
    assert list(tmp_path.iterdir()) == []


class QuickToHedge(Hedging):
    def delay_s(self):
        return 0.01


def test_a_late_response_is_hedged_and_the_loser_leaves_no_file(store, tmp_path):
    slow = Slow()
    store.fail("get_range", slow)
    names, hedging = itertools.count(), QuickToHedge()
    reader = RangedReader(store, requests_max=2, hedging=hedging)
    path = reader.fetch_chunk(ref(), lambda: tmp_path / f"{next(names)}")
    assert path.read_bytes() == BODY[1000:700_000]
    slow.gate.set()
    reader.close()  # waits for the loser
    assert list(tmp_path.iterdir()) == [path]
    assert hedging.spent == 1


def test_if_the_hedge_fails_the_first_request_counts(store, tmp_path):
    slow, names = Slow(), itertools.count()

    def fails(key):
        slow.gate.set()
        return StoreUnavailable(key)

    store.fail("get_range", slow)
    store.fail("get_range", FailsBefore(fails))
    reader = RangedReader(store, requests_max=2, hedging=QuickToHedge())
    path = reader.fetch_chunk(ref(), lambda: tmp_path / f"{next(names)}")
    reader.close()
    assert path.read_bytes() == BODY[1000:700_000]
    assert gets(store) == 2


def test_of_two_requests_that_both_succeed_one_leaves_no_file(store, tmp_path, monkeypatch):
    names, gate, gets = itertools.count(), threading.Event(), []
    reader = RangedReader(store, requests_max=2, hedging=QuickToHedge())
    submit = reader._requests.submit

    def both_succeed(get):
        gets.append(submit(get if gets else lambda: gate.wait(30) and get()))
        if len(gets) == 2:
            gets[1].result(30)
            gate.set()
            gets[0].result(30)
        return gets[-1]

    monkeypatch.setattr(reader._requests, "submit", both_succeed)
    path = reader.fetch_chunk(ref(), lambda: tmp_path / f"{next(names)}")
    reader.close()
    assert len({get.result() for get in gets}) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_hedges_are_limited_by_a_budget():
    hedging = Hedging()
    assert hedging.delay_s() is None
    for _ in range(100):
        hedging.record(0.1)
    assert hedging.delay_s() == pytest.approx(0.175)
    for _ in range(1000):
        hedging.refill()
    assert [hedging.maybe_spend() for _ in range(3)] == [True, True, False]
    for _ in range(21):
        hedging.refill()
    assert [hedging.maybe_spend() for _ in range(2)] == [True, False]


def test_read_chunk_verifies_its_bytes(store):
    assert read_chunk(store, ref()) == BODY[1000:700_000]
    store.fail("get_range", WrongBytes(3))
    assert read_chunk(store, ref()) == BODY[1000:700_000]
    store.fail("get_range", WrongBytes(3), times=2)
    with pytest.raises(CorruptObject):
        read_chunk(store, ref())


def test_the_loser_of_a_hedge_stops_at_its_next_piece(store, tmp_path):
    begun, won = threading.Event(), threading.Event()
    taken = []

    class SlowAfterItsFirstPiece:
        """The first GET gives one piece and then waits until the other has won."""

        read_policy = QUICK

        def get_range(self, key, start, end, *, into=None):
            pieces = store.get_range(key, start, end, into=into)
            if begun.is_set():
                yield from pieces
                return
            begun.set()
            for piece in pieces:
                taken.append(piece)
                yield piece
                assert won.wait(30)

    names = itertools.count()
    reader = RangedReader(SlowAfterItsFirstPiece(), requests_max=2, hedging=QuickToHedge())
    path = reader.fetch_chunk(ref(), lambda: tmp_path / f"{next(names)}")
    won.set()
    reader.close()
    assert path.read_bytes() == BODY[1000:700_000]
    assert len(taken) <= 2
    assert list(tmp_path.iterdir()) == [path]
