"""`tierlog storage verify`: through the broker, which checks both tiers, or on the bucket alone, on
this machine or on a Spark cluster.

Exit code 3 if there are problems: not an error of the command, and not a success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from record_format.clock import wall_clock_ms
from tierlog.cli.client_options import OutputOption, TopicArgument, client_command
from tierlog.cli.offline import BucketOptions, EndpointOption, OfflineStoreOption, RegionOption
from tierlog.cli.output import FOUND_PROBLEMS, Output, note, print_json, print_table, progress_bar
from tierlog.cli.spark_options import ConfOption, MasterOption, SourceOptions, job, task_bar

if TYPE_CHECKING:
    from tierlog.client import Client

app = typer.Typer()


@app.command("verify")
@client_command
def verify(
    client: Client,
    topic: TopicArgument,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte.")] = False,
    store: OfflineStoreOption = None,
    endpoint: EndpointOption = None,
    region: RegionOption = None,
    spark: Annotated[
        bool, typer.Option("--spark", help="With --store: read every byte, on Spark's executors.")
    ] = False,
    master: MasterOption = None,
    conf: ConfOption = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Check the manifest against the objects, and both tiers against each other."""
    if spark:
        source = SourceOptions(
            store=store, s3_endpoint=endpoint, s3_region=region, master=master, conf=conf
        )
        report = _verify_on_spark(topic, source)
    elif (bucket := BucketOptions.named(store, endpoint, region)) is not None:
        report = _verify_offline(topic, bucket, deep=deep)
    else:
        with progress_bar(f"verify {topic}, by the broker"):
            report = client.verify(topic, deep=deep)
    if output.is_json:
        print_json(report)
    else:
        print_report(topic, report)
    if not report["ok"]:
        raise typer.Exit(FOUND_PROBLEMS)


def _verify_offline(topic: str, bucket: BucketOptions, *, deep: bool) -> dict[str, Any]:
    from broker.mending.verify import size_of, verify_bucket
    from manifest.topic_objects import TopicObjects

    with bucket.opened() as store:
        found = TopicObjects(store).find(topic)
        total = size_of(store, found, clock=wall_clock_ms)
        with progress_bar(f"verify {topic}", total=total, in_bytes=True) as move:
            report = verify_bucket(
                store,
                found,
                deep=deep,
                clock=wall_clock_ms,
                progress=lambda size_bytes: move(advance=size_bytes),
            )
    return dict(msgspec.to_builtins(report))


def _verify_on_spark(topic: str, source: SourceOptions) -> dict[str, Any]:
    if source.store is None:
        raise typer.BadParameter("--spark needs --store: executors read the bucket itself")
    with job("tierlog storage verify", master=source.master, conf=source.conf) as session:
        from spark_reader.jobs.verify import verify as run_verify

        with task_bar(f"verify {topic}") as progress:
            report = run_verify(session, source.of(topic), clock=wall_clock_ms, progress=progress)
    return dict(msgspec.to_builtins(report))


def print_report(topic: str, report: Mapping[str, Any]) -> None:
    """Print a table of problems, then what was checked."""
    if report["problems"]:
        print_problems(topic, report["problems"])
    if left_out := report.get("problems_left_out", 0):
        note(f"and {left_out} more")
    looked_at = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in report["checked"].items() if count
    )
    count = len(report["problems"]) + left_out
    verdict = "ok" if report["ok"] else f"{count} problem{'s' * (count != 1)}"
    note(f"{topic}: {verdict}; checked {looked_at or 'nothing'}")


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
