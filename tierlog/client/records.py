"""Records and their times as callers pass and receive them, and the records' JSON form.

Values are bytes. Text stands for its UTF-8 bytes. Other JSON values are encoded by the caller, or
passed as `JsonSource`, whose source text the broker keeps unchanged. Anything else is a TypeError,
raised before any record is sent.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from operator import index
from typing import Final, Generic, NamedTuple, TypeVar, overload

import msgspec

from tierlog.record_format.batch import check_crc
from tierlog.record_format.batch_runs import headers_in_order
from tierlog.record_format.codecs import NONE
from tierlog.record_format.decode import Record, decode_columns
from tierlog.record_format.encode import NO_HEADERS, Headers, encode_batches
from tierlog.record_format.errors import CorruptBatch, InvalidRecord, InvalidRequest

Time = int | str | datetime

MAX_TIME: Final = 2**63 - 1

_SOURCE: Final = msgspec.json.Decoder(msgspec.Raw)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LEAP_SECOND: Final = re.compile(r"(?<=[Tt ]\d\d:\d\d:)60")


@overload
def to_ms(time: Time) -> int: ...


@overload
def to_ms(time: Time | None) -> int | None: ...


def to_ms(time: Time | None) -> int | None:
    """Milliseconds since the epoch; RFC 3339 text and datetimes need a UTC offset.

    Raises InvalidRequest: a local time would mean something else on each machine.
    """
    if time is None:
        return None
    if isinstance(time, str):
        time = _parse(time)
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise InvalidRequest(f"{time.isoformat()}: a time needs a UTC offset, as in ...Z")
        return (time - _EPOCH) // timedelta(milliseconds=1)
    try:
        return index(time)
    except TypeError:
        kind = type(time).__name__
        raise TypeError(f"a time must be an int, text or a datetime, not {kind}") from None


def time_of_record(time: Time) -> int:
    """A valid record timestamp, or -1 for none. Raises InvalidRequest: in a batch, an invalid
    timestamp would make all records fail.
    """
    found = to_ms(time)
    if not -1 <= found <= MAX_TIME:
        raise InvalidRequest(f"timestamp must be between 0 and {MAX_TIME}, not {found}")
    return found


def _parse(text: str) -> int | datetime:
    try:
        if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit():
            return int(text)
        if _LEAP_SECOND.search(text):
            return _after_leap_second(text)
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{text!r} is not a time: give milliseconds since the epoch, or RFC 3339 text "
            "as in 2026-06-01T12:00:00Z"
        ) from None


def _after_leap_second(text: str) -> datetime:
    """The following second, as the broker reads it: Unix time has no leap seconds."""
    after = datetime.fromisoformat(_LEAP_SECOND.sub("59", text)) + timedelta(seconds=1)
    if after.tzinfo and after.astimezone(UTC).strftime("%T") != "00:00:00":
        raise ValueError("leap seconds occur only at the end of a UTC day (RFC 3339)")
    return after


JsonSource = msgspec.Raw
Bytes = bytes | bytearray | memoryview | str | None
Value = Bytes | JsonSource
HeadersLike = Mapping[str, Bytes] | Iterable[tuple[str, Bytes]]

# The broker's default limit is this plus an allowance for the overhead.
DEFAULT_BATCH_BYTES: Final = 1 << 20


class NewRecord(NamedTuple):
    """A record to produce. Without a `partition` it is chosen by key, or by the broker.

    Values, keys and header values are bytes, text (as UTF-8) or None; `timestamp` is milliseconds,
    RFC 3339 text or a datetime with a UTC offset, by default now.
    """

    value: Value
    key: Value = None
    timestamp: Time | None = None
    headers: HeadersLike = NO_HEADERS
    partition: int | None = None


class ConsumedRecord(NamedTuple):
    """A record and its offset; `timestamp` in milliseconds, headers as (name, bytes) pairs."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def to_json(records: Iterable[NewRecord | Value], *, of_json: Collection[str] = ()) -> bytes:
    """The body of a JSON produce request; `of_json`: which of key and value is JSON, not text."""
    members = [_to_member(record, of_json=of_json) for record in as_records(records)]
    return msgspec.json.encode({"records": members})


def _member(name: str, content: Value, of_json: Collection[str]) -> dict[str, object]:
    if name not in of_json:
        return json_member(name, content)
    source = to_bytes(content, name=name)
    try:
        return {name: None if source is None else _SOURCE.decode(source)}
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{name}: not JSON: {error}") from error


