"""`tierlog storage repair | gc | restore`: changes that only the owner of a bucket makes.

`repair` and `gc` only say what they would do, until `--apply`. They open the owner's data folder,
which no broker may have open; only what `gc` says is read from the bucket alone. `restore` makes a
new folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierlog.cli.client_options import OutputOption, TopicArgument
from tierlog.cli.offline import (
    GRACE_MS,
    OFFSET_GAP,
    VERSIONS_MIN,
    DataDirOption,
    EndpointOption,
    GapOption,
    GraceOption,
    RegionOption,
    SingleWriterOption,
    StoreOption,
    TakeOverOption,
    VersionsOption,
    now_ms,
    opened_owner,
    opened_store,
)
from tierlog.cli.output import FOUND_PROBLEMS, Output, note, print_json, print_table

app = typer.Typer()


GarbageDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="TIERLOG_DATA_DIR",
        help="The owner's data folder, for --apply; no broker may have it open.",
        metavar="DIR",
    ),
]
ApplyOption = Annotated[bool, typer.Option("--apply", help="Do it; without, only say it.")]


@app.command("repair")
def repair(
    topic: TopicArgument,
    *,
    store: StoreOption,
    data_dir: DataDirOption,
    apply: ApplyOption = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Also cut a log whose records are nowhere else.")
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte first.")] = False,
    take_over: TakeOverOption = False,
    gap: GapOption = OFFSET_GAP,
    endpoint: EndpointOption = None,
    region: RegionOption = None,
    single_writer: SingleWriterOption = False,
    grace_ms: GraceOption = GRACE_MS,
    versions_min: VersionsOption = VERSIONS_MIN,
    output: OutputOption = Output.AUTO,
) -> None:
    """Mend what verify finds, and logs that a broker could not open.

    Uploads again, makes indexes anew, drops what nobody has any more. What is bad on disk is set
    aside, never deleted.
    """
    from manifest.garbage import GarbagePolicy

    owner = opened_owner(
        data_dir,
        store,
        endpoint=endpoint,
        region=region,
        take_over=take_over,
        gap=gap,
        allow_single_writer_store=single_writer,
        policy=GarbagePolicy(grace_ms=grace_ms, keep_min=versions_min),
    )
    with owner as broker:
        steps = broker.repair(topic, apply=apply, deep=deep, accept_loss=accept_loss)
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
        note("nothing was changed; --apply does it")
    if any(not one.done for one in steps):
        raise typer.Exit(FOUND_PROBLEMS)


@app.command("gc")
def gc(
    topic: TopicArgument,
    *,
    store: StoreOption,
    data_dir: GarbageDirOption = None,
    apply: ApplyOption = False,
    take_over: TakeOverOption = False,
    gap: GapOption = OFFSET_GAP,
    endpoint: EndpointOption = None,
    region: RegionOption = None,
    single_writer: SingleWriterOption = False,
    grace_ms: GraceOption = GRACE_MS,
    versions_min: VersionsOption = VERSIONS_MIN,
    output: OutputOption = Output.AUTO,
) -> None:
    """Objects and manifest versions that nothing needs any more and whose grace is over.

    What would go is read from the bucket alone, also beside a running broker; --apply opens the
    owner's data folder.
    """
    from broker.data_folder import FolderInUse
    from manifest.garbage import GarbagePolicy
    from record_format.errors import ConfigurationError

    policy = GarbagePolicy(grace_ms=grace_ms, keep_min=versions_min)
    if not apply:
        from tierlog.cli.bucket_alone import Bucket

        with opened_store(store, endpoint, region) as opened:
            plans = Bucket(opened).garbage(topic, policy)
    elif data_dir is None:
        raise typer.BadParameter("only the owner of a bucket collects: --data-dir DIR")
    else:
        owner = opened_owner(
            data_dir,
            store,
            endpoint=endpoint,
            region=region,
            take_over=take_over,
            gap=gap,
            allow_single_writer_store=single_writer,
            policy=policy,
        )
        try:
            with owner as broker:
                plans = broker.collect_garbage(topic, apply=apply)
        except FolderInUse as error:
            raise ConfigurationError(
                f"{data_dir} is in use by a broker, which collects by itself, each hour (or each "
                "24th of another gc.grace.ms); to collect now, stop it first"
            ) from error
    rows = [
        (number, kind, name)
        for number, plan in plans.items()
        for kind, names in (
            ("dropped", plan.objects),
            ("orphan", plan.orphans),
            ("unfinished upload", [upload.key for upload in plan.uploads]),
            ("version", plan.versions),
            ("pin", plan.pins),
        )
        for name in names
    ]
    if output.is_json:
        shown = [{"partition": number, "kind": kind, "name": name} for number, kind, name in rows]
        print_json({"topic": topic, "applied": apply, "garbage": shown})
    elif rows:
        print_table(topic, ("partition", "what", "name"), [(n, k, str(x)) for n, k, x in rows])
    note(f"{len(rows)} {'deleted' if apply else 'to delete; --apply does it'}")


@app.command("restore")
def restore(
    *,
    store: StoreOption,
    data_dir: Annotated[Path, typer.Option("--data-dir", metavar="NEW", help="A new folder.")],
    tail: Annotated[
        Path | None,
        typer.Option(metavar="OLD_DIR", help="The lost broker's folder, or what is left of it."),
    ] = None,
    gap: GapOption = OFFSET_GAP,
    endpoint: EndpointOption = None,
    region: RegionOption = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Make a data folder out of a bucket; the first serve on it takes the partitions over."""
    from broker.restore import RestoreOptions
    from broker.restore import restore as restore_folder
    from tierlog.cli.logs import configure_logs

    configure_logs()
    options = RestoreOptions(data_dir=data_dir, gap=gap, clock=now_ms, tail=tail)
    with opened_store(store, endpoint, region) as opened:
        report = restore_folder(opened, options)
    if output.is_json:
        print_json(msgspec.to_builtins(report))
        return
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
        note(f"not restored: {other.name} ({other.topic_id}), {why}")
    note(f"tierlog serve --data-dir {data_dir} --store {store} goes on from there")
