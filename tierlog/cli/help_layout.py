"""The layout of options in help: what has to be typed is never truncated.

typer prints names, types and help side by side, and in a narrow terminal truncates the longest.
Here names and types keep their width; if that leaves too little, the help goes below them. Nor has
a flag a type here: `--yes <bool>` would read as if a value were to follow.
"""

from __future__ import annotations

from typing import Final

import typer.rich_utils
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

HELP_MIN: Final = 34  # columns: more than the longest name of a variable
_INDENT: Final = 8
_FLAG_TYPE: Final = "<bool>"


def install() -> None:
    """Replace typer's layout."""
    typer.rich_utils.Table = OptionTable  # type: ignore[attr-defined]


class OptionTable(Table):
    """typer's table; its last column is the help. The table of commands has headings, and stays."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if any(column.header for column in self.columns):
            yield from super().__rich_console__(console, options)
            return
        cells = [
            ["" if str(cell) == _FLAG_TYPE else cell for cell in column.cells]
            for column in self.columns
        ]
        present = [column for column in cells if any(map(_is_present, column))]
        room = options.max_width - sum(
            _width(console, options, column) + 2 for column in present[:-1]
        )
        rows = list(zip(*present, strict=True))
        yield _side_by_side(rows) if room >= HELP_MIN else _stacked(rows)


def _side_by_side(rows: list[tuple[RenderableType, ...]]) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in rows[0][:-1]:
        table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for row in rows:
        table.add_row(*row)
    return table


def _stacked(rows: list[tuple[RenderableType, ...]]) -> Group:
    """The asterisk of a required parameter stays in front."""
    stars = any(str(first) in {"", "*"} for first, *_ in rows)
    lines: list[RenderableType] = []
    for row in rows:
        *names, text = row
        star = names.pop(0) if stars else ""
        head = Text("  ").join(_text(one) for one in names if _is_present(one))
        lines.append(Text.assemble(_text(star), " " * (3 - len(str(star))) * stars, head))
        lines.append(Padding(text, (0, 0, 0, _INDENT)))
    return Group(*lines)


def _text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _is_present(cell: RenderableType) -> bool:
    return not isinstance(cell, str | Text) or bool(str(cell))


def _width(console: Console, options: ConsoleOptions, column: list[RenderableType]) -> int:
    return max(Measurement.get(console, options, cell).maximum for cell in column)
