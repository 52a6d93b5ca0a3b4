"""The files of a step: its rows as a table of mode raw or json has them, and what does not fit.

* An attempt begins with the first row.
* Columns that the table lacks are added to it by a commit of their own, as soon as there is a row
  that has them. Without that row they do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table

from tierlog.tables.attempts import Attempt, abandon_attempt, begin_attempt
from tierlog.tables.catalog import add_columns, time_column
from tierlog.tables.data_files import DayFiles
from tierlog.tables.json_columns import Fields, arrow_type, columns_of
from tierlog.tables.json_rows import BATCH_BYTES, decode_values


class StepFiles:
    """`errors` is the table of errors of one of mode json."""

    def __init__(self, table: Table, errors: Table | None) -> None:
        self.table, self._errors_table = table, errors
        self.attempt: Attempt | None = None

    def add_rows(self, batch: pa.RecordBatch) -> None:
        """Raises OSError, TableConflict, CommitUnanswered."""
        if self.attempt is None and batch.num_rows:
            self._begin()
        if self._errors_table is None:
            self._rows.add_rows(_with_all_headers(batch))
            return
        for part in _parts(batch):
            self._add_json(part)

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
    def is_json(self) -> bool:
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
        self._rows = self._files_of(self.table)
        self._errors = self._files_of(self._errors_table or self.table)
        self._columns = columns_of(self.table.schema().as_struct())

    def _files_of(self, table: Table) -> DayFiles:
        assert self.attempt is not None
        schema, time = schema_to_pyarrow(table.schema()), time_column(table)
        return DayFiles(table.io, self.attempt.folder(table), schema, time=time)

    def _add_json(self, batch: pa.RecordBatch) -> None:
        decoded = decode_values(batch.column("value"), self._columns)
        if decoded.columns is not self._columns:
            self._add_columns(decoded.columns)
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
            self._rows.add_rows(pa.record_batch({one: own[one] for one in self._names}))

    def _add_columns(self, columns: Fields) -> None:
        self.table = add_columns(self.table, arrow_type(columns))
        self._columns = columns_of(self.table.schema().as_struct())
        self._rows.change_schema(schema_to_pyarrow(self.table.schema()))

    @property
    def _names(self) -> list[str]:
        return [one.name for one in self.table.schema().fields]


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
