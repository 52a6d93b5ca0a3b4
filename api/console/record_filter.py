"""Which records a search wants: pure, and compiled once from what was typed.

* All conditions that are given must hold. Case counts, and text is compared as bytes.
* A condition is a word or a path, never a pattern: it takes time in proportion to the record.
* `json` is `$.path`, perhaps with a comparison: `carrier = UA`, `$.legs[*].delay >= 30`. The path
  has member names, `['any name']`, `[0]` and `[*]`. What follows the operator is JSON, or else
  text.
* Numbers are compared with numbers, text with text; dates of one form are ordered as text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from tierlog.api.http import strict_json
from tierlog.record_format.decode import Columns

_COMPARISON: Final = re.compile(r"(.*?)\s*(==|!=|<=|>=|=|<|>)\s*(.*)\Z", re.DOTALL)
_STEP: Final = re.compile(
    r"""\.?(?P<name>[^\W\d][\w-]*) | \[(?P<index>\d{1,9})\] | (?P<every>\[\*\])
    | \[(?P<quote>["'])(?P<quoted>.*?)(?P=quote)\]""",
    re.VERBOSE,
)
_JSON: Final = msgspec.json.Decoder()
_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_Number = (int, float)
Step = str | int | None  # a member, an index, every element


class JsonTest(NamedTuple):
    """`compare` is None if the path only has to be there."""

    steps: tuple[Step, ...]
    compare: Callable[[Any, Any], bool] | None = None
    text: str = ""
    value: object = None

    def holds(self, data: bytes | None) -> bool:
        try:
            found = _reached(_JSON.decode(data or b""), self.steps)
            return any(self._holds_for(one) for one in found)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False

    def _holds_for(self, found: object) -> bool:
        if self.compare is None:
            return True
        if isinstance(found, str):
            return self.compare(found, self.value if isinstance(self.value, str) else self.text)
        if _is_number(found) and _is_number(self.value):
            return self.compare(found, self.value)
        is_equal = type(found) is type(self.value) and found == self.value
        return self.compare in (operator.eq, operator.ne) and self.compare(is_equal, True)


def _is_number(value: object) -> bool:
    return isinstance(value, _Number) and not isinstance(value, bool)


def _reached(value: object, steps: Sequence[Step]) -> Iterator[object]:
    for at, step in enumerate(steps):
        if step is None:
            for one in value if isinstance(value, list) else ():
                yield from _reached(one, steps[at + 1 :])
            return
        if isinstance(step, int):
            if not isinstance(value, list) or step >= len(value):
                return
            value = value[step]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            return
    yield value


def parse_json_test(text: str) -> JsonTest:
    """Raises InvalidRequest."""
    match = _COMPARISON.match(text)
    path, sign, wanted = match.groups() if match else (text, "", "")
    steps = tuple(_steps(path.strip()))
    if not sign:
        return JsonTest(steps)
    try:
        value = _JSON.decode(wanted)
    except (msgspec.DecodeError, RecursionError):
        value = wanted
    return JsonTest(steps, _OPERATORS[sign], wanted, value)


def _steps(path: str) -> Iterator[Step]:
    position = 1 if path.startswith("$") else 0
    if position == len(path):
        strict_json.refuse_field("json", "a path is missing, such as $.carrier")
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None:
            msg = f"not a path from {path[position:][:40]!r} on: $.name, ['any name'], [0], [*]"
            strict_json.refuse_field("json", msg)
        position = match.end()
        if match["every"]:
            yield None
        elif match["index"]:
            yield int(match["index"])
        else:
            yield match["name"] or match["quoted"]


class RecordFilter(NamedTuple):
    """`times` is half-open, in milliseconds."""

    text: bytes = b""
    key: bytes = b""
    header: tuple[str, bytes | None] | None = None
    json: JsonTest | None = None
    times: tuple[int, int] | None = None

    def rows(self, columns: Columns) -> list[int]:
        """The positions of the records that are wanted; the cheap conditions come first."""
        rows: Iterable[int] = range(len(columns.offsets))
        if self.times is not None:
            start, end = self.times
            rows = [at for at in rows if start <= columns.timestamps[at] < end]
        if self.key:
            rows = [at for at in rows if columns.keys[at] == self.key]
        if self.header is not None:
            rows = [at for at in rows if self._has_header(columns, at)]
        if self.text:
            rows = [at for at in rows if self._has_text(columns, at)]
        if self.json is not None:
            rows = [at for at in rows if self.json.holds(columns.values[at])]
        return list(rows)

    def _has_header(self, columns: Columns, at: int) -> bool:
        assert self.header is not None, "one is wanted"
        wanted, value = self.header
        return any(
            name == wanted and (value is None or content == value)
            for name, content in columns.headers[at]
        )

    def _has_text(self, columns: Columns, at: int) -> bool:
        text = self.text
        return (
            text in (columns.values[at] or b"")
            or text in (columns.keys[at] or b"")
            or any(text in (content or b"") for _, content in columns.headers[at])
        )

    def could_hold(self, min_timestamp: int | None, max_timestamp: int | None) -> bool:
        """Whether a segment with these times may have wanted records; unknown ones may."""
        if self.times is None:
            return True
        start, end = self.times
        return (min_timestamp is None or min_timestamp < end) and (
            max_timestamp is None or max_timestamp < 0 or max_timestamp >= start
        )


def parse_header(text: str) -> tuple[str, bytes | None]:
    """`name`, or `name=value`."""
    name, sign, value = text.partition("=")
    return name.strip(), value.strip().encode() if sign else None
