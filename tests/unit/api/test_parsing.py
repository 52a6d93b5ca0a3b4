import gzip
import itertools
import json
from typing import Any

import pytest
import zstandard

from tierlog.api.http import bodies, header_values
from tierlog.api.http.header_values import ByteRange, none_match, select_range
from tierlog.api.http.problems import NotAcceptable, RangeNotSatisfiable, UnsupportedMediaType
from tierlog.api.http.produce.columns import (
    RecordColumns,
    parse_envelopes,
    parse_json,
    parse_values,
)
from tierlog.api.http.produce.handlers import split_by_partition
from tierlog.api.http.strict_json import parse_time
from tierlog.record_format.errors import InvalidRequest, RequestTooLarge, TooManyRecords
from tierlog.record_format.topic_rules import partition_for_key


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("1767225600000", 1_767_225_600_000),
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01t01:00:00.0019+01:00", 1),
        ("1970-01-01T00:00:00.5-00:30", 1_800_500),
        ("1970-01-01 01:00:00 01:00", 0),
        ("2024-02-29T23:59:59.999Z", 1_709_251_199_999),
        ("1990-12-31T23:59:60Z", 662_688_000_000),
        ("1990-12-31T15:59:60.5-08:00", 662_688_000_500),
    ],
)
def test_times_are_milliseconds_or_rfc_3339(text: str, ms: int) -> None:
    assert parse_time(text) == ms


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "1.5",
        "now",
        "2024-01-01",
        "2024-01-01T00:00:00",
        "2023-02-29T00:00:00Z",
        "1e3",
        "٣",
        "1960-01-01T00:00:00Z",
        "2024-01-01T00:00:00+24:00",
        "2024-01-01T00:00:00+01:60",
        "1990-12-31T23:59:61Z",
        "1990-12-31T23:58:60Z",
        "1990-12-31T23:59:60-08:00",
        "9" * 19,
    ],
)
def test_other_text_is_not_a_time(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time(text)


OFFERED = ("application/json", "application/x-ndjson", "text/event-stream")


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, "application/json"),
        ("*/*", "application/json"),
        ("text/*", "text/event-stream"),
        ("application/x-ndjson, application/json;q=0.5", "application/x-ndjson"),
        ("application/json;q=0, */*;q=0.1", "application/x-ndjson"),
        (
            'application/json;a="b,c;q=1\\"";q=0.1, application/x-ndjson;q=0.5',
            "application/x-ndjson",
        ),
        ("text/html, application/xhtml+xml, */*;q=0.8", "application/json"),
        ("APPLICATION/JSON", "application/json"),
        ("", "application/json"),
        pytest.param(
            'application/x-ndjson;a="' + '\\"' * 32_000,
            "application/x-ndjson",
            id="a quoted string without an end",
        ),
    ],
)
def test_accept_selects_by_quality_and_then_by_order(accept: str | None, chosen: str) -> None:
    assert header_values.preferred(accept, offered=OFFERED) == chosen


@pytest.mark.parametrize("accept", ["image/png", "application/json;q=0", "*/*;q=0", "nonsense"])
def test_not_acceptable_lists_the_offered_types(accept: str) -> None:
    with pytest.raises(NotAcceptable) as refused:
        header_values.preferred(accept, offered=OFFERED)
    assert refused.value.offered == list(OFFERED)


def test_media_types_are_compared_without_parameters_except_for_charset() -> None:
    take = OFFERED
    assert header_values.content_type("Application/JSON; charset=UTF-8", accepted=take) == take[0]
    assert header_values.content_type(None, accepted=take) == take[0]
    for bad in ("text/csv", "", "application/json; charset=latin-1"):
        with pytest.raises(UnsupportedMediaType):
            header_values.content_type(bad, accepted=take)


@pytest.mark.parametrize("media_type", [header_values.OCTETS, header_values.BATCHES])
def test_a_charset_of_bytes_is_ignored(media_type: str) -> None:
    for charset in ("binary", "iso-8859-1"):  # the first is what `file --mime` calls bytes
        header = f"{media_type}; charset={charset}"
        assert header_values.content_type(header, accepted=[media_type]) == media_type


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, ByteRange(0, 100, partial=False)),
        ("bytes=0-0", ByteRange(0, 1, partial=True)),
        ("bytes=99-", ByteRange(99, 100, partial=True)),
        ("bytes=-200", ByteRange(0, 100, partial=True)),
        ("bytes=50-1000", ByteRange(50, 100, partial=True)),
        ("bytes=9-3", ByteRange(0, 100, partial=False)),
        ("bytes=-", ByteRange(0, 100, partial=False)),
        ("bytes=0-1,5-6", ByteRange(0, 100, partial=False)),
        ("items=0-1", ByteRange(0, 100, partial=False)),
        ("bytes = 5 - 6", ByteRange(5, 7, partial=True)),
        pytest.param(
            "bytes=" + " " * 30_000 + "-" + " " * 30_000 + "x",
            ByteRange(0, 100, partial=False),
            id="thousands of blanks",
        ),
        pytest.param(
            f"bytes=0-{'9' * 5000}", ByteRange(0, 100, partial=False), id="thousands of digits"
        ),
    ],
)
def test_ranges_are_selected_as_rfc_9110_says(header: str | None, expected: ByteRange) -> None:
    assert select_range(header, None, etag='"e"', size_bytes=100) == expected


