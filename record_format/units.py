"""Sizes, durations, times and costs as people write and read them: `64KiB`, `7d`, `$0.25`.

* What is printed is exact, in the unit that makes the number smallest, and can be given back.
* `k` is 1000 and `Ki` is 1024, in upper or lower case. Without a unit a size is in bytes.
"""

from __future__ import annotations

import math
import re
from typing import Final

_SIZE: Final = re.compile(r"(-?\d+)\s*([KMGT]i?)?B?\Z", re.IGNORECASE | re.ASCII)
_DURATION: Final = re.compile(r"(-?\d+)(\.\d+)?\s*(ms|s|min|m|h|d)?\Z", re.ASCII)
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d\Z", re.ASCII)
_LOCAL: Final = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d(?:\.\d+)?)?\Z", re.ASCII)
_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_IN_BYTES: Final = {
    prefix + "B": base**power
    for base, prefixes in ((1024, ("", "Ki", "Mi", "Gi", "Ti")), (1000, ("", "k", "M", "G", "T")))
    for power, prefix in enumerate(prefixes)
}


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    unit = (match[2] or "").upper()
    base = 1024 if unit.endswith("I") else 1000
    return int(match[1]) * int(base ** " KMGT".index(unit[:1] or " "))


def parse_duration(text: str, *, unit: str = "ms") -> int:
    """Milliseconds, rounded up; `unit` is that of a plain number. Raises ValueError."""
    match = _DURATION.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration")
    factor = _MS[match[3] or unit]
    if match[2] is None:
        return int(match[1]) * factor
    return math.ceil(float(match[1] + match[2]) * factor)


def size_in_words(size_bytes: int) -> str:
    """`64 KiB`, `5 MB`, `1048588 B`."""
    return _in_largest_unit(size_bytes, _IN_BYTES, "B")


def duration_in_words(ms: int) -> str:
    """`7 d`, `90 s`, `1500 ms`."""
    return _in_largest_unit(ms, {unit: size for unit, size in _MS.items() if unit != "m"}, "ms")


def rough_duration(ms: float) -> str:
    """One unit, rounded down."""
    seconds = int(ms) // 1000
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s" if seconds or not ms else f"{ms:.0f} ms"


def dollars(amount: float) -> str:
    """To the cent; smaller amounts with more digits."""
    if amount >= 0.995 or not amount:
        return f"${amount:,.2f}"
    if amount < 0.000_001:
        return "under $0.000001"
    digits = 6 if amount < 0.000_1 else 4 if amount < 0.01 else 2
    return f"${amount:.{digits}f}"


def _in_largest_unit(value: int, units: dict[str, int], smallest: str) -> str:
    """The largest unit that divides the value."""
    if not value:
        return f"0 {smallest}"
    unit, size = max(
        ((unit, size) for unit, size in units.items() if value % size == 0), key=lambda one: one[1]
    )
    return f"{value // size} {unit}"


def in_utc(text: str) -> str:
    """A date, or a time without a UTC offset, as RFC 3339 in UTC; anything else unchanged.

    Only where people see how it was read: the API refuses such a time.
    """
    if _DATE.match(text):
        return f"{text}T00:00:00Z"
    match = _LOCAL.match(text)
    return f"{match[1]}T{match[2]}{match[3] or ':00'}Z" if match else text
