"""Schemas of each kind: parsed with what they refer to, compared, and refused in words.

* The parsers are imported at the first schema of their kind: most brokers never need them.
* Levels are Confluent's: BACKWARD, the new schema reads what the last one wrote; FORWARD, the last
  one reads what the new one writes; FULL, both; …_TRANSITIVE, with all earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self

from tierlog.record_format.schema_records import Kind, SubjectVersion
from tierlog.record_format.schema_state import Source

LEVELS: Final = (
    "NONE",
    "BACKWARD",
    "BACKWARD_TRANSITIVE",
    "FORWARD",
    "FORWARD_TRANSITIVE",
    "FULL",
    "FULL_TRANSITIVE",
)


class Parsed(Protocol):
    """`text`: as it is kept; `identity`: equal for schemas of a kind that say the same."""

    text: str
    identity: str

    def incompatibilities(self, writer: Self, /) -> list[str]: ...
    def encode_value(self, text: bytes, /) -> bytes:
        """A value without its head, of its JSON. Raises Malformed."""
        ...

    def check_value(self, encoded: bytes, /) -> None:
        """A value without its head. Raises Malformed."""
        ...

    def decode(self, encoded: bytes, /) -> Any:
        """What such a value says, for msgspec to make JSON of. Raises Malformed."""
        ...


def parse_schema(source: Source) -> Parsed:
    """Raises Malformed."""
    kind, text, dependencies = source
    if kind == "AVRO":
        from tierlog.broker.schema_registry.avro import AvroSchema

        return AvroSchema(text, dependencies)
    if kind == "JSON":
        from tierlog.broker.schema_registry.json_schema import JsonSchema

        return JsonSchema(text, dependencies)
    from tierlog.broker.schema_registry.protobuf_schema import ProtobufSchema

    return ProtobufSchema(text, dependencies)


class Earlier(NamedTuple):
    version: SubjectVersion
    parsed: Any  # of the kind of its schema


def problems_with_earlier(
    new: Any, kind: Kind, earlier: Sequence[Earlier], level: str
) -> list[str]:
    """Why a schema may not follow these versions, oldest first. Raises Malformed."""
    compared = earlier if level.endswith("_TRANSITIVE") else earlier[-1:]
    if level == "NONE":
        return []
    for version, parsed in reversed(compared):
        found = list(_problems(new, kind, version.schema.kind, parsed, level=level))
        if found:
            number = f"{{oldSchemaVersion: {version.version}}}"
            return [*found, number, f"{{compatibility: '{level}'}}"]
    return []


def _problems(new: Any, kind: Kind, old_kind: Kind, old: Any, *, level: str) -> Iterator[str]:
    if kind != old_kind:
        yield f"Incompatible because of different schema type: {kind} after {old_kind}"
        return
    if level.startswith(("BACKWARD", "FULL")):
        yield from new.incompatibilities(old)
    if level.startswith(("FORWARD", "FULL")):
        yield from old.incompatibilities(new)
