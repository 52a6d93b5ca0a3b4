"""`tierlog replay`: copy a range of a topic to files by date and hour, or to another topic."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.cli.client_options import OutputOption, TopicArgument
from tierlog.cli.option_groups import takes
from tierlog.cli.output import Output, note, print_json, print_members
from tierlog.cli.spark_options import SourceOptions, job, task_bar

if TYPE_CHECKING:
    from tierlog.spark_reader.jobs.replay import ToFiles, ToTopic

app = typer.Typer(add_completion=False)

_ONE_TARGET = "One of --to-parquet, --to-json and --to-topic."

ToParquet = Annotated[str | None, typer.Option(metavar="FOLDER", help=_ONE_TARGET)]
ToJson = Annotated[str | None, typer.Option(metavar="FOLDER", help=_ONE_TARGET)]
ToTopicOption = Annotated[str | None, typer.Option(metavar="NAME", help=_ONE_TARGET)]
Notes = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="With --to-topic: a folder that records the progress."),
]
ToServer = Annotated[
    str | None, typer.Option(metavar="URL", help="With --to-topic; --server by default.")
]
ByKey = Annotated[
    bool,
    typer.Option(
        "--by-key",
        help="With --to-topic: choose partitions by key, instead of keeping their numbers.",
    ),
]
Base64 = Annotated[
    bool,
    typer.Option("--base64", help="With --to-json: write bytes as base64 instead of text."),
]
Headers = Annotated[
    bool, typer.Option("--headers", help="With files: also write a column `headers`.")
]
FromOffset = Annotated[int | None, typer.Option(min=0, help="With --partition; inclusive.")]
ToOffset = Annotated[int | None, typer.Option(min=0, help="With --partition; exclusive.")]
StepBytes = Annotated[str, typer.Option(metavar="SIZE", help="Bytes of log per step.")]


@app.command()
@takes(SourceOptions)
def replay(
    source: SourceOptions,
    topic: TopicArgument,
    *,
    to_parquet: ToParquet = None,
    to_json: ToJson = None,
    to_topic: ToTopicOption = None,
    notes: Notes = None,
    to_server: ToServer = None,
    by_key: ByKey = False,
    base64: Base64 = False,
    headers: Headers = False,
    from_offset: FromOffset = None,
    to_offset: ToOffset = None,
    step_bytes: StepBytes = "4g",
    output: OutputOption = Output.AUTO,
) -> None:
    """Copy a range of a topic elsewhere, in steps. If run again, it resumes where it stopped."""
    from tierlog.spark_reader.option_values import size

    if [to_parquet, to_json, to_topic].count(None) != 2:
        raise typer.BadParameter("give exactly one of --to-parquet, --to-json and --to-topic")
    target: ToFiles | ToTopic
    if to_topic is not None:
        target = _to_topic(to_topic, source, to_server, notes, by_key=by_key)
    else:
        target = _to_files(to_parquet, to_json, base64=base64)
    bounds = {
        "startingOffsets": _offsets(topic, source.partition, from_offset),
        "endingOffsets": _offsets(topic, source.partition, to_offset),
        "includeHeaders": "true" if headers else None,
    }
    step = size("--step-bytes", step_bytes)
    _run(source, topic, source.of(topic, bounds), target=target, step_bytes=step, output=output)


def _run(
    source: SourceOptions,
    topic: str,
    rows: dict[str, str],
    *,
    target: ToFiles | ToTopic,
    step_bytes: int,
    output: Output,
) -> None:
    """`rows`: the options of the Spark source."""
    from tierlog.spark_reader.jobs.replay import replay as run_replay

    with (
        job("tierlog replay", master=source.master, conf=source.conf) as session,
        task_bar(f"replay {topic}") as progress,
    ):
        report = run_replay(
            session, rows, target, step_bytes=step_bytes, progress=progress, log=note
        )
    members = asdict(report)
    if output.is_json:
        print_json(members)
    else:
        print_members(members)


def _to_files(to_parquet: str | None, to_json: str | None, *, base64: bool) -> ToFiles:
    """One of the two is given."""
    from tierlog.spark_reader.jobs.replay import ToFiles

    if to_json is not None:
        return ToFiles(folder=_url(to_json), kind="json", base64=base64)
    return ToFiles(folder=_url(to_parquet or ""))


def _to_topic(
    name: str,
    source: SourceOptions,
    to_server: str | None,
    notes: str | None,
    *,
    by_key: bool,
) -> ToTopic:
    from tierlog.spark_reader.jobs.replay import ToTopic

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
