"""Converts callers' times to the milliseconds that the log stores."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from operator import index
from typing import Final, overload

from tierlog.record_format.errors import InvalidRequest

Time = int | str | datetime

MAX_TIME: Final = 2**63 - 1

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LEAP_SECOND: Final = re.compile(r"(?<=[Tt ]\d\d:\d\d:)60")


@overload
def to_ms(time: Time) -> int: ...


@overload
def to_ms(time: Time | None) -> int | None: ...


def to_ms(time: Time | None) -> int | None:
    """Milliseconds since the epoch; RFC 3339 text and datetimes need a UTC offset.

    Raises InvalidRequest: a local time would mean something else on each machine.
    """
    if time is None:
        return None
    if isinstance(time, str):
        time = _parse(time)
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise InvalidRequest(f"{time.isoformat()}: a time needs a UTC offset, as in ...Z")
        return (time - _EPOCH) // timedelta(milliseconds=1)
    try:
        return index(time)
    except TypeError:
        kind = type(time).__name__
        raise TypeError(f"a time must be an int, text or a datetime, not {kind}") from None


def time_of_record(time: Time) -> int:
    """A valid record timestamp, or -1 for none. Raises InvalidRequest: in a batch, an invalid
    timestamp would make all records fail.
    """
    found = to_ms(time)
    if not -1 <= found <= MAX_TIME:
        raise InvalidRequest(f"timestamp must be between 0 and {MAX_TIME}, not {found}")
    return found


def _parse(text: str) -> int | datetime:
    try:
        if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit():
            return int(text)
        if _LEAP_SECOND.search(text):
            return _after_leap_second(text)
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{text!r} is not a time: give milliseconds since the epoch, or RFC 3339 text "
            "as in 2013-06-01T12:00:00Z"
        ) from None


def _after_leap_second(text: str) -> datetime:
    """The following second, as the broker reads it: Unix time has no leap seconds."""
    after = datetime.fromisoformat(_LEAP_SECOND.sub("59", text)) + timedelta(seconds=1)
    if after.tzinfo and after.astimezone(UTC).strftime("%T") != "00:00:00":
        raise ValueError("leap seconds occur only at the end of a UTC day (RFC 3339)")
    return after
