"""The state machine of a consumer group (KIP-848), as Kafka's coordinator has it (ConsumerGroup and
GroupMetadataManager in its group-coordinator module). Members send heartbeats; who gets which
partitions is decided here.

* Everything that changes a group's state is in this file, and in `modern_group`. They do no I/O,
  read no clock and make no ids: a call is (group, event, `now_ms`), and returns effects: answers,
  records to be written. `now_ms` is a monotonic clock's.
* A partition is one member's at a time (`reconciliation`).

    event                      what happens (a dash: nothing)
    heartbeat, epoch 0         joins; epoch + 1 if its subscription is new *
    heartbeat, its epoch       kept alive; epoch + 1 if its subscription is new, or its topics are
                               others or have more partitions
    heartbeat, previous epoch  the same, if it owns no more than it was given: an answer was lost
    heartbeat, another epoch   FENCED_MEMBER_EPOCH
    heartbeat, epoch -1        removed, epoch + 1
    heartbeat, epoch -2        a static member: its partitions wait for it until its session is over
    patterns are resolved      epoch + 1, if they match other topics than before
    session over               removed, epoch + 1
    revoking takes too long    removed, epoch + 1

    after each heartbeat: if `epoch` is above `target_epoch`, and the last target is
    `assignment_interval_ms` old, a new target; then the member is reconciled with it.

    *  a static member in place of another: UNRELEASED_INSTANCE_ID, unless that one left with -2

    state          Empty: no members      Assigning: `epoch` above `target_epoch`
                   Reconciling: a member is not at its target    Stable: else

Members of the classic protocol, in a group that is being migrated, join too:

    join                       a heartbeat that owns what its subscription says; answered at once
    sync                       its assignment; REBALANCE_IN_PROGRESS if there is a newer target
    heartbeat                  REBALANCE_IN_PROGRESS if it has to give up partitions or gets more
    leave, session over,       removed, epoch + 1
    no join or sync in time
    the last member of the consumer protocol is gone, and `migration` allows it: a classic group
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from tierlog.broker.group_coordinator.assignors import (
    ASSIGNORS,
    UNIFORM,
    Reader,
    Target,
    TopicPartition,
)
from tierlog.broker.group_coordinator.consumer_members import (
    ClassicMember,
    ConsumerMember,
    MemberState,
)
from tierlog.broker.group_coordinator.consumer_protocol import (
    CONSUMER,
    encode_assignment_for,
    read_subscription,
)
from tierlog.broker.group_coordinator.group_events import (
    NO_MEMBER,
    Answer,
    Effects,
    GroupError,
    Heartbeat,
    HeartbeatAnswer,
    Identity,
    Join,
    Joined,
    Patterns,
    RecordKey,
    RecordKind,
    Resolution,
    State,
    Sync,
    Synced,
)
from tierlog.broker.group_coordinator.modern_group import Kinds, ModernGroup, Timer
from tierlog.broker.group_coordinator.reconciliation import Goal, reconcile
from tierlog.broker.group_coordinator.subscriptions import TopicView
from tierlog.broker.settings import Migration
from tierlog.record_format.errors import GroupRefused

LEFT: Final = -2  # a static member that will be back


class ConsumerLimits(NamedTuple):
    """`classic_max_size`: of the classic group that it may become."""

    max_size: int
    classic_max_size: int
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    assignment_interval_ms: int = 1_000
    regex_refresh_interval_ms: int = 600_000
    migration: Migration = Migration.BIDIRECTIONAL


class ConsumerGroup(ModernGroup):
    limits: ConsumerLimits
    kinds = Kinds(
        RecordKind.EPOCH,
        RecordKind.MEMBER,
        RecordKind.TARGET_EPOCH,
        RecordKind.TARGET,
        RecordKind.CURRENT,
    )

    def __init__(self, name: str, limits: ConsumerLimits, topics: TopicView) -> None:
        super().__init__(name, limits, topics)
        self.has_partition_metadata = False

    # --- events of the consumer protocol ----------------------------------------------------------

    def beat(self, beat: Heartbeat, to: object, now_ms: int) -> Effects:
        self._begin(now_ms)
        carry_out = self._left if beat.epoch < 0 else self._beaten
        return self._answer_beat(to, partial(carry_out, beat))

    def resolved(
        self, found: Mapping[str, frozenset[str]] | None, version: int, now_ms: int
    ) -> Effects:
        """The topics by pattern, out of all topics of that version; None: it did not work."""
        self._begin(now_ms)
        if found is None:
            self.subscriptions.give_up()
        elif not self._is_dead:
            used, is_other = self.subscriptions.resolve(found, version, now_ms)
            self._touch(RecordKind.PATTERN, *used)
            self._refresh_epoch(is_bumped=is_other)
        return self._out

    # --- events of the classic protocol -----------------------------------------------------------

    def join(self, join: Join, to: object, now_ms: int) -> Effects:
        self._begin(now_ms)
        member_id = join.member_id or join.new_id
        try:
            self._check_join(join, member_id)
            if not join.member_id and join.instance_id is None and join.requires_id:
                required = Joined(GroupError.MEMBER_ID_REQUIRED, member_id)
                self._out.answers.append(Answer(to, required))
            else:
                answer = self._joined(join, Identity(member_id, join.instance_id))
                self._out.confirmed.append(Answer(to, answer))
        except GroupRefused as refused:
            error = Joined(GroupError(refused.reason), join.member_id)
            self._out.answers.append(Answer(to, error))
        return self._out

    def sync(self, sync: Sync, to: object, now_ms: int) -> Effects:
        self._begin(now_ms)
        try:
            answer = self._synced(sync)
        except GroupRefused as refused:
            self._out.answers.append(Answer(to, Synced(GroupError(refused.reason))))
        else:
            self._out.confirmed.append(Answer(to, answer))
        return self._out

    def heartbeat(self, who: Identity, generation: int, now_ms: int) -> GroupError:
        self._begin(now_ms)
        try:
            member, _ = self._classic_member(who, generation)
        except GroupRefused as refused:
            return GroupError(refused.reason)
        self._keep_alive(member)
        gives_up = member.state is MemberState.UNREVOKED
        gets_more = member.state is MemberState.UNRELEASED and not self._waits(member)
        if member.epoch < self.target_epoch or gives_up or gets_more:
            self._has_to_join(member)
            return GroupError.REBALANCE_IN_PROGRESS
        return GroupError.NONE

    def leave(self, leaving: Iterable[Identity], now_ms: int) -> tuple[list[GroupError], Effects]:
        self._begin(now_ms)
        errors, gone = list[GroupError](), dict[str, ConsumerMember]()
        for who in leaving:
            try:
                member = self._leaver(who)
            except GroupRefused as refused:
                errors.append(GroupError(refused.reason))
            else:
                errors.append(GroupError.NONE)
                gone[member.member_id] = member
        self._fence(list(gone.values()))
        return errors, self._out

    # --- offsets ----------------------------------------------------------------------------------

    def check_commit(
        self,
        who: Identity,
        epoch: int,
        *,
        places: Iterable[TopicPartition] = (),
        is_old: bool = False,
        in_transaction: bool = False,
    ) -> GroupError:
        """Whether offsets of these partitions may be committed. A member that was given them no
        later than the epoch that it says has them still. `is_old`: of a version without epochs. A
        transaction may commit for a consumer that it does not name.
        """
        is_nobody = in_transaction and who == (NO_MEMBER, None)
        if epoch < 0 and (is_nobody or not self.members):
            return GroupError.NONE
        member = self.members.by_id.get(who.member_id)
        if member is None:
            return GroupError.UNKNOWN_MEMBER_ID
        if is_old and member.classic is None:
            return GroupError.UNSUPPORTED_VERSION
        given = {**member.revoking, **member.assigned}
        has_them = all(given.get(place, epoch + 1) <= epoch for place in places)
        if epoch == member.epoch or (epoch < member.epoch and has_them):
            return GroupError.NONE
        return GroupError.ILLEGAL_GENERATION if in_transaction else _stale(member)

    def check_fetch(self, member_id: str | None, epoch: int) -> GroupError:
        """Whether a member may read committed offsets; anybody may who is none."""
        if member_id is None and epoch < 0:
            return GroupError.NONE
        member = self.members.by_id.get(member_id or NO_MEMBER)
        if member is None:
            return GroupError.UNKNOWN_MEMBER_ID
        return GroupError.NONE if epoch == member.epoch else _stale(member)

    # --- what it shows ----------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._is_dead:
            return State.DEAD
        if not self.members:
            return State.EMPTY
        if self.epoch > self.target_epoch:
            return State.ASSIGNING
        return State.STABLE if all(map(self._is_there, self.members)) else State.RECONCILING

    @property
    def assignor(self) -> str:
        """The one that most members name."""
        votes = Counter(one.assignor for one in self.members if one.assignor in ASSIGNORS)
        return votes.most_common(1)[0][0] or UNIFORM if votes else UNIFORM

    def _other_keys(self) -> list[RecordKey]:
        found = [RecordKey(RecordKind.PATTERN, one) for one in self.subscriptions.matched]
        if self.has_partition_metadata:
            found.append(RecordKey(RecordKind.PARTITION_METADATA))
        return found

    def load(self, members: Iterable[ConsumerMember], now_ms: int) -> None:
        """At a start, or in place of a classic group."""
        super().load(members, now_ms)
        for member in self.members:
            if member.state is MemberState.UNREVOKED and member.classic is None:
                self._note(Timer.REVOKE, member, member.rebalance_timeout_ms)

    # --- heartbeats -------------------------------------------------------------------------------

    def _beaten(self, beat: Heartbeat) -> HeartbeatAnswer:
        self._check_room(beat.member_id)
        who = Identity(beat.member_id, beat.instance_id)
        old = self._found(who, is_joining=beat.epoch == 0)
        _check_epoch(old, beat)
        new = _updated(old, beat)
        if new.pattern and new.pattern not in self.subscriptions.users:
            beat.patterns.check(new.pattern)
        is_other = self._subscribe(old, new, beat.patterns)
        new = self._reconciled(new, beat.owned, is_other=is_other)
        self._keep_alive(new)
        shows_all = beat.epoch == 0 or beat.is_full or new.assigned != old.assigned
        return self._shown(new, with_assignment=shows_all)

    def _left(self, beat: Heartbeat) -> HeartbeatAnswer:
        member = self.members.known(Identity(beat.member_id, beat.instance_id))
        if beat.epoch == LEFT:
            given = dict.fromkeys(member.assigned, 0)  # whoever comes in its place has them
            self._put(member._replace(epoch=LEFT, assigned=given, revoking={}))
            self._touch(RecordKind.CURRENT, member.member_id)
        else:
            self._fence([member])
        return HeartbeatAnswer(GroupError.NONE, member_id=beat.member_id, epoch=beat.epoch)

    def _found(
        self, who: Identity, *, is_joining: bool, is_classic: bool = False
    ) -> ConsumerMember:
        """The member as it was: a new one has nothing, and a static one that comes in place of
        another has what that has. Raises GroupRefused.
        """
        if not is_joining:
            return self.members.known(who)
        current = self.members.of_instance(who.instance_id)
        if current is None:
            return self.members.by_id.get(who.member_id) or ConsumerMember(who.member_id)
        if not (is_classic or current.classic or current.epoch == LEFT):
            raise GroupRefused(
                GroupError.UNRELEASED_INSTANCE_ID,
                f"instance {who.instance_id} is member {current.member_id}, which has not left",
            )
        return current._replace(member_id=who.member_id, epoch=0, previous_epoch=0)

    # --- subscriptions, and the group's epoch -----------------------------------------------------

    def _subscribe(
        self, old: ConsumerMember, new: ConsumerMember, patterns: Patterns | None = None
    ) -> bool:
        """Take `new` in, where `old` was. Returns whether it reads other topics now."""
        replaced = self.members.of_instance(new.instance_id)
        if replaced is not None and replaced.member_id != new.member_id:
            self._take_place(replaced, old)
        if new != self.members.by_id.get(new.member_id):
            self._put(new)
            self._touch(RecordKind.MEMBER, new.member_id)
        self._touch(RecordKind.PATTERN, *self.subscriptions.forget_unused())
        has_other_names = new.topics != old.topics
        has_other_pattern = new.pattern != old.pattern
        is_known = not new.pattern or new.pattern in self.subscriptions.matched
        if patterns is not None:
            self._resolve_patterns(patterns)
        self._refresh_epoch(is_bumped=has_other_names or (has_other_pattern and is_known))
        return has_other_names or has_other_pattern

    def _take_place(self, old: ConsumerMember, new: ConsumerMember) -> None:
        target = self.target_of(old.member_id)
        self._remove(old)
        self._put(new)
        self.targets[new.member_id] = target
        for kind in (RecordKind.MEMBER, RecordKind.TARGET, RecordKind.CURRENT):
            self._touch(kind, new.member_id)

    def _resolve_patterns(self, patterns: Patterns) -> None:
        refresh_ms = self.limits.regex_refresh_interval_ms
        unresolved = self.subscriptions.begin_to_resolve(self._now_ms, refresh_ms)
        if unresolved:
            self._out.resolution = Resolution(unresolved, patterns)

    def _refresh_epoch(self, *, is_bumped: bool) -> bool:
        is_new = is_bumped or self._seen_version != self.subscriptions.topics.version
        if is_new and self.has_partition_metadata:
            self.has_partition_metadata = False
            self._touch(RecordKind.PARTITION_METADATA, "")
        return super()._refresh_epoch(is_bumped=is_bumped)

    # --- what each is to have, and has ------------------------------------------------------------

    def _assign(self, readers: Sequence[Reader]) -> dict[str, Target]:
        return ASSIGNORS[self.assignor](readers, self.subscriptions.partitions())

    def _reconciled(
        self, member: ConsumerMember, owned: Target | None, *, is_other: bool
    ) -> ConsumerMember:
        self._update_targets()
        if self._is_there(member) and not is_other:
            return member
        target = self.target_of(member.member_id)
        goal = Goal(self.target_epoch, target, self.subscriptions.ids(member), is_other)
        new = reconcile(member, goal, owned=owned, is_free=self.members.is_free)
        if new == member:
            return member
        self._put(new)
        self._touch(RecordKind.CURRENT, new.member_id)
        if new.state is MemberState.UNREVOKED and new.classic is None:
            self._note(Timer.REVOKE, new, new.rebalance_timeout_ms)
        else:
            self._deadlines[Timer.REVOKE].pop(new.member_id, None)
        return new

    def _is_there(self, member: ConsumerMember) -> bool:
        return member.state is MemberState.STABLE and member.epoch == self.target_epoch

    def _waits(self, member: ConsumerMember) -> bool:
        """For partitions that others still have."""
        missing = self.target_of(member.member_id).difference(member.assigned)
        return not all(map(self.members.is_free, missing))

    # --- members of the classic protocol ----------------------------------------------------------

    def _check_join(self, join: Join, member_id: str) -> None:
        common = {one.name for one in join.protocols}
        for member in self.members:
            if member.classic is not None:
                common &= {one.name for one in member.classic.protocols}
        is_possible = join.protocol_type == CONSUMER and common
        if self.limits.migration is Migration.DISABLED or not is_possible:
            raise GroupRefused(GroupError.INCONSISTENT_GROUP_PROTOCOL, "no protocol is common")
        self._check_room(member_id)

    def _joined(self, join: Join, who: Identity) -> Joined:
        read = read_subscription(join.protocols[0].metadata)
        is_joining = not join.member_id or who.instance_id is None
        old = self._found(who, is_joining=is_joining, is_classic=True)
        current = self.members.of_instance(who.instance_id)
        is_last = (
            current is not None
            and current.classic is None
            and self._may_downgrade({current.member_id}, count=len(self.members))
        )
        keys = self.all_keys() if is_last else []
        new = old._replace(
            instance_id=join.instance_id,
            rack_id=read.rack_id or old.rack_id,
            client_id=join.client_id,
            client_host=join.client_host,
            rebalance_timeout_ms=join.rebalance_timeout_ms,
            topics=read.topics,
            pattern="",
            classic=ClassicMember(join.session_timeout_ms, join.protocols),
        )
        is_other = self._subscribe(old, new)
        is_rebalanced = is_last and self.target_epoch < self.epoch
        if not is_rebalanced:
            owned = self._places(read.owned)
            new = self._reconciled(new, owned, is_other=is_other)
        if is_last:
            self._downgrade(keys, is_rebalanced=is_rebalanced)
        self._deadlines[Timer.JOIN].pop(new.member_id, None)
        self._note(Timer.SYNC, new, join.rebalance_timeout_ms)
        self._keep_alive(new)
        protocol = join.protocols[0].name
        return Joined(GroupError.NONE, new.member_id, new.epoch, CONSUMER, protocol)

    def _synced(self, sync: Sync) -> Synced:
        who = Identity(sync.member_id, sync.instance_id)
        member, classic = self._classic_member(who, sync.generation)
        first = classic.protocols[0]
        is_same = sync.protocol_type in (None, CONSUMER) and sync.protocol_name in (None, first[0])
        if not is_same:
            raise GroupRefused(GroupError.INCONSISTENT_GROUP_PROTOCOL, "it joined with another")
        if self.target_epoch > member.epoch and member.state is not MemberState.UNREVOKED:
            self._has_to_join(member)
            raise GroupRefused(GroupError.REBALANCE_IN_PROGRESS, "there is a newer assignment")
        self._deadlines[Timer.SYNC].pop(member.member_id, None)
        self._keep_alive(member)
        given = encode_assignment_for(first.metadata, self.subscriptions.by_name(member.assigned))
        return Synced(GroupError.NONE, sync.protocol_type, sync.protocol_name, given)

    def _leaver(self, who: Identity) -> ConsumerMember:
        """An admin removes a static member by its instance alone."""
        current = self.members.of_instance(who.instance_id)
        is_by_instance = who.member_id == NO_MEMBER and current is not None
        return current if is_by_instance and current else self.members.known(who)

    def _places(self, owned: Iterable[tuple[str, int]]) -> Target:
        found = ((self.subscriptions.topics.find(name), number) for name, number in owned)
        return frozenset((facts.topic_id, number) for facts, number in found if facts is not None)

    def _classic_member(
        self, who: Identity, generation: int
    ) -> tuple[ConsumerMember, ClassicMember]:
        member = self.members.known(who)
        if member.classic is None:
            raise GroupRefused(GroupError.UNKNOWN_MEMBER_ID, "it speaks the consumer protocol")
        if member.epoch != generation:
            raise GroupRefused(GroupError.ILLEGAL_GENERATION, f"its epoch is {member.epoch}")
        return member, member.classic

    def _has_to_join(self, member: ConsumerMember) -> None:
        if member.member_id not in self._deadlines[Timer.JOIN]:
            self._note(Timer.JOIN, member, member.rebalance_timeout_ms)

    # --- members that go --------------------------------------------------------------------------

    def _fence(self, gone: Sequence[ConsumerMember]) -> None:
        if not gone:
            return
        left = len(self.members) - len(gone)
        is_last = self._may_downgrade({one.member_id for one in gone}, count=left)
        keys = self.all_keys() if is_last else []
        for member in gone:
            self._remove(member)
        self._touch(RecordKind.PATTERN, *self.subscriptions.forget_unused())
        self._refresh_epoch(is_bumped=True)
        if is_last:
            self._downgrade(keys)

    def _may_downgrade(self, gone: set[str], *, count: int) -> bool:
        """Whether those that stay all speak the classic protocol. `count`: of the group then."""
        return (
            self.limits.migration.downgrades
            and 0 < count <= self.limits.classic_max_size
            and all(one.classic for one in self.members if one.member_id not in gone)
        )

    def _downgrade(self, keys: list[RecordKey], *, is_rebalanced: bool = True) -> None:
        self._out.keys[:] = keys
        self._out.is_downgraded, self._out.is_rebalanced = True, is_rebalanced

    def _keep_alive(self, member: ConsumerMember) -> None:
        classic = member.classic
        limit_ms = classic.session_timeout_ms if classic else self.limits.session_timeout_ms
        self._note(Timer.SESSION, member, limit_ms)


def _updated(old: ConsumerMember, beat: Heartbeat) -> ConsumerMember:
    rebalance_ms = beat.rebalance_timeout_ms
    return old._replace(
        instance_id=beat.instance_id or old.instance_id,
        rack_id=beat.rack_id or old.rack_id,
        client_id=beat.client_id,
        client_host=beat.client_host,
        rebalance_timeout_ms=old.rebalance_timeout_ms if rebalance_ms == -1 else rebalance_ms,
        topics=old.topics if beat.topics is None else beat.topics,
        pattern=old.pattern if beat.pattern is None else beat.pattern,
        assignor=beat.assignor or old.assignor,
        classic=None,
    )


def _check_epoch(member: ConsumerMember, beat: Heartbeat) -> None:
    """Raises GroupRefused: the member has to give up what it has, and join again."""
    has_lost_an_answer = (
        beat.epoch == member.previous_epoch
        and beat.owned is not None
        and beat.owned <= member.assigned.keys()
    )
    is_earlier = beat.epoch < member.epoch and has_lost_an_answer
    if beat.epoch not in (0, member.epoch) and not is_earlier:
        raise GroupRefused(
            GroupError.FENCED_MEMBER_EPOCH, f"its epoch is {member.epoch}, not {beat.epoch}"
        )


def _stale(member: ConsumerMember) -> GroupError:
    is_classic = member.classic is not None
    return GroupError.ILLEGAL_GENERATION if is_classic else GroupError.STALE_MEMBER_EPOCH
