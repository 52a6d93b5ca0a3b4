"""What a leader does next for a partition that is to have other replicas."""

from __future__ import annotations

import pytest

from tierlog.broker.replicas.replica import as_version
from tierlog.broker.replication.in_sync import InForce
from tierlog.broker.replication.reassigning import (
    Grow,
    HandOver,
    Shrink,
    adding,
    begun,
    ended,
    next_step,
    removing,
)
from tierlog.manifest.replica_sets import ReplicaSet


def one(replicas: tuple[int, ...], target: tuple[int, ...] = (), **given: object) -> ReplicaSet:
    return ReplicaSet(
        topic_id="t",
        partition=0,
        version=4,
        leader_epoch=2,
        leader="a.0",
        replicas=replicas,
        in_sync=("a.0", "b.0"),
        target=target,
        **given,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("now", "in_sync", "step"),
    [
        (one((0, 1)), {0, 1}, None),
        (one((0, 1), (2, 0)), {0, 1}, Grow((0, 1, 2))),
        (one((0, 1, 2), (2, 0)), {0, 1}, None),
        (one((0, 1, 2), (2, 0)), {0, 1, 2}, Shrink((2, 0))),
        (one((0, 1, 2), (2, 1)), {0, 1, 2}, HandOver((2, 1))),
        (one((0, 1, 2), (2, 1)), {0, 1}, None),
        (one((0, 1), (1, 0)), {0, 1}, Shrink((1, 0))),
    ],
)
def test_it_grows_waits_hands_over_and_shrinks(
    now: ReplicaSet, in_sync: set[int], step: object
) -> None:
    assert next_step(now, leader=0, in_sync=in_sync) == step


def test_a_version_that_ends_it_has_the_wanted_order() -> None:
    before = one((0, 1, 2), (2, 0), original=(0, 1))
    assert (adding(before), removing(before)) == ([2], [1])
    after = InForce(5, 2, "a.0", frozenset({0, 2}), frozenset({"a.0", "c.0"}))
    last = as_version(after, ended(before, (2, 0)), nonce="n")
    assert (last.replicas, last.target, last.original) == ((2, 0), (), ())
    still = as_version(after._replace(replicas=frozenset({0, 1, 2})), before, nonce="n")
    assert (still.replicas, still.target, still.original) == ((2, 0, 1), (2, 0), (0, 1))


def test_one_that_only_adds_goes_on_until_what_is_added_is_in_sync() -> None:
    grown = one((0, 1, 2), (2, 0, 1), original=(0, 1))
    assert begun(one((0, 1)), (2, 0, 1)) == one((0, 1), (2, 0, 1), original=(0, 1))
    assert (adding(grown), removing(grown)) == ([2], [])
    assert next_step(grown, leader=0, in_sync={0, 1}) is None
    assert next_step(grown, leader=0, in_sync={0, 1, 2}) == Shrink((2, 0, 1))


def test_one_that_goes_back_shrinks_at_once_and_a_new_order_is_one_version() -> None:
    back = one((0, 1, 2), (0, 1), original=(0, 1))
    assert (adding(back), removing(back)) == ([], [2])
    assert next_step(back, leader=0, in_sync={0}) == Shrink((0, 1))
    assert next_step(back, leader=2, in_sync={0, 2}) == HandOver((0, 1))
    assert begun(one((0, 1)), (1, 0)) == one((1, 0))


def test_replicas_keep_their_order_and_new_ones_come_last() -> None:
    after = InForce(5, 2, "a.0", frozenset({0, 3, 1, 2}), frozenset({"a.0"}))
    assert as_version(after, one((2, 0, 1)), nonce="n").replicas == (2, 0, 1, 3)
