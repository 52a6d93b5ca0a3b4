"""Counts that are kept elsewhere, as Prometheus' client shows them; texts and labels are the
table's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from api.http.metric_table import BY_NAME

Labels = tuple[str, ...]


class Buckets(NamedTuple):
    """`counts[i]`: how many were at most `bounds[i]`; one more count at the end, for all."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


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


def histogram(name: str, values: Mapping[Labels, Buckets]) -> Metric:
    family = HistogramMetricFamily(name, BY_NAME[name].doc, labels=BY_NAME[name].labels)
    for labels, (bounds, counts, total) in values.items():
        shown = zip([*map(str, bounds), "+Inf"], counts, strict=True)
        family.add_metric(labels, list(shown), total)
    return family
