"""Keeps a table fit to be read: few large files instead of many small ones, few snapshots, no files
that nothing refers to.

* Small files of a day are rewritten as large ones, and one commit exchanges them. It holds only if
  the table has not changed meanwhile, as that of a sync does: who comes second begins again. The
  position stays as it is.
* Files to which deletes apply, and those with other columns than the table's, are left as they are.
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
from pyiceberg.io.pyarrow import PyArrowFileIO, schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from tierlog.record_format.errors import CorruptDataError
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
    Commit,
    Name,
    TableConflict,
    dotted,
    exchange_files,
    expire_snapshots,
    file_io_of,
    load_table,
    position_of,
)
from tierlog.tables.data_files import FILE_BYTES, DayFiles

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
    """Rewrite small files, expire snapshots, and remove orphans, in this order. Raises
    TableRolledBack, CatalogUnavailable, CommitUnanswered, TableConflict after many in a row, and
    OSError.
    """
    position_of(load_table(catalog, name))  # what it was rolled back from is still needed
    rewritten, written = _until_no_conflict(lambda: _compact(catalog, name), log)
    now = datetime.now(UTC)
    expired = _until_no_conflict(lambda: _expire(catalog, name, now - ages.snapshots), log)
    removed = remove_lost_attempts(load_table(catalog, name))
    removed += _remove_orphans(catalog, name, now - ages.orphans)
    return Maintained(rewritten, written, expired, removed)


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
    remove_lost_attempts(table)
    for group in list(_groups(table)):
        table, files = _rewrite(table, group)
        rewritten, written = rewritten + len(group), written + files
    return rewritten, written


def _groups(table: Table) -> Iterator[Sequence[DataFile]]:
    """Small files of a day that become one or a few large ones."""
    names = schema_to_pyarrow(table.schema()).names
    days: dict[Any, list[DataFile]] = {}
    for task in table.scan().plan_files():
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
            if _columns(table, file) == names:
                group.append(file)
        if len(group) > 1:
            yield group


def _columns(table: Table, file: DataFile) -> list[str]:
    with table.io.new_input(file.file_path).open() as stream:
        return list(pq.read_schema(stream).names)


def _rewrite(table: Table, group: Sequence[DataFile]) -> tuple[Table, int]:
    """Exchange files for as few as may be. Raises TableConflict."""
    attempt = begin_attempt(table)
    files = DayFiles(table.io, attempt.folder(table), schema_to_pyarrow(table.schema()))
    try:
        for one in group:
            for batch in _rows(table, one):
                files.add_rows(batch)
        paths = files.close()
        if files.rows != sum(one.record_count for one in group):
            raise CorruptDataError(
                f"has files with {files.rows} records, where its manifests say "
                f"{sum(one.record_count for one in group)}",
                file=dotted(table.name()),
            )
    except BaseException:
        files.discard()
        abandon_attempt(table, attempt)
        raise
    try:
        exchanged = exchange_files(table, group, Commit(paths, {ATTEMPT: attempt.id}))
    except TableConflict:
        mark_attempt(table, attempt)  # another run may have removed it, before the last files
        raise
    end_attempt(table, attempt)
    return exchanged, len(paths)


def _rows(table: Table, file: DataFile) -> Iterator[pa.RecordBatch]:
    with table.io.new_input(file.file_path).open() as stream:
        yield from pq.ParquetFile(stream).iter_batches(batch_size=_BATCH_ROWS)


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
