"""The state machine of a classic group: each state and event, and what holds whatever happens."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierlog.broker.group_coordinator.classic_group import ClassicGroup
from tierlog.broker.group_coordinator.group_events import (
    NEVER,
    Effects,
    GroupError,
    Identity,
    Join,
    Joined,
    Limits,
    Protocol,
    State,
    Sync,
    Synced,
    Write,
)

NONE, UNKNOWN = GroupError.NONE, GroupError.UNKNOWN_MEMBER_ID
SESSION_MS, REBALANCE_MS = 10_000, 60_000


def assigned(generation: int, member_id: str) -> bytes:
    return f"{generation} {member_id}".encode()


class Group:
    """A group, its clock, and the answers that members got; records are written at once."""

    def __init__(self, *, delay_ms: int = 0, max_size: int = 100, writes: bool = True) -> None:
        self.group = ClassicGroup("g", Limits(max_size, delay_ms))
        self.now_ms, self.ids, self._writes = 1000, count(), writes
        self.answers: dict[object, Joined | Synced] = {}
        self.asked: list[object] = []
        self.unwritten: list[Write] = []

    def take(self, effects: Effects) -> None:
        for to, body in effects.answers:
            assert to not in self.answers, "an answer is given once"
            self.answers[to] = body
        self.unwritten += effects.writes
        if self._writes:
            self.write()

    def write(self, error: GroupError = NONE) -> None:
        while self.unwritten:
            written = self.group.written(self.unwritten.pop(0).then, error, self.now_ms)
            self.take(written)

    def join(self, member_id: str = "", **fields: object) -> object:
        self.asked.append(to := f"join {next(self.ids)}")
        join = Join(
            **{
                "member_id": member_id,
                "instance_id": None,
                "client_id": "c",
                "client_host": "/h",
                "protocol_type": "consumer",
                "protocols": (Protocol("range", b"all"),),
                "session_timeout_ms": SESSION_MS,
                "rebalance_timeout_ms": REBALANCE_MS,
                "new_id": f"m{next(self.ids)}",
                "requires_id": False,
                **fields,
            }
        )
        self.take(self.group.join(join, to, self.now_ms))
        return to

    def sync(self, member_id: str, *, generation: int | None = None, **fields: object) -> object:
        self.asked.append(to := f"sync {next(self.ids)}")
        current = self.group.generation if generation is None else generation
        assignments = {one: assigned(current, one) for one in self.group.members}
        sync = Sync(
            **{
                "member_id": member_id,
                "instance_id": None,
                "generation": current,
                "protocol_type": "consumer",
                "protocol_name": "range",
                "assignments": assignments if member_id == self.group.leader else {},
                **fields,
            }
        )
        self.take(self.group.sync(sync, to, self.now_ms))
        return to

    def heartbeat(self, member_id: str, generation: int | None = None) -> GroupError:
        current = self.group.generation if generation is None else generation
        return self.group.heartbeat(Identity(member_id, None), current, self.now_ms)

    def leave(self, *members: Identity) -> list[GroupError]:
        errors, effects = self.group.leave(members, self.now_ms)
        self.take(effects)
        return errors

    def pass_time(self, ms: int) -> None:
        """As the coordinator's timer: never later than a deadline."""
        end_ms = self.now_ms + ms
        while self.group.due_ms <= end_ms:
            self.now_ms = max(self.now_ms, int(self.group.due_ms))
            self.take(self.group.expire(self.now_ms))
        self.now_ms = end_ms

    def members(self) -> list[str]:
        return list(self.group.members)

    def answer(self, to: object) -> Joined | Synced:
        return self.answers[to]


def stable(members: int = 2, **fields: object) -> Group:
    group = Group(**fields)
    for _ in range(members):
        group.join()
    group.pass_time(0)
    for member_id in reversed(group.members()):
        group.sync(member_id)
    assert group.group.state is State.STABLE
    return group


def completing() -> Group:
    group = stable()
    for member_id in group.members():
        group.join(member_id, protocols=(Protocol("range", b"more"),))
    assert group.group.state is State.COMPLETING
    return group


def preparing() -> Group:
    group = stable()
    group.join(group.members()[1], protocols=(Protocol("range", b"more"),))
    assert group.group.state is State.PREPARING
    return group


def dead() -> Group:
    group = stable()
    group.take(group.group.unload(GroupError.NOT_COORDINATOR, group.now_ms))
    return group


IN_STATE = {
    State.EMPTY: Group,
    State.PREPARING: preparing,
    State.COMPLETING: completing,
    State.STABLE: stable,
    State.DEAD: dead,
}
GONE = GroupError.COORDINATOR_NOT_AVAILABLE
BUSY = GroupError.REBALANCE_IN_PROGRESS


