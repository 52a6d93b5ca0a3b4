"""Records in and out: what callers hand in, what they get, and the JSON form in between.

Values are bytes. Text is its UTF-8 bytes; anything else as JSON is for the caller to encode, or to
hand over as `JsonSource`, which the broker keeps by its exact source text. What is none of these is
a TypeError if it is handed in, ahead of any record that goes out.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from record_format.batch import check_crc, iter_headers
from record_format.codecs import NONE
from record_format.decode import Record, decode_columns
from record_format.encode import NO_HEADERS, Headers, encode_batches
from record_format.errors import CorruptBatch, InvalidRecord
from tierlog.client.times import Time, time_of_record

JsonSource = msgspec.Raw
Bytes = bytes | bytearray | memoryview | str | None
Value = Bytes | JsonSource
GivenHeaders = Mapping[str, Bytes] | Iterable[tuple[str, Bytes]]

DEFAULT_BATCH_BYTES: Final = 1 << 20  # with the broker's overhead allowance it fits its default


class NewRecord(NamedTuple):
    """A record to produce. Without a `partition` it goes by its key, or wherever the broker puts
    it.

    Value, key and headers' values are bytes, text (its UTF-8 bytes) or None; a `timestamp` is
    milliseconds, RFC 3339 text or a datetime with a UTC offset; by default, now.
    """

    value: Value
    key: Value = None
    timestamp: Time | None = None
    headers: GivenHeaders = NO_HEADERS
    partition: int | None = None


class ConsumedRecord(NamedTuple):
    """A record and where it was; `timestamp` in milliseconds, headers as (name, bytes) pairs."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def to_json(records: Iterable[NewRecord | Value]) -> bytes:
    """The body of a JSON produce request."""
    return msgspec.json.encode({"records": [_member(record) for record in _each(records)]})


def _each(records: Iterable[NewRecord | Value]) -> list[NewRecord]:
    """One record alone would be taken apart: text by its letters, a NewRecord by its fields."""
    if isinstance(records, (str, bytes, bytearray, memoryview, Mapping, NewRecord)):
        raise TypeError(
            f"records: expected a list of records, not one {type(records).__name__}; "
            "put it in a list, or send it with a producer"
        )
    return [record if isinstance(record, NewRecord) else NewRecord(record) for record in records]


def _member(record: NewRecord) -> dict[str, object]:
    member = json_member("value", record.value)
    if record.key is not None:
        member |= json_member("key", record.key)
    if record.timestamp is not None:
        member["timestamp"] = time_of_record(record.timestamp)
    if headers := to_headers(record.headers):
        member["headers"] = [
            {"name": name, **json_member("value", content)} for name, content in headers
        ]
    if record.partition is not None:
        member["partition"] = record.partition
    return member


def json_member(name: str, content: Value) -> dict[str, object]:
    """As the API has it: text, or `…_base64` if the bytes are not text."""
    if content is None or isinstance(content, (str, JsonSource)):
        return {name: content}
    plain = to_bytes(content, name=name)
    assert plain is not None, "null was told apart above"
    try:
        return {name: plain.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(plain).decode()}


def to_bytes(content: Value, *, name: str) -> bytes | None:
    """What the log keeps. Raises TypeError, naming the member."""
    if content is None or type(content) is bytes:
        return content
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, (bytes, bytearray, memoryview, JsonSource)):
        return bytes(content)
    raise TypeError(
        f"{name}: expected bytes, text or None, not {type(content).__name__}; "
        "a value of JSON is for json.dumps"
    )


def to_headers(given: GivenHeaders) -> Headers:
    """From pairs or a mapping; text is its UTF-8 bytes. Raises TypeError."""
    if not given:
        return NO_HEADERS
    pairs = given.items() if isinstance(given, Mapping) else given
    return tuple(
        (_name(name), to_bytes(content, name=f"headers {name!r}")) for name, content in pairs
    )


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"headers: a name is text, not {type(name).__name__}")
    return name


def to_batches(
    records: Iterable[NewRecord | Value],
    *,
    now_ms: int,
    codec: int = NONE,
    max_bytes: int = DEFAULT_BATCH_BYTES,
) -> bytes:
    """The body of a raw produce request: one or more record batches.

    Records without a timestamp get `now_ms`. Raises RecordTooLarge, InvalidRecord for none at all.
    """
    new = _each(records)
    if not new:
        raise InvalidRecord("the request has no records")
    cut = encode_batches(
        [to_bytes(record.value, name="value") for record in new],
        timestamps=[now_ms if r.timestamp is None else time_of_record(r.timestamp) for r in new],
        keys=[to_bytes(record.key, name="key") for record in new]
        if any(r.key is not None for r in new)
        else None,
        headers=[to_headers(r.headers) for r in new] if any(r.headers for r in new) else None,
        codec=codec,
        max_bytes=max_bytes,
    )
    return b"".join(encoded.batch for encoded in cut)


class Decoded(NamedTuple):
    """`broken_off_at`: where the batch begins that ended them, because it is corrupt."""

    records: list[Record]
    broken_off_at: int | None = None


def decode_fetched(
    batches: bytes, *, of: str = "", from_offset: int = 0, end_offset: int | None = None
) -> Decoded:
    """The records of whole batches with from_offset <= offset < end_offset; checksums are checked.

    Control batches are skipped. What comes before a corrupt batch is given; raises CorruptBatch
    where nothing does. `of` names the partition in it.
    """
    found: list[Record] = []
    next_offset = from_offset
    try:
        for header in iter_headers(batches):
            if end_offset is not None and header.base_offset >= end_offset:
                break
            if header.last_offset >= from_offset and not header.is_control:
                check_crc(batches, header)
                columns = decode_columns(
                    batches, header, from_offset=from_offset, end_offset=end_offset
                )
                found.extend(map(Record, *columns))
            next_offset = header.next_offset
    except CorruptBatch as bad:
        if not found:
            detail = f"{bad.detail}; `tierlog storage verify --deep` says where it rotted"
            offset = next_offset if bad.offset is None else bad.offset
            raise CorruptBatch(detail, file=of, offset=offset) from bad
        return Decoded(found, broken_off_at=next_offset)
    return Decoded(found)


def from_time(records: list[Record], timestamp: int) -> list[Record]:
    """From the first record at or after the time on; all, if the broker already skipped further."""
    first = next((i for i, record in enumerate(records) if record.timestamp >= timestamp), 0)
    return records[first:]
