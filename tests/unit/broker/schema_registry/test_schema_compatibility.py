"""What may follow what: rows of the rules of Avro and of Confluent's registry."""

import json
from typing import Any

import pytest

from tierlog.broker.schema_registry.formats import (
    LEVELS,
    Earlier,
    Source,
    parse_schema,
    problems_with_earlier,
)
from tierlog.record_format.schema_records import Malformed, Schema, SubjectVersion


def parsed(kind: Any, document: Any, **named: Any) -> Any:
    texts = tuple((name, json.dumps(one)) for name, one in named.items())
    return parse_schema(Source(kind, json.dumps(document), texts))


def kinds(problems: list[str]) -> list[str]:
    return [one.split("'")[1] for one in problems]


def record(*fields: Any, name: str = "R", **more: Any) -> Any:
    shown = [one if isinstance(one, dict) else {"name": one, "type": "int"} for one in fields]
    return {"type": "record", "name": name, "fields": shown, **more}


def field(name: str, kind: Any, **more: Any) -> Any:
    return {"name": name, "type": kind, **more}


def enum(*symbols: str, **more: Any) -> Any:
    return {"type": "enum", "name": "E", "symbols": symbols, **more}


def fixed(size: int, name: str = "F") -> Any:
    return {"type": "fixed", "name": name, "size": size}


def array(items: Any) -> Any:
    return {"type": "array", "items": items}


LIST = record("a", field("next", ["null", "R"]))
LONG_LIST = record("a", field("b", "long"), field("next", ["null", "R"]))

AVRO = [  # reader, writer, why the reader cannot read it
    ("int", "int", []),
    ("long", "int", []),
    ("float", "long", []),
    ("double", "float", []),
    ("string", "bytes", []),
    ("bytes", "string", []),
    ("int", "long", ["TYPE_MISMATCH"]),
    ("string", "int", ["TYPE_MISMATCH"]),
    ({"type": "int", "logicalType": "date"}, "int", []),
    (array("long"), array("int"), []),
    (array("int"), array("long"), ["TYPE_MISMATCH"]),
    ({"type": "map", "values": "long"}, {"type": "map", "values": "int"}, []),
    ({"type": "map", "values": "int"}, array("int"), ["TYPE_MISMATCH"]),
    (record("a"), record("a", "b"), []),
    (record("a", "b"), record("a"), ["READER_FIELD_MISSING_DEFAULT_VALUE"]),
    (record("a", field("b", "int", default=0)), record("a"), []),
    (record(field("b", "int", aliases=["a"])), record("a"), []),
    (record(field("a", "string")), record("a"), ["TYPE_MISMATCH"]),
    (record("a", name="S"), record("a"), ["NAME_MISMATCH"]),
    (record("a", name="x.R"), record("a", name="y.R"), []),
    (record("a", name="S", aliases=["R"]), record("a"), []),
    (record("a", name="x.S", aliases=["R"]), record("a", name="x.R"), []),
    (enum("A", "B"), enum("A"), []),
    (enum("A"), enum("A", "B"), ["MISSING_ENUM_SYMBOLS"]),
    (enum("A", default="A"), enum("A", "B"), []),
    (record(field("e", enum("A", default="A"))), record(), []),
    (fixed(2), fixed(2), []),
    (fixed(2), fixed(3), ["FIXED_SIZE_MISMATCH"]),
    (fixed(2, "G"), fixed(2), ["NAME_MISMATCH"]),
    (["null", "int"], "int", []),
    (["null", "long"], "int", []),
    (["null", "string"], "int", ["MISSING_UNION_BRANCH"]),
    ("int", ["int", "null"], ["TYPE_MISMATCH"]),
    ("long", ["int"], []),
    (["null", "int", "string"], ["int", "null"], []),
    (["null", "int"], ["int", "string"], ["MISSING_UNION_BRANCH"]),
    ([record("a"), record("b", name="S")], record("a", "c"), []),
    (LIST, LIST, []),
    (LIST, LONG_LIST, []),
    (LONG_LIST, LIST, ["READER_FIELD_MISSING_DEFAULT_VALUE"]),
    (["null", LONG_LIST], LIST, ["MISSING_UNION_BRANCH"]),
]


