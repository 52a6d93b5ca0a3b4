"""What the records of `_schemas` say: subjects and their versions, ids, levels and modes. Pure.

* `apply` is the only thing that changes it: a state is what its records make of it, in their order,
  whoever wrote them. Applying records again changes nothing.
* A version that is deleted softly still has its id, for consumers; it is no longer the newest, and
  what is registered next is not compared with it.
* A record that cannot be read is skipped, and counted in `skipped`: one bad record does not cost
  every producer its schemas. So is what is in a context (`:.name:`), whose ids are its own.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from tierlog.record_format.errors import InvalidSchema, UnknownSchema
from tierlog.record_format.schema_records import (
    MODE,
    SETTINGS,
    Decoded,
    Kind,
    Reference,
    Row,
    Schema,
    Setting,
    SubjectVersion,
    decode_row,
    decode_version,
    deleted_subject_row,
    guid_of,
    highest_id_row,
    schema_row,
    schema_tombstone,
    setting_row,
)

CONTEXT_PREFIX: Final = ":."
LATEST: Final = -1
INT_MAX: Final = 2**31 - 1
REFERENCES_MAX: Final = 1000  # of a schema, with those of what it refers to


class Place(NamedTuple):
    subject: str
    version: int


class Source(NamedTuple):
    """A schema's text, and those of what it refers to: names and texts, each after its own."""

    kind: Kind
    text: str
    dependencies: tuple[tuple[str, str], ...] = ()


class SourceOfId(NamedTuple):
    """`place`: a version that has it."""

    schema_id: int
    source: Source
    place: Place | None = None


