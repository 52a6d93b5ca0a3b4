"""Metric families of the Prometheus client for values that are counted elsewhere; help texts and
labels are from the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tierlog.api.http.metrics.table import BY_NAME
from tierlog.host.latency_histogram import BOUNDS_S, HistogramSnapshot

Labels = tuple[str, ...]


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
