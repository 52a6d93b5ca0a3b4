"""Sessions between followers' brokers and leaders': what fetches name, and what it counts for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fakes.clock import Clock
from tests.fakes.partition_logs import append_values
from tests.fakes.replicas import begin_to_lead
from tierlog.broker.replicas.fetch_answers import FetchAnswers
from tierlog.broker.replicas.fetch_sessions import LOOK_PACE_MS, Said, TakenFetch
from tierlog.broker.replication.election import Kept
from tierlog.broker.replication.in_sync import InForce
from tierlog.broker.replication.messages import (
    NO_SESSION,
    Answered,
    Fetched,
    FetchedRows,
    PartitionFetch,
    ReplicaFetch,
)
from tierlog.broker.replication.term import Term
from tierlog.host.file_slice import close_all
from tierlog.hot_tier.log import PartitionLog

LAG_MS, NODE_ID, EPOCH = 1_000, 1, 1
TOPIC_ID, MAX_BYTES = "t", 1 << 20


class Led:
    """One partition, as its leader has it: of a set of two."""

    def __init__(self, log: PartitionLog, clock: Clock) -> None:
        self.log = begin_to_lead(log, epoch=EPOCH)
        members = frozenset({"a.0", "b.0"})
        self.set = InForce(4, EPOCH, "a.0", frozenset({0, NODE_ID}), members)
        self.term: Term | None = Term(
            log, self.set, lag_ms=LAG_MS, min_in_sync=lambda: 1, monotonic=clock
        )
        self.term.begin()
        self.partition: Any = self
        self.kept = Kept("a.0", seen=EPOCH)

    @property
    def first_local_offset(self) -> int:
        return self.log.first_local_offset

    @property
    def log_end_offset(self) -> int:
        return self.log.log_end_offset

    def epochs_without_gap(self) -> Any:
        return self.log.epochs

    def append(self, *values: bytes) -> None:
        append_values(self.log, *values)
        self.log.writer.flush()

    @property
    def acknowledged(self) -> int:
        assert self.term is not None
        return self.term.lead.progress_of("b.0").flushed_end


class Follower:
    """What one broker's replicas say of themselves, number by number."""

    def __init__(self, number: int) -> None:
        self.place, self.node_id, self.heard = (TOPIC_ID, number), 0, 0
        self.state = {"replica_id": "b.0", "start": 0, "end": 0, "answered": 0, "epoch": EPOCH}

    def next_fetch(self, node_id: int) -> PartitionFetch | None:
        if node_id != self.node_id:
            return None
        now = dict[str, Any](self.state)
        return PartitionFetch(
            topic_id=TOPIC_ID,
            partition=self.place[1],
            replica_id=now["replica_id"],
            leader_epoch=now["epoch"],
            seen=now["epoch"],
            last_epoch=EPOCH if now["end"] else -1,
            end_offset=now["end"],
            flushed_end=now["end"],
            log_start_offset=now["start"],
            answered=now["answered"],
            high_watermark=0,
        )

    def note_heard(self) -> None:
        self.heard += 1


class Pair:
    """A leader of three partitions, and a broker that follows them."""

    def __init__(self, led: list[Led], clock: Clock) -> None:
        self.led, self.clock = led, clock
        replicas: Any = {(TOPIC_ID, number): one for number, one in enumerate(led)}
        self.answers = FetchAnswers(replicas, monotonic=clock)
        self.followers = [Follower(number) for number in range(len(led))]
        self.said = Said()

    def ask(self) -> ReplicaFetch:
        request = self.said.next_fetch(
            lambda: self.followers,  # type: ignore[arg-type, return-value]
            me=NODE_ID,
            leader=0,
            now_ms=self.clock.now_ms,
            wait_ms=500,
            max_bytes=MAX_BYTES,
        )
        assert request is not None
        return request

    def take(self, request: ReplicaFetch) -> TakenFetch | None:
        return self.answers.take_fetch(request)

    def exchange(self, *, is_over: bool = True) -> tuple[ReplicaFetch, list[Answered]]:
        request = self.ask()
        taken = self.take(request)
        rows = [] if taken is None else taken.answer(is_over=is_over)
        session_id = NO_SESSION if taken is None else taken.session_id
        received = [Fetched(one.answer, memoryview(b"")) for one in rows]
        for one in rows:
            close_all(one.slices)
        self.said.note_answer(request, FetchedRows(session_id, received))
        for answer, _ in received:
            follower = self.followers[answer.partition]
            follower.state |= {"answered": answer.number, "start": answer.log_start_offset}
            if answer.size_bytes:
                follower.state["end"] = self.led[answer.partition].log.log_end_offset
        return request, rows


@pytest.fixture
def pair(open_log: Callable[..., PartitionLog], tmp_path: Path, clock: Clock) -> Pair:
    return Pair([Led(open_log(tmp_path / f"t-{number}"), clock) for number in range(3)], clock)


