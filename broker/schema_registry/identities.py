"""Which ids a schema has: schemas that say the same are one, however they are written.

* Several ids, if another registry gave them, or they were imported: the lowest is given again.
* An id may be another schema's later, which only an import does.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

import msgspec

from tierlog.broker.schema_registry.formats import Parsed
from tierlog.record_format.errors import SchemaError
from tierlog.record_format.schema_records import Kind, Malformed, Reference, Schema
from tierlog.record_format.schema_state import RegistryState, Source, source_of


class Identity(NamedTuple):
    """Equal for schemas that are one."""

    kind: Kind
    text: str
    references: tuple[Reference, ...]
    metadata: bytes = b""


def identity_of(schema: Schema, parsed: Parsed) -> Identity:
    references = sorted(schema.references, key=lambda one: (one.name, one.subject, one.version))
    metadata = schema.metadata
    said = b"" if metadata is None else msgspec.json.encode(metadata, order="sorted")
    return Identity(schema.kind, parsed.identity, tuple(references), said)


class Identities:
    """`parse` raises Malformed."""

    def __init__(self, parse: Callable[[Source], Parsed]) -> None:
        self._parse = parse
        self._ids: dict[Identity, set[int]] = {}
        self._identified: dict[int, tuple[Schema, Identity]] = {}
        self._changes = 0  # of the state that they are of

    def ids(self, state: RegistryState, identity: Identity) -> Set[int]:
        if self._changes != state.changes:
            self._update(state)
            self._changes = state.changes
        return self._ids.get(identity, frozenset())

    def _update(self, state: RegistryState) -> None:
        current = state.schemas()
        for schema_id, (schema, known) in [*self._identified.items()]:
            if current.get(schema_id) is not schema:
                del self._identified[schema_id]
                self._ids[known].discard(schema_id)
        for schema_id in current.keys() - self._identified.keys():
            schema = current[schema_id]
            found = self._identify(state, schema)
            self._identified[schema_id] = schema, found
            self._ids.setdefault(found, set()).add(schema_id)

    def _identify(self, state: RegistryState, schema: Schema) -> Identity:
        try:
            return identity_of(schema, self._parse(source_of(state, schema)))
        except (Malformed, SchemaError):  # as another registry may have taken it
            return Identity(schema.kind, schema.text, schema.references)
