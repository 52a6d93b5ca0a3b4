"""`tierlog storage verify`: by the broker, which checks both tiers, or of the bucket alone, on this
machine or on Spark.

The exit code is 3 if there are problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tierlog.cli.on_spark import ConfOption, MasterOption, SourceOptions, job, task_bar
from tierlog.cli.options import (
    BucketOptions,
    ClientOrBucket,
    OutputOption,
    TopicOrAll,
    client_or_bucket_command,
    topic_names,
)
from tierlog.cli.output import (
    FOUND_PROBLEMS,
    Output,
    format_size,
    note,
    print_json,
    print_table,
    progress_bar,
)
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.errors import CorruptDataError, UnknownTopic

if TYPE_CHECKING:
    from tierlog.client.client import Client

app = typer.Typer()


Report = dict[str, Any]  # as JSON has it
Check = Callable[[str], Report]


Deep = Annotated[bool, typer.Option("--deep", help="Read every byte.")]
OnSpark = Annotated[
    bool, typer.Option("--spark", help="With --store: read every byte, on Spark's executors.")
]


@app.command("verify")
@client_or_bucket_command
def verify(
    source: ClientOrBucket,
    topic: TopicOrAll = None,
    *,
    deep: Deep = False,
    spark: OnSpark = False,
    master: MasterOption = None,
    conf: ConfOption = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Check manifests against objects, and both tiers against each other."""
    checking: AbstractContextManager[Check]
    if spark:
        checking = _on_spark(source, master, conf)
    elif isinstance(source, BucketOptions):
        checking = _offline(source, deep=deep)
    else:
        checking = nullcontext(partial(_by_broker, source, deep=deep))
    reports = {}
    with checking as check:
        found = _check_all(_names(source), check) if topic is None else [(topic, check(topic))]
        for name, report in found:
            reports[name] = report
            if not output.is_json:
                print_report(name, report)
    ok = all(report["ok"] for report in reports.values())
    if output.is_json:
        print_json({"ok": ok, "topics": reports} if topic is None else reports[topic])
    if not ok:
        raise typer.Exit(FOUND_PROBLEMS)


def _names(source: ClientOrBucket) -> list[str]:
    if not isinstance(source, BucketOptions):
        return topic_names(source)
    with source.reader() as bucket:
        return bucket.names()


def _check_all(names: Iterable[str], check: Check) -> Iterator[tuple[str, Report]]:
    """Check each topic; one that cannot be checked does not stop the others."""
    for name in names:
        try:
            yield name, check(name)
        except UnknownTopic:  # deleted
            continue
        except CorruptDataError as error:
            yield name, {"ok": False, "checked": {}, "problems": [], "error": str(error)}


def _by_broker(client: Client, topic: str, *, deep: bool) -> Report:
    with progress_bar(f"verify {topic}, by the broker"):
        return client.verify(topic, deep=deep)


@contextmanager
def _offline(bucket: BucketOptions, *, deep: bool) -> Iterator[Check]:
    from tierlog.repair.verify import size_of, verify_bucket

    def check(topic: str) -> Report:
        found = reader.topic(topic)
        total = size_of(reader.store, found, clock=wall_clock_ms)
        with progress_bar(f"verify {topic}", total=total, in_bytes=True) as move:
            report = verify_bucket(
                reader.store,
                found,
                deep=deep,
                clock=wall_clock_ms,
                progress=lambda size_bytes: move(advance=size_bytes),
            )
        return dict(msgspec.to_builtins(report))

    with bucket.reader() as reader:
        yield check


@contextmanager
def _on_spark(
    source: ClientOrBucket, master: str | None, conf: list[str] | None
) -> Iterator[Check]:
    if not isinstance(source, BucketOptions):
        raise typer.BadParameter("--spark requires --store: executors read the bucket directly")
    bucket = SourceOptions(store=source.store, endpoint=source.endpoint, region=source.region)
    with job("tierlog storage verify", master=master, conf=conf) as session:
        from tierlog.spark_reader.jobs.verify import verify as run_verify

        def check(topic: str) -> Report:
            with task_bar(f"verify {topic}") as progress:
                options = bucket.of(topic)
                report = run_verify(session, options, clock=wall_clock_ms, progress=progress)
            return dict(msgspec.to_builtins(report))

        yield check


def print_report(topic: str, report: Mapping[str, Any]) -> None:
    """Print a table of problems, then what was checked."""
    if report["problems"]:
        print_problems(topic, report["problems"])
    if left_out := report.get("problems_left_out", 0):
        note(f"and {left_out} more")
    if unreadable := report.get("error"):
        note(f"{topic}: not checked: {unreadable}")
        return
    checked = ", ".join(_counted(*one) for one in report["checked"].items() if one[1])
    count = len(report["problems"]) + left_out
    verdict = "ok" if report["ok"] else f"{count} problem{'s' * (count != 1)}"
    note(f"{topic}: {verdict}; checked {checked or 'nothing'}")


def _counted(name: str, count: int) -> str:
    if name == "read_bytes":
        return f"{format_size(count)} read"
    return f"{count} {name.replace('_', ' ')[: -1 if count == 1 else None]}"


def print_problems(topic: str, problems: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            one["kind"],
            one["partition"],
            one.get("object_key") or one.get("file"),
            one["detail"],
        )
        for one in problems
    ]
    print_table(topic, ("problem", "partition", "where", "what"), rows)
