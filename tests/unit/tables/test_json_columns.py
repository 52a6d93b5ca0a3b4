"""Values of JSON become columns, and what does not fit is known with its reason."""

import json
import random

import pytest

pytest.importorskip("pyiceberg")

import pyarrow as pa
from pyiceberg.schema import Schema

from tierlog.record_format.errors import ColumnsTooLarge, InvalidRequest
from tierlog.tables import json_rows
from tierlog.tables.json_columns import (
    COLUMNS_MAX,
    Fields,
    ListOf,
    Plain,
    arrow_type,
    columns_of,
    fields_of,
    given_columns,
)
from tierlog.tables.json_rows import decode_values

NONE = Fields({})


def decode(values, columns=NONE):
    return decode_values(pa.array(values, pa.binary()), columns)


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ([b'{"a":1,"b":true,"c":"x"}'], "a: int64, b: bool, c: string"),
        ([b'{"a":1}', b'{"a":1.5}'], "a: double"),
        ([b'{"a":"2026-01-01T00:00:00Z"}'], "a: string"),
        ([b'{"a":null,"b":[],"c":{}}', None], ""),
        ([b'{"a":[]}', b'{"a":[null,1]}'], "a: list<item: int64>"),
        ([b'{"a":{"b":1}}', b'{"a":{"c":[{"d":"x"}]}}'],
         "a: struct<b: int64, c: list<item: struct<d: string>>>"),
        ([b'{"a.b":1,"c d":2}'], "a.b: int64, c d: int64"),
    ],
)  # fmt: skip
def test_columns_are_those_that_the_records_have(values, columns):
    decoded = decode(values)
    assert str(arrow_type(decoded.columns)) == f"struct<{columns}>"
    assert decoded.reasons == {}
    assert len(decoded.rows) == len(values)


