"""`tierlog table`: topics as Iceberg tables, in any catalog of PyIceberg's.

* `--catalog` is the URL of a catalog, or the name of one in PyIceberg's own configuration.
* Without `--server`, only the bucket is read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from pyiceberg.catalog import Catalog

from tierlog.cli.on_spark import (
    ConfOption,
    LogOptions,
    MasterOption,
    in_flags,
    job,
    pairs,
    reads,
    task_bar,
)
from tierlog.cli.options import (
    EndpointOption,
    OutputOption,
    RegionOption,
    TopicArgument,
    YesOption,
    complete_topic,
    confirm,
    size_of,
    takes,
)
from tierlog.cli.output import (
    Output,
    format_size,
    format_time,
    print_json,
    print_members,
    print_table,
    record_counter,
    warn,
)
from tierlog.record_format.errors import (
    CorruptDataError,
    OutcomeUnknownError,
    RetriableError,
    TierlogError,
)
from tierlog.record_format.units import parse_duration
from tierlog.spark_reader.options import ReadOptions
from tierlog.tables.catalog import (
    COLUMN_MODES,
    JSON_MODE,
    RAW_MODE,
    SCHEMA_MODE,
    Name,
    UnknownTable,
    create_table,
    dotted,
    drop_table,
    load_table,
    open_catalog,
    position_of,
    table_name,
    tables_of_topics,
)
from tierlog.tables.errors_table import (
    errors_name,
    latest_refused,
    load_errors,
    schema_of_most,
)
from tierlog.tables.json_columns import given_columns
from tierlog.tables.maintain import Ages, maintain_table
from tierlog.tables.position import Position
from tierlog.tables.status import TableStatus, status_of
from tierlog.tables.step_files import LocalWriter, StepWriter
from tierlog.tables.sync import (
    COMMIT_BYTES,
    NO_MODE,
    Synced,
    TableSync,
    begin_tables,
    read_options,
)

app = typer.Typer(no_args_is_help=True, add_completion=False)

CatalogOption = Annotated[
    str,
    typer.Option(
        "--catalog",
        envvar="TIERLOG_CATALOG",
        metavar="URL",
        help="sqlite:///file, postgresql+psycopg2://host/name, a REST catalog's https://host, "
        "or the name of a catalog in PyIceberg's configuration.",
    ),
]
WarehouseOption = Annotated[
    str | None,
    typer.Option(
        "--warehouse",
        envvar="TIERLOG_WAREHOUSE",
        metavar="URL",
        help="Where a catalog in a database has its tables: s3://bucket/prefix or file:///folder.",
    ),
]
PropertyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--catalog-property",
        metavar="NAME=VALUE",
        help="A property of the catalog or its files' store, as PyIceberg names them; may be "
        "repeated.",
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--table",
        metavar="NAMESPACE.NAME",
        help="The table; by default tierlog.TOPIC, in lower case and with _ for dots and dashes.",
    ),
]
TopicOrModes = Annotated[
    str | None,
    typer.Argument(
        metavar="TOPIC",
        help="The topic; by default all with an iceberg.mode.",
        autocompletion=complete_topic,
    ),
]
OnSpark = Annotated[
    bool,
    typer.Option("--spark", help="Write the files on Spark's executors; commit them from here."),
]
TableArgument = Annotated[str, typer.Argument(metavar="NAMESPACE.NAME", help="The table.")]


class Mode(StrEnum):
    RAW = RAW_MODE
    JSON = JSON_MODE
    SCHEMA = SCHEMA_MODE


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogOptions:
    """Which catalog."""

    catalog: CatalogOption
    warehouse: WarehouseOption = None
    catalog_property: PropertyOption = None
    endpoint: EndpointOption = None
    region: RegionOption = None

    def open(self) -> Catalog:
        return _open(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions(LogOptions):
    """Which table of which catalog, and which log."""

    catalog: CatalogOption
    table: NameOption = None
    warehouse: WarehouseOption = None
    catalog_property: PropertyOption = None

    def open(self) -> Catalog:
        return _open(self)

    def name(self, topic: str) -> Name:
        return table_name(self.table, topic)

    def reading(self, topic: str | None) -> ReadOptions:
        return read_options(self.given(includeHeaders="true"), topic)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions(TableOptions):
    """And who writes the files."""

    spark: OnSpark = False
    master: MasterOption = None
    conf: ConfOption = None

    def session(self) -> AbstractContextManager[Any]:
        """None without Spark."""
        if not self.spark:
            return nullcontext()
        return job("tierlog table sync", master=self.master, conf=self.conf)


def _open(options: CatalogOptions | TableOptions) -> Catalog:
    near = {"s3.endpoint": options.endpoint, "s3.region": options.region}
    properties = {"warehouse": options.warehouse, **pairs(options.catalog_property)}
    return open_catalog(options.catalog, _given(properties), near=_given(near))


def _given(properties: Mapping[str, str | None]) -> dict[str, str]:
    return {name: one for name, one in properties.items() if one}


@app.command("create")
@reads(TableOptions)
def create(
    options: TableOptions,
    topic: TopicArgument,
    *,
    mode: Annotated[
        Mode | None,
        typer.Option(
            help="Values as they are, or with their fields as columns, by what JSON says or by the "
            "registry's schemas; by default the topic's iceberg.mode, or raw.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME TYPE'",
            help="With json or schema: a column that is there from the beginning, as in 'price "
            "double'; may be repeated. Others are added when records have them.",
        ),
    ] = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Create an empty table for a topic, partitioned by day of timestamp."""
    ((position, wanted),) = begin_tables(options.reading(topic))
    wanted = mode.value if mode is not None else RAW_MODE if wanted == NO_MODE else wanted
    if column and wanted not in COLUMN_MODES:
        raise typer.BadParameter(f"--column: a table of mode {wanted} has columns of its own")
    columns = given_columns(column or [])
    table = create_table(
        options.open(), options.name(topic), position, mode=wanted, columns=columns
    )
    name, location = dotted(table.name()), table.location()
    output.report(
        {"table": name, "mode": wanted, "location": location},
        f"created {name} of mode {wanted} at {location}",
    )


