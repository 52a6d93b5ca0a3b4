"""`tierlog top`: what a broker is doing right now, from two samples of its `/metrics`.

Only `/metrics` is requested: a rate is the difference of two samples over the time between them. A
counter that fell was reset by a restart, and counts from zero.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
import typer

from tierlog.cli.options import OutputOption, client_command
from tierlog.cli.output import Output, format_size, print_json

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from tierlog.client.client import Client

Every = Annotated[
    float, typer.Option("--every", min=0.1, max=86_400, help="Seconds between updates.")
]
Looks = Annotated[
    int | None,
    typer.Option(
        "--looks", min=1, help="Stop after this many updates; by default 1 without a terminal."
    ),
]
Rows = Annotated[int, typer.Option("--rows", min=1, help="Number of topics shown, busiest first.")]


class TopicLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A topic: offsets assigned per second, bytes by tier, and the offload lag."""

    topic: str
    offsets_per_s: float
    hot_bytes: int
    cold_bytes: int
    segments: int
    offload_lag_bytes: int
    offload_lag_s: float


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's load between two samples."""

    cpu_percent: float
    memory_bytes: int
    connections: int
    waiting_requests: int
    requests_per_s: float
    errors_per_s: float
    produced_records_per_s: float
    produced_bytes_per_s: float
    commit_ms: float | None
    flush_ms: float | None
    hot_fetched_bytes_per_s: float
    cold_fetched_bytes_per_s: float
    partitions: dict[str, int]
    store_available: bool
    store_requests_per_s: float
    store_sent_bytes_per_s: float
    store_received_bytes_per_s: float
    store_cost_dollars: float
    cache_hit_ratio: float | None
    topics: list[TopicLoad]


class Reading(NamedTuple):
    """The metrics at one time, by name, each with its labels."""

    at_s: float
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples with this name and these labels."""
        wanted = labels.items()
        found = self.samples.get(name, ())
        return sum(value for carried, value in found if wanted <= carried.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = {}
        for carried, value in self.samples.get(name, ()):
            sums[carried[label]] = sums.get(carried[label], 0.0) + value
        return sums


def parse_metrics(text: str, *, at_s: float) -> Reading:
    """Parse Prometheus' text format. Raises UnexpectedAnswer."""
    from prometheus_client.parser import text_string_to_metric_families

    from tierlog.client.problems import UnexpectedAnswer

    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise UnexpectedAnswer(
            f"not Prometheus metrics ({error}): is that a tierlog broker?"
        ) from error
    return Reading(at_s, samples)


class Between:
    """Rates between two readings."""

    def __init__(self, before: Reading, now: Reading) -> None:
        self.before, self.now = before, now
        self.seconds = max(now.at_s - before.at_s, 1e-9)

    def increase(self, name: str, **labels: str) -> float:
        before, now = self.before.total(name, **labels), self.now.total(name, **labels)
        return now - before if now >= before else now

    def rate(self, name: str, **labels: str) -> float:
        return round(self.increase(name, **labels) / self.seconds, 1)

    def mean_ms(self, histogram: str) -> float | None:
        """The mean of the observations in between; None if there are none."""
        count = self.increase(f"{histogram}_count")
        return round(self.increase(f"{histogram}_sum") / count * 1000, 3) if count else None


def load_between(before: Reading, now: Reading) -> Load:
    two = Between(before, now)
    hits, misses = (
        two.increase(f"tierlog_chunk_cache_{kind}_total") for kind in ("hits", "misses")
    )
    return Load(
        cpu_percent=round(two.rate("process_cpu_seconds_total") * 100, 1),
        memory_bytes=int(now.total("process_resident_memory_bytes")),
        connections=int(now.total("tierlog_http_connections")),
        waiting_requests=int(now.total("tierlog_http_waiting_requests")),
        requests_per_s=two.rate("tierlog_http_requests_total"),
        errors_per_s=two.rate("tierlog_http_errors_total"),
        produced_records_per_s=two.rate("tierlog_produced_records_total"),
        produced_bytes_per_s=two.rate("tierlog_produced_bytes_total"),
        commit_ms=two.mean_ms("tierlog_log_commit_seconds"),
        flush_ms=two.mean_ms("tierlog_log_flush_seconds"),
        hot_fetched_bytes_per_s=two.rate("tierlog_fetched_bytes_total", tier="hot"),
        cold_fetched_bytes_per_s=two.rate("tierlog_fetched_bytes_total", tier="cold"),
        partitions={k: int(v) for k, v in now.by("tierlog_partitions", "state").items()},
        store_available=now.total("tierlog_store_available") > 0,
        store_requests_per_s=two.rate("tierlog_store_requests_total"),
        store_sent_bytes_per_s=two.rate("tierlog_store_sent_bytes_total"),
        store_received_bytes_per_s=two.rate("tierlog_store_received_bytes_total"),
        store_cost_dollars=round(now.total("tierlog_store_cost_dollars_total"), 6),
        cache_hit_ratio=round(hits / (hits + misses), 3) if hits + misses else None,
        topics=_topics(two),
    )


