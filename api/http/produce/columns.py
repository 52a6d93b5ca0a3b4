"""Parses a produce request's body into columns: JSON, NDJSON, or a single record's bytes.

Rules:

* Pure functions of the body: no topic, no clock, no network. A record's partition and time stay
  None if the request does not give them.
* A JSON string is stored as its UTF-8 text, null as null, and any other value as its exact source
  text: `1.0` stays `1.0`, and members keep their order and their duplicates.
* No object is created per record besides its own bytes and the parser's: this path handles a
  million records per second.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from tierlog.api.http import strict_json
from tierlog.api.http.produce.repeated_members import (
    count_byte,
    nonblank_lines,
    refuse_repeated_in_lines,
    refuse_repeated_in_object,
)
from tierlog.api.http.settings import MAX_PARTITION
from tierlog.api.http.strict_json import MAX_TIMESTAMP, parse_time
from tierlog.broker.schema_registry.decoding import Part
from tierlog.record_format.encode import Headers
from tierlog.record_format.errors import (
    FieldProblem,
    InvalidRecord,
    SchemaMismatch,
    TooManyRecords,
)

Content = bytes | None
PathOf = Callable[[int, str], str]  # the path of a row's member in the request
Member = TypeVar("Member")
T = TypeVar("T")

# As integers: `b"x" in …` first fails to take the bytes for a number, which costs an exception.
_QUOTE, _BACKSLASH = b'"\\'
# So many braces, or line breaks, are parsed per record that is allowed.
_CANDIDATES_PER_RECORD: Final = 4


class HeaderIn(msgspec.Struct, forbid_unknown_fields=True):
    """One header of a record. `value` or `value_base64`, not both; null or neither: null."""

    name: str
    value: str | UnsetType | None = UNSET
    value_base64: bytes | UnsetType | None = UNSET


_HeadersIn = list[HeaderIn] | dict[str, str | None] | UnsetType | None


class RecordIn(msgspec.Struct, forbid_unknown_fields=True):
    """One record. `key` and `value` may be any JSON; `*_base64` carry bytes; not both forms
    (null counts as missing).
    """

    key: msgspec.Raw | UnsetType = UNSET
    key_base64: bytes | UnsetType | None = UNSET
    value: msgspec.Raw | UnsetType = UNSET
    value_base64: bytes | UnsetType | None = UNSET
    headers: _HeadersIn = UNSET
    timestamp: int | str | UnsetType | None = UNSET
    partition: int | UnsetType | None = UNSET


class RecordsIn(msgspec.Struct, forbid_unknown_fields=True):
    records: list[RecordIn]


class RecordColumns(NamedTuple):
    """All columns have the length of `values`; a column that no record uses is None."""

    values: list[Content]
    keys: list[Content] | None = None
    headers: list[Headers | None] | None = None
    timestamps: list[int | None] | None = None
    partitions: list[int | None] | None = None
    rows: Sequence[int] | None = None  # the records' indexes in the request; None: in order
    lines: Sequence[int] | None = None  # their line numbers; None: the request is not NDJSON
    has_members: bool = True  # a record is an object rather than only its value

    def path(self, row: int, member: str) -> str:
        """The path of a row's member in the request: `records[3].key`, or `line 4.key`."""
        if self.has_members:
            return f"{self.record(row)}.{member}"
        return member if self.lines is None else self.record(row)

    def record(self, row: int) -> str:
        """The path of a row: `records[3]`, `line 4`, or `record 0` for a body that is one value."""
        row = row if self.rows is None else self.rows[row]
        if self.lines is not None:
            return f"line {self.lines[row]}"
        return f"records[{row}]" if self.has_members else f"record {row}"


_RECORDS: Final = msgspec.json.Decoder(RecordsIn)
_RECORD: Final = msgspec.json.Decoder(RecordIn)
_TEXT: Final = msgspec.json.Decoder(str)
_ANY: Final = msgspec.json.Decoder(msgspec.Raw)


def parse_json(
    body: bytes | bytearray, *, records_max: int, as_json: Collection[Part] = ()
) -> RecordColumns:
    """`{"records": […]}`. `as_json`: what is kept as its JSON, strings too. Raises
    InvalidRequest, InvalidRecord, TooManyRecords.
    """
    _check_text(body)
    _check_candidates(count_byte(body, b"{"), records_max=records_max)
    decoded = strict_json.decode(body, _RECORDS)
    _check_count(len(decoded.records), records_max=records_max)
    refuse_repeated_in_object(body, decoded, decoded.records)
    return _columns(decoded.records, None, as_json=as_json)


def parse_envelopes(
    body: bytes | bytearray, *, records_max: int, as_json: Collection[Part] = ()
) -> RecordColumns:
    """NDJSON, one record object per line."""
    records, lines = _decode_lines(
        body, _RECORD, are_lines=_records_are_lines, records_max=records_max
    )
    refuse_repeated_in_lines(body, records)
    return _columns(records, lines, as_json=as_json)


