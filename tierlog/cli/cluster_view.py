"""What `tierlog cluster dev` shows: brokers, who leads and has each partition, and what has
happened. Pure.

* A partition is without a leader for a moment while it is handed over: that is told once it lasts.
* Whoever answers is asked: what a broker leads is its own word.
* Partitions of which there is the same to say share a row, and an event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from tierlog.cli.topic import behind_in_words

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from tierlog.client.responses import Broker

UNLED_S: Final = 1.5
EVENTS_MAX: Final = 10
WIDE: Final = 76  # columns
NAMED_MAX: Final = 6  # partitions of a topic in one event
BEHIND_MIN: Final = 1_000  # offsets: a replica is always a few behind a busy leader
_COLOURS: Final = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")

Place = tuple[str, int]
InSync = tuple[tuple[int, ...], bool]  # node ids, and whether the bucket is in sync too


class Process(NamedTuple):
    """A broker of this lab; `pid`: None while it does not run."""

    node_id: int
    url: str
    kafka: str
    pid: int | None


class Led(NamedTuple):
    """A partition, as its leader says; `lags`, `has_store`: as in `LedSet`."""

    leader: int
    epoch: int
    replicas: Sequence[int]
    in_sync: Sequence[int]
    lags: Sequence[int]
    has_store: bool = False

    @property
    def set(self) -> InSync:
        return tuple(sorted(self.in_sync)), self.has_store


class Look(NamedTuple):
    """At one time. `topics`: partition counts by name; `led`: the partitions that have a leader."""

    at_s: float
    processes: Sequence[Process]
    brokers: Mapping[int, Broker]
    topics: Mapping[str, int]
    led: Mapping[Place, Led]

    @property
    def places(self) -> list[Place]:
        return [(name, one) for name, count in self.topics.items() for one in range(count)]


@dataclass
class Story:
    """What has happened, told from one look to the next."""

    _led: dict[Place, int | None] = field(default_factory=dict)
    _in_sync: dict[Place, InSync] = field(default_factory=dict)
    _unled_since_s: dict[Place, float] = field(default_factory=dict)
    _pids: dict[int, int | None] = field(default_factory=dict)
    _states: dict[int, str] = field(default_factory=dict)

    def tell(self, look: Look) -> list[str]:
        return [
            *self._of_processes(look),
            *self._of_states(look),
            *self._of_leaders(look),
            *self._of_sets(look),
        ]

    def _of_processes(self, look: Look) -> Iterable[str]:
        for one in look.processes:
            before = self._pids.get(one.node_id)
            self._pids[one.node_id] = one.pid
            if before == one.pid:
                continue
            if before is not None:
                yield f"broker {one.node_id} ended (process {before})"
            if one.pid is not None:
                yield f"broker {one.node_id} started (process {one.pid})"

    def _of_states(self, look: Look) -> Iterable[str]:
        for node_id, one in look.brokers.items():
            state = _state_of(one)
            before = self._states.get(node_id)
            self._states[node_id] = state
            if before not in (None, state):
                yield f"broker {node_id} is {state} for the others"

    def _of_leaders(self, look: Look) -> Iterable[str]:
        changes: dict[tuple[int | None, int | None], list[Place]] = {}
        for place in look.places:
            led = look.led.get(place)
            before, now = self._led.get(place), None if led is None else led.leader
            if now is not None:
                self._unled_since_s.pop(place, None)
            elif look.at_s - self._unled_since_s.setdefault(place, look.at_s) < UNLED_S:
                continue
            self._led[place] = now
            if before != now:
                changes.setdefault((before, now), []).append(place)
        for (before, now), places in sorted(changes.items(), key=str):
            moved = f"{_broker(before)} -> {_broker(now)}"
            under = f" under {_epochs(look, places)}" if now is not None else ""
            told = moved if before is not None else f"{_broker(now)} leads"
            yield f"{_named(places)}: {told}{under}"

    def _of_sets(self, look: Look) -> Iterable[str]:
        changes: dict[tuple[InSync, InSync], list[Place]] = {}
        for place, led in look.led.items():
            before = self._in_sync.get(place, led.set)
            self._in_sync[place] = led.set
            is_set = len(led.replicas) > 1 or led.has_store or before[1]
            if before != led.set and is_set:
                changes.setdefault((before, led.set), []).append(place)
        for (before, now), places in sorted(changes.items()):
            yield f"{_named(places)}: in sync {_members(before)} -> {_members(now)}"


def _state_of(one: Broker) -> str:
    """One that left no word is dead, whatever it last said."""
    return one.state if one.is_alive or one.state == "stopped" else "dead"


def _named(places: Sequence[Place]) -> str:
    """As in `flights:1,4,7 and 3 more, gates:0`."""
    numbers: dict[str, list[int]] = {}
    for name, number in sorted(places):
        numbers.setdefault(name, []).append(number)
    return ", ".join(f"{name}:{_few(found)}" for name, found in numbers.items())


def _few(numbers: Sequence[int]) -> str:
    more = len(numbers) - NAMED_MAX
    return _listed(numbers[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _epochs(look: Look, places: Iterable[Place]) -> str:
    epochs = sorted({look.led[place].epoch for place in places})
    return f"epoch {epochs[0]}" + (f" to {epochs[-1]}" if len(epochs) > 1 else "")


def _listed(node_ids: Iterable[int | str]) -> str:
    return ",".join(map(str, node_ids))


def _members(in_sync: InSync) -> str:
    return _listed([*in_sync[0], *(["bucket"] if in_sync[1] else [])])


def _broker(node_id: int | None) -> str:
    return "no leader" if node_id is None else f"broker {node_id}"


def picture(
    look: Look, events: Sequence[tuple[str, str]], *, title: str, rows: int, width: int = WIDE
) -> Group:
    """`events`: a time of day, and what happened then; the newest last. A narrow one has fewer
    columns, rather than all of them cut off.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    brokers = Table(box=None, header_style="bold", pad_edge=False)
    shown = ["node", "url", *(("kafka", "process") if width >= WIDE else ()), "state", "leads"]
    for heading in shown:
        brokers.add_column(heading, no_wrap=True)
    leads = Counter(one.leader for one in look.led.values())
    for one in look.processes:
        known = look.brokers.get(one.node_id)
        state = "-" if known is None else _state_of(known)
        cells: dict[str, Text | str] = {
            "node": Text(str(one.node_id), style=colour(one.node_id)),
            "url": one.url,
            "kafka": one.kafka,
            "process": Text("ended", style="bold red") if one.pid is None else str(one.pid),
            "state": Text(state, style="bold red" if state == "dead" else ""),
            "leads": str(leads[one.node_id]),
        }
        brokers.add_row(*(cells[heading] for heading in shown))
    topics = _topics(look, rows)
    told = [Text(f"{at}  {what}", style="" if n else "bold") for n, (at, what) in _newest(events)]
    return Group(Text(title, style="dim"), "", brokers, "", topics, "", *told)


