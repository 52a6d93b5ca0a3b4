"""The state machine of a consumer group (KIP-848): each state and event, and what holds whatever
happens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierlog.broker.group_coordinator.assignors import Target
from tierlog.broker.group_coordinator.consumer_group import (
    LEFT,
    ConsumerGroup,
    ConsumerLimits,
)
from tierlog.broker.group_coordinator.consumer_members import ConsumerMember, MemberState
from tierlog.broker.group_coordinator.consumer_protocol import (
    decode_assignment,
    encode_subscription,
)
from tierlog.broker.group_coordinator.group_events import (
    NEVER,
    Effects,
    GroupError,
    Heartbeat,
    HeartbeatAnswer,
    Identity,
    Join,
    Joined,
    Protocol,
    RecordKind,
    State,
    Sync,
    Synced,
)
from tierlog.broker.group_coordinator.reconciliation import Goal, reconcile
from tierlog.broker.group_coordinator.subscriptions import TopicFacts
from tierlog.broker.settings import Migration
from tierlog.record_format.errors import GroupRefused

NONE = GroupError.NONE
SESSION_MS, REVOKE_MS = 45_000, 60_000


class Topics:
    """`counts`: partitions by name; a topic's id is its name's bytes."""

    def __init__(self, **counts: int) -> None:
        self.counts, self.version = dict(counts), 1

    def set(self, name: str, partitions: int | None) -> None:
        self.version += 1
        self.counts.pop(name, None)
        if partitions is not None:
            self.counts[name] = partitions

    def find(self, name: str) -> TopicFacts | None:
        partitions = self.counts.get(name)
        return None if partitions is None else TopicFacts(id_of(name), range(partitions))

    def name_of(self, topic_id: bytes) -> str | None:
        name = topic_id.decode().strip("_")
        return name if name in self.counts else None

    def names(self) -> list[str]:
        return list(self.counts)


class Patterns:
    def check(self, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise GroupRefused(GroupError.INVALID_REGULAR_EXPRESSION, str(error)) from error

    def resolve(self, patterns: Iterable[str], topics: Iterable[str]) -> dict[str, frozenset[str]]:
        names = list(topics)
        return {one: frozenset(n for n in names if re.fullmatch(one, n)) for one in patterns}


def id_of(name: str) -> bytes:
    return name.encode().ljust(16, b"_")


def places(name: str, *numbers: int) -> Target:
    return frozenset((id_of(name), number) for number in numbers)


class Group:
    """A group, its clock and its topics. Patterns are resolved at once."""

    def __init__(self, *, resolves: bool = True, **limits: Any) -> None:
        self.topics, self.now_ms, self._resolves = Topics(a=4, b=4), 1_000, resolves
        given = {"max_size": 100, "classic_max_size": 100, "assignment_interval_ms": 0, **limits}
        self.group = ConsumerGroup("g", ConsumerLimits(**given), self.topics)
        self.answers: dict[int, Any] = {}
        self.last = Effects()
        self._ids = count()

    def take(self, effects: Effects) -> Any:
        self.last = effects
        for to, body in (*effects.answers, *effects.confirmed):
            self.answers[to] = body  # type: ignore[index]
        if effects.resolution is not None and self._resolves:
            resolve = effects.resolution
            found = resolve.by.resolve(resolve.patterns, self.topics.names())
            self.group.resolved(found, self.topics.version, self.now_ms)

    def beat(self, member_id: str, epoch: int, **fields: Any) -> HeartbeatAnswer:
        to = next(self._ids)
        beat = Heartbeat(member_id, epoch, "client", "/host", Patterns(), **fields)
        self.take(self.group.beat(beat, to, self.now_ms))
        return self.answers[to]  # type: ignore[no-any-return]

    def join(self, member_id: str, topics: str | None = "a", **fields: Any) -> HeartbeatAnswer:
        given = {
            "topics": None if topics is None else frozenset(topics.split()),
            "rebalance_timeout_ms": REVOKE_MS,
            "owned": frozenset(),
            **fields,
        }
        return self.beat(member_id, 0, **given)

    def classic_join(
        self, member_id: str = "", *, topics: str = "a", name: str = "range", **fields: Any
    ) -> Joined:
        to = next(self._ids)
        given = {
            "member_id": member_id,
            "instance_id": None,
            "client_id": "c",
            "client_host": "/h",
            "protocol_type": "consumer",
            "protocols": (Protocol(name, encode_subscription(topics.split())),),
            "session_timeout_ms": SESSION_MS,
            "rebalance_timeout_ms": REVOKE_MS,
            "new_id": f"new{to}",
            "requires_id": False,
            **fields,
        }
        self.take(self.group.join(Join(**given), to, self.now_ms))
        return self.answers[to]  # type: ignore[no-any-return]

    def classic_sync(self, member_id: str, generation: int, **fields: Any) -> Synced:
        to = next(self._ids)
        given = {"instance_id": None, "protocol_type": "consumer", "protocol_name": "range"}
        sync = Sync(member_id, generation=generation, assignments={}, **(given | fields))
        self.take(self.group.sync(sync, to, self.now_ms))
        return self.answers[to]  # type: ignore[no-any-return]

    def heartbeat(self, member_id: str, generation: int) -> GroupError:
        return self.group.heartbeat(Identity(member_id, None), generation, self.now_ms)

    def leave(self, *who: Identity) -> list[GroupError]:
        errors, effects = self.group.leave(who, self.now_ms)
        self.take(effects)
        return errors

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        if self.group.due_ms <= self.now_ms:
            self.take(self.group.expire(self.now_ms))

    def kinds(self) -> list[RecordKind]:
        return [key.kind for key in self.last.keys]


# --- one member, two members ----------------------------------------------------------------------


def test_a_member_that_joins_alone_gets_everything_at_once() -> None:
    group = Group()
    answer = group.join("m1", "a b")
    assert (answer.error, answer.member_id, answer.epoch) == (NONE, "m1", 2)
    assert answer.assignment == places("a", 0, 1, 2, 3) | places("b", 0, 1, 2, 3)
    assert (group.group.state, group.group.epoch) == (State.STABLE, 2)
    assert group.kinds() == [
        RecordKind.MEMBER,
        RecordKind.EPOCH,
        RecordKind.TARGET,
        RecordKind.TARGET_EPOCH,
        RecordKind.CURRENT,
    ]
    assert group.beat("m1", 2) == HeartbeatAnswer(NONE, "", "m1", 2, 5_000, None)
    assert group.kinds() == []


def test_a_partition_moves_once_its_owner_says_that_it_gave_it_up() -> None:
    group = Group()
    group.join("m1")
    assert group.join("m2").assignment == frozenset()  # all are m1's still
    assert group.group.state is State.RECONCILING
    revoked = group.beat("m1", 2)
    assert (revoked.epoch, revoked.assignment) == (2, places("a", 0, 1))
    assert group.beat("m2", 3).assignment is None
    assert group.beat("m1", 2, owned=places("a", 0, 1, 2)).assignment is None  # not all yet
    assert group.beat("m2", 3).assignment is None
    given_up = group.beat("m1", 2, owned=places("a", 0, 1))
    assert (given_up.epoch, given_up.assignment) == (3, None)
    assert group.beat("m2", 3).assignment == places("a", 2, 3)
    assert group.group.state is State.STABLE


def test_a_member_that_does_not_revoke_in_time_is_removed_though_it_sends_heartbeats() -> None:
    group = Group()
    group.join("m1")
    group.join("m2")
    group.beat("m1", 2)
    for _ in range(3):
        group.wait(REVOKE_MS // 3)
        other = group.beat("m2", 3)
        answer = group.beat("m1", 2)
    assert answer.error is GroupError.UNKNOWN_MEMBER_ID
    assert (other.epoch, other.assignment) == (4, places("a", 0, 1, 2, 3))


def test_a_member_whose_session_is_over_is_removed() -> None:
    group = Group()
    group.join("m1")
    group.wait(SESSION_MS - 1)
    group.join("m2")
    assert group.group.due_ms == group.now_ms + 1
    group.wait(1)
    assert list(group.group.members.by_id) == ["m2"]
    assert group.kinds() == [
        RecordKind.CURRENT,
        RecordKind.TARGET,
        RecordKind.MEMBER,
        RecordKind.EPOCH,
    ]
    assert group.beat("m2", 3).assignment == places("a", 0, 1, 2, 3)


def test_a_group_that_all_left_is_empty_and_its_epoch_goes_on() -> None:
    group = Group()
    group.join("m1")
    left = group.beat("m1", -1)
    assert (left.error, left.epoch, left.assignment) == (NONE, -1, None)
    assert (group.group.state, group.group.due_ms) == (State.EMPTY, group.group.due_ms)
    group.wait(SESSION_MS)
    assert group.group.due_ms == NEVER
    assert group.join("m2").epoch == 4


def test_targets_are_not_computed_more_often_than_the_interval() -> None:
    group = Group(assignment_interval_ms=1_000)
    group.join("m1")
    assert group.join("m2").epoch == 2  # the target's; the group's is 3
    assert group.group.state is State.ASSIGNING
    group.wait(1_000)
    assert group.beat("m1", 2).assignment == places("a", 0, 1)


def test_topics_that_grow_appear_and_go_are_followed() -> None:
    group = Group()
    group.join("m1", "a later")
    group.topics.set("a", 5)
    assert group.beat("m1", 2).assignment == places("a", 0, 1, 2, 3, 4)
    group.topics.set("later", 1)
    assert group.beat("m1", 3).assignment == places("a", 0, 1, 2, 3, 4) | places("later", 0)
    group.topics.set("a", None)
    assert group.beat("m1", 4).assignment == places("later", 0)
    group.topics.set("unread", 3)
    assert group.beat("m1", 4).assignment is None
    assert (group.group.epoch, group.kinds()) == (5, [])


def test_a_new_subscription_takes_away_what_is_not_read_any_more() -> None:
    group = Group()
    group.join("m1", "a b")
    answer = group.beat("m1", 2, topics=frozenset("b"))
    assert (answer.epoch, answer.assignment) == (2, places("b", 0, 1, 2, 3))
    assert group.beat("m1", 2, owned=places("b", 0, 1, 2, 3)).epoch == 3


def test_the_assignor_is_what_most_members_name() -> None:
    group = Group()
    group.join("m1", assignor="range")
    assert group.group.assignor == "range"
    for name in ("m2", "m3"):
        group.join(name, assignor="uniform")
    assert group.group.assignor == "uniform"


# --- epochs ---------------------------------------------------------------------------------------

EPOCHS = {
    "its own": (3, None, NONE),
    "ahead": (4, None, GroupError.FENCED_MEMBER_EPOCH),
    "the previous, without saying what it owns": (2, None, GroupError.FENCED_MEMBER_EPOCH),
    "the previous, owning no more than it was given": (2, places("a", 0), NONE),
    "the previous, owning more": (2, places("a", 0, 3), GroupError.FENCED_MEMBER_EPOCH),
    "an older one": (1, places("a", 0), GroupError.FENCED_MEMBER_EPOCH),
    "anew": (0, frozenset[Any](), NONE),
}


@pytest.mark.parametrize("what", EPOCHS)
def test_a_member_is_fenced_by_its_epoch(what: str) -> None:
    epoch, owned, error = EPOCHS[what]
    group = Group()
    group.join("m1")
    group.join("m2")
    group.beat("m1", 2)
    assert group.beat("m1", 2, owned=places("a", 0, 1)).epoch == 3
    assert group.beat("m1", epoch, owned=owned).error is error


COMMITS = {
    "at its epoch": ("m1", 3, (("a", 0),), False, NONE),
    "at an earlier one, given before": ("m1", 2, (("a", 0), ("a", 1)), False, NONE),
    "at an earlier one, not given": ("m1", 2, (("a", 2),), False, GroupError.STALE_MEMBER_EPOCH),
    "before it was given": ("m1", 1, (("a", 0),), False, GroupError.STALE_MEMBER_EPOCH),
    "ahead": ("m1", 4, (("a", 0),), False, GroupError.STALE_MEMBER_EPOCH),
    "of a stranger": ("m9", 3, (), False, GroupError.UNKNOWN_MEMBER_ID),
    "of nobody": ("", -1, (), False, GroupError.UNKNOWN_MEMBER_ID),
    "in an old version": ("m1", 3, (), True, GroupError.UNSUPPORTED_VERSION),
}


@pytest.mark.parametrize("what", COMMITS)
def test_a_commit_is_fenced_by_the_epoch_at_which_a_partition_was_given(what: str) -> None:
    member_id, epoch, read, is_old, error = COMMITS[what]
    group = Group()
    group.join("m1")
    group.join("m2")
    group.beat("m1", 2)
    group.beat("m1", 2, owned=places("a", 0, 1))
    found = group.group.check_commit(
        Identity(member_id, None),
        epoch,
        places=[(id_of(name), number) for name, number in read],
        is_old=is_old,
    )
    assert found is error


def test_an_empty_group_takes_commits_of_anybody() -> None:
    group = Group()
    group.join("m1")
    group.beat("m1", -1)
    assert group.group.check_commit(Identity("", None), -1) is NONE
    assert group.group.check_commit(Identity("m1", None), 2) is GroupError.UNKNOWN_MEMBER_ID


def test_a_fetch_of_offsets_is_fenced_by_the_epoch() -> None:
    group = Group()
    group.join("m1")
    assert group.group.check_fetch(None, -1) is NONE
    assert group.group.check_fetch("m1", 2) is NONE
    assert group.group.check_fetch("m1", 1) is GroupError.STALE_MEMBER_EPOCH
    assert group.group.check_fetch("m9", 2) is GroupError.UNKNOWN_MEMBER_ID


# --- static members -------------------------------------------------------------------------------


def test_a_static_member_that_left_for_a_time_gets_its_partitions_back_in_place_of_itself() -> None:
    group = Group()
    group.join("m1", instance_id="i1")
    group.join("m2")
    group.beat("m1", 2, instance_id="i1")
    group.beat("m1", 2, instance_id="i1", owned=places("a", 0, 1))
    group.beat("m2", 3)
    assert group.beat("m1", LEFT, instance_id="i1").epoch == LEFT
    assert group.beat("m2", 3).assignment is None  # they wait for it
    answer = group.join("m3", instance_id="i1")
    assert (answer.epoch, answer.assignment) == (3, places("a", 0, 1))
    assert group.group.epoch == 3  # nobody else notices
    assert group.beat("m1", 3, instance_id="i1").error is GroupError.FENCED_INSTANCE_ID


def test_an_instance_is_one_members_until_it_leaves() -> None:
    group = Group()
    group.join("m1", instance_id="i1")
    assert group.join("m2", instance_id="i1").error is GroupError.UNRELEASED_INSTANCE_ID
    assert group.beat("m2", 2, instance_id="i1").error is GroupError.FENCED_INSTANCE_ID
    assert group.beat("m2", 2, instance_id="i9").error is GroupError.UNKNOWN_MEMBER_ID
    group.beat("m1", -1, instance_id="i1")
    assert group.join("m2", instance_id="i1").error is NONE


@pytest.mark.parametrize("goes", ["left", "in time"])
def test_a_member_that_joins_again_as_another_instance_gives_up_the_first(goes: str) -> None:
    group = Group()
    group.join("m1", instance_id="i1")
    assert group.join("m1", instance_id="i2").error is NONE
    assert group.beat("m1", 2, instance_id="i1").error is GroupError.UNKNOWN_MEMBER_ID
    group.beat("m1", -1, instance_id="i2") if goes == "left" else group.wait(SESSION_MS)
    assert group.join("m2", instance_id="i1").error is NONE
    assert list(group.group.members.by_id) == ["m2"]


def test_a_static_member_that_does_not_come_back_in_time_is_removed() -> None:
    group = Group()
    group.join("m1", instance_id="i1")
    group.beat("m1", LEFT, instance_id="i1")
    group.wait(SESSION_MS)
    assert group.group.state is State.EMPTY


def test_a_full_group_refuses_new_members_only() -> None:
    group = Group(max_size=1)
    group.join("m1")
    assert group.join("m2").error is GroupError.GROUP_MAX_SIZE_REACHED
    assert group.join("m1").error is NONE


# --- patterns -------------------------------------------------------------------------------------


def test_a_pattern_is_resolved_outside_and_what_it_matches_comes_with_a_later_heartbeat() -> None:
    group = Group(resolves=False)
    joined = group.join("m1", None, pattern="[ab]")
    assert (joined.epoch, joined.assignment) == (1, frozenset())
    resolution = group.last.resolution
    assert resolution is not None
    assert resolution.patterns == ("[ab]",)
    group.beat("m1", 1)
    assert group.last.resolution is None  # it is under way
    group.take(group.group.resolved({"[ab]": frozenset("ab")}, 1, group.now_ms))
    assert group.kinds() == [RecordKind.PATTERN, RecordKind.EPOCH]
    answer = group.beat("m1", 1)
    assert (answer.epoch, len(answer.assignment or ())) == (2, 8)


def test_new_topics_are_matched_but_not_more_often_than_every_ten_seconds() -> None:
    group = Group()
    group.join("m1", None, pattern="[abc]")
    group.beat("m1", 1)
    group.topics.set("c", 2)
    group.wait(10_000)
    group.beat("m1", 2)
    assert group.last.resolution is None
    group.wait(1)
    group.beat("m1", 2)
    assert group.last.resolution is not None
    assert group.beat("m1", 2).epoch == 3


def test_a_pattern_that_nobody_uses_any_more_is_forgotten() -> None:
    group = Group()
    group.join("m1", None, pattern="a")
    group.wait(10_001)
    other = group.join("m2", None, pattern="b")
    assert sorted(group.group.subscriptions.matched) == ["a", "b"]
    group.beat("m2", other.epoch, pattern="", topics=frozenset())
    assert RecordKind.PATTERN in group.kinds()
    assert list(group.group.subscriptions.matched) == ["a"]
    group.beat("m1", -1)
    assert not group.group.subscriptions.matched


def test_what_is_no_pattern_is_refused_and_nothing_changes() -> None:
    group = Group()
    answer = group.join("m1", None, pattern="(")
    assert answer.error is GroupError.INVALID_REGULAR_EXPRESSION
    assert (group.group.is_idle, group.kinds()) == (True, [])


# --- members of the classic protocol --------------------------------------------------------------


def migrating() -> tuple[Group, str, int]:
    """m1 of the consumer protocol, and one of the classic: it has the second half."""
    group = Group()
    group.join("m1")
    joined = group.classic_join()
    group.beat("m1", 2)
    group.beat("m1", 2, owned=places("a", 0, 1))
    return group, joined.member_id, joined.generation


def test_a_classic_member_joins_again_when_partitions_are_free_and_syncs_them() -> None:
    group, member_id, generation = migrating()
    assert group.heartbeat(member_id, generation) is GroupError.REBALANCE_IN_PROGRESS
    joined = group.classic_join(member_id)
    assert (joined.error, joined.protocol_name, joined.members) == (NONE, "range", ())
    synced = group.classic_sync(member_id, joined.generation)
    assert decode_assignment(synced.assignment) == {"a": [2, 3]}
    assert group.heartbeat(member_id, joined.generation) is NONE
    assert group.group.state is State.STABLE


def test_a_classic_member_is_told_to_join_when_there_is_a_newer_target() -> None:
    group, member_id, _ = migrating()
    joined = group.classic_join(member_id)
    group.join("m3")
    assert group.heartbeat(member_id, joined.generation) is GroupError.REBALANCE_IN_PROGRESS
    synced = group.classic_sync(member_id, joined.generation)
    assert synced.error is GroupError.REBALANCE_IN_PROGRESS
    group.wait(SESSION_MS - 1)
    group.beat("m1", 3)
    group.beat("m3", 4)
    group.heartbeat(member_id, joined.generation)
    group.wait(REVOKE_MS - SESSION_MS + 1)  # it has not joined
    assert member_id not in group.group.members.by_id


def test_the_group_is_a_classic_one_when_the_last_member_of_the_new_protocol_has_gone() -> None:
    group, member_id, _ = migrating()
    keys = set(group.group.all_keys())
    group.beat("m1", -1)
    assert (group.last.is_downgraded, group.last.is_rebalanced) == (True, True)
    assert set(group.last.keys) == keys
    assert list(group.group.members.by_id) == [member_id]


REFUSED_JOINS = {
    "no protocol is common": {"name": "roundrobin"},
    "another type": {"protocol_type": "connect"},
    "not a subscription": {"protocols": (Protocol("range", b"\0"),)},
}


@pytest.mark.parametrize("what", REFUSED_JOINS)
def test_a_classic_member_that_does_not_fit_is_refused(what: str) -> None:
    group, _, _ = migrating()
    refused = group.classic_join(**REFUSED_JOINS[what])  # type: ignore[arg-type]
    assert refused.error is GroupError.INCONSISTENT_GROUP_PROTOCOL


def test_without_migration_no_classic_member_joins_and_no_group_is_downgraded() -> None:
    group = Group(migration=Migration.DISABLED)
    group.join("m1")
    assert group.classic_join().error is GroupError.INCONSISTENT_GROUP_PROTOCOL
    group = Group(migration=Migration.UPGRADE)
    group.join("m1")
    group.classic_join()
    group.beat("m1", -1)
    assert not group.last.is_downgraded
    assert group.group.state is State.ASSIGNING


def test_a_classic_member_is_given_an_id_first() -> None:
    group = Group()
    group.join("m1")
    required = group.classic_join(requires_id=True)
    assert required.error is GroupError.MEMBER_ID_REQUIRED
    assert group.classic_join(required.member_id, requires_id=True).error is NONE


def test_a_static_member_comes_back_in_the_other_protocol() -> None:
    group = Group()
    group.join("m1", instance_id="i1")
    group.join("m2")
    joined = group.classic_join(instance_id="i1")
    assert (joined.error, joined.generation) == (NONE, 3)
    assert not group.last.is_downgraded  # m2 is there
    group.beat("m2", -1)
    assert group.last.is_downgraded
    lone = Group()
    lone.join("m1", instance_id="i1")
    lone.classic_join(instance_id="i1")
    assert (lone.last.is_downgraded, lone.last.is_rebalanced) == (True, False)


def test_a_classic_member_is_a_member_of_the_new_protocol_after_a_heartbeat() -> None:
    group, member_id, generation = migrating()
    answer = group.join(member_id)
    assert answer.error is NONE
    assert group.group.members.by_id[member_id].classic is None
    assert group.heartbeat(member_id, generation) is GroupError.UNKNOWN_MEMBER_ID


def test_members_leave_each_by_its_id_or_its_instance() -> None:
    group, member_id, _ = migrating()
    static = group.classic_join(instance_id="i1").member_id
    errors = group.leave(
        Identity("nobody", None),
        Identity("", "i9"),
        Identity("m9", "i1"),
        Identity("", "i1"),
        Identity(member_id, None),
    )
    unknown = GroupError.UNKNOWN_MEMBER_ID
    assert errors == [unknown, unknown, GroupError.FENCED_INSTANCE_ID, NONE, NONE]
    assert static not in group.group.members.by_id


# --- reconciliation -------------------------------------------------------------------------------

STABLE, UNREVOKED, UNRELEASED = MemberState.STABLE, MemberState.UNREVOKED, MemberState.UNRELEASED
EVERYTHING = frozenset((id_of("a"), id_of("b")))
HAD = dict.fromkeys(places("a", 0, 1), 5)
# The member's state, epoch, what it must give up; the target; what is not free; what it says that
# it owns; and what it becomes: its state, epoch and partitions.
RECONCILED: dict[str, Any] = {
    "at the target": (STABLE, 6, (), (0, 1), (), None, (STABLE, 6, (0, 1))),
    "to the same": (STABLE, 5, (), (0, 1), (), None, (STABLE, 6, (0, 1))),
    "to more": (STABLE, 5, (), (0, 1, 2), (), None, (STABLE, 6, (0, 1, 2))),
    "to more, not free": (STABLE, 5, (), (0, 1, 2), (2,), None, (UNRELEASED, 6, (0, 1))),
    "to fewer": (STABLE, 5, (), (0,), (), None, (UNREVOKED, 5, (0,))),
    "to fewer, which it says": (STABLE, 5, (), (0,), (), (0,), (STABLE, 6, (0,))),
    "to others": (STABLE, 5, (), (2,), (), (0, 1), (UNREVOKED, 5, ())),
    "unrevoked, silent": (UNREVOKED, 5, (3,), (0, 1), (), None, (UNREVOKED, 5, (0, 1))),
    "unrevoked, owning": (UNREVOKED, 5, (3,), (0, 1), (), (0, 1, 3), (UNREVOKED, 5, (0, 1))),
    "revoked": (UNREVOKED, 5, (3,), (0, 1), (3,), (0, 1), (STABLE, 6, (0, 1))),
    "revoked, and wanted again": (
        UNREVOKED,
        5,
        (3,),
        (0, 1, 3),
        (3,),
        (0,),
        (STABLE, 6, (0, 1, 3)),
    ),
    "unreleased, still": (UNRELEASED, 6, (), (0, 1, 2), (2,), None, (UNRELEASED, 6, (0, 1))),
    "released": (UNRELEASED, 6, (), (0, 1, 2), (), None, (STABLE, 6, (0, 1, 2))),
    "of a later Kafka": (MemberState.UNKNOWN, 5, (), (0,), (), (), (STABLE, 6, (0,))),
}


@pytest.mark.parametrize("what", RECONCILED)
def test_a_member_is_reconciled(what: str) -> None:
    state, epoch, revoking, target, taken, owned, expected = RECONCILED[what]
    member = ConsumerMember(
        "m",
        epoch,
        state=state,
        assigned=HAD,
        revoking=dict.fromkeys(places("a", *revoking), epoch),
    )
    new = reconcile(
        member,
        Goal(6, places("a", *target), EVERYTHING),
        owned=None if owned is None else places("a", *owned),
        is_free=lambda place: place not in places("a", *taken),
    )
    assert (new.state, new.epoch, frozenset(new.assigned)) == (
        expected[0],
        expected[1],
        places("a", *expected[2]),
    )
    new_ones = new.assigned.keys() - HAD.keys()
    assert all(new.assigned[place] == 6 for place in new_ones), "given at the target's epoch"


def test_a_member_of_an_unknown_state_has_to_give_up_all_first() -> None:
    member = ConsumerMember("m", 5, state=MemberState.UNKNOWN, assigned=HAD)
    for owned in (None, places("a", 0)):
        with pytest.raises(GroupRefused, match="unknown"):
            reconcile(
                member,
                Goal(6, places("a", 0), EVERYTHING),
                owned=owned,
                is_free=lambda _: True,
            )


# --- whatever happens -----------------------------------------------------------------------------


@dataclass
class Client:
    """What a consumer does: it gives up what it is not assigned, then says so."""

    name: str
    group: Group
    epoch: int = 0
    owned: frozenset[Any] = frozenset()
    assigned: frozenset[Any] = frozenset()
    fields: dict[str, Any] = field(default_factory=dict)

    def revoke(self) -> None:
        self.owned &= self.assigned

    def beat(self, *, loses_answer: bool = False, **fields: Any) -> None:
        if self.epoch == 0:
            self.owned = self.assigned = frozenset()
            answer = self.group.join(self.name, **self.fields)
        else:
            full = {"topics": frozenset("ab"), "rebalance_timeout_ms": REVOKE_MS} | fields
            answer = self.group.beat(self.name, self.epoch, owned=self.owned, **full)
        if answer.error in (GroupError.FENCED_MEMBER_EPOCH, GroupError.UNKNOWN_MEMBER_ID):
            self.epoch, self.owned, self.assigned = 0, frozenset(), frozenset()
            return
        assert answer.error is NONE
        if loses_answer:
            return
        self.epoch = answer.epoch
        if answer.assignment is not None:
            self.assigned = answer.assignment
            if self.owned <= self.assigned:
                self.owned = self.assigned


def check(clients: list[Client]) -> None:
    """Whoever is no member any more has noticed, as its consumer does when its session is over."""
    group = clients[0].group.group
    held = [place for one in clients if one.name in group.members.by_id for place in one.owned]
    assert len(held) == len(set(held)), "a partition has two owners"
    assert all(one.epoch <= group.target_epoch <= group.epoch for one in group.members)


def leave(client: Client) -> None:
    client.owned = client.assigned = frozenset()
    if client.epoch > 0:
        client.group.beat(client.name, -1)
    client.epoch = 0


def outlast(client: Client) -> None:
    """All other sessions are over."""
    client.group.wait(SESSION_MS - 1)
    client.beat()
    client.group.wait(1)


def narrow(client: Client) -> None:
    if client.epoch > 0:
        client.beat(topics=frozenset("a"))


def visit(client: Client) -> None:
    """A classic member comes and goes."""
    if client.epoch > 0 and client.name in client.group.group.members.by_id:
        joined = client.group.classic_join(topics="a b")
        client.group.leave(Identity(joined.member_id, None))


OPERATIONS: dict[str, Callable[[Client], None]] = {
    "beat": Client.beat,
    "revoke": Client.revoke,
    "lose an answer": lambda client: client.beat(loses_answer=True),
    "leave": leave,
    "grow": lambda client: client.group.topics.set("b", 6),
    "delete": lambda client: client.group.topics.set("b", None),
    "narrow": narrow,
    "outlast": outlast,
    "visit": visit,
}


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted(OPERATIONS))), max_size=40),
    st.sampled_from(("range", "uniform")),
    st.sampled_from((0, 1_000)),
)
def test_no_partition_has_two_owners_and_all_come_to_rest(
    size: int, steps: list[tuple[int, str]], assignor: str, interval_ms: int
) -> None:
    group = Group(assignment_interval_ms=interval_ms)
    fields = {"topics": "a b", "assignor": assignor}
    clients = [Client(f"m{number}", group, fields=fields) for number in range(size)]
    for index, operation in steps:
        group.wait(100)
        OPERATIONS[operation](clients[index % size])
        check(clients)
    for _ in range(8):
        group.wait(1_000)
        for client in clients:
            client.revoke()
            client.beat()
            check(clients)
    assert group.group.state is State.STABLE
    held = sorted(place for one in clients for place in one.owned)
    every = [(id_of(name), n) for name, size in group.topics.counts.items() for n in range(size)]
    assert held == sorted(every)
