"""Checks the values of produced records against the schemas of their topic (`schema.validation`).

* The subject is `<topic>-value`. With `id` a value begins with the id of one of its schemas, a zero
  byte and four; with `full` the rest of it is decoded, too. A null value, a tombstone, passes.
* What is known of an id is asked again after KNOWN_MS, since it may have been deleted for good.
  While nobody can say, what was known counts, and an unknown id is a retriable error.

Thread-safe. A check may block, on the log of `_schemas` or on its leader's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from operator import sub
from typing import Final, NamedTuple

from tierlog.broker.schema_registry.formats import parse_schema
from tierlog.broker.schema_registry.json_text import Malformed
from tierlog.record_format.errors import NotLeader, RetriableError
from tierlog.record_format.produced import CheckValues, RefusedValues
from tierlog.record_format.schema_state import Source

FindSource = Callable[[str, int], Source | None]
KNOWN_MS: Final = 30_000
HEAD_BYTES: Final = 5  # a zero byte, and the id
_KNOWN_MAX: Final = 10_000
_PARSED_MAX: Final = 500
_NAMED_MAX: Final = 100  # of the records that are refused
_HEADLESS: Final = "the value does not begin with the id of a schema (a zero byte and four bytes)"


class _Known(NamedTuple):
    source: Source
    asked_ms: int


class SchemaValidation:
    """`find` raises NotLeader and retriable errors."""

    def __init__(self, find: FindSource, *, now_ms: Callable[[], int]) -> None:
        self._find, self._now_ms = find, now_ms
        self._known: dict[tuple[str, int], _Known] = {}
        self._parse = lru_cache(_PARSED_MAX)(parse_schema)

    def checks(self, topic: str, level: str) -> CheckValues | None:
        """None: nothing is to be checked. What it returns raises retriable errors."""
        if level == "none":
            return None
        return partial(self._check, f"{topic}-value", level == "full")

    def _check(
        self, subject: str, is_full: bool, data: bytes, starts: Sequence[int], ends: Sequence[int]
    ) -> RefusedValues | None:
        if not is_full and self._have_known_ids(subject, data, starts, ends):
            return None
        refused = list(islice(self._refused(subject, is_full, data, starts, ends), _NAMED_MAX))
        if not refused:
            return None
        first, problem = refused[0]
        return RefusedValues(f"record {first}: {problem}", tuple(row for row, _ in refused))

    def _have_known_ids(
        self, subject: str, data: bytes, starts: Sequence[int], ends: Sequence[int]
    ) -> bool:
        """Quickly: of many records there are few ids."""
        if -1 in starts:
            pairs = [one for one in zip(starts, ends, strict=True) if one[0] >= 0]
            starts, ends = [start for start, _ in pairs], [end for _, end in pairs]
        heads = {data[start : start + HEAD_BYTES] for start in starts}
        shortest = min(map(sub, ends, starts), default=HEAD_BYTES)
        return shortest >= HEAD_BYTES and all(
            head[0] == 0 and self._source(subject, int.from_bytes(head[1:])) is not None
            for head in heads
        )

    def _refused(
        self, subject: str, is_full: bool, data: bytes, starts: Sequence[int], ends: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start >= 0:
                problem = self._problem(subject, is_full, data[start:end])
                if problem:
                    yield row, problem

    def _problem(self, subject: str, is_full: bool, value: bytes) -> str:
        if len(value) < HEAD_BYTES or value[0] != 0:
            return _HEADLESS
        schema_id = int.from_bytes(value[1:HEAD_BYTES])
        source = self._source(subject, schema_id)
        if source is None:
            return f"id {schema_id} is no schema of the subject {subject!r}"
        if is_full:
            try:
                self._parse(source).check_value(value[HEAD_BYTES:])
            except Malformed as error:
                return f"the value is not of schema {schema_id} of the subject {subject!r}: {error}"
        return ""

    def _source(self, subject: str, schema_id: int) -> Source | None:
        now_ms, key = self._now_ms(), (subject, schema_id)
        known = self._known.get(key)
        if known is not None and now_ms - known.asked_ms < KNOWN_MS:
            return known.source
        try:
            source = self._find(subject, schema_id)
        except (RetriableError, NotLeader):
            if known is None:
                raise
            return known.source
        if source is None:
            self._known.pop(key, None)
            return None
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[key] = _Known(source, now_ms)
        return source
