"""Rows of a topic as files of its table, in the process that reads them: as columns by the table's
mode, with what does not fit in files beside them.

* It knows the form of the rows, which may be pickled, and neither a catalog nor a commit: an
  executor of Spark's needs pyarrow and PyIceberg for it.
* Who owns the files says what becomes of columns that the rows need: the schema to go on with, or
  nothing, if that is decided elsewhere. Then columns are learned, and no row is written from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tierlog.record_format.errors import ColumnsTooLarge
from tierlog.tables.data_files import DayFiles
from tierlog.tables.json_columns import arrow_type, fields_of
from tierlog.tables.json_rows import BATCH_BYTES, decode_values
from tierlog.tables.schema_rows import Rows

Decode = Callable[[pa.BinaryArray, pa.StructType], Rows]
"""Rows of values, in the columns that there are and those that the values add. Raises
ColumnsTooLarge.
"""


class RowForm(NamedTuple):
    """`schema` is the table's, in Arrow, and `time` its timestamp. `columns` are those of values;
    there is no `decode` in mode raw. `errors` is the schema of what does not fit.
    """

    schema: pa.Schema
    time: str
    columns: pa.StructType
    errors: pa.Schema
    decode: Decode | None


class RowFiles:
    def __init__(
        self,
        form: RowForm,
        rows: DayFiles,
        errors: DayFiles,
        change: Callable[[pa.StructType], pa.Schema | None],
    ) -> None:
        self.rows, self.errors, self._change = rows, errors, change
        self._decode, self._columns, self._schema = form.decode, form.columns, form.schema

    def add_rows(self, batch: pa.RecordBatch) -> None:
        """Raises OSError, and what the registry raises."""
        if self._decode is None:
            self.rows.add_rows(_with_all_headers(batch))
            return
        for part in _parts(batch):
            self._add_columns(part, self._decode)

    def close(self) -> None:
        self.rows.close()
        self.errors.close()

    def discard(self) -> None:
        """Close what is open, after a failure."""
        self.rows.discard()
        self.errors.discard()

    def _add_columns(self, batch: pa.RecordBatch, decode: Decode) -> None:
        try:
            decoded = decode(batch.column("value"), self._columns)
        except ColumnsTooLarge as error:
            if (half := len(batch) // 2) > 0:
                self._add_columns(batch.slice(0, half), decode)
                self._add_columns(batch.slice(half), decode)
                return
            decoded = Rows(None, pa.array([], pa.struct([])), {0: error.detail})
        if decoded.added is not None:
            self._columns, self._schema = decoded.added, self._change(decoded.added)
            if self._schema is not None:
                self.rows.change_schema(self._schema)
        if self._schema is None:
            return
        fits = pa.array([place not in decoded.reasons for place in range(len(batch))])
        if decoded.reasons:
            reasons = [decoded.reasons[place] for place in sorted(decoded.reasons)]
            errors = _with_all_headers(batch.filter(pc.invert(fits)))
            self.errors.add_rows(errors.append_column("reason", _texts(reasons)))
            batch = batch.filter(fits)
        if len(batch):
            batch = _with_all_headers(batch)
            own = {f"_{one.name}": batch.column(one.name) for one in batch.schema}
            names = [one.name for one in decoded.rows.type]
            own.update(zip(names, decoded.rows.flatten(), strict=True))
            self.rows.add_rows(pa.record_batch({one: own[one] for one in self._schema.names}))


def decode_json(values: pa.BinaryArray, columns: pa.StructType) -> Rows:
    known = fields_of(columns)
    found, rows, reasons = decode_values(values, known)
    return Rows(None if found is known else arrow_type(found), rows, reasons)


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
