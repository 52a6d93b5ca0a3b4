"""Keeps a table fit to be read: few large files instead of many small ones, few snapshots, no files
that nothing refers to.

* Small files of a day are rewritten as large ones, and one commit exchanges them. It holds only if
  the table has not changed meanwhile, as that of a sync does: who comes second begins again. The
  position stays as it is.
* Files to which deletes apply, and those with columns that the table has no more, or under other
  names, are left as they are.
* The table of errors beside one of mode json is kept fit with it.
* An orphan is a file below the table's location that no snapshot and no metadata in force refers to
  and that is older than any run can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileInfo, FileSelector, FileType
from pyiceberg.catalog import Catalog
from pyiceberg.io.pyarrow import PyArrowFileIO, pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from tierlog.record_format.errors import CorruptDataError, InvalidRequest
from tierlog.spark_reader.splits import Warn
from tierlog.tables.attempts import (
    abandon_attempt,
    begin_attempt,
    end_attempt,
    files_of_snapshots,
    manifests_of,
    mark_attempt,
    remove_lost_attempts,
)
from tierlog.tables.catalog import (
    ATTEMPT,
    ERRORS_MODE,
    MODE,
    Commit,
    Name,
    TableConflict,
    dotted,
    exchange_files,
    expire_snapshots,
    file_io_of,
    load_table,
    position_of,
    reading_files,
    time_column,
)
from tierlog.tables.data_files import FILE_BYTES, DayFiles
from tierlog.tables.errors_table import caught_up_errors, load_errors

SMALL_BYTES: Final = FILE_BYTES // 2
GROUP_BYTES: Final = 4 * FILE_BYTES
CONFLICTS_MAX: Final = 10

_BATCH_ROWS: Final = 16 << 10


class Maintained(NamedTuple):
    """How many of what a run has done."""

    files_rewritten: int = 0
    files_written: int = 0
    snapshots_expired: int = 0
    files_removed: int = 0


class Ages(NamedTuple):
    """What older than this may go. A commit must not take longer than `orphans`."""

    snapshots: timedelta = timedelta(days=5)
    orphans: timedelta = timedelta(days=3)


def maintain_table(catalog: Catalog, name: Name, ages: Ages, *, log: Warn) -> Maintained:
    """Rewrite small files, expire snapshots, and remove orphans, in this order, of a table and of
    its table of errors. Raises TableRolledBack, CatalogUnavailable, CommitUnanswered, TableConflict
    after many in a row, and OSError.
    """
    errors = _until_no_conflict(lambda: _errors_of(catalog, name), log)
    done = [
        _maintain(catalog, one, ages, log)
        for one in ([name] if errors is None else [name, errors.name()])
    ]
    return Maintained(*map(sum, zip(*done, strict=True)))


def _errors_of(catalog: Catalog, name: Name) -> Table | None:
    table = load_table(catalog, name)
    if table.properties[MODE] == ERRORS_MODE:
        raise InvalidRequest(f"{dotted(name)} is maintained with the table whose errors it has")
    position_of(table)  # what it was rolled back from is still needed
    return caught_up_errors(catalog, table)


def _maintain(catalog: Catalog, name: Name, ages: Ages, log: Warn) -> Maintained:
    rewritten, written = _until_no_conflict(lambda: _compact(catalog, name), log)
    now = datetime.now(UTC)
    expired = _until_no_conflict(lambda: _expire(catalog, name, now - ages.snapshots), log)
    removed = _remove_lost(catalog, load_table(catalog, name))
    removed += _remove_orphans(catalog, name, now - ages.orphans)
    return Maintained(rewritten, written, expired, removed)


def _remove_lost(catalog: Catalog, table: Table) -> int:
    return remove_lost_attempts(table, errors=load_errors(catalog, table))


def _until_no_conflict(do: Any, log: Warn) -> Any:
    for _ in range(CONFLICTS_MAX - 1):
        try:
            return do()
        except TableConflict as error:
            log(f"beginning again: {error}")
    return do()


# --- small files ----------------------------------------------------------------------------------


def _compact(catalog: Catalog, name: Name) -> tuple[int, int]:
    """How many files were rewritten, as how many, since the last conflict."""
    table, rewritten, written = load_table(catalog, name), 0, 0
    _remove_lost(catalog, table)
    for group in list(_groups(table)):
        table, files = _rewrite(table, group)
        rewritten, written = rewritten + len(group), written + files
    return rewritten, written


def _groups(table: Table) -> Iterator[Sequence[DataFile]]:
    """Small files of a day that become one or a few large ones."""
    days: dict[Any, list[DataFile]] = {}
    with reading_files(table.name()):
        tasks = list(table.scan().plan_files())
    for task in tasks:
        file = task.file
        if file.file_size_in_bytes < SMALL_BYTES and not task.delete_files:
            days.setdefault((file.spec_id, file.partition), []).append(file)
    for (spec_id, _), files in days.items():
        if spec_id != table.metadata.default_spec_id or len(files) < 2:
            continue
        group: list[DataFile] = []
        for file in files:
            if group and sum(one.file_size_in_bytes for one in group) >= GROUP_BYTES:
                yield group
                group = []
            if _has_columns_of(table, file):
                group.append(file)
        if len(group) > 1:
            yield group


def _has_columns_of(table: Table, file: DataFile) -> bool:
    """Of its columns, or of those that it had before others were added."""
    with table.io.new_input(file.file_path).open() as stream:
        schema = pyarrow_to_schema(pq.read_schema(stream), table.metadata.name_mapping())
    return _ids(schema).items() <= _ids(table.schema()).items()


def _ids(schema: Schema) -> dict[str, int]:
    return {name: schema.find_field(name).field_id for name in schema.column_names}


def _rewrite(table: Table, group: Sequence[DataFile]) -> tuple[Table, int]:
    """Exchange files for as few as may be. Raises TableConflict."""
    attempt, schema = begin_attempt(table), schema_to_pyarrow(table.schema())
    files = DayFiles(table.io, attempt.folder(table), schema, time=time_column(table))
    records = sum(one.record_count for one in group)
    try:
        for one in group:
            for batch in _rows(table, one):
                files.add_rows(_with_columns(batch, schema))
        paths = files.close()
        if files.rows != records:
            raise CorruptDataError(
                f"has files with {files.rows} records, where its manifests say {records}",
                file=dotted(table.name()),
            )
    except BaseException:
        files.discard()
        abandon_attempt(table, attempt)
        raise
    commit = Commit(paths, {ATTEMPT: attempt.id})
    try:
        exchanged = exchange_files(table, group, commit)
    except TableConflict:
        mark_attempt(table, attempt)  # another run may have removed it, before the last files
        raise
    end_attempt(table, attempt)
    return exchanged, len(paths)


def _rows(table: Table, file: DataFile) -> Iterator[pa.RecordBatch]:
    with table.io.new_input(file.file_path).open() as stream:
        yield from pq.ParquetFile(stream).iter_batches(batch_size=_BATCH_ROWS)


def _with_columns(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """With nulls for what was added; fields within columns are, when types are changed."""
    has = rows.schema.names
    columns = {
        one.name: rows.column(one.name) if one.name in has else pa.nulls(len(rows), one.type)
        for one in schema
    }
    return pa.record_batch(columns)


# --- what nobody needs ----------------------------------------------------------------------------


def _expire(catalog: Catalog, name: Name, before: datetime) -> int:
    table = load_table(catalog, name)
    snapshots = len(table.metadata.snapshots)
    expire_snapshots(table, before)
    return snapshots - len(table.metadata.snapshots)


def _remove_orphans(catalog: Catalog, name: Name, before: datetime) -> int:
    """Files are listed first: what was committed by then is referred to by what is loaded after."""
    table = load_table(catalog, name)
    io = file_io_of(table)
    scheme, netloc, _ = _parsed(io, table.location())
    files = io.fs_by_scheme(scheme, netloc)
    old = [one.path for one in _listed(io, table) if one.mtime < before]
    table = load_table(catalog, name)
    kept = {_parsed(io, path)[2] for path in _referred_to(table)}
    orphans = [path for path in old if path not in kept]
    for path in orphans:
        files.delete_file(path)
    return len(orphans)


def _listed(io: PyArrowFileIO, table: Table) -> Iterator[FileInfo]:
    for folder in ("data", "metadata"):
        scheme, netloc, path = _parsed(io, f"{table.location()}/{folder}")
        selector = FileSelector(path, recursive=True, allow_not_found=True)
        for one in io.fs_by_scheme(scheme, netloc).get_file_info(selector):
            if one.type == FileType.File and one.base_name != "version-hint.text":
                yield one


def _referred_to(table: Table) -> Iterator[str]:
    metadata = table.metadata
    yield table.metadata_location
    yield from (one.metadata_file for one in metadata.metadata_log)
    yield from (one.manifest_list for one in metadata.snapshots)
    yield from (one.manifest_path for one in manifests_of(table))
    yield from files_of_snapshots(table)
    yield from (one.statistics_path for one in metadata.statistics)
    yield from (one.statistics_path for one in metadata.partition_statistics)


def _parsed(io: PyArrowFileIO, location: str) -> tuple[str, str, str]:
    """Scheme, host or bucket, and the path that listing gives: `s3` and `s3a` are the same."""
    return PyArrowFileIO.parse_location(location, io.properties)