def _topics(two: Between) -> list[TopicLoad]:
    """Sorted by rate, then by size."""
    ends = two.now.by("tierlog_partition_log_end_offset", "topic")
    earlier = two.before.by("tierlog_partition_log_end_offset", "topic")
    segments = two.now.by("tierlog_topic_segments", "topic")
    lag_bytes = two.now.by("tierlog_offload_lag_bytes", "topic")
    lag_s = two.now.by("tierlog_offload_lag_seconds", "topic")
    found = [
        TopicLoad(
            topic=topic,
            offsets_per_s=round(max(0.0, end - earlier.get(topic, end)) / two.seconds, 1),
            hot_bytes=int(two.now.total("tierlog_topic_bytes", topic=topic, tier="hot")),
            cold_bytes=int(two.now.total("tierlog_topic_bytes", topic=topic, tier="cold")),
            segments=int(segments.get(topic, 0)),
            offload_lag_bytes=int(lag_bytes.get(topic, 0)),
            offload_lag_s=round(lag_s.get(topic, 0.0), 1),
        )
        for topic, end in ends.items()
    ]
    found.sort(key=lambda one: (-one.offsets_per_s, -one.hot_bytes - one.cold_bytes, one.topic))
    return found


@client_command
def top(
    client: Client,
    every: Every = 2.0,
    looks: Looks = None,
    rows: Rows = 30,
    output: OutputOption = Output.AUTO,
) -> None:
    """Show a broker's load, refreshed every few seconds, until interrupted."""
    watch = _print_as_json if output.is_json else _draw
    with suppress(KeyboardInterrupt):
        watch(client, every=every, looks=looks, rows=rows)


def _loads(client: Client, *, every: float, looks: int | None) -> Iterator[Load]:
    from tierlog.client.exchange import RETRY_OVER_RESTART

    before = parse_metrics(client.metrics(), at_s=time.monotonic())
    client.retries = RETRY_OVER_RESTART  # the broker exists: wait over a restart
    for _ in count() if looks is None else range(looks):
        time.sleep(every)
        now = parse_metrics(client.metrics(), at_s=time.monotonic())
        yield load_between(before, now)
        before = now


def _print_as_json(client: Client, *, every: float, looks: int | None, rows: int) -> None:
    for load in _loads(client, every=every, looks=looks or 1):
        print_json(msgspec.structs.replace(load, topics=load.topics[:rows]))
        sys.stdout.flush()


def _draw(client: Client, *, every: float, looks: int | None, rows: int) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if console.is_dumb_terminal or not console.is_terminal:
        for load in _loads(client, every=every, looks=looks or 1):
            console.print(picture(load, rows=rows))
        return
    shown: Group | str = "waiting for the second sample …"
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        for load in _loads(client, every=every, looks=looks):
            shown = picture(load, rows=rows)
            live.update(shown, refresh=True)
    console.print(shown)  # again: the alternate screen is gone


_PLAIN: Final = {"box": None, "header_style": "bold", "pad_edge": False}


def picture(load: Load, *, rows: int) -> Group:
    """The broker's load above, its topics below."""
    from rich.console import Group
    from rich.table import Table

    facts = Table(show_header=False, **_PLAIN)  # type: ignore[arg-type]
    for name, value in _facts(load):
        facts.add_row(f"[dim]{name}[/]", value)
    return Group(facts, "", _topic_table(load, rows=rows))


def _facts(load: Load) -> list[tuple[str, str]]:
    failing = {state: n for state, n in load.partitions.items() if n and state != "serving"}
    states = "".join(f", [bold red]{n} {state}[/]" for state, n in failing.items())
    store = "available" if load.store_available else "[bold red]not available[/]"
    cache = "" if load.cache_hit_ratio is None else f", {load.cache_hit_ratio:.0%} from the cache"
    return [
        ("broker", f"{load.cpu_percent:.0f}% CPU, {format_size(load.memory_bytes)}"),
        ("partitions", f"{load.partitions.get('serving', 0)} serving{states}"),
        (
            "requests",
            f"{load.requests_per_s:,.0f}/s, {load.errors_per_s:,.0f} refused/s, "
            f"{load.connections} connections, {load.waiting_requests} waiting",
        ),
        (
            "produced",
            f"{load.produced_records_per_s:,.0f} records/s, {_rate(load.produced_bytes_per_s)}, "
            f"commit {_ms(load.commit_ms)}, flush {_ms(load.flush_ms)}",
        ),
        (
            "fetched",
            f"{_rate(load.hot_fetched_bytes_per_s)} hot, "
            f"{_rate(load.cold_fetched_bytes_per_s)} cold{cache}",
        ),
        (
            "store",
            f"{store}, {load.store_requests_per_s:,.0f} requests/s, "
            f"{_rate(load.store_sent_bytes_per_s)} up, "
            f"{_rate(load.store_received_bytes_per_s)} down, "
            f"${load.store_cost_dollars:.4f} since its start",
        ),
    ]


def _topic_table(load: Load, *, rows: int) -> Table:
    from rich.table import Table

    left_out = len(load.topics) - rows
    caption = f"{left_out} more not shown" if left_out > 0 else None
    table = Table(caption=caption, caption_justify="left", **_PLAIN)  # type: ignore[arg-type]
    table.add_column("topic")
    for name in ("offsets/s", "hot", "cold", "segments", "not in the bucket", "for"):
        table.add_column(name, justify="right")
    for one in load.topics[:rows]:
        table.add_row(
            one.topic,
            f"{one.offsets_per_s:,.0f}",
            format_size(one.hot_bytes),
            format_size(one.cold_bytes),
            str(one.segments),
            format_size(one.offload_lag_bytes),
            f"{one.offload_lag_s:.0f} s",
        )
    return table


def _rate(bytes_per_s: float) -> str:
    return f"{format_size(int(bytes_per_s))}/s"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
