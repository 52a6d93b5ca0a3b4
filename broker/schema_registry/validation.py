"""Checks the values of produced records against the schemas of their topic (`schema.validation`),
and encodes keys and values that are given as JSON.

* The subject is `<topic>-value`. With `id` a value begins with the id of one of its schemas, a zero
  byte and four; with `full` the rest of it is decoded, too. A null value, a tombstone, passes.
* What is known of an id is asked again after KNOWN_MS, since it may have been deleted for good.
  While nobody can say, what was known counts, and an unknown id is a retriable error.

Thread-safe. A check may block, on the log of `_schemas` or on its leader's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from tierlog.broker.membership.peers import SchemaCall
from tierlog.broker.schema_registry.decoding import Part, schema_id_of
from tierlog.broker.schema_registry.formats import parse_schema
from tierlog.record_format.errors import NotLeader, RetriableError
from tierlog.record_format.produced import CheckValues, RefusedValues
from tierlog.record_format.record_walk import HEAD_BYTES
from tierlog.record_format.schema_records import Malformed
from tierlog.record_format.schema_state import LATEST, SourceOfId

FindSchema = Callable[[SchemaCall], SourceOfId | None]
KNOWN_MS: Final = 30_000
_ID_MAX: Final = 2**32 - 1  # behind a zero byte
_KNOWN_MAX: Final = 10_000
_PARSED_MAX: Final = 500
_NAMED_MAX: Final = 100  # of the records that are refused
_HEADLESS: Final = "the value does not begin with the id of a schema (a zero byte and four bytes)"


class _Known(NamedTuple):
    found: SourceOfId
    asked_ms: int


class SchemaValidation:
    """`find` raises NotLeader and retriable errors."""

    def __init__(self, find: FindSchema, *, now_ms: Callable[[], int]) -> None:
        self._find, self._now_ms = find, now_ms
        self._known: dict[SchemaCall, _Known] = {}
        self.parse = lru_cache(_PARSED_MAX)(parse_schema)

    def checks(self, topic: str, level: str) -> CheckValues | None:
        """None: nothing is to be checked. What it returns raises retriable errors."""
        if level == "none":
            return None
        return _Check(self, f"{topic}-value", level == "full")

    def knows(self, subject: str, head: int) -> bool:
        """Whether a value's head is the id of a schema of the subject."""
        return head <= _ID_MAX and self.find_known(SchemaCall(subject, head)) is not None

    def problem(self, subject: str, value: bytes, *, is_full: bool) -> str:
        """What is wrong with a value, or an empty text."""
        schema_id = schema_id_of(value)
        if schema_id is None:
            return _HEADLESS
        found = self.find_known(SchemaCall(subject, schema_id))
        if found is None:
            return f"id {schema_id} is no schema of the subject {subject!r}"
        if is_full:
            try:
                self.parse(found.source).check_value(value[HEAD_BYTES:])
            except Malformed as error:
                return _no_value(schema_id, subject, error)
        return ""

    def find_known(self, call: SchemaCall) -> SourceOfId | None:
        """The schema of an id. Raises NotLeader and retriable errors."""
        now_ms = self._now_ms()
        known = self._known.get(call)
        if known is not None and now_ms - known.asked_ms < KNOWN_MS:
            return known.found
        try:
            found = self._find(call)
        except (RetriableError, NotLeader):
            if known is None:
                raise
            return known.found
        if found is None:
            self._known.pop(call, None)
            return None
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[call] = _Known(found, now_ms)
        return found

    def encoder(self, call: SchemaCall, part: Part) -> Callable[[bytes], bytes]:
        """Encodes keys or values of JSON by a schema, its id before each. Both raise Malformed, and
        the former retriable errors. A version is looked for each time: the latest may be another
        now.
        """
        found = self._find(call) if call.schema_id is None else self.find_known(call)
        if found is None:
            version = "latest" if call.version == LATEST else call.version
            what = f"id {call.schema_id}" if version is None else f"version {version}"
            raise Malformed(f"{what} is no schema of the subject {call.subject!r}")
        parsed, head = self.parse(found.source), b"\0" + found.schema_id.to_bytes(4)

        def encode(text: bytes) -> bytes:
            try:
                return head + parsed.encode_value(text)
            except Malformed as error:
                problem = _no_value(found.schema_id, call.subject, error, part=part)
                raise Malformed(problem) from error

        return encode


def _no_value(schema_id: int, subject: str, error: Malformed, *, part: Part = "value") -> str:
    return f"the {part} is not of schema {schema_id} of the subject {subject!r}: {error}"


class _Check(NamedTuple):
    """`CheckValues` of a topic."""

    validation: SchemaValidation
    subject: str
    is_full: bool

    def knows(self, head: int) -> bool:
        return not self.is_full and self.validation.knows(self.subject, head)

    def __call__(
        self, data: bytes, starts: Sequence[int], ends: Sequence[int]
    ) -> RefusedValues | None:
        refused = list(islice(self._refused(data, starts, ends), _NAMED_MAX))
        if not refused:
            return None
        first, problem = refused[0]
        return RefusedValues(f"record {first}: {problem}", tuple(row for row, _ in refused))

    def _refused(
        self, data: bytes, starts: Sequence[int], ends: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start >= 0:
                value = data[start:end]
                problem = self.validation.problem(self.subject, value, is_full=self.is_full)
                if problem:
                    yield row, problem
