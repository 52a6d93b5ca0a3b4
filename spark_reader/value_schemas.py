"""Where the schemas of values come from: the registry at the broker, or `_schemas` in the bucket.

* With `tier=cold` the bucket alone is read, and has what was uploaded of `_schemas`.
* An id stands for one schema for ever: what was found is kept for as long as the process runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tierlog.record_format.errors import InvalidOption, UnknownSchema
from tierlog.record_format.schema_records import TOPIC, Schema, SubjectVersion
from tierlog.record_format.schema_state import LATEST, RegistryState, Source, source_of
from tierlog.spark_reader.access import Access, Connections
from tierlog.spark_reader.option_values import EARLIEST, Bounds
from tierlog.spark_reader.options import ReadOptions, TopicChoice

if TYPE_CHECKING:
    from tierlog.client.client import Client

_KEPT: Final = 1000


class Schemas:
    """The schemas that a read may need. Each call may block on the broker, or the bucket; raises
    UnknownSchema, and what those raise.
    """

    def __init__(self, access: Access, *, is_cold: bool) -> None:
        self._access, self._is_cold = access, is_cold

    def latest(self, subject: str) -> tuple[int, Source]:
        """The latest version of a subject: its id, and its schema."""
        if self._is_cold:
            state = read_stored(self._access)
            version = state.version(subject, LATEST)
            return version.schema_id, source_of(state, version.schema)
        client = Connections(self._access).broker
        found = client.find_schema_version(subject)
        return found.id, _with_references(client, found.to_schema())

    def of_id(self, schema_id: int) -> Source:
        return _of_id(self._access, self._is_cold, schema_id)


@lru_cache(_KEPT)
def _of_id(access: Access, is_cold: bool, schema_id: int) -> Source:
    if is_cold:
        return _stored.source(access, schema_id)
    return source_of_id(Connections(access).broker, schema_id)


def source_of_id(client: Client, schema_id: int) -> Source:
    """The schema that the registry has under this id, and what it refers to."""
    return _with_references(client, client.find_schema(schema_id).to_schema())


def _with_references(client: Client, schema: Schema) -> Source:
    """As in a state that has this schema, and what it refers to."""
    state = RegistryState()
    left, known = list(schema.references), set[tuple[str, int]]()
    while left:
        one = left.pop()
        if (one.subject, one.version) not in known:
            known.add((one.subject, one.version))
            found = client.find_schema_version(one.subject, one.version, deleted=True)
            referred = found.to_schema()
            state.put(SubjectVersion(one.subject, one.version, found.id, referred))
            left += referred.references
    return source_of(state, schema)


class _Stored:
    """What was last read of `_schemas` in each bucket. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[Access, RegistryState] = {}

    def source(self, access: Access, schema_id: int) -> Source:
        with self._lock:
            state = self._states.get(access)
            if state is None or state.schema(schema_id) is None:
                state = self._states[access] = read_stored(access)
        schema = state.schema(schema_id)
        if schema is None:
            raise UnknownSchema(
                f"Schema {schema_id} not found in what is in the bucket of {TOPIC}",
                error_code=40403,
            )
        return source_of(state, schema)


_stored: Final = _Stored()


def read_stored(access: Access) -> RegistryState:
    """What the bucket has of `_schemas`. Raises InvalidOption if it has none."""
    state = RegistryState()
    for key, value in _records(access):
        state.apply(key, value)
    return state


def _records(access: Access) -> Iterator[tuple[bytes, bytes | None]]:
    # Imported here: executors read values of many splits, and this once.
    from tierlog.record_format.errors import UnknownTopicOrPartition
    from tierlog.spark_reader.planner import Planner
    from tierlog.spark_reader.split_reader import SplitReader
    from tierlog.spark_reader.splits import log_to_stderr

    options = ReadOptions(
        access=replace(access, server=None),
        choice=TopicChoice(topics=(TOPIC,)),
        starting=Bounds(default=EARLIEST),
        ending=Bounds(default=LATEST),
        tier="cold",
    )
    try:
        splits = Planner(options, report=lambda _: None, warn=log_to_stderr).batch()
    except UnknownTopicOrPartition as error:
        raise InvalidOption(
            f"option valueSchema: {access.store} has no topic {TOPIC}: nothing was uploaded of the "
            "registry yet; give the option server"
        ) from error
    reader = SplitReader(options, ("key", "value"))
    for split in splits:
        for batch in reader.read_split(split):
            keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
            yield from ((key or b"", value) for key, value in zip(keys, values, strict=True))
