"""A topic's settings as people write and read them: `7d`, `64KiB`, `unlimited`.

* For the command line and the console. The API and what is stored have Kafka's numbers alone.
* What `in_words` gives, `from_words` takes back to a value of the same meaning.
* Limits are the broker's: here text only becomes a number. The text of a key that is unknown here,
  or has no numbers, is left as it is.
"""

from __future__ import annotations

from typing import Final

from tierlog.hot_tier.log_config import KEYS_BY_NAME, LOCAL_FOLLOWS_TOTAL, LONG_MAX, ConfigKey
from tierlog.record_format.topic_rules import ConfigValue
from tierlog.record_format.units import (
    duration_in_words,
    parse_duration,
    parse_size,
    size_in_words,
)

UNLIMITED: Final = "unlimited"
_NO_LIMIT: Final = -1
_NEVER: Final = ("offload.max.lag.ms", "cold.merge.min.bytes")  # what -1 means for them


def in_words(name: str, value: ConfigValue) -> str:
    """`7 d`, `64 KiB`, `unlimited`, `as retention.ms`, `true`; other values as they are."""
    if isinstance(value, bool):
        return str(value).lower()
    key = KEYS_BY_NAME.get(name)
    if key is None or not isinstance(value, int):
        return str(value)
    if (word := _words(key).get(value)) is not None:
        return word
    if name.endswith(".ms"):
        return duration_in_words(value)
    return size_in_words(value) if name.endswith(".bytes") else str(value)


def from_words(name: str, text: str) -> ConfigValue:
    """The number of a duration, a size or a word. Raises ValueError that says what is expected."""
    key = KEYS_BY_NAME.get(name)
    if key is None or key.kind not in ("int", "long"):
        return text
    values = {word: value for value, word in _words(key).items()}  # -1 before the largest number
    if (value := values.get(" ".join(text.lower().split()))) is not None:
        return value
    try:
        if name.endswith(".ms"):
            return parse_duration(text)
        return parse_size(text) if name.endswith(".bytes") else int(text)
    except ValueError:
        raise ValueError(f"{name} must be {_expected(key)}, not {text!r}") from None


def _words(key: ConfigKey) -> dict[int, str]:
    """The values that stand for something else than their number."""
    assert key.minimum is not None
    words = {LONG_MAX: UNLIMITED} if key.maximum == LONG_MAX else {}
    if key.minimum <= _NO_LIMIT:
        words[_NO_LIMIT] = "never" if key.name in _NEVER else UNLIMITED
    if key.minimum <= LOCAL_FOLLOWS_TOTAL:
        words[LOCAL_FOLLOWS_TOTAL] = f"as {key.name.removeprefix('local.')}"
    return words


def _expected(key: ConfigKey) -> str:
    if key.name.endswith(".ms"):
        expected = "a duration, as in 90s, 12h or 7d (a plain number is milliseconds)"
    elif key.name.endswith(".bytes"):
        expected = "a size, as in 64KiB or 1GB (a plain number is bytes)"
    else:
        expected = "a whole number"
    return " or ".join((expected, *dict.fromkeys(_words(key).values())))
