"""Records as a file: what a search found, streamed while it is found again.

* A piece of a log at a time is encoded, in the searches' threads; Parquet collects a row group.
* What a spreadsheet or a table cannot tell apart stays apart: bytes that are not UTF-8 are base64
  in a column of their own in CSV, and bytes in Parquet, whose columns are those of Spark's source.
* Parquet needs pyarrow, which is not part of the base install.
"""

from __future__ import annotations

import csv
import io
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec
from msgspec import UNSET

from tierlog.api.console.rendering import has_parquet, moment
from tierlog.api.console.search import Piece
from tierlog.api.http import strict_json
from tierlog.api.http.fetch.record_json import lines_of
from tierlog.record_format.decode import Columns

if TYPE_CHECKING:
    import pyarrow as pa

FileFormat = Literal["ndjson", "csv", "parquet"]
MEDIA_TYPES: Final[Mapping[FileFormat, bytes]] = {
    "ndjson": b"application/x-ndjson",
    "csv": b"text/csv; charset=utf-8",
    "parquet": b"application/vnd.apache.parquet",
}
NEEDS_ARROW: Final = "Parquet needs pyarrow: pip install 'tierlog[arrow]'"
ROW_GROUP_ROWS: Final = 20_000
ROW_GROUP_BYTES: Final = 8 << 20
_CSV_COLUMNS: Final = (
    "partition",
    "offset",
    "timestamp",
    "key",
    "key_base64",
    "value",
    "value_base64",
    "headers",
)
_ENCODER: Final = msgspec.json.Encoder()


class RecordFile(Protocol):
    """Encodes in order; each call returns the next bytes of the file. Blocks."""

    def add(self, piece: Piece) -> bytes: ...
    def end(self) -> bytes: ...


def record_file(file_format: FileFormat, *, topic: str) -> RecordFile:
    """Raises InvalidRequest if Parquet is not installed. Imports pyarrow, so it may block."""
    if file_format == "parquet" and not has_parquet():
        strict_json.refuse_field("format", NEEDS_ARROW)
    made: Mapping[FileFormat, Callable[[], RecordFile]] = {
        "ndjson": _Lines,
        "csv": _Table,
        "parquet": lambda: _Parquet(topic),
    }
    return made[file_format]()


class _Lines:
    """As the API's NDJSON with `encoding=json`."""

    def add(self, piece: Piece) -> bytes:
        return b"".join(
            _ENCODER.encode_lines(list(lines_of(columns, piece.place.partition, "json")))
            for columns in piece.batches
        )

    def end(self) -> bytes:
        return b""


class _Table:
    def __init__(self) -> None:
        self._text = io.StringIO()
        self._rows = csv.writer(self._text)
        self._rows.writerow(_CSV_COLUMNS)

    def add(self, piece: Piece) -> bytes:
        for columns in piece.batches:
            self._rows.writerows(_rows(columns, piece.place.partition))
        return self._taken()

    def end(self) -> bytes:
        return self._taken()

    def _taken(self) -> bytes:
        text = self._text.getvalue()
        self._text.seek(0)
        self._text.truncate()
        return text.encode()


def _rows(columns: Columns, partition: int) -> Iterator[tuple[object, ...]]:
    for line in lines_of(columns, partition, "utf8"):
        fields = [_text_and_base64(line.key, line.key_base64)]
        fields.append(_text_and_base64(line.value, line.value_base64))
        (key, key_base64), (value, value_base64) = fields
        headers = _ENCODER.encode(line.headers).decode() if line.headers else ""
        time = moment(line.timestamp).replace(" ", "T") if line.timestamp >= 0 else ""
        at = (line.partition, line.offset, time)
        yield (*at, key, key_base64, value, value_base64, headers)


def _text_and_base64(text: object, data: object) -> tuple[object, str]:
    encoded = b2a_base64(data, newline=False).decode() if isinstance(data, bytes) else ""
    return ("" if text is None or text is UNSET else text), encoded


class _Parquet:
    """A row group is written once it is large enough."""

    def __init__(self, topic: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._topic, self._pa = topic, pa
        header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
        self._schema = pa.schema(
            [
                ("key", pa.binary()),
                ("value", pa.binary()),
                ("topic", pa.string()),
                ("partition", pa.int32()),
                ("offset", pa.int64()),
                ("timestamp", pa.timestamp("ms", tz="UTC")),
                ("headers", pa.list_(header)),
            ]
        )
        self._sink = _Sink()
        self._writer = pq.ParquetWriter(self._sink, self._schema, compression="zstd")
        self._tables: list[pa.Table] = []

    def add(self, piece: Piece) -> bytes:
        for columns in piece.batches:
            count = len(columns.offsets)
            headers = [[{"key": k, "value": v} for k, v in one] for one in columns.headers]
            values = (
                columns.keys,
                columns.values,
                [self._topic] * count,
                [piece.place.partition] * count,
                columns.offsets,
                columns.timestamps,
                headers,
            )
            arrays = map(self._pa.array, values, self._schema.types)
            self._tables.append(self._pa.Table.from_arrays(list(arrays), schema=self._schema))
        rows = sum(one.num_rows for one in self._tables)
        if rows >= ROW_GROUP_ROWS or sum(one.nbytes for one in self._tables) >= ROW_GROUP_BYTES:
            self._write_group()
        return self._sink.taken()

    def end(self) -> bytes:
        if self._tables:
            self._write_group()
        self._writer.close()
        return self._sink.taken()

    def _write_group(self) -> None:
        self._writer.write_table(self._pa.concat_tables(self._tables))
        self._tables.clear()


class _Sink(io.RawIOBase):
    """Holds what was written and is not taken yet."""

    def __init__(self) -> None:
        self._held, self._before = bytearray(), 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._before + len(self._held)

    def write(self, data: Any, /) -> int:
        self._held += data
        return len(data)

    def taken(self) -> bytes:
        held = bytes(self._held)
        self._before += len(held)
        self._held.clear()
        return held
