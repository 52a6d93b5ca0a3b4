from prometheus_client import CollectorRegistry, Counter

from api.console.samples import Sample, series, totals


def sample(at_ms: int, produced: float, *, lag: int = 0) -> Sample:
    return Sample(at_ms, produced, produced / 10, produced * 2, 0.0, lag, lag * 2)


def test_rates_are_made_of_neighbours() -> None:
    found = series([sample(0, 0), sample(5000, 500), sample(15_000, 1500, lag=7)], after_ms=-1)
    assert found.at_ms == [5000, 15_000]
    assert found.produced_bytes_per_s == [100, 100]
    assert found.produced_records_per_s == [10, 10]
    assert found.hot_fetched_bytes_per_s == [200, 200]
    assert found.lag_bytes == [0, 7]
    assert found.lag_ms == [0, 14]


def test_only_what_is_new_is_told() -> None:
    ring = [sample(at * 1000, at) for at in range(10)]
    assert series(ring, after_ms=7000).at_ms == [8000, 9000]
    assert series(ring, after_ms=9000).at_ms == []


def test_a_clock_that_went_back_makes_no_rate() -> None:
    ring = [sample(5000, 0), sample(4000, 10), sample(6000, 20)]
    assert series(ring, after_ms=0).at_ms == [6000]


def test_nothing_measured_yet_is_nothing_told() -> None:
    assert series([], after_ms=0).at_ms == []
    assert series([sample(1, 1)], after_ms=0).at_ms == []


def test_counters_are_read_by_their_label() -> None:
    registry = CollectorRegistry()
    plain = Counter("plain", "", registry=registry)
    tiers = Counter("tiers", "", ("tier",), registry=registry)
    plain.inc(3)
    tiers.labels("hot").inc(5)
    tiers.labels("cold").inc(7)
    assert totals(plain) == {"": 3}
    assert totals(tiers) == {"hot": 5, "cold": 7}
