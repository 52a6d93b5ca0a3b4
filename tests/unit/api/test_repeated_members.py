"""Repeated members of records, in all kinds of JSON that a client may send."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierlog.api.http.produce.columns import parse_envelopes, parse_json
from tierlog.record_format.errors import InvalidRequest

MANY = 1000


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize(
    ("record", "loc"),
    [
        ('{"value":1,"value":2}', "value"),
        ('{"value":1,"value":1}', "value"),
        ('{"value":"a","key":"k","key":"k"}', "key"),
        ('{"value":null,"value":null}', "value"),
        ('{"value":1,"v\\u0061lue":1}', "value"),
        ('{"value":{"a":1},"value":"\\":\\""}', "value"),
        ('{"value_base64":"AA==","value_base64":"AA=="}', "value_base64"),
        ('{"timestamp":1,"timestamp":1}', "timestamp"),
        ('{"timestamp":"2013-01-01T00:00\\u003a00Z","timestamp":1,"partition":0}', "timestamp"),
        ('{"timestamp":1,"timestamp":"2013-01-01T00:00\\u003A00Z"}', "timestamp"),
        ('{"partition":0,"partition":0}', "partition"),
        ('{"headers":[],"headers":[]}', "headers"),
        ('{"headers":{"a":"1","a":"2"}}', "headers.a"),
        ('{"headers":{"\\u003a":"1","\\u003a":"2"}}', "headers.:"),
        ('{"headers":[{"name":"a","value":"b"},{"name":"a","name":"b"}]}', "headers[1].name"),
        ('{"headers":[{"name":"\\u003a","value":"1","value":null}]}', "headers[0].value"),
    ],
)
def test_a_repeated_member_is_refused_by_name(record: str, loc: str, blank: str) -> None:
    record = record.replace('":', f'":{blank}')
    for body in (f'{{"records":[{{"value":1}},{record}]}}', f'{{"records": [{{}}, {record}]}}\n'):
        assert refused(parse_json, body) == f"records[1].{loc}"
    assert refused(parse_envelopes, f'{{"value":1}}\n\n{record}') == f"line 3.{loc}"


def test_repeated_records_members_are_refused() -> None:
    assert refused(parse_json, '{"records":[{"value":1}],"records":[{"value":1}]}') == "records"
    assert refused(parse_json, '{"records":[{"headers":null}],"records":[{}]}') == "records"
    escaped = '{"headers":[{"name":"\\u003a\\u003a\\u003a"}]}'
    assert refused(parse_json, f'{{"records":[{{}}],"records":[{escaped}]}}') == "records"


@pytest.mark.parametrize("name", ["a", ":", "\\u003a", "\\\\u003a", "\\\\\\u003A"])
def test_in_a_very_large_record_only_its_path_is_named(name: str) -> None:
    value, headers = f'"{name}{"x" * (1 << 20)}"', f'[{{"name":"{name}"}}]'
    body = f'{{"records":[{{"value":{value},"headers":{headers}}}]}}'
    parse_json(body.encode(), records_max=MANY)
    assert refused(parse_json, body.replace('{"v', '{"key":1,"key":1,"v')) == "records[0]"


def refused(parse: Any, body: str) -> str:
    with pytest.raises(InvalidRequest) as found:
        parse(body.encode(), records_max=MANY)
    ((loc, msg),) = found.value.problems
    assert "given more than once" in msg
    return loc


# Text that looks like JSON, as it is and escaped.
TEXTS = st.sampled_from(
    ["", ":", '":', '"value":', "\\u003a", "é:\n", "a", '{"value":1,"value":2}']
)
INNER = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
HEADERS = st.lists(
    st.fixed_dictionaries({"name": TEXTS}, optional={"value": TEXTS | st.none()}), max_size=2
) | st.dictionaries(TEXTS, TEXTS | st.none(), max_size=2)
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "key": INNER,
        "value": INNER,
        "headers": HEADERS | st.none(),
        "timestamp": st.integers(0, 10**13) | st.just("2013-01-01T10:00:00Z") | st.none(),
        "partition": st.just(0) | st.none(),
    },
)


@settings(max_examples=150)
@given(st.lists(RECORDS, min_size=1, max_size=3), st.sampled_from([",:", ", : "]), st.data())
def test_exactly_the_lost_members_are_found(
    records: list[dict[str, Any]], blanks: str, data: st.DataObject
) -> None:
    comma, colon = blanks[: len(blanks) // 2], blanks[len(blanks) // 2 :]
    ascii_only = data.draw(st.booleans())

    def written(thing: Any) -> str:
        text = json.dumps(thing, separators=(comma, colon), ensure_ascii=ascii_only)
        return text.replace("é:", "\\u00e9\\u003a") if ascii_only else text

    lines = [written(record) for record in records]
    parse_json(f'{{"records":[{comma.join(lines)}]}}'.encode(), records_max=MANY)
    parse_envelopes("\n".join(lines).encode(), records_max=MANY)
    row = data.draw(st.integers(0, len(records) - 1))
    if not records[row]:
        return
    name = data.draw(st.sampled_from(sorted(records[row])))
    again = data.draw(st.sampled_from(["null", written(records[row][name])]))
    lines[row] = f'{{"{name}":{again},{lines[row][1:]}'
    assert refused(parse_json, f'{{"records":[{",".join(lines)}]}}') == f"records[{row}].{name}"
    assert refused(parse_envelopes, "\n".join(lines)) == f"line {row + 1}.{name}"
