"""The schema registry: what `_schemas` says, and the only writer of what is registered here.

* The partition's leader alone gives ids. Every call raises NotLeader on another broker, which sends
  it there.
* The state follows the log: it is what was read of it, up to the high watermark. A change is
  decided on all of the log, and appended only if nothing was appended since, whoever did: another
  registry may write to the topic too.
* A change is durable before it is answered, and before it is seen.
* Nothing is kept of a leader's term: what another leader wrote is read again from the beginning.

Thread-safe. Every call may block, on reads, on the flush, and on the comparison of schemas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import closing, suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from tierlog.broker.membership.peers import Peers, SchemaCall
from tierlog.broker.partition.partition import Partition
from tierlog.broker.schema_registry.formats import (
    LEVELS,
    Earlier,
    Parsed,
    parse_schema,
    problems_with_earlier,
)
from tierlog.broker.schema_registry.identities import Identities, identity_of
from tierlog.broker.topics.coordinator_log import WINDOW_BYTES, records_of
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topic_replicas import NewTopic
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format.errors import (
    IncompatibleSchema,
    InvalidSchema,
    NotLeader,
    OffsetMismatch,
    OffsetTrimmed,
    RecordTooLarge,
    Starting,
    UnknownSchema,
    UnknownTopic,
    WatermarkUnknown,
)
from tierlog.record_format.produced import build_produced
from tierlog.record_format.schema_records import (
    LEVEL,
    MODE,
    TOPIC,
    Malformed,
    Reference,
    Row,
    Schema,
    Setting,
    SubjectVersion,
    highest_id_row,
    schema_row,
    setting_row,
)
from tierlog.record_format.schema_state import (
    CONTEXT_PREFIX,
    INT_MAX,
    LATEST,
    RegistryState,
    SourceOfId,
    invalid_schema,
    no_subject,
    not_permitted,
    place_of,
    source_of,
)
from tierlog.record_format.topic_rules import ConfigValue

log = structlog.get_logger(__name__)
T = TypeVar("T")

CONFIG: Final[Mapping[str, ConfigValue]] = {"cleanup.policy": "compact"}
IMPORT: Final = "IMPORT"
MODES: Final = ("READWRITE", "READONLY", "READONLY_OVERRIDE", IMPORT)
SUBJECT_MAX: Final = 1024  # characters
_ATTEMPTS: Final = 20  # while others write
_PARSED_MAX: Final = 2000

Decide = Callable[[RegistryState], tuple[Sequence[Row], T]]


class Given(NamedTuple):
    """What a caller gives: an id, which only the mode IMPORT allows, and a version's number."""

    schema_id: int | None = None
    version: int | None = None

    def is_of(self, found: SubjectVersion) -> bool:
        return self.schema_id in (None, found.schema_id) and self.version in (None, found.version)


NOTHING: Final = Given()


class _Values(NamedTuple):
    """What a setting may be, and Confluent's words and codes if it is not that, or not set."""

    allowed: tuple[str, ...]
    refusal: str
    invalid_code: int
    unset_code: int
    name: str


_VALUES: Final[Mapping[Setting, _Values]] = {
    LEVEL: _Values(
        LEVELS,
        "Invalid compatibility level. Valid values are none, backward, forward, full, "
        "backward_transitive, forward_transitive, and full_transitive",
        invalid_code=42203,
        unset_code=40408,
        name="compatibility",
    ),
    MODE: _Values(
        MODES,
        f"Invalid mode. Valid values are {', '.join(MODES)}",
        invalid_code=42204,
        unset_code=40409,
        name="mode",
    ),
}


class _Asked(NamedTuple):
    """A schema with what it refers to, the ids that it has, and the version that is it."""

    schema: Schema
    parsed: Parsed
    ids: Set[int]
    found: SubjectVersion | None


