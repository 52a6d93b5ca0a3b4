"""The state machine of a classic group, as Kafka's coordinator has it (ClassicGroup and
GroupMetadataManager in its group-coordinator module).

* Everything that changes a group's state is in this file. It does no I/O, reads no clock and makes
  no ids: a call is (group, event, `now_ms`), and returns effects: answers to be given, records to
  be written, whose outcome comes back as the event `written`.
* `now_ms` is a monotonic clock's. Nothing waits for ever: `due_ms` is never later than the next
  deadline, and `expire` is the event of its passing.
* What members send each other (`metadata`, `assignment`) and the protocols' names are opaque.
* The generation only rises. An assignment is given out once its record is durable.

States, and what an event does (a dash: it is refused):

    event                 Empty      PreparingRebalance  CompletingRebalance   Stable
    join, new member      Preparing  waits               Preparing             Preparing
    join, same metadata   -          waits               answered              answered *****
    join, new metadata    -          waits               Preparing             Preparing
    join, static, new id  Preparing  waits, replaces     Preparing             written, answered *
    all have joined       .          Completing          .                     .
    time to join is over  .          Completing **       .                     .
    sync of the leader    -          -                   written, then Stable  answered
    sync of another       -          -                   waits                 answered
    time to sync is over  .          .                   Preparing ***         Preparing ***
    heartbeat             -          kept alive ****     kept alive            kept alive
    leave, session over   -          one fewer           Preparing             Preparing
    other partitions      .          .                   Preparing             Preparing
    deleted, unloaded     Dead       Dead                Dead                  Dead

    *     Preparing, if the group's protocol would be another
    **    without the dynamic members that did not join; Empty, if nobody is left
    ***   without those who did not sync
    ****  and told REBALANCE_IN_PROGRESS, so that it joins
    ***** the leader: Preparing, for what its metadata does not show, as new partitions

The first rebalance of an empty group waits for `initial_rebalance_delay_ms`, again for as long as
members come, up to the longest rebalance time-out. A member without an id is first given one
(MEMBER_ID_REQUIRED) and is pending until it joins with it: others wait for it.
Refused, in this order: COORDINATOR_NOT_AVAILABLE (Dead), UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID
(another member has the instance's id now), ILLEGAL_GENERATION, INCONSISTENT_GROUP_PROTOCOL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tierlog.broker.group_coordinator.group_events import (
    NEVER,
    NO_MEMBER,
    Answer,
    Assigned,
    Effects,
    GroupError,
    Identity,
    Join,
    Joined,
    JoinedMember,
    Limits,
    Member,
    Protocol,
    Replaced,
    State,
    Sync,
    Synced,
    Write,
)
from tierlog.record_format.kafka_messages.messages import GroupMetadataValue


@dataclass(slots=True)
class _Joining:
    """The time for joining: when it ends, and how often it may still be extended."""

    deadline_ms: float
    is_initial: bool = False
    remaining_ms: int = 0
    delay_ms: int = 0


_REBALANCES_FROM: Final = frozenset((State.EMPTY, State.COMPLETING, State.STABLE))


@dataclass(slots=True)
class ClassicGroup:
    """`due_ms`: `expire` is called at that time, or later. Not thread-safe."""

    name: str
    limits: Limits
    state: State = State.EMPTY
    generation: int = 0
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    due_ms: float = NEVER

    _static: dict[str, str] = field(default_factory=dict)  # member ids by instance
    _pending: dict[str, float] = field(default_factory=dict)  # ids given out, and their deadlines
    _unsynced: set[str] = field(default_factory=set)
    _sync_deadline_ms: float = NEVER
    _join_phase: _Joining | None = None
    _was_empty: bool = False  # before the rebalance in progress
    _new_member_added: bool = False
    _out: Effects = field(default_factory=Effects)
    _now_ms: int = 0

    # --- events -----------------------------------------------------------------------------------

    def join(self, join: Join, to: object, now_ms: int) -> Effects:
        self._begin(now_ms)
        refusal = self._refuse_join(join)
        if refusal is GroupError.GROUP_MAX_SIZE_REACHED:
            self._remove(join.member_id)
            self._answer(to, Joined(refusal, NO_MEMBER))
            self._join_completed_if_all_are_there()
        elif refusal is not None:
            self._answer(to, Joined(refusal, join.member_id))
        elif join.member_id == NO_MEMBER:
            self._join_new(join, to)
        elif join.member_id in self._pending:
            self._add(join, to, join.member_id)
        else:
            self._join_again(join, to)
        return self._out

    def sync(self, sync: Sync, to: object, now_ms: int) -> Effects:
        self._begin(now_ms)
        error = self._refuse_sync(sync)
        if error is not GroupError.NONE:
            self._answer(to, Synced(error))
            return self._out
        member = self.members[sync.member_id]
        self._note_synced(member.member_id)
        if self.state is State.STABLE:
            self._answer(to, self._synced(member))
            return self._out
        member.syncing, superseded = to, member.syncing
        if superseded is not None:  # a retry: nobody reads the earlier answer any more
            self._answer(superseded, Synced(GroupError.REBALANCE_IN_PROGRESS))
        if member.member_id == self.leader:
            assignments = {one: sync.assignments.get(one, b"") for one in self.members}
            value = self.record(assignments)
            self._out.writes.append(Write(value, Assigned(self.generation, assignments)))
        return self._out

    def heartbeat(self, who: Identity, generation: int, now_ms: int) -> GroupError:
        self._begin(now_ms)
        error = self._refuse_member(who, generation)
        if error is not GroupError.NONE:
            return error
        self._keep_alive(self.members[who.member_id])
        if self.state is State.PREPARING:
            return GroupError.REBALANCE_IN_PROGRESS
        return GroupError.NONE

    def leave(self, leaving: Iterable[Identity], now_ms: int) -> tuple[list[GroupError], Effects]:
        self._begin(now_ms)
        errors = [self._leave(who) for who in leaving]
        if GroupError.NONE in errors:
            if self.state in (State.COMPLETING, State.STABLE):
                self._rebalance()
            else:
                self._join_completed_if_all_are_there()
        return errors, self._out

    def distribute_again(self, now_ms: int) -> Effects:
        """What the assignment rests on has changed, and nobody else will say so."""
        self._begin(now_ms)
        if self.state in (State.COMPLETING, State.STABLE):
            self._rebalance()
        return self._out

    def check_commit(
        self, who: Identity, generation: int, now_ms: int, *, in_transaction: bool = False
    ) -> GroupError:
        """Whether offsets may be committed; keeps the member's session alive, as a heartbeat. A
        transaction may commit for a consumer that it does not name, and during a rebalance.
        """
        self._begin(now_ms)
        if self.state is State.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and self.state is State.EMPTY:
            return GroupError.NONE  # of a consumer that assigns its partitions itself, or an admin
        if generation < 0 and who == (NO_MEMBER, None):
            return GroupError.NONE if in_transaction else GroupError.UNKNOWN_MEMBER_ID
        error = self._refuse_member(who, generation)
        if error is GroupError.NONE:
            if self.state is State.COMPLETING and not in_transaction:
                return GroupError.REBALANCE_IN_PROGRESS
            self._keep_alive(self.members[who.member_id])
        return error

    def written(self, what: Assigned | Replaced | None, error: GroupError, now_ms: int) -> Effects:
        """A record is durable, or could not be written."""
        self._begin(now_ms)
        if isinstance(what, Assigned):
            if self.state is State.COMPLETING and what.generation == self.generation:
                self._assign(what.assignments, error)
        elif isinstance(what, Replaced) and what.new_id in self.members:
            self._finish_replacement(what, error)
        return self._out

    def expire(self, now_ms: int) -> Effects:
        """Do what is due, and set `due_ms` anew."""
        self._begin(now_ms)
        for member_id in [one for one, at in self._pending.items() if at <= now_ms]:
            self._remove(member_id)
            self._join_completed_if_all_are_there(even_initial=True)
        for member in [one for one in self.members.values() if one.deadline_ms <= now_ms]:
            self._end_session(member)
        if self._join_phase is not None and self._join_phase.deadline_ms <= now_ms:
            self._end_join_phase(self._join_phase)
        if self._sync_deadline_ms <= now_ms:
            self._end_sync_phase()
        self.due_ms = min(self._deadlines())
        return self._out

    def unload(self, error: GroupError, now_ms: int) -> Effects:
        """The group is deleted, or its coordinator ends: whoever waits is told."""
        self._begin(now_ms)
        for member in self.members.values():
            self._answer_join(member, Joined(error, member.member_id))
            self._answer_sync(member, Synced(error))
        self.state = State.DEAD
        self.due_ms = NEVER
        return self._out

    def load(self, value: GroupMetadataValue, now_ms: int) -> Effects:
        """Become what a record says: at a start."""
        self._begin(now_ms)
        self.generation, self.leader = value.generation, value.leader
        self.protocol_type, self.protocol_name = value.protocol_type or None, value.protocol
        for one in value.members:
            protocols = (Protocol(value.protocol or "", bytes(one.subscription)),)
            rebalance_ms = one.rebalance_timeout
            member = Member(
                one.member_id,
                one.group_instance_id,
                one.client_id,
                one.client_host,
                protocols,
                one.session_timeout,
                one.session_timeout if rebalance_ms < 0 else rebalance_ms,
                assignment=bytes(one.assignment),
            )
            self._take(member)
        self.state = State.STABLE if self.members else State.EMPTY
        if len(self.members) > self.limits.max_size:
            self._rebalance()
        return self._out

    def take_over(
        self, members: Iterable[Member], *, generation: int, protocol_type: str, now_ms: int
    ) -> None:
        """Become a stable group of the members of a consumer group."""
        self._begin(now_ms)
        self.generation, self.protocol_type = generation, protocol_type
        for member in members:
            self._take(member)
        self.protocol_name, self.state = self._voted_protocol(), State.STABLE

    def rebalance(self, now_ms: int) -> Effects:
        """Let all members join again."""
        self._begin(now_ms)
        self._rebalance()
        return self._out

    # --- what it shows ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nobody is in it, or about to join."""
        return self.state is State.EMPTY and not self._pending

    def record(self, assignments: Mapping[str, bytes]) -> GroupMetadataValue:
        return GroupMetadataValue(
            protocol_type=self.protocol_type or "",
            generation=self.generation,
            protocol=self.protocol_name,
            leader=self.leader,
            members=[
                GroupMetadataValue.MemberMetadata(
                    member_id=one.member_id,
                    group_instance_id=one.instance_id,
                    client_id=one.client_id,
                    client_host=one.client_host,
                    rebalance_timeout=one.rebalance_timeout_ms,
                    session_timeout=one.session_timeout_ms,
                    subscription=one.metadata(self.protocol_name),
                    assignment=assignments.get(one.member_id, b""),
                )
                for one in self.members.values()
            ],
        )

    def assignments(self) -> dict[str, bytes]:
        return {one.member_id: one.assignment for one in self.members.values()}

    def waiting(self) -> Iterator[str]:
        """The members whose call is not answered yet."""
        return (
            one.member_id
            for one in self.members.values()
            if one.joining is not None or one.syncing is not None
        )

    # --- joining ----------------------------------------------------------------------------------

    def _refuse_join(self, join: Join) -> GroupError | None:
        if self.state is State.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        if not self._has_room(join.member_id):
            return GroupError.GROUP_MAX_SIZE_REACHED
        if not self._supports(join):
            return GroupError.INCONSISTENT_GROUP_PROTOCOL
        if join.member_id == NO_MEMBER:
            return None
        if join.member_id in self._pending:  # it was given to a member without an instance
            return None if join.instance_id is None else GroupError.UNKNOWN_MEMBER_ID
        error = self._refuse_identity(Identity(join.member_id, join.instance_id))
        return None if error is GroupError.NONE else error

    def _has_room(self, member_id: str) -> bool:
        """While members join, those who wait are counted: the last to come have no room, also if
        the limit was lowered.
        """
        limit, member = self.limits.max_size, self.members.get(member_id)
        if self.state is State.EMPTY:
            return member_id in self._pending or len(self._pending) < limit
        if self.state is State.PREPARING:
            if member is not None and member.joining is not None:
                return True
            return self._joined_count() < limit and (
                member_id != NO_MEMBER or len(self._pending) < limit
            )
        return member is not None or len(self.members) < limit

    def _supports(self, join: Join) -> bool:
        if self.state is State.EMPTY:
            return bool(join.protocol_type and join.protocols)
        if join.protocol_type != self.protocol_type:
            return False
        return not self._common_protocols().isdisjoint(one.name for one in join.protocols)

    def _join_new(self, join: Join, to: object) -> None:
        if join.instance_id is not None:
            if (old_id := self._static.get(join.instance_id)) is not None:
                self._replace(join, to, old_id)
            else:
                self._add(join, to, join.new_id)
        elif join.requires_id:
            self._pending[join.new_id] = self._note(self._now_ms + join.session_timeout_ms)
            self._answer(to, Joined(GroupError.MEMBER_ID_REQUIRED, join.new_id))
        else:
            self._add(join, to, join.new_id)

    def _join_again(self, join: Join, to: object) -> None:
        member = self.members[join.member_id]
        is_same = member.protocols == join.protocols
        is_leader = member.member_id == self.leader
        if self.state is State.PREPARING:
            self._update(member, join, to)
            self._join_completed_if_all_are_there()
        elif is_same and (self.state is State.COMPLETING or not is_leader):
            members = self._joined_members() if is_leader else ()
            self._answer(to, self._joined(member, members=members))
        else:  # a leader also joins again for what is not in its metadata, as a topic's partitions
            self._update(member, join, to)
            self._rebalance()

    def _add(self, join: Join, to: object, member_id: str) -> None:
        member = Member(
            member_id,
            join.instance_id,
            join.client_id,
            join.client_host,
            join.protocols,
            join.session_timeout_ms,
            join.rebalance_timeout_ms,
            is_new=True,
            joining=to,
        )
        if self.state is State.PREPARING and self._was_empty:
            self._new_member_added = True
        if not self.members:
            self.protocol_type = join.protocol_type
        self.members[member_id] = member
        self._pending.pop(member_id, None)
        if member.instance_id is not None:
            self._static[member.instance_id] = member_id
        self.leader = self.leader or member_id
        # It cannot send heartbeats before it has its id, and whether it is still there is not
        # known: if it is, it joins again.
        member.deadline_ms = self._note(self._now_ms + self.limits.new_member_join_timeout_ms)
        self._rebalance_or_complete_join()

    def _update(self, member: Member, join: Join, to: object) -> None:
        if member.joining is not None:  # a retry: nobody reads the earlier answer any more
            self._answer(member.joining, Joined(GroupError.UNKNOWN_MEMBER_ID, NO_MEMBER))
        member.protocols, member.joining = join.protocols, to
        member.session_timeout_ms = join.session_timeout_ms
        member.rebalance_timeout_ms = join.rebalance_timeout_ms

    def _replace(self, join: Join, to: object, old_id: str) -> None:
        """A static member came back, as its process was started again: it has a new id."""
        old = self.members[old_id]
        self._answer_join(old, Joined(GroupError.FENCED_INSTANCE_ID, old_id))
        self._answer_sync(old, Synced(GroupError.FENCED_INSTANCE_ID))
        member = self._renamed(old, join.new_id)
        self._update(member, join, to)
        if self.state is State.STABLE:
            if self._voted_protocol() != self.protocol_name:
                self._rebalance()
                return
            assert join.instance_id is not None, "it is static"
            then = Replaced(join.instance_id, join.new_id, old, join.can_skip_assignment)
            self._out.writes.append(Write(self.record(self.assignments()), then))
        elif self.state is State.COMPLETING:  # the leader may assign to the old id
            self._rebalance()
        else:
            self._join_completed_if_all_are_there()

    def _renamed(self, old: Member, new_id: str) -> Member:
        """Its place in the order of members is the old one's."""
        assert old.instance_id is not None, "it is static"
        member = Member(
            new_id,
            old.instance_id,
            old.client_id,
            old.client_host,
            old.protocols,
            old.session_timeout_ms,
            old.rebalance_timeout_ms,
            assignment=old.assignment,
        )
        self.members = {
            member.member_id if one is old else one_id: member if one is old else one
            for one_id, one in self.members.items()
        }
        self._static[old.instance_id] = new_id
        if self.leader == old.member_id:
            self.leader = new_id
        if old.member_id in self._unsynced:
            self._unsynced.discard(old.member_id)
            self._unsynced.add(new_id)
        self._keep_alive(member)
        return member

    def _finish_replacement(self, what: Replaced, error: GroupError) -> None:
        member = self.members[what.new_id]
        if self._static.get(what.instance_id) != what.new_id:
            return
        if error is not GroupError.NONE:
            self._answer_join(member, Joined(error, NO_MEMBER, self.generation))
            if self.state is State.STABLE:
                self._put_back(member, what.old)
            return
        is_leader = member.member_id == self.leader
        if what.can_skip_assignment:
            members = self._joined_members() if is_leader else ()
            answer = self._joined(member, members=members, skip_assignment=is_leader)
        else:  # an older client that is told to lead would assign anew: it is told its old id
            leader = what.old.member_id if is_leader else self.leader or NO_MEMBER
            answer = self._joined(member)._replace(leader=leader)
        if self.state is State.STABLE:
            self._answer_join(member, answer)

    def _put_back(self, member: Member, old: Member) -> None:
        back = self._renamed(member, old.member_id)
        back.protocols = old.protocols
        back.session_timeout_ms = old.session_timeout_ms
        back.rebalance_timeout_ms = old.rebalance_timeout_ms

    # --- rebalancing ------------------------------------------------------------------------------

    def _rebalance_or_complete_join(self) -> None:
        if self.state in _REBALANCES_FROM:
            self._rebalance()
        else:
            self._join_completed_if_all_are_there()

    def _rebalance(self) -> None:
        if self.state is State.COMPLETING:
            for member in self.members.values():
                member.assignment = b""
            self._answer_syncs(GroupError.REBALANCE_IN_PROGRESS)
        self._unsynced.clear()
        self._sync_deadline_ms = NEVER
        self._was_empty = self.state is State.EMPTY
        self.state = State.PREPARING
        if self._was_empty:
            delay_ms = self.limits.initial_rebalance_delay_ms
            self._new_member_added = False
            remaining_ms = max(self._rebalance_timeout_ms() - delay_ms, 0)
            self._set_join_phase(delay_ms, is_initial=True, remaining_ms=remaining_ms)
        elif self._all_have_joined():
            self._complete_join()
        else:
            self._set_join_phase(self._rebalance_timeout_ms())

    def _set_join_phase(
        self, delay_ms: int, *, is_initial: bool = False, remaining_ms: int = 0
    ) -> None:
        deadline_ms = self._note(self._now_ms + delay_ms)
        self._join_phase = _Joining(deadline_ms, is_initial, remaining_ms, delay_ms)

    def _end_join_phase(self, phase: _Joining) -> None:
        """A first rebalance is put off while members come."""
        if phase.is_initial and self._new_member_added and phase.remaining_ms:
            self._new_member_added = False
            delay_ms = min(self.limits.initial_rebalance_delay_ms, phase.remaining_ms)
            remaining_ms = max(phase.remaining_ms - phase.delay_ms, 0)
            self._set_join_phase(delay_ms, is_initial=True, remaining_ms=remaining_ms)
        else:
            self._complete_join()

    def _join_completed_if_all_are_there(self, *, even_initial: bool = False) -> None:
        """A first rebalance takes its time, except where a member is gone."""
        is_initial = self._was_empty and not even_initial
        if self.state is State.PREPARING and not is_initial and self._all_have_joined():
            self._complete_join()

    def _complete_join(self) -> None:
        """Who has not joined is removed, if it is not static; the others are a generation."""
        self._join_phase = None
        for member in list(self.members.values()):
            if member.joining is None and member.instance_id is None:
                self._remove(member.member_id)
        if self.members and not self._elect_leader():
            self._set_join_phase(self._rebalance_timeout_ms())  # until their sessions end
            return
        self.generation += 1
        self._unsynced.clear()
        if self.members:
            self._begin_generation()
            return
        self.protocol_name, self.state = None, State.EMPTY
        self._out.writes.append(Write(self.record({}), None))

    def _begin_generation(self) -> None:
        self.protocol_name, self.state = self._voted_protocol(), State.COMPLETING
        members = self._joined_members()
        for member in self.members.values():
            is_leader = member.member_id == self.leader
            self._answer_join(member, self._joined(member, members=members if is_leader else ()))
            self._keep_alive(member)
            member.is_new = False
            self._unsynced.add(member.member_id)
        self._sync_deadline_ms = self._note(self._now_ms + self._rebalance_timeout_ms())

    def _elect_leader(self) -> bool:
        """The leader stays, if it has joined; else the first that has is it."""
        leader = self.members.get(self.leader or NO_MEMBER)
        if leader is None or leader.joining is None:
            joined = (one.member_id for one in self.members.values() if one.joining is not None)
            leader_id = next(joined, None)
            if leader_id is None:
                return False
            self.leader = leader_id
        return True

    def _all_have_joined(self) -> bool:
        return not self._pending and self._joined_count() == len(self.members)

    def _joined_count(self) -> int:
        return sum(one.joining is not None for one in self.members.values())

    def _rebalance_timeout_ms(self) -> int:
        return max((one.rebalance_timeout_ms for one in self.members.values()), default=0)

    def _common_protocols(self) -> set[str]:
        """Those that every member knows."""
        names = Counter(
            name for one in self.members.values() for name in {each.name for each in one.protocols}
        )
        return {name for name, count in names.items() if count == len(self.members)}

    def _voted_protocol(self) -> str:
        """Each member's vote is for its first that all know."""
        common = self._common_protocols()
        votes = Counter(
            next(each.name for each in one.protocols if each.name in common)
            for one in self.members.values()
        )
        return votes.most_common(1)[0][0]

    # --- syncing ----------------------------------------------------------------------------------

    def _refuse_sync(self, sync: Sync) -> GroupError:
        who = Identity(sync.member_id, sync.instance_id)
        error = self._refuse_member(who, sync.generation)
        if error is not GroupError.NONE:
            return error
        for given, own in (
            (sync.protocol_type, self.protocol_type),
            (sync.protocol_name, self.protocol_name),
        ):
            if given is not None and own is not None and given != own:
                return GroupError.INCONSISTENT_GROUP_PROTOCOL
        if self.state is State.PREPARING:
            return GroupError.REBALANCE_IN_PROGRESS
        return GroupError.NONE

    def _note_synced(self, member_id: str) -> None:
        self._unsynced.discard(member_id)
        if not self._unsynced:
            self._sync_deadline_ms = NEVER

    def _end_sync_phase(self) -> None:
        for member_id in list(self._unsynced):
            self._dismiss(self.members[member_id])
        self._rebalance()

    def _assign(self, assignments: Mapping[str, bytes], error: GroupError) -> None:
        if error is not GroupError.NONE:
            for member in self.members.values():
                member.assignment = b""
            self._answer_syncs(error)
            self._rebalance()
            return
        for member in self.members.values():
            member.assignment = assignments.get(member.member_id, b"")
        self.state = State.STABLE
        self._answer_syncs(GroupError.NONE)

    def _answer_syncs(self, error: GroupError) -> None:
        for member in self.members.values():
            is_good = error is GroupError.NONE
            answer = self._synced(member) if is_good else Synced(error)
            if self._answer_sync(member, answer):
                self._keep_alive(member)

    # --- members ----------------------------------------------------------------------------------

    def _refuse_identity(self, who: Identity) -> GroupError:
        if who.instance_id is not None:
            current = self._static.get(who.instance_id)
            if current is None:
                return GroupError.UNKNOWN_MEMBER_ID
            if current != who.member_id:
                return GroupError.FENCED_INSTANCE_ID
        known = who.member_id in self.members
        return GroupError.NONE if known else GroupError.UNKNOWN_MEMBER_ID

    def _refuse_member(self, who: Identity, generation: int) -> GroupError:
        if self.state is State.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        error = self._refuse_identity(who)
        if error is GroupError.NONE and generation != self.generation:
            return GroupError.ILLEGAL_GENERATION
        return error

    def _leave(self, who: Identity) -> GroupError:
        if self.state is State.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        member_id = who.member_id
        if member_id == NO_MEMBER:  # an admin removes a static member
            member_id = self._static.get(who.instance_id or "", NO_MEMBER)
        elif member_id in self._pending:
            self._remove(member_id)
            return GroupError.NONE
        elif (error := self._refuse_identity(who)) is not GroupError.NONE:
            return error
        if member_id not in self.members:
            return GroupError.UNKNOWN_MEMBER_ID
        self._dismiss(self.members[member_id])
        return GroupError.NONE

    def _end_session(self, member: Member) -> None:
        if self.members.get(member.member_id) is not member or member.deadline_ms > self._now_ms:
            return  # an expiry before it removed it, or was followed by an answer to it
        if not member.is_new and (member.joining is not None or member.syncing is not None):
            member.deadline_ms = NEVER  # it waits for us: its answer begins its session anew
            return
        self._dismiss(member)
        if self.state in (State.COMPLETING, State.STABLE):
            self._rebalance()
        else:
            self._join_completed_if_all_are_there(even_initial=True)

    def _dismiss(self, member: Member) -> None:
        self._answer_join(member, Joined(GroupError.UNKNOWN_MEMBER_ID, NO_MEMBER))
        self._answer_sync(member, Synced(GroupError.UNKNOWN_MEMBER_ID))
        self._remove(member.member_id)

    def _remove(self, member_id: str) -> None:
        self._pending.pop(member_id, None)
        self._unsynced.discard(member_id)
        member = self.members.pop(member_id, None)
        if member is None:
            return
        if member.instance_id is not None and self._static.get(member.instance_id) == member_id:
            del self._static[member.instance_id]
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)

    def _take(self, member: Member) -> None:
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self._static[member.instance_id] = member.member_id
        self._keep_alive(member)

    def _keep_alive(self, member: Member) -> None:
        member.deadline_ms = self._note(self._now_ms + member.session_timeout_ms)

    # --- answers ----------------------------------------------------------------------------------

    def _joined_members(self) -> list[JoinedMember]:
        return [
            JoinedMember(one.member_id, one.instance_id, one.metadata(self.protocol_name))
            for one in self.members.values()
        ]

    def _joined(
        self,
        member: Member,
        *,
        members: Sequence[JoinedMember] = (),
        skip_assignment: bool = False,
    ) -> Joined:
        return Joined(
            GroupError.NONE,
            member.member_id,
            self.generation,
            self.protocol_type,
            self.protocol_name,
            self.leader or NO_MEMBER,
            members,
            skip_assignment,
        )

    def _synced(self, member: Member) -> Synced:
        return Synced(GroupError.NONE, self.protocol_type, self.protocol_name, member.assignment)

    def _answer_join(self, member: Member, body: Joined) -> None:
        if member.joining is not None:
            self._answer(member.joining, body)
            member.joining = None

    def _answer_sync(self, member: Member, body: Synced) -> bool:
        if member.syncing is None:
            return False
        self._answer(member.syncing, body)
        member.syncing = None
        return True

    def _answer(self, to: object, body: Joined | Synced) -> None:
        self._out.answers.append(Answer(to, body))

    # --- time -------------------------------------------------------------------------------------

    def _begin(self, now_ms: int) -> None:
        self._now_ms, self._out = now_ms, Effects()

    def _note(self, deadline_ms: float) -> float:
        self.due_ms = min(self.due_ms, deadline_ms)
        return deadline_ms

    def _deadlines(self) -> Iterator[float]:
        yield NEVER
        yield self._sync_deadline_ms
        if self._join_phase is not None:
            yield self._join_phase.deadline_ms
        yield from self._pending.values()
        for member in self.members.values():
            yield member.deadline_ms