class RegistryState:
    def __init__(self) -> None:
        self._subjects: dict[str, dict[int, SubjectVersion]] = {}
        self._by_id: dict[int, dict[Place, SubjectVersion]] = {}
        self._referrers: dict[Place, set[Place]] = {}
        self._settings: dict[Setting, dict[str | None, str]] = {
            one: {} for one in SETTINGS.values()
        }
        self.highest_id = 0  # that was ever given
        self.changes = 0  # of versions
        self.skipped = 0

    # --- records ----------------------------------------------------------------------------------

    def apply(self, key: bytes, value: bytes | None) -> None:
        try:
            row = decode_row(key, value)
            if (row.subject or "").startswith(CONTEXT_PREFIX):
                self.skipped += 1
            else:
                self._apply(row)
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, KeyError):
            self.skipped += 1

    def _apply(self, row: Decoded) -> None:
        match row.keytype:
            case "SCHEMA" if row.value is None:
                self._remove(Place(str(row.subject), int(row.key["version"])))
            case "SCHEMA":
                self.put(decode_version(row.value or {}))
            case "DELETE_SUBJECT" if row.value is not None:
                self._delete(str(row.subject), up_to_version=int(row.value["version"]))
            case "CLEAR_SUBJECT" if row.value is not None:
                for version in self.versions(str(row.subject), deleted=True):
                    if version.is_deleted:
                        self._remove(place_of(version))
            case keytype if keytype in SETTINGS:
                self._set(SETTINGS[keytype], row)
            case "NOOP":
                self.highest_id = max(self.highest_id, int((row.value or {}).get("maxId", 0)))
            case _:
                self.skipped += 1

    def put(self, version: SubjectVersion) -> None:
        place = place_of(version)
        self._remove(place)
        self._subjects.setdefault(version.subject, {})[version.version] = version
        self._by_id.setdefault(version.schema_id, {})[place] = version
        for one in version.schema.references:
            self._referrers.setdefault(Place(one.subject, one.version), set()).add(place)
        self.highest_id = max(self.highest_id, version.schema_id)
        self.changes += 1

    def _remove(self, place: Place) -> None:
        of_subject = self._subjects.get(place.subject, {})
        version = of_subject.pop(place.version, None)
        if version is None:
            return
        self.changes += 1
        if not of_subject:
            del self._subjects[place.subject]
        of_id = self._by_id[version.schema_id]
        del of_id[place]
        if not of_id:
            del self._by_id[version.schema_id]
        for one in version.schema.references:
            self._referrers[Place(one.subject, one.version)].discard(place)

    def _delete(self, subject: str, *, up_to_version: int) -> None:
        for version in self.versions(subject, deleted=True):
            if version.version <= up_to_version:
                self.put(version._replace(is_deleted=True))

    def _set(self, setting: Setting, row: Decoded) -> None:
        value = (row.value or {}).get(setting.member)
        if value is None:
            self._settings[setting].pop(row.subject, None)
        else:
            self._settings[setting][row.subject] = str(value)

    # --- looking ----------------------------------------------------------------------------------

    def subjects(self, *, deleted: bool = False, deleted_only: bool = False) -> list[str]:
        """By name; `deleted`: also those of which all is deleted."""
        live = {name for name in self._subjects if self.versions(name)}
        if deleted_only:
            return sorted(self._subjects.keys() - live)
        return sorted(self._subjects if deleted else live)

    def versions(self, subject: str, *, deleted: bool = False) -> list[SubjectVersion]:
        """In order; none if there is no such subject."""
        found = self._subjects.get(subject, {})
        return [one for _, one in sorted(found.items()) if deleted or not one.is_deleted]

    def known_versions(self, subject: str, *, deleted: bool = False) -> list[SubjectVersion]:
        """As `versions`. Raises UnknownSchema if there are none."""
        found = self.versions(subject, deleted=deleted)
        if not found:
            raise no_subject(subject)
        return found

    def version(self, subject: str, number: int, *, deleted: bool = False) -> SubjectVersion:
        """LATEST is the newest. Raises UnknownSchema."""
        known = self.known_versions(subject, deleted=deleted)
        if number == LATEST:
            return known[-1]
        for one in known:
            if one.version == number:
                return one
        raise UnknownSchema(f"Version {number} not found.", error_code=40402)

    def find_version(self, place: Place) -> SubjectVersion | None:
        """Deleted ones, too."""
        return self._subjects.get(place.subject, {}).get(place.version)

    def latest_with_properties(
        self, subject: str, properties: Mapping[str, str], *, deleted: bool = False
    ) -> SubjectVersion:
        """The newest version whose metadata has them. Raises UnknownSchema."""
        for one in reversed(self.known_versions(subject, deleted=deleted)):
            metadata = one.schema.metadata
            found = (metadata.properties if metadata is not None else None) or {}
            if properties.items() <= found.items():
                return one
        raise UnknownSchema("Schema not found", error_code=40403)

    def next_version(self, subject: str) -> int:
        return max(self._subjects.get(subject, {}), default=0) + 1

    def with_id(self, schema_id: int) -> list[SubjectVersion]:
        """Those that have this id, deleted ones too. Raises UnknownSchema."""
        found = self._by_id.get(schema_id)
        if found is None:
            raise UnknownSchema(f"Schema {schema_id} not found", error_code=40403)
        return [one for _, one in sorted(found.items())]

    def schema(self, schema_id: int) -> Schema | None:
        found = self._by_id.get(schema_id)
        return None if found is None else _first_of(found)

    def with_guid(self, guid: str) -> list[SubjectVersion]:
        """As `with_id`."""
        for schema_id, schema in self.schemas().items():
            if guid_of(schema) == guid:
                return self.with_id(schema_id)
        raise UnknownSchema(f"Schema {guid} not found", error_code=40403)

    def schemas(self) -> dict[int, Schema]:
        """By their ids."""
        return {schema_id: _first_of(found) for schema_id, found in self._by_id.items()}

    def place_with_id(
        self, schema_id: int, subject: str, *, prefix: str | None = None
    ) -> Place | None:
        """The latest version of the subject that has, or had, this id; without one, and with a
        `prefix`, the first version of any subject whose name begins so.
        """
        places = self._by_id.get(schema_id, {})
        own = [one for one in places if one.subject == subject]
        if own or prefix is None:
            return max(own, default=None)
        return min((one for one in places if one.subject.startswith(prefix)), default=None)

    def referrers(self, place: Place, *, deleted: bool = False) -> list[SubjectVersion]:
        """The versions that refer to this one."""
        found = [self._subjects[one.subject][one.version] for one in self._referrers.get(place, ())]
        return sorted(one for one in found if deleted or not one.is_deleted)

    def setting(self, setting: Setting, subject: str | None, *, default: bool = True) -> str | None:
        """The subject's own, or by `default` that of all."""
        values = self._settings[setting]
        found = values.get(subject)
        return values.get(None, setting.default) if found is None and default else found

    def check_writable(self, subject: str | None) -> None:
        """Raises InvalidSchema."""
        mode = self.setting(MODE, subject)
        if mode == "READONLY" or "READONLY_OVERRIDE" in (mode, self.setting(MODE, None)):
            raise not_permitted(f"Subject {subject} is in read-only mode")

    def check_empty(self, subject: str | None) -> None:
        """Raises InvalidSchema if there are schemas of the subject, or any."""
        if self.versions(subject) if subject is not None else self.subjects():
            raise not_permitted("Cannot import since found existing subjects")

    # --- deleting ---------------------------------------------------------------------------------

    def delete_version(
        self, subject: str, number: int, *, permanent: bool
    ) -> tuple[list[Row], int]:
        """The records that do it, and the version's number. Raises UnknownSchema, InvalidSchema."""
        latest_of_live = number == LATEST and self.versions(subject)
        version = self.version(subject, number, deleted=not latest_of_live)
        self.check_writable(subject)
        text = f"Subject '{subject}' Version {version.version} was"
        if permanent and not version.is_deleted:
            text += " not deleted first before being permanently deleted"
            raise UnknownSchema(text, error_code=40407)
        if not permanent and version.is_deleted:
            text += " soft deleted.Set permanent=true to delete permanently"
            raise UnknownSchema(text, error_code=40406)
        self.check_unreferred([version], permanent=permanent)
        if permanent:
            return self._deleting_for_good(subject, [version]), version.version
        return [schema_row(version._replace(is_deleted=True))], version.version

    def delete_subject(self, subject: str, *, permanent: bool) -> tuple[list[Row], list[int]]:
        """As `delete_version`, for all of its versions."""
        live, every = self.versions(subject), self.known_versions(subject, deleted=True)
        self.check_writable(subject)
        text = f"Subject '{subject}' was"
        if permanent and live:
            text += " not deleted first before being permanently deleted"
            raise UnknownSchema(text, error_code=40405)
        if not permanent and not live:
            text += " soft deleted.Set permanent=true to delete permanently"
            raise UnknownSchema(text, error_code=40404)
        versions = every if permanent else live
        self.check_unreferred(versions, permanent=permanent)
        rows = (
            self._deleting_for_good(subject, versions)
            if permanent
            else [deleted_subject_row(subject, up_to_version=live[-1].version)]
        )
        return rows, [one.version for one in versions]

    def check_unreferred(self, versions: Sequence[SubjectVersion], *, permanent: bool) -> None:
        """Raises InvalidSchema."""
        going = {place_of(version) for version in versions}
        for version in versions:
            found = self.referrers(place_of(version), deleted=permanent)
            others = [one for one in found if place_of(one) not in going]
            if others:
                raise InvalidSchema(
                    f"One or more references exist to the schema {{subject={version.subject},"
                    f"version={version.version}}}: {others[0].subject} version {others[0].version}",
                    error_code=42206,
                )

    def _deleting_for_good(self, subject: str, versions: Sequence[SubjectVersion]) -> list[Row]:
        """With the last version, what is set of the subject goes, too."""
        rows = [highest_id_row(self.highest_id), *map(schema_tombstone, versions)]
        if len(versions) < len(self._subjects[subject]):
            return rows
        are_set = [one for one, values in self._settings.items() if subject in values]
        return [*rows, *(setting_row(one, subject, None) for one in are_set)]


