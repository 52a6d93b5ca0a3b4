"""Files and pipes as records, for `tierlog produce`: one function a format.

* Nothing is read whole: a pipe may never end.
* What is wrong is said with its line or row, before it is sent; what was sent before it stays.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from record_format import typed_json
from record_format.errors import InvalidRequest
from tierlog.client.records import NewRecord

MAX_LINE_BYTES: Final = 64 << 20


class Format(StrEnum):
    """How the input is cut into records."""

    LINES = "lines"
    NDJSON = "ndjson"
    ENVELOPE = "envelope"
    CSV = "csv"
    PARQUET = "parquet"
    BATCHES = "batches"


_BY_SUFFIX: Final = {
    ".csv": Format.CSV,
    ".parquet": Format.PARQUET,
    ".ndjson": Format.NDJSON,
    ".jsonl": Format.NDJSON,
}


def format_of(file: Path | None) -> Format:
    """By the file's name; lines where that says nothing."""
    return _BY_SUFFIX.get(file.suffix.lower(), Format.LINES) if file else Format.LINES


def lines(source: IO[bytes], *, key_separator: str | None = None) -> Iterator[NewRecord]:
    """A record a line, without its line break; before the first `key_separator` is its key."""
    separator = None if key_separator is None else key_separator.encode()
    for number, line in _lines(source):
        if separator is None:
            yield NewRecord(line)
            continue
        key, found, value = line.partition(separator)
        if not found:
            raise InvalidRequest(f"line {number}: no {key_separator!r} between key and value")
        yield NewRecord(value, key=key)


def ndjson(source: IO[bytes]) -> Iterator[NewRecord]:
    """A JSON value a line, kept by its source text; blank lines are skipped."""
    for number, line in _lines(source):
        if line.strip():
            _check_json(line, number)
            yield NewRecord(line.strip())


def envelopes(source: IO[bytes]) -> Iterator[NewRecord]:
    """A record object a line: key, value, headers, timestamp, partition, as the API has them."""
    for number, line in _lines(source):
        if line.strip():
            yield _enveloped(line, number)


def csv_rows(source: IO[bytes]) -> Iterator[NewRecord]:
    """A JSON object a row, all text, named by the first row; empty cells are null.

    A byte order mark, which spreadsheets write, is no part of the first name.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    text = io.TextIOWrapper(source, "utf-8-sig", newline="")
    rows = csv.DictReader(text, strict=True)
    try:
        _check_names(rows.fieldnames or ())
        for row in rows:
            if None in row:
                raise InvalidRequest(f"line {rows.line_num}: more cells than the first row names")
            yield NewRecord(msgspec.json.encode({name: cell or None for name, cell in row.items()}))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"line {rows.line_num}: {error}") from error


def parquet_rows(file: Path) -> Iterator[NewRecord]:
    """A JSON object a row; times as ISO 8601 text, bytes as base64, NaN as null."""
    from pyarrow import parquet

    try:
        reader = parquet.ParquetFile(file)
        _check_names(reader.schema_arrow.names)
        for batch in reader.iter_batches():
            for row in batch.to_pylist():
                yield NewRecord(msgspec.json.encode(row, enc_hook=_text))
    except (ValueError, OverflowError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise InvalidRequest(f"{file}: {error}") from error


def _check_names(names: Iterable[str]) -> None:
    """Of two columns of a name an object keeps one."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidRequest(f"more than one column is called {twice[0]!r}")


def _text(value: Any) -> str:
    """What pyarrow gives that JSON does not know: nanoseconds, by pandas where that is there."""
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


def _lines(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := source.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise InvalidRequest(f"line {number}: longer than {MAX_LINE_BYTES} bytes")
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _check_json(line: bytes, number: int) -> None:
    try:
        typed_json.decode(line, msgspec.Raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"line {number}: {error}") from error


_ABSENT: Final = msgspec.Raw(b"null")


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    value: str | None = None
    value_base64: bytes | None = None


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    key: msgspec.Raw = _ABSENT
    key_base64: bytes | None = None
    value: msgspec.Raw = _ABSENT
    value_base64: bytes | None = None
    headers: list[_Header] | dict[str, str | None] = []
    timestamp: int | str | None = None
    partition: int | None = None


def _enveloped(line: bytes, number: int) -> NewRecord:
    try:
        return _record_of(typed_json.decode(line, _Envelope))
    except (msgspec.DecodeError, InvalidRequest) as error:
        raise InvalidRequest(f"line {number}: {error}") from error


def _record_of(found: _Envelope) -> NewRecord:
    from tierlog.client.times import time_of_record

    return NewRecord(
        _either("value", _text_or_source(found.value), found.value_base64),
        key=_either("key", _text_or_source(found.key), found.key_base64),
        timestamp=None if found.timestamp is None else time_of_record(found.timestamp),
        headers=_headers(found.headers),
        partition=found.partition,
    )


def _either(name: str, plain: bytes | None, encoded: bytes | None) -> bytes | None:
    if plain is not None and encoded is not None:
        raise InvalidRequest(f"give {name} or {name}_base64, not both")
    return plain if encoded is None else encoded


def _text_or_source(raw: msgspec.Raw) -> bytes | None:
    """The bytes that the API makes of a JSON value: a string's text, else its source."""
    source = bytes(raw).strip()
    if source == b"null":
        return None
    return typed_json.decode(source, str).encode() if source[:1] == b'"' else source


def _headers(
    found: list[_Header] | dict[str, str | None],
) -> tuple[tuple[str, bytes | None], ...]:
    if isinstance(found, dict):
        found = [_Header(name, value) for name, value in found.items()]
    return tuple(
        (one.name, _either("value", _encoded(one.value), one.value_base64)) for one in found
    )


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


READERS: Final[dict[Format, Callable[[IO[bytes]], Iterator[NewRecord]]]] = {
    Format.NDJSON: ndjson,
    Format.ENVELOPE: envelopes,
    Format.CSV: csv_rows,
}
