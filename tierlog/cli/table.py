"""Tables as lines of text: pure, so that a width is an argument.

* Nothing is cut off. In a narrow window headings wrap at their spaces; if that is not enough, the
  window wraps the lines.
* Numbers have no separators: what is shown can be pasted into the next command.
* Cells contain other people's text. Control characters are shown as escapes, never sent to the
  terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from unicodedata import combining, east_asian_width

GAP: Final = "  "
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?%?\Z")


class Lines(NamedTuple):
    headings: list[str]
    rows: list[str]


def cell(value: object) -> str:
    """A dash for nothing."""
    return "-" if value is None else printable(str(value))


def printable(text: str, *, but: str = "") -> str:
    """The text with control characters as Python's escapes."""
    return "".join(one if one.isprintable() or one in but else ascii(one)[1:-1] for one in text)


def lay_out(columns: Sequence[str], rows: Iterable[Sequence[object]], *, width: int) -> Lines:
    """Numbers to the right, the rest to the left; no headings if all are empty."""
    cells = [[cell(value) for value in row] for row in rows]
    bodies = [max((_room(row[index]) for row in cells), default=0) for index in _each(columns)]
    headings = [[column] for column in columns]
    if sum(_widths(headings, bodies)) + len(GAP) * (len(columns) - 1) > width:
        headings = [column.split() or [""] for column in columns]
    widths = _widths(headings, bodies)
    right = [_are_numbers([row[index] for row in cells]) for index in _each(columns)]
    height = max(map(len, headings), default=0) if any(columns) else 0
    above = [[*[""] * (height - len(one)), *one] for one in headings]
    return Lines(
        [_line([one[level] for one in above], widths, right) for level in range(height)],
        [_line(row, widths, right) for row in cells],
    )


def _each(columns: Sequence[str]) -> range:
    return range(len(columns))


def _widths(headings: Sequence[Sequence[str]], bodies: Sequence[int]) -> list[int]:
    return [max(body, *map(_room, words)) for words, body in zip(headings, bodies, strict=True)]


def _are_numbers(cells: Sequence[str]) -> bool:
    found = [one for one in cells if one != "-"]
    return bool(found) and all(_NUMBER.match(one) for one in found)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        " " * (width - _room(one)) + one if to_right else one + " " * (width - _room(one))
        for one, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return GAP.join(padded).rstrip()


def _room(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(one) else 1 + (east_asian_width(one) in "WF") for one in text)
