"""What of a broker's load `tierlog top` shows, and what a key does to that.

* A `View` is a value: a key makes another one. Only `tierlog.cli.top` reads keys and samples.
* The selection is a topic's name: it stays while the order changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tierlog.cli.output import format_size, printable
from tierlog.record_format.units import dollars

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

UP, DOWN, ENTER, ESCAPE, BACKSPACE = "up", "down", "enter", "escape", "backspace"
FILTER_MAX: Final = 249  # characters, as of a topic's name

# What topics are ordered by, the largest first but for names.
ORDERS: Final[Mapping[str, Callable[[TopicLoad], Any]]] = MappingProxyType(
    {
        "offsets/s": lambda one: (-one.offsets_per_s, -one.hot_bytes - one.cold_bytes, one.topic),
        "size": lambda one: (-one.hot_bytes - one.cold_bytes, one.topic),
        "not in the bucket": lambda one: (-one.offload_lag_bytes, one.topic),
        "name": lambda one: one.topic,
    }
)
_NAMES: Final = tuple(ORDERS)


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


class PartitionLoad(NamedTuple):
    """A partition of the topic that is open."""

    partition: int
    offsets_per_s: float
    log_start_offset: int
    high_watermark: int
    log_end_offset: int


@dataclass(frozen=True, slots=True)
class View:
    """`opened`: the topic whose partitions are shown; empty for all topics. `is_typing`: keys go to
    the filter. `has_keys`: they are explained.
    """

    order: str = _NAMES[0]
    wanted: str = ""
    selected: str = ""
    opened: str = ""
    is_typing: bool = False
    has_keys: bool = False
    is_left: bool = False

    def topics(self, load: Load) -> list[TopicLoad]:
        """Those that the filter lets through, in order."""
        wanted = self.wanted.lower()
        return sorted(
            (one for one in load.topics if wanted in one.topic.lower()), key=ORDERS[self.order]
        )

    def names(self, load: Load) -> list[str]:
        return [one.topic for one in self.topics(load)]

    def press(self, key: str, shown: Sequence[str]) -> View:
        """The view after a key; `shown`: the names of the topics, in order."""
        if self.is_typing:
            return self._type(key)
        if key == "q":
            return replace(self, is_left=True)
        if key in (ESCAPE, BACKSPACE):
            return replace(self, opened="") if self.opened else replace(self, wanted="")
        if self.opened:
            return self
        if key == "/":
            return replace(self, is_typing=True)
        if key == "s":
            following = (_NAMES.index(self.order) + 1) % len(_NAMES)
            return replace(self, order=_NAMES[following])
        return self._select(key, shown)

    def _type(self, key: str) -> View:
        if key == ENTER:
            return replace(self, is_typing=False)
        if key == ESCAPE:
            return replace(self, is_typing=False, wanted="")
        if key == BACKSPACE:
            return replace(self, wanted=self.wanted[:-1])
        is_text = len(key) == 1 and key.isprintable() and len(self.wanted) < FILTER_MAX
        return replace(self, wanted=self.wanted + key) if is_text else self

    def _select(self, key: str, shown: Sequence[str]) -> View:
        if not shown:
            return self
        position = self.position(shown)
        if key == ENTER:
            return replace(self, selected=shown[position], opened=shown[position])
        step = {UP: -1, "k": -1, DOWN: 1, "j": 1}.get(key, 0)
        return replace(self, selected=shown[min(max(position + step, 0), len(shown) - 1)])

    def position(self, shown: Sequence[str]) -> int:
        """Of the selected topic; the first, if it is not there."""
        return shown.index(self.selected) if self.selected in shown else 0


_PLAIN: Final = {"box": None, "header_style": "bold", "pad_edge": False}


def picture(
    load: Load, *, rows: int, view: View = View(), partitions: Sequence[PartitionLoad] = ()
) -> Group:
    """The broker's load above; below it its topics, or the partitions of the one that is open."""
    from rich.console import Group
    from rich.table import Table

    facts = Table(show_header=False, **_PLAIN)  # type: ignore[arg-type]
    for name, value in _facts(load):
        facts.add_row(f"[dim]{name}[/]", value)
    table = _partition_table(partitions, view, rows) if view.opened else _topics(load, view, rows)
    return Group(facts, "", table, *(("", _help(view)) if view.has_keys else ()))


def _help(view: View) -> Any:
    from rich.text import Text

    if view.is_typing:
        return Text(f"filter: {printable(view.wanted)}_   enter keeps it, esc removes it")
    if view.opened:
        return Text("q quit   esc back to the topics", style="dim")
    wanted = f" ({printable(view.wanted)}; esc removes it)" if view.wanted else ""
    keys = f"q quit   s sort (by {view.order})   / filter{wanted}   ↑ ↓ select   enter open"
    return Text(keys, style="dim")


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
            f"{dollars(load.store_cost_dollars)} since its start",
        ),
    ]


def _topics(load: Load, view: View, rows: int) -> Table:
    """As many rows as fit, with the selected one among them."""
    topics = view.topics(load)
    position = view.position([one.topic for one in topics])
    first = max(0, position - rows + 1)
    table = _table(
        ("topic", "offsets/s", "hot", "cold", "segments", "not in the bucket", "for"),
        left_out=len(topics) - rows,
    )
    for number, one in enumerate(topics[first : first + rows], first):
        table.add_row(
            one.topic,
            f"{one.offsets_per_s:,.0f}",
            format_size(one.hot_bytes),
            format_size(one.cold_bytes),
            str(one.segments),
            format_size(one.offload_lag_bytes),
            f"{one.offload_lag_s:.0f} s",
            style="reverse" if view.has_keys and number == position else "",
        )
    return table


def _partition_table(partitions: Sequence[PartitionLoad], view: View, rows: int) -> Table:
    table = _table(
        (view.opened, "offsets/s", "log start", "high watermark", "log end"),
        left_out=len(partitions) - rows,
    )
    for one in partitions[:rows]:
        table.add_row(
            f"partition {one.partition}",
            f"{one.offsets_per_s:,.0f}",
            str(one.log_start_offset),
            str(one.high_watermark),
            str(one.log_end_offset),
        )
    return table


def _table(columns: Sequence[str], *, left_out: int) -> Table:
    from rich.table import Table

    caption = f"{left_out} more not shown" if left_out > 0 else None
    table = Table(caption=caption, caption_justify="left", **_PLAIN)  # type: ignore[arg-type]
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _rate(bytes_per_s: float) -> str:
    return f"{format_size(int(bytes_per_s))}/s"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
