"""`tierlog storage report` as text: what is where, what a lost disk would cost, what it costs.

A member that an older broker lacks is a dash; JSON has them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tierlog.cli.output import format_size, print_table
from tierlog.record_format.units import dollars, rough_duration

Members = Mapping[str, Any]
_ON_DISK, _IN_BUCKET, _WAITING = "on disk", "in the bucket", "not uploaded yet"
_TOPIC_COLUMNS: Final = ("topic", "partitions", _ON_DISK, _IN_BUCKET, _WAITING, "for")
_REQUEST_COLUMNS: Final = ("for", "request", "number", "failed", "sent", "received", "cost")
_PURPOSES: Final = {"cold_read": "reads", "offload": "uploads", "gc": "garbage"}


def print_storage_report(report: Members) -> None:
    print_table("", ("", ""), list(_facts(report)))
    if topics := report.get("topics"):
        print_table("\nTopics", _TOPIC_COLUMNS, [_topic_row(one) for one in topics])
    if requests := report.get("store_requests"):
        title = "\nRequests to the store since the broker started"
        print_table(title, _REQUEST_COLUMNS, [_request_row(one) for one in requests])
    if diverged := report.get("diverged"):
        rows = [(one.get("folder"), format_size(one.get("size_bytes"))) for one in diverged]
        print_table("\nRecords that a take-over set aside", ("folder", "size"), rows)


def _facts(report: Members) -> Iterator[tuple[str, str]]:
    store = report.get("store")
    yield "store", store or "none: all stays on the local disk"
    yield _ON_DISK, _tier(report, "hot")
    if store is None:
        return
    yield _IN_BUCKET, _tier(report, "cold")
    yield _WAITING, _not_uploaded(report)
    if cache := report.get("cache"):
        yield "cache", _cache(cache)
    yield "cost of requests", f"{_cost(report.get('cost_dollars'))} since the broker started"


def _not_uploaded(report: Members) -> str:
    if not report.get("offload_lag_bytes"):
        return "nothing: the bucket has every record"
    since = rough_duration(report.get("offload_lag_ms", 0))
    size = format_size(report["offload_lag_bytes"])
    return f"{size}, the oldest for {since}; a lost disk would take it along"


def _tier(members: Members, tier: str) -> str:
    count = members.get(f"{tier}_segments")
    size = format_size(members.get(f"{tier}_bytes"))
    return f"{size} in {count} segment{'s' * (count != 1)}"


def _cache(cache: Members) -> str:
    size, limit = (format_size(cache.get(name)) for name in ("cached_bytes", "limit_bytes"))
    hits, misses = cache.get("hits", 0), cache.get("misses", 0)
    used = f", {hits} of {hits + misses} reads of chunks answered" if hits + misses else ""
    evicted = f", {cache['evicted_chunks']} evicted" if cache.get("evicted_chunks") else ""
    return f"{size} of {limit} in {cache.get('chunks')} chunks{used}{evicted}"


def _topic_row(topic: Members) -> tuple[object, ...]:
    waiting = topic.get("offload_lag_bytes")
    return (
        topic.get("topic"),
        topic.get("partitions"),
        _tier(topic, "hot"),
        _tier(topic, "cold"),
        format_size(waiting) if waiting else None,
        rough_duration(topic.get("offload_lag_ms", 0)) if waiting else None,
    )


def _request_row(use: Members) -> tuple[object, ...]:
    purpose = str(use.get("purpose"))
    return (
        _PURPOSES.get(purpose, purpose.replace("_", " ")),
        str(use.get("operation")).upper(),
        use.get("requests"),
        use.get("failures"),
        format_size(use.get("sent_bytes")),
        format_size(use.get("received_bytes")),
        _cost(use.get("cost_dollars")),
    )


def _cost(amount: float | None) -> str:
    return "-" if amount is None else dollars(amount)