@pytest.mark.parametrize(("reader", "writer", "expected"), AVRO)
def test_an_avro_reader_reads_what_the_specification_resolves(
    reader: Any, writer: Any, expected: list[str]
) -> None:
    found = parsed("AVRO", reader).incompatibilities(parsed("AVRO", writer))
    assert kinds(found) == expected, found


def an_object(*required: str, additional: Any = None, **properties: Any) -> Any:
    shown: Any = {"type": "object", "properties": properties}
    if required:
        shown["required"] = list(required)
    if additional is not None:
        shown["additionalProperties"] = additional
    return shown


def tuple_of(*places: Any, beyond: Any) -> Any:
    draft = "https://json-schema.org/draft/2020-12/schema"
    rest = {"prefixItems": places, "unevaluatedItems": beyond}
    return {"$schema": draft, "type": "array", **rest}


TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}
TREE = {"type": "object", "properties": {"left": {"$ref": "#"}, "name": TEXT}}
NAMED = {"$ref": "#/definitions/n", "definitions": {"n": TEXT}}

JSON = [  # update, original, why not all that was valid is
    (TEXT, TEXT, []),
    ({}, TEXT, []),
    (True, NUMBER, []),
    (TEXT, False, []),
    (TEXT, {}, ["TYPE_CHANGED"]),
    (TEXT, NUMBER, ["TYPE_CHANGED"]),
    (NUMBER, WHOLE, []),
    (WHOLE, NUMBER, ["TYPE_NARROWED"]),
    ({"type": ["string", "null"]}, TEXT, []),
    (TEXT, {"type": ["string", "null"]}, ["TYPE_CHANGED"]),
    ({**TEXT, "title": "t", "description": "d", "default": "x"}, TEXT, []),
    ({**TEXT, "maxLength": 5}, TEXT, ["MAX_LENGTH_ADDED"]),
    ({**TEXT, "maxLength": 5}, {**TEXT, "maxLength": 6}, ["MAX_LENGTH_DECREASED"]),
    ({**TEXT, "maxLength": 7}, {**TEXT, "maxLength": 6}, []),
    ({**TEXT, "minLength": 7}, {**TEXT, "minLength": 6}, ["MIN_LENGTH_INCREASED"]),
    ({**TEXT, "pattern": "a"}, TEXT, ["PATTERN_ADDED"]),
    ({**TEXT, "pattern": "a"}, {**TEXT, "pattern": "b"}, ["PATTERN_CHANGED"]),
    ({**NUMBER, "maximum": 1}, {**NUMBER, "maximum": 2}, ["MAXIMUM_DECREASED"]),
    ({**NUMBER, "exclusiveMinimum": 0}, NUMBER, ["EXCLUSIVE_MINIMUM_ADDED"]),
    ({**NUMBER, "multipleOf": 2}, {**NUMBER, "multipleOf": 4}, []),
    ({**NUMBER, "multipleOf": 4}, {**NUMBER, "multipleOf": 2}, ["MULTIPLE_OF_EXPANDED"]),
    ({**NUMBER, "multipleOf": 3}, {**NUMBER, "multipleOf": 2}, ["MULTIPLE_OF_CHANGED"]),
    ({**NUMBER, "multipleOf": 0.1}, {**NUMBER, "multipleOf": 0.3}, []),
    ({"enum": [1, 2]}, {"enum": [1]}, []),
    ({"enum": [1]}, {"enum": [1, 2]}, ["ENUM_ARRAY_NARROWED"]),
    ({"enum": [1, 3]}, {"enum": [1, 2]}, ["ENUM_ARRAY_CHANGED"]),
    ({"enum": [1]}, {"enum": [True]}, ["ENUM_ARRAY_CHANGED"]),
    ({"const": 1}, {"const": 2}, ["ENUM_ARRAY_CHANGED"]),
    ({**TEXT, "enum": ["a", "b"]}, {**TEXT, "enum": ["a"]}, []),
    ({**TEXT, "enum": ["a"]}, TEXT, ["TYPE_CHANGED"]),
    (TEXT, {**TEXT, "enum": ["a"]}, []),
    (an_object(a=TEXT), an_object(a=TEXT), []),
    (an_object(a=TEXT), an_object(), ["OPTIONAL_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL"]),
    (an_object(a={}), an_object(), []),
    (an_object("a", a=TEXT), an_object(), ["REQUIRED_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL"]),
    (an_object(), an_object(a=TEXT), []),
    (an_object(a=TEXT, additional=False), an_object(additional=False), []),
    (
        an_object("a", a=TEXT, additional=False),
        an_object(additional=False),
        ["REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL"],
    ),
    (
        an_object("a", a={**TEXT, "default": ""}, additional=False),
        an_object(additional=False),
        [],
    ),
    (
        an_object(additional=False),
        an_object(a=TEXT, additional=False),
        ["PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL"],
    ),
    (an_object(additional=False), an_object(a=False, additional=False), []),
    (an_object(additional=TEXT), an_object(a=TEXT, additional=TEXT), []),
    (
        an_object(additional=TEXT),
        an_object(a=NUMBER, additional=TEXT),
        ["TYPE_CHANGED", "PROPERTY_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"],
    ),
    (an_object(a=TEXT, additional=TEXT), an_object(additional=TEXT), []),
    (an_object(additional=False), an_object(), ["ADDITIONAL_PROPERTIES_REMOVED"]),
    (an_object(additional=TEXT), an_object(), ["ADDITIONAL_PROPERTIES_NARROWED"]),
    (an_object(), an_object(additional=False), []),
    (an_object("a", a=TEXT), an_object(a=TEXT), ["REQUIRED_ATTRIBUTE_ADDED"]),
    (an_object("a", a={**TEXT, "default": ""}), an_object(a={**TEXT, "default": ""}), []),
    (an_object(a=TEXT), an_object("a", a=TEXT), []),
    ({**an_object(), "maxProperties": 2}, an_object(), ["MAX_PROPERTIES_ADDED"]),
    (
        {**an_object(), "dependencies": {"a": ["b"]}},
        an_object(),
        ["DEPENDENCY_ARRAY_ADDED"],
    ),
    (
        {**an_object(), "dependencies": {"a": ["b", "c"]}},
        {**an_object(), "dependencies": {"a": ["b"]}},
        ["DEPENDENCY_ARRAY_EXTENDED"],
    ),
    ({"type": "array", "items": NUMBER}, {"type": "array", "items": WHOLE}, []),
    ({"type": "array", "items": TEXT}, {"type": "array"}, ["SCHEMA_ADDED"]),
    ({"type": "array"}, {"type": "array", "items": TEXT}, []),
    ({"type": "array", "uniqueItems": True}, {"type": "array"}, ["UNIQUE_ITEMS_ADDED"]),
    ({"type": "array", "maxItems": 1}, {"type": "array", "maxItems": 2}, ["MAX_ITEMS_DECREASED"]),
    (
        {"type": "array", "items": [TEXT, TEXT]},
        {"type": "array", "items": [TEXT]},
        ["ITEM_ADDED_TO_OPEN_CONTENT_MODEL"],
    ),
    (
        {"type": "array", "items": [TEXT], "additionalItems": False},
        {"type": "array", "items": [TEXT, TEXT], "additionalItems": False},
        ["ITEM_REMOVED_FROM_CLOSED_CONTENT_MODEL"],
    ),
    (
        {"type": "array", "items": [{}], "additionalItems": False},
        {"type": "array"},
        ["ADDITIONAL_ITEMS_REMOVED"],
    ),
    ({"additionalItems": False}, {"additionalItems": True}, ["ADDITIONAL_ITEMS_REMOVED"]),
    (tuple_of(TEXT, WHOLE, beyond=WHOLE), tuple_of(TEXT, beyond=WHOLE), []),
    (
        tuple_of(TEXT, TEXT, beyond=WHOLE),
        tuple_of(TEXT, beyond=WHOLE),
        ["ITEM_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"],
    ),
    (tuple_of(TEXT, beyond=WHOLE), tuple_of(TEXT, WHOLE, beyond=WHOLE), []),
    (
        tuple_of(TEXT, beyond=WHOLE),
        tuple_of(TEXT, TEXT, beyond=WHOLE),
        ["ITEM_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"],
    ),
    ({"oneOf": [TEXT, NUMBER]}, {"oneOf": [TEXT]}, []),
    ({"allOf": [TEXT, TEXT]}, {"allOf": [TEXT]}, []),
    ({"oneOf": [TEXT, NUMBER]}, {"oneOf": [TEXT, NUMBER, NUMBER]}, []),
    ({"oneOf": [NUMBER, TEXT]}, {"oneOf": [TEXT, NUMBER]}, []),
    ({"oneOf": [TEXT]}, {"oneOf": [TEXT, NUMBER]}, ["SUM_TYPE_NARROWED"]),
    ({"anyOf": [TEXT, NUMBER]}, TEXT, []),
    (TEXT, {"allOf": [TEXT, {"maxLength": 2}]}, []),
    (
        {"allOf": [TEXT, {"maxLength": 2}]},
        {"allOf": [TEXT]},
        ["PRODUCT_TYPE_EXTENDED"],
    ),
    ({"allOf": [TEXT, NUMBER]}, {"oneOf": [TEXT, NUMBER]}, ["COMBINED_TYPE_CHANGED"]),
    (
        {"oneOf": [TEXT, {"type": "null"}]},
        {"oneOf": [TEXT, NUMBER]},
        ["COMBINED_TYPE_SUBSCHEMAS_CHANGED"],
    ),
    ({"not": {**TEXT, "maxLength": 1}}, {"not": {**TEXT, "maxLength": 2}}, []),
    ({"not": {**TEXT, "maxLength": 2}}, {"not": {**TEXT, "maxLength": 1}}, ["NOT_TYPE_EXTENDED"]),
    (NAMED, TEXT, []),
    ({**NAMED, "definitions": {"n": NUMBER}}, NAMED, ["TYPE_CHANGED"]),
    (TREE, TREE, []),
    ({**TREE, "properties": {**TREE["properties"], "name": NUMBER}}, TREE, ["TYPE_CHANGED"] * 2),
]


