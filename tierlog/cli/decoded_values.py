"""Values as JSON, for people to read: decoded by the schemas whose ids they begin with.

* A schema is asked for once.
* What does not decode is printed as it is, since whoever looks at a topic looks for just that; a
  warning names the first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tierlog.broker.schema_registry.formats import Parsed, parse_schema
from tierlog.cli.output import warn
from tierlog.record_format.errors import UnknownSchema
from tierlog.record_format.record_walk import HEAD_BYTES
from tierlog.record_format.schema_records import Malformed
from tierlog.spark_reader.value_schemas import source_of_id

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.records import ConsumedRecord

_KEPT: Final = 1000


class DecodedValue(bytes):
    """The JSON of a value, and the schema that it was written by."""

    schema_id: int


class ValueDecoder:
    """Called with a record, returns it with its value decoded, if it has a registered schema."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._parse = lru_cache(_KEPT)(self._find)
        self._has_warned = False
        self._last: tuple[ConsumedRecord, ConsumedRecord] | None = None

    def __call__(self, record: ConsumedRecord) -> ConsumedRecord:
        if self._last is not None and self._last[0] is record:  # it was filtered by its value
            return self._last[1]
        decoded = self._decode(record)
        self._last = record, decoded
        return decoded

    def _decode(self, record: ConsumedRecord) -> ConsumedRecord:
        value = record.value
        if value is None or len(value) < HEAD_BYTES or value[0] != 0:
            return record
        schema_id = int.from_bytes(value[1:HEAD_BYTES])
        try:
            found = _to_json(self._parse(schema_id), value[HEAD_BYTES:])
        except (UnknownSchema, Malformed) as error:
            if not self._has_warned:
                self._has_warned = True
                where = f"{record.topic}-{record.partition}, offset {record.offset}"
                warn(f"{where}: printed as it is: the value is not of schema {schema_id}: {error}")
            return record
        decoded = DecodedValue(found)
        decoded.schema_id = schema_id
        return record._replace(value=decoded)

    def _find(self, schema_id: int) -> Parsed:
        """Raises UnknownSchema, Malformed."""
        return parse_schema(source_of_id(self._client, schema_id))


def _to_json(parsed: Parsed, encoded: bytes) -> bytes:
    """Raises Malformed."""
    found: Any = parsed.decode(encoded)
    try:
        return msgspec.json.format(msgspec.json.encode(found), indent=-1)  # on one line
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Malformed(f"it has no JSON: {error}") from error
