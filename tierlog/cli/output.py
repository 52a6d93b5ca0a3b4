"""How commands print: tables and colours for people, JSON for programs.

* If stdout is not a terminal, or with `--output json`, the output is one JSON document.
* Nothing in a table is truncated. Text is folded inside its column, numbers never are; if that does
  not fit, rows are printed as names and values.
* Numbers have no separators: they can be pasted into the next command.
* Cells contain untrusted text. Control characters are printed as escapes, never sent to the
  terminal.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.table import Table

FOUND_PROBLEMS: Final = 3  # exit code of a check that found problems


class Output(StrEnum):
    """`auto`: text on a terminal, JSON elsewhere."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"

    @property
    def is_json(self) -> bool:
        return self is Output.JSON or (self is Output.AUTO and not sys.stdout.isatty())

    def report(self, document: Any, text: str) -> None:
        """Print what was done: as JSON, or as a line on stderr."""
        if self.is_json:
            print_json(document)
        else:
            note(text)

    def table(
        self,
        document: Any,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        title: str = "",
    ) -> None:
        """Print what was asked for: as JSON, or as a table."""
        if self.is_json:
            print_json(document)
        else:
            print_table(title, columns, rows)


def print_json(document: Any) -> None:
    """One document, indented on a terminal."""
    import msgspec

    encoded = msgspec.json.encode(document, enc_hook=str)
    if sys.stdout.isatty():
        encoded = msgspec.json.format(encoded, indent=2)
    write(encoded + b"\n")


def write(data: bytes) -> None:
    """Write bytes unchanged, in order with what was printed."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)


def for_stdout() -> Callable[[bytes], bytes]:
    """The filter for records: they are untrusted, so a terminal gets no control characters."""
    return _for_a_terminal if sys.stdout.isatty() else bytes


def _for_a_terminal(data: bytes) -> bytes:
    return printable(data.decode(errors="backslashreplace"), keep="\n\t").encode()


def print_members(members: Mapping[str, object], *, title: str = "") -> None:
    """Print the members of a document, one line each; lists and objects are left out."""
    plain = [(k, v) for k, v in members.items() if not isinstance(v, (list, dict))]
    print_table(title, ("", ""), [(name, format_member(name, value)) for name, value in plain])


def print_documents(
    title: str, documents: Sequence[Mapping[str, object]], columns: Sequence[str] | None = None
) -> None:
    """Print a table of documents with the same members, or these of them."""
    names = columns or (list(documents[0]) if documents else [])
    rows = [[format_member(name, one.get(name)) for name in names] for one in documents]
    print_table(title, [name.replace("_", " ") for name in names], rows)


def format_size(size_bytes: int | None) -> str:
    """`12.3 MiB`."""
    if size_bytes is None:
        return "-"
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def format_time(timestamp_ms: int | None, *, timespec: str = "seconds") -> str:
    """RFC 3339 in UTC, or a dash for none."""
    from datetime import UTC, datetime, timedelta

    if timestamp_ms is None or timestamp_ms < 0:
        return "-"
    try:
        when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return str(timestamp_ms)
    return when.isoformat(timespec=timespec).replace("+00:00", "Z")


def format_member(name: str, value: Any) -> str:
    """Format a member; its name tells whether it is a size or a time."""
    if isinstance(value, int) and not isinstance(value, bool) and "bytes" in name:
        return format_size(value)
    if isinstance(value, int) and name.endswith("_ms") and value > 10**12:
        return format_time(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return cell(value)


@contextmanager
def progress_bar(
    title: str, *, total: int | None = None, in_bytes: bool = False
) -> Iterator[Callable[..., None]]:
    """Yields a function that updates a bar on stderr, by `advance` or to `completed` of `total`; it
    does nothing if stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    amount = DownloadColumn(binary_units=True) if in_bytes else TaskProgressColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield partial(progress.update, progress.add_task(title, total=total))


@contextmanager
def record_counter(title: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that shows how many records there are so far, and their rate, on stderr; it
    does nothing if stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    start_s = time.monotonic()
    text = TextColumn("{task.description} {task.completed} records, {task.fields[rate]}/s")
    console = Console(stderr=True, highlight=False)
    with Progress(text, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title, total=None, rate=0)

        def show(count: int) -> None:
            rate = round(count / max(time.monotonic() - start_s, 0.001))
            progress.update(task, completed=count, rate=rate)

        yield show


def note(text: str) -> None:
    """Print a line to stderr."""
    sys.stderr.write(text + "\n")


def warn(text: str) -> None:
    """Print a warning to stderr, yellow on a terminal."""
    line = f"warning: {printable(text)}"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        line = f"\x1b[33m{line}\x1b[0m"
    note(line)


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
