"""`tierlog top`: what a broker is doing right now, from two samples of its `/metrics`.

* Only `/metrics` is requested: a rate is the difference of two samples over the time between them.
  A counter that fell was reset by a restart, and counts from zero.
* On a terminal with a keyboard, a key changes the view at once, between two samples.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
import typer

from tierlog.cli.keys import Keys, pressed_keys
from tierlog.cli.options import OutputOption, client_command
from tierlog.cli.output import Output, print_json
from tierlog.cli.top_view import ORDERS, Load, PartitionLoad, TopicLoad, View, picture

if TYPE_CHECKING:
    from rich.console import Console, Group

    from tierlog.client.client import Client

_OTHER_LINES: Final = 11  # of the screen: the broker's load, headings, keys

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


def load_between(two: Between) -> Load:
    now = two.now
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
    return sorted(found, key=ORDERS["offsets/s"])


def partition_loads(two: Between, topic: str) -> list[PartitionLoad]:
    """The partitions of a topic that `/metrics` shows: of very many, not all."""
    offsets: dict[int, dict[str, float]] = {}
    for name in ("log_start_offset", "high_watermark", "log_end_offset"):
        for labels, value in two.now.samples.get(f"tierlog_partition_{name}", ()):
            if labels["topic"] == topic:
                offsets.setdefault(int(labels["partition"]), {})[name] = value
    end = "tierlog_partition_log_end_offset"
    return [
        PartitionLoad(
            number,
            two.rate(end, topic=topic, partition=str(number)),
            *(int(found.get(name, 0)) for name in PartitionLoad._fields[2:]),
        )
        for number, found in sorted(offsets.items())
    ]


@client_command
def top(
    client: Client,
    every: Every = 2.0,
    looks: Looks = None,
    rows: Rows = 30,
    output: OutputOption = Output.AUTO,
) -> None:
    """Show a broker's load, refreshed every few seconds, until q or Ctrl-C.

    On a terminal, s sorts the topics, / filters them by name, the arrows select one and Enter opens
    it.
    """
    watch = _print_as_json if output.is_json else _draw
    watch(client, every=every, looks=looks, rows=rows)


class _Samples:
    """Each sample is compared with the one before; a broker that restarts is waited for."""

    def __init__(self, client: Client) -> None:
        from tierlog.client.exchange import RETRY_OVER_RESTART

        self._client = client
        self._before = self._take()
        client.retries = RETRY_OVER_RESTART  # the broker exists

    def next(self) -> Between:
        now = self._take()
        two, self._before = Between(self._before, now), now
        return two

    def _take(self) -> Reading:
        return parse_metrics(self._client.metrics(), at_s=time.monotonic())


def _loads(client: Client, *, every: float, looks: int | None) -> Iterator[Load]:
    samples = _Samples(client)
    for _ in count() if looks is None else range(looks):
        time.sleep(every)
        yield load_between(samples.next())


def _print_as_json(client: Client, *, every: float, looks: int | None, rows: int) -> None:
    for load in _loads(client, every=every, looks=looks or 1):
        print_json(msgspec.structs.replace(load, topics=load.topics[:rows]))
        sys.stdout.flush()


def _draw(client: Client, *, every: float, looks: int | None, rows: int) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_dumb_terminal or not console.is_terminal:
        for load in _loads(client, every=every, looks=looks or 1):
            console.print(picture(load, rows=rows))
        return
    last: Group | None = None
    try:
        with _keys() as wait:
            for shown in _screens(console, client, wait, every=every, looks=looks, rows=rows):
                last = shown
    finally:
        if last is not None:
            console.print(last)  # again: the alternate screen is gone


def _keys() -> AbstractContextManager[Keys]:
    return pressed_keys() if sys.stdin.isatty() else nullcontext(_no_keys)


def _no_keys(timeout_s: float) -> list[str]:
    time.sleep(max(0.0, timeout_s))
    return []


def _screens(
    console: Console,
    client: Client,
    wait: Keys,
    *,
    every: float,
    looks: int | None,
    rows: int,
) -> Iterator[Group]:
    """Show each sample, and after each key what it asks for; yields that, without the keys."""
    from rich.live import Live

    view, samples = View(has_keys=wait is not _no_keys), _Samples(client)
    rows = max(1, min(rows, console.height - _OTHER_LINES))
    load = two = None
    due_s = time.monotonic() + every
    waiting = "waiting for the second sample …"
    with Live(waiting, console=console, screen=True, auto_refresh=False) as live:
        while looks != 0:
            keys = wait(due_s - time.monotonic())
            for key in keys:
                view = view.press(key, [] if load is None else view.names(load))
            if view.is_left:
                return
            if not keys:
                two, due_s = samples.next(), time.monotonic() + every
                load = load_between(two)
                looks = None if looks is None else looks - 1
            if two is not None and load is not None:
                partitions = partition_loads(two, view.opened) if view.opened else ()
                draw = partial(picture, load, rows=rows, partitions=partitions)
                live.update(draw(view=view), refresh=True)
                yield draw(view=replace(view, has_keys=False))
