"""The calls of the schema registry, in one table: Confluent's paths."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from tierlog.api.http.calls import Body, Call
from tierlog.api.http.header_values import JSON, REGISTRY_JSON
from tierlog.api.http.registry import documents, handlers

_WHERE: Final = ("not-leader", "leader-unknown", "broker-unavailable", "starting")
_READING: Final = (
    *_WHERE,
    "leadership-lost",
    "cold-object-missing",
    "cold-object-corrupt",
    "corrupt-log",
    "store-unavailable",
    "disk-full",
)
_FINDING: Final = ("unknown-schema", *_READING)
_WRITING: Final = (
    "invalid-schema",
    "not-enough-replicas",
    "leader-changed",
    "log-offline",
    *_READING,
)
_SUBJECT: Final = "/subjects/{subject}"
_VERSION: Final = _SUBJECT + "/versions/{version}"
_ID: Final = "/schemas/ids/{schema_id}"
_TEXT: Final = '{"type":"record","name":"Flight","fields":[{"name":"carrier","type":"string"}]}'
_GIVEN: Final = {"schema": _TEXT, "schemaType": "AVRO"}
_LEVEL: Final = {"compatibility": "FULL"}
_IN_ANY_LEVEL: Final = (
    "NONE, BACKWARD, BACKWARD_TRANSITIVE, FORWARD, FORWARD_TRANSITIVE, FULL or FULL_TRANSITIVE."
)

_call = partial(Call, tag="schemas")


def _body(schema: Any, example: Any = None) -> dict[str, Body]:
    """In both media types; `example`: of what is no struct."""
    body = Body(schema=schema, example=example)
    return {REGISTRY_JSON: body, JSON: body}


_SCHEMA_GIVEN: Final = _body(documents.GivenSchema, _GIVEN)

REGISTRY_CALLS: Final = (
    _call(
        method="GET",
        path="/schemas",
        endpoint=handlers.list_schemas,
        summary="All versions of all subjects",
        query=documents.ListingSchemas,
        response=_body(list[documents.VersionOfSubject], []),
        problems=_READING,
    ),
    _call(
        method="GET",
        path="/schemas/types",
        endpoint=handlers.list_schema_types,
        summary="The kinds of schemas",
        response=_body(list[str], ["JSON", "PROTOBUF", "AVRO"]),
    ),
    _call(
        method="GET",
        path=_ID,
        endpoint=handlers.get_schema_by_id,
        summary="The schema that has an id",
        query=documents.ReadingId,
        response=_body(documents.SchemaOfId),
        problems=_FINDING,
    ),
    _call(
        method="GET",
        path=_ID + "/schema",
        endpoint=handlers.get_schema_text_by_id,
        summary="The text alone of the schema that has an id",
        query=documents.ReadingId,
        response=_body({}, {"type": "string"}),
        problems=_FINDING,
    ),
    _call(
        method="GET",
        path=_ID + "/subjects",
        endpoint=handlers.list_subjects_of_id,
        summary="The subjects that have a schema of this id",
        query=documents.OfId,
        response=_body(list[str], ["flights-value"]),
        problems=_FINDING,
    ),
    _call(
        method="GET",
        path=_ID + "/versions",
        endpoint=handlers.list_versions_of_id,
        summary="The subjects and versions that have this id",
        query=documents.OfId,
        response=_body(list[documents.PlaceOfSchema], [{"subject": "flights-value", "version": 1}]),
        problems=_FINDING,
    ),
    _call(
        method="GET",
        path="/subjects",
        endpoint=handlers.list_subjects,
        summary="List subjects by name",
        query=documents.ListingSubjects,
        response=_body(list[str], ["flights-value"]),
        problems=_READING,
    ),
    _call(
        method="POST",
        path=_SUBJECT,
        endpoint=handlers.look_up_schema,
        summary="The version of a subject that has a schema",
        query=documents.LookingUp,
        body=_SCHEMA_GIVEN,
        response=_body(documents.VersionOfSubject),
        problems=("invalid-schema", *_FINDING),
        only_reads=True,
    ),
    _call(
        method="DELETE",
        path=_SUBJECT,
        endpoint=handlers.delete_subject,
        summary="Delete a subject",
        description="Its ids are still found. With `permanent` they are not, once it was deleted "
        "without; they are not given again.",
        query=documents.Deleting,
        response=_body(list[int], [1]),
        problems=("unknown-schema", *_WRITING),
    ),
    _call(
        method="GET",
        path=_SUBJECT + "/versions",
        endpoint=handlers.list_versions,
        summary="The versions of a subject",
        query=documents.ListingVersions,
        response=_body(list[int], [1]),
        problems=_FINDING,
    ),
    _call(
        method="POST",
        path=_SUBJECT + "/versions",
        endpoint=handlers.register_schema,
        summary="Register a schema",
        description="Returns once it is durable. A schema that says the same as one that is "
        "registered gets its id, however it is written.",
        query=documents.Registering,
        body=_SCHEMA_GIVEN,
        response=_body(documents.RegisteredId),
        problems=("incompatible-schema", *_WRITING),
    ),
    _call(
        method="GET",
        path=_VERSION,
        endpoint=handlers.get_version,
        summary="A version of a subject; `latest` is one",
        query=documents.ReadingVersion,
        response=_body(documents.VersionOfSubject),
        problems=("invalid-schema", *_FINDING),
    ),
    _call(
        method="GET",
        path=_VERSION + "/schema",
        endpoint=handlers.get_version_text,
        summary="The text alone of a version",
        query=documents.ReadingVersion,
        response=_body({}, {"type": "string"}),
        problems=("invalid-schema", *_FINDING),
    ),
    _call(
        method="GET",
        path=_VERSION + "/referencedby",
        endpoint=handlers.list_referrers,
        summary="The ids of the schemas that refer to a version",
        query=documents.Listing,
        response=_body(list[int], []),
        problems=("invalid-schema", *_FINDING),
    ),
    _call(
        method="DELETE",
        path=_VERSION,
        endpoint=handlers.delete_version,
        summary="Delete a version of a subject",
        description="As a subject is deleted. Refused while another schema refers to it.",
        query=documents.Deleting,
        response=_body(int, 1),
        problems=("unknown-schema", *_WRITING),
    ),
    *(
        _call(
            method="POST",
            path=f"/compatibility{path}",
            endpoint=endpoint,
            summary=summary,
            query=documents.Testing,
            body=_SCHEMA_GIVEN,
            response=_body(documents.Compatible),
            problems=("invalid-schema", *_FINDING),
            only_reads=True,
        )
        for path, endpoint, summary in (
            (
                _VERSION,
                handlers.check_compatibility,
                "Whether a schema is compatible with a version, by the subject's level",
            ),
            (
                _SUBJECT + "/versions",
                handlers.check_compatibility_with_all,
                "Whether a schema is compatible with a subject's versions, by its level",
            ),
        )
    ),
    _call(
        method="GET",
        path="/config",
        endpoint=handlers.get_default_level,
        summary="The compatibility level of subjects that have none of their own",
        query=documents.Defaulting,
        response=_body(documents.KeptLevel),
        problems=_READING,
    ),
    _call(
        method="PUT",
        path="/config",
        endpoint=handlers.set_default_level,
        summary="Set the compatibility level of subjects that have none of their own",
        description=_IN_ANY_LEVEL,
        body=_body(documents.GivenLevel, _LEVEL),
        response=_body(documents.GivenLevel),
        problems=_WRITING,
    ),
    _call(
        method="DELETE",
        path="/config",
        endpoint=handlers.reset_default_level,
        summary="Have the default level again: BACKWARD. Returns what it was",
        response=_body(documents.KeptLevel),
        problems=_WRITING,
    ),
    _call(
        method="GET",
        path="/config/{subject}",
        endpoint=handlers.get_level,
        summary="A subject's own compatibility level",
        query=documents.Defaulting,
        response=_body(documents.KeptLevel),
        problems=("invalid-schema", *_FINDING),
    ),
    _call(
        method="PUT",
        path="/config/{subject}",
        endpoint=handlers.set_level,
        summary="Set a subject's compatibility level",
        description=_IN_ANY_LEVEL,
        body=_body(documents.GivenLevel, _LEVEL),
        response=_body(documents.GivenLevel),
        problems=_WRITING,
    ),
    _call(
        method="DELETE",
        path="/config/{subject}",
        endpoint=handlers.reset_level,
        summary="Have a subject follow the default level again. Returns what it was",
        response=_body(documents.KeptLevel),
        problems=("unknown-schema", *_WRITING),
    ),
    _call(
        method="GET",
        path="/mode",
        endpoint=handlers.get_default_mode,
        summary="Whether schemas can be registered: READWRITE or READONLY",
        query=documents.Defaulting,
        response=_body(documents.Mode),
        problems=_READING,
    ),
    _call(
        method="PUT",
        path="/mode",
        endpoint=handlers.set_default_mode,
        summary="Let schemas be registered, or not",
        query=documents.Forcing,
        body=_body(documents.Mode, {"mode": "READWRITE"}),
        response=_body(documents.Mode),
        problems=_WRITING,
    ),
    _call(
        method="GET",
        path="/mode/{subject}",
        endpoint=handlers.get_mode,
        summary="A subject's own mode",
        query=documents.Defaulting,
        response=_body(documents.Mode),
        problems=("invalid-schema", *_FINDING),
    ),
    _call(
        method="PUT",
        path="/mode/{subject}",
        endpoint=handlers.set_mode,
        summary="Set a subject's mode",
        query=documents.Forcing,
        body=_body(documents.Mode, {"mode": "READWRITE"}),
        response=_body(documents.Mode),
        problems=_WRITING,
    ),
    _call(
        method="DELETE",
        path="/mode/{subject}",
        endpoint=handlers.reset_mode,
        summary="Have a subject follow the default mode again. Returns what it was",
        response=_body(documents.Mode),
        problems=("unknown-schema", *_WRITING),
    ),
)
