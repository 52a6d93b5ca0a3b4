"""The coordinator of share partitions, whatever members, the log, the clock and restarts do: no
record is lost, none is two members' at a time, and none is given that somebody was done with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierlog.broker.group_coordinator.share_group import ShareLimits
from tierlog.broker.share_coordinator.coordinator import ShareCoordinator, ShareSummary
from tierlog.broker.share_coordinator.share_partition import AckBatch, Span, Wanted
from tierlog.broker.share_coordinator.share_partitions import SharePartitions
from tierlog.record_format.errors import GroupRefused, StoreUnavailable, Throttled
from tierlog.record_format.share_state import (
    ShareKey,
    ShareState,
    StateBatch,
    StateCall,
    StateView,
    merge_batches,
)

KEY = ShareKey("g", b"t" * 16, 0)
LIMITS = ShareLimits(lock_ms=10, count_limit=5, locks_max=100)
COUNT, BATCH = 60, 5
ACCEPT, RELEASE, REJECT = 1, 2, 3
Log = list[tuple[bytes, bytes | None]]


class Broker:
    """The share partitions of a broker, which keeps their state too, and its log. `fails`: nothing
    can be written.
    """

    def __init__(self, log: Log, now_ms: int = 0) -> None:
        self.log, self.now_ms, self.fails = log, now_ms, False
        self.due: list[tuple[int, Callable[[], None]]] = []
        self.states = ShareCoordinator(self._append, partitions_max=3, wall_ms=lambda: self.now_ms)
        self.shares = SharePartitions(
            self.states.carry_out,
            limits_of=lambda _: LIMITS,
            updates_per_snapshot=3,
            call_after=lambda delay_ms, call: self.due.append((self.now_ms + delay_ms, call)),
            now_ms=lambda: self.now_ms,
        )
        view = StateView()
        for offset, row in enumerate(log):
            view.apply(*row, offset)
        self.states.load(view)
        if not log:
            self.initialize(KEY, 0)
        self.open()

    def initialize(self, key: ShareKey, start: int, *, epoch: int = 1) -> Future[ShareState]:
        what = "initialize"
        call = StateCall(what=what, key=key, state_epoch=epoch, start_offset=start)
        return self.states.carry_out(call)

    def open(self, leader_epoch: int = -1) -> None:
        turn, state = self.shares.begin_open(KEY, leader_epoch)
        self.shares.open(KEY, state.result(), turn, leader_epoch=leader_epoch)
        assert self.shares.is_open(KEY)

    def summary(self) -> ShareSummary:
        (found,) = self.states.summaries()
        return found

    def _append(self, _: str, rows: Log) -> Future[Any]:
        if self.fails:
            raise StoreUnavailable("no")
        future: Future[Any] = Future()
        future.set_result(SimpleNamespace(base_offset=len(self.log)))
        self.log += rows
        return future

    def acquire(self, member: str, count: int, *, is_strict: bool) -> list[int]:
        offset = self.shares.begin_read(KEY, self)
        if offset is None or offset >= COUNT:
            self.shares.end_read(KEY, self)
            return []
        first = offset - offset % BATCH
        spans = [Span(one, one + BATCH - 1) for one in range(first, COUNT, BATCH)]
        wanted = Wanted(member, count, 500, is_strict=is_strict)
        found = self.shares.acquire(KEY, wanted, spans, fetch_offset=offset, reader=self)
        self.shares.end_read(KEY, self)
        return [offset for one in found for offset in range(one.first, one.last + 1)]

    def acknowledge(self, member: str, offsets: list[int], kind: int) -> bool:
        said: list[BaseException | None] = []
        acks = [AckBatch(one, one, [kind]) for one in offsets]
        self.shares.acknowledge(KEY, member, acks, said.append)
        return said == [None]

    def advance(self) -> None:
        self.now_ms += LIMITS.lock_ms
        due, self.due = self.due, []
        for at_ms, call in due:
            if at_ms <= self.now_ms:
                call()
            else:
                self.due.append((at_ms, call))


STEPS = st.one_of(
    st.tuples(
        st.just("acquire"), st.sampled_from("ab"), st.integers(1, 12), st.booleans(), st.just(0)
    ),
    st.tuples(
        st.just("acknowledge"),
        st.sampled_from("ab"),
        st.integers(0, 8),
        st.booleans(),
        st.sampled_from([ACCEPT, ACCEPT, RELEASE, REJECT]),
    ),
    st.tuples(
        st.sampled_from(["release", "expire", "fail", "restart", "snapshot"]),
        st.sampled_from("ab"),
        st.just(0),
        st.just(False),
        st.just(0),
    ),
)


class Checked:
    """A broker, and what has to be true of it."""

    def __init__(self) -> None:
        self.broker = Broker([])
        self.held: dict[str, list[int]] = {"a": [], "b": []}
        self.done: set[int] = set()
        self.deliveries: Counter[int] = Counter()
        self.since_restart: Counter[int] = Counter()

    def acquire(self, member: str, number: int, is_odd: bool, _: int) -> None:
        offsets = self.broker.acquire(member, number, is_strict=is_odd)
        assert len(set(offsets)) == len(offsets)
        assert not self.done.intersection(offsets)
        assert not set(offsets).intersection(self.held["a"] + self.held["b"])
        self.held[member] += offsets
        self.deliveries.update(offsets)
        self.since_restart.update(offsets)
        assert max(self.since_restart.values(), default=0) <= LIMITS.count_limit

    def acknowledge(self, member: str, number: int, is_odd: bool, kind: int) -> None:
        said = sorted(self.held[member])[number : number + 4]
        said = said[::2] if is_odd else said
        if said and self.broker.acknowledge(member, said, kind):
            self.held[member] = [one for one in self.held[member] if one not in said]
            self.done.update(said if kind != RELEASE else ())

    def release(self, member: str, *_: object) -> None:
        self.broker.shares.release(KEY, member, lambda _: None)
        if not self.broker.fails:
            self.held[member] = []

    def expire(self, *_: object) -> None:
        self.broker.advance()
        self.held = {"a": [], "b": []}

    def fail(self, *_: object) -> None:
        self.broker.fails = not self.broker.fails

    def snapshot(self, *_: object) -> None:
        self.broker.states.snapshot_older(than_ms=0)

    def restart(self, *_: object) -> None:
        """Deliveries that were only locked, or could not be written, are not remembered."""
        self.broker = Broker(self.broker.log, self.broker.now_ms)
        self.held = {"a": [], "b": []}
        self.since_restart = Counter()

    def drain(self) -> None:
        """One last member is done with all that there is."""
        self.broker.fails = False
        self.broker.advance()
        while found := self.broker.acquire("c", COUNT, is_strict=False):
            assert not self.done.intersection(found)
            assert self.broker.acknowledge("c", found, ACCEPT)
            self.done.update(found)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_each_record_is_somebodys_until_somebody_is_done_with_it(
    steps: list[tuple[str, str, int, bool, int]],
) -> None:
    checked = Checked()
    for what, *given_ in steps:
        getattr(checked, what)(*given_)
    checked.drain()
    lost = set(range(COUNT)) - checked.done
    assert all(checked.deliveries[one] >= LIMITS.count_limit for one in lost)


def test_a_state_is_the_same_by_its_updates_and_by_a_snapshot() -> None:
    broker = Broker([])
    broker.acquire("a", 30, is_strict=False)
    broker.acknowledge("a", [7, 8, 9, 20], ACCEPT)
    broker.acknowledge("a", [3, 4], RELEASE)
    by_updates = Broker(list(broker.log)).summary()
    broker.states.snapshot_older(than_ms=0)
    view = StateView()
    view.apply(*broker.log[-1], 0)
    assert view.states[KEY].batches == (
        (3, 4, 0, 1),
        (7, 9, 2, 1),
        (20, 20, 2, 1),
    )
    assert Broker([broker.log[-1]]).summary() == by_updates


def test_what_could_not_be_written_is_written_with_the_next() -> None:
    broker = Broker([])
    broker.acquire("a", 10, is_strict=False)
    broker.fails = True
    broker.advance()
    broker.fails = False
    broker.acquire("b", 5, is_strict=True)
    broker.acknowledge("b", [0, 1, 2, 3, 4], ACCEPT)
    view = StateView()
    for offset, row in enumerate(broker.log):
        view.apply(*row, offset)
    assert view.states[KEY].batches[-1] == (5, 9, 0, 1)


def test_share_groups_read_no_more_partitions_than_the_limit() -> None:
    broker = Broker([])
    keys = [KEY._replace(partition=number) for number in range(1, 4)]
    first, second, third = (broker.initialize(one, 0) for one in keys)
    assert first.result().start_offset == second.result().start_offset == 0
    assert isinstance(third.exception(), Throttled)
    assert broker.initialize(KEY, 5).exception() is None  # it has one


def test_what_lies_below_the_oldest_snapshot_is_not_needed() -> None:
    broker = Broker([])
    other = KEY._replace(partition=1)
    broker.initialize(other, 0)
    for offset in range(8):
        broker.acquire("a", 1, is_strict=True)
        broker.acknowledge("a", [offset], ACCEPT)
    assert broker.states.oldest_needed(lambda _: True) == 1  # the other's only snapshot
    broker.states.carry_out(StateCall(what="delete", key=other))
    oldest = broker.states.oldest_needed(lambda _: True)
    assert oldest is not None
    restarted = Broker(broker.log[oldest:])
    assert restarted.summary() == broker.summary()


def test_a_group_that_begins_anew_has_no_records_of_before() -> None:
    broker = Broker([])
    had = broker.acquire("a", 10, is_strict=False)
    broker.initialize(KEY, 5, epoch=2)
    assert not broker.acknowledge("a", had, ACCEPT)  # which closes it
    broker.open()
    assert broker.acquire("a", 10, is_strict=True) == list(range(5, 15))
    state = ShareState(5, state_epoch=2, snapshot_epoch=1)
    view = StateView()
    for offset, row in enumerate(broker.log):
        view.apply(*row, offset)
    assert view.states[KEY]._replace(snapshot_ms=0, complete_count=-1) == state


def test_a_leader_that_another_replaced_may_not_write() -> None:
    """Nor may what it was told be acknowledged: the other gives it again."""
    old = Broker([])
    old.shares.close_where(lambda _: True)
    old.open(leader_epoch=3)
    had = old.acquire("a", 10, is_strict=True)
    new = old.states.carry_out(StateCall(what="read", key=KEY, leader_epoch=4))
    assert new.result().leader_epoch == 4
    assert not old.acknowledge("a", had, ACCEPT)
    assert not old.shares.is_open(KEY)
    stale = old.states.carry_out(StateCall(what="read", key=KEY, leader_epoch=3))
    with pytest.raises(GroupRefused, match="its leader epoch is 4"):
        stale.result()


def test_a_write_that_comes_late_counts_no_more() -> None:
    states = Broker([]).states

    def write(number: int, kind: int) -> Future[ShareState]:
        batches = [StateBatch(0, 4, kind, 1)]
        call = StateCall(what="write", key=KEY, state_epoch=1, start_offset=0, complete_count=0)
        return states.carry_out(msgspec.structs.replace(call, number=number, batches=batches))

    assert write(2, 2).exception() is None
    assert write(2, 2).exception() is None  # repeated
    with pytest.raises(GroupRefused, match="a later write"):
        write(1, 0).result()
    read = states.carry_out(StateCall(what="read", key=KEY)).result()
    assert read.batches == (StateBatch(0, 4, 2, 1),)


def test_a_state_that_was_read_before_others_wrote_opens_nothing() -> None:
    """A member would be given what is done with."""
    broker = Broker([])
    broker.shares.close_where(lambda _: True)
    early, state = broker.shares.begin_open(KEY, -1)
    broker.open()
    broker.acknowledge("a", broker.acquire("a", 10, is_strict=True), ACCEPT)
    broker.shares.close_where(lambda _: True)
    broker.shares.open(KEY, state.result(), early, leader_epoch=-1)
    assert not broker.shares.is_open(KEY)
    broker.open()
    assert broker.acquire("b", 5, is_strict=True) == [10, 11, 12, 13, 14]


SPANS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.sampled_from([0, 2, 4])), max_size=8
)


@given(SPANS, SPANS, st.integers(0, 30))
def test_batches_are_merged_offset_by_offset(
    old: list[tuple[int, int, int]], new: list[tuple[int, int, int]], start: int
) -> None:
    def batches(spans: list[tuple[int, int, int]]) -> list[StateBatch]:
        found, end = [], 0
        for gap, more, state in spans:
            found.append(StateBatch(end + gap, end + gap + more, state, 1))
            end += gap + more + 1
        return found

    def by_offset(found: Iterable[StateBatch]) -> dict[int, StateBatch]:
        return {
            offset: one._replace(first=offset, last=offset)
            for one in found
            for offset in range(one.first, one.last + 1)
            if offset >= start
        }

    merged = merge_batches(batches(old), batches(new), start=start)
    assert by_offset(merged) == by_offset(batches(old)) | by_offset(batches(new))
    assert list(merged) == sorted(merged)