def parse_values(
    body: bytes | bytearray, *, records_max: int, as_json: Collection[Part] = ()
) -> RecordColumns:
    """NDJSON, one value per line."""
    values, lines = _decode_lines(body, _ANY, are_lines=_values_are_lines, records_max=records_max)
    if not values:
        raise _no_record()
    return RecordColumns(
        list(map(_stored("value", as_json), values)), lines=lines, has_members=False
    )


def single_value(body: bytes | bytearray, *, key: Content) -> RecordColumns:
    """The body as one value: an empty body is an empty value."""
    return RecordColumns([bytes(body)], None if key is None else [key], has_members=False)


def decode_base64(text: str, *, loc: str) -> bytes:
    """Standard base64 with its padding (RFC 4648, 4). Raises InvalidRequest."""
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        strict_json.refuse_field(loc, "not base64")


def stored_bytes(raw: msgspec.Raw) -> Content:
    """The bytes of a key or value with this JSON source text."""
    text = bytes(raw)
    if text[0] == _QUOTE:
        return text[1:-1] if _BACKSLASH not in text else _TEXT.decode(text).encode()
    return None if text == b"null" else text


def _source_text(raw: msgspec.Raw) -> Content:
    text = bytes(raw)
    return None if text == b"null" else text


def _stored(part: Part, as_json: Collection[Part]) -> Callable[[msgspec.Raw], Content]:
    return _source_text if part in as_json else stored_bytes


class _MemberColumns(NamedTuple):
    """A column for each member, with UNSET for records without it."""

    keys: list[msgspec.Raw | UnsetType]
    values: list[msgspec.Raw | UnsetType]
    keys_base64: list[bytes | UnsetType | None]
    values_base64: list[bytes | UnsetType | None]
    headers: list[_HeadersIn]
    timestamps: list[int | str | UnsetType | None]
    partitions: list[int | UnsetType | None]

    @classmethod
    def by(cls, records: Sequence[RecordIn]) -> _MemberColumns:
        return cls(
            [record.key for record in records],
            [record.value for record in records],
            [record.key_base64 for record in records],
            [record.value_base64 for record in records],
            [record.headers for record in records],
            [record.timestamp for record in records],
            [record.partition for record in records],
        )


def _columns(
    records: Sequence[RecordIn], lines: Sequence[int] | None, *, as_json: Collection[Part]
) -> RecordColumns:
    """`lines` are the records' line numbers; without them a record's path has its index."""
    if not records:
        raise _no_record()
    given = _MemberColumns.by(records)
    keys = _contents(given.keys, _stored("key", as_json))
    values = _contents(given.values, _stored("value", as_json))
    columns = RecordColumns(values, keys, lines=lines)
    for part in as_json:
        coded = given.keys_base64 if part == "key" else given.values_base64
        _refuse_bytes(coded, part, at=columns.path)
    if any(column.count(UNSET) < len(column) for column in given[2:]):
        columns = _with_others(columns, given)
    assert columns.keys is not None, "set above"
    has_keys = columns.keys.count(None) < len(columns.keys)
    return columns if has_keys else columns._replace(keys=None)


def _refuse_bytes(given: Sequence[bytes | UnsetType | None], part: Part, *, at: PathOf) -> None:
    for row, coded in enumerate(given):
        if isinstance(coded, bytes):
            loc, msg = at(row, f"{part}_base64"), f"give {part}: what a schema encodes is JSON"
            raise SchemaMismatch(f"{loc}: {msg}", problems=(FieldProblem(loc, msg),))


def _contents(
    given: list[msgspec.Raw | UnsetType], stored: Callable[[msgspec.Raw], Content]
) -> list[Content]:
    missing = given.count(UNSET)
    if missing == len(given):
        return [None] * missing
    if not missing:
        return list(map(stored, cast("list[msgspec.Raw]", given)))
    return [None if isinstance(raw, UnsetType) else stored(raw) for raw in given]


def _with_others(columns: RecordColumns, given: _MemberColumns) -> RecordColumns:
    """Add the members that most requests do not use."""
    at = columns.path
    return columns._replace(
        values=_with_bytes(columns.values, given.values_base64, at=at, name="value"),
        keys=_with_bytes(columns.keys or [], given.keys_base64, at=at, name="key"),
        headers=_parsed(given.headers, _headers, at=at, name="headers"),
        timestamps=_parsed(given.timestamps, _timestamp, at=at, name="timestamp"),
        partitions=_parsed(given.partitions, _partition, at=at, name="partition"),
    )


class _Refused(Exception):
    """What is wrong with a member of a record, and where within the member."""

    def __init__(self, msg: str, *, within: str = "") -> None:
        super().__init__(msg)
        self.within = within


