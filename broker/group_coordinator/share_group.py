"""The state machine of a share group's members (KIP-932), as Kafka's coordinator has it (ShareGroup
and GroupMetadataManager): who is in it, and which partitions each reads. What becomes of the
records is the share coordinator's.

* Everything that changes a group's state is in this file, and in `modern_group`. A partition may be
  several members': nobody has to give anything up first.
* A partition is given to members once it is known from where the group reads it (`initialized`),
  which the answer to the heartbeat that first needs it waits for.

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
from functools import partial
from typing import Final, NamedTuple

from tierlog.broker.group_coordinator.assignors import (
    Reader,
    Target,
    TopicPartition,
    simple_assignor,
)
from tierlog.broker.group_coordinator.consumer_members import ConsumerMember
from tierlog.broker.group_coordinator.group_events import (
    Effects,
    GroupError,
    HeartbeatAnswer,
    Identity,
    RecordKey,
    RecordKind,
    ShareBeat,
    State,
)
from tierlog.broker.group_coordinator.modern_group import Kinds, ModernGroup
from tierlog.broker.group_coordinator.subscriptions import TopicView
from tierlog.record_format.errors import GroupRefused

_THROTTLED_FROM_MIN: Final = 2  # deliveries
INITIALIZE_AGAIN_MS: Final = 30_000  # Kafka's group.share.initialize.retry.interval.ms


class ShareGroupLimits(NamedTuple):
    max_size: int = 200
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    assignment_interval_ms: int = 1_000


class ShareLimits(NamedTuple):
    """`lock_ms`: for how long a record is one member's. `count_limit`: how often a record is given
    to somebody. `locks_max`: between the start and the end.
    """

    lock_ms: int = 30_000
    count_limit: int = 5
    locks_max: int = 2_000
    may_renew: bool = True

    @property
    def gives_last_alone(self) -> bool:
        return self.count_limit > _THROTTLED_FROM_MIN

    @property
    def throttled_from(self) -> int:
        return max(_THROTTLED_FROM_MIN, -(-self.count_limit // 2))


class ShareGroup(ModernGroup):
    limits: ShareGroupLimits
    kinds = Kinds(
        RecordKind.SHARE_EPOCH,
        RecordKind.SHARE_MEMBER,
        RecordKind.SHARE_TARGET_EPOCH,
        RecordKind.SHARE_TARGET,
        RecordKind.SHARE_CURRENT,
    )

    def __init__(self, name: str, limits: ShareGroupLimits, topics: TopicView) -> None:
        super().__init__(name, limits, topics)
        self.initialized: dict[bytes, set[int]] = {}
        self.initializing: dict[TopicPartition, float] = {}  # until when it is not tried again

    # --- events -----------------------------------------------------------------------------------

    def beat(self, beat: ShareBeat, to: object, now_ms: int) -> Effects:
        self._begin(now_ms)
        carry_out = self._left if beat.epoch < 0 else self._beaten
        return self._answer_beat(to, partial(carry_out, beat))

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

    # --- what it shows ----------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._is_dead:
            return State.DEAD
        return State.STABLE if self.members else State.EMPTY

    def _other_keys(self) -> list[RecordKey]:
        return [RecordKey(RecordKind.SHARE_STATES)]

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
        return self._shown(new, with_assignment=shows_all)

    def _left(self, beat: ShareBeat) -> HeartbeatAnswer:
        self._fence([self.members.known(Identity(beat.member_id, None))])
        return HeartbeatAnswer(GroupError.NONE, member_id=beat.member_id, epoch=beat.epoch)

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

    # --- what each is to have ---------------------------------------------------------------------

    def _assign(self, readers: Sequence[Reader]) -> dict[str, Target]:
        there = {
            topic_id: [one for one in numbers if one in self.initialized.get(topic_id, ())]
            for topic_id, numbers in self.subscriptions.partitions().items()
        }
        return simple_assignor(readers, there)

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


def _check_epoch(member: ConsumerMember, epoch: int) -> None:
    """Raises GroupRefused: the member has to give up what it has, and join again."""
    if epoch not in (0, member.epoch, member.previous_epoch):
        raise GroupRefused(
            GroupError.FENCED_MEMBER_EPOCH, f"its epoch is {member.epoch}, not {epoch}"
        )