@app.command("sync")
@reads(SyncOptions)
def sync(
    options: SyncOptions,
    topic: TopicOrModes = None,
    *,
    commit_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of log per commit.")
    ] = f"{COMMIT_BYTES >> 30}GiB",
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what arrives, until interrupted.")
    ] = False,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="With --follow: how often to look.")
    ] = "60s",
    output: OutputOption = Output.AUTO,
) -> None:
    """Add the records that the table does not have yet, each once. If run again, it goes on where
    it was. Without TOPIC, of all topics whose iceberg.mode is not none; tables are created.
    """
    if topic is None and options.table is not None:
        raise typer.BadParameter("--table: without TOPIC, each topic has a table of its own")
    pause_s = _seconds("--every", every)
    step = size_of("--commit-bytes", commit_bytes, least=1)
    catalog = options.open()
    with options.session() as session:
        run = _Run(options, catalog, session, step, output)
        while follow:
            began = time.monotonic()
            try:
                run.sync_topics(topic, is_repeated=True)
            except (RetriableError, OutcomeUnknownError) as error:
                warn(f"trying again in {every}: {error}")
            time.sleep(max(0.0, began + pause_s - time.monotonic()))
        went_well = run.sync_topics(topic)
    if not went_well:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Run:
    """`session` is None without Spark."""

    options: TableOptions
    catalog: Catalog
    session: Any
    commit_bytes: int
    output: Output

    def sync_topics(self, topic: str | None, *, is_repeated: bool = False) -> bool:
        """Whether all went well: where one of many does not, the others go on."""
        if topic is not None:
            self._sync(topic, is_repeated=is_repeated)
            return True
        failed = False
        for position, mode in begin_tables(self.options.reading(None)):
            if mode == NO_MODE:
                continue
            try:
                self._create(position, mode)
                self._sync(position.topic, is_repeated=is_repeated)
            except TierlogError as error:
                warn(f"{position.topic}: {in_flags(str(error), self.options.option or ())}")
                failed = True
        return not failed

    def _create(self, position: Position, mode: str) -> None:
        """Unless it is there."""
        name = table_name(None, position.topic)
        try:
            load_table(self.catalog, name)
        except UnknownTable:
            create_table(self.catalog, name, position, mode=mode)

    def _sync(self, topic: str, *, is_repeated: bool) -> None:
        name = self.options.name(topic)
        with self._writer(f"sync {topic}") as writer:
            run = TableSync(
                catalog=self.catalog,
                name=name,
                topic=topic,
                options=self.options.reading(topic),
                commit_bytes=self.commit_bytes,
                writer=writer,
                log=warn,
            )
            done = run.sync_table()
        if done.commits or not is_repeated:
            _report(run, done, self.output)

    @contextmanager
    def _writer(self, title: str) -> Iterator[StepWriter]:
        if self.session is None:
            with record_counter(title) as show:
                yield LocalWriter(show)
            return
        from tierlog.tables.spark_writer import SparkWriter  # needs pyspark

        with task_bar(title) as progress:
            yield SparkWriter(self.session, progress=progress)