def not_permitted(text: str) -> InvalidSchema:
    return InvalidSchema(text, error_code=42205)


def no_subject(subject: str) -> UnknownSchema:
    return UnknownSchema(f"Subject '{subject}' not found.", error_code=40401)


def _first_of(places: Mapping[Place, SubjectVersion]) -> Schema:
    return next(iter(places.values())).schema


def place_of(version: SubjectVersion) -> Place:
    return Place(version.subject, version.version)


def parse_version(text: str) -> int:
    """A version's number, or LATEST. Raises InvalidSchema."""
    if text in ("latest", "-1"):
        return LATEST
    if text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= INT_MAX:
        return int(text)
    raise InvalidSchema(
        f"The specified version '{text[:64]}' is not a valid version id. Allowed values are "
        'between [1, 2^31-1] and the string "latest"',
        error_code=42202,
    )


def source_of(state: RegistryState, schema: Schema) -> Source:
    """With what it refers to, each after what that refers to itself. Raises InvalidSchema."""
    seen = set[Reference]()

    def collect(references: Iterable[Reference]) -> Iterator[tuple[str, str]]:
        for one in references:
            if one in seen:  # what another registry wrote may even go in circles
                continue
            seen.add(one)
            if len(seen) > REFERENCES_MAX:
                raise invalid_schema(schema, f"more than {REFERENCES_MAX} references")
            try:
                referred = state.version(one.subject, one.version, deleted=True).schema
            except UnknownSchema as error:
                raise invalid_schema(schema, str(error)) from error
            yield from collect(referred.references)
            yield one.name, referred.text

    return Source(schema.kind, schema.text, tuple(collect(schema.references)))


def invalid_schema(schema: Schema, problem: str) -> InvalidSchema:
    return InvalidSchema(
        f"Invalid schema of type {schema.kind}, details: {problem[:1000]}", error_code=42201
    )
