"""Who is to lead what: pure plans over any distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tierlog.broker.cluster.placement import (
    Move,
    balance,
    balance_replicas,
    drain,
    drain_replicas,
    place_new,
)
from tierlog.broker.data_folder.data_folder import TopicIdPartition

Led = dict[int, list[TopicIdPartition]]


@st.composite
def distributions(draw: st.DrawFn) -> Led:
    """Some topics, spread in any way over some brokers."""
    nodes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True))
    sizes = draw(st.lists(st.integers(1, 9), max_size=5))
    led: Led = {node_id: [] for node_id in nodes}
    for topic, size in enumerate(sizes):
        for number in range(size):
            led[draw(st.sampled_from(nodes))].append((f"topic-{topic}", number))
    return led


def spans(led: Mapping[int, Sequence[TopicIdPartition]]) -> tuple[int, int]:
    """By how much brokers differ: most in a topic, and over all."""
    totals = [len(places) for places in led.values()]
    topics = {topic_id for places in led.values() for topic_id, _ in places}
    counts = [Counter(topic_id for topic_id, _ in places) for places in led.values()]
    of_topics = [[count[one] for count in counts] for one in topics]
    return max((max(one) - min(one) for one in of_topics), default=0), max(totals) - min(totals)


def carried_out(led: Led, moves: Sequence[Move]) -> Led:
    after = {node_id: list(places) for node_id, places in led.items()}
    for place, source, target, *_ in moves:
        after[source].remove(place)
        after[target].append(place)
    return after


@given(distributions())
def test_after_a_balance_each_topic_is_spread_and_so_are_all(led: Led) -> None:
    moves = balance(led)
    after = carried_out(led, moves)
    assert max(spans(after)) <= 1
    assert len({move.place for move in moves}) == len(moves), "none moves twice"
    assert balance(after) == []


@given(distributions())
def test_what_is_in_balance_stays_where_it_is(led: Led) -> None:
    if max(spans(led)) <= 1:
        assert balance(led) == []


def test_a_topic_that_one_broker_has_alone_is_spread_though_all_lead_as_many() -> None:
    led = {node: [(f"topic-{node}", number) for number in range(6)] for node in range(3)}
    assert spans(led) == (6, 0)
    moves = balance(led)
    assert spans(carried_out(led, moves)) == (0, 0)
    assert len(moves) == 12, "two thirds of each topic, and nothing else"


@given(distributions(), st.integers(1, 12))
def test_a_new_topic_is_spread_over_all_brokers_also_over_a_new_one(led: Led, size: int) -> None:
    placed = place_new([("new", number) for number in range(size)], led | {10: []})
    counts = Counter(placed.values())
    of_each = [counts[node_id] for node_id in led | {10: []}]
    assert max(of_each) - min(of_each) <= 1


def test_a_topic_of_one_partition_goes_to_the_broker_that_leads_fewest() -> None:
    assert place_new([("new", 0)], {0: [("a", 0)], 1: [], 2: [("a", 1)]}) == {("new", 0): 1}


@given(distributions())
def test_a_drain_leaves_nothing_and_spreads_what_it_gives_away(led: Led) -> None:
    even = carried_out(led, balance(led))
    drained, *others = sorted(led)
    moves = drain(drained, even)
    after = carried_out(even, moves)
    if others:
        assert after.pop(drained) == []
        assert spans(after)[0] <= 1
    else:
        assert moves == []


# --- replicas -------------------------------------------------------------------------------------

NO_ZONES = dict.fromkeys(range(5), "")


@st.composite
def replicated(draw: st.DrawFn) -> dict[TopicIdPartition, tuple[int, ...]]:
    """Partitions of 5 brokers, with two or three replicas each."""
    ids = st.lists(st.integers(0, 4), min_size=2, max_size=3, unique=True).map(tuple)
    return {("t", number): one for number, one in enumerate(draw(st.lists(ids, max_size=20)))}


def span(counts: Counter[int], nodes: Iterable[int]) -> int:
    found = [counts[one] for one in nodes]
    return max(found) - min(found)


@given(replicated())
def test_after_a_balance_each_broker_has_as_many_replicas_and_no_partition_one_twice(
    sets: dict[TopicIdPartition, tuple[int, ...]],
) -> None:
    after = dict(sets)
    for move in balance_replicas(sets, NO_ZONES):
        assert move.source in after[move.place]
        after[move.place] = move.replicas
    counts = Counter(one for replicas in after.values() for one in replicas)
    assert span(counts, range(5)) <= 1
    for place, replicas in after.items():
        assert len(set(replicas)) == len(replicas) == len(sets[place])
    assert balance_replicas(after, NO_ZONES) == []


@given(replicated(), st.sets(st.integers(0, 4)))
def test_a_drain_takes_each_replica_that_another_broker_may_have(
    sets: dict[TopicIdPartition, tuple[int, ...]], may_have: set[int]
) -> None:
    after = dict(sets)
    for move in drain_replicas(0, sets, NO_ZONES, may_have=may_have):
        after[move.place] = move.replicas
    for place, replicas in after.items():
        assert len(set(replicas)) == len(replicas) == len(sets[place])
        if 0 in replicas:
            assert may_have - {0} <= set(replicas)
        else:
            assert set(replicas) - set(sets[place]) <= may_have


def test_replicas_go_to_a_zone_that_has_none_and_a_balance_keeps_zones_apart() -> None:
    zones = {0: "x", 1: "x", 2: "y", 3: "y", 4: "x"}
    place = ("t", 0)
    (move,) = drain_replicas(2, {place: (0, 2)}, zones, may_have=[1, 3])
    assert (move.target, move.replicas) == (3, (0, 3))
    (move,) = drain_replicas(2, {place: (0, 2)}, zones, may_have=[1])
    assert move.replicas == (0, 1)
    crowded = {("t", number): (0, 2) for number in range(4)}
    for move in balance_replicas(crowded, zones):
        assert {zones[one] for one in move.replicas} == {"x", "y"}
