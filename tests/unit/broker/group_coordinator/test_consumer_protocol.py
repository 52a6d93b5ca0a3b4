"""What each member gets where the broker assigns for members: Kafka's documented examples."""

from tierlog.broker.group_coordinator.consumer_protocol import (
    COOPERATIVE,
    RANGE,
    ROUND_ROBIN,
    Subscription,
    assign,
    encode_subscription,
    read_subscription,
)

SIZES = {"t0": 3, "t1": 3}


def wanted(**topics: list[str]) -> dict[str, Subscription]:
    return {name: Subscription(frozenset(one), (), None) for name, one in topics.items()}


def test_a_member_gets_a_range_of_each_topic() -> None:
    both = wanted(c0=["t0", "t1"], c1=["t0", "t1"])
    assert assign(RANGE, both, lambda topic: list(range(SIZES[topic]))) == {
        "c0": {"t0": [0, 1], "t1": [0, 1]},
        "c1": {"t0": [2], "t1": [2]},
    }


def test_partitions_go_round_to_those_that_want_their_topic() -> None:
    sizes = {"t0": 1, "t1": 2, "t2": 3, "gone": 0}
    some = wanted(c0=["t0"], c1=["t0", "t1"], c2=["t0", "t1", "t2", "gone"])
    assert assign(ROUND_ROBIN, some, lambda topic: list(range(sizes[topic]))) == {
        "c0": {"t0": [0]},
        "c1": {"t1": [0]},
        "c2": {"t1": [1], "t2": [0, 1, 2]},
    }


def test_a_cooperative_member_gets_nothing_that_another_still_has() -> None:
    before = wanted(c0=["t0"], c1=["t0"])
    before["c1"] = before["c1"]._replace(owned=(("t0", 0), ("t0", 1), ("t0", 2)))
    after = {**before, "c1": before["c1"]._replace(owned=(("t0", 2),))}
    assert assign(COOPERATIVE, before, lambda _: [0, 1, 2]) == {"c0": {"t0": []}, "c1": {"t0": [2]}}
    assert assign(COOPERATIVE, after, lambda _: [0, 1, 2]) == {
        "c0": {"t0": [0, 1]},
        "c1": {"t0": [2]},
    }


def test_a_subscription_says_that_its_member_has_nothing() -> None:
    """librdkafka's sticky assignor ends its process where a member does not say what it has."""
    found = encode_subscription(["b", "a"])
    assert found[:2] == b"\0\1"
    assert read_subscription(found) == Subscription(frozenset("ab"), (), None)
