"""Times in a request: integer milliseconds since the epoch, or RFC 3339 text.

Text without a UTC offset is refused: a local time would depend on the machine.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

MAX_TIMESTAMP: Final = 2**63 - 1

_INTEGER: Final = re.compile(r"-?[0-9]{1,19}\Z", re.ASCII)
# A space before the offset is a plus sign that was not percent-encoded in a query.
_RFC3339: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d+))?(?:([Zz])|([-+ ])(\d\d):(\d\d))\Z", re.ASCII
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_DAY_MS: Final = timedelta(days=1) // _MILLISECOND


def parse_time(text: str) -> int:
    """Milliseconds since the epoch; smaller fractions are truncated, and a leap second becomes the
    second after it, since epoch time has none.

    Raises ValueError with a message for the user.
    """
    if _INTEGER.match(text):
        return _checked(int(text))
    match = _RFC3339.match(text)
    if match is None:
        raise ValueError(_expected(text))
    date, clock, fraction, _, sign, hours, minutes = match.groups()
    leap = clock.endswith(":60")
    try:
        moment = datetime.fromisoformat(f"{date}T{clock[:-2] + '59' if leap else clock}+00:00")
    except ValueError as error:
        raise ValueError(f"{_expected(text)}: {error}") from None
    shift = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
    if shift >= timedelta(days=1) or int(minutes or 0) > 59:
        raise ValueError(_expected(text))
    ms = (moment - _EPOCH) // _MILLISECOND + int((fraction or "0")[:3].ljust(3, "0"))
    shift_ms = shift // _MILLISECOND
    utc_ms = (ms + shift_ms if sign == "-" else ms - shift_ms) + 1000 * leap
    if leap and utc_ms % _DAY_MS >= 1000:  # only at the end of a UTC day (RFC 3339, 5.7)
        raise ValueError(_expected(text))
    return _checked(utc_ms)


def _checked(ms: int) -> int:
    if not 0 <= ms <= MAX_TIMESTAMP:
        raise ValueError(f"a time must be between 0 and {MAX_TIMESTAMP}, not {ms}")
    return ms


def _expected(text: str) -> str:
    return (
        "expected milliseconds since the epoch or RFC 3339 text with a UTC offset, "
        f"not {text[:64]!r}"
    )
