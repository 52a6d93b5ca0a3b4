"""The Prometheus registry, what it counts of the HTTP server, and what it collects of the broker.

* Names, labels and help texts are from `table`.
* Each application has its own registry, so that two in one process do not mix.
* A scrape reads the broker's own counters; it touches neither disk nor bucket, and nothing is spent
  between scrapes. Run in a thread: with thousands of partitions it takes a while.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from tierlog.api.http.metrics.table import BY_NAME, OTHER_TOPICS, PARTITIONS_MAX, TOPICS_MAX
from tierlog.api.http.problems import INTERNAL, TABLE
from tierlog.api.serving.kafka_counts import KafkaCounts
from tierlog.broker.background.task_failures import TaskFailures
from tierlog.broker.broker import Broker
from tierlog.broker.partition.partition import Partition
from tierlog.broker.reports import StorageReport, StoreUse, TopicStorage
from tierlog.cold_tier.chunk_cache import ChunkCacheReport
from tierlog.host.latency_histogram import BOUNDS_S, HistogramSnapshot, LatencyHistogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[str, ...]
_TOPIC_GAUGES: Final[Mapping[str, Callable[[TopicStorage], float]]] = {
    "tierlog_topic_segments": lambda one: one.segments,
    "tierlog_offload_lag_bytes": lambda one: one.offload_lag_bytes,
    "tierlog_offload_lag_segments": lambda one: one.offload_lag_segments,
    "tierlog_offload_lag_seconds": lambda one: one.offload_lag_ms / 1000,
}
_OFFSETS: Final[Mapping[str, Callable[[Partition], int]]] = {
    "tierlog_partition_high_watermark": lambda one: one.high_watermark,
    "tierlog_partition_log_start_offset": lambda one: one.offsets().log_start_offset,
    "tierlog_partition_log_end_offset": lambda one: one.offsets().log_end_offset,
}
_STORE_COUNTERS: Final[Mapping[str, Callable[[StoreUse], float]]] = {
    "tierlog_store_requests_total": lambda use: use.requests,
    "tierlog_store_errors_total": lambda use: use.failures,
    "tierlog_store_sent_bytes_total": lambda use: use.sent_bytes,
    "tierlog_store_received_bytes_total": lambda use: use.received_bytes,
    "tierlog_store_cost_dollars_total": lambda use: use.cost_dollars,
}
_CACHE_COUNTERS: Final[Mapping[str, Callable[[ChunkCacheReport], int]]] = {
    "tierlog_chunk_cache_hits_total": lambda cache: cache.hits,
    "tierlog_chunk_cache_misses_total": lambda cache: cache.misses,
    "tierlog_chunk_cache_evictions_total": lambda cache: cache.evicted_chunks,
}


class HttpMetrics:
    def __init__(self) -> None:
        # Otherwise each counter has a second series, with the time at which it was created.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        # Collectors that do not describe themselves are not asked: the table has the names, and the
        # broker cannot be read before it is open.
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.errors = self._counter("tierlog_http_errors_total")
        for kind in (*TABLE.values(), INTERNAL):
            self.errors.labels(kind.code)  # starts at 0, so that the first error is an increase
        self.in_progress = self._gauge("tierlog_http_requests_in_progress")
        self.produced_records = self._counter("tierlog_produced_records_total")
        self.produced_bytes = self._counter("tierlog_produced_bytes_total")
        self.shared_pages = self._counter("tierlog_http_shared_pages_total")
        self.requests = RequestCounts()
        self.register(self.requests)

    def sample(self, name: str, value_of: Callable[[], float]) -> None:
        """A gauge whose value is computed at each scrape."""
        self._gauge(name).set_function(value_of)

    def register(self, collector: Collector) -> None:
        self.registry.register(collector)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        metric = BY_NAME[name]
        return Counter(name, metric.doc, metric.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        metric = BY_NAME[name]
        return Gauge(name, metric.doc, metric.labels, registry=self.registry)


class RequestCounts(Collector):
    """Counts of every request, as plain integers: the Prometheus client's counters take longer than
    finding a batch. Written only on the event loop, read by scrapes.
    """

    def __init__(self) -> None:
        self._finished: dict[Labels, int] = {}
        self._seconds: dict[Labels, LatencyHistogram] = {}
        self.fetched_bytes: dict[str, int] = {}
        self.fetched_records: dict[str, int] = {}
        self.read_records: dict[str, int] = {}  # by topic
        self.read_bytes: dict[str, int] = {}  # as many topics

    def finished(self, method: str, path: str, status: str, *, seconds: float) -> None:
        """Count a request. The labels have few values: never text that a client chose."""
        labels = (method, path, status)
        self._finished[labels] = self._finished.get(labels, 0) + 1
        call = (method, path)
        durations = self._seconds.get(call)
        if durations is None:
            durations = self._seconds[call] = LatencyHistogram()
        durations.observe(seconds)

    def fetched(self, tier: str, size_bytes: int, *, topic: str = "", records: int = 0) -> None:
        """Count what was read for a response; `topic` if it has records."""
        self.fetched_bytes[tier] = self.fetched_bytes.get(tier, 0) + size_bytes
        self.fetched_records[tier] = self.fetched_records.get(tier, 0) + records
        if records:
            self.read_records[topic] = self.read_records.get(topic, 0) + records
            self.read_bytes[topic] = self.read_bytes.get(topic, 0) + size_bytes

    def collect(self) -> Iterator[Metric]:
        # Copies: a scrape runs in a thread.
        finished, seconds = dict(self._finished), dict(self._seconds)
        yield counter("tierlog_http_requests_total", finished)
        yield histogram(
            "tierlog_http_request_seconds",
            {call: durations.snapshot() for call, durations in seconds.items()},
        )
        for name, by_tier in (
            ("tierlog_fetched_records_total", dict(self.fetched_records)),
            ("tierlog_fetched_bytes_total", dict(self.fetched_bytes)),
        ):
            yield counter(name, {(tier,): count for tier, count in by_tier.items()})


def gauge(name: str, values: Mapping[Labels, float]) -> Metric:
    family = GaugeMetricFamily(name, BY_NAME[name].doc, labels=BY_NAME[name].labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def counter(name: str, values: Mapping[Labels, float]) -> Metric:
    family = CounterMetricFamily(name, BY_NAME[name].doc, labels=BY_NAME[name].labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def histogram(name: str, values: Mapping[Labels, HistogramSnapshot]) -> Metric:
    family = HistogramMetricFamily(name, BY_NAME[name].doc, labels=BY_NAME[name].labels)
    for labels, (counts, total_s) in values.items():
        shown = zip([*map(str, BOUNDS_S), "+Inf"], counts, strict=True)
        family.add_metric(labels, list(shown), total_s)
    return family


class KafkaMetrics(Collector):
    def __init__(self, counts: KafkaCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Family]:
        counts = self._counts
        yield counter("tierlog_kafka_requests_total", dict(counts.requests))
        for name, value in (
            ("tierlog_kafka_received_bytes_total", counts.received_bytes),
            ("tierlog_kafka_sent_bytes_total", counts.sent_bytes),
            ("tierlog_kafka_failed_authentications_total", counts.failed_authentications),
            ("tierlog_kafka_throttled_requests_total", counts.throttled_requests),
        ):
            yield counter(name, {(): value})
        yield gauge("tierlog_kafka_connections", {(): counts.connections})
        yield gauge("tierlog_kafka_request_memory_bytes", {(): counts.request_memory_bytes()})


class BrokerMetrics(Collector):
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Family]:
        broker = self._broker
        report = broker.storage_report()
        partitions = sorted(broker.partitions(), key=lambda one: (one.topic, one.number))
        times = broker.commit_times
        yield histogram("tierlog_log_write_seconds", {(): times.write.snapshot()})
        yield histogram("tierlog_log_flush_seconds", {(): times.flush.snapshot()})
        yield histogram("tierlog_log_commit_seconds", {(): times.commit.snapshot()})
        yield gauge("tierlog_topics", {(): len(report.topics)})
        damaged = sum(1 for _ in broker.damaged_partitions())
        yield gauge("tierlog_partitions", _states(partitions, damaged=damaged))
        yield gauge("tierlog_degraded", {(): len(broker.readiness().degraded)})
        yield gauge(
            "tierlog_offload_held_up_partitions", {(): len(broker.background.copier.blocked())}
        )
        yield from _background(broker.background.failures)
        yield gauge("tierlog_disk_free_bytes", {(): broker.reserve.free_bytes})
        yield gauge("tierlog_disk_reserve_bytes", {(): broker.reserve.reserve_bytes})
        yield from _topics(report.topics)
        yield from _offsets(partitions)
        yield from _store(broker, report)
        if report.cache is not None:
            yield from _cache(report.cache)
        yield gauge("tierlog_build_info", {(broker_version(),): 1})


def _states(partitions: Iterable[Partition], *, damaged: int) -> dict[Labels, float]:
    found: dict[Labels, float] = {("serving",): 0, ("offline",): 0, ("leadership-lost",): 0}
    found["damaged",] = damaged
    for partition in partitions:
        if partition.is_offline:
            found["offline",] += 1
        elif partition.leadership_lost:
            found["leadership-lost",] += 1
        else:
            found["serving",] += 1
    return found


def _background(failures: TaskFailures) -> Iterator[Family]:
    by_task = failures.by_task()
    errors: dict[Labels, float] = {(task,): one.errors for task, one in by_task.items()}
    yield counter("tierlog_background_errors_total", errors)
    failing: dict[Labels, float] = {(task,): one.failing for task, one in by_task.items()}
    yield gauge("tierlog_background_failing", failing)


def _topics(topics: Sequence[TopicStorage]) -> Iterator[Family]:
    sizes: Tally[Labels] = Tally()
    for name, one in _named(topics):
        sizes[name, "hot"] += one.hot_bytes
        sizes[name, "cold"] += one.cold_bytes
    yield gauge("tierlog_topic_bytes", sizes)
    for metric, value_of in _TOPIC_GAUGES.items():
        values: dict[Labels, float] = {}
        for name, one in _named(topics):
            before, value = values.get((name,), 0), value_of(one)
            longest = metric.endswith("_seconds")
            values[name,] = max(before, value) if longest else before + value
        yield gauge(metric, values)


def _named(topics: Sequence[TopicStorage]) -> Iterator[tuple[str, TopicStorage]]:
    for number, one in enumerate(topics):
        yield (one.topic if number < TOPICS_MAX else OTHER_TOPICS), one


def _offsets(partitions: Sequence[Partition]) -> Iterator[Family]:
    shown = list(islice(partitions, PARTITIONS_MAX))
    for metric, value_of in _OFFSETS.items():
        yield gauge(metric, {(one.topic, str(one.number)): value_of(one) for one in shown})
    yield gauge("tierlog_partitions_not_shown", {(): len(partitions) - len(shown)})


def _store(broker: Broker, report: StorageReport) -> Iterator[Family]:
    if broker.bucket is None:
        return
    status = broker.bucket.store_status
    yield gauge("tierlog_store_available", {(): int(status.is_reachable and not status.refusal)})
    for metric, value_of in _STORE_COUNTERS.items():
        values: dict[Labels, float] = {
            (use.purpose, use.operation): value_of(use) for use in report.store_requests
        }
        yield counter(metric, values)


def _cache(cache: ChunkCacheReport) -> Iterator[Family]:
    for metric, value_of in _CACHE_COUNTERS.items():
        yield counter(metric, {(): value_of(cache)})
    yield gauge("tierlog_chunk_cache_chunks", {(): cache.chunks})
    yield gauge("tierlog_chunk_cache_limit_bytes", {(): cache.limit_bytes})
    states: dict[Labels, float] = {
        ("cached",): cache.cached_bytes,
        ("reserved",): cache.reserved_bytes,
        ("lingering",): cache.lingering_bytes,
    }
    yield gauge("tierlog_chunk_cache_bytes", states)


@cache
def broker_version() -> str:
    try:
        return version("tierlog")
    except PackageNotFoundError:
        return "unknown"
