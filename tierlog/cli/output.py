"""How commands print: tables and colours for people, JSON for programs.

If stdout is not a terminal, or with `--output json`, the output is one JSON document.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any, Final

import msgspec

from tierlog.cli.table import cell, print_table, printable

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


def format_time(timestamp_ms: int | None) -> str:
    """RFC 3339 in UTC, or a dash for none."""
    from datetime import UTC, datetime

    if timestamp_ms is None or timestamp_ms < 0:
        return "-"
    try:
        when = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError):
        return str(timestamp_ms)
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")


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


def note(text: str) -> None:
    """Print a line to stderr."""
    sys.stderr.write(text + "\n")
