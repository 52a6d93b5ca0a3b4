"""`tierlog sql`: topics as the tables of DuckDB.

* A table is a topic's `tierlog.dataset`, of the offsets that exist when the query begins.
* Without `--server`, only the bucket is read.
* What the scans of a query would fetch together is limited, and known before they fetch it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from decimal import Decimal
from itertools import islice
from typing import Annotated, Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import typer

from tierlog.cli.on_spark import LogOptions, reads
from tierlog.cli.options import OutputOption, size_of
from tierlog.cli.output import (
    Output,
    for_stdout,
    format_size,
    note,
    print_table,
    record_counter,
    warn,
    write,
)
from tierlog.record_format.errors import InvalidRequest, TierlogError, TooLarge
from tierlog.spark_reader.arrow_dataset import TopicDataset, TopicScanner, dataset

ROWS_AT_ONCE: Final = 1000
ROWS_ON_A_TERMINAL: Final = 1000

_UNKNOWN_TABLE: Final = re.compile(r"Table with name (.+?) does not exist!")

Row = tuple[object, ...]


class Scans:
    """The scans of one query: what they fetch together, and what failed in them."""

    def __init__(self, limit_bytes: int, show: Callable[[int], None]) -> None:
        self._limit_bytes, self._show = limit_bytes, show
        self._planned_bytes = self._rows = 0
        self.failure: TierlogError | None = None  # DuckDB keeps no more than an error's text

    def begin(self, topic: TopicDataset, columns: Any, where: pc.Expression | None) -> TopicScanner:
        """Plan a scan. Raises TooLarge if the query would fetch more than its limit."""
        scanner = topic.scanner(columns=columns, filter=where)
        self._planned_bytes += scanner.planned_bytes
        if self._planned_bytes > self._limit_bytes:
            raise TooLarge(
                f"the query reads {format_size(self._planned_bytes)} of the log or more, and may "
                f"read {format_size(self._limit_bytes)} (--max-bytes); a condition on partition, "
                '"offset" or timestamp reads less',
                size_bytes=self._planned_bytes,
                limit_bytes=self._limit_bytes,
            )
        return scanner

    def read_batches(self, scanner: TopicScanner) -> Iterator[pa.RecordBatch]:
        for batch in scanner.to_batches():
            self._rows += batch.num_rows
            self._show(self._rows)
            yield batch


class Table(ds.InMemoryDataset):  # type: ignore[misc]
    """A topic as DuckDB sees it: it asks for a scanner, and that one for a reader."""

    def __init__(self, topic: TopicDataset, scans: Scans) -> None:
        super().__init__([], topic.schema)
        self._topic, self._scans = topic, scans

    def scanner(self, columns: Any = None, filter: Any = None, **_: object) -> TableScanner:  # noqa: A002
        try:
            return TableScanner(self._scans.begin(self._topic, columns, filter), self._scans)
        except TierlogError as error:
            self._scans.failure = error
            raise


class TableScanner:
    def __init__(self, scanner: TopicScanner, scans: Scans) -> None:
        self._scanner, self._scans = scanner, scans

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._scanner.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._scans.read_batches(self._scanner)
        except TierlogError as error:
            self._scans.failure = error
            raise


@reads(LogOptions)
def sql(
    log: LogOptions,
    query: Annotated[
        str,
        typer.Argument(
            help="A statement of DuckDB's SQL, whose tables are topics. Quote the column "
            '"offset", and topics with a dot or dash: select "offset" from "my-topic".',
            show_default=False,
        ),
    ],
    *,
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that a query may fetch of the log.")
    ] = "1GB",
    output: OutputOption = Output.AUTO,
) -> None:
    """Query topics as tables, with the columns partition, offset, timestamp, key, value, topic,
    timestampType and headers. As JSON, one line per row.
    """
    limit_bytes = size_of("--max-bytes", max_bytes)
    given: dict[str, Any] = log.given(includeHeaders="true")
    with record_counter("reading") as show, closing(duckdb.connect()) as connection:
        scans = Scans(limit_bytes, show)
        try:
            connection.execute("set timezone = 'UTC'")
            statement = _statement(connection, query)
            known: dict[str, Table] = {}
            while (name := _execute(connection, statement, known)) is not None:
                known[name] = Table(dataset(name, on_data_loss=warn, **given), scans)
                connection.register(name, known[name])
            columns = [str(column[0]) for column in connection.description or ()]
            _print(columns, _rows(connection), output)
        except duckdb.Error as error:
            raise scans.failure or InvalidRequest(str(error)) from None


def _statement(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.Statement:
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        raise InvalidRequest(f"there are {len(statements)} statements, where one is expected")
    return statements[0]


def _execute(
    connection: duckdb.DuckDBPyConnection, statement: duckdb.Statement, known: Container[str]
) -> str | None:
    """Begin to execute; or the name of a table that is not known yet, which is a topic's. Files are
    known to DuckDB.
    """
    try:
        connection.execute(statement)
    except duckdb.CatalogException as error:
        unknown = _UNKNOWN_TABLE.search(str(error))
        if unknown is None or unknown[1] in known:  # in a schema that there is not
            raise
        return unknown[1]
    return None


def _rows(connection: duckdb.DuckDBPyConnection) -> Iterator[Row]:
    while rows := connection.fetchmany(ROWS_AT_ONCE):
        yield from rows


def _print(columns: Sequence[str], rows: Iterator[Row], output: Output) -> None:
    if output.is_json:
        safe = for_stdout()
        for row in rows:
            document = dict(zip(columns, map(_plain, row), strict=True))
            write(safe(json.dumps(document, ensure_ascii=False, default=str).encode() + b"\n"))
        return
    shown = [[_cell(value) for value in row] for row in islice(rows, ROWS_ON_A_TERMINAL)]
    print_table("", columns, shown)
    if next(rows, None) is not None:
        note(f"the first {ROWS_ON_A_TERMINAL} rows; --output json prints all")


def _plain(value: object) -> object:
    """A value as JSON has it: bytes as text, with escapes where that is no UTF-8."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode(errors="backslashreplace")
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    return value


def _cell(value: object) -> object:
    plain = _plain(value)
    if isinstance(plain, (dict, list)):
        return json.dumps(plain, ensure_ascii=False, default=str)
    return plain
