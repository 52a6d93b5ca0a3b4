"""Tables on standard output, by rich.

* Nothing is truncated. Text is folded inside its column, numbers never are; if that does not fit,
  rows are printed as names and values.
* Numbers have no separators: they can be pasted into the next command.
* Cells contain untrusted text. Control characters are printed as escapes, never sent to the
  terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.table import Table

WIDE: Final = 1 << 20  # columns, without a terminal: lines are not wrapped, so that grep works
TEXT_MIN: Final = 8  # columns, for a cell that is no number
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?%?\Z")


def cell(value: object) -> str:
    """The text of a value; a dash for None."""
    return "-" if value is None else printable(str(value))


def printable(text: str, *, keep: str = "") -> str:
    """Replace control characters, except those to keep, by Python's escapes."""
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = ""
) -> None:
    """Print a table that fits the terminal, numbers right-aligned; empty headings are omitted."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDE
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    cells = [[cell(value) for value in row] for row in rows]
    with console.capture() as captured:
        if title:
            console.print(title)
        if _least_width(columns, cells) <= console.width:
            console.print(_table(columns, cells))
        else:
            for index, row in enumerate(cells):
                members = list(zip(columns, row, strict=True))
                console.print(*([""] if index else ()), _table(("", ""), members), sep="\n")
        if caption:
            console.print(caption)
    sys.stdout.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())


def _least_width(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """The sum of all numbers, words of headings, and `TEXT_MIN` of other cells; 0 for members."""
    if not any(columns):
        return 0
    sizes = []
    for heading, *body in zip(columns, *cells, strict=True):
        longest = max(map(len, body), default=0)
        words = max(map(len, heading.split()), default=0)
        sizes.append(max(words, longest if _are_numbers(body) else min(longest, TEXT_MIN)))
    return sum(sizes) + 2 * (len(columns) - 1)


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    style = "" if os.environ.get("NO_COLOR") else "bold"
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=style, show_header=any(columns)
    )
    for index, heading in enumerate(columns):
        is_number = _are_numbers([row[index] for row in cells])
        table.add_column(
            heading, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    for row in cells:
        table.add_row(*row)
    return table


def _are_numbers(cells: Sequence[str]) -> bool:
    found = [one for one in cells if one != "-"]
    return bool(found) and all(_NUMBER.match(one) for one in found)
