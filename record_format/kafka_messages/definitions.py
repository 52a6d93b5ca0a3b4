"""Kafka's own message definitions, parsed.

* The files in `message_definitions/` are Kafka's, unchanged: a message is mended by a newer Kafka's
  file, never by hand. Each is read at its first use, none at import.
* A definition is the union of all versions. What one version has is asked of `Field` and `Struct`
  with that version; nothing else decides it.
* Version ranges are half-open inside: "3+" is `range(3, ALL_VERSIONS)`, "none" is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

FOLDER: Final = Path(__file__).parent / "message_definitions"
ALL_VERSIONS: Final = 1 << 15
NO_UUID: Final = bytes(16)

_COMMENT: Final = re.compile(rb"^\s*//.*$", re.MULTILINE)
_WORD_BORDER: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_ZEROS: Final[Mapping[str, Any]] = {
    "bool": False,
    "float64": 0.0,
    "string": "",
    "bytes": b"",
    "records": None,
    "uuid": NO_UUID,
}


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field. `type` is the element's for an array; `struct` is its definition, if it has one.

    `default` is what Kafka leaves out of a tag section and reads where a version lacks the field;
    for a struct it is None. `is_empty_default`: which means one with all defaults. So it does where
    a definition says null and not "null", which Kafka's generator does not take for a default.
    """

    name: str
    type: str
    is_array: bool
    struct: Struct | None
    default: Any
    is_empty_default: bool
    ignorable: bool
    tag: int
    versions: range
    nullable: range
    tagged: range
    flexible: range | None

    def is_flexible(self, version: int, *, struct_is: bool) -> bool:
        return struct_is if self.flexible is None else version in self.flexible


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    fields: tuple[Field, ...]

    def structs(self) -> Iterator[Struct]:
        """Those inside it, innermost first, and itself last."""
        for field in self.fields:
            if field.struct is not None:
                yield from field.struct.structs()
        yield self


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """One message. `api_key` is the type of the record for a coordinator's, None where there is
    none.
    """

    api_key: int | None
    versions: range
    flexible: range
    struct: Struct


@cache
def definition(name: str) -> Definition:
    """The definition of `name`, such as `FetchRequest`. Raises KeyError if there is none."""
    path = FOLDER / f"{name}.json"
    if not name.isidentifier() or not path.is_file():
        raise KeyError(name)
    raw = msgspec.json.decode(_COMMENT.sub(b"", path.read_bytes()))
    shared = {one["name"]: one["fields"] for one in raw.get("commonStructs", ())}
    return Definition(
        api_key=raw.get("apiKey"),
        versions=_versions(raw["validVersions"]),
        flexible=_versions(raw["flexibleVersions"]),
        struct=Struct(name=name, fields=_fields(raw["fields"], shared)),
    )


def names() -> list[str]:
    """All messages that there is a definition of."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def snake_case(name: str) -> str:
    return _WORD_BORDER.sub("_", name).lower()


_Shared = Mapping[str, Sequence[Mapping[str, Any]]]


def _fields(raw: Sequence[Mapping[str, Any]], shared: _Shared) -> tuple[Field, ...]:
    return tuple(_field(one, shared) for one in raw)


def _field(raw: Mapping[str, Any], shared: _Shared) -> Field:
    kind = raw["type"].removeprefix("[]")
    is_array = kind != raw["type"]
    inside = raw.get("fields") or shared.get(kind)
    struct = None if inside is None else Struct(name=kind, fields=_fields(inside, shared))
    flexible = raw.get("flexibleVersions")
    return Field(
        name=snake_case(raw["name"]),
        type=kind,
        is_array=is_array,
        struct=struct,
        default=_default(raw, kind, is_array=is_array, is_struct=struct is not None),
        is_empty_default=struct is not None and not is_array and _is_empty(raw),
        ignorable=raw.get("ignorable", False),
        tag=raw.get("tag", -1),
        versions=_versions(raw.get("versions") or raw["taggedVersions"]),
        nullable=_versions(raw.get("nullableVersions", "none")),
        tagged=_versions(raw.get("taggedVersions", "none")),
        flexible=None if flexible is None else _versions(flexible),
    )


def _is_empty(raw: Mapping[str, Any]) -> bool:
    return "nullableVersions" not in raw or raw.get("default", "") is None


def _default(raw: Mapping[str, Any], kind: str, *, is_array: bool, is_struct: bool) -> Any:
    written = raw.get("default", "")
    if written == "null":
        return None
    if is_array:
        return ()
    if is_struct:
        return None
    if written == "" or kind in ("string", "bytes", "records", "uuid"):
        return written if kind == "string" else _ZEROS.get(kind, 0)
    if kind == "bool":
        return str(written).lower() == "true"
    return float(written) if kind == "float64" else int(str(written), 0)


def _versions(text: str) -> range:
    if text == "none":
        return range(0)
    if text.endswith("+"):
        return range(int(text[:-1]), ALL_VERSIONS)
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
