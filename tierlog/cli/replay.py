"""`tierlog replay`: copy a range of a topic to files by date and hour, or to another topic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.cli.client_options import OutputOption, TopicArgument
from tierlog.cli.option_groups import takes
from tierlog.cli.output import Output, note, print_json, print_members
from tierlog.cli.spark_options import SourceOptions, job, task_bar

if TYPE_CHECKING:
    from spark_reader.jobs.replay import ToTopic

app = typer.Typer(add_completion=False)

ONE_TARGET = "One of --to-parquet, --to-json and --to-topic."


@app.command()
@takes(SourceOptions)
def replay(
    source: SourceOptions,
    topic: TopicArgument,
    *,
    to_parquet: Annotated[str | None, typer.Option(metavar="FOLDER", help=ONE_TARGET)] = None,
    to_json: Annotated[str | None, typer.Option(metavar="FOLDER", help=ONE_TARGET)] = None,
    to_topic: Annotated[str | None, typer.Option(metavar="NAME", help=ONE_TARGET)] = None,
    notes: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="With --to-topic: a folder that records the progress."),
    ] = None,
    to_server: Annotated[
        str | None, typer.Option(metavar="URL", help="With --to-topic; --server by default.")
    ] = None,
    by_key: Annotated[
        bool,
        typer.Option(
            "--by-key",
            help="With --to-topic: choose partitions by key, instead of keeping their numbers.",
        ),
    ] = False,
    base64: Annotated[
        bool,
        typer.Option("--base64", help="With --to-json: write bytes as base64 instead of text."),
    ] = False,
    headers: Annotated[
        bool, typer.Option("--headers", help="With files: also write a column `headers`.")
    ] = False,
    from_offset: Annotated[
        int | None, typer.Option(min=0, help="With --partition; inclusive.")
    ] = None,
    to_offset: Annotated[
        int | None, typer.Option(min=0, help="With --partition; exclusive.")
    ] = None,
    step_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of log per step.")] = "4g",
    output: OutputOption = Output.AUTO,
) -> None:
    """Copy a range of a topic elsewhere, in steps. If run again, it resumes where it stopped."""
    from spark_reader.jobs.replay import ToFiles
    from spark_reader.jobs.replay import replay as run_replay
    from spark_reader.option_values import size

    target: ToFiles | ToTopic
    if [to_parquet, to_json, to_topic].count(None) != 2:
        raise typer.BadParameter("no target: give one of --to-parquet, --to-json and --to-topic")
    if to_topic is not None:
        target = _to_topic(to_topic, source, to_server, notes, by_key=by_key)
    elif to_json is not None:
        target = ToFiles(folder=_url(to_json), kind="json", base64=base64)
    else:
        target = ToFiles(folder=_url(to_parquet or ""))
    rows = source.of(
        topic,
        {
            "startingOffsets": _offsets(topic, source.partition, from_offset),
            "endingOffsets": _offsets(topic, source.partition, to_offset),
            "includeHeaders": "true" if headers else None,
        },
    )
    step = size("--step-bytes", step_bytes)
    with (
        job("tierlog replay", master=source.master, conf=source.conf) as session,
        task_bar(f"replay {topic}") as progress,
    ):
        report = run_replay(session, rows, target, step_bytes=step, progress=progress, log=note)
    if output.is_json:
        print_json({name: getattr(report, name) for name in report.__dataclass_fields__})
    else:
        print_members([(n, getattr(report, n)) for n in report.__dataclass_fields__])


def _to_topic(
    name: str,
    source: SourceOptions,
    to_server: str | None,
    notes: str | None,
    *,
    by_key: bool,
) -> ToTopic:
    from spark_reader.jobs.replay import ToTopic

    server = to_server or source.server
    if server is None:
        raise typer.BadParameter("--to-topic requires --to-server or --server")
    if notes is None:
        raise typer.BadParameter("--to-topic requires --notes: a folder that records the progress")
    options = {"server": server, "topic": name, "compression": "lz4"}
    if source.token_file is not None:
        options["tokenFile"] = str(source.token_file)
    return ToTopic(options=options, notes=_url(notes), keep_partitions=not by_key)


def _url(folder: str) -> str:
    """Make a local path a URL; Spark would resolve it in its own default file system.

    Not percent-encoded: Hadoop would take the escapes literally.
    """
    return folder if "://" in folder else f"file://{Path(folder).absolute()}"


def _offsets(topic: str, partitions: list[int] | None, offset: int | None) -> str | None:
    if offset is None:
        return None
    if not partitions:
        raise typer.BadParameter(
            "offsets are per partition: --from-offset and --to-offset require --partition"
        )
    return json.dumps({topic: {str(number): offset for number in partitions}})
