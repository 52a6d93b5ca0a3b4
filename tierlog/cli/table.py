"""Lays out tables as lines of text: pure functions, with the width as an argument.

* Nothing is truncated. In a narrow terminal headings wrap at spaces; if that is not enough, text is
  folded inside its column, preferably at separators; numbers never are. If even that does not fit,
  rows are printed as names and values.
* Numbers have no separators: they can be pasted into the next command.
* Cells contain untrusted text. Control characters are printed as escapes, never sent to the
  terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple
from unicodedata import combining, east_asian_width

GAP: Final = "  "
NARROW_GAP: Final = " "
_PIECE_MAX: Final = 22  # a topic id; longer words are broken
_BREAK: Final = re.compile(r"(?<=[ /_.,:=&?-])(?![ /])")
_SIZE: Final = re.compile(r"[0-9.]+ [KMGT]?i?B\Z")
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT)(\d\d:\d\d:[0-9.]+Z)\Z")
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?%?\Z")


class Lines(NamedTuple):
    headings: list[str]
    rows: list[str]


def cell(value: object) -> str:
    """The text of a value; a dash for None."""
    return "-" if value is None else printable(str(value))


def printable(text: str, *, keep: str = "") -> str:
    """Replace control characters, except those to keep, by Python's escapes."""
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text)


def lay_out(columns: Sequence[str], rows: Iterable[Sequence[object]], *, width: int) -> Lines:
    """Numbers are right-aligned, the rest left-aligned; empty headings are omitted."""
    cells = [[cell(value) for value in row] for row in rows]
    bodies = [[row[index] for row in cells] for index in range(len(columns))]
    right = [_are_numbers(body) for body in bodies]
    for headings, minimum, gap in _layouts(columns, bodies, right):
        widths = _widths(headings, bodies)
        fitted = _fit(widths, minimum, width - len(gap) * (len(columns) - 1))
        if fitted is not None:
            return _render(headings, cells, fitted, right, gap)
    if any(columns):
        return Lines([], _as_members(columns, cells, width))
    return _render(headings, cells, minimum, right, gap)


def _layouts(
    columns: Sequence[str], bodies: Sequence[Sequence[str]], right: Sequence[bool]
) -> Iterator[tuple[list[list[str]], list[int], str]]:
    """From the best to the narrowest: headings, each column's minimum width, the gap."""
    whole, words = [[one] for one in columns], [one.split() or [""] for one in columns]
    yield whole, _widths(whole, bodies), GAP
    yield words, _widths(words, bodies), GAP
    pieces = [
        body if number else [piece.rstrip() for text in body for piece in _pieces(text)]
        for body, number in zip(bodies, right, strict=True)
    ]
    yield words, _widths(words, pieces), GAP
    yield words, _widths(words, pieces), NARROW_GAP


def _fit(widths: Sequence[int], minimum: Sequence[int], room: int) -> list[int] | None:
    """Shrink the widest columns first; None if the minimum widths do not fit."""
    if sum(minimum) > room:
        return None
    fitted = [max(low, min(one, room)) for one, low in zip(widths, minimum, strict=True)]
    while sum(fitted) > room:
        widest = max(range(len(fitted)), key=lambda i: (fitted[i] > minimum[i], fitted[i]))
        fitted[widest] -= 1
    return fitted


def _render(
    headings: Sequence[Sequence[str]],
    cells: Sequence[Sequence[str]],
    widths: Sequence[int],
    right: Sequence[bool],
    gap: str,
) -> Lines:
    height = max(map(len, headings), default=0)
    above = [[*[""] * (height - len(one)), *one] for one in headings]
    has_headings = any(any(one) for one in headings)
    folded = [[fold(one, width) for one, width in zip(row, widths, strict=True)] for row in cells]
    lines = [line for row in folded for line in zip_longest(*row, fillvalue="")]
    taken = _widths(headings, [[line[index] for line in lines] for index in range(len(widths))])
    return Lines(
        [_line(one, taken, right, gap) for one in zip(*above, strict=True)] * has_headings,
        [_line(line, taken, right, gap) for line in lines],
    )


def _as_members(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[str]:
    lines: list[str] = []
    for row in cells:
        members = list(zip(columns, row, strict=True))
        lines += [*([""] if lines else ()), *lay_out(("", ""), members, width=width).rows]
    return lines


def fold(text: str, width: int) -> list[str]:
    """Wrap to a width, preferably at separators."""
    if _display_width(text) <= width:
        return [text]
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and _display_width((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [part for line in lines for part in _hard_wrap(line.rstrip(), width)]


def _pieces(text: str) -> list[str]:
    if _SIZE.match(text):
        return [text]
    if time := _TIME.match(text):
        return list(time.groups())
    return [part for piece in _BREAK.split(text) for part in _hard_wrap(piece, _PIECE_MAX)]


def _hard_wrap(text: str, width: int) -> list[str]:
    """Wrap regardless of separators."""
    parts = [""]
    for character in text:
        if parts[-1] and _display_width(parts[-1] + character) > width:
            parts.append("")
        parts[-1] += character
    return parts


def _widths(headings: Sequence[Sequence[str]], bodies: Sequence[Sequence[str]]) -> list[int]:
    return [
        max(map(_display_width, [*words, *body]))
        for words, body in zip(headings, bodies, strict=True)
    ]


def _are_numbers(cells: Sequence[str]) -> bool:
    found = [one for one in cells if one != "-"]
    return bool(found) and all(_NUMBER.match(one) for one in found)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], gap: str) -> str:
    padded = [
        " " * (width - _display_width(one)) + one
        if to_right
        else one + " " * (width - _display_width(one))
        for one, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return gap.join(padded).rstrip()


def _display_width(text: str) -> int:
    """The number of terminal columns that the text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(one) else 1 + (east_asian_width(one) in "WF") for one in text)