class SchemaRegistry:
    """`peers`: in a cluster."""

    def __init__(
        self, topics: LiveTopics, *, clock: Callable[[], int], peers: Peers | None = None
    ) -> None:
        self._topics, self._clock, self._peers = topics, clock, peers
        self._lock = threading.RLock()
        self._partition: Partition | None = None  # that the state is of
        self._next_offset = 0
        self._parse = lru_cache(_PARSED_MAX)(parse_schema)
        self._forget()

    def _forget(self) -> None:
        self._state = RegistryState()
        self._identities = Identities(self._parse)

    # --- the log ----------------------------------------------------------------------------------

    def read(self, look: Callable[[RegistryState], T]) -> T:
        """What `look` finds in all that is committed. Raises what it does, NotLeader,
        LeaderUnknown, Starting, and what reads raise.
        """
        with self._lock:
            self._follow()
            return look(self._state)

    def _follow(self) -> Partition | None:
        """None: there is no topic yet."""
        try:
            partition = self._topics.find(TOPIC).partition(0)
        except UnknownTopic:
            partition = None
        if partition is not self._partition:
            self._partition, self._next_offset = partition, 0
            self._forget()
        if partition is not None:
            partition.check_leadership()
            self._read_on(partition)
        return partition

    def _read_on(self, partition: Partition) -> None:
        try:
            partition.check_end_known()
        except WatermarkUnknown as error:
            raise Starting(str(error)) from error
        self._next_offset = max(self._next_offset, partition.log_start_offset)
        end = partition.high_watermark
        while self._next_offset < end:
            try:
                fetched = partition.read(self._next_offset, max_bytes=WINDOW_BYTES)
            except OffsetTrimmed as trimmed:
                self._next_offset = trimmed.log_start_offset
                continue
            with closing(fetched):
                data = b"".join(piece.read() for piece in fetched.slices)
            skipped = self._state.skipped
            for record in records_of(data):
                if record.offset >= self._next_offset:
                    self._state.apply(bytes(record.key or b""), record.value)
            if self._state.skipped > skipped:
                count = self._state.skipped - skipped
                log.warning("records skipped", partition=str(partition), records=count)
            # Compaction may have removed the last records.
            behind = fetched.next_offset <= self._next_offset
            self._next_offset = end if behind else fetched.next_offset

    def _write(self, decide: Decide[T]) -> T:
        """Append what is decided on the state; again if others have appended meanwhile. No rows:
        nothing is to be changed.
        """
        self._topics.ensure(NewTopic(TOPIC, 1, CONFIG))
        for _ in range(_ATTEMPTS):
            with self._lock:
                partition = self._follow()
                if partition is None:
                    continue
                end = partition.log_end_offset
                if self._next_offset < end:
                    raise Starting(f"{partition}: what was appended last is not committed yet")
                rows, answer = decide(self._state)
                if not rows:
                    return answer
                try:
                    self._append(partition, rows, expected_offset=end)
                except OffsetMismatch:
                    continue
                self._read_on(partition)
                return answer
        raise Starting(f"{TOPIC}: others go on writing to it")

    def _append(self, partition: Partition, rows: Sequence[Row], *, expected_offset: int) -> None:
        limit = partition.config.max_message_bytes
        try:
            batches = build_produced(
                [value for _, value in rows],
                keys=[key for key, _ in rows],
                timestamps=[self._clock()] * len(rows),
                max_message_bytes=limit,
            )
        except RecordTooLarge as error:
            text = f"The schema makes a record of {error.size_bytes} bytes; max.message.bytes of "
            raise InvalidSchema(f"{text}{TOPIC} is {limit}", error_code=42209) from error
        partition.append(batches, acks=Acks.ALL, expected_offset=expected_offset).result()

    # --- schemas ----------------------------------------------------------------------------------

    def register(self, subject: str, schema: Schema, given: Given = NOTHING) -> SubjectVersion:
        """The version that has this schema, a new one if there is none. Raises InvalidSchema,
        IncompatibleSchema, and what an append raises.
        """
        check_subject(subject)

        def decide(state: RegistryState) -> tuple[Sequence[Row], SubjectVersion]:
            resolved, parsed, ids, found = self._asked(
                state, state.versions(subject), schema, given
            )
            if found is not None:
                return (), found
            _check_mode(state, subject, given)
            kept = resolved._replace(text=parsed.text)
            if given.schema_id is not None:
                return _imported(state, subject, kept, ids, given)
            self._check_compatible(state, subject, resolved, parsed)
            number = state.next_version(subject)
            if given.version not in (None, number):
                raise invalid_schema(schema, "Version is not one more than previous version")
            version = SubjectVersion(subject, number, _id_for(ids, state), kept)
            return [schema_row(version)], version

        # What is there already needs no topic, no flush, and no lead that is confirmed.
        try:
            return self.lookup(subject, schema, given)
        except UnknownSchema:
            return self._write(decide)

    def lookup(
        self, subject: str, schema: Schema, given: Given = NOTHING, *, deleted: bool = False
    ) -> SubjectVersion:
        """The version that has this schema. Raises UnknownSchema, InvalidSchema."""

        def look(state: RegistryState) -> SubjectVersion:
            versions = state.known_versions(subject, deleted=deleted)
            found = self._asked(state, versions, schema, given).found
            if found is None:
                raise UnknownSchema("Schema not found", error_code=40403)
            return found

        return self.read(look)

    def _asked(
        self,
        state: RegistryState,
        versions: Sequence[SubjectVersion],
        schema: Schema,
        given: Given,
    ) -> _Asked:
        """Without metadata, also with that of the latest version. Raises InvalidSchema."""
        resolved, parsed = self._checked(state, schema)
        latest = versions[-1].schema.metadata if versions and given.schema_id is None else None
        asked = [resolved, resolved._replace(metadata=latest)]
        for one in asked if resolved.metadata is None and latest is not None else asked[:1]:
            ids = self._identities.ids(state, identity_of(one, parsed))
            found = _same(versions, ids, given)
            if found is not None:
                break
        return _Asked(one, parsed, ids, found)

    def find_here(self, call: SchemaCall) -> SourceOfId | None:
        """The schema that is asked for, if the subject has it, or had one with the id, or another
        that may. Raises InvalidSchema, and as `read` does.
        """

        def look(state: RegistryState) -> SourceOfId | None:
            schema_id = call.schema_id
            if call.version is not None:
                with suppress(UnknownSchema):
                    schema_id = state.version(call.subject, call.version).schema_id
            if schema_id is None:
                return None
            place = state.place_with_id(schema_id, call.subject, prefix=call.prefix)
            if place is None:
                return None
            schema = state.schema(schema_id)
            assert schema is not None, "the subject has it"
            return SourceOfId(schema_id, source_of(state, schema), place)

        return self.read(look)

    def serialized(self, schema: Schema) -> str:
        """The base64 of a Protobuf schema's FileDescriptorProto. Raises InvalidSchema."""

        def look(state: RegistryState) -> str:
            parsed: Any = self._checked(state, schema)[1]
            return str(parsed.serialized)

        return self.read(look)

    def find(self, call: SchemaCall) -> SourceOfId | None:
        """As `find_here`, or by asking the leader. Raises PeerUnavailable, too."""
        try:
            return self.find_here(call)
        except NotLeader as elsewhere:
            if self._peers is None:
                raise
            found = self._peers.find_schema(elsewhere.url, call)
            return found[0] if found else None

    def problems_with(self, subject: str, schema: Schema, number: int | None) -> list[str]:
        """Why the schema is incompatible with a version, or, with None, with those that the
        subject's level says. It is compatible with the latest if there is none. Raises
        UnknownSchema, InvalidSchema.
        """

        def look(state: RegistryState) -> list[str]:
            versions = state.versions(subject)
            if number == LATEST:
                versions = versions[-1:]
            elif number is not None:
                versions = [state.version(subject, number)]
            resolved, parsed = self._checked(state, schema)
            return self._problems(state, subject, resolved, parsed, versions)

        return self.read(look)

    def _check_compatible(
        self, state: RegistryState, subject: str, schema: Schema, parsed: Parsed
    ) -> None:
        problems = self._problems(state, subject, schema, parsed, state.versions(subject))
        if problems:
            raise IncompatibleSchema(
                "Schema being registered is incompatible with an earlier schema for subject "
                f'"{subject}", details: [{", ".join(problems)}]',
                error_code=40901,
            )

    def _problems(
        self,
        state: RegistryState,
        subject: str,
        schema: Schema,
        parsed: Parsed,
        versions: Iterable[SubjectVersion],
    ) -> list[str]:
        level = state.setting(LEVEL, subject) or "NONE"
        if level == "NONE":
            return []
        try:
            earlier = [Earlier(one, self._parse(source_of(state, one.schema))) for one in versions]
            return problems_with_earlier(parsed, schema.kind, earlier, level)
        except Malformed as error:
            raise invalid_schema(schema, str(error)) from error

    def _checked(self, state: RegistryState, schema: Schema) -> tuple[Schema, Parsed]:
        """With references to the latest version as references to what is that now. Raises
        InvalidSchema.
        """
        resolved = schema._replace(
            references=tuple(_resolved(state, schema, one) for one in schema.references)
        )
        try:
            return resolved, self._parse(source_of(state, resolved))
        except Malformed as error:
            raise invalid_schema(schema, str(error)) from error

    # --- what is deleted, and configured ----------------------------------------------------------

    def delete_version(self, subject: str, number: int, *, permanent: bool) -> int:
        """The version's number. Raises UnknownSchema, InvalidSchema."""
        return self._write(lambda state: state.delete_version(subject, number, permanent=permanent))

    def delete_subject(self, subject: str, *, permanent: bool) -> list[int]:
        """The versions' numbers. Raises UnknownSchema, InvalidSchema."""
        return self._write(lambda state: state.delete_subject(subject, permanent=permanent))

    def put_setting(
        self, setting: Setting, subject: str | None, value: str, *, force: bool = False
    ) -> str:
        """Of a subject, or of all that have none of their own. `force`: IMPORT, although there are
        schemas. Raises InvalidSchema.
        """
        wanted, values = value.upper(), _VALUES[setting]
        if wanted not in values.allowed:
            raise InvalidSchema(values.refusal, error_code=values.invalid_code)
        check_subject(subject)

        def decide(state: RegistryState) -> tuple[Sequence[Row], str]:
            if setting is LEVEL:
                state.check_writable(subject)
            elif wanted == IMPORT and not force and state.setting(MODE, subject) != IMPORT:
                state.check_empty(subject)
            return [setting_row(setting, subject, wanted)], wanted

        return self._write(decide)

    def reset_setting(self, setting: Setting, subject: str | None) -> str:
        """What it was. Raises UnknownSchema, InvalidSchema."""

        def decide(state: RegistryState) -> tuple[Sequence[Row], str]:
            value = state.setting(setting, subject, default=subject is None)
            if value is None:
                raise no_subject(subject or "")
            if setting is LEVEL:
                state.check_writable(subject)
            return [setting_row(setting, subject, None)], value

        return self._write(decide)


