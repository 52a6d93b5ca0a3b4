"""Small histories of conditional appends that are linearizable, and such that are not."""

from __future__ import annotations

from typing import Final, NamedTuple

from tests.fakes.append_history import Outcome, Row


class PlantedHistory(NamedTuple):
    name: str
    rows: list[Row]
    log: list[str]

    def __str__(self) -> str:
        return self.name


def row(value: str, called: int, returned: int, expected: int, outcome: Outcome = "ok") -> Row:
    return Row(ord(value), called, returned, expected, value, outcome)


def mismatch(value: str, called: int, returned: int, expected: int, end: int) -> Row:
    return Row(ord(value), called, returned, expected, value, "mismatch", end)


TWO: Final = [row("a", 0, 1, 0), row("b", 10, 20, 1)]


LINEARIZABLE: Final = [
    PlantedHistory("empty", [], []),
    PlantedHistory("one after the other", [row("a", 0, 1, 0), row("b", 2, 3, 1)], ["a", "b"]),
    PlantedHistory("the later call first", [row("a", 0, 9, 1), row("b", 2, 3, 0)], ["b", "a"]),
    PlantedHistory("refused beside", [row("a", 0, 9, 0), row("b", 2, 3, 0, "refused")], ["a"]),
    PlantedHistory("unknown, and there", [row("a", 0, 9, 0, "unknown")], ["a"]),
    PlantedHistory("unknown, and not there", [row("a", 0, 9, 0, "unknown")], []),
    PlantedHistory(
        "unknown, and there long after",
        [row("a", 0, 1, 1, "unknown"), row("b", 5, 6, 0), row("c", 8, 9, 2)],
        ["b", "a", "c"],
    ),
]
LINEARIZABLE += [
    PlantedHistory(
        f"a 412 of {end} at {called}", [*TWO, mismatch("c", called, called + 1, 7, end)], ["a", "b"]
    )
    for called, end in ((5, 1), (12, 1), (12, 2), (30, 2))
]
FAULTY: Final = [
    PlantedHistory("lost", [row("a", 0, 1, 0), row("b", 2, 3, 1)], ["a"]),
    PlantedHistory("doubled", [row("a", 0, 1, 0)], ["a", "a"]),
    PlantedHistory("replaced", [row("a", 0, 1, 0), row("b", 2, 3, 0)], ["b"]),
    PlantedHistory("at another offset", [row("a", 0, 9, 1), row("b", 0, 9, 1)], ["a", "b"]),
    PlantedHistory("before its call", [row("a", 0, 1, 1), row("b", 5, 6, 0)], ["b", "a"]),
    PlantedHistory("refused, and there", [row("a", 0, 1, 0, "refused")], ["a"]),
    PlantedHistory("never sent", [row("a", 0, 1, 0)], ["a", "b"]),
    PlantedHistory(
        "unknown, and there too early",
        [row("a", 0, 1, 1), row("b", 5, 6, 0, "unknown")],
        ["b", "a"],
    ),
]
FAULTY += [
    PlantedHistory(
        f"a 412 of {end} at {called}", [*TWO, mismatch("c", called, called + 1, 7, end)], ["a", "b"]
    )
    for called, end in ((5, 0), (5, 2), (30, 1), (30, 3), (30, 7))
]
FAULTY.append(
    PlantedHistory(
        "a 412 that goes back",
        [*TWO, mismatch("c", 12, 13, 7, 2), mismatch("d", 14, 15, 7, 1)],
        ["a", "b"],
    )
)
