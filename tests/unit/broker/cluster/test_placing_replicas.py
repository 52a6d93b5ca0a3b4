"""Where the replicas of new partitions go."""

from __future__ import annotations

from collections import Counter

from tierlog.broker.cluster.placement import place_replicas

LEADERS = {("t", number): number % 3 for number in range(12)}


def test_each_broker_has_one_and_they_are_spread() -> None:
    placed = place_replicas(LEADERS, {0: "", 1: "", 2: ""}, {}, factor=2)
    assert all(len(set(nodes)) == 2 for nodes in placed.values())
    assert [nodes[0] for nodes in placed.values()] == list(LEADERS.values())
    assert set(Counter(one for nodes in placed.values() for one in nodes).values()) == {8}


def test_zones_are_taken_in_turn() -> None:
    zones = {0: "x", 1: "x", 2: "y", 3: "z"}
    leaders = {("t", number): number % 4 for number in range(8)}
    placed = place_replicas(leaders, zones, {}, factor=3)
    assert all({zones[one] for one in nodes} == {"x", "y", "z"} for nodes in placed.values())


def test_a_broker_that_has_many_gets_none() -> None:
    placed = place_replicas({("t", 0): 0}, {0: "", 1: "", 2: ""}, {1: 100}, factor=2)
    assert placed == {("t", 0): (0, 2)}