def named(request: ReplicaFetch) -> list[int]:
    return [one.partition for one in request.partitions]


def test_after_the_first_fetch_only_what_has_changed_is_named_and_answered(pair: Pair) -> None:
    first, rows = pair.exchange()
    assert (named(first), rows) == ([0, 1, 2], [])
    at_rest, rows = pair.exchange()
    assert (named(at_rest), at_rest.forgotten, rows) == ([], [], [])
    pair.led[1].append(b"x")
    request, rows = pair.exchange(is_over=False)
    assert (named(request), [one.answer.partition for one in rows]) == ([], [1])
    request, rows = pair.exchange()
    assert (named(request), pair.led[1].acknowledged) == ([1], 1)
    assert [one.answer.high_watermark for one in rows] == [1]


def test_what_is_not_named_acknowledges_nothing_and_confirms_nothing(pair: Pair) -> None:
    pair.exchange()
    led = pair.led[0]
    assert led.term is not None
    led.append(b"x")
    confirmed = led.term.confirm()
    request, rows = pair.exchange(is_over=False)
    pair.followers[0].state |= {"end": 0, "answered": 0}  # it could not take it in
    again, rows_again = pair.exchange(is_over=False)
    assert (named(request), named(again)) == ([], [])
    assert len(rows) == len(rows_again) == 1, "it is told until it has it"
    assert (led.acknowledged, led.log.high_watermark, confirmed.done()) == (0, 0, False)


def test_who_is_not_named_is_heard_and_does_not_lag_while_the_session_goes_on(
    pair: Pair, clock: Clock
) -> None:
    pair.exchange()
    terms = [one.term for one in pair.led if one.term is not None]
    for _ in range(4):
        clock.now_ms += LAG_MS // 2
        assert named(pair.exchange()[0]) == []
        assert not any(one.lagging() or one.unheard(for_ms=LAG_MS) for one in terms)
    assert all(one.heard for one in pair.followers)
    clock.now_ms += LAG_MS + 1
    assert all(one.lagging() and one.unheard(for_ms=LAG_MS) for one in terms)


@pytest.mark.parametrize("number", [-1, 1])
def test_of_a_fetch_that_is_not_the_next_nothing_counts(pair: Pair, number: int) -> None:
    pair.exchange()
    pair.exchange()
    request = pair.ask()
    pair.led[0].append(b"x")
    row = pair.followers[0].next_fetch(0)
    assert row is not None
    further = replace(row, end_offset=1, flushed_end=1)
    late = replace(request, number=request.number + number, partitions=[further])
    assert pair.take(late) is None
    assert pair.led[0].acknowledged == 0
    assert pair.take(request) is not None, "it is still the next"
    assert pair.take(request) is None, "and comes once"


def test_a_lost_answer_an_old_session_or_another_leader_ends_it_and_all_is_named_again(
    pair: Pair,
) -> None:
    pair.exchange()
    lost = pair.ask()
    assert pair.take(lost) is not None
    after, _ = pair.exchange()
    assert (after.session_id, after.number, named(after)) == (NO_SESSION, 0, [0, 1, 2])
    assert pair.exchange()[0].session_id not in (NO_SESSION, lost.session_id)
    pair.take(replace(lost, session_id=NO_SESSION, number=0))
    unknown, rows = pair.exchange()  # a late one, of before, has begun a session of its own
    assert (unknown.session_id != NO_SESSION, rows) == (True, [])
    assert named(pair.exchange()[0]) == [0, 1, 2]


@pytest.mark.parametrize("change", [PartitionLog.trim, PartitionLog.delete_local])
def test_a_start_of_the_log_is_told_again_if_the_answer_was_lost(
    pair: Pair, change: Callable[[PartitionLog, int], object]
) -> None:
    led = pair.led[0]
    led.append(b"x")
    for _ in range(3):
        pair.exchange()
    assert led.log.roll()
    change(led.log, 1)
    starts = [(led.log.log_start_offset, led.log.first_local_offset)]
    assert starts != [(0, 0)]

    def told(rows: list[Answered]) -> list[tuple[int, int]]:
        return [(one.answer.log_start_offset, one.answer.local_log_start_offset) for one in rows]

    lost = pair.take(pair.ask())
    assert lost is not None
    assert told(lost.answer(is_over=False)) == starts
    assert told(pair.exchange(is_over=False)[1]) == starts
    later = [pair.exchange(is_over=False)[1] for _ in range(2)]
    assert later == [[], []], "once, if it arrives"


