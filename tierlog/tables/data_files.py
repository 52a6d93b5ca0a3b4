"""Writes rows as Parquet files by day of their timestamp (UTC), as a table partitioned by day needs
them. Memory is bounded, whatever the order and the number of days.

* A file has the rows of one day in the order in which they came, which is that of the log. It ends
  at `FILE_BYTES`; the files of a day, or of many days, follow each other.
* Rows wait in memory until there is a row group of a day, or too many of all days.
* A timestamp before the year 1 or after 9999, which the tools of Iceberg cannot show, is written as
  the nearest that they can.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date, timedelta
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO

FILE_BYTES: Final = 128 << 20
ROW_GROUP_BYTES: Final = 32 << 20
WAITING_BYTES: Final = 128 << 20
OPEN_FILES: Final = 16

_DAY_US: Final = 86_400_000_000
_EPOCH: Final = date(1970, 1, 1)
_FIRST_DAY: Final = (date.min - _EPOCH).days
_LAST_DAY: Final = (date.max - _EPOCH).days


class DayFiles:
    """The files of one commit, in one folder. `schema` is the table's, in Arrow, and `time` the
    name of its timestamp. Those of several writers begin with a `prefix` of each.
    """

    def __init__(
        self,
        io: FileIO,
        folder: str,
        schema: pa.Schema,
        *,
        time: str = "timestamp",
        prefix: str = "",
    ) -> None:
        self._prefix = prefix
        self._io, self._folder, self._schema, self._time = io, folder, schema, time
        self._waiting: dict[int, list[pa.RecordBatch]] = {}
        self._waiting_bytes: dict[int, int] = {}
        self._open: dict[int, _File] = {}
        self.paths: list[str] = []
        self.rows = 0

    def add_rows(self, batch: pa.RecordBatch) -> None:
        """Raises OSError, also of a full disk."""
        self.rows += batch.num_rows
        for day, rows in _by_day(batch.cast(self._schema), self._time):
            self._waiting.setdefault(day, []).append(rows)
            self._waiting_bytes[day] = self._waiting_bytes.get(day, 0) + rows.nbytes
            if self._waiting_bytes[day] >= ROW_GROUP_BYTES:
                self._write_day(day)
        while sum(self._waiting_bytes.values()) > WAITING_BYTES:
            self._write_day(max(self._waiting_bytes, key=self._waiting_bytes.__getitem__))

    def change_schema(self, schema: pa.Schema) -> None:
        """For the rows that follow; files have one."""
        self.close()
        self._schema = schema

    def close(self) -> list[str]:
        """Write what is left; the files."""
        for day in list(self._waiting):
            self._write_day(day)
            self._close_file(day)
        for day in list(self._open):
            self._close_file(day)
        return self.paths

    def discard(self) -> None:
        """Close what is open, after a failure; what was written is in the folder."""
        for day in list(self._open):
            with suppress(OSError, pa.ArrowException):
                self._close_file(day)

    def _write_day(self, day: int) -> None:
        rows = pa.Table.from_batches(self._waiting.pop(day), self._schema)
        del self._waiting_bytes[day]
        file = self._open.pop(day, None) or self._new_file(day)
        self._open[day] = file  # the last: the first is the one that was not written to for longest
        if file.write_rows(rows) >= FILE_BYTES:
            self._close_file(day)

    def _new_file(self, day: int) -> _File:
        if len(self._open) >= OPEN_FILES:
            self._close_file(next(iter(self._open)))
        day_name = _EPOCH + timedelta(days=day)
        name = f"{self._prefix}{day_name}-{len(self.paths):05d}.parquet"
        self.paths.append(f"{self._folder}/{name}")
        return _File(self._io, self.paths[-1], self._schema)

    def _close_file(self, day: int) -> None:
        if (file := self._open.pop(day, None)) is not None:
            file.close()


class _File:
    def __init__(self, io: FileIO, path: str, schema: pa.Schema) -> None:
        self._path = path
        with _named(path):
            self._stream: Any = io.new_output(path).create()
            self._writer = pq.ParquetWriter(self._stream, schema, compression="zstd")

    def write_rows(self, rows: pa.Table) -> int:
        """As one row group. How many bytes the file has."""
        with _named(self._path):
            self._writer.write_table(rows, row_group_size=rows.num_rows)
            return int(self._stream.tell())

    def close(self) -> None:
        with _named(self._path):
            try:
                self._writer.close()
            finally:
                self._stream.close()


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Of a full disk Arrow says the number, and not where."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), path) from error


def _by_day(batch: pa.RecordBatch, time: str) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each day, with its number since the epoch; each day's in their order."""
    times = batch.column(time).cast(pa.int64()).to_numpy()
    days = times // _DAY_US
    if not len(days):
        return
    if days.min() < _FIRST_DAY or days.max() > _LAST_DAY:
        times = times.clip(_FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1)
        days, place = times // _DAY_US, batch.schema.get_field_index(time)
        field = batch.schema.field(place)
        batch = batch.set_column(place, field, pa.array(times).cast(field.type))
    if days.min() == days.max():
        yield int(days[0]), batch
        return
    order = np.argsort(days, kind="stable")
    batch, days = batch.take(pa.array(order)), days[order]
    borders = [0, *(np.flatnonzero(np.diff(days)) + 1), len(days)]
    for start, end in pairwise(borders):
        yield int(days[start]), batch.slice(start, end - start)
