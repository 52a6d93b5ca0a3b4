"""How the value of a setting is written: in a file, a variable or a flag, and in what errors say.

A parser raises ValueError or TypeError. Limits are the table's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final

from tierlog.broker.settings import Migration
from tierlog.record_format.units import parse_duration, parse_size

_YES: Final = frozenset(("1", "true", "yes", "on"))
_NO: Final = frozenset(("0", "false", "no", "off"))


def _text(raw: object) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError
    return raw


def _count(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise TypeError
    return int(raw)


def _bytes(raw: object) -> int:
    return parse_size(raw) if isinstance(raw, str) else _count(raw)


def _ms(raw: object, *, unit: str = "ms") -> int:
    if isinstance(raw, bool):
        raise TypeError
    return parse_duration(str(raw), unit=unit)


def _dollars(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise TypeError
    price = float(raw)
    if not 0 <= price < math.inf:
        raise ValueError
    return price


def _switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = _text(raw).lower()
    if text not in _YES | _NO:
        raise ValueError
    return text in _YES


def _migration(raw: object) -> Migration:
    return Migration(_text(raw).lower())


def _path(raw: object) -> Path:
    return raw if isinstance(raw, Path) else Path(_text(raw))


def _seconds(raw: object) -> int:
    return _ms(raw, unit="s")


class Kind(Enum):
    """How a value is written: its placeholder in help, its parser, and what errors say of it."""

    TEXT = ("TEXT", _text, "text")
    PATH = ("PATH", _path, "a path")
    COUNT = ("N", _count, "a whole number")
    BYTES = ("BYTES", _bytes, "a number of bytes, as in 67108864 or 64MiB")
    MS = ("MS", _ms, "a time in milliseconds, as in 30000 or 30s")
    SECONDS = ("SECONDS", _seconds, "a time in seconds, as in 30 or 500ms")
    DOLLARS = ("DOLLARS", _dollars, "a price in dollars, 0 or more, as in 0.005")
    SWITCH = ("", _switch, "true or false")
    MIGRATION = ("POLICY", _migration, "one of " + ", ".join(Migration))

    def __init__(self, placeholder: str, parse: Callable[[object], object], expected: str) -> None:
        self.placeholder, self.parse, self.expected = placeholder, parse, expected
