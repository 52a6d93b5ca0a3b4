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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    SchemaError,
    Starting,
    UnknownSchema,
    UnknownTopic,
    WatermarkUnknown,
)
from tierlog.record_format.produced import build_produced
from tierlog.record_format.schema_records import (
    TOPIC,
    Kind,
    Malformed,
    Reference,
    Row,
    Schema,
    SubjectVersion,
    level_row,
    mode_row,
    schema_row,
)
from tierlog.record_format.schema_state import (
    CONTEXT_PREFIX,
    INT_MAX,
    RegistryState,
    SourceOfId,
    invalid_schema,
    source_of,
)
from tierlog.record_format.topic_rules import ConfigValue

log = structlog.get_logger(__name__)
T = TypeVar("T")

CONFIG: Final[Mapping[str, ConfigValue]] = {"cleanup.policy": "compact"}
MODES: Final = ("READWRITE", "READONLY")
SUBJECT_MAX: Final = 1024  # characters
_ATTEMPTS: Final = 20  # while others write
_PARSED_MAX: Final = 2000

Decide = Callable[[RegistryState], tuple[Sequence[Row], T]]


class Identity(NamedTuple):
    """Schemas that are one have one id."""

    kind: Kind
    text: str
    references: tuple[Reference, ...]


class SchemaRegistry:
    """`peers`: in a cluster."""

    def __init__(
        self, topics: LiveTopics, *, clock: Callable[[], int], peers: Peers | None = None
    ) -> None:
        self._topics, self._clock, self._peers = topics, clock, peers
        self._lock = threading.RLock()
        self._partition: Partition | None = None  # that the state is of
        self._next_offset = 0
        self._forget()
        self._parse = lru_cache(_PARSED_MAX)(parse_schema)

    def _forget(self) -> None:
        self._state = RegistryState()
        self._ids: dict[Identity, int] = {}
        self._identified: set[int] = set()

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

    def register(self, subject: str, schema: Schema) -> SubjectVersion:
        """The version that has this schema, a new one if there is none. Raises InvalidSchema,
        IncompatibleSchema, and what an append raises.
        """
        check_subject(subject)

        def decide(state: RegistryState) -> tuple[Sequence[Row], SubjectVersion]:
            resolved, parsed = self._checked(state, schema)
            identity = _identity(resolved, parsed)
            found = self._same(state, subject, identity)
            if found is not None:
                return (), found
            if state.mode(subject) == "READONLY":
                text = f"Subject {subject} is in read-only mode"
                raise InvalidSchema(text, error_code=42205)
            self._check_compatible(state, subject, resolved, parsed)
            known = self._known_id(state, identity)
            schema_id = state.highest_id + 1 if known is None else known
            if schema_id > INT_MAX:
                raise InvalidSchema("there are no ids any more", error_code=42205)
            kept = resolved._replace(text=parsed.text)
            version = SubjectVersion(subject, state.next_version(subject), schema_id, kept)
            return [schema_row(version)], version

        # What is there already needs no topic, no flush, and no lead that is confirmed.
        try:
            return self.lookup(subject, schema)
        except UnknownSchema:
            return self._write(decide)

    def lookup(self, subject: str, schema: Schema, *, deleted: bool = False) -> SubjectVersion:
        """The version that has this schema. Raises UnknownSchema, InvalidSchema."""

        def look(state: RegistryState) -> SubjectVersion:
            state.known_versions(subject, deleted=deleted)
            identity = _identity(*self._checked(state, schema))
            found = self._same(state, subject, identity, deleted=deleted)
            if found is None:
                raise UnknownSchema("Schema not found", error_code=40403)
            return found

        return self.read(look)

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
        subject's level says. Raises UnknownSchema, InvalidSchema.
        """

        def look(state: RegistryState) -> list[str]:
            versions = (
                state.versions(subject) if number is None else [state.version(subject, number)]
            )
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
        level = state.level(subject) or "NONE"
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

    def _same(
        self,
        state: RegistryState,
        subject: str,
        identity: Identity,
        *,
        deleted: bool = False,
    ) -> SubjectVersion | None:
        known = self._known_id(state, identity)
        found = [one for one in state.versions(subject, deleted=deleted) if one.schema_id == known]
        return found[-1] if found else None

    def _known_id(self, state: RegistryState, identity: Identity) -> int | None:
        for schema_id in sorted(state.ids() - self._identified):
            self._identified.add(schema_id)
            schema = state.schema(schema_id)
            assert schema is not None, "it is one of its ids"
            self._ids.setdefault(self._identity_of(state, schema), schema_id)
        known = self._ids.get(identity)
        if known is not None and state.schema(known) is None:  # it was deleted for good
            del self._ids[identity]
            return None
        return known

    def _identity_of(self, state: RegistryState, schema: Schema) -> Identity:
        try:
            return _identity(schema, self._parse(source_of(state, schema)))
        except (Malformed, SchemaError):  # as another registry may have taken it
            return Identity(*schema)

    # --- what is deleted, and configured ----------------------------------------------------------

    def delete_version(self, subject: str, number: int, *, permanent: bool) -> int:
        """The version's number. Raises UnknownSchema, InvalidSchema."""
        return self._write(lambda state: state.delete_version(subject, number, permanent=permanent))

    def delete_subject(self, subject: str, *, permanent: bool) -> list[int]:
        """The versions' numbers. Raises UnknownSchema, InvalidSchema."""
        return self._write(lambda state: state.delete_subject(subject, permanent=permanent))

    def set_level(self, subject: str | None, level: str) -> str:
        """Of a subject, or of all that have none of their own. Raises InvalidSchema."""
        wanted = level.upper()
        if wanted not in LEVELS:
            raise InvalidSchema(
                "Invalid compatibility level. Valid values are none, backward, forward, full, "
                "backward_transitive, forward_transitive, and full_transitive",
                error_code=42203,
            )
        check_subject(subject)
        self._write(lambda _: ([level_row(subject, wanted)], None))
        return wanted

    def reset_level(self, subject: str | None) -> str:
        """What it was. Raises UnknownSchema."""

        def decide(state: RegistryState) -> tuple[Sequence[Row], str]:
            level = state.level(subject, default=subject is None)
            if level is None:
                raise no_level(subject)
            return [level_row(subject, None)], level

        return self._write(decide)

    def set_mode(self, subject: str | None, mode: str) -> str:
        """As `set_level`."""
        wanted = mode.upper()
        if wanted not in MODES:
            text = f"Invalid mode. Valid values are {', '.join(MODES)}"
            raise InvalidSchema(text, error_code=42204)
        check_subject(subject)
        self._write(lambda _: ([mode_row(subject, wanted)], None))
        return wanted

    def reset_mode(self, subject: str | None) -> str:
        """What it was. Raises UnknownSchema."""

        def decide(state: RegistryState) -> tuple[Sequence[Row], str]:
            mode = state.mode(subject, default=subject is None)
            if mode is None:
                raise no_mode(subject)
            return [mode_row(subject, None)], mode

        return self._write(decide)


def no_level(subject: str | None) -> UnknownSchema:
    text = f"Subject '{subject}' does not have subject-level compatibility configured"
    return UnknownSchema(text, error_code=40408)


def no_mode(subject: str | None) -> UnknownSchema:
    text = f"Subject '{subject}' does not have subject-level mode configured"
    return UnknownSchema(text, error_code=40409)


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


def _identity(schema: Schema, parsed: Parsed) -> Identity:
    return Identity(schema.kind, parsed.identity, schema.references)


def _resolved(state: RegistryState, schema: Schema, one: Reference) -> Reference:
    try:
        found = state.version(one.subject, one.version, deleted=one.version > 0)
    except UnknownSchema as error:
        text = f'No schema reference found for subject "{one.subject}" and version {one.version}'
        raise invalid_schema(schema, text) from error
    return Reference(one.name, one.subject, found.version)
