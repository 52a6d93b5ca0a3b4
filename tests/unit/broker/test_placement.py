"""Who is to lead what: pure plans over any distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tierlog.broker.cluster.placement import Move, balance, drain, place_new
from tierlog.broker.data_folder import TopicIdPartition

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
    for place, source, target in moves:
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
