"""Shared by the commands that run on Spark: the source's options, the session, a progress bar.

* Options have the same names as in the other commands; all others of the source are given by
  `--option NAME=VALUE`.
* Without `--server`, only the bucket is read.
* Without `--token-file`, every process that connects to the broker, here or on an executor, takes
  the token from its own environment, as `tierlog.Client` does.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.bucket_options import EndpointOption, RegionOption
from tierlog.cli.client_options import TokenFile
from tierlog.cli.option_groups import setting_option
from tierlog.cli.output import progress_bar
from tierlog.record_format.errors import ConfigurationError

if TYPE_CHECKING:
    from tierlog.spark_reader.jobs.session import Progress

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
FromTimeOption = Annotated[
    str | None,
    typer.Option(
        "--from-time", metavar="TIME", help="Start at the first record at or after this time."
    ),
]
ToTimeOption = Annotated[
    str | None,
    typer.Option(
        "--to-time", metavar="TIME", help="End before the first record at or after this time."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Which records, from where, and on which cluster."""

    from_time: FromTimeOption = None
    to_time: ToTimeOption = None
    partition: PartitionsOption = None
    store: StoreOption = None
    server: ServerOption = None
    endpoint: EndpointOption = None
    region: RegionOption = None
    token_file: TokenFile = None
    option: SourceOption = None
    master: MasterOption = None
    conf: ConfOption = None

    def of(self, topic: str, more: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """The options of the Spark source. `--option` takes precedence."""
        given: dict[str, str | None] = {
            "store": self.store,
            "server": self.server,
            "endpoint": self.endpoint,
            "region": self.region,
            "tokenFile": None if self.token_file is None else str(self.token_file),
            "subscribe": None if self.partition else topic,
            "assign": json.dumps({topic: sorted(self.partition)}) if self.partition else None,
            "tier": None if self.server else "cold",
            "startingTimestamp": self.from_time,
            "endingTimestamp": self.to_time,
            # A partition whose records are all older contributes none.
            "startingOffsetsByTimestampStrategy": "latest" if self.from_time else None,
            **(more or {}),
            **pairs(self.option),
        }
        if given["store"] is None and given["server"] is None:
            raise typer.BadParameter("no source: give --store URL, or --server URL, or both")
        return {name: value for name, value in given.items() if value is not None}


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
        from pyspark.errors import PySparkException

        from tierlog.spark_reader.jobs.session import job_session
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
        raise ConfigurationError(_last_line(str(error))) from error


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


_OUR_ERRORS = ("record_format.", "spark_reader.", "tierlog.")


def _last_line(text: str) -> str:
    """The last line of a Python traceback inside Spark's error."""
    before_java = text.partition("\n\tat ")[0].partition("JVM stacktrace")[0]
    lines = [line.strip() for line in before_java.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(_OUR_ERRORS)]
    if ours:  # without the class name
        return ours[-1].partition(": ")[2] or ours[-1]
    reasons = [line for line in lines if not line.startswith("SQLSTATE:")]
    return (reasons or [text])[-1]


@contextmanager
def task_bar(title: str) -> Iterator[Progress | None]:
    """A progress bar of Spark's tasks, on a terminal."""
    with progress_bar(title) as move:
        shown: Progress = lambda done, tasks: move(completed=done, total=tasks)  # noqa: E731
        yield shown if sys.stderr.isatty() else None
