"""How a member of a consumer group comes from the partitions it has to those it is to have: Kafka's
CurrentAssignmentBuilder (KIP-848), a pure decision.

* A partition is given to a member only when no other has it any more (`is_free`). A member first
  says that it has given up what it must; only then it goes to the target's epoch.

    the member is                 and                              it becomes
    Stable                        at the target's epoch            what it is *
    Stable                        at an earlier one                the next assignment
    UnrevokedPartitions           still owns what it must give up  what it is *
    UnrevokedPartitions           owns none of it                  the next assignment
    UnreleasedPartitions          -                                the next assignment
    Unknown (a later Kafka's)     owns nothing                     the next assignment

    the next assignment: it has what is not to have, and        UnrevokedPartitions, same epoch
                           (does not say that it gave it up)
                         else something of it is not free       UnreleasedPartitions, target's epoch
                         else                                   Stable, target's epoch

    *  without the topics that it no longer reads, if its subscription changed just now
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tierlog.broker.group_coordinator.assignors import Target, TopicPartition
from tierlog.broker.group_coordinator.consumer_members import (
    Assignment,
    ConsumerMember,
    MemberState,
)
from tierlog.broker.group_coordinator.group_events import GroupError
from tierlog.record_format.errors import GroupRefused


class Goal(NamedTuple):
    """Where a member is to come to. `read`: the ids of the topics that it reads."""

    epoch: int
    target: Target
    read: frozenset[bytes]
    is_new_subscription: bool = False


def reconcile(
    member: ConsumerMember,
    goal: Goal,
    *,
    owned: Target | None,
    is_free: Callable[[TopicPartition], bool],
) -> ConsumerMember:
    """`owned`: what the member says that it has; None if it does not say. Raises GroupRefused."""
    state = member.state
    if state is MemberState.UNKNOWN:
        if owned is None or owned:
            raise GroupRefused(GroupError.FENCED_MEMBER_EPOCH, "the member's state is unknown")
        return _next(member._replace(epoch=goal.epoch), goal, owned, is_free)
    stays = state is MemberState.STABLE and member.epoch == goal.epoch
    if state is MemberState.UNREVOKED and _owns(owned, member.revoking):
        stays = True
    if not stays:
        return _next(member, goal, owned, is_free)
    return _narrowed(member, goal, owned) if goal.is_new_subscription else member


def _owns(owned: Target | None, places: Assignment) -> bool:
    return owned is None or not owned.isdisjoint(places)


def _narrowed(member: ConsumerMember, goal: Goal, owned: Target | None) -> ConsumerMember:
    kept = {place: at for place, at in member.assigned.items() if place[0] in goal.read}
    if len(kept) == len(member.assigned):
        return member
    gone = {place: at for place, at in member.assigned.items() if place not in kept}
    revoking = {**member.revoking, **gone}
    if _owns(owned, revoking):
        return member.moved_to(member.epoch, MemberState.UNREVOKED, kept, revoking)
    return member.moved_to(member.epoch, member.state, kept, member.revoking)


def _next(
    member: ConsumerMember,
    goal: Goal,
    owned: Target | None,
    is_free: Callable[[TopicPartition], bool],
) -> ConsumerMember:
    target = {place for place in goal.target if place[0] in goal.read}
    kept = {place: at for place, at in member.assigned.items() if place in target}
    revoking = {place: at for place, at in member.assigned.items() if place not in target}
    if revoking and _owns(owned, revoking):
        return member.moved_to(member.epoch, MemberState.UNREVOKED, kept, revoking)
    wanted = target.difference(kept)
    # What it gave up itself just now is free, too: one member at a time has a partition.
    free = {place for place in wanted if is_free(place) or place in member.revoking}
    state = MemberState.STABLE if free == wanted else MemberState.UNRELEASED
    return member.moved_to(goal.epoch, state, kept | dict.fromkeys(free, goal.epoch), {})