def as_records(records: Iterable[NewRecord | Value]) -> list[NewRecord]:
    """Refuses a single record: text would be iterated by letters, a NewRecord by fields."""
    if isinstance(records, (str, bytes, bytearray, memoryview, Mapping, NewRecord)):
        raise TypeError(
            f"records: expected a list of records, not one {type(records).__name__}; "
            "put it in a list, or send it with a producer"
        )
    return [record if isinstance(record, NewRecord) else NewRecord(record) for record in records]


def _to_member(record: NewRecord, *, of_json: Collection[str]) -> dict[str, object]:
    member = _member("value", record.value, of_json)
    if record.key is not None:
        member |= _member("key", record.key, of_json)
    if record.timestamp is not None:
        member["timestamp"] = time_of_record(record.timestamp)
    if headers := to_headers(record.headers):
        member["headers"] = [
            {"name": name, **json_member("value", content)} for name, content in headers
        ]
    if record.partition is not None:
        member["partition"] = index(record.partition)
    return member


def json_member(name: str, content: Value) -> dict[str, object]:
    """The API's JSON form: text, or `…_base64` for bytes that are not UTF-8."""
    plain = to_bytes(content, name=name)
    if plain is None:
        return {name: None}
    try:
        return {name: plain.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(plain).decode()}


def to_bytes(content: Value, *, name: str) -> bytes | None:
    """The bytes that the log stores. Raises TypeError, naming the member."""
    if content is None or type(content) is bytes:
        return content
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, (bytes, bytearray, memoryview, JsonSource)):
        return bytes(content)
    raise TypeError(
        f"{name}: expected bytes, text or None, not {type(content).__name__}; "
        "encode JSON values with json.dumps"
    )


def to_headers(given: HeadersLike) -> Headers:
    """From pairs or a mapping; text is encoded as UTF-8. Raises TypeError."""
    if not given:
        return NO_HEADERS
    pairs = given.items() if isinstance(given, Mapping) else given
    return tuple(
        (_name(name), to_bytes(content, name=f"headers {name!r}")) for name, content in pairs
    )


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"headers: a name must be text, not {type(name).__name__}")
    return name


def to_batches(
    records: Iterable[NewRecord | Value],
    *,
    now_ms: int,
    codec: int = NONE,
    max_bytes: int = DEFAULT_BATCH_BYTES,
) -> bytes:
    """Encode records as the body of a raw produce request: one or more record batches.

    Records without a timestamp get `now_ms`. Raises RecordTooLarge, and InvalidRecord if empty.
    """
    new = as_records(records)
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


R = TypeVar("R", Record, ConsumedRecord)


class Decoded(NamedTuple, Generic[R]):
    """`corrupt_from`: the base offset of the corrupt batch at which decoding stopped."""

    records: list[R]
    corrupt_from: int | None = None


def decode_fetched(
    batches: bytes,
    to_record: Callable[..., R],
    *,
    of: str = "",
    from_offset: int = 0,
    end_offset: int | None = None,
    next_offset: int | None = None,
) -> Decoded[R]:
    """Verify and decode the records with from_offset <= offset < end_offset.

    `to_record` takes a Record's fields. `next_offset`: the response's, past which no batch may end.
    Control batches are skipped. Returns the records before a corrupt batch; if there are none,
    raises CorruptBatch, which names the partition `of`.
    """
    found: list[R] = []
    reached = from_offset
    try:
        for header in headers_in_order(batches, from_offset=from_offset, next_offset=next_offset):
            if end_offset is not None and header.base_offset >= end_offset:
                break
            check_crc(batches, header)  # first: whether it is skipped is said by its own bytes
            if header.last_offset >= from_offset and not header.is_control:
                columns = decode_columns(
                    batches, header, from_offset=from_offset, end_offset=end_offset
                )
                found.extend(map(to_record, *columns))
            reached = header.next_offset
    except CorruptBatch as bad:
        if not found:
            detail = f"{bad.detail}; `tierlog storage verify --deep` shows which tier is corrupt"
            offset = reached if bad.offset is None else bad.offset
            raise CorruptBatch(detail, file=of, offset=offset) from bad
        return Decoded(found, corrupt_from=reached)
    return Decoded(found)


def from_timestamp(records: list[R], timestamp: int) -> list[R]:
    """The records from the first at or after the time; all of them if there is none."""
    first = next((i for i, record in enumerate(records) if record.timestamp >= timestamp), 0)
    return records[first:]
