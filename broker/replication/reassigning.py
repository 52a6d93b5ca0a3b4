"""How a partition comes to have other replicas (KIP-455): grow, wait, hand over, shrink. Pure.

* What there is to be is in the set itself (`ReplicaSet.target`), so that whoever leads goes on.
* It grows first, and shrinks once all that are to stay are in sync: in between there is never one
  replica fewer than before. Back to what there was it shrinks at once: one of those may be dead.
* A leader that is not to stay hands over first.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from msgspec.structs import replace

from tierlog.manifest.replica_sets import ReplicaSet


class Grow(NamedTuple):
    replicas: tuple[int, ...]


class Shrink(NamedTuple):
    replicas: tuple[int, ...]


class HandOver(NamedTuple):
    node_ids: tuple[int, ...]


def next_step(
    now: ReplicaSet, *, leader: int, in_sync: AbstractSet[int]
) -> Grow | Shrink | HandOver | None:
    """What the leader does next; None: nothing, or it waits. All are node ids."""
    target = now.target
    if not target:
        return None
    missing = [one for one in target if one not in now.replicas]
    if missing:
        return Grow((*now.replicas, *missing))
    if set(target) != set(now.original) and not in_sync >= set(target):
        return None
    if leader not in target:
        return HandOver(target)
    return Shrink(target)


def begun(now: ReplicaSet, target: tuple[int, ...]) -> ReplicaSet:
    """The set by which it begins, but for the replicas that are added. If only their order is to
    change it has ended.
    """
    if set(target) == set(now.replicas):
        return ended(now, target)
    return replace(now, target=target, original=now.original or now.replicas)


def ended(now: ReplicaSet, target: tuple[int, ...]) -> ReplicaSet:
    """The set by which it ends, but for the replicas that are removed."""
    order = dict.fromkeys((*target, *now.replicas))
    return replace(now, replicas=tuple(order), target=(), original=())


def adding(now: ReplicaSet) -> list[int]:
    return [one for one in now.target if one not in now.original]


def removing(now: ReplicaSet) -> list[int]:
    return [one for one in now.replicas if now.target and one not in now.target]
