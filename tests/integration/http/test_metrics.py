"""Observability: `/metrics`, `Server-Timing`, log lines."""

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString
from structlog.testing import capture_logs

from tests.fakes.waiting import until
from tests.integration.http.conftest import BATCHES, NDJSON, Api, problem, records_path
from tests.integration.http.test_wire import exchange, post
from tierlog.api.http.metrics.table import METRICS, OTHER_TOPICS, TOPICS_MAX
from tierlog.broker.background.task_failures import TASKS

FOREIGN = ("process_", "python_")  # the client library's own


def families(api: Api) -> dict[str, Any]:
    response = api.get("/metrics")
    assert response.status_code == 200
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(api: Api, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in families(api).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@pytest.fixture
def busy(api: Api) -> Iterator[Api]:
    """A broker that has served reads of both tiers and an error."""
    topic = api.cold_topic(60)
    for accept in (BATCHES, NDJSON, "application/json"):
        assert api.fetch(topic, accept=accept).status_code == 200
    problem(api.get("/v1/topics/nowhere"), 404, "unknown-topic")
    return api


def test_error_counters_start_at_zero(api: Api) -> None:
    """A series that first appears with its first error has no increase, so no alert fires."""
    shown = families(api)["tierlog_http_errors"].samples
    assert {sample.labels["code"] for sample in shown} >= {"internal", "corrupt-log", "disk-full"}
    tasks = families(api)["tierlog_background_errors"].samples
    assert {sample.labels["task"] for sample in tasks} == set(TASKS)


def test_metrics_shows_exactly_the_table_of_metrics(busy: Api) -> None:
    shown = families(busy)
    ours = {name: f for name, f in shown.items() if not name.startswith(FOREIGN)}
    named = {one.name.removesuffix("_total"): one for one in METRICS if not one.in_cluster}
    assert ours.keys() == named.keys()
    for name, family in ours.items():
        metric = named[name]
        assert (family.type, family.documentation) == (metric.kind, metric.doc)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels), sample
            if "le" in sample.labels:  # it identifies a series: as the client library writes it
                assert sample.labels["le"] == floatToGoString(sample.labels["le"]), sample
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= {
        sample.name for family in shown.values() for sample in family.samples
    }


def test_names_and_units_follow_prometheus_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"tierlog_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds")
        assert "_ms" not in metric.name


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_refused_records_are_not_counted_as_produced(api: Api, acks: str) -> None:
    topic, name = api.topic(), "tierlog_produced_records_total"
    body, before = {"records": [{"value": "a"}, {"value": "b"}]}, value(api, name)
    for expected_offset in ("7", "0"):
        headers = {"If-Offset-Match": expected_offset}
        api.post(records_path(topic), json=body, headers=headers, params={"acks": acks})
    assert value(api, name) == before + 2
    api.post(records_path(topic), json=body, params={"acks": acks})
    until(lambda: value(api, name) == before + 4)


def test_produced_and_fetched_records_are_counted_by_tier(api: Api) -> None:
    topic = api.topic()
    before = {name: value(api, name) for name in ("tierlog_produced_records_total",)}
    hot = value(api, "tierlog_fetched_records_total", tier="hot")
    api.values(topic, "a", "b", "c")
    assert value(api, "tierlog_produced_records_total") == 3 + before.popitem()[1]
    api.fetch(topic)
    api.fetch(topic, accept=BATCHES)
    assert value(api, "tierlog_fetched_records_total", tier="hot") == hot + 6
    sent = value(api, "tierlog_fetched_bytes_total", tier="hot")
    for path in (records_path(topic), f"/v1/topics/{topic}/partitions/0/segments/0"):
        assert api.head(path, headers={"accept": BATCHES}).headers["content-length"] != "0"
    assert value(api, "tierlog_fetched_bytes_total", tier="hot") == sent
    cold = value(api, "tierlog_fetched_records_total", tier="cold")
    api.fetch(api.cold_topic(), accept=NDJSON, max_bytes=1)
    assert value(api, "tierlog_fetched_records_total", tier="cold") == cold + 1
    assert value(api, "tierlog_chunk_cache_misses_total") > 0
    assert value(api, "tierlog_store_requests_total", purpose="cold_read", operation="get") > 0


