"""The calls of the schema registry, in one table: Confluent's paths."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from tierlog.api.http.calls import Body, Call
from tierlog.api.http.header_values import JSON, REGISTRY_JSON
from tierlog.api.http.registry import documents, handlers
from tierlog.api.http.registry.settings import LEVELS, MODES, SettingShape, setting_endpoints

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
_call = partial(Call, tag="schemas")


def _body(schema: Any, example: Any = None) -> dict[str, Body]:
    """In both media types; `example`: of what is no struct."""
    body = Body(schema=schema, example=example)
    return {REGISTRY_JSON: body, JSON: body}


_SCHEMA_GIVEN: Final = _body(documents.GivenSchema, _GIVEN)

_SETTINGS: Final = {  # what it is called, its path, and what it may be
    LEVELS: (
        "level",
        "/config",
        "NONE, BACKWARD, BACKWARD_TRANSITIVE, FORWARD, FORWARD_TRANSITIVE, FULL or "
        "FULL_TRANSITIVE.",
        {"compatibility": "FULL"},
    ),
    MODES: (
        "mode",
        "/mode",
        "READWRITE; READONLY: nothing is registered, deleted, or given another level; "
        "READONLY_OVERRIDE: of all, whatever modes subjects have of their own; or IMPORT: a schema "
        "is registered with the id that is given, and is not compared with others. IMPORT is "
        "refused while there are schemas, except with `force`.",
        {"mode": "READWRITE"},
    ),
}


def _setting_calls(shape: SettingShape) -> Iterator[Call]:
    name, path, values, example = _SETTINGS[shape]
    called = {"level": "compatibility level"}.get(name, name)
    default = f"the {called} of subjects that have none of their own"
    for at, what, endpoints in (
        (path, default, setting_endpoints(shape, f"default_{name}")),
        (path + "/{subject}", f"a subject's own {called}", setting_endpoints(shape, name)),
    ):
        is_own = at != path
        yield _call(
            method="GET",
            path=at,
            endpoint=endpoints.show,
            summary=what[0].upper() + what[1:],
            query=documents.Defaulting,
            response=_body(shape.kept),
            problems=("invalid-schema", *_FINDING) if is_own else _READING,
        )
        yield _call(
            method="PUT",
            path=at,
            endpoint=endpoints.set,
            summary=f"Set {what}",
            description=values,
            query=shape.setting_query,
            body=_body(shape.given, example),
            response=_body(shape.given),
            problems=_WRITING,
        )
        yield _call(
            method="DELETE",
            path=at,
            endpoint=endpoints.reset,
            summary=f"Reset {what}. Returns what it was",
            response=_body(shape.kept),
            problems=("unknown-schema", *_WRITING) if is_own else _WRITING,
        )


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
        path="/schemas/guids/{guid}",
        endpoint=handlers.get_schema_by_guid,
        summary="The schema that has a GUID",
        query=documents.ReadingGuid,
        response=_body(documents.SchemaOfId),
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
        path="/contexts",
        endpoint=handlers.list_contexts,
        summary="The contexts of subjects: there is one",
        query=documents.ListingContexts,
        response=_body(list[str], ["."]),
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
        path=_SUBJECT + "/metadata",
        endpoint=handlers.get_latest_with_metadata,
        summary="The latest version of a subject whose metadata has these properties",
        query=documents.LookingForMetadata,
        response=_body(documents.VersionOfSubject),
        problems=_FINDING,
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
        query=documents.ListingReferrers,
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
    *_setting_calls(LEVELS),
    *_setting_calls(MODES),
)
