"""Topics' tables in a catalog, and the one commit that changes one.

* A catalog is any of PyIceberg's. Files are written and listed by pyarrow.
* A table of ours has the properties `tierlog.topic`, `tierlog.mode` and `tierlog.position`. One of
  mode json or schema has `tierlog.errors` too, and beside it a table of mode errors.
* PyIceberg repeats a commit after a conflict, by default four times: with files of a position that
  another has passed by then. `_OneCommit` sends it once, and on a conflict deletes nothing.
* Whether a commit that was not answered took place is not decided here.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchPropertyException,
    NoSuchTableError,
    NotInstalledError,
    RESTError,
    TableAlreadyExistsError,
    ValidationError,
    ValidationException,
)
from pyiceberg.io import ARROW_FILE_IO, PY_IO_IMPL
from pyiceberg.io.pyarrow import PyArrowFileIO, parquet_file_to_data_file
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties, Transaction
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot, ancestors_of
from pyiceberg.table.update import AssertRefSnapshotId, TableRequirement, TableUpdate
from pyiceberg.transforms import DayTransform
from pyiceberg.types import (
    BinaryType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)
from sqlalchemy.exc import SQLAlchemyError

from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    InvalidRequest,
    OutcomeUnknownError,
    RequestError,
    RetriableError,
)
from tierlog.tables.data_files import FILE_BYTES
from tierlog.tables.position import PROPERTY, Ancestor, Position, from_json

TOPIC: Final = "tierlog.topic"
MODE: Final = "tierlog.mode"
ATTEMPT: Final = "tierlog.attempt"
ERRORS: Final = "tierlog.errors"
"""The attempt of the table's last commit, if that left records for the table of errors."""
NAMESPACE: Final = "tierlog"

RAW_MODE: Final = "raw"
JSON_MODE: Final = "json"
SCHEMA_MODE: Final = "schema"
ERRORS_MODE: Final = "errors"
COLUMN_MODES: Final = (JSON_MODE, SCHEMA_MODE)
"""A value's fields are columns; what does not fit is in a table of errors."""

Name = tuple[str, ...]

TIMESTAMP_ID: Final = 6
_HEADER: Final = StructType(
    NestedField(8, "key", StringType()), NestedField(9, "value", BinaryType())
)


def _schema(prefix: str, *more: NestedField, value: bool = True) -> Schema:
    """What a record has, and `more`."""
    fields = (
        NestedField(1, f"{prefix}key", BinaryType()),
        NestedField(2, "value", BinaryType()),
        NestedField(3, f"{prefix}partition", IntegerType(), required=True),
        NestedField(4, f"{prefix}offset", LongType(), required=True),
        NestedField(TIMESTAMP_ID, f"{prefix}timestamp", TimestamptzType(), required=True),
        NestedField(5, f"{prefix}headers", ListType(7, _HEADER, element_required=False)),
    )
    return Schema(*(one for one in fields if value or one.name != "value"), *more)


RAW: Final = _schema("")
_ERRORS: Final = _schema("", NestedField(10, "reason", StringType(), required=True))
_PROPERTIES: Final = {
    TableProperties.WRITE_TARGET_FILE_SIZE_BYTES: str(FILE_BYTES),
    TableProperties.MANIFEST_MERGE_ENABLED: "true",  # Java's default; else one for each commit
    TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
    TableProperties.PARQUET_COMPRESSION: "zstd",
}

_CONFIGURED: Final = (NoSuchPropertyException, NotInstalledError, ImportError, ValueError)
_UNAVAILABLE: Final = (RESTError, SQLAlchemyError, OSError)
_DAMAGE: Final = (
    EOFError,
    LookupError,
    SystemError,
    TypeError,
    ValidationError,
    ValueError,
    zlib.error,
)
"""What PyIceberg raises of files that are damaged."""


class UnknownTable(RequestError):
    """The catalog has no table of that name."""


class TableExists(RequestError):
    pass


class CatalogUnavailable(RetriableError):
    """The catalog or its store does not answer, or refuses."""


class TableConflict(RetriableError):
    """The table has changed since its position was read: read it again. Nothing was committed."""


class CommitUnanswered(OutcomeUnknownError):
    """A commit may have taken place: the table has its snapshot then, now or later."""

    def __init__(self, detail: str, *, snapshot_id: int) -> None:
        super().__init__(detail)
        self.snapshot_id, self.records, self.errors = snapshot_id, 0, 0


class Commit(NamedTuple):
    """Files to add, what is said of them in the snapshot's summary, and properties to set."""

    paths: Sequence[str]
    summary: Mapping[str, str]
    properties: Mapping[str, str] = MappingProxyType({})


