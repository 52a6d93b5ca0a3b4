import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tierlog.api.console import samples
from tierlog.api.console.samples import Sample, Sampler, series
from tierlog.api.http.metrics.registry import HttpMetrics
from tierlog.api.serving.kafka_counts import KafkaCounts
from tierlog.record_format.errors import CorruptIndex


def sample(at_ms: int, produced: float, *, lag: int = 0) -> Sample:
    return Sample(at_ms, produced, produced / 10, produced * 2, 0.0, lag, lag * 2)


def test_rates_are_computed_from_adjacent_samples() -> None:
    found = series([sample(0, 0), sample(5000, 500), sample(15_000, 1500, lag=7)], after_ms=-1)
    assert found.at_ms == [5000, 15_000]
    assert found.produced_bytes_per_s == [100, 100]
    assert found.produced_records_per_s == [10, 10]
    assert found.hot_fetched_bytes_per_s == [200, 200]
    assert found.lag_bytes == [0, 7]
    assert found.lag_ms == [0, 14]


def test_only_new_samples_are_returned() -> None:
    ring = [sample(at * 1000, at) for at in range(10)]
    assert series(ring, after_ms=7000).at_ms == [8000, 9000]
    assert series(ring, after_ms=9000).at_ms == []


def test_a_clock_set_back_makes_no_rate() -> None:
    ring = [sample(5000, 0), sample(4000, 10), sample(6000, 20)]
    assert series(ring, after_ms=0).at_ms == [6000]


def test_a_client_with_a_time_in_the_future_gets_all_samples() -> None:
    """The clock was ahead at its last request."""
    ring = [sample(at * 1000, at) for at in range(10)]
    assert series(ring, after_ms=10_000).at_ms == series(ring, after_ms=0).at_ms


def test_samples_in_the_future_are_dropped() -> None:
    times = iter([1000, 2000, 9_000_000, 9_000_001, 3000, 4000])
    context: Any = SimpleNamespace(
        broker=_Broker(), metrics=HttpMetrics(), kafka_counts=KafkaCounts()
    )
    context.broker.storage_report = lambda: SimpleNamespace(
        offload_lag_bytes=0, offload_lag_ms=0, topics=[]
    )
    context.settings = SimpleNamespace(clock=lambda: next(times))

    async def read(call: Any) -> Any:
        return call()

    async def take_six() -> Sampler:
        sampler = Sampler(context, interval_ms=0)
        for _ in range(6):
            await sampler.take()
        return sampler

    context.read = read
    assert [sample.at_ms for sample in asyncio.run(take_six()).samples] == [1000, 2000, 3000, 4000]


def test_without_samples_the_series_is_empty() -> None:
    assert series([], after_ms=0).at_ms == []
    assert series([sample(1, 1)], after_ms=0).at_ms == []


RING = 20


class _Broker:
    """Fails every second time."""

    def __init__(self) -> None:
        self.asked = 0
        self.groups = SimpleNamespace(all_groups=list)
        self.enough = asyncio.Event()

    def list_topics(self) -> list[Any]:
        return []

    def storage_report(self) -> Any:
        self.asked += 1
        if self.asked > 2 * RING + 20:
            self.enough.set()
        if self.asked % 2:
            raise RuntimeError("a bug") if self.asked % 3 else CorruptIndex("bad", file="f")
        return SimpleNamespace(offload_lag_bytes=self.asked, offload_lag_ms=0, topics=[])


def test_a_sample_that_fails_is_left_out_and_the_ring_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "RING", RING)
    context: Any = SimpleNamespace(
        broker=_Broker(), metrics=HttpMetrics(), kafka_counts=KafkaCounts()
    )
    context.settings = SimpleNamespace(clock=lambda: context.broker.asked)

    async def read(call: Any) -> Any:
        return call()

    async def sample_for_a_while() -> Sampler:
        sampler = Sampler(context, interval_ms=0)
        with capture_logs():
            task = asyncio.create_task(sampler.keep_sampling())
            await asyncio.wait_for(context.broker.enough.wait(), 20)
            task.cancel()
        return sampler

    context.read = read
    sampler = asyncio.run(sample_for_a_while())
    assert len(sampler.samples) == RING
    assert all(sample.lag_bytes % 2 == 0 for sample in sampler.samples)