@pytest.mark.parametrize(("update", "original", "expected"), JSON)
def test_a_json_schema_takes_what_confluents_rules_say(
    update: Any, original: Any, expected: list[str]
) -> None:
    found = parsed("JSON", update).incompatibilities(parsed("JSON", original))
    assert kinds(found) == expected, found


def test_what_another_schema_is_referred_to_for_counts() -> None:
    referring = {"type": "object", "properties": {"a": {"$ref": "other.json#/definitions/x"}}}
    texts = parsed("JSON", referring, **{"other.json": {"definitions": {"x": TEXT}}})
    numbers = parsed("JSON", referring, **{"other.json": {"definitions": {"x": NUMBER}}})
    assert kinds(numbers.incompatibilities(texts)) == ["TYPE_CHANGED"]
    assert not texts.incompatibilities(texts)


def test_a_comparison_that_would_take_for_ever_is_refused() -> None:
    def nested(depth: int, inner: Any) -> Any:
        if not depth:
            return inner
        both = an_object(a=nested(depth - 1, inner))
        return {"anyOf": [both, {**both, "title": "2"}, {**both, "title": "3"}]}

    with pytest.raises(Malformed, match="more than 50000 steps"):
        parsed("JSON", nested(9, TEXT)).incompatibilities(parsed("JSON", nested(9, NUMBER)))


