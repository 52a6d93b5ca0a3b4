"""Consumer groups and their records: what is acknowledged is there after a restart, whatever could
not be written before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.broker.group_coordinator.test_consumer_group import Patterns, Topics, id_of, places
from tierlog.broker.group_coordinator.consumer_group import LEFT, ConsumerLimits
from tierlog.broker.group_coordinator.consumer_group_records import read_key
from tierlog.broker.group_coordinator.consumer_protocol import encode_subscription
from tierlog.broker.group_coordinator.coordinator import GroupCoordinator
from tierlog.broker.group_coordinator.group_events import (
    GroupError,
    Heartbeat,
    HeartbeatAnswer,
    Identity,
    Join,
    Joined,
    Limits,
    Protocol,
    RecordKind,
)
from tierlog.broker.group_coordinator.group_states import ConsumerGroupState
from tierlog.broker.group_coordinator.share_group import ShareGroupLimits
from tierlog.record_format.errors import StoreUnavailable

NONE = GroupError.NONE


class Coordinator:
    """A coordinator and its log: the newest value by key. `fails`: nothing can be written."""

    def __init__(self, topics: Topics, log: dict[bytes, bytes]) -> None:
        self.topics, self.log, self.fails = topics, log, False
        self.waiting: list[Future[None]] | None = None  # if appends wait to be flushed
        self.due: list[tuple[int, Callable[[], None]]] = []
        self.coordinator = GroupCoordinator(
            self._append,
            Limits(10, 0),
            lambda _: ConsumerLimits(10, 10, assignment_interval_ms=0),
            share_limits=lambda _: ShareGroupLimits(assignment_interval_ms=0),
            topics=topics,
            call_after=lambda delay_ms, callback: self.due.append((delay_ms, callback)),
            now_ms=lambda: 1_000,
            wall_ms=lambda: 77,
        )
        self.coordinator.load({"g": dict(log)} if log else {})

    def _append(self, group: str, rows: list[tuple[bytes, bytes | None]]) -> Future[None]:
        if self.fails:
            raise StoreUnavailable("no")
        for key, value in rows:
            self.log.pop(key, None)
            if value is not None:
                self.log[key] = value
        future: Future[None] = Future()
        if self.waiting is None:
            future.set_result(None)
        else:
            self.waiting.append(future)
        return future

    def beat(self, member_id: str, epoch: int, **fields: Any) -> HeartbeatAnswer:
        (answer,) = self.begin(member_id, epoch, **fields)
        return answer

    def begin(self, member_id: str, epoch: int, **fields: Any) -> list[HeartbeatAnswer]:
        answers: list[HeartbeatAnswer] = []
        given = {"rebalance_timeout_ms": 60_000, "topics": frozenset("ab"), "owned": frozenset()}
        beat = Heartbeat(member_id, epoch, "client", "/host", Patterns(), **(given | fields))
        self.coordinator.beat("g", beat, answers.append)
        return answers

    def classic(self, instance_id: str | None = None) -> Joined:
        (joined,) = self.begin_classic(instance_id)
        return joined

    def begin_classic(self, instance_id: str | None = None) -> list[Joined]:
        """No answer yet if another classic member has to join again first."""
        answers: list[Joined] = []
        protocols = (Protocol("range", encode_subscription("ab")),)
        identity = ("", instance_id, "c", "/h", "consumer", protocols)
        join = Join(*identity, 30_000, 30_000, f"c{len(self.log)}", requires_id=False)
        self.coordinator.join("g", join, answers.append)
        for delay_ms, callback in self.due:
            if delay_ms == 0:  # the first rebalance begins at once
                callback()
        return answers

    def restarted(self) -> Coordinator:
        return Coordinator(self.topics, self.log)

    def shown(self) -> ConsumerGroupState:
        found = self.coordinator.describe_consumers("g")
        assert found is not None
        return found._replace(members=sorted(found.members, key=lambda one: one.member.member_id))


OPERATIONS: dict[str, Callable[[Coordinator, str, int], object]] = {
    "join": lambda one, name, _: one.beat(name, 0),
    "join as static": lambda one, name, _: one.beat(name, 0, instance_id=name),
    "join by pattern": lambda one, name, _: one.beat(
        name, 0, topics=None, pattern="c.*", assignor="range"
    ),
    "beat": lambda one, name, epoch: one.beat(name, epoch),
    "leave": lambda one, name, _: one.beat(name, -1),
    "leave for a time": lambda one, name, _: one.beat(name, LEFT, instance_id=name),
    "join as classic": lambda one, name, _: one.begin_classic(),
    "grow": lambda one, name, _: one.topics.set("b", 9),
    "fail": lambda one, name, _: setattr(one, "fails", not one.fails),
}


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from(sorted(OPERATIONS))), max_size=25)
)
def test_a_restart_finds_the_group_as_it_was(steps: list[tuple[str, str]]) -> None:
    one = Coordinator(Topics(a=3, b=2), {})
    for name, operation in steps:
        shown = one.coordinator.describe_consumers("g")
        epochs = (
            {each.member.member_id: each.member.epoch for each in shown.members} if shown else {}
        )
        OPERATIONS[operation](one, name, epochs.get(name, 1))
    one.fails = False
    if one.coordinator.describe_consumers("g") is not None:  # else it became a classic one
        one.beat("last", 0)  # with it comes whatever could not be written
        restarted = one.restarted()
        assert restarted.shown() == one.shown()
        assert restarted.beat("last", 0).error is NONE


def test_what_could_not_be_written_is_an_error_and_comes_with_the_next_heartbeat() -> None:
    one = Coordinator(Topics(a=3), {})
    assert one.beat("x", 0).error is NONE
    one.fails = True
    refused = one.beat("y", 0)
    assert refused.error is GroupError.COORDINATOR_NOT_AVAILABLE
    assert one.restarted().shown() != one.shown()
    one.fails = False
    assert one.beat("x", 2, owned=places("a", 0, 1, 2)).error is NONE
    assert one.restarted().shown() == one.shown()


def test_an_answer_waits_for_what_came_before_it() -> None:
    one = Coordinator(Topics(a=3), {})
    one.waiting = []
    first = one.begin("x", 0)
    again = one.begin("x", 0)  # it changes nothing, but rests on the first
    assert (first, again) == ([], [])
    one.waiting[0].set_result(None)
    assert [each.error for each in (*first, *again)] == [NONE, NONE]


def test_a_group_that_is_deleted_leaves_no_record() -> None:
    one = Coordinator(Topics(a=3), {})
    one.beat("x", 0, topics=None, pattern="a", instance_id="i")
    one.beat("x", -1, instance_id="i")
    with one.coordinator.deleting("g") as keys:
        assert set(one.log) <= set(keys)
    assert one.coordinator.names() == []


def test_a_migration_is_one_write_and_leaves_the_records_of_one_type() -> None:
    one = Coordinator(Topics(a=3, b=2), {})
    joined = one.classic()
    assert joined.error is NONE
    kinds = lambda: {read_key(key)[1].kind for key in one.log}  # type: ignore[index]  # noqa: E731
    one.beat("x", 0)
    assert RecordKind.CLASSIC not in kinds()
    assert RecordKind.EPOCH in kinds()
    assert one.restarted().shown() == one.shown()
    one.beat("x", -1)
    assert kinds() == {RecordKind.CLASSIC}
    (member,) = one.restarted().coordinator.describe("g").members  # type: ignore[union-attr]
    assert member.member_id == joined.member_id


def test_a_refused_first_heartbeat_leaves_the_classic_group_alone() -> None:
    one = Coordinator(Topics(a=3, b=2), {})
    one.classic()
    before = one.coordinator.describe("g")
    refused = one.beat("x", 0, pattern="(")
    assert refused.error is GroupError.INVALID_REGULAR_EXPRESSION
    assert one.coordinator.describe("g") == before
    assert one.coordinator.heartbeat("g", Identity("x", None), 1) is GroupError.UNKNOWN_MEMBER_ID


def test_a_record_that_cannot_be_read_is_skipped() -> None:
    one = Coordinator(Topics(a=3), {})
    one.beat("x", 0)
    one.beat("y", 0)
    for key in list(one.log):
        found = read_key(key)
        assert found is not None
        if found[1] == (RecordKind.MEMBER, "y"):
            one.log[key] = b"\0\0"
    (member,) = one.restarted().shown().members
    assert member.member.member_id == "x"
    assert member.target[0].topic_id == id_of("a")
