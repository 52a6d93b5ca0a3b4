"""Keys and values as JSON, for people to read: by the schemas whose ids they begin with.

* What begins with no id is not looked at. What does not decode says why, whatever is wrong: with
  it, with its schema, or with the registry. It never fails what else is read with it.
* Bounded: in the bytes of a key or value, in those of its JSON, and in the time of a whole page.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tierlog.broker.membership.peers import SchemaCall
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.record_walk import HEAD_BYTES
from tierlog.record_format.schema_records import Malformed

if TYPE_CHECKING:
    from tierlog.broker.schema_registry.formats import Parsed
    from tierlog.broker.schema_registry.validation import SchemaValidation

_JSON_FACTOR: Final = 8  # of the limit of a value: what its JSON may have
_PROBLEM_MAX: Final = 500  # characters
Part = Literal["key", "value"]
PARTS: Final[tuple[Part, ...]] = ("key", "value")


class DecodedBy(msgspec.Struct, frozen=True):
    """The schema that a key or value begins with the id of: the version of the topic's own subject,
    or of another one, that has it. `problem`: why the key or value is not decoded.
    """

    id: int
    subject: str | UnsetType = UNSET
    version: int | UnsetType = UNSET
    problem: str | UnsetType = UNSET


class Decoded(NamedTuple):
    """`text`: JSON on one line; None if there is a problem."""

    schema: DecodedBy
    text: bytes | None


class DecodeLimits(NamedTuple):
    """`max_bytes`: of a key or value."""

    max_bytes: int
    max_ms: int


class RecordDecoder:
    """Of one page of a topic's records. `prefix`: of the subjects that whoever asked may see. Its
    time runs from when it is made. Not thread-safe; `decode` may block.
    """

    def __init__(
        self, schemas: SchemaValidation, topic: str, *, prefix: str, limits: DecodeLimits
    ) -> None:
        self._schemas, self._topic, self._prefix, self._limits = schemas, topic, prefix, limits
        self._ends_s = time.monotonic() + limits.max_ms / 1000

    def decode(self, data: bytes | None, part: Part) -> Decoded | None:
        """None: it begins with no id."""
        if data is None or (schema_id := schema_id_of(data)) is None:
            return None
        schema = DecodedBy(schema_id)
        try:
            self._check_limits(data)
            call = SchemaCall(f"{self._topic}-{part}", schema_id, prefix=self._prefix)
            found = self._schemas.find_known(call)
            if found is None:
                raise Malformed("there is no schema of this id")
            if found.place is not None:
                schema = DecodedBy(schema_id, *found.place)
            parsed = self._schemas.parse(found.source)
            limit = _JSON_FACTOR * self._limits.max_bytes
            return Decoded(schema, decode_to_json(parsed, data, max_bytes=limit))
        except (Malformed, TierlogError) as error:
            problem = str(error)[:_PROBLEM_MAX]
            return Decoded(msgspec.structs.replace(schema, problem=problem), None)

    def _check_limits(self, data: bytes) -> None:
        """Raises Malformed."""
        if len(data) > self._limits.max_bytes:
            raise Malformed(f"it has {len(data)} bytes; http.decode.max.bytes is {self._limits[0]}")
        if time.monotonic() > self._ends_s:
            limit = f"http.decode.max.ms is {self._limits.max_ms}"
            raise Malformed(f"the records before it took the time that there is; {limit}")


def schema_id_of(data: bytes) -> int | None:
    """The id that a key or value begins with: a zero byte, and four of it. None without one."""
    if len(data) < HEAD_BYTES or data[0] != 0:
        return None
    return int.from_bytes(data[1:HEAD_BYTES])


def decode_to_json(parsed: Parsed, data: bytes, *, max_bytes: int = sys.maxsize) -> bytes:
    """What a key or value, with its id, says as JSON on one line. Raises Malformed, also for one of
    more than about `max_bytes` of JSON.
    """
    found: Any = parsed.decode(data[HEAD_BYTES:])
    _check_size(found, max_bytes)
    try:
        return msgspec.json.format(msgspec.json.encode(found), indent=-1)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Malformed(f"it has no JSON: {error}") from error


def _check_size(found: Any, max_bytes: int) -> None:
    """Few bytes may be many of JSON, which names the fields of each record. Raises Malformed."""
    size, left = 0, [found]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            size += sum(len(str(name)) + 4 for name in one)
            left += one.values()
        elif isinstance(one, list | tuple):
            size += len(one)
            left += one
        else:
            size += len(one) if isinstance(one, str | bytes) else 4
        if size > max_bytes:
            raise Malformed(f"its JSON would have more than {max_bytes} bytes")