def _report(run: TableSync, done: Synced, output: Output) -> None:
    name, offsets = dotted(run.name), position_of(load_table(run.catalog, run.name)).offsets
    output.report(
        {"table": name, **done._asdict(), "offsets": offsets},
        f"{name}: {done.records} records in {done.commits} commits"
        + (f", and {done.errors} in {dotted(errors_name(run.name))}" if done.errors else ""),
    )
    sys.stdout.flush()  # with --follow more may be long in coming


def _seconds(option: str, text: str) -> float:
    try:
        duration_ms = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None
    if duration_ms <= 0:
        raise typer.BadParameter(f"{option}: {text!r} is not above 0")
    return duration_ms / 1000


@app.command("maintain")
@takes(CatalogOptions)
def maintain(
    options: CatalogOptions,
    table: TableArgument,
    *,
    snapshots_older_than: Annotated[
        str, typer.Option(metavar="DURATION", help="Expire snapshots that are older.")
    ] = "5d",
    orphans_older_than: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="Remove files without a snapshot that are older; longer than any run takes.",
        ),
    ] = "3d",
    output: OutputOption = Output.AUTO,
) -> None:
    """Rewrite small files as large ones, expire snapshots, and remove what nothing refers to."""
    ages = Ages(
        timedelta(seconds=_seconds("--snapshots-older-than", snapshots_older_than)),
        timedelta(seconds=_seconds("--orphans-older-than", orphans_older_than)),
    )
    done = maintain_table(options.open(), table_name(table, ""), ages, log=warn)
    output.report(
        {"table": table, **done._asdict()},
        f"{table}: {done.files_rewritten} files became {done.files_written}, "
        f"{done.snapshots_expired} snapshots expired, {done.files_removed} files removed",
    )


@app.command("status")
@reads(TableOptions)
def status(options: TableOptions, topic: TopicArgument, output: OutputOption = Output.AUTO) -> None:
    """Show what a table has, and how far it is behind its topic."""
    table = load_table(options.open(), options.name(topic))
    has_log = options.store is not None or options.server is not None
    found = status_of(table, options.reading(topic) if has_log else None)
    errors = load_errors(table.catalog, table) if found.errors else None
    refused = [] if errors is None else latest_refused(errors)
    members = {**found._asdict(), "latest_errors_schema_id": schema_of_most(refused)}
    if output.is_json:
        print_json({**members, "partitions": [one._asdict() for one in found.partitions]})
        return
    print_members(members)  # the partitions are left out
    print_table("", ("partition", "next offset", "log end", "lag"), found.partitions)


@app.command("list")
@takes(CatalogOptions)
def list_tables(options: CatalogOptions, output: OutputOption = Output.AUTO) -> None:
    """List the catalog's tables of topics; exits with 1 if one of them cannot be read."""
    damaged: list[CorruptDataError] = []
    found = [status_of(one, None) for one in tables_of_topics(options.open(), damaged.append)]
    rows = [
        (
            one.table,
            one.topic,
            one.mode,
            one.records,
            format_size(one.size_bytes),
            format_time(one.last_commit_ms),
        )
        for one in found
    ]
    columns = ("table", "topic", "mode", "records", "size", "last commit")
    output.table({"tables": list(map(_listed, found))}, columns, rows)
    for error in damaged:
        warn(str(error))
    if damaged:
        raise typer.Exit(1)


_LISTED: Final = ("table", "topic", "mode", "location", "records", "size_bytes", "last_commit_ms")


def _listed(status: TableStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in _LISTED}


@app.command("drop")
@takes(CatalogOptions)
def drop(
    options: CatalogOptions,
    table: TableArgument,
    *,
    purge: Annotated[bool, typer.Option("--purge", help="Also delete its files.")] = False,
    yes: YesOption = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """Remove a topic's table from the catalog, and that of its errors. The topic is left alone."""
    catalog = options.open()
    found = load_table(catalog, table_name(table, ""))
    errors = load_errors(catalog, found)
    names = [dotted(one.name()) for one in (found, errors) if one is not None]
    with_files = " and deletes the files" if purge else "; files are kept"
    confirm(f"this removes {' and '.join(names)} from the catalog{with_files}", yes=yes)
    for one in (errors, found):
        if one is not None:
            drop_table(catalog, one, purge=purge)
    output.report({"dropped": names}, f"dropped {' and '.join(names)}")