def _newest(events: Sequence[tuple[str, str]]) -> Iterable[tuple[int, tuple[str, str]]]:
    return enumerate(reversed(events[-EVENTS_MAX:]))


def _topics(look: Look, rows: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("topic", no_wrap=True)
    table.add_column("partitions")
    for heading in ("leader", "epoch", "in sync", "behind"):
        table.add_column(heading, no_wrap=True)
    alike = list(_alike(look))
    for (name, leader, in_sync, replicas), numbers in alike[:rows]:
        places = [(name, one) for one in numbers]
        is_short = len(in_sync[0]) < len(replicas)
        shown = Text(_members(in_sync), style="bold red" if is_short else "")
        if leader is None:
            table.add_row(name, _listed(numbers), Text("none", style="bold red"))
            continue
        epochs = _epochs(look, places).removeprefix("epoch ")
        who = Text(str(leader), style=colour(leader))
        table.add_row(name, _listed(numbers), who, epochs, shown, _behind(look, places))
    if len(alike) > rows:
        table.add_row(f"and {len(alike) - rows} rows more", "")
    if not look.topics:
        table.add_row("none yet", "")
    return table


Alike = tuple[str, int | None, InSync, tuple[int, ...]]


def _alike(look: Look) -> Iterable[tuple[Alike, list[int]]]:
    """Partitions of a topic with the same leader, replicas in sync, and replicas."""
    found: dict[Alike, list[int]] = {}
    for name, number in look.places:
        led = look.led.get((name, number))
        key = (name, None, ((), False), ()) if led is None else _key(name, led)
        found.setdefault(key, []).append(number)
    return sorted(found.items(), key=lambda one: (one[0][0], one[1]))


def _key(name: str, led: Led) -> Alike:
    return name, led.leader, led.set, tuple(sorted(led.replicas))


def _behind(look: Look, places: Iterable[Place]) -> str:
    """The replicas that lack many offsets of one of these, and how many at most."""
    most: dict[int, int] = {}
    for place in places:
        led = look.led[place]
        for node_id, lag in zip(led.replicas, led.lags, strict=False):
            if lag < 0 or lag >= BEHIND_MIN:
                most[node_id] = max(most.get(node_id, -1), lag)
    return behind_in_words(sorted(most.items()))


def colour(node_id: int) -> str:
    return _COLOURS[node_id % len(_COLOURS)]
