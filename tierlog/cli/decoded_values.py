"""Keys and values as JSON, for people to read: decoded by the schemas whose ids they begin with.

* A schema is asked for once.
* Keys are, if the topic has schemas of keys: a key may be a number, which begins as an id does.
* What does not decode is printed as it is, since whoever looks at a topic looks for just that; a
  warning names the first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tierlog.broker.schema_registry.decoding import Part, decode_to_json, schema_id_of
from tierlog.broker.schema_registry.formats import Parsed, parse_schema
from tierlog.cli.output import warn
from tierlog.record_format.errors import UnknownSchema
from tierlog.record_format.schema_records import Malformed
from tierlog.spark_reader.value_schemas import source_of_id

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.records import ConsumedRecord

_KEPT: Final = 1000


class DecodedText(bytes):
    """The JSON of a key or value, and the schema that it was written by."""

    schema_id: int


class ShownRecords:
    """Called with a record, returns it with its value, and its key, decoded."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._parse = lru_cache(_KEPT)(self._find)
        self._has_warned = False
        self._last: tuple[ConsumedRecord, ConsumedRecord] | None = None
        self._has_keys = self._finds_keys(topic)

    def _finds_keys(self, topic: str) -> bool:
        try:
            self._client.find_schema_version(f"{topic}-key")
        except UnknownSchema:
            return False
        return True

    def __call__(self, record: ConsumedRecord) -> ConsumedRecord:
        if self._last is not None and self._last[0] is record:  # it was filtered by its value
            return self._last[1]
        decoded = record._replace(value=self._shown(record, "value", record.value))
        if self._has_keys:
            decoded = decoded._replace(key=self._shown(record, "key", record.key))
        self._last = record, decoded
        return decoded

    def _shown(self, record: ConsumedRecord, part: Part, data: bytes | None) -> bytes | None:
        if data is None or (schema_id := schema_id_of(data)) is None:
            return data
        try:
            decoded = DecodedText(decode_to_json(self._parse(schema_id), data))
        except (UnknownSchema, Malformed) as error:
            if not self._has_warned:
                self._has_warned = True
                where = f"{record.topic}-{record.partition}, offset {record.offset}"
                warn(f"{where}: printed as it is: the {part} is not of schema {schema_id}: {error}")
            return data
        decoded.schema_id = schema_id
        return decoded

    def _find(self, schema_id: int) -> Parsed:
        """Raises UnknownSchema, Malformed."""
        return parse_schema(source_of_id(self._client, schema_id))
