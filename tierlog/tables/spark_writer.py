"""Writes the rows of a step on Spark's executors. All that decides what is in the table stays with
the driver: the attempt, its columns, and which files are its own.

* Tasks write with the columns that there are. Where some need more, the driver adds what they
  found, in the log's order, and those tasks alone run again. Each round has a column more than the
  one before, or a wider one, so that they end. Of a new table's records the driver reads the first.
* Files are those whose paths a task returned. What else is in the attempt's folder is deleted.
* What does not fit the driver gathers, in files of its own: the table of errors adds all that is in
  the attempt's folder there, so no task may write to it that may be late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table

from tierlog.record_format.errors import ColumnsTooLarge
from tierlog.spark_reader.arrow_dataset import Ahead, TopicDataset, TopicPart
from tierlog.spark_reader.jobs.session import Progress, progress_reported
from tierlog.spark_reader.jobs.tasks import run_tasks
from tierlog.spark_reader.splits import OffsetRange, Warn, log_to_stderr
from tierlog.tables.attempts import Attempt, mark_attempt, remove_others
from tierlog.tables.catalog import files_there
from tierlog.tables.data_files import FILE_BYTES
from tierlog.tables.row_task import RETURNS, RowTask, Written, store_properties
from tierlog.tables.schema_rows import join_columns
from tierlog.tables.step_files import ROWS, StepFiles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Tasks = list[list[TopicPart]]


@dataclass(frozen=True)
class SparkWriter:
    """A `StepWriter`; a task is of about `task_bytes` of the log."""

    session: SparkSession
    task_bytes: int = FILE_BYTES
    progress: Progress | None = None

    def write_step(self, files: StepFiles, step: Sequence[OffsetRange], log: Warn) -> None:
        """Raises TasksFailed, TableConflict, ConfigurationError and what reading raises."""
        rows = TopicDataset(files.options, ROWS, step, ahead=Ahead(1, 1), warn=log_to_stderr)
        tasks = _tasks(rows.parts(), self.task_bytes)
        if not tasks:
            return
        attempt = files.begin()
        try:
            if files.is_new and files.has_columns:
                _learn_first(files, tasks[0][0])
            with progress_reported(self.session, self.progress):
                while tasks:
                    tasks = self._write(files, attempt, tasks, log)
            remove_others(files.table, attempt, files.paths)
            files.close()
        except BaseException:
            files.abandon()
            mark_attempt(files.table, attempt)  # a task may be late: a later run deletes its files
            raise
        if not files.records + files.errors:
            files.abandon()

    def _write(self, files: StepFiles, attempt: Attempt, tasks: Tasks, log: Warn) -> Tasks:
        """What has to be written once more."""
        table, form = files.table, files.form()
        store, folder = store_properties(table.io.properties), attempt.folder(table)
        task = RowTask(form, store, folder, tasks)
        found = run_tasks(self.session, task, len(tasks), returns=RETURNS)
        left, needed = [], []
        for parts, row in zip(tasks, found, strict=True):
            written = Written(*row)
            if written.columns is not None:
                left.append(parts)
                needed.append(written.needed_columns())
                continue
            files.add_files(written.paths, written.records)
            for path in written.error_paths:
                for batch in _errors_in(table, path):
                    files.add_errors(batch)
            for note in written.notes:
                log(note)
        if needed:
            files.change_columns(join_columns(needed))
            assert files.form().columns != form.columns
        return left


def _tasks(parts: Sequence[TopicPart], task_bytes: int) -> Tasks:
    """Neighbours together."""
    tasks: Tasks = []
    room = 0
    for part in parts:
        if room <= 0:
            tasks.append([])
            room = task_bytes
        tasks[-1].append(part)
        room -= part.split.size_bytes
    return tasks


def _learn_first(files: StepFiles, part: TopicPart) -> None:
    """The columns of the first records, which spares most tasks another round."""
    form = files.form()
    assert form.decode is not None
    for batch in part.to_batches(log_to_stderr):
        with suppress(ColumnsTooLarge):
            added = form.decode(batch.column("value"), form.columns).added
            if added is not None:
                files.change_columns(added)
        return


def _errors_in(table: Table, path: str) -> Iterator[pa.RecordBatch]:
    """Raises TableConflict if another run has deleted it."""
    with files_there(table), table.io.new_input(path).open() as stream:
        yield from pq.ParquetFile(stream).iter_batches()
