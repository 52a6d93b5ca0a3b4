"""What a task on a cluster does of a step: it reads a part of the records, and writes their rows.

* It needs pyarrow, PyIceberg and what the Spark source needs: no catalog, and nothing that knows
  one. Its files are where those of the attempt are, by the properties of the catalog that are about
  the files' store.
* Each try has names of its own. What it wrote counts if its result does.
* Columns are the driver's to add: a task whose records need more than there are says which, and
  writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import uuid4

import pyarrow as pa
from pyiceberg.io.pyarrow import PyArrowFileIO

from tierlog.spark_reader.arrow_dataset import TopicPart
from tierlog.tables.data_files import DayFiles
from tierlog.tables.row_files import RowFiles, RowForm

RETURNS: Final = (
    "paths array<string>, records bigint, error_paths array<string>, "
    "columns binary, notes array<string>"
)
_STORE: Final = ("s3.", "client.", "gcs.", "adls.", "hdfs.", "DEFAULT_")


class Written(NamedTuple):
    """By a task: files of rows, and of errors; or the columns that it needs. `notes` are of what is
    missing in the log.
    """

    paths: Sequence[str]
    records: int
    error_paths: Sequence[str]
    columns: bytes | None
    notes: Sequence[str]

    def needed_columns(self) -> pa.StructType:
        return pa.struct(list(pa.ipc.read_schema(pa.BufferReader(bytes(self.columns or b"")))))


def store_properties(properties: Mapping[str, Any]) -> dict[str, str]:
    """Those of a catalog that say how to reach files; not how to reach the catalog."""
    return {name: text for name, text in properties.items() if name.startswith(_STORE)}


@dataclass(frozen=True, repr=False)
class RowTask:
    """Task `n` is of `parts[n]`. Its repr has no secrets."""

    form: RowForm
    store: Mapping[str, str]
    folder: str
    parts: Sequence[Sequence[TopicPart]]

    def __call__(self, number: int) -> Written:
        io, name = PyArrowFileIO(dict(self.store)), uuid4().hex
        rows = DayFiles(io, self.folder, self.form.schema, time=self.form.time, prefix=f"{name}-")
        errors = DayFiles(io, self.folder, self.form.errors, prefix=f"errors-{name}-")
        notes: list[str] = []
        needed: list[pa.StructType] = []
        files = RowFiles(self.form, rows, errors, needed.append)
        try:
            for part in self.parts[number]:
                for batch in part.to_batches(notes.append):
                    files.add_rows(batch)
            if not needed:
                files.close()
        finally:
            files.discard()
        if needed:
            columns = pa.schema(list(needed[-1])).serialize().to_pybytes()
            return Written((), 0, (), columns, notes)
        return Written(rows.paths, rows.rows, errors.paths, None, notes)
