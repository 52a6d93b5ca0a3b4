"""What a request may hold, where the types that decode it do not say so; handlers check it.

`RULES` completes the schemas of structs, by their names. OpenAPI has no words for a rule between
two parameters, or between a parameter and the body's media type: their descriptions say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tierlog.api.http.settings import MAX_OFFSET, MAX_PARTITION
from tierlog.api.http.strict_json import MAX_TIMESTAMP
from tierlog.broker.schema_registry.registry import SUBJECT_MAX
from tierlog.hot_tier.log_config import KEYS, ConfigKey
from tierlog.manifest.keys import PIN_NAME
from tierlog.record_format.schema_state import INT_MAX
from tierlog.record_format.topic_rules import MAX_NAME_LENGTH, MAX_PARTITIONS

Json = dict[str, Any]

_NAME: Final = f"[a-zA-Z0-9._-]{{1,{MAX_NAME_LENGTH}}}$"
# RFC 3339, with each month's days but for the 29th of February, and from 1971 on, so that no offset
# from UTC leads before the epoch.
_TIME_TEXT: Final[Json] = {
    "type": "string",
    "pattern": r"^(197[1-9]|19[89]\d|[2-9]\d{3})-((0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"
    r"|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)[Tt ]"
    r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?([Zz]|[-+]([01]\d|2[0-3]):[0-5]\d)$",
}
_MILLISECONDS: Final[Json] = {"type": "integer", "minimum": 0, "maximum": MAX_TIMESTAMP}
_TIME: Final[Json] = {"anyOf": [_MILLISECONDS, _TIME_TEXT]}
_OFFSET: Final[Json] = {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET}
_NODE: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_PARTITION: Final[Json] = {"type": "integer", "minimum": 0, "maximum": MAX_PARTITION}
_POSITION: Final[Json] = {
    "anyOf": [_OFFSET, {"type": "string", "enum": ["earliest", "latest", "earliest-local"]}]
}
_BASE64: Final[Json] = {
    "type": "string",
    "contentEncoding": "base64",
    "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
_NULL: Final[Json] = {"type": "null"}
_BASE64_OR_NULL: Final[Json] = {"anyOf": [_BASE64, _NULL]}
_PIN_NAME: Final[Json] = {"type": "string", "pattern": f"^{PIN_NAME}$"}

PATH_PARAMETERS: Final[Mapping[str, Json]] = {
    "topic": {"schema": {"type": "string", "pattern": f"^{_NAME}"}, "example": "flights"},
    "partition": {"schema": _PARTITION, "example": 0},
    "node": {"schema": _NODE, "example": 2},
    "group": {"schema": {"type": "string", "minLength": 1, "maxLength": 255}, "example": "reports"},
    "member": {"schema": {"type": "string", "minLength": 1}, "example": "http-1"},
    "transactional_id": {"schema": {"type": "string", "minLength": 1}, "example": "etl"},
    "pin": {"schema": _PIN_NAME, "example": "june"},
    "base_offset": {"schema": _OFFSET, "example": 0},
    "subject": {
        "schema": {"type": "string", "minLength": 1, "maxLength": SUBJECT_MAX},
        "example": "flights-value",
    },
    "version": {
        "schema": {"type": "string", "pattern": "^(latest|-1|[1-9][0-9]{0,8})$"},
        "example": "latest",
    },
    "schema_id": {"schema": {"type": "integer", "minimum": 1, "maximum": INT_MAX}, "example": 1},
    "guid": {
        "schema": {"type": "string", "format": "uuid"},
        "example": "4a44cc9a-4ce8-3a9a-d6f8-3e88190092c5",
    },
}
QUERY_PARAMETERS: Final[Mapping[str, str]] = {
    "after": "begin with the first id after this one",
    "acks": "wait until appended (1), until flushed (all, -1), or not at all (0)",
    "apply": "carry out the steps that lose nothing",
    "deep": "read every byte of both tiers",
    "defaultToGlobal": "if it has none of its own, that of all",
    "contextPrefix": "only contexts whose names begin with this",
    "decode": "keys and values by the schemas whose ids they begin with, as JSON",
    "deleted": "also what is deleted, but not for good",
    "deletedOnly": "only what is deleted, but not for good",
    "deletedAsNegative": "also what is deleted, but not for good, as negative numbers",
    "deleted_only": "as deletedOnly",
    "encoding": "of keys and values: UTF-8 text, values that are JSON as JSON, or base64",
    "envelope": "each line is a record object, not a value; only with application/x-ndjson",
    "fetchMaxId": "also return the highest id there is",
    "findTags": "there are none",
    "force": "set IMPORT although there are schemas",
    "format": "as if it were not given: there is one format",
    "from_offset": "begin with the segment that contains this offset",
    "internal": "include topics whose names begin with __",
    "isolation": "read_committed: up to the last stable offset, without aborted records",
    "key": "the record's key, as text; of a POST only with application/octet-stream, of a GET that "
    "of all records in the response; of metadata the name of a property, once or more",
    "key_base64": "as key, which it is not given together with, in bytes",
    "latestOnly": "of each subject the newest version alone",
    "limit": "the maximum number of them in the response; where it may be -1, that is all",
    "max_bytes": "at most this much of the log, but always at least one batch or record",
    "max_records": "at most this many records, or the batches that contain them",
    "min_bytes": "with wait_ms: wait until this much can be read",
    "key_schema_id": "encode each key, which is JSON, by the schema of the subject `<topic>-key` "
    "that has this id",
    "key_schema_version": "encode each key, which is JSON, by this version of the subject "
    "`<topic>-key`, or by the latest",
    "value_schema_id": "encode each value, which is JSON, by the schema of the subject "
    "`<topic>-value` that has this id",
    "value_schema_version": "encode each value, which is JSON, by this version of the subject "
    "`<topic>-value`, or by the latest",
    "normalize": "as if it were not given: schemas that say the same are one",
    "offset": "of a log: a number, earliest, latest or earliest-local, not together with "
    "timestamp; of a list: how many are left out",
    "permanent": "for good, what was deleted without this before",
    "prefix": "only topics whose names begin with this",
    "referenceFormat": "as if it were not given: there is one format",
    "reference_format": "as if it were not given: there is one format",
    "stable": "not while a transaction in progress has offsets of the group",
    "state": "only transactional ids whose last transaction is in this state",
    "subject": "only what is of this subject",
    "subjectPrefix": "only subjects whose names begin with this",
    "timestamp": "milliseconds since the epoch, or RFC 3339 text: the first record at or after it; "
    "where there is an offset parameter, not together with it",
    "value": "of metadata the value of the property that `key` names in the same place",
    "verbose": "also return why not",
    "version": "of the manifest; the current one by default",
    "wait_ms": "wait at most this long, then respond with what there is",
}
QUERY_SHAPES: Final[Mapping[str, Json]] = {
    "offset": _POSITION,
    "timestamp": _TIME,
    "key_base64": _BASE64,
}
HEADER_SHAPES: Final[Mapping[str, Json]] = {
    "If-Offset-Match": _OFFSET,
    "Producer-Id": _OFFSET,
    "Producer-Epoch": {"type": "integer", "minimum": 0, "maximum": 2**15 - 1},
    "Producer-Sequence": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "Transactional-Id": {"type": "string", "minLength": 1, "pattern": "^[!-$&-~]+$"},
    "Content-Encoding": {
        "type": "string",
        "anyOf": [{"enum": ["gzip", "zstd", "x-gzip", "identity"]}, {"pattern": "^[ \t,]*$"}],
    },
}


def _not_both(name: str) -> Json:
    """Of a member and its form in base64 at most one is not null."""
    coded = f"{name}_base64"
    given = {name: {"not": _NULL}, coded: {"not": _NULL}}
    return {"not": {"required": [name, coded], "properties": given}}


def _config(*, nullable: bool) -> Json:
    return {
        "properties": {key.name: _config_value(key, nullable=nullable) for key in KEYS},
        "additionalProperties": False,
    }


def _config_value(key: ConfigKey, *, nullable: bool) -> Json:
    """Numbers and booleans may be text, as Kafka's tools send them."""
    text: Json = {"type": "string"}
    shapes: list[Json]
    if key.kind == "boolean":
        shapes = [{"type": "boolean"}, {"type": "string", "pattern": "^([Tt]rue|[Ff]alse)$"}]
    elif key.kind == "text":
        shapes = [text | {"enum": list(key.choices)}]
    elif key.kind == "list":
        shapes = [text | {"pattern": f"^({'|'.join(key.choices)})(, ?({'|'.join(key.choices)}))*$"}]
    else:
        kind = "number" if key.kind == "double" else "integer"
        shapes = [{"type": kind, "minimum": key.minimum, "maximum": key.maximum}, text]
    return {"description": key.doc, "anyOf": [*shapes, *([_NULL] if nullable else [])]}


