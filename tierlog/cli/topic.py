"""`tierlog topic`: create, list, describe, alter, delete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.options import (
    BucketOptions,
    ClientOrBucket,
    OutputOption,
    YesOption,
    client_command,
    client_or_bucket_command,
    complete_topic,
    confirm,
)
from tierlog.cli.output import (
    FOUND_PROBLEMS,
    Output,
    format_size,
    note,
    print_json,
    print_table,
    warn,
)
from tierlog.hot_tier.config_words import from_words, in_words
from tierlog.record_format.errors import CorruptDataError

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.responses import AlteredTopic, PartitionDescription, Topic, TopicDescription

app = typer.Typer(no_args_is_help=True, add_completion=False)

NewName = Annotated[str, typer.Argument(metavar="NAME", help="The topic.")]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The topic.", autocompletion=complete_topic)
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="KEY=VALUE",
        help="A topic setting, as in retention.ms=7d or segment.bytes=64MiB; may be repeated.",
    ),
]


@app.command("create")
@client_command
def create(
    client: Client,
    name: NewName,
    *,
    partitions: Annotated[int, typer.Option(min=1, help="Number of partitions.")] = 1,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            min=1, help="Brokers that have each partition; default.replication.factor by default."
        ),
    ] = None,
    config: Config = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Create a topic."""
    topic = client.create_topic(
        name,
        partitions=partitions,
        config=parse_config(config),
        replication_factor=replication_factor,
    )
    warn_of(topic)
    count, each = len(topic.all_partitions), topic.replication_factor
    replicas = f", {each} replicas of each" if each > 1 else ""
    output.report(topic, f"created {name} with {count} partition{'s' * (count != 1)}{replicas}")


@app.command("list")
@client_or_bucket_command
def list_topics(
    source: ClientOrBucket,
    *,
    prefix: Annotated[str | None, typer.Option(help="Only names with this prefix.")] = None,
    internal: Annotated[bool, typer.Option("--internal", help="Include internal topics.")] = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """List the topics by name."""
    unreadable: list[CorruptDataError] = []
    if isinstance(source, BucketOptions):
        topics, unreadable = _topics_in_bucket(source, prefix or "", internal=internal)
    else:
        topics = list(source.list_topics(prefix=prefix, internal=internal))
    rows = [
        (one.name, one.partitions, ", ".join(map("=".join, _config_pairs(one.config))))
        for one in topics
    ]
    output.table({"topics": topics}, ("topic", "partitions", "config"), rows)
    for error in unreadable:
        note(str(error))
    if unreadable:
        raise typer.Exit(FOUND_PROBLEMS)


def _topics_in_bucket(
    bucket: BucketOptions, prefix: str, *, internal: bool
) -> tuple[list[Topic], list[CorruptDataError]]:
    """The topics in the bucket, and the errors of those that cannot be read."""
    with bucket.reader() as stored:
        found = list(stored.topics(stored.names(prefix, internal=internal)))
    errors = [one for one in found if isinstance(one, CorruptDataError)]
    return [one for one in found if not isinstance(one, CorruptDataError)], errors


@app.command("describe")
@client_command
def describe(
    client: Client,
    name: Name,
    all_config: Annotated[
        bool, typer.Option("--all", help="Show all effective settings, including defaults.")
    ] = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """Show a topic's partitions, the size of each tier, and its settings."""
    topic = client.describe_topic(name)
    if output.is_json:
        print_json(topic)
    else:
        print_topic(topic, all_config=all_config)


@app.command("alter")
@client_command
def alter(
    client: Client,
    name: Name,
    *,
    config: Config = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A setting to reset to its default; may be repeated."),
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="New number of partitions; it can only grow.")
    ] = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Change settings, or add partitions."""
    changes = parse_config(config) | dict.fromkeys(unset or ())
    if not changes and partitions is None:
        raise typer.BadParameter("give --config, --unset or --partitions")
    if changes and partitions is not None:
        raise typer.BadParameter("--partitions cannot be combined with --config or --unset")
    topic = client.alter_topic(name, config=changes or None, partitions=partitions)
    warn_of(topic)
    output.report(topic, f"altered {name}")


def warn_of(topic: AlteredTopic) -> None:
    for code in topic.warnings:
        warn(topic.warning_details.get(code, code))


@app.command("delete")
@client_command
def delete(
    client: Client,
    name: Name,
    yes: YesOption = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """Delete a topic, on local disk and in the bucket."""
    confirm(f"this deletes all records of {name}, hot and cold", yes=yes)
    client.delete_topic(name)
    output.report({"deleted": name}, f"deleted {name}")


def parse_config(pairs: list[str] | None) -> dict[str, Any]:
    """Parse `KEY=VALUE` pairs. Durations, sizes and words become Kafka's numbers."""
    parsed: dict[str, Any] = {}
    for pair in pairs or ():
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"--config takes KEY=VALUE, not {pair!r}")
        if key in parsed:
            raise typer.BadParameter(f"--config {key} is given twice")
        try:
            parsed[key] = from_words(key, value)
        except ValueError as error:
            raise typer.BadParameter(f"--config {error}") from error
    return parsed


