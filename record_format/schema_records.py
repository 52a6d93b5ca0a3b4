"""The records of `_schemas`, as Confluent's registry and Karapace write them: keys and values.

    keytype, and other members of the key    value
    SCHEMA, subject, version, magic 1        subject, version, id, schema, deleted; schemaType
                                             unless it is AVRO, references and metadata if there
                                             are any
    DELETE_SUBJECT, subject, magic 0         subject, version: it and those below are deleted
    CLEAR_SUBJECT, subject, magic 0          subject: what was deleted of it is gone
    CONFIG, subject or null, magic 0         compatibilityLevel
    MODE, subject or null, magic 0           mode
    NOOP, magic 0                            null; here maxId, the highest id that was given

* All are JSON, and a null value deletes what its key says. Members that are not named here are
  ignored, as those registries ignore ours.
* A key's members are in Confluent's order: compaction compares bytes.
* An id that was given is not given again, also after all that had it is gone: then a record says
  which was the highest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import msgspec

from tierlog.record_format.workarounds import decode_json

Kind = Literal["AVRO", "JSON", "PROTOBUF"]
Row = tuple[bytes, bytes | None]
TOPIC: Final = "_schemas"
KINDS: Final[tuple[Kind, ...]] = ("JSON", "PROTOBUF", "AVRO")


class Malformed(Exception):
    """A schema is not valid, or a value is not what its schema says, and why."""


class Setting(NamedTuple):
    """What a subject may have of its own. `member`: of the value of its records."""

    keytype: str
    member: str
    default: str


LEVEL: Final = Setting("CONFIG", "compatibilityLevel", "BACKWARD")
MODE: Final = Setting("MODE", "mode", "READWRITE")
SETTINGS: Final = {one.keytype: one for one in (LEVEL, MODE)}


class Reference(msgspec.Struct, frozen=True):
    """`name`: what the schema calls what is in this version of this subject."""

    name: str
    subject: str
    version: int


class Metadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """What whoever registers a schema says about it. `tags`: of what is at a path in it;
    `sensitive`: names of properties.
    """

    tags: dict[str, list[str]] | None = None
    properties: dict[str, str] | None = None
    sensitive: list[str] | None = None


class Schema(NamedTuple):
    kind: Kind
    text: str
    references: tuple[Reference, ...] = ()
    metadata: Metadata | None = None


def guid_of(schema: Schema) -> str:
    """As Confluent's registry has it: an MD5 of the schema."""
    parts = [schema.text.encode()]
    for one in schema.references:
        parts += [one.name.encode(), one.subject.encode(), one.version.to_bytes(4)]
    if schema.metadata is not None:
        said = schema.metadata
        parts.append(b"\1")
        for path, tags in sorted((said.tags or {}).items()):
            parts += [path.encode(), *(one.encode() for one in sorted(tags))]
        for name, value in sorted((said.properties or {}).items()):
            parts += [name.encode(), value.encode()]
        parts += [one.encode() for one in sorted(said.sensitive or ())]
    return str(UUID(bytes=hashlib.md5(b"".join(parts), usedforsecurity=False).digest()))


class SubjectVersion(NamedTuple):
    subject: str
    version: int
    schema_id: int
    schema: Schema
    is_deleted: bool = False


def schema_row(version: SubjectVersion) -> Row:
    kind, text, references, metadata = version.schema
    value: dict[str, object] = {
        "subject": version.subject,
        "version": version.version,
        "id": version.schema_id,
    }
    if kind != "AVRO":
        value["schemaType"] = kind
    if references:
        value["references"] = references
    if metadata is not None:
        value["metadata"] = metadata
    value |= {"schema": text, "deleted": version.is_deleted}
    return _schema_key(version), msgspec.json.encode(value)


def schema_tombstone(version: SubjectVersion) -> Row:
    return _schema_key(version), None


def _schema_key(version: SubjectVersion) -> bytes:
    return _key("SCHEMA", magic=1, subject=version.subject, version=version.version)


def deleted_subject_row(subject: str, *, up_to_version: int) -> Row:
    value = {"subject": subject, "version": up_to_version}
    return _key("DELETE_SUBJECT", subject=subject), msgspec.json.encode(value)


def setting_row(setting: Setting, subject: str | None, value: str | None) -> Row:
    """Without a subject, of all that have none of their own. None restores the default."""
    text = None if value is None else msgspec.json.encode({setting.member: value})
    return _key(setting.keytype, subject=subject), text


def highest_id_row(highest_id: int) -> Row:
    return _key("NOOP"), msgspec.json.encode({"maxId": highest_id})


def _key(keytype: str, *, magic: int = 0, **members: object) -> bytes:
    return msgspec.json.encode({"keytype": keytype, **members, "magic": magic})


class Decoded(NamedTuple):
    keytype: str
    subject: str | None
    key: Mapping[str, Any]
    value: Mapping[str, Any] | None


def decode_row(key: bytes, value: bytes | None) -> Decoded:
    """Raises msgspec.MsgspecError."""
    members = decode_json(key, dict[str, Any])
    found = None if value in (None, b"null") else decode_json(value, dict[str, Any])
    return Decoded(str(members.get("keytype")), members.get("subject"), members, found)


def decode_version(value: Mapping[str, Any]) -> SubjectVersion:
    """Of a SCHEMA record. Raises msgspec.MsgspecError."""
    stored = msgspec.convert(value, _StoredVersion)
    references = tuple(stored.references or ())
    schema = Schema(stored.schema_type, stored.schema, references, stored.metadata)
    return SubjectVersion(stored.subject, stored.version, stored.id, schema, stored.deleted)


class _StoredVersion(msgspec.Struct, rename={"schema_type": "schemaType"}):
    subject: str
    version: int
    id: int
    schema: str
    deleted: bool = False
    schema_type: Kind = "AVRO"
    references: list[Reference] | None = None
    metadata: Metadata | None = None
