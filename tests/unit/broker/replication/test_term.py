"""A term of leadership: what followers say, and what follows from it, on a log of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.clock import Clock
from tests.fakes.partition_logs import append_values
from tests.fakes.replicas import begin_to_lead
from tierlog.broker.replication.in_sync import Fetch, InForce
from tierlog.broker.replication.term import CONFIRM_MAX_MS, Term
from tierlog.hot_tier.log import PartitionLog
from tierlog.record_format.errors import LeaderUnknown, NotEnoughReplicas

LAG_MS = 1_000
NODES = {"b.0": 1, "c.0": 2}


class Leader:
    def __init__(self, log: PartitionLog, clock: Clock) -> None:
        self.log = begin_to_lead(log)
        self.set = InForce(4, 1, "a.0", frozenset({0, 1, 2}), frozenset({"a.0", *NODES}))
        self.term = Term(self.log, self.set, lag_ms=LAG_MS, min_in_sync=lambda: 2, monotonic=clock)
        self.term.begin()

    def append(self, *values: bytes) -> None:
        append_values(self.log, *values)
        self.log.writer.flush()

    def hear(self, replica: str, end: int, *, epoch: int = 1, **given: int) -> int:
        said = {"seen": 1, "last_epoch": 1, "log_start_offset": 0, **given}
        return self.term.note_fetch(
            Fetch(replica, NODES[replica], epoch, end_offset=end, flushed_end=end, **said),
            diverges=False,
        )

    def change(self) -> InForce | None:
        after = self.term.next_change(self.term.lagging())
        if after is not None:
            self.term.send_change(after)
            assert self.term.settle_change(after)
        return after


@pytest.fixture
def leader(open_log: Callable[..., PartitionLog], tmp_path: Path, clock: Clock) -> Leader:
    return Leader(open_log(tmp_path / "t-0"), clock)


def test_what_every_member_has_flushed_is_committed(leader: Leader) -> None:
    leader.append(b"0", b"1", b"2")
    leader.hear("b.0", 3)
    assert leader.log.high_watermark == 0
    leader.hear("c.0", 2)
    assert leader.log.high_watermark == 2
    leader.hear("c.0", 1)  # an older fetch comes late
    assert leader.log.high_watermark == 2
    leader.hear("c.0", 3, epoch=0)  # it follows another leader
    assert leader.log.high_watermark == 2


def test_who_lags_leaves_and_is_back_once_it_has_all(leader: Leader, clock: Clock) -> None:
    leader.append(b"0")
    leader.hear("b.0", 1)
    clock.now_ms += LAG_MS + 1
    leader.hear("b.0", 1)
    after = leader.change()
    assert after is not None
    assert after.in_sync == {"a.0", "b.0"}
    assert leader.log.high_watermark == 1
    leader.hear("c.0", 0)
    assert leader.change() is None
    leader.hear("c.0", 1)
    after = leader.change()
    assert after is not None
    assert after.in_sync == {"a.0", "b.0", "c.0"}


def test_with_too_few_acks_all_is_refused_and_the_last_ones_stay(
    leader: Leader, clock: Clock
) -> None:
    leader.append(b"0")
    clock.now_ms += LAG_MS + 1
    after = leader.change()
    assert after is not None
    assert len(after.in_sync) == 2
    assert leader.change() is None
    assert leader.term.look_for_lagging()
    assert leader.term.is_short
    with pytest.raises(NotEnoughReplicas, match=r"1 replicas are in sync.* is 2"):
        leader.term.check_enough()
    leader.hear("b.0", 1)
    leader.term.look_for_lagging()
    assert not leader.term.is_short
    leader.term.check_enough()


def test_while_a_change_is_not_decided_both_sets_count(leader: Leader, clock: Clock) -> None:
    clock.now_ms += LAG_MS + 1
    leader.hear("b.0", 0)
    after = leader.term.next_change(leader.term.lagging())
    assert after is not None
    leader.term.send_change(after)
    leader.append(b"0")
    leader.hear("b.0", 1)
    assert leader.log.high_watermark == 0
    assert leader.term.settle_change(leader.set)  # its number is free: nothing is decided
    assert leader.log.high_watermark == 0
    assert leader.term.settle_change(after)
    assert leader.log.high_watermark == 1


def test_a_replica_that_saw_a_higher_epoch_has_the_leader_claim_anew(leader: Leader) -> None:
    leader.hear("b.0", 0)
    assert not leader.term.must_claim_anew
    leader.hear("b.0", 0, epoch=0, seen=7)
    assert leader.term.must_claim_anew
    assert leader.term.seen == 7


def test_another_leaders_version_ends_the_term(leader: Leader) -> None:
    assert not leader.term.settle_change(leader.set._replace(version=5, epoch=2, leader="b.0"))


def test_who_fetches_is_told_of_what_is_appended_once(leader: Leader) -> None:
    told: list[str] = []
    cancel = leader.term.wait_for_news("b.0", 0, lambda: told.append("b"))
    leader.term.wait_for_news("b.0", 0, lambda: told.append("c"))
    cancel()
    leader.append(b"0")
    leader.append(b"1")
    assert told == ["c"]
    leader.term.wait_for_news("b.0", 1, lambda: told.append("at once"))
    assert told[1:] == ["at once"]


def test_it_is_confirmed_to_lead_once_each_member_fetches_again_after_an_answer(
    leader: Leader,
) -> None:
    before = {one: leader.hear(one, 0) for one in NODES}
    told = list[str]()
    for one in NODES:
        leader.term.wait_for_news(one, 0, lambda one=one: told.append(one))
    confirmed = leader.term.confirm()
    assert told == [*NODES], "whoever waits for records is answered"
    for one in NODES:  # these fetches, or their answers, may have begun before
        leader.hear(one, 0, answered=before[one])
    assert not confirmed.done()
    after = {one: leader.hear(one, 0, answered=before[one]) for one in NODES}
    assert all(leader.term.is_waited_for(one) for one in NODES)
    leader.hear("b.0", 0, answered=after["b.0"])
    assert not confirmed.done()
    leader.hear("c.0", 0, epoch=0, answered=after["c.0"])  # it follows another leader
    assert not confirmed.done()
    leader.hear("c.0", 0, answered=after["c.0"])
    assert confirmed.result(0) is None
    assert not any(leader.term.is_waited_for(one) for one in NODES), "and waits again"


def test_a_fetch_that_comes_when_it_is_waited_for_is_answered_at_once(leader: Leader) -> None:
    told = list[str]()
    leader.term.confirm()
    leader.term.wait_for_news("b.0", 0, lambda: told.append("b.0"))
    assert told == ["b.0"]


def test_what_is_told_of_the_log_is_committed_first(leader: Leader) -> None:
    leader.append(b"0")
    confirmed = leader.term.confirm(up_to=1)
    for end in (0, 1):
        assert not confirmed.done()
        for one in NODES:
            answer = leader.hear(one, end)
            leader.hear(one, end, answered=answer)
    assert confirmed.result(0) is None


def test_whoever_hears_nothing_or_is_deposed_confirms_nothing(leader: Leader, clock: Clock) -> None:
    asked = leader.term.confirm()
    clock.now_ms += CONFIRM_MAX_MS - 1
    leader.term.give_up_confirming()
    assert not asked.done()
    clock.now_ms += 1
    for one in NODES:
        leader.hear(one, 0)
    later = leader.term.confirm()
    leader.term.give_up_confirming()
    assert isinstance(asked.exception(0), LeaderUnknown)
    assert not later.done()
    leader.term.end()
    assert isinstance(later.exception(0), LeaderUnknown)
    assert isinstance(leader.term.confirm().exception(0), LeaderUnknown)


def test_nobody_waits_for_a_member_that_has_been_silent_for_long(
    leader: Leader, clock: Clock
) -> None:
    clock.now_ms += CONFIRM_MAX_MS
    leader.hear("b.0", 0)
    assert isinstance(leader.term.confirm().exception(0), LeaderUnknown)
    leader.hear("c.0", 0)
    assert not leader.term.confirm().done()


def test_a_leader_that_is_in_sync_alone_is_confirmed_at_once(leader: Leader, clock: Clock) -> None:
    alone = leader.set._replace(in_sync=frozenset({"a.0"}))
    term = Term(leader.log, alone, lag_ms=LAG_MS, min_in_sync=lambda: 1, monotonic=clock)
    term.note_flushed(0)
    assert term.confirm().result(0) is None


def test_members_are_unheard_once_none_has_fetched_for_so_long(
    leader: Leader, clock: Clock
) -> None:
    began_ms = clock.now_ms
    assert leader.term.unheard(for_ms=500) == {}
    clock.now_ms += 500
    assert leader.term.unheard(for_ms=500) == {"b.0": began_ms, "c.0": began_ms}
    assert not leader.term.has_heard
    leader.hear("b.0", 0)
    assert leader.term.has_heard
    assert leader.term.unheard(for_ms=500) == {}
    clock.now_ms += 500
    assert leader.term.unheard(for_ms=500) == {"b.0": began_ms + 500, "c.0": began_ms}


def test_a_replica_is_behind_by_what_it_has_not_flushed(leader: Leader) -> None:
    assert leader.term.lag_of(1) == -1, "it has said nothing in this term"
    leader.append(b"0", b"1", b"2")
    leader.hear("b.0", 1)
    assert leader.term.lag_of(1) == 2
    leader.hear("b.0", 3)
    assert leader.term.lag_of(1) == 0
    leader.append(b"3")
    assert leader.term.lag_of(1) == 1
    leader.hear("c.0", 4, epoch=0)  # it follows another leader
    assert leader.term.lag_of(2) == -1
