"""The input of `tierlog produce`: files and pipes as records, and records as requests.

* The input is streamed: a pipe may never end.
* Invalid input is reported with its line or row; the records before it in the same request are not
  sent. The broker's errors, too, name records, or lines, by their number in the whole input.
* Envelopes are sent as lines: the broker parses and validates them.
* A request is sent when it is full, or when its first record has waited `LINGER_S` and no more
  input is available: typed lines, or a followed log, are not delayed to fill a request.
"""

from __future__ import annotations

import csv
import io
import re
import select
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from tierlog.client.records import NewRecord
from tierlog.record_format.errors import InvalidRequest, TierlogError, did_you_mean
from tierlog.record_format.workarounds import decode_json

MAX_LINE_BYTES: Final = 64 << 20


class Format(StrEnum):
    """How the input is split into records."""

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
    """From the file's suffix; lines if it is unknown."""
    return _BY_SUFFIX.get(file.suffix.lower(), Format.LINES) if file else Format.LINES


def lines(source: IO[bytes], *, key_separator: str | None = None) -> Iterator[NewRecord]:
    """One record per line, without its line break; the first `key_separator` ends its key."""
    separator = None if key_separator is None else key_separator.encode()
    for number, line in _lines(source):
        if separator is None:
            yield NewRecord(line)
            continue
        key, found, value = line.partition(separator)
        if not found:
            raise InvalidRequest(f"line {number}: no key separator {key_separator!r}")
        yield NewRecord(value, key=key)


def ndjson(source: IO[bytes]) -> Iterator[NewRecord]:
    """One JSON value per line, kept as its source text; blank lines are skipped."""
    for number, line in full_lines(source):
        _check_json(line, number)
        yield NewRecord(line.strip())