def open_catalog(
    name: str,
    properties: Mapping[str, str],
    *,
    near: Mapping[str, str] = MappingProxyType({}),
) -> Catalog:
    """The catalog of this name in PyIceberg's configuration, or at this URL, which is a catalog
    `default` and has the properties `near`: where the log's store is, unless `properties` say
    otherwise. Raises ConfigurationError, CatalogUnavailable.
    """
    given = {PY_IO_IMPL: ARROW_FILE_IO, **properties}
    if "://" in name:
        given = {**near, **given, "uri": name}
        name = "default"
    try:
        return load_catalog(name, **given)
    except _UNAVAILABLE as error:
        raise CatalogUnavailable(f"catalog {name}: {_line(error)}") from error
    except _CONFIGURED as error:
        raise ConfigurationError(f"catalog {name}: {_line(error)}") from error


def dotted(name: Name) -> str:
    return ".".join(name)


def table_name(text: str | None, topic: str) -> Name:
    """`text` has dots between namespaces and name; by default it is of the topic."""
    if text is None:
        return NAMESPACE, re.sub(r"[^a-z0-9_]", "_", topic.lower())
    name = tuple(text.split("."))
    if len(name) < 2 or not all(name):
        raise InvalidRequest(
            f"table {text!r}: expected NAMESPACE.NAME, as in {NAMESPACE}.{name[-1] or 'flights'}"
        )
    return name


def create_table(
    catalog: Catalog,
    name: Name,
    position: Position,
    *,
    mode: str = RAW_MODE,
    columns: Sequence[NestedField] = (),
    more: Mapping[str, str] = MappingProxyType({}),
) -> Table:
    """Create an empty table, and its namespace. `columns` are those that one of mode json or schema
    has from the beginning, `more` are properties. Raises TableExists, CatalogUnavailable.
    """
    prefix, schema = "", _ERRORS if mode == ERRORS_MODE else RAW
    if mode in COLUMN_MODES:
        prefix, schema = "_", _schema("_", *columns, value=False)
    by_day = PartitionField(TIMESTAMP_ID, 1000, DayTransform(), f"{prefix}timestamp_day")
    properties = {
        **_PROPERTIES,
        TOPIC: position.topic,
        MODE: mode,
        PROPERTY: position.to_json(),
        **more,
    }
    with answers(name):
        with suppress(NamespaceAlreadyExistsError):  # since it was looked for
            catalog.create_namespace_if_not_exists(name[:-1])
        try:
            return catalog.create_table(
                name, schema, partition_spec=PartitionSpec(by_day), properties=properties
            )
        except TableAlreadyExistsError:
            raise TableExists(
                f"there is a table {dotted(name)} already: --table gives this one another name"
            ) from None


def load_table(catalog: Catalog, name: Name) -> Table:
    """A table of a topic. Raises UnknownTable, CorruptDataError, CatalogUnavailable,
    ConfigurationError.
    """
    with answers(name), reading_files(name):
        table = catalog.load_table(name)
    if PROPERTY not in table.properties:
        raise UnknownTable(f"table {dotted(name)} is not of a topic: it has no {PROPERTY}")
    file_io_of(table)
    return table


def tables_of_topics(
    catalog: Catalog, on_damaged: Callable[[CorruptDataError], None]
) -> Iterator[Table]:
    """All of the catalog, in every namespace, that can be read."""
    with answers(()):
        namespaces = catalog.list_namespaces()
    for namespace in namespaces:
        with answers(namespace):
            names = catalog.list_tables(namespace)
        for name in sorted(names):
            try:
                yield load_table(catalog, name)
            except UnknownTable:
                continue
            except CorruptDataError as error:
                on_damaged(error)


def drop_table(catalog: Catalog, table: Table, *, purge: bool) -> None:
    """Of the catalog; `purge` also deletes its files."""
    with answers(table.name()):
        (catalog.purge_table if purge else catalog.drop_table)(table.name())


def position_of(table: Table) -> Position:
    """Raises CorruptDataError, TableRolledBack."""
    found = stored_position(table)
    check_state(table, found)
    return found


def stored_position(table: Table) -> Position:
    """Raises CorruptDataError."""
    return from_json(table.properties[PROPERTY], table=dotted(table.name()))


def check_state(table: Table, position: Position) -> None:
    """Raises TableRolledBack."""
    chain = ancestors_of(table.current_snapshot(), table.metadata)
    position.check_not_rolled_back(map(_ancestor, chain))


def has_columns(table: Table) -> bool:
    """Of its values' fields."""
    return table.properties[MODE] in COLUMN_MODES


def time_column(table: Table) -> str:
    return "_timestamp" if has_columns(table) else "timestamp"


def file_io_of(table: Table) -> PyArrowFileIO:
    """Raises ConfigurationError."""
    if not isinstance(table.io, PyArrowFileIO):
        kind = type(table.io).__name__
        raise ConfigurationError(f"property {PY_IO_IMPL}: {kind} cannot list files")
    return table.io


class Change:
    """What one commit changes of `table`, if its state is still that; nothing before then."""

    def __init__(self, table: Table) -> None:
        self.table, self.transaction = table, _transaction(table)

    @property
    def schema(self) -> Schema:
        """The table's after the commit, with the ids that new columns will have."""
        return self.transaction.table_metadata.schema()

    def change_columns(self, columns: pa.StructType) -> None:
        """Add what there is not yet of these, and widen those that are wider now."""
        with answers(self.table.name()), self.transaction.update_schema() as update:
            update.union_by_name(pa.schema(list(columns)))