def test_a_skipped_gap_counts_as_no_records(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = api.topic()
    partition = api.broker.partition(topic, 0)
    gap = partition.read(0, max_bytes=1)._replace(next_offset=10**9)
    monkeypatch.setattr(partition, "read", lambda *_, **__: gap)
    for accept in (BATCHES, NDJSON):
        assert api.fetch(topic, accept=accept).headers["log-next-offset"] == str(10**9)
    fetched = api.post("/v1/fetch", json={"partitions": [{"topic": topic, "partition": 0}]})
    assert fetched.json()["partitions"][0]["next_offset"] == 10**9
    assert value(api, "tierlog_fetched_records_total") < 10**9


def test_flushes_and_commits_are_timed(api: Api) -> None:
    topic = api.topic()
    names = [f"tierlog_log_{step}_seconds_count" for step in ("write", "flush", "commit")]
    before = [value(api, name) for name in names]
    for _ in range(3):
        api.values(topic, "a")
    after = [value(api, name) for name in names]
    assert [new - old >= 3 for new, old in zip(after, before, strict=True)] == [True] * 3
    assert value(api, "tierlog_log_flush_seconds_sum") > 0


def test_problems_are_counted_by_code(api: Api) -> None:
    before = value(api, "tierlog_http_errors_total", code="unknown-topic")
    problem(api.get("/v1/topics/nowhere"), 404, "unknown-topic")
    assert value(api, "tierlog_http_errors_total", code="unknown-topic") == before + 1


def test_what_is_not_a_request_is_counted_and_logged_with_its_reason(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    before = value(api, "tierlog_http_errors_total", code="invalid-request")
    with capture_logs() as lines:
        assert b" 400 " in exchange(api, b"BREW /pot HTTP/1.1\r\n\r\n")
    assert value(api, "tierlog_http_errors_total", code="invalid-request") == before + 1
    assert [line["error"] for line in lines if line["event"] == "not a request"] == [
        "malformed request: Invalid method encountered"
    ]
    assert [line for line in caplog.records if line.name == "uvicorn.error"] == []


def test_a_request_that_was_refused_before_its_malformed_body_is_counted_once(api: Api) -> None:
    before = value(api, "tierlog_http_errors_total")
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
        sock.sendall(post("/nowhere", "Transfer-Encoding: chunked", body=b""))
        assert b" 404 " in sock.recv(16)
        sock.sendall(b"zz\r\n")
        assert b"HTTP/1.1" not in sock.makefile("rb").read()
    assert value(api, "tierlog_http_errors_total") == before + 1


def test_offload_lag_is_what_is_not_in_the_bucket_yet(api: Api) -> None:
    topic = api.topic(segment_bytes=1024)
    api.values(topic, "x" * 600)
    api.values(topic, "y" * 600)
    assert value(api, "tierlog_offload_lag_segments", topic=topic) >= 1
    assert value(api, "tierlog_offload_lag_bytes", topic=topic) > 600
    done = api.post(f"/v1/topics/{topic}/offload", params={"wait_ms": 20_000})
    assert done.json()["remaining_segments"] == 0
    assert value(api, "tierlog_offload_lag_segments", topic=topic) == 0
    assert value(api, "tierlog_offload_lag_bytes", topic=topic) == 0
    assert value(api, "tierlog_offload_lag_seconds", topic=topic) == 0
    assert value(api, "tierlog_partition_high_watermark", topic=topic, partition="0") == 2


def test_client_input_never_creates_a_series(api: Api) -> None:
    for path in ("/v1/topics/made-up-1", "/v1/no-such-path", "/v1/topics/made-up-2/x"):
        api.get(path)
        api.request("BREW", path)
    text = api.get("/metrics").text
    assert "made-up" not in text
    assert "BREW" not in text


def test_topics_beyond_the_limit_are_aggregated(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.values(api.topic(), "a")
    assert TOPICS_MAX == 1_000
    whole = value(api, "tierlog_topic_bytes")
    monkeypatch.setattr("tierlog.api.http.metrics.registry.TOPICS_MAX", 1)
    monkeypatch.setattr("tierlog.api.http.metrics.registry.PARTITIONS_MAX", 1)
    shown = families(api)
    topics = {sample.labels["topic"] for sample in shown["tierlog_topic_bytes"].samples}
    assert len(topics) == 2
    assert OTHER_TOPICS in topics
    assert value(api, "tierlog_topic_bytes") == whole
    assert len(shown["tierlog_partition_high_watermark"].samples) == 1
    assert value(api, "tierlog_partitions_not_shown") > 0


def test_server_timing_breaks_down_the_request(api: Api) -> None:
    topic = api.topic()
    response = api.produce(topic, {"value": "a"})
    timing = parse_server_timing(response.headers["server-timing"])
    assert timing["total"] >= timing["broker"] > 0
    timing = parse_server_timing(api.fetch(topic).headers["server-timing"])
    assert timing["encode"] > 0
    assert "store" not in timing
    timing = parse_server_timing(api.fetch(api.cold_topic()).headers["server-timing"])
    assert timing["total"] >= timing["store"] > 0
    assert "total" in parse_server_timing(api.get("/v1/topics/nowhere").headers["server-timing"])


def parse_server_timing(header: str) -> dict[str, float]:
    """W3C Server Timing: name;dur=milliseconds, …"""
    assert re.fullmatch(r"\w+;dur=\d+\.\d{3}(, \w+;dur=\d+\.\d{3})*", header)
    return {
        name: float(duration.removeprefix("dur="))
        for name, _, duration in (part.partition(";") for part in header.split(", "))
    }


def test_a_failed_request_is_logged_with_its_topic_and_code(api: Api, store_down: None) -> None:
    topic = api.topic()
    api.values(topic, "a")
    with capture_logs() as lines:
        response = api.post(f"/v1/topics/{topic}/verify", headers={"x-request-id": "the-one"})
    assert response.status_code == 503
    line = next(line for line in lines if line["event"] == "request failed")
    assert line["code"] == "store-unavailable"
    assert line["topic"] == topic