@pytest.mark.parametrize(
    ("state", "heartbeat", "sync", "commit", "simple_commit", "leave"),
    [
        (State.EMPTY, UNKNOWN, UNKNOWN, UNKNOWN, NONE, UNKNOWN),
        (State.PREPARING, BUSY, BUSY, NONE, UNKNOWN, NONE),
        (State.COMPLETING, NONE, None, BUSY, UNKNOWN, NONE),
        (State.STABLE, NONE, NONE, NONE, UNKNOWN, NONE),
        (State.DEAD, GONE, GONE, GONE, GONE, GONE),
    ],
)
def test_what_a_member_is_told_in_each_state(
    state: State,
    heartbeat: GroupError,
    sync: GroupError | None,
    commit: GroupError,
    simple_commit: GroupError,
    leave: GroupError,
) -> None:
    group = IN_STATE[state]()
    assert group.group.state is state
    member_id = [*group.members(), "none"][-1 if state is State.EMPTY else 1]
    who, generation = Identity(member_id, None), group.group.generation
    assert group.heartbeat(member_id) is heartbeat
    assert group.group.check_commit(who, generation, group.now_ms) is commit
    assert group.group.check_commit(Identity("", None), -1, group.now_ms) is simple_commit
    if state not in (State.EMPTY, State.DEAD):
        for call in (group.heartbeat(member_id, 99), group.group.check_commit(who, 99, 0)):
            assert call is GroupError.ILLEGAL_GENERATION
        assert group.answer(group.sync(member_id, generation=99)).error.name == "ILLEGAL_GENERATION"
        assert group.heartbeat("none") is UNKNOWN
    answer = group.answers.get(group.sync(member_id))
    assert (None if answer is None else answer.error) is sync  # None: it waits
    assert group.leave(who) == [leave]


@pytest.mark.parametrize("state", [State.PREPARING, State.COMPLETING, State.STABLE])
def test_a_new_member_begins_a_generation_with_all(state: State) -> None:
    group = IN_STATE[state]()
    before = group.group.generation
    new = group.join()
    assert group.group.state is State.PREPARING
    missing = [one for one in group.members() if group.group.members[one].joining is None]
    for member_id in missing:
        group.join(member_id)
    assert group.group.state is State.COMPLETING
    assert group.group.generation == before + 1
    assert len(group.group.members) == 3
    joined = group.answer(new)
    assert (joined.error, joined.generation, joined.members) == (NONE, before + 1, ())


@pytest.mark.parametrize("state", IN_STATE)
def test_other_partitions_are_assigned_in_another_generation(state: State) -> None:
    """If a member has, or is about to get, those that there were."""
    group = IN_STATE[state]()
    group.take(group.group.distribute_again(group.now_ms))
    assigned_before = state in (State.COMPLETING, State.STABLE)
    assert group.group.state is (State.PREPARING if assigned_before else state)


def test_the_leader_alone_is_told_the_members_and_assigns() -> None:
    group = Group()
    first, second = group.join(), group.join()
    group.pass_time(0)
    leader, other = group.answer(first), group.answer(second)
    assert leader.leader == other.leader == leader.member_id
    assert [one.member_id for one in leader.members] == group.members()
    assert other.members == ()
    waiting = group.sync(other.member_id)
    assert waiting not in group.answers
    group.sync(leader.member_id)
    assert group.answer(waiting).assignment == assigned(1, other.member_id)


def test_an_assignment_is_given_once_it_is_written() -> None:
    group = Group(writes=False)
    group.join()
    group.pass_time(0)
    (leader,) = group.members()
    to = group.sync(leader)
    assert to not in group.answers
    assert [len(one.value.members) for one in group.unwritten] == [1]
    group.write()
    assert group.answer(to).error is NONE


def test_an_assignment_that_cannot_be_written_is_made_again() -> None:
    group = Group(writes=False)
    group.join()
    group.pass_time(0)
    (leader,) = group.members()
    to = group.sync(leader)
    group.write(GroupError.COORDINATOR_NOT_AVAILABLE)
    assert group.answer(to).error is GroupError.COORDINATOR_NOT_AVAILABLE
    assert group.group.state is State.PREPARING
    assert group.answer(group.join(leader)).generation == 2


def test_a_member_is_given_an_id_first_and_the_others_wait_for_it() -> None:
    group = stable(1)
    told = group.answer(group.join(requires_id=True))
    assert told.error is GroupError.MEMBER_ID_REQUIRED
    assert group.group.state is State.STABLE
    (first,) = group.members()
    group.join(first)  # the leader: all join again
    assert group.group.state is State.PREPARING
    joined = group.join(told.member_id)
    assert group.answer(joined).error is NONE


