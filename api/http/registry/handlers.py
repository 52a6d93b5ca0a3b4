"""The calls of the schema registry. What they do is `SchemaRegistry`'s; in a cluster they go to the
leader of `_schemas` (`cluster.gateway`).

* A subject counts as a topic of its name: a token for topics that begin with a prefix sees the
  subjects that do. An id is shown to who sees one of its subjects.
* Schemas are told apart by what they say, not by how it is written: `normalize` changes nothing.
  Nor does `findTags`: there are no tags.
* `format=serialized` asks for the base64 of a Protobuf schema's FileDescriptorProto, as Confluent's
  clients do. There are no other formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec
from fastapi import Depends, Response
from msgspec import UNSET

from tierlog.api.http import header_values
from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import (
    TheContext,
    TheExchange,
    TheGrant,
    body_as,
    query_as,
)
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.header_values import JSON, REGISTRY_JSON
from tierlog.api.http.registry.documents import (
    Compatible,
    Deleting,
    GivenSchema,
    Listing,
    ListingContexts,
    ListingReferrers,
    ListingSchemas,
    ListingSubjects,
    ListingVersions,
    LookingForMetadata,
    LookingUp,
    OfId,
    PlaceOfSchema,
    ReadingGuid,
    ReadingId,
    ReadingVersion,
    RegisteredId,
    Registering,
    Testing,
    of_schema,
    of_version,
)
from tierlog.broker.schema_registry.registry import Given, SchemaRegistry
from tierlog.record_format.errors import InvalidSchema, UnknownSchema
from tierlog.record_format.schema_records import (
    KINDS,
    Metadata,
    Schema,
    SubjectVersion,
    guid_of,
)
from tierlog.record_format.schema_state import RegistryState, parse_version, place_of

T = TypeVar("T")
DEFAULT_CONTEXT: Final = "."  # there is no other
ACCEPTED: Final = (REGISTRY_JSON, JSON)


class Asked(NamedTuple):
    """A call, and what it needs to be answered."""

    context: Context
    exchange: Exchange

    @property
    def registry(self) -> SchemaRegistry:
        return self.context.broker.schema_registry

    def answer(self, document: object) -> Response:
        return self.answer_text(msgspec.json.encode(document).decode())

    def answer_text(self, text: str) -> Response:
        accept = self.exchange.header(b"accept")
        media_type = header_values.preferred(accept, offered=ACCEPTED)
        headers = {"cache-control": "no-store", "content-type": media_type}
        return Response(text.encode(), headers=headers)


async def _asked(context: TheContext, exchange: TheExchange) -> Asked:
    return Asked(context, exchange)


TheBody = Annotated[GivenSchema, body_as(GivenSchema, accepted=ACCEPTED)]


async def _schema_of(grant: TheGrant, body: TheBody) -> Schema:
    """Raises InvalidSchema, Forbidden."""
    kind = body.schema_type or "AVRO"
    if kind not in KINDS:
        raise InvalidSchema(f"Invalid schema type {kind[:64]}", error_code=42201)
    for one in body.references or ():
        grant.check_topic(one.subject)
    metadata = body.metadata if body.metadata != Metadata() else None
    return Schema(kind, body.schema, tuple(body.references or ()), metadata)


async def _registered_of(grant: TheGrant, body: TheBody) -> tuple[Schema, Given]:
    """As `_schema_of`."""
    return await _schema_of(grant, body), Given(body.given_id, body.given_version)


async def _version_of(version: str) -> int:
    return parse_version(version)


async def _schema_id_of(exchange: TheExchange) -> int:
    return exchange.number("schema_id")


TheAsked = Annotated[Asked, Depends(_asked)]
TheSchema = Annotated[Schema, Depends(_schema_of)]
TheVersion = Annotated[int, Depends(_version_of)]
TheSchemaId = Annotated[int, Depends(_schema_id_of)]


async def _in_format(asked: Asked, schema: Schema, wanted: str) -> Schema:
    if wanted != "serialized" or schema.kind != "PROTOBUF":
        return schema
    return schema._replace(text=await asked.context.read(asked.registry.serialized, schema))


def _page(found: Sequence[T], query: Listing) -> Sequence[T]:
    end = None if query.limit < 0 else query.offset + query.limit
    return found[query.offset : end]


async def list_contexts(
    asked: TheAsked, query: Annotated[ListingContexts, query_as(ListingContexts)]
) -> Response:
    found = [one for one in (DEFAULT_CONTEXT,) if one.startswith(query.context_prefix)]
    return asked.answer(_page(found, query))


# --- schemas by id --------------------------------------------------------------------------------


async def list_schema_types(asked: TheAsked) -> Response:
    return asked.answer(KINDS)


async def list_schemas(
    asked: TheAsked,
    query: Annotated[ListingSchemas, query_as(ListingSchemas)],
) -> Response:
    def look(state: RegistryState) -> list[SubjectVersion]:
        found: list[SubjectVersion] = []
        for subject in state.subjects(deleted=query.deleted):
            if asked.exchange.grant.sees_topic(subject) and subject.startswith(query.prefix):
                versions = state.versions(subject, deleted=query.deleted)
                found += versions[-1:] if query.latest_only else versions
        return found

    found = await asked.context.read(asked.registry.read, look)
    return asked.answer([of_version(one) for one in _page(found, query)])


async def _read_id(asked: Asked, schema_id: int) -> list[SubjectVersion]:
    """Those with this id that the caller may see. Raises UnknownSchema."""
    found = await asked.context.read(asked.registry.read, lambda state: state.with_id(schema_id))
    return _seen(asked, found, f"Schema {schema_id} not found")


def _seen(asked: Asked, found: list[SubjectVersion], refusal: str) -> list[SubjectVersion]:
    seen = [one for one in found if asked.exchange.grant.sees_topic(one.subject)]
    if not seen:
        raise UnknownSchema(refusal, error_code=40403)
    return seen


async def get_schema_by_guid(
    asked: TheAsked, guid: str, query: Annotated[ReadingGuid, query_as(ReadingGuid)]
) -> Response:
    found = await asked.context.read(asked.registry.read, lambda state: state.with_guid(guid))
    seen = _seen(asked, found, f"Schema {guid} not found")
    schema = await _in_format(asked, seen[0].schema, query.format)
    return asked.answer(of_schema(schema, max_id=UNSET))


async def get_schema_by_id(
    asked: TheAsked,
    schema_id: TheSchemaId,
    query: Annotated[ReadingId, query_as(ReadingId)],
) -> Response:
    found = await _read_id(asked, schema_id)
    highest: int = await asked.context.read(asked.registry.read, lambda state: state.highest_id)
    max_id = highest if query.fetch_max_id else UNSET
    schema = await _in_format(asked, found[0].schema, query.format)
    return asked.answer(of_schema(schema, max_id=max_id))


async def get_schema_text_by_id(
    asked: TheAsked,
    schema_id: TheSchemaId,
    query: Annotated[ReadingId, query_as(ReadingId)],
) -> Response:
    found = await _read_id(asked, schema_id)
    schema = await _in_format(asked, found[0].schema, query.format)
    return asked.answer_text(schema.text)


async def list_subjects_of_id(
    asked: TheAsked,
    schema_id: TheSchemaId,
    query: Annotated[OfId, query_as(OfId)],
) -> Response:
    found = _of_id(await _read_id(asked, schema_id), query)
    return asked.answer(_page(list(dict.fromkeys(one.subject for one in found)), query))


async def list_versions_of_id(
    asked: TheAsked,
    schema_id: TheSchemaId,
    query: Annotated[OfId, query_as(OfId)],
) -> Response:
    found = _page(_of_id(await _read_id(asked, schema_id), query), query)
    return asked.answer([PlaceOfSchema(one.subject, one.version) for one in found])


def _of_id(found: Sequence[SubjectVersion], query: OfId) -> list[SubjectVersion]:
    return [
        one
        for one in found
        if (query.deleted or not one.is_deleted) and query.subject in ("", one.subject)
    ]


# --- subjects -------------------------------------------------------------------------------------


async def list_subjects(
    asked: TheAsked,
    query: Annotated[ListingSubjects, query_as(ListingSubjects)],
) -> Response:
    found = await asked.context.read(
        asked.registry.read,
        lambda state: state.subjects(deleted=query.deleted, deleted_only=query.is_of_deleted),
    )
    seen = [
        one
        for one in found
        if asked.exchange.grant.sees_topic(one) and one.startswith(query.prefix)
    ]
    return asked.answer(_page(seen, query))


async def list_versions(
    asked: TheAsked,
    subject: str,
    query: Annotated[ListingVersions, query_as(ListingVersions)],
) -> Response:
    deleted = query.deleted or query.is_of_deleted or query.deleted_as_negative
    found = await asked.context.read(
        asked.registry.read, lambda state: state.known_versions(subject, deleted=deleted)
    )
    numbers = [query.number_of(one) for one in found if one.is_deleted or not query.is_of_deleted]
    return asked.answer(_page(numbers, query))


async def register_schema(
    asked: TheAsked,
    subject: str,
    query: Annotated[Registering, query_as(Registering)],  # noqa: ARG001  checked
    registered: Annotated[tuple[Schema, Given], Depends(_registered_of)],
) -> Response:
    schema, given = registered
    found = await asked.context.write(asked.registry.register, subject, schema, given)
    return asked.answer(RegisteredId(found.schema_id, found.version, guid_of(found.schema)))


async def look_up_schema(
    asked: TheAsked,
    subject: str,
    query: Annotated[LookingUp, query_as(LookingUp)],
    schema: TheSchema,
) -> Response:
    found = await asked.context.read(asked.registry.lookup, subject, schema, deleted=query.deleted)
    shown = await _in_format(asked, found.schema, query.format)
    return asked.answer(of_version(found._replace(schema=shown)))


async def get_version(
    asked: TheAsked,
    subject: str,
    version: TheVersion,
    query: Annotated[ReadingVersion, query_as(ReadingVersion)],
) -> Response:
    return asked.answer(of_version(await _read_version(asked, subject, version, query)))


async def get_version_text(
    asked: TheAsked,
    subject: str,
    version: TheVersion,
    query: Annotated[ReadingVersion, query_as(ReadingVersion)],
) -> Response:
    found = await _read_version(asked, subject, version, query)
    return asked.answer_text(found.schema.text)


async def _read_version(
    asked: Asked,
    subject: str,
    version: int,
    query: ReadingVersion,
) -> SubjectVersion:
    found: SubjectVersion = await asked.context.read(
        asked.registry.read, lambda state: state.version(subject, version, deleted=query.deleted)
    )
    return found._replace(schema=await _in_format(asked, found.schema, query.format))


async def get_latest_with_metadata(
    asked: TheAsked,
    subject: str,
    query: Annotated[LookingForMetadata, query_as(LookingForMetadata)],
) -> Response:
    properties = dict(zip(query.key, query.value, strict=False))
    found: SubjectVersion = await asked.context.read(
        asked.registry.read,
        lambda state: state.latest_with_properties(subject, properties, deleted=query.deleted),
    )
    shown = await _in_format(asked, found.schema, query.format)
    return asked.answer(of_version(found._replace(schema=shown)))


async def list_referrers(
    asked: TheAsked,
    subject: str,
    version: TheVersion,
    query: Annotated[ListingReferrers, query_as(ListingReferrers)],
) -> Response:
    def look(state: RegistryState) -> list[int]:
        place = place_of(state.version(subject, version, deleted=True))
        found = state.referrers(place, deleted=query.deleted)
        return sorted({one.schema_id for one in found})

    return asked.answer(_page(await asked.context.read(asked.registry.read, look), query))


async def delete_version(
    asked: TheAsked,
    subject: str,
    version: TheVersion,
    query: Annotated[Deleting, query_as(Deleting)],
) -> Response:
    deleted = await asked.context.write(
        asked.registry.delete_version, subject, version, permanent=query.permanent
    )
    return asked.answer(deleted)


async def delete_subject(
    asked: TheAsked,
    subject: str,
    query: Annotated[Deleting, query_as(Deleting)],
) -> Response:
    deleted = await asked.context.write(
        asked.registry.delete_subject, subject, permanent=query.permanent
    )
    return asked.answer(deleted)


# --- compatibility --------------------------------------------------------------------------------


async def check_compatibility(
    asked: TheAsked,
    subject: str,
    version: TheVersion,
    query: Annotated[Testing, query_as(Testing)],
    schema: TheSchema,
) -> Response:
    return await _compatible(asked, query, subject, schema, number=version)


async def check_compatibility_with_all(
    asked: TheAsked,
    subject: str,
    query: Annotated[Testing, query_as(Testing)],
    schema: TheSchema,
) -> Response:
    return await _compatible(asked, query, subject, schema, number=None)


async def _compatible(
    asked: Asked, query: Testing, subject: str, schema: Schema, *, number: int | None
) -> Response:
    try:
        problems: list[str] = await asked.context.read(
            asked.registry.problems_with, subject, schema, number
        )
    except InvalidSchema as error:
        if not query.verbose:
            raise
        problems = [str(error)]
    return asked.answer(Compatible(not problems, problems if query.verbose else []))