def not_set(setting: Setting, subject: str | None) -> UnknownSchema:
    values = _VALUES[setting]
    text = f"Subject '{subject}' does not have subject-level {values.name} configured"
    return UnknownSchema(text, error_code=values.unset_code)


def check_subject(subject: str | None) -> None:
    """None is all of them. Raises InvalidSchema."""
    if subject is None:
        return
    problem = ""
    if not subject or len(subject) > SUBJECT_MAX:
        problem = f"it has {len(subject)} characters, and may have 1 to {SUBJECT_MAX}"
    elif subject.startswith(CONTEXT_PREFIX):
        problem = "contexts are not supported"
    elif any(ord(one) < 32 or ord(one) == 127 for one in subject):
        problem = "it has control characters"
    if problem:
        text = f"The specified subject '{subject[:64]}' is not a valid subject: {problem}"
        raise InvalidSchema(text, error_code=42208)


def _same(versions: Iterable[SubjectVersion], ids: Set[int], given: Given) -> SubjectVersion | None:
    found = [one for one in versions if one.schema_id in ids and given.is_of(one)]
    return found[-1] if found else None


def _check_mode(state: RegistryState, subject: str, given: Given) -> None:
    """Raises InvalidSchema."""
    state.check_writable(subject)
    is_import = state.setting(MODE, subject) == IMPORT
    if is_import != (given.schema_id is not None):
        wanted = "read-write" if is_import else "import"
        raise not_permitted(f"Subject {subject} is not in {wanted} mode")