def test_a_range_outside_is_refused_and_if_range_needs_the_strong_tag() -> None:
    for header in ("bytes=100-", "bytes=-0"):
        with pytest.raises(RangeNotSatisfiable):
            select_range(header, None, etag='"e"', size_bytes=100)
    assert select_range("bytes=0-1", 'W/"e"', etag='"e"', size_bytes=100).partial is False
    assert select_range("bytes=0-1", '"e"', etag='"e"', size_bytes=100).partial is True
    assert none_match(None, '"e"')
    assert none_match('"f"', '"e"')
    assert not none_match('W/"e"', '"e"')


@pytest.mark.parametrize(
    ("name", "encode"), [("gzip", gzip.compress), ("zstd", zstandard.compress)]
)
def test_encodings_are_expanded_stream_by_stream_up_to_the_limit(name: str, encode: Any) -> None:
    data = bytes(range(256)) * 1000
    twice = encode(data) + encode(data)
    assert bodies.expand(twice, name, max_bytes=len(data) * 2) == data * 2
    with pytest.raises(RequestTooLarge):
        bodies.expand(twice, name, max_bytes=len(data) * 2 - 1)
    for bad in (twice[:-1], b"", b"junk", twice + b"x"):
        with pytest.raises(InvalidRequest):
            bodies.expand(bad, name, max_bytes=1 << 30)


def test_json_strings_become_text_and_other_values_stay_as_written() -> None:
    body = '{"records":[{"key":"ä\\n","value":{"b":1.0,"a":[ ]}},{"value":""},{"value":"null"}]}'
    columns = parse_json(body.encode(), records_max=10)
    assert columns.values == [b'{"b":1.0,"a":[ ]}', b"", b"null"]
    assert columns.keys == ["ä\n".encode(), None, None]
    assert columns.headers is None
    assert columns.timestamps is None


@pytest.mark.parametrize("parse", [parse_json, parse_values, parse_envelopes])
def test_invalid_utf8_and_too_many_records_are_refused(parse: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse(b'{"value":"\xff"}', records_max=10)
    many = (
        b'{"records":[' + b",".join([b"{}"] * 11) + b"]}" if parse is parse_json else b"{}\n" * 11
    )
    with pytest.raises(TooManyRecords):
        parse(many, records_max=10)


@pytest.mark.parametrize(
    ("parse", "pieces"),
    [
        (parse_values, ["1", '"a"', "[1", ",2]", "\n", "\r"]),
        (parse_envelopes, ['{"value":1}', '{"value":[{}', ",{}]}", "}", "\n", " "]),
    ],
)
def test_each_line_of_ndjson_is_one_value(parse: Any, pieces: list[str]) -> None:
    """A line break is also whitespace within a value, and values need none between them."""
    for some in itertools.product(pieces, repeat=5):
        body = "".join(some)
        lines = {n: one for n, one in enumerate(body.split("\n"), 1) if one.strip(" \r")}
        refused = next((n for n, one in lines.items() if not _is_json(one)), None)
        if refused or not lines:
            with pytest.raises(InvalidRequest) as error:
                parse(body.encode(), records_max=9)
            where = f"line {refused}" if refused else "records"
            assert error.value.problems[0].loc == where, body
        else:
            columns = parse(body.encode(), records_max=9)
            assert list(columns.lines or ()) == list(lines), body
            assert len(columns.values) == len(lines)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_too_many_possible_records_are_refused_before_parsing() -> None:
    for parse, body in ((parse_json, b'{"records":[' + b"{" * 99), (parse_values, b"\n" * 100)):
        with pytest.raises(TooManyRecords) as refused:
            parse(body, records_max=10)
        assert (refused.value.limit_records, refused.value.records) == (10, 100), (
            "the limit that holds, not the one of the estimate"
        )


def test_a_records_partition_takes_precedence_over_its_key_and_the_key_over_round_robin() -> None:
    columns = RecordColumns(
        values=[b"a", b"b", b"c", b"d"],
        keys=[b"k", None, b"k", None],
        partitions=[None, None, 2, None],
        timestamps=[1, 2, 3, 4],
    )
    by_key = partition_for_key(b"k", 5)
    split = split_by_partition(columns, sticky=1, count=5)
    expected: dict[int, list[bytes]] = {}
    for target, value in ((by_key, b"a"), (1, b"b"), (2, b"c"), (1, b"d")):
        expected.setdefault(target, []).append(value)
    assert {target: part.values for target, part in split.items()} == expected
    assert split[1].timestamps[-1] == 4  # type: ignore[index]
    with_chosen = split_by_partition(columns, sticky=0, count=2)
    assert 2 in with_chosen, "whether it is there is for the caller to ask"
