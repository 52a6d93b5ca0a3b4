"""Throughput and lag over the last hour: a ring buffer of samples, taken in the background.

* Bounded: `RING` samples of a few numbers. A request reads the ring and measures nothing.
* Sampling takes at most one percent of the time: a broker whose tens of thousands of partitions
  take 100 ms to sum up is sampled every 10 s.
* Samples hold totals; rates are computed on request from adjacent samples, so that a late or
  missing sample causes no false peak.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import msgspec
import structlog

from tierlog.api.console.rates import RING, new_pairs, rate
from tierlog.api.console.topic_pages import live_topics
from tierlog.api.console.topic_samples import (
    Read,
    TopicRings,
    TopicSample,
    lags_of,
    sample_topics,
)
from tierlog.api.http.context import Context
from tierlog.broker.reports import StorageReport
from tierlog.record_format.errors import TierlogError

log = structlog.get_logger(__name__)

_PAUSE_FACTOR: Final = 99  # the least pause between samples, as a multiple of their duration


class Sample(NamedTuple):
    """Totals since the start, and what is stored now. `sent_bytes`: what was fetched over HTTP, and
    all that was sent to Kafka clients.
    """

    at_ms: int
    produced_bytes: float
    produced_records: float
    hot_fetched_bytes: float
    cold_fetched_bytes: float
    lag_bytes: int
    lag_ms: int
    sent_bytes: float = 0


class Series(msgspec.Struct):
    """Columns of equal length; each rate is since the previous sample."""

    at_ms: list[int]
    produced_bytes_per_s: list[float]
    produced_records_per_s: list[float]
    hot_fetched_bytes_per_s: list[float]
    cold_fetched_bytes_per_s: list[float]
    lag_bytes: list[int]
    lag_ms: list[int]


def series(samples: Sequence[Sample], *, after_ms: int) -> Series:
    """The samples after `after_ms`."""
    pairs = new_pairs(samples, after_ms=after_ms)

    def rates(name: str) -> list[float]:
        return [rate(one, two, name) for one, two in pairs]

    return Series(
        at_ms=[two.at_ms for _, two in pairs],
        produced_bytes_per_s=rates("produced_bytes"),
        produced_records_per_s=rates("produced_records"),
        hot_fetched_bytes_per_s=rates("hot_fetched_bytes"),
        cold_fetched_bytes_per_s=rates("cold_fetched_bytes"),
        lag_bytes=[two.lag_bytes for _, two in pairs],
        lag_ms=[two.lag_ms for _, two in pairs],
    )


class Sampler:
    """Written by one task, read on the event loop."""

    def __init__(self, context: Context, *, interval_ms: int) -> None:
        self._context, self._interval_s = context, interval_ms / 1000
        self.samples: deque[Sample] = deque(maxlen=RING)
        self.topics = TopicRings()
        self.report: StorageReport | None = None
        self._worked_s = self._lags_due_s = 0.0
        self._lags: Mapping[str, int] = {}

    async def keep_sampling(self) -> None:
        """Run until cancelled. A failed sample is a gap in the charts."""
        while True:
            try:
                await self.take()
            except (TierlogError, OSError) as error:
                log.warning("no sample for the console", error=str(error))
            except Exception:
                log.exception("no sample for the console: a bug")
            await asyncio.sleep(max(self._interval_s, self._worked_s * _PAUSE_FACTOR))

    async def take(self) -> StorageReport:
        """Sum up the partitions in a thread, and add a sample."""
        metrics, now_ms = self._context.metrics, self._context.settings.clock()
        read = Read(dict(metrics.requests.read_records), dict(metrics.requests.read_bytes))
        measure = partial(self._measure, now_ms, read)
        report, of_topics, self._worked_s = await self._context.read(measure)
        fetched = dict(metrics.requests.fetched_bytes)
        hot = fetched.pop("hot", 0)
        cold = sum(fetched.values())
        self.report = report
        self.topics.add_samples(of_topics)
        for gone in metrics.requests.read_records.keys() - of_topics.keys():
            del metrics.requests.read_records[gone], metrics.requests.read_bytes[gone]
        while self.samples and self.samples[-1].at_ms > now_ms:
            self.samples.pop()  # taken before the clock was set back
        self.samples.append(
            Sample(
                at_ms=now_ms,
                produced_bytes=sum(one.produced_bytes for one in of_topics.values()),
                produced_records=sum(one.produced_records for one in of_topics.values()),
                hot_fetched_bytes=hot,
                cold_fetched_bytes=cold,
                lag_bytes=report.offload_lag_bytes,
                lag_ms=report.offload_lag_ms,
                sent_bytes=hot + cold + self._context.kafka_counts.sent_bytes,
            )
        )
        return report

    def _measure(
        self, now_ms: int, read: Read
    ) -> tuple[StorageReport, dict[str, TopicSample], float]:
        """The report, a sample of each topic, and the CPU time they took, without waiting."""
        started = time.thread_time()
        broker = self._context.broker
        report = broker.storage_report()
        of_topics = sample_topics(
            live_topics(broker), report.topics, self._lags, at_ms=now_ms, read=read
        )
        worked_s = time.thread_time() - started
        if time.monotonic() >= self._lags_due_s:
            self._measure_lags()  # for the next sample
        return report, of_topics, worked_s

    def _measure_lags(self) -> None:
        """Many committed offsets are summed up less often than what is stored."""
        started = time.thread_time()
        with suppress(TierlogError):  # they cannot be read now
            self._lags = lags_of(self._context.broker.groups.all_groups())
        worked_s = time.thread_time() - started
        self._lags_due_s = time.monotonic() + worked_s * _PAUSE_FACTOR
