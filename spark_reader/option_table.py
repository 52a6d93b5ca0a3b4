"""Parses options by a table of their names, types and uses.

* Options of Spark's Kafka source that have no meaning here are ignored, so that a job can migrate
  by changing its format. An unknown option that resembles one of ours is an error that suggests the
  nearest name.
* Spark passes names in lower case; errors show them as documented.
* Errors never contain values of secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from tierlog.record_format.errors import closest_match
from tierlog.spark_reader.option_values import InvalidOption


class Use(StrEnum):
    """What the options are for."""

    BATCH = "batch reads"
    STREAM = "streams"
    WRITE = "writes"


BATCH_ONLY: Final = frozenset((Use.BATCH,))
STREAM_ONLY: Final = frozenset((Use.STREAM,))
TYPO_LIKENESS: Final = 0.8  # a name at least this similar to one of ours is taken for a typo


class Option(NamedTuple):
    """`read` parses a value, given the option's name and stripped text. Raises InvalidOption."""

    read: Callable[[str, str], Any]
    secret: bool = False
    uses: frozenset[Use] = frozenset(Use)


# Options of Spark's Kafka source and sink that have no meaning here, besides those of `kafka.`.
_KAFKA_OPTIONS: Final = frozenset(
    (
        "groupidprefix",
        "kafkaconsumer.polltimeoutms",
        "fetchoffset.numretries",
        "fetchoffset.retryintervalms",
    )
)


def is_kafka_option(name: str) -> bool:
    return name.lower().startswith("kafka.") or name.lower() in _KAFKA_OPTIONS


def read_options(
    given: Mapping[str, str], table: Mapping[str, Option], *, use: Use
) -> dict[str, Any]:
    """The parsed values, by their names in the table. Raises InvalidOption."""
    by_lower = {name.lower(): name for name in table}
    values: dict[str, Any] = {}
    for key, text in given.items():
        name = by_lower.get(key.lower())
        if name is None:
            _check_unknown(key, by_lower)
            continue
        option = table[name]
        if use not in option.uses:
            raise InvalidOption(
                f"option {name} is only for {', '.join(option.uses)}, not for {use}"
            )
        values[name] = _read(name, option, text)
    return values


def _read(name: str, option: Option, text: str) -> Any:
    try:
        return option.read(name, text.strip())
    except InvalidOption:
        if option.secret:
            raise InvalidOption(f"option {name}: invalid value (not shown)") from None
        raise


def _check_unknown(key: str, by_lower: Mapping[str, str]) -> None:
    """Raise InvalidOption if an unknown option resembles one of ours."""
    if is_kafka_option(key):
        return
    lowered = key.lower()
    near = closest_match(lowered, by_lower, cutoff=TYPO_LIKENESS)
    first_words = {re.split(r"(?=[A-Z])", name)[0] for name in by_lower.values()}
    if near or any(lowered.startswith(word) for word in first_words):
        names = ", ".join(by_lower.values())
        hint = f"did you mean {by_lower[near]}?" if near else f"the options are {names}"
        raise InvalidOption(f"there is no option {key!r}; {hint}")
