"""The JSON of the schema registry, in requests and answers, with Confluent's names."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.record_format.schema_records import (
    Metadata,
    Reference,
    Schema,
    SubjectVersion,
    guid_of,
)
from tierlog.record_format.schema_state import INT_MAX, REFERENCES_MAX

_RENAMED: Final = {"schema_type": "schemaType"}
From = Annotated[int, Meta(ge=0, le=INT_MAX)]
AtMost = Annotated[int, Meta(ge=-1, le=INT_MAX)]
References = Annotated[list[Reference], Meta(max_length=REFERENCES_MAX)]


class GivenSchema(
    msgspec.Struct, forbid_unknown_fields=True, rename={**_RENAMED, "rule_set": "ruleSet"}
):
    """`schemaType`: AVRO if there is none. `id`, which only a subject in the mode IMPORT is given,
    and `version`: none if they are -1, and a version of 0 is none. `metadata`: by default that of
    the latest version. Rules are not supported.
    """

    schema: str
    schema_type: str | None = None
    references: References | None = None
    id: AtMost | None = None
    version: AtMost | None = None
    metadata: Metadata | None = None
    rule_set: None = None

    @property
    def given_id(self) -> int | None:
        return None if self.id == -1 else self.id

    @property
    def given_version(self) -> int | None:
        return None if self.version in (0, -1) else self.version


class RegisteredId(msgspec.Struct):
    id: int
    version: int
    guid: str


class SchemaOfId(msgspec.Struct, omit_defaults=True, rename={**_RENAMED, "max_id": "maxId"}):
    """`schemaType`: left out if it is AVRO. `maxId`: the highest id there is."""

    schema: str
    schema_type: str = "AVRO"
    references: list[Reference] = []
    metadata: Metadata | None = None
    guid: str = ""
    max_id: int | UnsetType = UNSET


class VersionOfSubject(msgspec.Struct, omit_defaults=True, rename=_RENAMED):
    """`schemaType`: left out if it is AVRO."""

    subject: str
    version: int
    id: int
    schema: str
    schema_type: str = "AVRO"
    references: list[Reference] = []
    metadata: Metadata | None = None
    guid: str = ""
    deleted: bool = False


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
    kind, text, references, metadata = one.schema
    return VersionOfSubject(
        one.subject,
        one.version,
        one.schema_id,
        text,
        kind,
        references=list(references),
        metadata=metadata,
        guid=guid_of(one.schema),
        deleted=one.is_deleted,
    )


def of_schema(schema: Schema, *, max_id: int | UnsetType) -> SchemaOfId:
    kind, text, references, metadata = schema
    return SchemaOfId(text, kind, list(references), metadata, guid_of(schema), max_id)


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


class Reading(
    msgspec.Struct,
    forbid_unknown_fields=True,
    rename={"reference_format_too": "referenceFormat", "find_tags": "findTags"},
):
    """Confluent's Python client says `reference_format`, its others `referenceFormat`."""

    format: str = ""
    reference_format: str = ""
    reference_format_too: str = ""
    find_tags: str = ""


class ReadingVersion(Reading, forbid_unknown_fields=True):
    deleted: bool = False


class ReadingId(Reading, forbid_unknown_fields=True, rename={"fetch_max_id": "fetchMaxId"}):
    subject: str = ""
    fetch_max_id: bool = False


class ReadingGuid(msgspec.Struct, forbid_unknown_fields=True):
    format: str = ""


class LookingForMetadata(msgspec.Struct, forbid_unknown_fields=True):
    """`key` and `value` may be repeated: the first key's value is the first."""

    key: list[str] = []
    value: list[str] = []
    deleted: bool = False
    format: str = ""


class Listing(msgspec.Struct, forbid_unknown_fields=True):
    """`limit`: -1 is none."""

    offset: From = 0
    limit: AtMost = -1


class ListingReferrers(Listing, forbid_unknown_fields=True):
    deleted: bool = False


class ListingContexts(
    Listing, forbid_unknown_fields=True, rename={"context_prefix": "contextPrefix"}
):
    context_prefix: str = ""


class OfId(Listing, forbid_unknown_fields=True):
    subject: str = ""
    deleted: bool = False


class ListingDeleted(
    Listing, forbid_unknown_fields=True, rename={"deleted_only_too": "deletedOnly"}
):
    """Confluent's Python client says `deleted_only`."""

    deleted: bool = False
    deleted_only: bool = False
    deleted_only_too: bool = False

    @property
    def is_of_deleted(self) -> bool:
        return self.deleted_only or self.deleted_only_too


class ListingVersions(
    ListingDeleted,
    forbid_unknown_fields=True,
    rename={"deleted_as_negative": "deletedAsNegative"},
):
    deleted_as_negative: bool = False

    def number_of(self, one: SubjectVersion) -> int:
        return -one.version if one.is_deleted and self.deleted_as_negative else one.version


class ListingSubjects(
    ListingDeleted, forbid_unknown_fields=True, rename={"subject_prefix": "subjectPrefix"}
):
    subject_prefix: str = ""

    @property
    def prefix(self) -> str:
        return _of_default_context(self.subject_prefix)


class ListingSchemas(Listing, forbid_unknown_fields=True, rename="camel"):
    subject_prefix: str = ""
    deleted: bool = False
    latest_only: bool = False

    @property
    def prefix(self) -> str:
        return _of_default_context(self.subject_prefix)


def _of_default_context(prefix: str) -> str:
    """Without what says that it is of any context, or of the default one."""
    return prefix.removeprefix(":*:").removeprefix(":.:")


class Defaulting(
    msgspec.Struct, forbid_unknown_fields=True, rename={"default_to_global": "defaultToGlobal"}
):
    default_to_global: bool = False


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters."""


class Forcing(msgspec.Struct, forbid_unknown_fields=True):
    force: bool = False
