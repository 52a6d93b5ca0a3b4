"""Whether what is valid by one JSON Schema is valid by another, by Confluent's rules. Pure.

* As in Confluent's registry (strict, its default), an object whose additional properties are
  allowed has an open content model: what producers already wrote under a name that is given a
  schema now may be anything. A property can be added without a default to a closed model only, and
  removed from an open one.
* What a schema says is a shape of a few kinds; one that says several things is all of them.
* The differences that make it incompatible are named as Confluent names them, each with its path.
  The others are not collected.
* A pair that is being compared already counts as compatible: a schema may contain itself. Unions of
  unions may take exponentially many steps: more than STEPS_MAX are not made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

import re2

from tierlog.broker.schema_registry.json_text import encode_text
from tierlog.record_format.schema_records import Malformed

STEPS_MAX: Final = 50_000
_REFS_MAX: Final = 100  # that only name another
_COMBINED: Final[Mapping[str, str]] = {"allOf": "all", "anyOf": "any", "oneOf": "one"}
_UNIONS: Final = frozenset(("any", "one"))
# By the type that it is about; whether a higher limit allows more.
_LIMITS: Final[Mapping[str, Mapping[str, bool]]] = {
    "string": {"maxLength": True, "minLength": False},
    "number": {
        "maximum": True,
        "minimum": False,
        "exclusiveMaximum": True,
        "exclusiveMinimum": False,
    },
    "object": {"maxProperties": True, "minProperties": False},
    "array": {"maxItems": True, "minItems": False, "maxContains": True, "minContains": False},
}
_ABOUT: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset((*_LIMITS["string"], "pattern")),
    "number": frozenset((*_LIMITS["number"], "multipleOf")),
    "object": frozenset(
        (
            *_LIMITS["object"],
            "properties",
            "required",
            "patternProperties",
            "additionalProperties",
            "unevaluatedProperties",
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "propertyNames",
        )
    ),
    "array": frozenset(
        (
            *_LIMITS["array"],
            "items",
            "prefixItems",
            "additionalItems",
            "unevaluatedItems",
            "uniqueItems",
            "contains",
        )
    ),
}
_CONDITIONAL: Final = ("if", "then", "else")
_ASSERTING: Final = frozenset(
    {"type", "enum", "const", "not", "$ref", *_COMBINED, *_CONDITIONAL}.union(*_ABOUT.values())
)


class Document:
    """A schema with what it may refer to, by name."""

    def __init__(self, schema: Any, others: Mapping[str, Document]) -> None:
        self.schema, self._others = schema, others
        self.base = str(schema.get("$id", "")) if isinstance(schema, dict) else ""

    def resolve(self, reference: str) -> At:
        """Raises Malformed."""
        name, fragment = urldefrag(reference)
        document = self
        if name and name != self.base:
            absolute = urljoin(self.base, name)
            for known in (name, absolute):
                if known in self._others:
                    document = self._others[known]
                    break
            else:
                if absolute != self.base:
                    return At(_with_id(self.schema, name, reference), self)
        if not fragment:
            return At(document.schema, document)
        if fragment.startswith("/"):
            return At(_at_pointer(document.schema, fragment, reference), document)
        return At(_with_anchor(document.schema, fragment, reference), document)


class At(NamedTuple):
    """A schema within a document."""

    schema: Any
    document: Document


class Shape(NamedTuple):
    """`parts`: of `all`, `any` and `one`, and the schema of `not`."""

    kind: str
    at: At
    parts: tuple[At | Shape, ...] = ()


Node = At | Shape


def json_incompatibilities(original: Document, update: Document) -> list[str]:
    """Why something that is valid by the original may not be by the update; empty if all is.
    Raises Malformed.
    """
    found = _Comparison().compare(
        At(original.schema, original), At(update.schema, update), path="#"
    )
    return list(dict.fromkeys(found))


class _Comparison:
    def __init__(self) -> None:
        self._steps_left = STEPS_MAX
        self._comparing: set[tuple[int, int]] = set()

    def compare(self, old: Node | None, new: Node | None, *, path: str) -> list[str]:
        if new is None:
            return []
        if old is None:
            return [_problem("SCHEMA_ADDED", path)]
        self._steps_left -= 1
        if self._steps_left < 0:
            raise Malformed(f"comparing it takes more than {STEPS_MAX} steps")
        if isinstance(old, Shape) or isinstance(new, Shape):
            return list(self._compare_shapes(_shape(old), _shape(new), path))
        pair = id(old.schema), id(new.schema)
        if pair in self._comparing:
            return []
        self._comparing.add(pair)
        try:
            return list(self._compare_shapes(_shape(old), _shape(new), path))
        finally:
            self._comparing.discard(pair)

    def _takes(self, old: Node, new: Node) -> bool:
        return not self.compare(old, new, path="#")

    def _compare_shapes(self, old: Shape, new: Shape, path: str) -> Iterator[str]:
        was_combined, is_combined = (one.kind in _COMBINED.values() for one in (old, new))
        if was_combined and is_combined:
            yield from self._compare_combined(old, new, path)
            return
        tried: list[tuple[Node, Node]] = []
        if is_combined and (len(new.parts) == 1 or new.kind in _UNIONS):
            tried = [(old, part) for part in new.parts]
        elif was_combined and (len(old.parts) == 1 or old.kind == "all"):
            tried = [(part, new) for part in old.parts]
        if any(self._takes(*pair) for pair in tried):
            return
        if old.kind != new.kind:
            if old.kind != "false" and new.kind != "empty":
                yield _problem("TYPE_CHANGED", path)
            return
        compare = self._by_kind().get(new.kind)
        if compare is not None:
            yield from _limits(new.kind, old.at.schema, new.at.schema, path)
            yield from compare(old, new, path)

    def _by_kind(self) -> Mapping[str, Callable[[Shape, Shape, str], Iterator[str]]]:
        return {
            "string": _compare_strings,
            "number": _compare_numbers,
            "object": self._compare_objects,
            "array": self._compare_arrays,
            "enum": _compare_values,
            "not": self._compare_not,
            "if": _compare_conditions,
        }

    def _compare_not(self, old: Shape, new: Shape, path: str) -> Iterator[str]:
        if not self._takes(new.parts[0], old.parts[0]):
            yield _problem("NOT_TYPE_EXTENDED", f"{path}/not")

    def _compare_combined(self, old: Shape, new: Shape, path: str) -> Iterator[str]:
        was_single, is_single = len(old.parts) == 1, len(new.parts) == 1
        extends = (
            new.kind in (old.kind, "any")
            or (was_single and (is_single or new.kind == "one"))
            or (is_single and old.kind == "all")
        )
        if not extends:
            yield _problem("COMBINED_TYPE_CHANGED", path)
            return
        if len(old.parts) < len(new.parts) and new.kind == "all":
            yield _problem("PRODUCT_TYPE_EXTENDED", path)
        if len(old.parts) > len(new.parts) and old.kind in _UNIONS:
            yield _problem("SUM_TYPE_NARROWED", path)
        edges = [
            [number for number, part in enumerate(new.parts) if self._takes(one, part)]
            for one in old.parts
        ]
        if _matched(edges) < min(len(old.parts), len(new.parts)):
            yield _problem("COMBINED_TYPE_SUBSCHEMAS_CHANGED", path)

    # --- objects ----------------------------------------------------------------------------------

    def _compare_objects(self, old: Shape, new: Shape, path: str) -> Iterator[str]:
        was, now = _Properties(old.at), _Properties(new.at)
        for name in sorted(was.named.keys() | now.named.keys()):
            at = f"{path}/properties/{name}"
            if name not in now.named:
                yield from self._removed_property(was.named[name], now, name, at)
            elif name not in was.named:
                yield from self._added_property(was, now, name, at)
            else:
                if name in now.required - was.required and not _has_default(now.named[name]):
                    yield _problem("REQUIRED_ATTRIBUTE_ADDED", f"{path}/required/{name}")
                yield from self.compare(was.named[name], now.named[name], path=at)
        for name in sorted(now.required - was.required - now.named.keys()):
            yield _problem("REQUIRED_ATTRIBUTE_ADDED", f"{path}/required/{name}")
        yield from self._compare_dependencies(old.at, new.at, path)
        for keyword in "additionalProperties", "unevaluatedProperties":
            yield from self._compare_rest(old.at, new.at, keyword, path)
        for pattern, schema in now.patterns.items():
            if pattern in was.patterns:
                at = f"{path}/patternProperties/{pattern}"
                yield from self.compare(was.patterns[pattern], schema, path=at)

    def _removed_property(self, old: At, now: _Properties, name: str, at: str) -> Iterator[str]:
        if now.is_open:
            return
        covering = now.covering(name)
        if covering is not None:
            if found := self.compare(old, covering, path=at):
                yield from found
                yield _problem("PROPERTY_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", at)
        elif old.schema is not False:
            yield _problem("PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL", at)

    def _added_property(
        self, was: _Properties, now: _Properties, name: str, at: str
    ) -> Iterator[str]:
        new = now.named[name]
        needs = name in now.required
        if was.is_open:
            if _shape(new).kind != "empty" or (needs and not _has_default(new)):
                kind = "OPTIONAL_PROPERTY" if not needs else "REQUIRED_PROPERTY"
                kind += "_WITH_DEFAULT" if needs and _has_default(new) else ""
                yield _problem(f"{kind}_ADDED_TO_OPEN_CONTENT_MODEL", at)
            return
        covering = was.covering(name)
        if covering is not None and (found := self.compare(covering, new, path=at)):
            yield from found
            yield _problem("PROPERTY_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", at)
        if needs and not _has_default(new):
            yield _problem("REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL", at)

    def _compare_dependencies(self, old: At, new: At, path: str) -> Iterator[str]:
        was, now = _dependencies(old.schema), _dependencies(new.schema)
        for name, needed in now.items():
            at, before = f"{path}/dependencies/{name}", was.get(name)
            if isinstance(needed, list):
                if not isinstance(before, list):
                    yield _problem("DEPENDENCY_ARRAY_ADDED", at)
                elif not set(needed) <= set(before):
                    kind = "EXTENDED" if set(before) < set(needed) else "CHANGED"
                    yield _problem(f"DEPENDENCY_ARRAY_{kind}", at)
            elif before is None or isinstance(before, list):
                yield _problem("DEPENDENCY_SCHEMA_ADDED", at)
            else:
                yield from self.compare(At(before, old.document), At(needed, new.document), path=at)

    def _compare_rest(self, old: At, new: At, keyword: str, path: str) -> Iterator[str]:
        """What is allowed of what has no name, or no place."""
        was, now = (one.schema.get(keyword, True) for one in (old, new))
        at = f"{path}/{keyword}"
        name = _upper(keyword)
        if now is False and was is not False:
            yield _problem(f"{name}_REMOVED", at)
        elif was in (True, {}) and now not in (True, {}, False):
            yield _problem(f"{name}_NARROWED", at)
        elif was is not False and was not in (True, {}) and now not in (True, {}):
            yield from self.compare(At(was, old.document), At(now, new.document), path=at)

    # --- arrays -----------------------------------------------------------------------------------

    def _compare_arrays(self, old: Shape, new: Shape, path: str) -> Iterator[str]:
        was, now = _Items(old.at), _Items(new.at)
        yield from self.compare(was.all, now.all, path=f"{path}/items")
        for number in range(max(len(was.places), len(now.places))):
            at = f"{path}/items/{number}"
            if number >= len(now.places):
                yield from self._removed_item(was.places[number], now, at)
            elif number >= len(was.places):
                yield from self._added_item(was, now.places[number], at)
            else:
                yield from self.compare(was.places[number], now.places[number], path=at)
        yield from self._compare_rest(was.rest, now.rest, "additionalItems", path)
        yield from self._compare_rest(old.at, new.at, "unevaluatedItems", path)
        if new.at.schema.get("uniqueItems") and not old.at.schema.get("uniqueItems"):
            yield _problem("UNIQUE_ITEMS_ADDED", f"{path}/uniqueItems")
        if "contains" in new.at.schema:
            before = old.at.schema.get("contains")
            earlier = None if before is None else At(before, old.at.document)
            needed = At(new.at.schema["contains"], new.at.document)
            yield from self.compare(earlier, needed, path=f"{path}/contains")

    def _removed_item(self, old: At, now: _Items, at: str) -> Iterator[str]:
        if now.beyond.schema in (True, {}):
            return
        if now.beyond.schema is not False:
            if self.compare(old, now.beyond, path=at):
                yield _problem("ITEM_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", at)
        elif old.schema is not False:
            yield _problem("ITEM_REMOVED_FROM_CLOSED_CONTENT_MODEL", at)

    def _added_item(self, was: _Items, new: At, at: str) -> Iterator[str]:
        if was.beyond.schema in (True, {}):
            if _shape(new).kind != "empty":
                yield _problem("ITEM_ADDED_TO_OPEN_CONTENT_MODEL", at)
        elif was.beyond.schema is not False and self.compare(was.beyond, new, path=at):
            yield _problem("ITEM_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", at)


class _Properties:
    """Of an object: `named` and by `patterns`, and what is allowed beside them."""

    def __init__(self, at: At) -> None:
        schema, document = at
        self.named = {name: At(one, document) for name, one in _members(schema, "properties")}
        self.patterns = {
            name: At(one, document) for name, one in _members(schema, "patternProperties")
        }
        self.required = {one for one in schema.get("required", ()) if isinstance(one, str)}
        rest = schema.get("additionalProperties", True)
        if rest in (True, {}):
            rest = schema.get("unevaluatedProperties", True)
        self.is_open = rest in (True, {}) and not self.patterns
        self._rest = None if rest in (True, {}) or rest is False else At(rest, document)

    def covering(self, name: str) -> At | None:
        """The schema that a property of this name has, although it is not named."""
        for pattern, schema in self.patterns.items():
            if _finds(pattern, name):
                return schema
        return self._rest


class _Items:
    """Of an array: one schema for all, or one for each of the first places and for the rest.
    `beyond`: what is allowed where there is no place.
    """

    def __init__(self, at: At) -> None:
        schema, document = at
        items = schema.get("items")
        places = schema.get("prefixItems", items if isinstance(items, list) else [])
        rest = schema.get("additionalItems", True)
        if "prefixItems" in schema:
            rest = True if items is None else items
        is_all = not places and items is not None and not isinstance(items, list)
        self.all = At(items, document) if is_all else None
        self.places = [At(one, document) for one in places]
        self.rest = At({"additionalItems": rest}, document)
        is_open = rest in (True, {})
        self.beyond = At(schema.get("unevaluatedItems", True) if is_open else rest, document)


def _shape(node: Node) -> Shape:
    """Raises Malformed."""
    if isinstance(node, Shape):
        return node
    at = node
    for _ in range(_REFS_MAX):
        if not isinstance(at.schema, dict):
            return Shape("false" if at.schema is False else "empty", at)
        if "$ref" not in at.schema:
            break
        referred = at.document.resolve(str(at.schema["$ref"]))
        beside = {name: one for name, one in at.schema.items() if name != "$ref"}
        if _ASSERTING & beside.keys():
            return Shape("all", at, (referred, At(beside, at.document)))
        at = referred
    else:
        raise Malformed(f"more than {_REFS_MAX} references in a row")
    pieces = list(_pieces(at))
    if len(pieces) > 1:
        return Shape("all", at, tuple(pieces))
    return pieces[0] if pieces else Shape("empty", at)


def _pieces(at: At) -> Iterator[Shape]:
    """What a schema says, thing by thing."""
    schema, document = at
    types = schema.get("type")
    if types is not None:
        several = types if isinstance(types, list) else [types]
        shapes = [Shape("number" if one == "integer" else one, _typed(at, one)) for one in several]
        yield shapes[0] if len(shapes) == 1 else Shape("any", at, tuple(shapes))
    else:
        yield from (Shape(kind, at) for kind, about in _ABOUT.items() if about & schema.keys())
    if "enum" in schema or "const" in schema:
        yield Shape("enum", at)
    for keyword, kind in _COMBINED.items():
        if keyword in schema:
            yield Shape(kind, at, tuple(At(one, document) for one in _distinct(schema[keyword])))
    if "not" in schema:
        yield Shape("not", at, (At(schema["not"], document),))
    if "if" in schema:
        yield Shape("if", at)


def _distinct(schemas: Sequence[Any]) -> Iterable[Any]:
    return {encode_text(one, sort=True): one for one in schemas}.values()


def _typed(at: At, kind: str) -> At:
    return At({**at.schema, "type": kind}, at.document)


def _limits(kind: str, old: Any, new: Any, path: str) -> Iterator[str]:
    for name, higher_allows_more in _LIMITS.get(kind, {}).items():
        was, now = old.get(name), new.get(name)
        if now is None or now is False or was == now:
            continue
        if was is None or was is False:
            yield _problem(f"{_upper(name)}_ADDED", f"{path}/{name}")
        elif (now < was) is higher_allows_more:
            word = "DECREASED" if now < was else "INCREASED"
            yield _problem(f"{_upper(name)}_{word}", f"{path}/{name}")


def _compare_strings(old: Shape, new: Shape, path: str) -> Iterator[str]:
    was, now = (one.at.schema.get("pattern") for one in (old, new))
    if now is not None and was != now:
        word = "ADDED" if was is None else "CHANGED"
        yield _problem(f"PATTERN_{word}", f"{path}/pattern")


def _compare_numbers(old: Shape, new: Shape, path: str) -> Iterator[str]:
    if new.at.schema.get("type") == "integer" != old.at.schema.get("type"):
        yield _problem("TYPE_NARROWED", path)
    was, now = (one.at.schema.get("multipleOf") for one in (old, new))
    if now is None or was == now:
        return
    at = f"{path}/multipleOf"
    if was is None:
        yield _problem("MULTIPLE_OF_ADDED", at)
    elif Decimal(str(was)) % Decimal(str(now)):
        is_multiple = not Decimal(str(now)) % Decimal(str(was))
        yield _problem(f"MULTIPLE_OF_{'EXPANDED' if is_multiple else 'CHANGED'}", at)


def _compare_values(old: Shape, new: Shape, path: str) -> Iterator[str]:
    was, now = (_values(one.at.schema) for one in (old, new))
    if not all(one in now for one in was):
        word = "NARROWED" if all(one in was for one in now) else "CHANGED"
        yield _problem(f"ENUM_ARRAY_{word}", f"{path}/enum")


def _values(schema: Any) -> Sequence[Any]:
    """Each with its type: in JSON, unlike in Python, true is not 1."""
    found = schema["enum"] if "enum" in schema else [schema["const"]]
    return [(isinstance(one, bool), one) for one in found]


def _compare_conditions(old: Shape, new: Shape, path: str) -> Iterator[str]:
    for name in _CONDITIONAL:
        if old.at.schema.get(name) != new.at.schema.get(name):
            yield _problem("TYPE_CHANGED", f"{path}/{name}")


def _members(schema: Any, keyword: str) -> Iterator[tuple[str, Any]]:
    found = schema.get(keyword)
    if isinstance(found, dict):  # by a draft that does not have the keyword it may be anything
        yield from found.items()


def _dependencies(schema: Any) -> dict[str, Any]:
    names = ("dependencies", "dependentRequired", "dependentSchemas")
    return {name: one for keyword in names for name, one in _members(schema, keyword)}


def _has_default(at: At) -> bool:
    return isinstance(at.schema, dict) and "default" in at.schema


def _finds(pattern: str, name: str) -> bool:
    try:
        return re2.search(pattern, name) is not None
    except re2.error:  # it may look ahead or back, in exponential time: as if not for this name
        return False


def _matched(edges: Sequence[Sequence[int]]) -> int:
    """The most pairs of a left one with a right one of its own."""
    left_of: dict[int, int] = {}

    def find(left: int, seen: set[int]) -> bool:
        for right in edges[left]:
            if right not in seen:
                seen.add(right)
                if right not in left_of or find(left_of[right], seen):
                    left_of[right] = left
                    return True
        return False

    return sum(find(left, set()) for left in range(len(edges)))


def _at_pointer(schema: Any, fragment: str, reference: str) -> Any:
    found = schema
    for part in unquote(fragment).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (LookupError, ValueError, TypeError) as error:
            raise _unresolved(reference) from error
    return found


def _with_id(schema: Any, name: str, reference: str) -> Any:
    return _find(schema, "$id", name, reference)


def _with_anchor(schema: Any, name: str, reference: str) -> Any:
    for keyword, wanted in (("$anchor", name), ("$id", f"#{name}")):
        try:
            return _find(schema, keyword, wanted, reference)
        except Malformed:
            continue
    raise _unresolved(reference)


def _find(schema: Any, keyword: str, wanted: str, reference: str) -> Any:
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if one.get(keyword) == wanted:
                return one
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    raise _unresolved(reference)


def _unresolved(reference: str) -> Malformed:
    return Malformed(f"$ref {reference!r} cannot be resolved")


def _upper(name: str) -> str:
    return re.sub("(?=[A-Z])", "_", name).upper()


def _problem(kind: str, path: str) -> str:
    return f"{{errorType:'{kind}', path:'{path}'}}"
