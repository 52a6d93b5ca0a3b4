"""The files of a step, from the beginning of their attempt to its commit, and who writes them.

* An attempt begins with the first row, or before the first task that may write one.
* What the rows need of columns, the commit of their files adds to the table: rows that follow are
  read with those, and no other reader sees columns without rows.
* A writer reads a step's records and writes its files: in this process, or on a cluster
  (`spark_writer.py`). It commits nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table

from tierlog.record_format.arrow_schema import SCHEMA
from tierlog.spark_reader.arrow_dataset import READAHEAD_BYTES, THREADS_MAX, Ahead, TopicDataset
from tierlog.spark_reader.options import ReadOptions
from tierlog.spark_reader.splits import OffsetRange, Warn
from tierlog.tables.attempts import Attempt, abandon_attempt, begin_attempt
from tierlog.tables.catalog import MODE, RAW, SCHEMA_MODE, Change, time_column
from tierlog.tables.data_files import DayFiles
from tierlog.tables.json_columns import columns_of
from tierlog.tables.row_files import Decode, RowFiles, RowForm, decode_json
from tierlog.tables.schema_rows import SchemaRows

ROWS: Final = pa.schema([SCHEMA.field(field.name) for field in RAW.fields])
"""What is read of records."""


class StepFiles:
    """`errors` is the table of errors of one that has columns; `options` say where schemas are."""

    def __init__(self, table: Table, errors: Table | None, options: ReadOptions) -> None:
        self.table, self._errors_table, self.options = table, errors, options
        self.attempt: Attempt | None = None

    def begin(self) -> Attempt:
        """Before the first file."""
        attempt, beside = begin_attempt(self.table), self._errors_table or self.table
        self.change = Change(self.table)
        form = self.form()
        rows = DayFiles(self.table.io, attempt.folder(self.table), form.schema, time=form.time)
        errors = DayFiles(beside.io, attempt.folder(beside), form.errors)
        self.files = RowFiles(form, rows, errors, self.change_columns)
        self.attempt = attempt
        return attempt

    def form(self) -> RowForm:
        """Of rows with the columns so far."""
        schema, beside = self.change.schema, self._errors_table or self.table
        return RowForm(
            schema_to_pyarrow(schema),
            time_column(self.table),
            columns_of(schema),
            schema_to_pyarrow(beside.schema()),
            self._decode() if self.has_columns else None,
        )

    def _decode(self) -> Decode:
        if self.table.properties[MODE] == SCHEMA_MODE:
            return SchemaRows(self.options, is_new=self.is_new).decode
        return decode_json

    def change_columns(self, columns: pa.StructType) -> pa.Schema:
        """For the rows that follow: their schema."""
        self.change.change_columns(columns)
        return schema_to_pyarrow(self.change.schema)

    def add_rows(self, batch: pa.RecordBatch) -> None:
        """Raises OSError, and what the registry raises."""
        if self.attempt is None and batch.num_rows:
            self.begin()
        self.files.add_rows(batch)

    def add_files(self, paths: Sequence[str], records: int) -> None:
        """Of rows, in the attempt's folder."""
        self.files.rows.paths += paths
        self.files.rows.rows += records

    def add_errors(self, batch: pa.RecordBatch) -> None:
        self.files.errors.add_rows(batch)

    def close(self) -> None:
        if self.attempt is not None:
            self.files.close()

    def abandon(self) -> None:
        """Nothing of it was committed, or will be."""
        if self.attempt is not None:
            self.files.discard()
            abandon_attempt(self.table, self.attempt, errors=self._errors_table)
            self.attempt = None

    @property
    def is_new(self) -> bool:
        """The table has no records yet."""
        return self.table.current_snapshot() is None

    @property
    def has_columns(self) -> bool:
        return self._errors_table is not None

    @property
    def paths(self) -> list[str]:
        return self.files.rows.paths

    @property
    def records(self) -> int:
        return 0 if self.attempt is None else self.files.rows.rows

    @property
    def errors(self) -> int:
        return 0 if self.attempt is None else self.files.errors.rows


class StepWriter(Protocol):
    def write_step(self, files: StepFiles, step: Sequence[OffsetRange], log: Warn) -> None:
        """Read the ranges of a step, and write their rows; without any, no attempt is left. `log`
        is told of what is missing. Raises DataLoss, the errors of reading, and OSError.
        """


@dataclass(frozen=True)
class LocalWriter:
    """In this process. `show` is told how many records a step has so far."""

    show: Callable[[int], None] = lambda _: None

    def write_step(self, files: StepFiles, step: Sequence[OffsetRange], log: Warn) -> None:
        scan = TopicDataset(files.options, ROWS, step, ahead=_ahead(), warn=log).scanner()
        with closing(scan.to_batches()) as batches:
            for batch in batches:
                files.add_rows(batch)
                self.show(files.records + files.errors)
        files.close()


def _ahead() -> Ahead:
    return Ahead(min(THREADS_MAX, os.cpu_count() or 1), READAHEAD_BYTES)
