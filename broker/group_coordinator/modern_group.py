"""What a consumer group and a share group have in common (Kafka's ModernGroup): members that send
heartbeats, which the broker assigns partitions, and the records that say so.

* Epochs only rise. `epoch` is the group's: it rises with what members and subscriptions are.
  `target_epoch` is that of `targets`, what each member is to have; a member's own epoch is that of
  what it has.
* A record is a function of the state and its key (`consumer_group_records`): one that could not be
  written is written with the next, as the state is then. `kinds` are the types of records.
* Nothing waits for ever: `due_ms` is never later than the next deadline, and `expire` is the event
  of its passing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from tierlog.broker.group_coordinator.assignors import NOTHING, Reader, Target
from tierlog.broker.group_coordinator.consumer_members import ConsumerMember, MemberTable
from tierlog.broker.group_coordinator.group_events import (
    NEVER,
    Answer,
    Effects,
    GroupError,
    HeartbeatAnswer,
    RecordKey,
    RecordKind,
)
from tierlog.broker.group_coordinator.subscriptions import Subscriptions, TopicView
from tierlog.record_format.errors import GroupRefused


class Timer(StrEnum):
    SESSION = "session"
    REVOKE = "revoke"
    JOIN = "join"
    SYNC = "sync"


class Kinds(NamedTuple):
    epoch: RecordKind
    member: RecordKind
    target_epoch: RecordKind
    target: RecordKind
    current: RecordKind


class ModernLimits(Protocol):
    @property
    def max_size(self) -> int: ...
    @property
    def session_timeout_ms(self) -> int: ...
    @property
    def heartbeat_interval_ms(self) -> int: ...
    @property
    def assignment_interval_ms(self) -> int: ...


class ModernGroup:
    """`due_ms`: `expire` is called at that time, or later. Not thread-safe."""

    kinds: Kinds

    def __init__(self, name: str, limits: ModernLimits, topics: TopicView) -> None:
        self.name, self.limits = name, limits
        self.members = MemberTable()
        self.subscriptions = Subscriptions(topics)
        self.targets: dict[str, Target] = {}
        self.epoch = self.target_epoch = 1
        self.metadata_hash = 0
        self.due_ms: float = NEVER
        self._deadlines: dict[Timer, dict[str, float]] = {timer: {} for timer in Timer}
        self._assign_again_ms: float = 0
        self._seen_version = -1  # of the topics, in `metadata_hash`
        self._is_dead = False
        self._out, self._now_ms = Effects(), 0

    def _assign(self, readers: Sequence[Reader]) -> dict[str, Target]:
        """What each is to have."""
        raise NotImplementedError

    def _other_keys(self) -> list[RecordKey]:
        """Of records that the other type of group does not have."""
        raise NotImplementedError

    # --- events -----------------------------------------------------------------------------------

    def _answer_beat(self, to: object, carry_out: Callable[[], HeartbeatAnswer]) -> Effects:
        try:
            answer = carry_out()
        except GroupRefused as refused:
            error = HeartbeatAnswer(GroupError(refused.reason), str(refused))
            self._out.answers.append(Answer(to, error))
        else:
            self._out.confirmed.append(Answer(to, answer))
        return self._out

    def _shown(self, member: ConsumerMember, *, with_assignment: bool) -> HeartbeatAnswer:
        return HeartbeatAnswer(
            GroupError.NONE,
            member_id=member.member_id,
            epoch=member.epoch,
            interval_ms=self.limits.heartbeat_interval_ms,
            assignment=frozenset(member.assigned) if with_assignment else None,
        )

    def expire(self, now_ms: int) -> Effects:
        """Do what is due, and set `due_ms` anew."""
        self._begin(now_ms)
        timers = self._deadlines.values()
        late = {one for timer in timers for one, at in timer.items() if at <= now_ms}
        self._fence([one for one in self.members if one.member_id in late])
        self.due_ms = min((at for timer in timers for at in timer.values()), default=NEVER)
        return self._out

    def unload(self, _: GroupError, now_ms: int) -> Effects:
        """The group is deleted, or its coordinator ends. Nobody waits in it, so none is told."""
        self._begin(now_ms)
        self._is_dead, self.due_ms = True, NEVER
        return self._out

    def load(self, members: Iterable[ConsumerMember], now_ms: int) -> None:
        """Take over members, at a start. Their sessions begin now."""
        self._begin(now_ms)
        for member in members:
            self._put(member)
            self._keep_alive(member)

    # --- what it shows ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.members

    def target_of(self, member_id: str) -> Target:
        return self.targets.get(member_id, NOTHING)

    def all_keys(self) -> list[RecordKey]:
        """The keys of all records, in the order in which they may be deleted."""
        members, kinds = list(self.members.by_id), self.kinds
        return [
            *(RecordKey(kinds.current, one) for one in members),
            *(RecordKey(kinds.target, one) for one in members),
            RecordKey(kinds.target_epoch),
            *(RecordKey(kinds.member, one) for one in members),
            *self._other_keys(),
            RecordKey(kinds.epoch),
        ]

    # --- subscriptions, the group's epoch, and what each is to have -------------------------------

    def _check_room(self, member_id: str) -> None:
        limit = self.limits.max_size
        if len(self.members) >= limit and member_id not in self.members.by_id:
            raise GroupRefused(GroupError.GROUP_MAX_SIZE_REACHED, f"the group has {limit} members")

    def _refresh_epoch(self, *, is_bumped: bool) -> bool:
        """The epoch rises, also for topics that came, went, or grew since they were last seen.
        Returns whether it did.
        """
        version = self.subscriptions.topics.version
        if not is_bumped and self._seen_version == version:
            return False
        self._seen_version, before = version, self.metadata_hash
        self.metadata_hash = self.subscriptions.hash()
        is_bumped = is_bumped or self.metadata_hash != before
        if is_bumped:
            self.epoch += 1
            self._touch(self.kinds.epoch, "")
        return is_bumped

    def _update_targets(self) -> None:
        if self.target_epoch >= self.epoch or self._now_ms < self._assign_again_ms:
            return
        ids, target_of = self.subscriptions.ids, self.target_of
        readers = [
            Reader(one.member_id, one.instance_id, ids(one), target_of(one.member_id))
            for one in self.members
        ]
        given = self._assign(readers)
        changed = [one for one, target in given.items() if self.targets.get(one) != target]
        self.targets, self.target_epoch = given, self.epoch
        self._touch(self.kinds.target, *changed)
        self._touch(self.kinds.target_epoch, "")
        self._assign_again_ms = self._now_ms + self.limits.assignment_interval_ms

    # --- members that come and go -----------------------------------------------------------------

    def _fence(self, gone: Sequence[ConsumerMember]) -> None:
        for member in gone:
            self._remove(member)
        if gone:
            self._refresh_epoch(is_bumped=True)

    def _put(self, member: ConsumerMember) -> None:
        self.subscriptions.change(self.members.by_id.get(member.member_id), member)
        self.members.put(member)

    def _remove(self, member: ConsumerMember) -> None:
        member_id = member.member_id
        self.subscriptions.change(self.members.by_id[member_id], None)
        self.members.remove(member_id)
        self.targets.pop(member_id, None)
        for timer in self._deadlines.values():
            timer.pop(member_id, None)
        for kind in (self.kinds.current, self.kinds.target, self.kinds.member):
            self._touch(kind, member_id)

    # --- records, and time ------------------------------------------------------------------------

    def _begin(self, now_ms: int) -> None:
        self._now_ms, self._out = now_ms, Effects()

    def _touch(self, kind: RecordKind, *names: str) -> None:
        self._out.keys.extend(RecordKey(kind, name) for name in names)

    def _keep_alive(self, member: ConsumerMember) -> None:
        self._note(Timer.SESSION, member, self.limits.session_timeout_ms)

    def _note(self, timer: Timer, member: ConsumerMember, after_ms: int) -> None:
        deadline_ms = self._now_ms + after_ms
        self._deadlines[timer][member.member_id] = deadline_ms
        self.due_ms = min(self.due_ms, deadline_ms)