def test_a_member_that_never_comes_with_its_id_is_waited_for_only_for_its_session() -> None:
    group = stable(1)
    group.join(requires_id=True)
    (first,) = group.members()
    to = group.join(first)
    assert to not in group.answers
    group.pass_time(SESSION_MS)
    assert group.answer(to).generation == 2


def test_a_session_that_ends_begins_a_generation_without_the_member() -> None:
    group = stable()
    living, _ = group.members()
    group.pass_time(SESSION_MS - 1)
    assert group.heartbeat(living) is NONE
    group.pass_time(1)
    assert group.group.state is State.PREPARING
    assert group.members() == [living]
    assert group.answer(group.join(living)).generation == 2


def test_members_that_do_not_join_in_time_are_left_behind() -> None:
    group = stable(3)
    leader, slow, quick = group.members()
    to = group.join(quick, protocols=(Protocol("range", b"more"),))
    for _ in range(REBALANCE_MS // 5000):
        assert {group.heartbeat(one) for one in (leader, slow)} <= {BUSY, UNKNOWN}
        group.pass_time(5000)
    assert group.members() == [quick]
    assert group.answer(to).leader == quick


def test_members_that_do_not_sync_in_time_are_removed() -> None:
    group = completing()
    leader, other = group.members()
    waiting = group.sync(other)
    for _ in range(REBALANCE_MS // 5000):
        group.heartbeat(leader)
        group.pass_time(5000)
    assert group.members() == [other]
    assert group.answer(waiting).error is BUSY


def test_a_first_rebalance_is_put_off_while_members_come() -> None:
    group = Group(delay_ms=3000)
    first = group.join()
    group.pass_time(2999)
    assert group.group.state is State.PREPARING
    second = group.join()
    group.pass_time(1)
    assert group.group.state is State.PREPARING, "one more delay, as a member came"
    group.pass_time(3000)
    assert group.answer(first).generation == group.answer(second).generation == 1


def test_a_static_member_comes_back_without_a_rebalance() -> None:
    group = Group()
    group.join(instance_id="i")
    group.pass_time(0)
    (old,) = group.members()
    group.sync(old, instance_id="i")
    back = group.answer(group.join(instance_id="i"))
    assert (back.error, back.generation, back.skip_assignment) == (NONE, 1, True)
    assert back.member_id != old
    assert group.group.state is State.STABLE
    assert group.answer(group.sync(back.member_id, instance_id="i")).assignment == assigned(1, old)
    fenced = group.group.heartbeat(Identity(old, "i"), 1, group.now_ms)
    assert fenced is GroupError.FENCED_INSTANCE_ID
    assert group.leave(Identity("", "i"), Identity("", "other")) == [NONE, UNKNOWN]


def test_an_older_client_that_comes_back_does_not_lead() -> None:
    """It would assign anew: only version 9 can be told not to."""
    group = Group()
    group.join(instance_id="i")
    group.pass_time(0)
    (old,) = group.members()
    group.sync(old, instance_id="i")
    back = group.answer(group.join(instance_id="i", can_skip_assignment=False))
    assert back.leader == old != back.member_id


def test_a_static_member_that_cannot_be_written_keeps_its_old_id() -> None:
    group = Group(writes=False)
    group.join(instance_id="i")
    group.pass_time(0)
    (old,) = group.members()
    group.sync(old, instance_id="i")
    group.write()
    to = group.join(instance_id="i")
    group.write(GroupError.NOT_COORDINATOR)
    assert group.answer(to).error is GroupError.NOT_COORDINATOR
    assert group.members() == [old]


def test_a_static_member_that_waits_for_its_record_is_told_that_it_was_removed() -> None:
    group = Group(writes=False)
    for instance_id in ("i", "k"):
        group.join(instance_id=instance_id)
    group.pass_time(0)
    leader = group.members()[0]
    group.sync(leader, instance_id="i")
    group.write()
    to = group.join(instance_id="k")  # its first process never synced
    for _ in range(REBALANCE_MS // 5000):
        group.group.heartbeat(Identity(leader, "i"), 1, group.now_ms)
        group.pass_time(5000)
    assert group.answer(to).error is UNKNOWN


def test_a_record_of_an_earlier_generation_assigns_nothing() -> None:
    group = Group(writes=False)
    group.join()
    group.pass_time(0)
    (leader,) = group.members()
    group.sync(leader)
    group.join(leader, protocols=(Protocol("range", b"more"),))
    assert (group.group.state, group.group.generation) == (State.COMPLETING, 2)
    group.write()
    assert group.group.state is State.COMPLETING


def test_a_group_has_room_for_its_size() -> None:
    group = stable(2, max_size=2)
    refused = group.answer(group.join())
    assert refused.error is GroupError.GROUP_MAX_SIZE_REACHED
    group = Group(max_size=2)
    for _ in range(2):
        group.join(requires_id=True)
    refused = group.answer(group.join(requires_id=True))
    assert refused.error is GroupError.GROUP_MAX_SIZE_REACHED


@pytest.mark.parametrize(
    "fields",
    [
        {"protocol_type": "connect"},
        {"protocols": (Protocol("other", b""),)},
        {"protocols": ()},
    ],
)
def test_a_member_with_another_protocol_is_refused(fields: dict[str, object]) -> None:
    group = stable()
    assert group.answer(group.join(**fields)).error is GroupError.INCONSISTENT_GROUP_PROTOCOL


def test_the_protocol_is_the_one_that_most_prefer_of_those_that_all_know() -> None:
    group = Group()
    names = (("a", "b", "c"), ("b", "c", "x"), ("c", "b"))
    for some in names:
        group.join(protocols=tuple(Protocol(name, b"") for name in some))
    group.pass_time(0)
    assert group.group.protocol_name == "b"


def test_a_group_that_everyone_left_is_written_as_empty() -> None:
    group = stable()
    before = group.group.generation
    assert group.leave(*(Identity(one, None) for one in group.members())) == [NONE, NONE]
    assert (group.group.state, group.group.generation) == (State.EMPTY, before + 1)


def test_what_is_written_is_what_a_start_reads() -> None:
    group = stable(3)
    value = group.group.record(group.group.assignments())
    loaded = ClassicGroup("g", group.group.limits)
    loaded.load(value, 0)
    assert loaded.record(loaded.assignments()) == value
    assert loaded.state is State.STABLE
    loaded.expire(SESSION_MS)  # nobody came back
    assert loaded.state is State.EMPTY


# --- whatever happens -----------------------------------------------------------------------------

STEP = st.tuples(
    st.sampled_from(
        [
            "join",
            "join static",
            "rejoin",
            "change",
            "sync",
            "beat",
            "leave",
            "grow",
            "time",
            "write",
            "fail",
        ]
    ),
    st.integers(0, 5),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=60), st.sampled_from([0, 3000]))
def test_whatever_happens(steps: list[tuple[str, int]], delay_ms: int) -> None:
    """The generation never goes back, an assignment is of one generation, and nobody waits for
    ever.
    """
    group = Group(delay_ms=delay_ms, writes=False)
    seen = 0
    for step, number in steps:
        act(group, step, number)
        assert group.group.generation >= seen
        seen = group.group.generation
        check(group)
    group.write()
    for _ in range(20):  # without another call, everyone is answered, and then gone
        group.pass_time(REBALANCE_MS)
        group.write()
    assert [to for to in group.asked if to not in group.answers] == []
    assert group.group.state is State.EMPTY
    assert group.group.due_ms == NEVER


def act(group: Group, step: str, number: int) -> None:
    ids = group.members()
    member_id = ids[number % len(ids)] if ids else "none"
    member = group.group.members.get(member_id)
    instance_id = member.instance_id if member is not None else None
    if step == "join":
        group.join(requires_id=bool(number % 2))
    elif step == "join static":
        group.join(instance_id=f"i{number % 3}")
    elif step in ("rejoin", "change"):
        metadata = b"all" if step == "rejoin" else bytes([number])
        group.join(member_id, instance_id=instance_id, protocols=(Protocol("range", metadata),))
    elif step == "sync":
        group.sync(member_id, instance_id=instance_id)
    elif step == "beat":
        group.heartbeat(member_id)
    elif step == "leave":
        group.leave(Identity(member_id, instance_id))
    elif step == "grow":
        group.take(group.group.distribute_again(group.now_ms))
    elif step == "time":
        group.pass_time(number * 4000)
    else:
        group.write(NONE if step == "write" else GroupError.COORDINATOR_NOT_AVAILABLE)


def check(group: Group) -> None:
    state, members = group.group.state, group.group.members
    assert (state is State.EMPTY) <= (not members)
    assert group.group.leader is None or group.group.leader in members
    assert len({one.instance_id for one in members.values() if one.instance_id}) == sum(
        one.instance_id is not None for one in members.values()
    )
    if state is State.STABLE:  # what it was given in this generation, perhaps under another id
        for one in members.values():
            mine = assigned(group.group.generation, one.member_id)
            assert one.assignment in (b"", mine) or one.instance_id is not None
            assert one.assignment.startswith(mine.split()[0] if one.assignment else b"")
    if list(group.group.waiting()):
        assert group.group.due_ms < NEVER or group.unwritten