def _id_for(ids: Set[int], state: RegistryState) -> int:
    """Raises InvalidSchema."""
    schema_id = min(ids, default=state.highest_id + 1)
    if schema_id > INT_MAX:
        raise not_permitted("there are no ids any more")
    return schema_id


def _imported(
    state: RegistryState, subject: str, schema: Schema, ids: Set[int], given: Given
) -> tuple[Sequence[Row], SubjectVersion]:
    """An id stays its schema's, and a version's id stays unless it was deleted. Raises
    InvalidSchema.
    """
    schema_id, number = given.schema_id, given.version or state.next_version(subject)
    assert schema_id is not None, "it is an import"
    if state.schema(schema_id) is not None and schema_id not in ids:
        raise not_permitted(f"Overwrite new schema with id {schema_id} is not permitted.")
    version = SubjectVersion(subject, number, schema_id, schema)
    there = state.find_version(place_of(version))
    if there is None:
        return [schema_row(version)], version
    if there.schema_id != schema_id:
        if not there.is_deleted:
            text = f"Version {number} of subject {subject} has the id {there.schema_id}"
            raise not_permitted(text)
        state.check_unreferred([there], permanent=True)
    return [highest_id_row(state.highest_id), schema_row(version)], version


def _resolved(state: RegistryState, schema: Schema, one: Reference) -> Reference:
    try:
        found = state.version(one.subject, one.version, deleted=one.version > 0)
    except UnknownSchema as error:
        text = f'No schema reference found for subject "{one.subject}" and version {one.version}'
        raise invalid_schema(schema, text) from error
    return Reference(one.name, one.subject, found.version)
