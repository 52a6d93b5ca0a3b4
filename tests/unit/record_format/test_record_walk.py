"""The plain and the compiled walk agree on every input, and find every invalid record."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.record_format import golden
from tests.unit.record_format.columns import Rows, rows
from tierlog.record_format import native
from tierlog.record_format.batch import BatchHeader, parse_header
from tierlog.record_format.decode import expand
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.record_walk import (
    NO_HEAD,
    NO_VALUE,
    Problem,
    Walk,
    Walker,
    WalkRequest,
    walk_plain,
)
from tierlog.record_format.varint import zigzag


@pytest.fixture(scope="module")
def walk_native() -> Walker:
    assert native.is_available()
    from tierlog.record_format.record_kernel import walk_native

    return walk_native


def request_of(header: BatchHeader, *, dense: bool = False) -> WalkRequest:
    return WalkRequest(
        header.record_count,
        header.base_timestamp,
        header.last_offset_delta,
        dense=dense,
        with_columns=True,
        with_head=True,
    )


def test_both_walks_agree_on_kafkas_records(walk_native: Walker) -> None:
    for header, batch in golden.all_batches():
        records = expand(batch, header)
        for dense in (False, True):
            request = request_of(header, dense=dense)
            assert walk_native(records, request) == walk_plain(records, request)


def test_both_walks_agree_on_kafkas_records_with_changed_bytes(walk_native: Walker) -> None:
    source = random.Random(20)
    for header, batch in golden.all_batches():
        original = expand(batch, header)
        if len(original) > 100_000 or not original:
            continue
        for _ in range(20):
            records = bytearray(original)
            for _ in range(source.randint(1, 3)):
                at = min(int(source.expovariate(1 / 40)), len(records) - 1)
                records[at] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))
            request = request_of(header)._replace(with_columns=False)
            assert walk_native(records, request) == walk_plain(records, request)


@given(batch=rows(max_size=5), data=st.data())
def test_both_walks_agree_on_any_change(batch: Rows, data: st.DataObject) -> None:
    from tierlog.record_format.record_kernel import walk_native

    encoded = encode_batch(**batch._asdict())
    header = parse_header(encoded)
    records = encoded[61:]
    at = data.draw(st.integers(0, len(records)))
    cut = data.draw(st.integers(0, 3))
    records[at : at + cut] = data.draw(st.binary(max_size=12))
    request = request_of(header, dense=data.draw(st.booleans()))
    assert walk_native(records, request) == walk_plain(records, request)


@given(
    records=st.binary(max_size=60), count=st.integers(0, 8), base=st.integers(-(2**63), 2**63 - 1)
)
def test_both_walks_agree_on_any_bytes(records: bytes, count: int, base: int) -> None:
    from tierlog.record_format.record_kernel import walk_native

    request = WalkRequest(count, base, 7, dense=False, with_columns=True, with_head=True)
    request = request._replace(from_delta=count // 2, columns_max=2)
    assert walk_native(records, request) == walk_plain(records, request)


# --- valid and invalid records --------------------------------------------------------------------


def record(
    *,
    timestamp: bytes = b"\0",
    offset: bytes = b"\0",
    key: bytes = b"\2k",
    value: bytes = b"\2v",
    headers: bytes = b"\0",
    size: int | None = None,
) -> bytes:
    body = b"\0" + timestamp + offset + key + value + headers
    return zigzag(len(body) if size is None else size) + body


NULL = zigzag(-1)
GOOD = [
    record(),
    record(key=NULL, value=NULL),
    record(key=b"\0", value=b"\0"),
    record(headers=b"\2\2h\2x"),
    record(headers=b"\2\0" + NULL),
    record(timestamp=zigzag(2**63 - 1001)),
    record(timestamp=zigzag(-(2**63))),
    record(offset=b"\x80\0"),  # longer than needed, which Kafka accepts too
    record(headers=b"\x80\0"),
]
BAD = [
    (b"", Problem.VARINT),
    (b"\x80", Problem.VARINT),
    (b"\x80" * 5, Problem.VARINT),
    (b"\xff\xff\xff\xff\x1f" + b"\0" * 20, Problem.VARINT),
    (record(size=0), Problem.RECORD_LENGTH),
    (record(size=-1), Problem.RECORD_LENGTH),
    (record(size=9), Problem.RECORD_LENGTH),
    (record(size=2**31 - 1), Problem.RECORD_LENGTH),
    (record(size=7), Problem.RECORD_END),
    (record(timestamp=b"\xff" * 9 + b"\2"), Problem.VARINT),
    (record(timestamp=b"\xff" * 10 + b"\1"), Problem.VARINT),
    (record(timestamp=zigzag(2**63 - 1000)), Problem.TIMESTAMP),
    (record(offset=zigzag(-1)), Problem.OFFSET_DELTA),
    (record(offset=zigzag(1)), Problem.OFFSET_DELTA),
    (record(key=zigzag(-2)), Problem.KEY_LENGTH),
    (record(key=zigzag(5)), Problem.KEY_LENGTH),
    (record(key=zigzag(2**31 - 1)), Problem.KEY_LENGTH),
    (record(value=zigzag(-2)), Problem.VALUE_LENGTH),
    (record(value=zigzag(2)), Problem.VALUE_LENGTH),
    (record(value=zigzag(2**31 - 1)), Problem.VALUE_LENGTH),
    (record(value=b"\2v", headers=b""), Problem.VARINT),
    (record(headers=b"\1"), Problem.HEADERS),
    (record(headers=b"\2"), Problem.HEADERS),
    (record(headers=b"\2" + NULL + b"\0"), Problem.HEADERS),
    (record(headers=b"\2\2h" + zigzag(-2)), Problem.HEADERS),
    (record(headers=b"\2\2h\4x"), Problem.HEADERS),
    (record(headers=zigzag(2**31 - 1)), Problem.HEADERS),
    (record(headers=b"\0\0"), Problem.RECORD_END),
    (record() + b"\0", Problem.TRAILING),
    (record() + record(offset=b"\2"), Problem.TRAILING),
]
ONE = WalkRequest(1, 1000, 0, dense=True, with_columns=False)


@pytest.mark.parametrize("records", GOOD, ids=bytes.hex)
def test_a_valid_record_is_accepted(records: bytes, walk: Walker) -> None:
    assert walk(records, ONE).problem == Problem.NONE


@pytest.mark.parametrize(("records", "problem"), BAD, ids=lambda item: str(item)[:40])
def test_an_invalid_record_is_found(records: bytes, problem: Problem, walk: Walker) -> None:
    found = walk(records, ONE)
    assert found.problem == problem
    assert "record" in found.describe()


def test_gaps_are_valid_only_in_compacted_batches(walk: Walker) -> None:
    records = record(offset=b"\0") + record(offset=zigzag(5))
    request = WalkRequest(2, 0, 5, dense=False, with_columns=True)
    found = walk(records, request)
    assert found.fields.offset_deltas == [0, 5]
    assert walk(records, request._replace(dense=True)).problem == Problem.OFFSET_DELTA
    assert walk(records, request._replace(last_offset_delta=4)).problem == Problem.OFFSET_DELTA
    again = record(offset=zigzag(5)) * 2
    assert walk(again, request).problem == Problem.OFFSET_DELTA


def test_the_walk_returns_the_positions_of_fields(walk: Walker) -> None:
    records = record(key=b"\2k", value=NULL, headers=b"\2\2h\2x", timestamp=zigzag(-3))
    found = walk(records, ONE._replace(with_columns=True))
    assert found == Walk(
        Problem.NONE, 1, len(records), 997, 997, ([997], [0], [5], [6], [-1], [7], [7])
    )


def test_the_fields_of_some_records_are_returned_only(walk: Walker) -> None:
    records = b"".join(record(offset=zigzag(delta)) for delta in (0, 2, 5, 6))
    request = WalkRequest(4, 0, 6, dense=False, with_columns=True, from_delta=1, columns_max=2)
    everything = walk(records, request._replace(from_delta=0, columns_max=4)).fields
    found = walk(records, request).fields
    assert everything is not None
    assert found == tuple(column[1:3] for column in everything)
    assert found.offset_deltas == [2, 5]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([b"\0\0\0\1\2abc", b"\0\0\0\1\2"], 258),
        ([None, b"\0\0\0\1\2", None], 258),
        ([b"\xff\xff\xff\xff\xff"], 2**40 - 1),
        ([b"\0\0\0\1\2", b"\0\0\0\1\3", b"\0\0\0\1\3"], NO_HEAD),
        ([b"\0\0\0\1\2", b"\0\0\0\1"], NO_HEAD),
        ([b"\0\0\0\1", b"\0\0\0\1\2"], NO_HEAD),
        ([b""], NO_HEAD),
        ([None], NO_VALUE),
        ([], NO_VALUE),
    ],
)
def test_the_walk_finds_the_head_that_all_values_have(
    values: list[bytes | None], expected: int, walk: Walker
) -> None:
    fields = [NULL if one is None else zigzag(len(one)) + one for one in values]
    records = b"".join(
        record(offset=zigzag(delta), value=one, headers=b"\2\2h\2x")
        for delta, one in enumerate(fields)
    )
    request = WalkRequest(len(values), 0, len(values) - 1, dense=True, with_columns=False)
    assert walk(records, request._replace(with_head=True)).head == expected
    assert walk(records, request).head == NO_VALUE


def test_an_empty_batch_is_valid(walk: Walker) -> None:
    request = WalkRequest(0, 0, 0, dense=False, with_columns=True)
    assert walk(b"", request).problem == Problem.NONE
    assert walk(b"\0", request).problem == Problem.TRAILING
