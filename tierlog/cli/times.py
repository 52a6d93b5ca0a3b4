"""Times on a command line.

* A duration is that long ago: `1h`.
* A time without a UTC offset is read as UTC, as the console reads it, and said so on stderr.
* Any other time is the API's: RFC 3339 with an offset, or milliseconds.
"""

from __future__ import annotations

import typer

from tierlog.cli.output import note
from tierlog.client.records import to_ms
from tierlog.record_format.errors import InvalidRequest
from tierlog.record_format.units import in_utc, parse_duration


def parse_time(option: str, text: str, *, now_ms: int) -> int:
    """Milliseconds since the epoch. Raises BadParameter."""
    text = text.strip()
    if text == "now":
        return now_ms
    if (ago_ms := _duration(text)) is not None:
        return now_ms - ago_ms
    if (read := in_utc(text)) != text:
        note(f"{option} {text} has no UTC offset: read as {read}")
    try:
        return to_ms(read)
    except InvalidRequest as error:
        raise typer.BadParameter(f"{option}: {error}, or 1h for an hour ago") from error


def _duration(text: str) -> int | None:
    if text.lstrip("-").isdecimal():
        return None  # milliseconds since the epoch
    try:
        return parse_duration(text)
    except ValueError:
        return None


def is_number(text: str) -> bool:
    """Whether it is written like an offset."""
    return text.isascii() and text.isdigit() and len(text) <= 19
