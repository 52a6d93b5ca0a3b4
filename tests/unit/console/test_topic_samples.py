from tierlog.api.console.rates import RING
from tierlog.api.console.topic_samples import (
    Read,
    TopicRing,
    TopicRings,
    TopicSample,
    lags_of,
    sample_topics,
    topic_series,
)
from tierlog.broker.group_coordinator.groups import OffsetState


def sample(at_ms: int, produced: int = 0, read: int = 0) -> TopicSample:
    return TopicSample(at_ms, produced, read, 100 * produced, 100 * read, 1000, 2000, 7)


def test_rates_of_a_topic_are_computed_from_adjacent_samples() -> None:
    samples = [sample(0), sample(5000, 50, 10), sample(10_000, 150, 10)]
    found = topic_series(samples, after_ms=0)
    assert found.at_ms == [5000, 10_000]
    assert found.produced_records_per_s == [10, 20]
    assert found.read_records_per_s == [2, 0]
    assert found.produced_bytes_per_s == [1000, 2000]
    assert found.read_bytes_per_s == [200, 0]
    assert (found.hot_bytes, found.cold_bytes, found.lag) == ([1000] * 2, [2000] * 2, [7] * 2)


def test_a_ring_keeps_the_newest_samples_in_bounded_memory() -> None:
    ring = TopicRing()
    for at in range(5 * RING):
        ring.add_sample(sample(at, at))
        assert len(ring._numbers) < 2 * RING * len(TopicSample._fields)
    assert [one.at_ms for one in ring.samples()] == list(range(4 * RING, 5 * RING))


def test_a_ring_begins_anew_when_the_clock_is_set_back() -> None:
    ring = TopicRing()
    for at in (5, 6, 2, 3):
        ring.add_sample(sample(at))
    assert [one.at_ms for one in ring.samples()] == [2, 3]


def test_topics_in_use_have_rings_and_the_rest_only_once_they_are_looked_at() -> None:
    rings = TopicRings(most=2)
    rings.add_samples({"busy": sample(1), "read": sample(1), "idle": sample(1)})
    rings.add_samples({"busy": sample(2, 1), "read": sample(2, 0, 1), "idle": sample(2)})
    assert set(rings._rings) == {"busy", "read"}
    assert [one.at_ms for one in rings.look_at("idle")] == [2]
    assert set(rings._rings) == {"read", "idle"}
    rings.add_samples({"idle": sample(3)})
    assert set(rings._rings) == {"idle"}, "the others were deleted"
    assert [one.at_ms for one in rings.look_at("idle")] == [2, 3]


def test_the_lag_of_a_topic_is_that_of_the_group_furthest_behind() -> None:
    def offset(topic: str, partition: int, lag: int) -> OffsetState:
        return OffsetState(topic, partition, 0, lag, lag, "")

    groups = [
        ("slow", [offset("a", 0, 3), offset("a", 1, 4)]),
        ("fast", [offset("a", 0, 5), offset("b", 0, 1)]),
    ]
    assert lags_of(groups) == {"a": 7, "b": 1}
    assert sample_topics([], [], lags_of(groups), at_ms=1, read=Read({}, {})) == {}
