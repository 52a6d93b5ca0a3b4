"""Whatever members and admins ask of the groups of one name, in any order and with answers of the
log late or lost: no call is answered twice, and none raises.

* The ids are few, and among them those of new classic members: calls meet in all ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.broker.group_coordinator.test_consumer_group import Patterns, Topics, places
from tierlog.broker.group_coordinator.consumer_group import ConsumerLimits
from tierlog.broker.group_coordinator.consumer_protocol import encode_subscription
from tierlog.broker.group_coordinator.coordinator import GroupCoordinator
from tierlog.broker.group_coordinator.group_events import (
    Heartbeat,
    Identity,
    Join,
    Limits,
    Protocol,
    ShareBeat,
    Sync,
)
from tierlog.broker.group_coordinator.share_group import ShareGroupLimits
from tierlog.record_format.errors import GroupRefused, StoreUnavailable

SIZE_MAX, SESSION_MS = 3, 50
MEMBERS = st.sampled_from(["x", "y", "n1", "n2", ""])
INSTANCES = st.sampled_from([None, "i", "j"])
WHO = st.builds(Identity, MEMBERS, INSTANCES)
EPOCHS = st.sampled_from([0, 0, 0, -1, -2, 1, 2, 3])
TOPICS = st.sampled_from([None, frozenset(), frozenset("a"), frozenset("ab")])
PROTOCOLS = st.tuples(
    st.builds(Protocol, st.sampled_from(["range", "own"]), st.just(encode_subscription(["a", "b"])))
)
CALLS = {
    "beat": st.builds(
        Heartbeat,
        MEMBERS.filter(bool),
        EPOCHS,
        *map(st.just, ("client", "/host", Patterns())),
        instance_id=INSTANCES,
        rebalance_timeout_ms=st.just(10),
        topics=TOPICS,
        pattern=st.sampled_from([None, None, "", "a.*"]),
        assignor=st.sampled_from([None, "range", "uniform"]),
        owned=st.sampled_from([None, frozenset(), places("a", 0), places("a", 0, 1)]),
    ),
    "beat_share": st.builds(
        ShareBeat, MEMBERS.filter(bool), EPOCHS, st.just("client"), st.just("/host"), topics=TOPICS
    ),
    "join": st.builds(
        Join,
        MEMBERS,
        INSTANCES,
        *map(st.just, ("client", "/host")),
        st.sampled_from(["consumer", "consumer", "connect"]),
        PROTOCOLS,
        session_timeout_ms=st.just(6_000),
        rebalance_timeout_ms=st.just(10),
        new_id=st.just(""),
        requires_id=st.booleans(),
        can_skip_assignment=st.booleans(),
    ),
    "sync": st.builds(
        Sync,
        MEMBERS,
        INSTANCES,
        EPOCHS,
        *map(st.sampled_from, ([None, "consumer"], [None, "range"])),
        st.just(dict.fromkeys("xy", b"given")),
    ),
    "heartbeat": st.tuples(WHO, EPOCHS),
    "leave": st.lists(WHO, min_size=1, max_size=2),
    "commit": st.tuples(WHO, EPOCHS),
    "delete": st.none(),
    "grow": st.sampled_from([None, 1, 2, 3]),
    "wait": st.sampled_from([1, SESSION_MS, 6_000]),
    "flush": st.booleans(),
}
OFTEN = ["beat"] * 6 + ["join", "leave", "wait"] * 2
STEPS = st.lists(
    st.sampled_from([*CALLS, *OFTEN]).flatmap(lambda name: st.tuples(st.just(name), CALLS[name])),
    min_size=20,
    max_size=40,
)


class Groups:
    """A coordinator of one group's name, its log and what keeps shares' states, which are both
    slow: they answer at the next `flush`.
    """

    def __init__(self) -> None:
        self.topics, self.now_ms = Topics(a=2, b=1), 1_000
        self._due: list[tuple[int, Callable[[], None]]] = []
        self._unflushed: list[Callable[[BaseException | None], None]] = []
        self._ids = count(1)
        self.coordinator = GroupCoordinator(
            self._append,
            Limits(SIZE_MAX, 0, new_member_join_timeout_ms=SESSION_MS),
            lambda _: ConsumerLimits(SIZE_MAX, SIZE_MAX, SESSION_MS, assignment_interval_ms=0),
            share_limits=lambda _: ShareGroupLimits(SIZE_MAX, SESSION_MS, assignment_interval_ms=0),
            topics=self.topics,
            call_after=lambda ms, callback: self._due.append((self.now_ms + ms, callback)),
            now_ms=lambda: self.now_ms,
            wall_ms=lambda: self.now_ms,
        )

    def _append(self, group: str, rows: list[Any]) -> Future[None]:
        future: Future[None] = Future()
        self._unflushed.append(
            lambda cause: future.set_exception(cause) if cause else future.set_result(None)
        )
        return future

    def initialize(
        self, group: str, places: Iterable[Any], *, epoch: int, reply: Callable[..., None]
    ) -> None:
        self._unflushed.append(reply)

    def take(self, name: str, what: Any) -> None:
        match name:
            case "beat" | "sync":
                getattr(self.coordinator, name)("g", what, self._replier())
            case "join":
                new_id = f"n{next(self._ids)}"
                self.coordinator.join("g", what._replace(new_id=new_id), self._replier())
            case "beat_share":
                self.coordinator.beat_share("g", what, self, self._replier())
            case "heartbeat":
                self.coordinator.heartbeat("g", *what)
            case "leave":
                assert len(self.coordinator.leave("g", what)) == len(what)
            case "commit":
                self._commit(*what)
            case "delete":
                self._delete()
            case "grow":
                self.topics.set("b", what)
                self.coordinator.distribute_again("b")
            case "wait":
                self._wait(what)
            case "flush":
                self._flush(None if what else StoreUnavailable("no"))

    def _replier(self) -> Callable[[object], None]:
        answers: list[object] = []

        def reply(answer: object) -> None:
            answers.append(answer)
            assert len(answers) == 1, answers

        return reply

    def _commit(self, who: Identity, epoch: int) -> None:
        try:
            with self.coordinator.checking_commit(
                "g", who, epoch, exists=True, places=places("a", 0)
            ):
                pass
        except GroupRefused:
            pass

    def _delete(self) -> None:
        try:
            with self.coordinator.deleting("g"):
                pass
        except GroupRefused:
            pass

    def _wait(self, ms: int) -> None:
        self.now_ms += ms
        due = [one for one in self._due if one[0] <= self.now_ms]
        self._due = [one for one in self._due if one[0] > self.now_ms]
        for _, callback in due:
            callback()

    def _flush(self, cause: BaseException | None) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for answer in unflushed:
            answer(cause)

    def show(self) -> None:
        self.coordinator.describe("g")
        self.coordinator.describe_consumers("g")
        self.coordinator.describe_share("g")


@settings(deadline=None, max_examples=100)
@given(STEPS)
def test_no_order_of_calls_is_too_much_for_a_group(steps: list[tuple[str, Any]]) -> None:
    groups = Groups()
    try:
        for name, what in steps:
            groups.take(name, what)
            groups.show()
    finally:
        groups.coordinator.close()