def print_topic(topic: TopicDescription, *, all_config: bool = False) -> None:
    has_leaders = any(one.leader for one in topic.partitions)
    has_replicas = any(len(one.replicas) > 1 or one.store_in_sync for one in topic.partitions)
    title, in_cluster = f"{topic.name}  {topic.topic_id}", has_leaders and not has_replicas
    if has_replicas:  # all of it in one table would be wider than most terminals
        moves = any(one.adding_replicas or one.removing_replicas for one in topic.partitions)
        sets = [
            (
                *(one.partition, _leader_of(one), one.leader_epoch, *_set_of(one)),
                *((_nodes(one.adding_replicas), _nodes(one.removing_replicas)) if moves else ()),
            )
            for one in topic.partitions
        ]
        of_set = ("partition", "leader", "epoch", "replicas", "in sync", "behind")
        print_table(title, (*of_set, *(("adding", "removing") if moves else ())), sets)
        title = ""
    columns = (
        "partition",
        "log start",
        "local start",
        "high watermark",
        "log end",
        *(() if has_replicas else ("epoch",)),
        *(("leader",) if in_cluster else ()),
        "segments",
        "hot",
        "cold",
        "not offloaded",
    )
    rows = [
        (
            one.partition,
            one.log_start_offset,
            one.local_log_start_offset,
            one.high_watermark,
            one.log_end_offset,
            *(() if has_replicas else (one.leader_epoch,)),
            *((_leader_of(one),) if in_cluster else ()),
            one.segments,
            format_size(one.hot_bytes),
            format_size(one.cold_bytes),
            format_size(one.offload_lag_bytes),
        )
        for one in topic.partitions
    ]
    print_table(title, columns, rows)
    note_damaged(topic)
    short = sum(len(one.in_sync_replicas) < len(one.replicas) for one in topic.partitions)
    if short:
        note(f"{short} partition{'s' * (short > 1)} with fewer replicas in sync than there are")
    config = topic.effective_config if all_config else topic.config
    if config:
        print_table("", ("setting", "value"), _config_pairs(config))


def _leader_of(partition: PartitionDescription) -> int | None:
    return None if partition.leader is None else partition.leader.node_id


def _set_of(partition: PartitionDescription) -> tuple[str | None, ...]:
    replicas, in_sync = partition.replicas, partition.in_sync_replicas
    behind = behind_in_words(zip(replicas, partition.replica_lags, strict=False))
    store = ("store",) if partition.store_in_sync else ()
    return _nodes(replicas), ",".join((*map(str, in_sync), *store)), behind or None


def behind_in_words(lags: Iterable[tuple[int, int]]) -> str:
    """`node:offsets` of each replica that lacks some; `?` of one that has not said."""
    return " ".join(f"{node}:{'?' if lag < 0 else f'{lag:,}'}" for node, lag in lags if lag)


def _nodes(node_ids: Iterable[int]) -> str:
    return ",".join(map(str, node_ids))


def note_damaged(topic: TopicDescription) -> None:
    for damaged in topic.damaged_partitions:
        note(f"partition {damaged.partition} is not served: {damaged.detail}")


def _config_pairs(config: dict[str, Any]) -> list[tuple[str, str]]:
    """The settings in words, which --config takes, too."""
    return [(key, in_words(key, value)) for key, value in sorted(config.items())]
