"""The records of `_schemas`, as Confluent's registry and Karapace write them: keys and values.

    keytype, and other members of the key    value
    SCHEMA, subject, version, magic 1        subject, version, id, schema, deleted; schemaType
                                             unless it is AVRO, references if there are any
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

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from tierlog.record_format.workarounds import decode_json

Kind = Literal["AVRO", "JSON", "PROTOBUF"]
Row = tuple[bytes, bytes | None]
TOPIC: Final = "_schemas"
KINDS: Final[tuple[Kind, ...]] = ("JSON", "PROTOBUF", "AVRO")


class Malformed(Exception):
    """A schema is not valid, or a value is not what its schema says, and why."""


class Reference(msgspec.Struct, frozen=True):
    """`name`: what the schema calls what is in this version of this subject."""

    name: str
    subject: str
    version: int


class Schema(NamedTuple):
    kind: Kind
    text: str
    references: tuple[Reference, ...] = ()


class SubjectVersion(NamedTuple):
    subject: str
    version: int
    schema_id: int
    schema: Schema
    is_deleted: bool = False


def schema_row(version: SubjectVersion) -> Row:
    kind, text, references = version.schema
    value: dict[str, object] = {
        "subject": version.subject,
        "version": version.version,
        "id": version.schema_id,
    }
    if kind != "AVRO":
        value["schemaType"] = kind
    if references:
        value["references"] = references
    value |= {"schema": text, "deleted": version.is_deleted}
    return _schema_key(version), msgspec.json.encode(value)


def schema_tombstone(version: SubjectVersion) -> Row:
    return _schema_key(version), None


def _schema_key(version: SubjectVersion) -> bytes:
    return _key("SCHEMA", magic=1, subject=version.subject, version=version.version)


def deleted_subject_row(subject: str, *, up_to_version: int) -> Row:
    value = {"subject": subject, "version": up_to_version}
    return _key("DELETE_SUBJECT", subject=subject), msgspec.json.encode(value)


def level_row(subject: str | None, level: str | None) -> Row:
    """None restores the default."""
    value = None if level is None else msgspec.json.encode({"compatibilityLevel": level})
    return _key("CONFIG", subject=subject), value


def mode_row(subject: str | None, mode: str | None) -> Row:
    """None restores the default."""
    value = None if mode is None else msgspec.json.encode({"mode": mode})
    return _key("MODE", subject=subject), value


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
    schema = Schema(stored.schema_type, stored.schema, tuple(stored.references or ()))
    return SubjectVersion(stored.subject, stored.version, stored.id, schema, stored.deleted)


class _StoredVersion(msgspec.Struct, rename={"schema_type": "schemaType"}):
    subject: str
    version: int
    id: int
    schema: str
    deleted: bool = False
    schema_type: Kind = "AVRO"
    references: list[Reference] | None = None