A, AB, B = record("a"), record("a", "b"), record("b")
# By level: whether A, B, AB may follow B and then A; the new one reads a subset, or the old one.
FOLLOWS = {
    "NONE": (True, True, True),
    "BACKWARD": (True, False, False),
    "BACKWARD_TRANSITIVE": (False, False, False),
    "FORWARD": (True, False, True),
    "FORWARD_TRANSITIVE": (False, False, True),
    "FULL": (True, False, False),
    "FULL_TRANSITIVE": (False, False, False),
}


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_says_which_way_and_how_far_back(level: str) -> None:
    earlier = [
        Earlier(SubjectVersion("s", number, number, Schema("AVRO", "")), parsed("AVRO", one))
        for number, one in enumerate((B, A), 1)
    ]
    found = [
        not problems_with_earlier(parsed("AVRO", one), "AVRO", earlier, level) for one in (A, B, AB)
    ]
    assert tuple(found) == FOLLOWS[level]


TEXT_FIELD = field("a", "string")
ONE = record(TEXT_FIELD)
TWO = record(TEXT_FIELD, field("b", "string", default="x"))
NO_DEFAULT = record(TEXT_FIELD, field("b", "string"))
THREE = record(*TWO["fields"], field("c", "string", default="y"))
HISTORIES = [  # as Confluent's own tests have them: earlier ones, the oldest first, and the new one
    ("BACKWARD", [ONE], TWO, True),
    ("BACKWARD", [ONE], NO_DEFAULT, False),
    ("BACKWARD", [ONE, TWO], NO_DEFAULT, True),
    ("BACKWARD_TRANSITIVE", [ONE, TWO], THREE, True),
    ("BACKWARD_TRANSITIVE", [ONE, TWO], NO_DEFAULT, False),
    ("FORWARD", [ONE], NO_DEFAULT, True),
    ("FORWARD", [NO_DEFAULT], TWO, True),
    ("FORWARD", [NO_DEFAULT, TWO], ONE, True),
    ("FORWARD_TRANSITIVE", [THREE, TWO], ONE, True),
    ("FORWARD_TRANSITIVE", [NO_DEFAULT, TWO], ONE, False),
    ("FULL", [ONE, TWO], NO_DEFAULT, True),
    ("FULL", [NO_DEFAULT, TWO], ONE, True),
    ("FULL_TRANSITIVE", [ONE, TWO], THREE, True),
    ("FULL_TRANSITIVE", [THREE, TWO], ONE, True),
    ("FULL_TRANSITIVE", [ONE, TWO], NO_DEFAULT, False),
    ("FULL_TRANSITIVE", [NO_DEFAULT, TWO], ONE, False),
]