def test_what_cannot_be_read_fails_for_its_partition_alone(pair: Pair) -> None:
    pair.exchange()
    led, other = pair.led[0], pair.led[1]
    led.append(b"x")
    file = led.log.folder / "00000000000000000000.log"
    whole = file.read_bytes()
    file.write_bytes(bytes(len(whole)))
    other.append(b"y")
    _, rows = pair.exchange()
    assert [one.answer.partition for one in rows if one.answer.size_bytes] == [1]
    pair.exchange()
    assert (led.acknowledged, other.acknowledged) == (0, 1)
    waiting = pair.take(pair.ask())
    assert waiting is not None
    assert waiting.answer(is_over=False) == []
    waiting.wait_for_news(lambda: pytest.fail("nothing can be read yet"))
    file.write_bytes(whole)
    rows = waiting.answer(is_over=True)
    assert [one.answer.partition for one in rows if one.answer.size_bytes] == [0]
    for one in rows:
        close_all(one.slices)


def test_a_poll_whose_session_was_replaced_answers_nothing(pair: Pair) -> None:
    waiting = pair.take(pair.ask())
    assert waiting is not None
    pair.exchange()
    pair.led[0].append(b"x")
    assert waiting.answer(is_over=True) == []


def test_who_stops_following_is_forgotten_and_not_heard_any_more(pair: Pair, clock: Clock) -> None:
    pair.exchange()
    pair.followers[1].node_id = 7
    request, _ = pair.exchange()
    assert request.forgotten == [(TOPIC_ID, 1)]
    clock.now_ms += LAG_MS + 1
    pair.exchange()
    terms = [one.term for one in pair.led if one.term is not None]
    assert [bool(one.unheard(for_ms=LAG_MS)) for one in terms] == [False, True, False]
    pair.followers[1].node_id = 0
    assert named(pair.exchange()[0]) == [1]


def test_what_is_refused_is_named_again(pair: Pair) -> None:
    pair.exchange()
    led, term = pair.led[2], pair.led[2].term
    assert term is not None
    led.term = None
    term.end()
    request, rows = pair.exchange(is_over=False)
    assert named(request) == []
    assert [(one.answer.partition, one.answer.error) for one in rows] == [(2, "not-leader")]
    assert [named(pair.exchange()[0]) for _ in range(2)] == [[2], [2]]


def test_who_was_removed_meanwhile_is_asked_anew_who_it_is(pair: Pair) -> None:
    pair.exchange()
    led = pair.led[0]
    assert led.term is not None
    for version, replicas in ((5, {0}), (6, {0, NODE_ID})):  # removed, and added again
        after = led.set._replace(
            version=version, replicas=frozenset(replicas), in_sync=frozenset({"a.0"})
        )
        led.term.send_change(after)
        assert led.term.settle_change(after)
    _, rows = pair.exchange()
    assert [(one.answer.partition, one.answer.error) for one in rows] == [(0, "unknown-partition")]
    assert led.term.outsiders() == frozenset(), "it may have given up its log (H9)"
    pair.followers[0].state["replica_id"] = "b.1"
    assert named(pair.exchange()[0]) == [0]
    assert led.term.outsiders() == {"b.1"}


def test_all_that_have_records_take_turns_and_an_answer_is_no_larger_than_asked(
    pair: Pair,
) -> None:
    pair.exchange()
    for led in pair.led:
        for _ in range(3):
            led.append(bytes(MAX_BYTES // 3))
    seen = list[int]()
    for _ in range(3):
        request = pair.ask()
        taken = pair.take(request)
        assert taken is not None
        rows = taken.answer(is_over=False)
        sizes = [one.answer.size_bytes for one in rows]
        assert sum(sizes[:-1]) < MAX_BYTES
        seen += [one.answer.partition for one in rows if one.answer.size_bytes]
        for one in rows:
            close_all(one.slices)
        fetched = [Fetched(one.answer, memoryview(b"")) for one in rows]
        pair.said.note_answer(request, FetchedRows(taken.session_id, fetched))
    assert set(seen) == {0, 1, 2}


def test_a_fetch_that_waits_is_called_when_there_is_news_of_any_of_its_partitions(
    pair: Pair,
) -> None:
    pair.exchange()
    taken, told = pair.take(pair.ask()), list[str]()
    assert taken is not None
    assert taken.answer(is_over=False) == []
    cancel = taken.wait_for_news(lambda: told.append("one"))
    assert told == []
    pair.led[2].append(b"x")
    assert told == ["one"]
    cancel()
    taken.wait_for_news(lambda: told.append("at once"))
    assert told[1:] == ["at once"]


def test_while_some_have_records_the_others_are_looked_at_now_and_then(
    pair: Pair, clock: Clock
) -> None:
    pair.exchange()
    pair.led[0].append(b"x")
    pair.exchange(is_over=False)
    pair.followers[1].node_id = 7
    pair.led[0].append(b"y")
    soon, _ = pair.exchange(is_over=False)
    assert (named(soon), soon.forgotten) == ([0], [])
    clock.now_ms += LOOK_PACE_MS
    later, _ = pair.exchange()
    assert (named(later), later.forgotten) == ([0], [(TOPIC_ID, 1)])
