"""What `tierlog cluster dev` shows: brokers, who leads each partition, and what has happened. Pure.

* A partition is without a leader for a moment while it is handed over: that is told once it lasts.
* Whoever answers is asked: what a broker leads is its own word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from tierlog.client.responses import Broker

UNLED_S: Final = 1.5
EVENTS_MAX: Final = 10
WIDE: Final = 76  # columns
NAMED_MAX: Final = 3  # partitions of one event
_COLOURS: Final = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")

Place = tuple[str, int]


class Process(NamedTuple):
    """A broker of this lab; `pid`: None while it does not run."""

    node_id: int
    url: str
    kafka: str
    pid: int | None


class Look(NamedTuple):
    """At one time. `topics`: partition counts by name; `leaders`: of partitions that have one."""

    at_s: float
    processes: Sequence[Process]
    brokers: Mapping[int, Broker]
    topics: Mapping[str, int]
    leaders: Mapping[Place, int]

    @property
    def places(self) -> list[Place]:
        return [(name, one) for name, count in self.topics.items() for one in range(count)]


@dataclass
class Story:
    """What has happened, told from one look to the next."""

    _led: dict[Place, int | None] = field(default_factory=dict)
    _unled_since_s: dict[Place, float] = field(default_factory=dict)
    _pids: dict[int, int | None] = field(default_factory=dict)
    _states: dict[int, str] = field(default_factory=dict)

    def tell(self, look: Look) -> list[str]:
        return [*self._of_processes(look), *self._of_states(look), *self._of_leaders(look)]

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
            before, now = self._led.get(place), look.leaders.get(place)
            if now is not None:
                self._unled_since_s.pop(place, None)
            elif look.at_s - self._unled_since_s.setdefault(place, look.at_s) < UNLED_S:
                continue
            self._led[place] = now
            if before != now:
                changes.setdefault((before, now), []).append(place)
        for (before, now), places in sorted(changes.items(), key=str):
            moved = f"{_broker(before)} -> {_broker(now)}"
            yield f"{_named(places)}: {moved if before is not None else f'{_broker(now)} leads'}"


def _state_of(one: Broker) -> str:
    """One that left no word is dead, whatever it last said."""
    return one.state if one.is_alive or one.state == "stopped" else "dead"


def _named(places: Sequence[Place]) -> str:
    shown = ", ".join(f"{name}:{number}" for name, number in places[:NAMED_MAX])
    more = len(places) - NAMED_MAX
    return f"{shown} and {more} more" if more > 0 else shown


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
    led = Counter(look.leaders.values())
    for one in look.processes:
        known = look.brokers.get(one.node_id)
        state = "-" if known is None else _state_of(known)
        cells: dict[str, Text | str] = {
            "node": Text(str(one.node_id), style=colour(one.node_id)),
            "url": one.url,
            "kafka": one.kafka,
            "process": Text("ended", style="bold red") if one.pid is None else str(one.pid),
            "state": Text(state, style="bold red" if state == "dead" else ""),
            "leads": str(led[one.node_id]),
        }
        brokers.add_row(*(cells[heading] for heading in shown))
    topics = Table(box=None, header_style="bold", pad_edge=False)
    topics.add_column("topic")
    topics.add_column("leaders of partitions 0, 1, …")
    for name, count in list(look.topics.items())[:rows]:
        topics.add_row(name, _leaders(look, name, count))
    if not look.topics:
        topics.add_row("none yet", "")
    told = [Text(f"{at}  {what}", style="" if n else "bold") for n, (at, what) in _newest(events)]
    return Group(Text(title, style="dim"), "", brokers, "", topics, "", *told)


def _newest(events: Sequence[tuple[str, str]]) -> Iterable[tuple[int, tuple[str, str]]]:
    return enumerate(reversed(events[-EVENTS_MAX:]))


def _leaders(look: Look, name: str, count: int) -> Text:
    from rich.text import Text

    text = Text()
    for number in range(count):
        node_id = look.leaders.get((name, number))
        if node_id is None:
            text.append("- ", style="bold red")
        else:
            text.append(f"{node_id} ", style=colour(node_id))
    return text


def colour(node_id: int) -> str:
    return _COLOURS[node_id % len(_COLOURS)]
