"""The commands that run on Spark, and what they share: the source's options, the session, a bar.

* Options have the same names as in the other commands; all others of the source are given by
  `--option NAME=VALUE`. Errors name what was typed (`naming_flags`), not what it became.
* Without `--server`, only the bucket is read.
* Without `--token-file`, every process that connects to the broker, here or on an executor, takes
  the token from its own environment, as `tierlog.Client` does.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierlog.cli.options import (
    EndpointOption,
    OutputOption,
    RegionOption,
    TokenFile,
    TopicArgument,
    setting_option,
    size_of,
    with_group,
)
from tierlog.cli.output import (
    Output,
    format_size,
    format_time,
    note,
    print_json,
    print_members,
    print_table,
    progress_bar,
)
from tierlog.cli.times import parse_time
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.errors import ConfigurationError, InvalidOption, TierlogError

if TYPE_CHECKING:
    from tierlog.spark_reader.jobs.replay import ToFiles, ToTopic
    from tierlog.spark_reader.jobs.session import Progress
    from tierlog.spark_reader.jobs.stats import HourStats


StoreOption = Annotated[
    str | None, setting_option("store", metavar="URL", help="The bucket: s3://… or file:///….")
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="TIERLOG_SERVER",
        help="The broker, for records not in the bucket yet; by default only the bucket is read.",
        metavar="URL",
    ),
]
MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master",
        help="Spark's master; by default that of spark-submit, else this machine's cores.",
        metavar="URL",
    ),
]
ConfOption = Annotated[
    list[str] | None,
    typer.Option("--conf", help="A Spark setting; may be repeated.", metavar="KEY=VALUE"),
]
SourceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option", help="Any other option of the source; may be repeated.", metavar="NAME=VALUE"
    ),
]
PartitionsOption = Annotated[
    list[int] | None,
    typer.Option("--partition", "-p", min=0, help="A partition; may be repeated. All by default."),
]


def _time_option(name: str, help_: str) -> Any:
    """Its value is in milliseconds, so that an error names what was written."""

    def in_ms(text: str | None) -> str | None:
        return None if text is None else str(parse_time(name, text, now_ms=wall_clock_ms()))

    return typer.Option(name, metavar="TIME", callback=in_ms, help=help_)


FromTimeOption = Annotated[
    str | None,
    _time_option(
        "--from-time",
        "Start at the first record at or after this time: 1h (ago), 2026-02-01T12:00 (UTC), "
        "RFC 3339 or milliseconds.",
    ),
]
ToTimeOption = Annotated[
    str | None, _time_option("--to-time", "End before the first record at or after this time.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Which log, and which part of it."""

    from_time: FromTimeOption = None
    to_time: ToTimeOption = None
    store: StoreOption = None
    server: ServerOption = None
    endpoint: EndpointOption = None
    region: RegionOption = None
    token_file: TokenFile = None
    option: SourceOption = None

    def given(self, **more: str | None) -> dict[str, str]:
        """The options of the Spark source. `--option` takes precedence."""
        if self.from_time and self.to_time and int(self.from_time) > int(self.to_time):
            raise typer.BadParameter(
                f"--from-time ({self.from_time} ms) is later than --to-time ({self.to_time} ms)"
            )
        named: dict[str, str | None] = {
            "store": self.store,
            "server": self.server,
            "endpoint": self.endpoint,
            "region": self.region,
            "tokenFile": None if self.token_file is None else str(self.token_file),
            "tier": None if self.server else "cold",
            "startingTimestamp": self.from_time,
            "endingTimestamp": self.to_time,
            # A partition whose records are all older contributes none.
            "startingOffsetsByTimestampStrategy": "latest" if self.from_time else None,
            **more,
            **pairs(self.option),
        }
        if named["store"] is None and named["server"] is None:
            raise typer.BadParameter("no source: give --store URL, or --server URL, or both")
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(LogOptions):
    """Which records, from where, and on which cluster."""

    partition: PartitionsOption = None
    master: MasterOption = None
    conf: ConfOption = None

    def of(self, topic: str, more: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """The options of the Spark source for a topic."""
        chosen = json.dumps({topic: sorted(self.partition)}) if self.partition else None
        subscribed = None if self.partition else topic
        return self.given(subscribe=subscribed, assign=chosen, **(more or {}))


FLAGS: Final = MappingProxyType(
    {
        "store": "--store",
        "server": "--server",
        "endpoint": "--s3-endpoint",
        "region": "--s3-region",
        "tokenFile": "--token-file",
        "caFile": "--ca-file",
        "startingTimestamp": "--from-time",
        "endingTimestamp": "--to-time",
        "assign": "--partition",
    }
)
"""Which options of the source are flags."""

_OPTION: Final = re.compile(r"\boptions? ([A-Za-z]+(?:\.[a-z]+)*)")
_NAME: Final = re.compile(r"(?<!--option )\b[a-z]+[A-Z]\w+")


@contextmanager
def naming_flags(typed: Sequence[str] | None = None) -> Iterator[None]:
    """Errors inside name flags instead of the source's options, but for those that are `typed`;
    None where there is no `--option`.
    """
    try:
        yield
    except TierlogError as error:
        text = in_flags(str(error), typed)
        if text == str(error):
            raise
        raise InvalidOption(text) from error


def in_flags(text: str, typed: Sequence[str] | None = None) -> str:
    """What an error says, in the words of `naming_flags`."""
    from tierlog.spark_reader.options import NAMES  # few commands fail

    typed_names = {name.lower() for name in pairs(typed)}
    flags = {name: flag for name, flag in FLAGS.items() if name.lower() not in typed_names}

    def named(found: re.Match[str]) -> str:
        name = found[1]
        if typed is None or name.lower() not in NAMES:
            return flags.get(name, found[0])
        return flags.get(name, f"--option {name}")

    return _NAME.sub(lambda found: flags.get(found[0], found[0]), _OPTION.sub(named, text))


def reads(group: type[LogOptions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `takes`, of options that become those of the source."""

    def call(given: LogOptions, rest: Callable[[LogOptions], None]) -> None:
        with naming_flags(given.option or ()):
            rest(given)

    return lambda function: with_group(function, group, call)


def pairs(given: Sequence[str] | None) -> dict[str, str]:
    """Parse each `NAME=VALUE`."""
    found: dict[str, str] = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
        found[name] = value
    return found


@contextmanager
def job(name: str, *, master: str | None, conf: Sequence[str] | None) -> Iterator[Any]:
    """A Spark session for a command; Spark's failures become errors of one line."""
    try:
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        from tierlog.spark_reader.jobs.session import job_session
        from tierlog.spark_reader.jobs.tasks import last_line
    except ImportError as error:
        text = f"{name} runs on Spark: pip install 'tierlog[spark]' ({error})"
        raise ConfigurationError(text) from error
    silence_interrupts()
    # PySpark leaves its JVM running if its start is interrupted, but not if it is ended.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with job_session(name, master=master, config=_quiet(pairs(conf))) as session:
            yield session
    except PySparkException as error:
        raise ConfigurationError(last_line(str(error))) from error
    except Py4JJavaError as error:
        raise ConfigurationError(_of_java(str(error))) from error


def silence_interrupts() -> None:
    """Filter the tracebacks that py4j logs on Ctrl-C: of the call that waits for Spark, and of
    Spark's own handler, which uses the same connection.
    """
    logging.getLogger().addFilter(_is_not_interrupt)


def _is_not_interrupt(record: logging.LogRecord) -> bool:
    return not record.getMessage().endswith(" while sending command.")


def _quiet(config: dict[str, str]) -> dict[str, str]:
    """Disable Spark's log, ten lines at the start and a hundred for each failed task, unless a log
    level is given; the command reports a failure in one line.
    """
    if "spark.log.level" in config:
        return config
    silent = Path(str(files("tierlog.spark_reader.jobs"))).joinpath("no_log.properties").as_uri()
    return {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={silent}", **config}


def _of_java(text: str) -> str:
    """What Java says has failed, as a task that writes a file, and why: the first of its exceptions
    and the last of their causes, without their classes.
    """
    found = [line for line in text.splitlines() if line.startswith((": ", "Caused by: "))]
    said = [re.sub(r"^(Caused by)?: [\w.$]+: ", "", line) for line in found] or [text]
    what = said[0].partition(" SQLSTATE")[0].rstrip(".")
    return what if said[-1] == said[0] else f"{what}: {said[-1]}"


@contextmanager
def task_bar(title: str) -> Iterator[Progress | None]:
    """A progress bar of Spark's tasks, on a terminal."""
    with progress_bar(title) as move:
        shown: Progress = lambda done, tasks: move(completed=done, total=tasks)  # noqa: E731
        yield shown if sys.stderr.isatty() else None


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


@reads(SourceOptions)
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
    step_bytes: StepBytes = "4GiB",
    output: OutputOption = Output.AUTO,
) -> None:
    """Copy a range of a topic elsewhere, in steps. If run again, it goes on where it was."""
    if [to_parquet, to_json, to_topic].count(None) != 2:
        raise typer.BadParameter("give exactly one of --to-parquet, --to-json and --to-topic")
    target: ToFiles | ToTopic
    if to_topic is not None:
        target = _to_topic(to_topic, source, to_server, notes, by_key=by_key)
    else:
        target = _to_files(to_parquet, to_json, base64=base64)
    if from_offset is not None and to_offset is not None and from_offset > to_offset:
        raise typer.BadParameter(
            f"--from-offset ({from_offset}) is above --to-offset ({to_offset})"
        )
    for which, time, offset in (
        ("from", source.from_time, from_offset),
        ("to", source.to_time, to_offset),
    ):
        if time is not None and offset is not None:
            raise typer.BadParameter(f"give either --{which}-time or --{which}-offset")
    bounds = {
        "startingOffsets": _offsets(topic, source.partition, from_offset),
        "endingOffsets": _offsets(topic, source.partition, to_offset),
        "includeHeaders": "true" if headers else None,
    }
    step = size_of("--step-bytes", step_bytes, least=1)
    _replay(source, topic, source.of(topic, bounds), target=target, step_bytes=step, output=output)


def _replay(
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


MAX_ROWS = 48


@reads(SourceOptions)
def stats(
    source: SourceOptions,
    topic: TopicArgument,
    *,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw a picture, as an SVG file.")
    ] = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Count records, bytes, keys and sizes by hour (of record timestamps) and partition."""
    from tierlog.spark_reader.jobs.stats import chart_svg
    from tierlog.spark_reader.jobs.stats import stats as run_stats

    options = source.of(topic)
    with (
        job("tierlog stats", master=source.master, conf=source.conf) as session,
        task_bar(f"stats {topic}") as progress,
    ):
        rows = run_stats(session, options, progress=progress)
    if output.is_json:
        print_json({"topic": topic, "hours": [row._asdict() for row in rows]})
    else:
        _print_stats(topic, rows)
    if picture is not None:
        picture.write_text(chart_svg(rows, title=f"Topic {topic}"))
        note(f"picture written to {picture}")


def _print_stats(topic: str, rows: list[HourStats]) -> None:
    columns = ("hour", "partition", "records", "bytes", "tombstones", "keys, about")
    sizes = ("value p50, about", "p99, about", "largest")
    cells = [
        (
            format_time(row.hour_ms),
            row.partition,
            row.records,
            format_size(row.size_bytes),
            row.tombstones,
            row.distinct_keys_estimate,
            format_size(row.value_p50),
            format_size(row.value_p99),
            format_size(row.value_max),
        )
        for row in rows
    ]
    left_out = len(cells) - MAX_ROWS
    caption = (
        f"{left_out} earlier rows are not shown: --output json prints all" if left_out > 0 else ""
    )
    print_table(topic, columns + sizes, cells[-MAX_ROWS:], caption=caption)
    records, total = sum(row.records for row in rows), sum(row.size_bytes for row in rows)
    note(f"{topic}: {records:,} records, {format_size(total)} of keys and values")


def spark_zip(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The zip to write.")] = Path(
        "tierlog.zip"
    ),
) -> None:
    """Write the code that executors import as one zip, without its dependencies."""
    from tierlog.spark_reader.jobs.package import build_zip

    typer.echo(build_zip(file))
