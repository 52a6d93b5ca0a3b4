"""Reading options by a table: which there are, what each may be, where it may be used.

Rules that keep it honest:

* An option of Spark's Kafka source that has no meaning here is ignored (a job moves by changing the
  format), and one that has is in the table. One that looks like ours but is not is refused by name,
  with the nearest that exists.
* Spark hands names over in lower case; errors show them as the documentation does.
* Values of secrets are in no error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from record_format.name_suggestions import closest_match
from spark_reader.option_values import InvalidOption


class Use(StrEnum):
    """What the options are given to."""

    BATCH = "batch reads"
    STREAM = "streams"
    WRITE = "writes"


BATCH_ONLY: Final = frozenset((Use.BATCH,))
STREAM_ONLY: Final = frozenset((Use.STREAM,))
MISTYPED: Final = 0.8  # from this likeness on, another name is one of ours with a slip


class Option(NamedTuple):
    """`read` takes name and text, and raises InvalidOption."""

    read: Callable[[str, str], Any]
    secret: bool = False
    uses: frozenset[Use] = frozenset(Use)


# Of Spark's Kafka source and sink, without a meaning here; and all that begins with `kafka.`.
_KAFKAS: Final = frozenset(
    (
        "groupidprefix",
        "kafkaconsumer.polltimeoutms",
        "fetchoffset.numretries",
        "fetchoffset.retryintervalms",
    )
)


def is_kafkas(name: str) -> bool:
    return name.lower().startswith("kafka.") or name.lower() in _KAFKAS


def read_options(
    given: Mapping[str, str], table: Mapping[str, Option], *, use: Use
) -> dict[str, Any]:
    """The values by the names of the table. Raises InvalidOption."""
    by_lower = {name.lower(): name for name in table}
    values: dict[str, Any] = {}
    for key, text in given.items():
        name = by_lower.get(key.lower())
        if name is None:
            _refuse_if_like_ours(key, by_lower)
            continue
        option = table[name]
        if use not in option.uses:
            raise InvalidOption(f"option {name} is for {', '.join(option.uses)}, not for {use}")
        values[name] = _read(name, option, text)
    return values


def _read(name: str, option: Option, text: str) -> Any:
    try:
        return option.read(name, text)
    except InvalidOption:
        if option.secret:
            raise InvalidOption(f"option {name}: its value cannot be used") from None
        raise


def _refuse_if_like_ours(key: str, by_lower: Mapping[str, str]) -> None:
    if is_kafkas(key):
        return
    lowered = key.lower()
    near = closest_match(lowered, by_lower, cutoff=MISTYPED)
    first_words = {re.split(r"(?=[A-Z])", name)[0] for name in by_lower.values()}
    if near or any(lowered.startswith(word) for word in first_words):
        names = ", ".join(by_lower.values())
        hint = f"did you mean {by_lower[near]}?" if near else f"there are {names}"
        raise InvalidOption(f"there is no option {key!r}; {hint}")