def full_lines(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines, with their numbers in the input. A byte order mark is skipped."""
    for number, line in _lines(source):
        text = line.removeprefix(BOM_UTF8) if number == 1 else line
        if text.strip():
            yield number, text


Key = bytes | str | None


def plain_key(value: Any) -> Key:
    """Of a cell that is text, bytes or an integer. Raises TypeError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None or isinstance(value, (str, bytes)):
        return value
    raise TypeError(f"a key must be text, bytes or an integer, not {type(value).__name__}")


def json_key(value: Any) -> Key:
    """Of any cell: its JSON."""
    return None if value is None else msgspec.json.encode(value, enc_hook=_text)


class Columns(NamedTuple):
    """Where keys come from: a column, or for lines a separator; and `delimiter`, between cells."""

    key: str | None = None
    as_key: Callable[[Any], Key] = plain_key
    delimiter: str = ","

    def key_of(self, row: Mapping[str, Any]) -> Key:
        try:
            return None if self.key is None else self.as_key(row[self.key])
        except TypeError as error:
            raise InvalidRequest(f"column {self.key!r}: {error}") from error


def csv_rows(source: IO[bytes], columns: Columns) -> Iterator[NewRecord]:
    """One JSON object per row, with the names of the first row; cells are text, empty cells null.
    The cell of the key's column is also the key.

    A byte order mark, which spreadsheets write, is skipped.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    # What is not UTF-8 is refused by the encoder of its row, since a decoder reads ahead.
    text = io.TextIOWrapper(source, "utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.DictReader(text, strict=True, delimiter=columns.delimiter)
    try:
        msgspec.json.encode(rows.fieldnames)
        _check_names(rows.fieldnames or (), columns.key)
        for row in rows:
            if None in row:
                raise InvalidRequest(
                    f"line {rows.reader.line_num}: more cells than the first row has columns"
                )
            cells = {name: cell or None for name, cell in row.items()}
            yield NewRecord(msgspec.json.encode(cells), key=columns.key_of(cells))
    except csv.Error as error:
        raise InvalidRequest(f"line {rows.reader.line_num}: {error}") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"line {rows.reader.line_num}: not UTF-8") from error


def parquet_rows(file: Path, columns: Columns) -> Iterator[NewRecord]:
    """One JSON object per row; times as ISO 8601 text, bytes as base64, NaN as null. The value of
    the key's column is also the key.
    """
    from pyarrow import parquet

    try:
        reader = parquet.ParquetFile(file)
        _check_names(reader.schema_arrow.names, columns.key)
        for batch in reader.iter_batches():
            for row in batch.to_pylist():
                value = msgspec.json.encode(row, enc_hook=_text)
                yield NewRecord(value, key=columns.key_of(row))
    except (ValueError, OverflowError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise InvalidRequest(f"{file}: {error}") from error
    except LookupError as error:  # from pytz or zoneinfo, for an unknown name
        raise InvalidRequest(f"{file}: unknown time zone: {error}") from error


def _check_names(names: Sequence[str], key_column: str | None) -> None:
    """Refuses duplicate names: a JSON object would keep only one of the columns."""
    if key_column is not None and key_column not in names:
        hint = did_you_mean(key_column, names) or f"; the columns are {', '.join(names)}"
        raise InvalidRequest(f"no column {key_column!r}{hint}")
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise InvalidRequest(f"more than one column is named {duplicates[0]!r}")


def _text(value: Any) -> str:
    """A pyarrow value that JSON lacks; with pandas installed, nanoseconds are of its types."""
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
        decode_json(line, msgspec.Raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"line {number}: {error}") from error


LINGER_S: Final = 0.1
_NUMBER_IN_REQUEST: Final = re.compile(r"records\[(\d+)\]|\bline (\d+)(?=[.:])")

Item = NewRecord | bytes


class RequestBatcher:
    """Buffers records, or lines that the broker parses, for `send`."""

    def __init__(
        self, send: Callable[[list[Item]], None], *, max_records: int, max_bytes: int
    ) -> None:
        self._send = send
        self._max_records, self._max_bytes = max_records, max_bytes
        self._items: list[Item] = []
        self._numbers: list[int] = []
        self._buffered_bytes = 0
        self._due_s = 0.0

    def add_item(self, number: int, item: Item) -> None:
        """`number`: the item's position in the whole input, from 1."""
        if not self._items:
            self._due_s = time.monotonic() + LINGER_S
        self._items.append(item)
        self._numbers.append(number)
        parts = (item,) if isinstance(item, bytes) else item[:2]
        self._buffered_bytes += 64 + sum(len(one) for one in parts if isinstance(one, (bytes, str)))
        if len(self._items) >= self._max_records or self._buffered_bytes >= self._max_bytes:
            self.send_items()

    def send_items(self) -> None:
        """Send everything that is buffered. Raises the broker's error."""
        items, self._items, self._buffered_bytes = self._items, [], 0
        numbers, self._numbers = self._numbers, []
        if not items:
            return
        try:
            self._send(items)
        except TierlogError as error:
            message = _NUMBER_IN_REQUEST.sub(partial(_number_in_input, numbers), str(error))
            error.args = (message, *error.args[1:])
            raise

    def remaining_linger_ms(self) -> float | None:
        """How long the buffered items may still wait for more; None if there are none."""
        return max(0.0, self._due_s - time.monotonic()) * 1000 if self._items else None


def _number_in_input(numbers: Sequence[int], found: re.Match[str]) -> str:
    """Unchanged if the request has no such record: the message may quote the name of a topic."""
    record_index, line_number = found.groups()
    index = int(line_number) - 1 if record_index is None else int(record_index)
    if not 0 <= index < len(numbers):
        return found[0]
    return f"{'line' if record_index is None else 'record'} {numbers[index]}"


class LiveInput(io.RawIOBase):
    """A file, a pipe or a terminal. If no input is available, the batcher sends when it is due."""

    def __init__(self, source: io.FileIO, batcher: RequestBatcher) -> None:
        self._source, self._batcher = source, batcher
        self._poll = select.poll()  # select() does not support descriptors above 1023
        self._poll.register(source, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        # Also with an empty buffer: a non-blocking pipe without input would seem to be at its end.
        while not self._poll.poll(self._batcher.remaining_linger_ms()):
            self._batcher.send_items()
        return self._source.readinto(buffer)

    def close(self) -> None:
        self._source.close()
        super().close()