@pytest.mark.parametrize(("level", "history", "new", "expected"), HISTORIES)
def test_a_history_is_judged_as_confluents_registry_judges_it(
    level: str, history: list[Any], new: Any, expected: bool
) -> None:
    earlier = [
        Earlier(SubjectVersion("s", number, number, Schema("AVRO", "")), parsed("AVRO", one))
        for number, one in enumerate(history, 1)
    ]
    found = problems_with_earlier(parsed("AVRO", new), "AVRO", earlier, level)
    assert (not found) is expected, found


def test_schemas_of_two_kinds_do_not_follow_each_other() -> None:
    earlier = [Earlier(SubjectVersion("s", 1, 1, Schema("AVRO", "")), parsed("AVRO", A))]
    found = problems_with_earlier(parsed("JSON", TEXT), "JSON", earlier, "BACKWARD")
    assert "different schema type" in found[0]
    assert not problems_with_earlier(parsed("JSON", TEXT), "JSON", earlier, "NONE")


@pytest.mark.parametrize(
    "document",
    [
        5,
        None,
        {"type": "nope"},
        "nope",
        ["int", "int"],
        ["int", ["string"]],
        {"type": "array"},
        {"type": "record", "name": "R"},
        {"type": "record", "name": "1R", "fields": []},
        {"type": "record", "name": "int", "fields": []},
        record("a", "a"),
        record({"name": "a"}),
        record(field("a", "int", default="x")),
        fixed(-1),
        {"type": "enum", "name": "E", "symbols": "A"},
        {"type": "enum", "name": "E", "symbols": ["A", "A"]},
    ],
)
def test_what_is_no_avro_schema_is_refused(document: Any) -> None:
    with pytest.raises(Malformed):
        parsed("AVRO", document)
