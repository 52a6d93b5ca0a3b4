"""The files of one commit from before they are written until they are the table's, or deleted.

| path below the table's location                       |                                          |
|-------------------------------------------------------|------------------------------------------|
| `tierlog/attempts/<parent snapshot's id>-<attempt>`   | empty; there while a commit is attempted |
| `data/<attempt>/<day>-<number>.parquet`               | its files                                |
| `data/<attempt>/<task>-<day>-<number>.parquet`        | its files, by tasks on a cluster         |
| `data/<attempt>/errors-<task>-….parquet`              | what does not fit, until it is gathered  |

* An attempt can only be committed while the branch main is at its parent. Once it is not, the
  attempt was committed, or never will be; until then its files are left alone, whoever ended.
* Deleted is only what no snapshot of the table has: of an attempt that was committed, nothing.
* `<task>` is another each time that a task is tried. Files of tries that came to nothing are
  deleted before the commit; those that appear after it are orphans, since a commit names its files.
* An attempt of a table of mode json also has files at its table of errors, with records that do not
  fit. They are the attempt's: that table has them once it has caught up with the other's commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final, NamedTuple
from uuid import uuid4

from pyarrow.fs import FileSelector, FileType
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import ManifestFile
from pyiceberg.table import Table

from tierlog.tables.catalog import ATTEMPT, ERRORS, file_io_of, reading_files

_ATTEMPTS: Final = "tierlog/attempts"
_NONE: Final = "none"


class Attempt(NamedTuple):
    parent: str
    id: str

    def folder(self, table: Table) -> str:
        return f"{table.location()}/data/{self.id}"

    def mark(self, table: Table) -> str:
        return f"{table.location()}/{_ATTEMPTS}/{self.parent}-{self.id}"


def begin_attempt(table: Table) -> Attempt:
    """Of a commit on top of the state of `table`."""
    attempt = Attempt(_main_of(table), uuid4().hex)
    mark_attempt(table, attempt)
    return attempt


def mark_attempt(table: Table, attempt: Attempt) -> None:
    table.io.new_output(attempt.mark(table)).create(overwrite=True).close()


def end_attempt(table: Table, attempt: Attempt) -> None:
    """It was committed."""
    _delete(table, attempt.mark(table))


def abandon_attempt(table: Table, attempt: Attempt, *, errors: Table | None = None) -> None:
    """It was not committed, and will not be: nobody was asked to."""
    for one in (table, errors):
        if one is not None:
            for path in files_of_attempt(one, attempt.id):
                _delete(one, path)
    _delete(table, attempt.mark(table))


def remove_others(table: Table, attempt: Attempt, kept: Collection[str]) -> None:
    """Delete what is in its folder besides these: what tasks left that were not the last to try."""
    for path in set(files_of_attempt(table, attempt.id)).difference(kept):
        _delete(table, path)


def remove_lost_attempts(table: Table, *, errors: Table | None = None) -> int:
    """Delete the files of attempts that can no longer be committed; how many. `table` has been
    loaded just now, and `errors` after it.
    """
    removed = 0
    for attempt in _attempts(table):
        if attempt.parent == _main_of(table):
            continue
        if not _was_committed(table, attempt):
            removed += _delete_unknown(table, attempt)
            if errors is not None and table.properties.get(ERRORS) != attempt.id:
                removed += _delete_unknown(errors, attempt)
        _delete(table, attempt.mark(table))
    return removed


def files_of_attempt(table: Table, attempt: str) -> list[str]:
    """Those at this table."""
    return sorted(_files_in(file_io_of(table), Attempt(_NONE, attempt).folder(table)))


def _delete_unknown(table: Table, attempt: Attempt) -> int:
    """Its files that no snapshot has; how many."""
    if not (files := files_of_attempt(table, attempt.id)):
        return 0
    unknown = set(files) - files_of_snapshots(table)
    for path in unknown:
        _delete(table, path)
    return len(unknown)


def files_of_snapshots(table: Table) -> set[str]:
    """Every file of rows, or of deletes, that a snapshot of the table has."""
    with reading_files(table.name()):
        return {
            entry.data_file.file_path
            for manifest in manifests_of(table)
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
        }


def manifests_of(table: Table) -> Collection[ManifestFile]:
    """Every manifest that a snapshot of the table has."""
    with reading_files(table.name()):
        return {
            manifest.manifest_path: manifest
            for snapshot in table.metadata.snapshots
            for manifest in snapshot.manifests(table.io)
        }.values()


def _attempts(table: Table) -> Iterator[Attempt]:
    for path in _files_in(file_io_of(table), f"{table.location()}/{_ATTEMPTS}"):
        parent, _, attempt = path.rpartition("/")[2].rpartition("-")
        yield Attempt(parent, attempt)


def _was_committed(table: Table, attempt: Attempt) -> bool:
    summaries = (one.summary for one in table.metadata.snapshots)
    return any(one is not None and one.get(ATTEMPT) == attempt.id for one in summaries)


def _main_of(table: Table) -> str:
    snapshot = table.current_snapshot()
    return _NONE if snapshot is None else str(snapshot.snapshot_id)


def _files_in(io: PyArrowFileIO, folder: str) -> Iterator[str]:
    """The files of a folder, without those below it; none if there is no such folder."""
    scheme, netloc, path = PyArrowFileIO.parse_location(folder, io.properties)
    selector = FileSelector(path, allow_not_found=True)
    for one in io.fs_by_scheme(scheme, netloc).get_file_info(selector):
        if one.type == FileType.File:
            yield f"{folder}/{one.base_name}"


def _delete(table: Table, path: str) -> None:
    with suppress(FileNotFoundError):  # deleted by another
        table.io.delete(path)