def _parsed(
    column: Sequence[Member], parse: Callable[[Member], T], *, at: PathOf, name: str
) -> list[T] | None:
    if column.count(UNSET) == len(column):
        return None
    parsed: list[T] = []
    try:
        for member in column:
            parsed.append(parse(member))  # noqa: PERF401  counted if it raises
    except _Refused as error:  # only now is the path needed
        strict_json.refuse_field(at(len(parsed), name) + error.within, str(error))
    return parsed


def _with_bytes(
    contents: list[Content],
    base64s: Sequence[bytes | UnsetType | None],
    *,
    at: PathOf,
    name: str,
) -> list[Content]:
    if base64s.count(UNSET) == len(base64s):
        return contents
    for row, coded in enumerate(base64s):
        if isinstance(coded, bytes):  # otherwise it is missing, or null as if missing
            if contents[row] is not None:
                strict_json.refuse_field(at(row, f"{name}_base64"), _not_both(name))
            contents[row] = coded
    return contents


def _not_both(name: str) -> str:
    return f"give {name} or {name}_base64, not both"


def _headers(headers: _HeadersIn) -> Headers | None:
    if not headers:  # missing, null or empty
        return None
    if isinstance(headers, dict):
        return tuple((name, _utf8(value)) for name, value in headers.items())
    assert isinstance(headers, list)
    return tuple(_header(header, index) for index, header in enumerate(headers))


def _header(header: HeaderIn, index: int) -> tuple[str, Content]:
    text = None if isinstance(header.value, UnsetType) else header.value
    if not isinstance(header.value_base64, bytes):
        return header.name, _utf8(text)
    if text is not None:
        raise _Refused(_not_both("value"), within=f"[{index}].value_base64")
    return header.name, header.value_base64


def _utf8(text: str | None) -> Content:
    return None if text is None else text.encode()


def _timestamp(given: int | str | UnsetType | None) -> int | None:
    if given is UNSET or given is None:
        return None
    if isinstance(given, int) and 0 <= given <= MAX_TIMESTAMP:
        return given
    try:
        return parse_time(str(given) if isinstance(given, int) else given)
    except ValueError as error:
        raise _Refused(str(error)) from None


def _partition(given: int | UnsetType | None) -> int | None:
    if given is UNSET or given is None:
        return None
    assert isinstance(given, int)
    if not 0 <= given <= MAX_PARTITION:
        raise _Refused(f"a partition is 0 to {MAX_PARTITION}, not {given}")
    return given


def _decode_lines(
    body: bytes | bytearray,
    decoder: msgspec.json.Decoder[T],
    *,
    are_lines: Callable[[bytes | bytearray, list[T]], bool],
    records_max: int,
) -> tuple[list[T], Sequence[int]]:
    """Each line that is not blank, and its number from 1. `are_lines`: whether each line break of
    a text is between two of its values, and not within one.
    """
    _check_text(body, has_lines=True)
    _check_candidates(count_byte(body, b"\n"), records_max=records_max)
    text = body.removesuffix(b"\n")
    count = count_byte(text, b"\n") + 1
    if count <= records_max:
        with suppress(msgspec.DecodeError, RecursionError):
            decoded = decoder.decode_lines(text)  # which knows no lines: it skips whitespace
            if len(decoded) == count and are_lines(text, decoded):
                return decoded, range(1, count + 1)
    return _decode_each_line(body, decoder, records_max=records_max)


def _values_are_lines(text: bytes | bytearray, values: list[msgspec.Raw]) -> bool:
    return b"\n".join(values) == text


def _records_are_lines(text: bytes | bytearray, records: list[RecordIn]) -> bool:
    """JSON has no such line break: within a record, a comma is between braces."""
    return text.count(b"}\n{") == len(records) - 1


def _decode_each_line(
    body: bytes | bytearray, decoder: msgspec.json.Decoder[T], *, records_max: int
) -> tuple[list[T], Sequence[int]]:
    lines = list(nonblank_lines(body))
    _check_count(len(lines), records_max=records_max)
    decoded: list[T] = []
    for number, line in lines:
        try:
            decoded.append(decoder.decode(line))
        except (msgspec.DecodeError, RecursionError) as error:
            strict_json.refuse(error, within=f"line {number}", kind=decoder.type)
    return decoded, [number for number, _ in lines]


def _check_text(body: bytes | bytearray, *, has_lines: bool = False) -> None:
    """Source text is stored unparsed, so its UTF-8 has to be checked here."""
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        msg = f"the body is not UTF-8: {error.reason} at byte {error.start}"
        strict_json.refuse_field(f"line {line}" if has_lines else "", msg)


def _check_candidates(count: int, *, records_max: int) -> None:
    """Before parsing: an estimate that allows for braces in values, and for blank lines."""
    if count > records_max * _CANDIDATES_PER_RECORD:
        raise TooManyRecords(limit_records=records_max, records=count)


def _check_count(count: int, *, records_max: int) -> None:
    if count > records_max:
        raise TooManyRecords(limit_records=records_max, records=count)


def _no_record() -> InvalidRecord:
    return InvalidRecord("the request has no records", problems=(FieldProblem("records", "empty"),))
