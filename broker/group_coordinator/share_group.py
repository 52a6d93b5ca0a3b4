"""The state machine of a share group's members (KIP-932), as Kafka's coordinator has it (ShareGroup
and GroupMetadataManager): who is in it, and which partitions each reads. What becomes of the
records is the share coordinator's.

* Everything that changes a group's state is in this file; it does no I/O and reads no clock, as in
  `consumer_group`. A partition may be several members': nobody has to give anything up first.
* A partition is given to members once it is known from where the group reads it (`initialized`),
  which the answer to the heartbeat that first needs it waits for.
* A record is a function of the state and its key (`consumer_group_records`).

    event                      what happens
    heartbeat, epoch 0         joins; epoch + 1 if it or its subscription is new
    heartbeat, its epoch or    kept alive; epoch + 1 if its subscription is new, its topics are
    the previous one           others or have more partitions, or partitions were initialized
    heartbeat, another epoch   FENCED_MEMBER_EPOCH
    heartbeat, epoch -1        removed, epoch + 1
    session over               removed, epoch + 1

    after each heartbeat: if `epoch` is above `target_epoch`, and the last target is
    `assignment_interval_ms` old, a new target, which is what the member has from then on; and what
    it reads and is not initialized, is.

    state          Empty: no members      Stable: else
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tierlog.broker.group_coordinator.assignors import (
    NOTHING,
    Reader,
    Target,
    TopicPartition,
    simple_assignor,
)
from tierlog.broker.group_coordinator.consumer_members import ConsumerMember, MemberTable
from tierlog.broker.group_coordinator.group_events import (
    NEVER,
    Answer,
    Effects,
    GroupError,
    HeartbeatAnswer,
    Identity,
    RecordKey,
    RecordKind,
    ShareBeat,
    State,
)
from tierlog.broker.group_coordinator.subscriptions import Subscriptions, TopicView
from tierlog.record_format.errors import GroupRefused

INITIALIZE_AGAIN_MS: Final = 30_000  # Kafka's group.share.initialize.retry.interval.ms


class ShareGroupLimits(NamedTuple):
    max_size: int = 200
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    assignment_interval_ms: int = 1_000


class ShareGroup:
    """`due_ms`: `expire` is called at that time, or later. Not thread-safe."""

    def __init__(self, name: str, limits: ShareGroupLimits, topics: TopicView) -> None:
        self.name, self.limits = name, limits
        self.members = MemberTable()
        self.subscriptions = Subscriptions(topics)
        self.targets: dict[str, Target] = {}
        self.epoch = self.target_epoch = 1
        self.metadata_hash = 0
        self.initialized: dict[bytes, set[int]] = {}
        self.initializing: dict[TopicPartition, float] = {}  # until when it is not tried again
        self.due_ms: float = NEVER
        self._sessions: dict[str, float] = {}
        self._assign_again_ms: float = 0
        self._seen_version = -1
        self._is_dead = False
        self._out, self._now_ms = Effects(), 0

    # --- events -----------------------------------------------------------------------------------

    def beat(self, beat: ShareBeat, to: object, now_ms: int) -> Effects:
        self._begin(now_ms)
        try:
            answer = self._left(beat) if beat.epoch < 0 else self._beaten(beat)
        except GroupRefused as refused:
            error = HeartbeatAnswer(GroupError(refused.reason), str(refused))
            self._out.answers.append(Answer(to, error))
        else:
            self._out.confirmed.append(Answer(to, answer))
        return self._out

    def expire(self, now_ms: int) -> Effects:
        """Do what is due, and set `due_ms` anew."""
        self._begin(now_ms)
        late = [member_id for member_id, at in self._sessions.items() if at <= now_ms]
        self._fence([self.members.by_id[one] for one in late])
        self.due_ms = min(self._sessions.values(), default=NEVER)
        return self._out

    def mark_initialized(self, places: Iterable[TopicPartition], now_ms: int) -> Effects:
        """It is durable from where on the group reads them."""
        self._begin(now_ms)
        for place in places:
            self.initializing.pop(place, None)
            self.initialized.setdefault(place[0], set()).add(place[1])
        self._touch(RecordKind.SHARE_STATES, "")
        return self._out

    def give_up_initializing(self, places: Iterable[TopicPartition], now_ms: int) -> Effects:
        self._begin(now_ms)
        for place in places:
            self.initializing.pop(place, None)
        self._touch(RecordKind.SHARE_STATES, "")
        return self._out

    def forget_topics(self, topic_ids: Iterable[bytes], now_ms: int) -> Effects:
        """Their offsets are deleted."""
        self._begin(now_ms)
        gone = [one for one in topic_ids if self.initialized.pop(one, None) is not None]
        if gone:
            self._touch(RecordKind.SHARE_STATES, "")
        return self._out

    def unload(self, _: GroupError, now_ms: int) -> Effects:
        """The group is deleted, or its coordinator ends. Nobody waits in it, so none is told."""
        self._begin(now_ms)
        self._is_dead, self.due_ms = True, NEVER
        return self._out

    # --- what it shows ----------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._is_dead:
            return State.DEAD
        return State.STABLE if self.members else State.EMPTY

    @property
    def is_idle(self) -> bool:
        return not self.members

    def target_of(self, member_id: str) -> Target:
        return self.targets.get(member_id, NOTHING)

    def all_keys(self) -> list[RecordKey]:
        """The keys of all records, in the order in which they may be deleted."""
        members = list(self.members.by_id)
        return [
            *(RecordKey(RecordKind.SHARE_CURRENT, one) for one in members),
            *(RecordKey(RecordKind.SHARE_TARGET, one) for one in members),
            RecordKey(RecordKind.SHARE_TARGET_EPOCH),
            *(RecordKey(RecordKind.SHARE_MEMBER, one) for one in members),
            RecordKey(RecordKind.SHARE_STATES),
            RecordKey(RecordKind.SHARE_EPOCH),
        ]

    def load(self, members: Iterable[ConsumerMember], now_ms: int) -> None:
        """Take over members. Their sessions begin now."""
        self._begin(now_ms)
        for member in members:
            self._put(member)
            self._keep_alive(member)

    # --- heartbeats -------------------------------------------------------------------------------

    def _beaten(self, beat: ShareBeat) -> HeartbeatAnswer:
        self._check_room(beat.member_id)
        is_joining = beat.epoch == 0
        if is_joining:
            old = self.members.by_id.get(beat.member_id) or ConsumerMember(beat.member_id)
        else:
            old = self.members.known(Identity(beat.member_id, None))
        _check_epoch(old, beat.epoch)
        new = old._replace(
            rack_id=beat.rack_id or old.rack_id,
            client_id=beat.client_id,
            client_host=beat.client_host,
            topics=old.topics if beat.topics is None else beat.topics,
        )
        is_other = self._subscribe(old, new)
        new = self._reconciled(new, is_other=is_other)
        self._keep_alive(new)
        self._initialize_missing()
        shows_all = is_joining or beat.topics is not None or new.assigned != old.assigned
        return HeartbeatAnswer(
            GroupError.NONE,
            member_id=new.member_id,
            epoch=new.epoch,
            interval_ms=self.limits.heartbeat_interval_ms,
            assignment=frozenset(new.assigned) if shows_all else None,
        )

    def _left(self, beat: ShareBeat) -> HeartbeatAnswer:
        self._fence([self.members.known(Identity(beat.member_id, None))])
        return HeartbeatAnswer(GroupError.NONE, member_id=beat.member_id, epoch=beat.epoch)

    def _check_room(self, member_id: str) -> None:
        limit = self.limits.max_size
        if len(self.members) >= limit and member_id not in self.members.by_id:
            raise GroupRefused(GroupError.GROUP_MAX_SIZE_REACHED, f"the group has {limit} members")

    def _subscribe(self, old: ConsumerMember, new: ConsumerMember) -> bool:
        """Take `new` in, where `old` was. Returns whether the group's epoch rose."""
        is_new = new.member_id not in self.members.by_id
        if is_new or new != old:
            self._put(new)
            self._touch(RecordKind.SHARE_MEMBER, new.member_id)
        is_bumped = is_new or new.topics != old.topics
        if self.target_epoch >= self.epoch:
            is_bumped = is_bumped or self._is_pending()
        return self._refresh_epoch(is_bumped=is_bumped)

    def _is_pending(self) -> bool:
        """Whether initialized partitions of topics that are read are nobody's."""
        given: dict[bytes, set[int]] = {}
        for target in self.targets.values():
            for topic_id, number in target:
                given.setdefault(topic_id, set()).add(number)
        read = self.subscriptions.partitions()
        return any(
            topic_id in read and given.get(topic_id) != numbers
            for topic_id, numbers in self.initialized.items()
        )

    def _refresh_epoch(self, *, is_bumped: bool) -> bool:
        """The epoch rises, also for topics that came, went, or grew since they were last seen."""
        version = self.subscriptions.topics.version
        if not is_bumped and self._seen_version == version:
            return False
        self._seen_version, before = version, self.metadata_hash
        self.metadata_hash = self.subscriptions.hash()
        is_bumped = is_bumped or self.metadata_hash != before
        if is_bumped:
            self.epoch += 1
            self._touch(RecordKind.SHARE_EPOCH, "")
        return is_bumped

    # --- what each is to have ---------------------------------------------------------------------

    def _update_targets(self) -> None:
        if self.target_epoch >= self.epoch or self._now_ms < self._assign_again_ms:
            return
        readers = [
            Reader(one.member_id, None, self.subscriptions.ids(one), self.target_of(one.member_id))
            for one in self.members
        ]
        there = {
            topic_id: [one for one in numbers if one in self.initialized.get(topic_id, ())]
            for topic_id, numbers in self.subscriptions.partitions().items()
        }
        given = simple_assignor(readers, there)
        changed = [one for one, target in given.items() if self.targets.get(one) != target]
        self.targets, self.target_epoch = given, self.epoch
        self._touch(RecordKind.SHARE_TARGET, *changed)
        self._touch(RecordKind.SHARE_TARGET_EPOCH, "")
        self._assign_again_ms = self._now_ms + self.limits.assignment_interval_ms

    def _reconciled(self, member: ConsumerMember, *, is_other: bool) -> ConsumerMember:
        self._update_targets()
        if member.epoch == self.target_epoch and not is_other:
            return member
        read = self.subscriptions.ids(member)
        target = {one: 0 for one in self.target_of(member.member_id) if one[0] in read}
        if member.epoch == self.target_epoch:
            new = member._replace(assigned=target)
        else:
            new = member.moved_to(self.target_epoch, member.state, target, {})
        if new != member:
            self._put(new)
            self._touch(RecordKind.SHARE_CURRENT, new.member_id)
        return new

    def _initialize_missing(self) -> None:
        now_ms, found = self._now_ms, list[TopicPartition]()
        for topic_id, numbers in self.subscriptions.partitions().items():
            known = self.initialized.get(topic_id, ())
            found += [
                (topic_id, one)
                for one in numbers
                if one not in known and self.initializing.get((topic_id, one), 0) <= now_ms
            ]
        if found:
            self.initializing.update(dict.fromkeys(found, now_ms + INITIALIZE_AGAIN_MS))
            self._touch(RecordKind.SHARE_STATES, "")
            self._out.uninitialized = found

    # --- members that go --------------------------------------------------------------------------

    def _fence(self, gone: Sequence[ConsumerMember]) -> None:
        for member in gone:
            member_id = member.member_id
            self.subscriptions.change(member, None)
            self.members.remove(member_id)
            self.targets.pop(member_id, None)
            self._sessions.pop(member_id, None)
            for kind in (
                RecordKind.SHARE_CURRENT,
                RecordKind.SHARE_TARGET,
                RecordKind.SHARE_MEMBER,
            ):
                self._touch(kind, member_id)
        if gone:
            self._refresh_epoch(is_bumped=True)

    def _put(self, member: ConsumerMember) -> None:
        self.subscriptions.change(self.members.by_id.get(member.member_id), member)
        self.members.put(member)

    # --- records, and time ------------------------------------------------------------------------

    def _begin(self, now_ms: int) -> None:
        self._now_ms, self._out = now_ms, Effects()

    def _touch(self, kind: RecordKind, *names: str) -> None:
        self._out.keys.extend(RecordKey(kind, name) for name in names)

    def _keep_alive(self, member: ConsumerMember) -> None:
        deadline_ms = self._now_ms + self.limits.session_timeout_ms
        self._sessions[member.member_id] = deadline_ms
        self.due_ms = min(self.due_ms, deadline_ms)


def _check_epoch(member: ConsumerMember, epoch: int) -> None:
    """Raises GroupRefused: the member has to give up what it has, and join again."""
    if epoch not in (0, member.epoch, member.previous_epoch):
        raise GroupRefused(
            GroupError.FENCED_MEMBER_EPOCH, f"its epoch is {member.epoch}, not {epoch}"
        )
