"""Parsers for the values of single options, which Spark passes as text, and the ends of a read that
they make. No I/O.

* Spaces around a value are removed. An error names the option and its valid values, and never shows
  the value of a secret.
* Ends mean what they mean for Spark's Kafka source: a timestamp for all partitions takes precedence
  over timestamps by partition, and those over offsets; -2 is the earliest offset, -1 the latest; a
  timestamp means the first record at or after it; a map may name only some partitions, and the
  others use the default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, TypeGuard

from tierlog.record_format.errors import InvalidOption, InvalidRequest
from tierlog.record_format.record_walk import I64_MAX

_SIZE: Final = re.compile(r"(\d{1,18})\s*([kmgt]?)i?b?", re.IGNORECASE)
_FACTORS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
I32_MAX: Final = 2**31 - 1
_DURATION: Final = re.compile(r"(\d{1,18})\s*(ms|s|m|min|h|d)?")
_HAS_USER: Final = re.compile(r"([^:/?#@]+://)?[^/?#]*@")
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def invalid(name: str, value: str, allowed: str) -> InvalidOption:
    shown = value if len(value) <= 200 else f"{value[:200]}…"
    return InvalidOption(f"option {name}: {shown!r} is not {allowed}")


def text(name: str, value: str) -> str:
    if not value:
        raise invalid(name, value, "a non-empty text")
    return value


def address(name: str, value: str) -> str:
    """Addresses may not contain a user or password, since Spark shows them in its plans."""
    if _HAS_USER.match(value):
        raise InvalidOption(
            f"option {name}: the address (not shown here) must not contain a user or a password; "
            "use the options for tokens and keys"
        )
    return text(name, value)


def http_address(name: str, value: str) -> str:
    value = address(name, value)
    if value.partition("://")[0].lower() not in {"http", "https"}:
        raise invalid(name, value, "a URL such as http://127.0.0.1:9000 or https://host")
    return value


def boolean(name: str, value: str) -> bool:
    if value.lower() not in {"true", "false"}:
        raise invalid(name, value, "one of true, false")
    return value.lower() == "true"


def count(name: str, value: str) -> int:
    found = _number(value)
    if not found:
        raise invalid(name, value, "a whole number above 0, and below 2^63")
    return found


def value_schema(name: str, value: str) -> str | int:
    """`latest`, `registry`, or the id of a schema."""
    if value.lower() in {"latest", "registry"}:
        return value.lower()
    found = _number(value)
    if not found or found > I32_MAX:
        raise invalid(name, value, "latest, registry, or the id of a schema")
    return found


def size(name: str, value: str) -> int:
    found = _SIZE.fullmatch(value)
    if not found or int(found[1]) == 0:
        raise invalid(name, value, "a size above 0, in bytes or with a unit, such as 64m")
    return int(found[1]) * _FACTORS[found[2].lower()]


def duration_ms(name: str, value: str) -> int:
    found = _DURATION.fullmatch(value.lower())
    if not found:
        raise invalid(
            name, value, "a duration, such as 30s or 15m (milliseconds if it has no unit)"
        )
    return int(found[1]) * _UNITS_MS[found[2] or "ms"]


def one_of(*allowed: str) -> Callable[[str, str], str]:
    def parse(name: str, value: str) -> str:
        if value.lower() not in allowed:
            raise invalid(name, value, f"one of {', '.join(allowed)}")
        return value.lower()

    return parse


def time_ms(name: str, value: str) -> int:
    found = _time(value)
    if found is None:
        raise invalid(
            name,
            value,
            "a time: milliseconds since the epoch, or ISO 8601 such as 2026-06-01T12:00:00Z",
        )
    return found


def offsets_or(*words: str) -> Callable[[str, str], str | dict[str, dict[int, int]]]:
    """`earliest` or `latest`, if among `words`, or JSON of offsets by topic and partition."""
    special = {"earliest": EARLIEST, "latest": LATEST}
    banned = {number: word for word, number in special.items() if word not in words}
    numbers = ", ".join(f"{special[word]} is the {word}" for word in words)
    example = f'{{"topic": {{"0": 23, "1": {special[words[0]]}}}}}'
    allowed = f"one of {', '.join(words)}, or JSON such as {example} ({numbers})"

    def parse(name: str, value: str) -> str | dict[str, dict[int, int]]:
        if (word := value.lower()) in words:
            return word
        found = _by_partition(name, value, allowed=allowed, number=_offset)
        for topic, partitions in found.items():
            for partition, offset in partitions.items():
                if offset in banned:
                    raise InvalidOption(
                        f"option {name}: {offset} ({banned[offset]}) for {topic}-{partition} "
                        f"is not allowed here; expected {allowed}"
                    )
        return found

    return parse


def times_by_partition(name: str, value: str) -> dict[str, dict[int, int]]:
    return _by_partition(
        name,
        value,
        allowed='JSON such as {"topic": {"0": 1700000000000, "1": "2026-06-01T12:00:00Z"}}',
        number=_time,
    )


def versions_by_partition(name: str, value: str) -> dict[str, dict[int, int]]:
    allowed = 'JSON of manifest versions, such as {"topic": {"0": 12, "1": 7}}'
    return _by_partition(name, value, allowed=allowed, number=_version)


def assignment(name: str, value: str) -> dict[str, tuple[int, ...]]:
    """`{"topicA": [0, 1], "topicB": [2]}`."""
    allowed = 'JSON such as {"topicA": [0, 1], "topicB": [2]}'
    assigned: dict[str, tuple[int, ...]] = {}
    for topic, partitions in _json_object(name, value, allowed).items():
        given = partitions if isinstance(partitions, list) else []
        numbers = {one for one in given if _is_int(one) and one >= 0}
        if not numbers or len(numbers) != len(given):
            raise invalid(name, value, allowed)
        assigned[topic] = tuple(sorted(numbers))
    return assigned


def topic_list(name: str, value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(one.strip() for one in value.split(",") if one.strip()))
    if not names:
        raise invalid(name, value, "a list of topics, such as topicA,topicB")
    return names


def pattern(name: str, value: str) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise invalid(name, value, f"a regular expression ({error})") from error


def _json_object(name: str, value: str, allowed: str) -> dict[str, object]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise invalid(name, value, allowed) from error
    if not isinstance(found, dict) or not found:
        raise invalid(name, value, allowed)
    return found


def _by_partition(
    name: str, value: str, *, allowed: str, number: Callable[[object], int | None]
) -> dict[str, dict[int, int]]:
    read: dict[str, dict[int, int]] = {}
    for topic, partitions in _json_object(name, value, allowed).items():
        if not isinstance(partitions, Mapping):
            raise invalid(name, value, allowed)
        read[topic] = {}
        for partition, given in partitions.items():
            key, found = _number(partition), number(given)
            if key is None or found is None:
                raise invalid(name, value, allowed)
            read[topic][key] = found
    return read


def _number(text: str) -> int | None:
    """Of decimal digits; None also beyond 64 bits."""
    found = int(text) if text.isdecimal() and len(text) < 20 else -1
    return found if 0 <= found <= I64_MAX else None


def _is_int(given: object) -> TypeGuard[int]:
    return isinstance(given, int) and not isinstance(given, bool)


def _offset(given: object) -> int | None:
    return given if _is_int(given) and given >= EARLIEST else None


def _version(given: object) -> int | None:
    return given if _is_int(given) and given > 0 else None


def _time(given: object) -> int | None:
    """None also for a timestamp that no record can have, which the broker would reject."""
    if isinstance(given, str):
        from tierlog.client.records import to_ms  # few reads need the codec of records

        with suppress(InvalidRequest):
            given = to_ms(given)
    if _is_int(given) and 0 <= given <= I64_MAX:
        return given
    return None


EARLIEST: Final = -2
LATEST: Final = -1

ByPartition = Mapping[str, Mapping[int, int]]


class AtTime(NamedTuple):
    """The first record at or after a time (ms)."""

    timestamp: int

    def __str__(self) -> str:
        return f"time {self.timestamp}"


OffsetSpec = int | AtTime
"""An offset, EARLIEST, LATEST, or a time."""


class NoMatch(StrEnum):
    """What happens if no record is at or after the starting timestamp."""

    ERROR = "error"
    LATEST = "latest"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """One end of a read. `timestamp` is for all partitions, `timestamps` for those in the map."""

    default: int
    offsets: ByPartition = field(default_factory=dict)
    timestamp: int | None = None
    timestamps: ByPartition = field(default_factory=dict)
    no_match: NoMatch = NoMatch.ERROR

    @property
    def has_times(self) -> bool:
        return self.timestamp is not None or bool(self.timestamps)

    def spec_for(self, topic: str, partition: int) -> OffsetSpec:
        if self.timestamp is not None:
            return AtTime(self.timestamp)
        timestamp = self.timestamps.get(topic, {}).get(partition)
        if timestamp is not None:
            return AtTime(timestamp)
        return self.offsets.get(topic, {}).get(partition, self.default)

    def named(self) -> list[tuple[str, int]]:
        """The topics and partitions named in the maps."""
        maps = (self.offsets, self.timestamps)
        return [
            (topic, number) for by_topic in maps for topic in by_topic for number in by_topic[topic]
        ]


def is_backwards(start: OffsetSpec, end: OffsetSpec) -> bool:
    """Whether a range is known to end before it starts, without looking up anything."""
    if isinstance(start, AtTime) or isinstance(end, AtTime):
        return isinstance(start, AtTime) and isinstance(end, AtTime) and start > end
    return start > end >= 0