_PARTITIONS: Final[Json] = {"minimum": 1, "maximum": MAX_PARTITIONS}
_REPLICAS: Final[Json] = {
    "items": {"type": "array", "minItems": 1, "uniqueItems": True, "items": _NODE}
}
RULES: Final[Mapping[str, Json]] = {
    "CreateTopic": {
        "properties": {
            "name": {"pattern": r"^(?!\.\.?$)" + _NAME},
            "partitions": _PARTITIONS,
            "config": _config(nullable=False),
            "replication_factor": {"minimum": 1},
            "replicas": _REPLICAS,
        }
    },
    "AlterTopic": {
        "anyOf": [{"required": ["config"]}, {"required": ["partitions"]}],
        "properties": {
            "partitions": _PARTITIONS,
            "config": _config(nullable=True),
            "replicas": _REPLICAS,
        },
    },
    "PinToCreate": {"properties": {"name": _PIN_NAME}},
    "RecordsIn": {"properties": {"records": {"minItems": 1}}},
    "RecordIn": {
        "allOf": [_not_both("key"), _not_both("value")],
        "properties": {
            "key_base64": _BASE64_OR_NULL,
            "value_base64": _BASE64_OR_NULL,
            "timestamp": {"anyOf": [_MILLISECONDS, _TIME_TEXT, _NULL]},
            "partition": {"anyOf": [_PARTITION, _NULL]},
        },
    },
    "HeaderIn": {
        **_not_both("value"),
        "properties": {"value_base64": _BASE64_OR_NULL},
    },
    "RequestedPartition": {"properties": {"offset": _POSITION}},
}
