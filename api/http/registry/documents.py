"""The JSON of the schema registry, in requests and answers, with Confluent's names."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.record_format.schema_records import Reference, Schema, SubjectVersion
from tierlog.record_format.schema_state import INT_MAX, REFERENCES_MAX

_RENAMED: Final = {"schema_type": "schemaType"}
From = Annotated[int, Meta(ge=0, le=INT_MAX)]
AtMost = Annotated[int, Meta(ge=-1, le=INT_MAX)]
References = Annotated[list[Reference], Meta(max_length=REFERENCES_MAX)]


class GivenSchema(
    msgspec.Struct, forbid_unknown_fields=True, rename={**_RENAMED, "rule_set": "ruleSet"}
):
    """`schemaType`: AVRO if there is none. Metadata and rules are not supported."""

    schema: str
    schema_type: str | None = None
    references: References | None = None
    metadata: None = None
    rule_set: None = None


class RegisteredId(msgspec.Struct):
    id: int


class SchemaOfId(msgspec.Struct, omit_defaults=True, rename={**_RENAMED, "max_id": "maxId"}):
    """`schemaType`: left out if it is AVRO. `maxId`: the highest id there is."""

    schema: str
    schema_type: str = "AVRO"
    references: list[Reference] = []
    max_id: int | UnsetType = UNSET


class VersionOfSubject(msgspec.Struct, omit_defaults=True, rename=_RENAMED):
    """`schemaType`: left out if it is AVRO."""

    subject: str
    version: int
    id: int
    schema: str
    schema_type: str = "AVRO"
    references: list[Reference] = []


class PlaceOfSchema(msgspec.Struct):
    subject: str
    version: int


class Compatible(msgspec.Struct, omit_defaults=True):
    """`messages`: why not, with `verbose`."""

    is_compatible: bool
    messages: list[str] = []


class GivenLevel(msgspec.Struct, forbid_unknown_fields=True):
    compatibility: str


class KeptLevel(msgspec.Struct, rename={"compatibility_level": "compatibilityLevel"}):
    compatibility_level: str


class Mode(msgspec.Struct, forbid_unknown_fields=True):
    mode: str


def of_version(one: SubjectVersion) -> VersionOfSubject:
    kind, text, references = one.schema
    return VersionOfSubject(
        one.subject, one.version, one.schema_id, text, kind, references=list(references)
    )


def of_schema(schema: Schema, *, max_id: int | UnsetType) -> SchemaOfId:
    return SchemaOfId(schema.text, schema.kind, list(schema.references), max_id)


# --- query parameters -----------------------------------------------------------------------------


class Registering(msgspec.Struct, forbid_unknown_fields=True):
    normalize: bool = False


class LookingUp(Registering, forbid_unknown_fields=True):
    deleted: bool = False
    format: str = ""


class Testing(Registering, forbid_unknown_fields=True):
    verbose: bool = False


class Deleting(msgspec.Struct, forbid_unknown_fields=True):
    permanent: bool = False


class ReadingVersion(msgspec.Struct, forbid_unknown_fields=True, rename={"find_tags": "findTags"}):
    deleted: bool = False
    format: str = ""
    reference_format: str = ""
    find_tags: bool = False


class ReadingId(
    msgspec.Struct,
    forbid_unknown_fields=True,
    rename={"fetch_max_id": "fetchMaxId", "find_tags": "findTags"},
):
    subject: str = ""
    format: str = ""
    reference_format: str = ""
    fetch_max_id: bool = False
    find_tags: bool = False


class Listing(msgspec.Struct, forbid_unknown_fields=True):
    """`limit`: -1 is none."""

    offset: From = 0
    limit: AtMost = -1


class OfId(Listing, forbid_unknown_fields=True):
    subject: str = ""
    deleted: bool = False


class ListingVersions(
    Listing,
    forbid_unknown_fields=True,
    rename={"deleted_only_too": "deletedOnly", "subject_prefix": "subjectPrefix"},
):
    """Confluent's Python client says `deleted_only`."""

    deleted: bool = False
    deleted_only: bool = False
    deleted_only_too: bool = False

    @property
    def is_of_deleted(self) -> bool:
        return self.deleted_only or self.deleted_only_too


class ListingSubjects(
    ListingVersions, forbid_unknown_fields=True, rename={"subject_prefix": "subjectPrefix"}
):
    subject_prefix: str = ""


class ListingSchemas(Listing, forbid_unknown_fields=True, rename="camel"):
    subject_prefix: str = ""
    deleted: bool = False
    latest_only: bool = False


class Defaulting(
    msgspec.Struct, forbid_unknown_fields=True, rename={"default_to_global": "defaultToGlobal"}
):
    default_to_global: bool = False


class Forcing(msgspec.Struct, forbid_unknown_fields=True):
    force: bool = False
