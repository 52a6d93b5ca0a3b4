"""The files of a step: its rows as a table of its mode has them, and what does not fit.

* An attempt begins with the first row.
* What the rows need of columns, the commit of their files adds to the table: rows that follow are
  read with those, and no other reader sees columns without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table
from pyiceberg.types import StructType

from tierlog.record_format.errors import ColumnsTooLarge
from tierlog.spark_reader.options import ReadOptions
from tierlog.tables.attempts import Attempt, abandon_attempt, begin_attempt
from tierlog.tables.catalog import MODE, SCHEMA_MODE, Change, time_column
from tierlog.tables.data_files import DayFiles
from tierlog.tables.json_columns import arrow_type, columns_of
from tierlog.tables.json_rows import BATCH_BYTES, decode_values
from tierlog.tables.schema_rows import Rows, SchemaRows


class StepFiles:
    """`errors` is the table of errors of one that has columns; `options` say where schemas are."""

    def __init__(self, table: Table, errors: Table | None, options: ReadOptions) -> None:
        self.table, self._errors_table, self._options = table, errors, options
        self.attempt: Attempt | None = None

    def add_rows(self, batch: pa.RecordBatch) -> None:
        """Raises OSError, and what the registry raises."""
        if self.attempt is None and batch.num_rows:
            self._begin()
        if self._errors_table is None:
            self._rows.add_rows(_with_all_headers(batch))
            return
        for part in _parts(batch):
            self._add_columns(part)

    def close(self) -> None:
        if self.attempt is not None:
            self._rows.close()
            self._errors.close()

    def abandon(self) -> None:
        """After a failure: nothing of it was committed."""
        if self.attempt is not None:
            self._rows.discard()
            self._errors.discard()
            abandon_attempt(self.table, self.attempt, errors=self._errors_table)

    @property
    def has_columns(self) -> bool:
        return self._errors_table is not None

    @property
    def paths(self) -> list[str]:
        return self._rows.paths

    @property
    def records(self) -> int:
        return 0 if self.attempt is None else self._rows.rows

    @property
    def errors(self) -> int:
        return 0 if self.attempt is None else self._errors.rows

    def _begin(self) -> None:
        self.attempt = begin_attempt(self.table)
        self.change = Change(self.table)
        self._rows = self._files_of(self.table)
        self._errors = self._files_of(self._errors_table or self.table)
        self._decode: Callable[[pa.BinaryArray, StructType], Rows] = _json_rows
        if self.table.properties[MODE] == SCHEMA_MODE:
            is_new = self.table.current_snapshot() is None
            self._decode = SchemaRows(self._options, is_new=is_new).decode

    def _files_of(self, table: Table) -> DayFiles:
        assert self.attempt is not None
        schema, time = schema_to_pyarrow(table.schema()), time_column(table)
        return DayFiles(table.io, self.attempt.folder(table), schema, time=time)

    def _add_columns(self, batch: pa.RecordBatch) -> None:
        try:
            decoded = self._decode(batch.column("value"), self.change.schema.as_struct())
        except ColumnsTooLarge as error:
            if (half := len(batch) // 2) > 0:
                self._add_columns(batch.slice(0, half))
                self._add_columns(batch.slice(half))
                return
            decoded = Rows(None, pa.array([], pa.struct([])), {0: error.detail})
        if decoded.added is not None:
            self.change.change_columns(decoded.added)
            self._rows.change_schema(schema_to_pyarrow(self.change.schema))
        fits = pa.array([place not in decoded.reasons for place in range(len(batch))])
        if decoded.reasons:
            reasons = [decoded.reasons[place] for place in sorted(decoded.reasons)]
            errors = _with_all_headers(batch.filter(pc.invert(fits)))
            self._errors.add_rows(errors.append_column("reason", _texts(reasons)))
            batch = batch.filter(fits)
        if len(batch):
            batch = _with_all_headers(batch)
            own = {f"_{one.name}": batch.column(one.name) for one in batch.schema}
            names = [one.name for one in decoded.rows.type]
            own.update(zip(names, decoded.rows.flatten(), strict=True))
            columns = [one.name for one in self.change.schema.fields]
            self._rows.add_rows(pa.record_batch({one: own[one] for one in columns}))


def _json_rows(values: pa.BinaryArray, struct: StructType) -> Rows:
    known = columns_of(struct)
    columns, rows, reasons = decode_values(values, known)
    return Rows(None if columns is known else arrow_type(columns), rows, reasons)


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Of about `BATCH_BYTES` of values."""
    sizes = pc.fill_null(pc.binary_length(batch.column("value")), 0)
    numbers = pc.divide(pc.cumulative_sum(sizes.cast(pa.int64())), BATCH_BYTES)
    start = 0
    for count in pc.value_counts(numbers).field("counts").to_pylist():
        yield batch.slice(start, count)
        start += count


def _with_all_headers(rows: pa.RecordBatch) -> pa.RecordBatch:
    """With an empty list where there is no header: PyIceberg reads null lists of structs as that,
    and others do not.
    """
    place = rows.schema.get_field_index("headers")
    headers = rows.column(place)
    lists = pa.ListArray.from_arrays(headers.offsets, headers.values)
    return rows.set_column(place, "headers", lists)


def _texts(reasons: list[str]) -> pa.Array:
    """Names of fields may have what UTF-8 cannot say."""
    return pa.array([one.encode(errors="replace").decode() for one in reasons], pa.string())
