"""The table beside one of mode json or schema, with the records that do not fit it, and why.

* A table's own commit decides which records are in it and which are errors: with its files it sets
  its position, and `tierlog.errors` to the attempt whose folder at the table of errors has the
  files of those. The table of errors then catches up: it adds them, and has the same position.
* It catches up before the table's next commit, by whoever makes that. It is behind if there is an
  attempt and its position is; its own commit holds only if it still is. So the files are added
  once, and a record is in one of the two tables, whoever is killed between the two commits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from tierlog.record_format.errors import RequestError
from tierlog.tables.attempts import files_of_attempt
from tierlog.tables.catalog import (
    ATTEMPT,
    ERRORS,
    ERRORS_MODE,
    TIMESTAMP_ID,
    Change,
    Commit,
    Name,
    TableExists,
    UnknownTable,
    answers,
    commit_files,
    create_table,
    dotted,
    has_columns,
    load_table,
    position_of,
    reading_files,
    stored_position,
)
from tierlog.tables.position import Position, TableRolledBack

REFUSED_SHOWN: Final = 20
TABLE: Final = "tierlog.table"
"""The id of the table whose errors these are."""
_SUFFIX: Final = "_errors"


class OtherTable(RequestError):
    """A table of errors is not of the table that has its name."""


def errors_name(name: Name) -> Name:
    return *name[:-1], name[-1] + _SUFFIX


def load_errors(catalog: Catalog, table: Table) -> Table | None:
    """None if `table` has none, or not yet. Raises OtherTable, TableRolledBack."""
    if not has_columns(table):
        return None
    name = errors_name(table.name())
    try:
        found = load_table(catalog, name)
    except UnknownTable:
        return None
    if found.properties.get(TABLE) != str(table.metadata.table_uuid):
        raise OtherTable(
            f"{dotted(name)} has the errors of another table, which was dropped or renamed; drop "
            "or rename it too"
        )
    try:
        position_of(found)
    except TableRolledBack as error:
        raise TableRolledBack(f"{dotted(name)}: {error}") from None
    return found


def caught_up_errors(catalog: Catalog, table: Table) -> Table | None:
    """Load the table of errors of one that has been loaded just now, create it if there is none,
    and let it catch up. Raises TableConflict, CommitUnanswered, TableExists and those of
    `load_errors`.
    """
    if not has_columns(table):
        return None
    if (found := load_errors(catalog, table)) is None:
        position, name = stored_position(table), errors_name(table.name())
        begun = Position(topic=position.topic, topic_id=position.topic_id)
        try:
            of = {TABLE: str(table.metadata.table_uuid)}
            found = create_table(catalog, name, begun, mode=ERRORS_MODE, more=of)
        except TableExists:
            if (found := load_errors(catalog, table)) is None:  # that of another, not of a topic
                raise
    return catch_up(table, found)


def catch_up(table: Table, errors: Table) -> Table:
    """Add what `table` has left for it."""
    attempt, position = table.properties.get(ERRORS), stored_position(table)
    if not attempt or not position.is_past(stored_position(errors)):
        return errors
    commit = Commit(files_of_attempt(errors, attempt), {ATTEMPT: attempt})
    return commit_files(Change(errors), position, commit)


class Refused(NamedTuple):
    """A row of a table of errors. `timestamp`: in milliseconds."""

    partition: int
    offset: int
    timestamp: int
    reason: str
    value: bytes | None


def latest_refused(errors: Table, *, limit: int = REFUSED_SHOWN) -> list[Refused]:
    """The latest rows by time, newest first. Of a file only the last row group is read. Raises
    CatalogUnavailable, CorruptDataError.
    """
    found: list[Refused] = []
    with answers(errors.name()), reading_files(errors.name()):
        files = sorted((one.file for one in errors.scan().plan_files()), key=_last_time)
        for file in reversed(files):
            if len(found) >= limit:
                break
            found += _last_rows(errors, file.file_path, limit=limit)
    return sorted(found, key=lambda one: one.timestamp, reverse=True)[:limit]


def schema_of_most(refused: Iterable[Refused]) -> int | None:
    """The id of the schema that most of these rows are of; None if none of them is of one."""
    of_schemas = (re.match(r"schema (\d+):", one.reason) for one in refused)
    counts = Counter(int(found[1]) for found in of_schemas if found)
    return max(counts, key=counts.__getitem__, default=None)


def _last_time(file: DataFile) -> int:
    return int.from_bytes((file.upper_bounds or {}).get(TIMESTAMP_ID, b""), "little", signed=True)


def _last_rows(errors: Table, path: str, *, limit: int) -> Iterator[Refused]:
    with errors.io.new_input(path).open() as stream:
        file = pq.ParquetFile(stream)
        rows = file.read_row_group(file.num_row_groups - 1, columns=[*Refused._fields])
    for row in rows.slice(max(0, len(rows) - limit)).to_pylist():
        at_ms = round(row["timestamp"].timestamp() * 1000)
        yield Refused(**{**row, "timestamp": at_ms})