FITS = b'{"a":1,"b":{"c":"x"},"l":[1]}'
LONG = Plain(pa.int64())
STORED = Fields({"a": LONG, "b": Fields({"c": Plain(pa.string())}), "l": ListOf(LONG)})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "not JSON: Expecting value"),
        (b"x", "not JSON: Expecting value"),
        (b'{"a":1', "not JSON: Expecting"),
        (b'{}}\n{"v":{}', "not JSON: Extra data"),
        (b'{"a":1},"v":{"a":2}', "not JSON: Extra data"),
        (b'{"a":1}{"a":2}', "not JSON: Extra data"),
        (b'{"b":{"c":"\xff"}}', "not UTF-8"),
        (b'{"b":{"c":"\\ud800"}}', "surrogate pair in string is invalid"),
        (b"[1]", "a list, not an object"),
        (b'"null"', "a string, not an object"),
        (b'{"a":1.0}', "a: a fraction, where the column is long"),
        (b'{"a":"1"}', "a: a string, where the column is long"),
        (b'{"a":true}', "a: a boolean, where the column is long"),
        (b'{"a":1e999}', "a: a fraction, where the column is long"),
        (b'{"a":9223372036854775808}', "a: 9223372036854775808 is too large for a long"),
        (b'{"b":1}', "b: a whole number, where the column is a struct"),
        (b'{"b":{"c":2}}', "b.c: a whole number, where the column is string"),
        (b'{"l":["x"]}', "l.element: a string, where the column is long"),
        (b'{"a":1,"a":2}', "was specified twice"),
        (b'{"A":1}', "A: the name of another column, a, but for case or dots"),
        (b'{"b.c":1}', "b.c: the name of another column, b.c, but for case or dots"),
        (b'{"_Offset":1}', "_Offset: the table has a column of that name"),
        (b'{"":1}', "not the name of a column"),
        (b'{"\\u0000":1}', "not the name of a column"),
        (b'{"\\ud800":1}', "not the name of a column"),
        (b'{"x":' + b"[" * 40 + b"1" + b"]" * 40 + b"}", "nested more than 32 deep"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"x":' + b"[" * 600 + b"1" + b"]" * 600 + b"}", "nested more than 32 deep"),
        (json.dumps({f"x{n}": 1 for n in range(COLUMNS_MAX)}).encode(), "at most 2000 columns"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_left_out_with_its_reason_and_adds_no_column(value, reason):
    decoded = decode([FITS, value, b"null", None, FITS], STORED)
    assert decoded.columns is STORED
    (found,) = decoded.reasons.items()
    assert found[0] == 1
    assert reason in found[1], found[1]
    rows = decoded.rows.to_pylist()
    assert rows == [json.loads(FITS), None, None, json.loads(FITS)]


def test_names_that_no_two_objects_share_take_no_column_of_each():
    """Arrow would make a column of as many rows as there are objects, of each name."""
    value = json.dumps({"d": [{f"x{n}": 1} for n in range(4000)]}).encode()
    before = pa.default_memory_pool().max_memory()
    decoded = decode([FITS, value, FITS], STORED)
    assert pa.default_memory_pool().max_memory() - before < 20 << 20
    assert "at most 2000 columns" in decoded.reasons[1]
    assert len(decoded.rows) == 2


def test_fields_of_nulls_alone_are_not_looked_at_record_by_record(monkeypatch):
    monkeypatch.setattr(json_rows, "load_json", lambda _: 1 / 0)
    monkeypatch.setattr(json_rows, "_CELLS_MAX", 1000)  # so that there are parts
    values = [b'{"a":%d,"none":null,"of":[{},{"x":[]}]}' % n for n in range(100)]
    decoded = decode(values, STORED)
    assert (decoded.columns, decoded.reasons) == (STORED, {})
    assert [row["a"] for row in decoded.rows.to_pylist()] == list(range(100))
    for new in (b'{"of":[{"x":[1]}]}', b'{"a":1},"w":null', b"x"):
        with pytest.raises(ZeroDivisionError):
            decode([*values, new], STORED)


def test_brackets_are_as_many_as_they_are(monkeypatch):
    """Only those that are in each other are counted."""
    value = json.dumps({"l": [1], "b": {"c": "x"}, "d": [{"e": n} for n in range(2000)]}).encode()
    decoded = decode([value] * 3, STORED)
    assert (decoded.reasons, len(decoded.rows)) == ({}, 3)
    monkeypatch.setattr(json_rows, "load_json", lambda _: 1 / 0)
    again = decode([value] * 3, decoded.columns)
    assert again.rows == decoded.rows


def test_a_record_that_does_not_fit_changes_nothing_for_those_beside_it():
    decoded = decode([b'{"a":1,"b":"x"}', b'{"a":"x","new":1}', b'{"a":2.5,"b":"y"}'])
    assert str(arrow_type(decoded.columns)) == "struct<a: double, b: string>"
    assert list(decoded.reasons) == [1]
    assert decoded.rows.to_pylist() == [{"a": 1.0, "b": "x"}, {"a": 2.5, "b": "y"}]


def test_random_records_are_rows_or_have_a_reason_whatever_is_beside_them():
    dice, columns, whole = random.Random(11), NONE, 0
    for _ in range(60):
        records = [random_record(dice) for _ in range(dice.randrange(30))]
        decoded = decode([json.dumps(one).encode() for one in records], columns)
        fits = [one for place, one in enumerate(records) if place not in decoded.reasons]
        names = list(decoded.columns.by_name)
        assert decoded.rows.to_pylist() == [
            {name: filled(decoded.columns.by_name[name], one.get(name)) for name in names}
            for one in fits
        ]
        whole += len(fits)
        columns = decoded.columns
    assert whole > 100


def random_record(dice):
    return {name: random_value(dice, 3) for name in dice.sample("abcdefgh", dice.randrange(4))}


def random_value(dice, depth):
    kind = dice.randrange(6 if depth else 4)
    if kind == 4:
        return [random_value(dice, 0) for _ in range(dice.randrange(3))]
    if kind == 5:
        return {name: random_value(dice, depth - 1) for name in dice.sample("xyz", 2)}
    return [None, dice.randrange(9), f"s{dice.random()}", dice.random() < 0.5][kind]


def filled(kind, value):
    """With nulls for the fields that it does not have."""
    if isinstance(kind, Fields) and value is not None:
        return {name: filled(one, value.get(name)) for name, one in kind.by_name.items()}
    return value


def test_items_that_may_take_much_memory_are_refused_before_arrow_makes_them():
    item = Fields({f"f{n}": LONG for n in range(400)})
    with pytest.raises(ColumnsTooLarge, match="up to 100001 items in lists may take"):
        decode([b'{"l":[' + b"{}," * 100_000 + b"{}]}"], Fields({"l": ListOf(item)}))


def test_columns_that_were_given_take_what_arrow_makes_of_values():
    given = given_columns(["price double", "at timestamptz", "sum decimal(9,2)", "a b int"])
    columns = Fields({one.name: columns_of_one(one) for one in given})
    good = b'{"price":1,"at":"2026-01-02T03:04:05+01:00","sum":1.25,"a b":7}'
    decoded = decode([good, b'{"at":"soon"}', b'{"a b":3000000000}', good], columns)
    assert decoded.columns is columns
    assert sorted(decoded.reasons) == [1, 2]
    assert "couldn't parse:soon" in decoded.reasons[1]
    (row, again) = decoded.rows.to_pylist()
    assert row == again
    assert (row["price"], str(row["sum"]), row["at"].isoformat()) == (
        1.0,
        "1.25",
        "2026-01-02T02:04:05+00:00",
    )


def columns_of_one(field):
    return fields_of(columns_of(Schema(field))).by_name[field.name]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("price", "expected NAME TYPE, with a type of boolean, int, long"),
        ("at date", "expected NAME TYPE"),
        ("_key string", "_key: the table has a column of that name"),
    ],
)
def test_a_given_column_that_cannot_be_is_refused(text, reason):
    with pytest.raises(InvalidRequest, match=reason):
        given_columns([text])
    with pytest.raises(InvalidRequest, match=r"but for case|twice"):
        given_columns(["a int", "A int"])
