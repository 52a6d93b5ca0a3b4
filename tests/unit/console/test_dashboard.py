"""The Grafana dashboard, and the alert rules beside it, ask for metrics that there are, by labels
that they have.
"""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tierlog.api.http.metrics.table import BY_NAME, Metric

FILE = Path(__file__).parents[3] / "docs" / "grafana" / "tierlog.json"
DASHBOARD = json.loads(FILE.read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
ALERTS = re.findall(r"^ +expr: (.+)$", (FILE.parent / "alerts.yaml").read_text("utf-8"), re.M)
SCRAPED = {"instance", "job"}  # labels added by Prometheus
_METRIC = re.compile(r"\b(tierlog_\w+|process_\w+|up\b)(?:\{([^}]*)\})?")
_BY = re.compile(r"by \(([^)]*)\)")


def metric_of(name: str) -> Metric:
    for suffix in ("_bucket", "_sum", "_count"):
        stem = name.removesuffix(suffix)
        if stem != name and BY_NAME.get(stem, Metric("", "gauge", "")).kind == "histogram":
            return BY_NAME[stem]
    return BY_NAME[name]


@pytest.mark.parametrize("expression", EXPRESSIONS + ALERTS)
def test_every_expression_uses_existing_metrics_and_labels(expression: str) -> None:
    found = _METRIC.findall(expression)
    assert found
    labels = {"le"}
    for name, selector in found:
        if name.startswith(("process_", "up")):
            labels |= SCRAPED
            continue
        metric = metric_of(name)
        labels |= {*metric.labels, *SCRAPED}
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert used <= {*metric.labels, *SCRAPED}, name
        if metric.kind != "gauge":
            assert re.search(rf"rate\({name}\b", expression), f"{name} only counts up"
    for group in _BY.findall(expression):
        assert {label.strip() for label in group.split(",")} <= labels
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize(
    "name",
    [
        "tierlog_partitions",
        "tierlog_offload_held_up_partitions",
        "tierlog_background_failing",
        "tierlog_offload_lag_seconds",
        "tierlog_disk_free_bytes",
        "tierlog_fenced_broker_count",
        "tierlog_offline_partitions_count",
        "tierlog_store_available",
        "tierlog_store_errors_total",
        "tierlog_http_errors_total",
        "tierlog_chunk_cache_misses_total",
        "tierlog_http_unsent_memory_bytes",
        "process_resident_memory_bytes",
    ],
)
def test_every_alerts_metric_is_on_the_dashboard(name: str) -> None:
    shown = {metric for expression in EXPRESSIONS for metric, _ in _METRIC.findall(expression)}
    assert name in shown


def test_a_legend_names_labels_that_its_expression_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", " ".join(_BY.findall(target["expr"]))))
            if not kept:
                metrics = [BY_NAME.get(name) for name, _ in _METRIC.findall(target["expr"])]
                kept = {label for metric in metrics if metric for label in metric.labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_variables_query_existing_labels() -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["definition"])[0]
            assert label in {*BY_NAME[metric].labels, *SCRAPED}


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = one["gridPos"], other["gridPos"]
    across = a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"]
    return across and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]


def test_panels_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    assert not [pair for pair in combinations(panels, 2) if overlap(*pair)]
