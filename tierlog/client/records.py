"""Records on their way: what callers hand in, what they get, and the JSON form between.

Values are bytes. Text is its UTF-8 bytes; anything else as JSON is for the caller to encode, or to
hand over as `JsonSource`, which the broker keeps by its exact source text.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from record_format.batch import check_crc, iter_headers
from record_format.codecs import NONE
from record_format.decode import Record, decode_columns
from record_format.encode import NO_HEADERS, Headers, encode_batches

JsonSource = msgspec.Raw
Value = bytes | str | JsonSource | None

DEFAULT_BATCH_BYTES: Final = 1 << 20  # with the broker's overhead allowance it fits its default


class NewRecord(NamedTuple):
    """A record to produce. No `partition`: by its key, or where the broker likes."""

    value: Value
    key: bytes | str | None = None
    timestamp: int | None = None
    headers: Headers = NO_HEADERS
    partition: int | None = None


class ConsumedRecord(NamedTuple):
    """A record and where it was."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def to_json(records: Iterable[NewRecord | Value]) -> bytes:
    """The body of a JSON produce request."""
    return msgspec.json.encode({"records": [_member(record) for record in records]})


def _member(record: NewRecord | Value) -> dict[str, object]:
    if not isinstance(record, NewRecord):
        return _content("value", record)
    member = _content("value", record.value)
    if record.key is not None:
        member |= _content("key", record.key)
    if record.timestamp is not None:
        member["timestamp"] = record.timestamp
    if record.headers:
        member["headers"] = [
            {"name": name, **_content("value", content)} for name, content in record.headers
        ]
    if record.partition is not None:
        member["partition"] = record.partition
    return member


def _content(name: str, content: Value) -> dict[str, object]:
    if not isinstance(content, bytes):
        return {name: content}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content).decode()}


def to_batches(
    records: Sequence[NewRecord | Value],
    *,
    now_ms: int,
    codec: int = NONE,
    max_bytes: int = DEFAULT_BATCH_BYTES,
) -> bytes:
    """The body of a raw produce request: one or more record batches.

    Records without a timestamp get `now_ms`. Raises RecordTooLarge.
    """
    new = [record if isinstance(record, NewRecord) else NewRecord(record) for record in records]
    cut = encode_batches(
        [_bytes(record.value) for record in new],
        timestamps=[now_ms if record.timestamp is None else record.timestamp for record in new],
        keys=[_bytes(record.key) for record in new]
        if any(r.key is not None for r in new)
        else None,
        headers=[record.headers for record in new] if any(r.headers for r in new) else None,
        codec=codec,
        max_bytes=max_bytes,
    )
    return b"".join(encoded.batch for encoded in cut)


def _bytes(content: Value) -> bytes | None:
    if isinstance(content, str):
        return content.encode()
    return None if content is None else bytes(content)


def decode_fetched(
    batches: bytes, *, from_offset: int = 0, end_offset: int | None = None
) -> list[Record]:
    """The records of whole batches with from_offset <= offset < end_offset; checksums are checked.

    Control batches are stepped over. Raises CorruptBatch.
    """
    found: list[Record] = []
    for header in iter_headers(batches):
        if header.last_offset < from_offset or header.is_control:
            continue
        if end_offset is not None and header.base_offset >= end_offset:
            break
        check_crc(batches, header)
        columns = decode_columns(batches, header, from_offset=from_offset, end_offset=end_offset)
        found.extend(map(Record, *columns))
    return found
