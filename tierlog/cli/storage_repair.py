"""`tierlog storage repair | gc | restore | finalize`: changes that only the owner of a bucket may
make.

Without `--apply`, `repair` and `gc` print a plan, and change nothing in the bucket or on disk. They
open the owner's data folder, which must not be open in a broker; only the plan of `gc` is made from
the bucket alone. `restore` creates a new folder. `finalize` ends the way back to an older version.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from tierlog.broker.settings import BrokerSettings
from tierlog.cli.options import (
    BucketOptions,
    EndpointOption,
    OutputOption,
    RegionOption,
    TopicArgument,
    setting_option,
    takes,
)
from tierlog.cli.output import FOUND_PROBLEMS, Output, note, print_json, print_table
from tierlog.host.clock import wall_clock_ms

if TYPE_CHECKING:
    from tierlog.broker.broker import Broker
    from tierlog.manifest.garbage import GarbagePlan, GarbagePolicy
    from tierlog.object_store.store import ObjectStore
    from tierlog.repair.local_repair import RepairStep
    from tierlog.repair.restore import RestoreReport


DataDirOption = Annotated[
    Path,
    setting_option(
        "data.dir", metavar="DIR", help="The owner's data folder; no broker may have it open."
    ),
]
OwnStoreOption = Annotated[
    str | None,
    setting_option(
        "store",
        metavar="URL",
        help="s3://bucket/prefix or file:///folder; omit it for a folder without a bucket.",
    ),
]
TakeOverOption = Annotated[
    bool,
    typer.Option("--take-over", help="First take over partitions that another folder owns."),
]
SingleWriterOption = Annotated[
    bool, typer.Option("--allow-single-writer-store", help="As for serve.")
]

GraceOption = Annotated[
    int,
    setting_option("gc.grace.ms", metavar="MS", help="As for serve: what is younger is kept."),
]
VersionsOption = Annotated[
    int,
    setting_option("manifest.versions.min", metavar="N", help="As for serve.", show_envvar=False),
]
GapOption = Annotated[
    int,
    setting_option(
        "restore.offset.gap",
        help="As for serve: offsets skipped by a take-over, so that none is assigned twice.",
        metavar="N",
    ),
]

_DEFAULTS: Final[dict[str, Any]] = {one.name: one.default for one in fields(BrokerSettings)}
OFFSET_GAP: Final[int] = _DEFAULTS["restore_offset_gap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """The bucket of a data folder, which is an option of the command itself."""

    store: OwnStoreOption = None
    endpoint: EndpointOption = None
    region: RegionOption = None
    single_writer: SingleWriterOption = False

    @property
    def bucket(self) -> BucketOptions | None:
        return BucketOptions.if_given(self.store, self.endpoint, self.region)

    def open_store(self, data_dir: Path, **more: Any) -> tuple[BrokerSettings, ObjectStore | None]:
        """`more`: settings. Raises ConfigurationError."""
        from tierlog.broker.bucket.store_status import check_has_no_bucket
        from tierlog.cli.logs import configure_logs
        from tierlog.record_format import native
        from tierlog.record_format.errors import ConfigurationError

        if not (data_dir / "meta.properties").exists():
            raise ConfigurationError(f"{data_dir} is not a broker's data folder")
        configure_logs()
        settings = BrokerSettings(
            data_dir=data_dir, allow_single_writer_store=self.single_writer, **more
        )
        with suppress(ImportError):  # no numba, or another: slower, with the same results
            native.load()
        bucket = self.bucket
        if bucket is None:
            check_has_no_bucket(data_dir)
        return settings, bucket.open() if bucket else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerOptions(FolderOptions):
    """How to open the owner."""

    take_over: TakeOverOption = False
    gap: GapOption = OFFSET_GAP
    grace_ms: GraceOption = _DEFAULTS["gc_grace_ms"]
    versions_min: VersionsOption = _DEFAULTS["manifest_versions_min"]

    def policy(self) -> GarbagePolicy:
        from tierlog.manifest.garbage import GarbagePolicy

        return GarbagePolicy(grace_ms=self.grace_ms, keep_min=self.versions_min)

    @contextmanager
    def broker(self, data_dir: Path) -> Iterator[Broker]:
        """Open a broker on the owner's folder, with its lock, without a server and background work.

        Raises ConfigurationError.
        """
        from tierlog.broker.broker import Broker

        settings, store = self._open_store(data_dir)
        broker = Broker.open_idle(settings, store=store)
        try:
            yield broker
        finally:
            broker.close()

    def repair_plan(self, data_dir: Path, topic: str, *, deep: bool) -> list[RepairStep]:
        """The steps of a repair; changes nothing. Raises ConfigurationError."""
        from tierlog.repair.repair import plan_repair

        settings, store = self._open_store(data_dir)
        return plan_repair(settings, store, topic, deep=deep)

    def _open_store(self, data_dir: Path) -> tuple[BrokerSettings, ObjectStore | None]:
        return self.open_store(
            data_dir,
            take_over=self.take_over,
            restore_offset_gap=self.gap,
            gc_grace_ms=self.grace_ms,
            manifest_versions_min=self.versions_min,
        )


app = typer.Typer()

GarbageDirOption = Annotated[
    Path | None,
    setting_option(
        "data.dir",
        metavar="DIR",
        help="The owner's data folder, for --apply; no broker may have it open.",
    ),
]
ApplyOption = Annotated[
    bool, typer.Option("--apply", help="Carry out the plan; without it, only show the plan.")
]


@app.command("repair")
@takes(OwnerOptions)
def repair(
    owner: OwnerOptions,
    topic: TopicArgument,
    data_dir: DataDirOption,
    *,
    apply: ApplyOption = False,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Also give up records of which no good copy exists."),
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte first.")] = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """Repair what verify finds, and logs that a broker could not open.

    Uploads logs again, rebuilds indexes, and drops what no longer exists anywhere. Bad files are
    set aside, never deleted.
    """
    if apply:
        from tierlog.repair.repair import repair_topic

        with owner.broker(data_dir) as broker:
            steps = repair_topic(broker, topic, apply=True, deep=deep, accept_loss=accept_loss)
    else:
        steps = owner.repair_plan(data_dir, topic, deep=deep)
    if output.is_json:
        print_json({"topic": topic, "applied": apply, "steps": steps})
    elif steps:
        rows = [
            (one.action, one.partition, one.object_key, one.detail, "yes" if one.done else "no")
            for one in steps
        ]
        print_table(topic, ("step", "partition", "object", "why", "done"), rows)
    if not steps:
        note(f"{topic}: nothing to repair")
    elif not apply:
        note("nothing was changed; --apply carries out the plan")
    if any(not one.done for one in steps):
        raise typer.Exit(FOUND_PROBLEMS)


@app.command("gc")
@takes(OwnerOptions)
def gc(
    owner: OwnerOptions,
    topic: TopicArgument,
    *,
    data_dir: GarbageDirOption = None,
    apply: ApplyOption = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """Delete unreferenced objects and manifest versions whose grace period is over.

    Without --apply they are only listed, from the bucket alone, even while a broker is running,
    and so are write-ahead objects, with the reason why each stays: its broker deletes them.
    --apply opens the owner's data folder.
    """
    bucket = owner.bucket
    if bucket is None:
        raise typer.BadParameter("gc requires --store URL: garbage is collected in a bucket")
    kept: list[tuple[int, str, str]] = []
    if not apply:
        with bucket.reader() as reader:
            plans = reader.garbage(topic, owner.policy())
            kept = list(reader.write_ahead(topic))
    elif data_dir is None:
        raise typer.BadParameter(
            "gc --apply requires --data-dir DIR: only the owner of a bucket may delete from it"
        )
    else:
        plans = _collect_garbage(owner, topic, data_dir)
    rows = [(number, *one) for number, plan in plans.items() for one in _items(plan)]
    if output.is_json:
        shown = [{"partition": number, "kind": kind, "name": name} for number, kind, name in rows]
        stays = [{"partition": number, "name": key, "reason": why} for number, key, why in kept]
        print_json({"topic": topic, "applied": apply, "garbage": shown, "write_ahead": stays})
    elif rows:
        print_table(topic, ("partition", "what", "name"), rows)
    if kept and not output.is_json:
        print_table("write-ahead objects", ("partition", "name", "why it stays"), kept)
    if apply:
        note(f"{len(rows)} deleted")
    else:
        note(f"{len(rows)} to delete; --apply deletes them" if rows else "nothing to delete")


def _collect_garbage(owner: OwnerOptions, topic: str, data_dir: Path) -> dict[int, GarbagePlan]:
    """Raises ConfigurationError."""
    from tierlog.broker.data_folder.data_folder import FolderInUse
    from tierlog.record_format.errors import ConfigurationError

    try:
        with owner.broker(data_dir) as broker:
            return broker.collect_garbage(topic, apply=True)
    except FolderInUse as error:
        raise ConfigurationError(
            f"{data_dir} is in use by a broker, which collects garbage itself, every 24th of "
            "gc.grace.ms (by default every hour); to collect now, stop it first"
        ) from error


def _items(plan: GarbagePlan) -> Iterator[tuple[str, str | int]]:
    """The kind of each item, and its name (a number for a version)."""
    yield from (("dropped", key) for key in plan.objects)
    yield from (("orphan", key) for key in plan.orphans)
    yield from (("unfinished upload", upload.key) for upload in plan.uploads)
    yield from (("version", number) for number in plan.versions)
    yield from (("pin", name) for name in plan.pins)


@app.command("restore")
@takes(BucketOptions)
def restore(
    bucket: BucketOptions,
    *,
    data_dir: Annotated[Path, typer.Option("--data-dir", metavar="NEW", help="A new folder.")],
    tail: Annotated[
        Path | None,
        typer.Option(metavar="OLD_DIR", help="The lost broker's folder, or what remains of it."),
    ] = None,
    gap: GapOption = OFFSET_GAP,
    output: OutputOption = Output.AUTO,
) -> None:
    """Create a data folder from a bucket. The first serve on it takes over the partitions."""
    from tierlog.cli.logs import configure_logs
    from tierlog.repair.restore import RestoreOptions
    from tierlog.repair.restore import restore as restore_folder

    configure_logs()
    options = RestoreOptions(data_dir=data_dir, gap=gap, clock=wall_clock_ms, tail=tail)
    with bucket.opened() as store:
        try:
            report = restore_folder(store, options)
        except KeyboardInterrupt:
            note(f"interrupted: run the same command again, it starts over on {data_dir}")
            raise
    if output.is_json:
        print_json(report)
    else:
        _print_restored(report)
    damaged = [f"{one.topic}-{one.partition}" for one in report.partitions if one.is_damaged]
    unreadable = any(other.unreadable for other in report.others)
    if unreadable:
        note("before serving: bring back the unreadable objects, and restore into a new folder")
    elif not output.is_json:
        command = ("tierlog", "serve", "--data-dir", str(data_dir), *bucket.flags)
        note(f"{shlex.join(command)} continues from there")
    if damaged:
        places = ", ".join(damaged)
        note(f"damaged: {places}: serve once, stop, `storage repair --deep` on {data_dir}")
    if unreadable or damaged:
        raise typer.Exit(FOUND_PROBLEMS)


def _print_restored(report: RestoreReport) -> None:
    rows = [
        (
            f"{one.topic}-{one.partition}",
            one.log_start_offset,
            one.end_offset,
            one.segments,
            one.tail.detail if one.tail else "-",
        )
        for one in report.partitions
    ]
    columns = ("partition", "log start", "bucket's end", "segments", "tail")
    print_table(f"cluster {report.cluster_id}", columns, rows)
    for other in report.others:
        why = "deleted" if other.deleted else "older than the topic of that name"
        note(f"not restored: {other.name} ({other.topic_id}), {other.unreadable or why}")


@app.command("finalize")
@takes(FolderOptions)
def finalize(
    folder: FolderOptions,
    data_dir: DataDirOption,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, and change nothing.")
    ] = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """After an upgrade: write the newest formats. The version before it then opens neither the
    folder nor its bucket.

    Until then it opens both. Every partition is opened first; nothing is raised if one is damaged.
    """
    from tierlog.repair.finalize import finalize as raise_level

    report = raise_level(*folder.open_store(data_dir), dry_run=dry_run)
    places = " and ".join(filter(None, (str(data_dir), report.store)))
    older = f"tierlog older than {report.read_since}"
    if report.from_level == report.to_level:
        said = f"format level {report.to_level} is the newest of this version: nothing to do"
    elif dry_run:
        checked = f"{report.partitions} partition{'s' * (report.partitions != 1)} checked"
        said = (
            f"{checked}; the format level would rise from {report.from_level} to "
            f"{report.to_level}, and {older} would no longer open {places}. Nothing was changed"
        )
    else:
        said = f"format level {report.to_level}: {older} no longer opens {places}"
    output.report(msgspec.to_builtins(report, enc_hook=str), said)