def commit_files(change: Change, position: Position, commit: Commit) -> Table:
    """Add files, and set the position after them, with the columns that are changed, if the table's
    state is still that whose position has been read. Returns the table with them.

    Raises TableConflict, CommitUnanswered.
    """
    table, transaction = change.table, change.transaction
    with answers(table.name()), files_there(table):
        transaction.add_files(
            list(commit.paths),
            snapshot_properties=dict(commit.summary),
            check_duplicate_files=False,  # their names are new
        )
    snapshot = transaction.table_metadata.current_snapshot()
    assert snapshot is not None
    position = position.committed_by(_ancestor(snapshot))
    transaction.set_properties({PROPERTY: position.to_json(), **commit.properties})
    return _commit(table, transaction, snapshot.snapshot_id)


def exchange_files(table: Table, old: Iterable[DataFile], commit: Commit) -> Table:
    """Replace files by others with the same rows, on the same terms."""
    transaction = _transaction(table)
    update = transaction.update_snapshot(snapshot_properties=dict(commit.summary))
    with answers(table.name()), files_there(table), update.overwrite() as exchange:
        for file in old:
            exchange.delete_data_file(file)
        for path in commit.paths:
            exchange.append_data_file(parquet_file_to_data_file(table.io, table.metadata, path))
    snapshot = transaction.table_metadata.current_snapshot()
    assert snapshot is not None
    return _commit(table, transaction, snapshot.snapshot_id)


def expire_snapshots(table: Table, before: datetime) -> None:
    """Those older than that, of which no branch or tag is. Raises TableConflict."""
    with answers(table.name()):
        try:
            table.maintenance.expire_snapshots().older_than(before).commit()
        except CommitFailedException as error:
            raise TableConflict(f"{dotted(table.name())}: {_line(error)}") from error


def _transaction(table: Table) -> Transaction:
    return Table(
        identifier=table.name(),
        metadata=table.metadata,
        metadata_location=table.metadata_location,
        io=table.io,
        catalog=cast(Catalog, _OneCommit(table.catalog, table.current_snapshot())),
        config=table.config,
    ).transaction()


def _commit(table: Table, transaction: Transaction, snapshot_id: int) -> Table:
    try:
        committed = transaction.commit_transaction()
    except _UNAVAILABLE as error:
        detail = f"{dotted(table.name())}: {_line(error)}"
        raise CommitUnanswered(detail, snapshot_id=snapshot_id) from error
    committed.catalog = table.catalog
    return committed


@contextmanager
def files_there(table: Table) -> Iterator[None]:
    """Others delete files of an attempt, once the table has changed. Raises TableConflict."""
    try:
        yield
    except FileNotFoundError as error:
        raise TableConflict(f"{dotted(table.name())}: {_line(error)}") from error


class _OneCommit:
    """A catalog for one commit to the branch main at `parent`."""

    def __init__(self, catalog: Catalog, parent: Snapshot | None) -> None:
        self._catalog, self._parent = catalog, parent

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> Any:
        parent_id = None if self._parent is None else self._parent.snapshot_id
        unchanged = AssertRefSnapshotId.model_validate(
            {"ref": MAIN_BRANCH, "snapshot-id": parent_id}
        )
        assert unchanged in requirements
        try:
            return self._catalog.commit_table(table, requirements, updates)
        except CommitFailedException as error:
            raise TableConflict(f"{dotted(table.name())}: {_line(error)}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)


@contextmanager
def reading_files(name: Name) -> Iterator[None]:
    """Around what does no more than read a table's files. Raises CorruptDataError if one is damaged
    or gone.
    """
    try:
        yield
    except (FileNotFoundError, *_DAMAGE) as error:
        if isinstance(error, _UNAVAILABLE) and not isinstance(error, FileNotFoundError):
            raise  # some of the libraries' are a ValueError, too
        where = f"table {dotted(name)}"
        raise CorruptDataError(f"its files cannot be read: {_line(error)}", file=where) from error


@contextmanager
def answers(name: Name) -> Iterator[None]:
    """Maps PyIceberg's errors."""
    try:
        yield
    except (NoSuchTableError, NoSuchNamespaceError):
        raise UnknownTable(
            f"the catalog has no table {dotted(name)}: tierlog table create makes one of a topic, "
            "and tierlog table list shows those that there are"
        ) from None
    except _UNAVAILABLE as error:
        where = f"table {dotted(name)}: " if name else "catalog: "
        raise CatalogUnavailable(f"{where}{_line(error)}") from error
    except ValidationException as error:
        raise InvalidRequest(f"table {dotted(name)}: {_line(error)}") from error


def _ancestor(snapshot: Snapshot) -> Ancestor:
    return Ancestor(snapshot.snapshot_id, snapshot.sequence_number or 0)


def _line(error: Exception) -> str:
    """Without the help that SQLAlchemy adds."""
    return str(error).partition("\n")[0] or type(error).__name__
