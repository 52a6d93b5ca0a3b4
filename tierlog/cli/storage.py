"""`tierlog storage`: both tiers and the manifest, through the broker or from the bucket alone.

`verify` is done by the broker, which checks both tiers, or of the bucket alone, on this machine or
on Spark. The exit code is 3 if there are problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from tierlog.cli.on_spark import (
    ConfOption,
    MasterOption,
    SourceOptions,
    job,
    naming_flags,
    task_bar,
)
from tierlog.cli.on_spark import StoreOption as SparkStoreOption
from tierlog.cli.options import (
    BucketOptions,
    ClientOptions,
    ClientOrBucket,
    EndpointOption,
    OutputOption,
    RegionOption,
    TopicArgument,
    TopicOrAll,
    client_command,
    client_or_bucket_command,
    complete_topic,
    takes,
    topic_names,
    with_client,
)
from tierlog.cli.output import (
    FOUND_PROBLEMS,
    Output,
    format_size,
    format_time,
    note,
    print_json,
    print_table,
    progress_bar,
)
from tierlog.cli.storage_manifest import app as manifest_app
from tierlog.cli.storage_repair import app as repair_app
from tierlog.cli.storage_report import print_storage_report
from tierlog.cli.topic import note_damaged
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.errors import CorruptDataError, RetriableError, UnknownTopic

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.responses import OffloadResult, Segment

app = typer.Typer(no_args_is_help=True, add_completion=False)

Partition = Annotated[
    int | None, typer.Option("--partition", "-p", min=0, help="One partition; all by default.")
]
Cache = Annotated[
    bool,
    typer.Option("--cache", help="Show how much of each local file is in the page cache."),
]
CacheFolder = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="The broker's data folder, for --cache."),
]

TopicsArgument = Annotated[
    list[str],
    typer.Argument(metavar="TOPIC", help="The topics.", autocompletion=complete_topic),
]
MergeOnSpark = Annotated[
    bool,
    typer.Option(
        "--spark", help="Make the merged segments on Spark's executors; requires --store."
    ),
]

MERGE_STEP_MS: Final = 5_000  # between two looks at the progress

SEGMENT_COLUMNS: Final = ("partition", "offsets", "records", "size", "from", "to", "tier", "crc32c")


@app.command("report")
@client_command
def report(client: Client, output: OutputOption = Output.AUTO) -> None:
    """Show each tier's bytes and segments, the offload lag, the cache, and store requests."""
    document = client.storage_report()
    if output.is_json:
        print_json(document)
    else:
        print_storage_report(document)


@app.command("segments")
@client_or_bucket_command
def segments(
    source: ClientOrBucket,
    topic: TopicArgument,
    *,
    partition: Partition = None,
    cache: Cache = False,
    data_dir: CacheFolder = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """List all segments, oldest first, with their offsets, sizes and tiers."""
    if cache and data_dir is None:
        raise typer.BadParameter("--cache requires --data-dir: it reads this machine's page cache")
    if isinstance(source, BucketOptions):
        found = _offline_segments(topic, partition, source)
    else:
        numbers = _partitions(source, topic, partition)
        found = {one: list(source.segments(topic, one)) for one in numbers}
    cached = {n: _cached(data_dir, topic, n, found[n]) for n in found} if cache and data_dir else {}
    document: list[dict[str, object]] = [
        {"partition": number, "segments": listed}
        | ({"cached_bytes": cached[number]} if cache else {})
        for number, listed in found.items()
    ]
    rows = [_segment_row(number, one) for number, listed in found.items() for one in listed]
    columns: tuple[str, ...] = SEGMENT_COLUMNS
    if cache:
        columns += ("in memory",)
        sizes = [format_size(size_bytes) for number in found for size_bytes in cached[number]]
        rows = [(*row, size) for row, size in zip(rows, sizes, strict=True)]
    output.table({"topic": topic, "partitions": document}, columns, rows, title=topic)


def _segment_row(partition: int, segment: Segment) -> tuple[object, ...]:
    return (
        partition,
        f"{segment.base_offset} - {segment.last_offset}",
        segment.records,
        format_size(segment.size_bytes),
        format_time(segment.min_timestamp),
        format_time(segment.max_timestamp),
        segment.tier + (" active" if segment.active else ""),
        segment.crc32c,
    )


def _cached(
    data_dir: Path, topic: str, partition: int, listed: Sequence[Segment]
) -> list[int | None]:
    """Bytes of each segment's `.log` that are in the page cache; None if it is not local."""
    from tierlog.host.page_cache import resident_bytes

    found: list[int | None] = []
    for segment in listed:
        path = data_dir / f"{topic}-{partition}" / f"{segment.base_offset:020d}.log"
        try:
            with path.open("rb") as file:
                found.append(resident_bytes(file.fileno()))
        except FileNotFoundError:
            found.append(None)
    return found


def _offline_segments(
    name: str, partition: int | None, options: BucketOptions
) -> dict[int, list[Segment]]:
    with options.reader() as bucket:
        topic = bucket.topic(name)
        numbers = range(topic.partitions) if partition is None else [partition]
        return {one: bucket.segments(topic, one) for one in numbers}


@app.command("offload")
@client_command
def offload(
    client: Client,
    topic: TopicOrAll = None,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait", min=0, max=60, help="Seconds to wait for each topic; 0 returns immediately."
        ),
    ] = 60.0,
    output: OutputOption = Output.AUTO,
) -> None:
    """Roll the active segments and upload all rolled segments.

    Exits with 1 if segments remain after the wait.
    """
    wait_ms = int(wait_s * 1000) or None
    results: Iterable[tuple[str, OffloadResult]]
    if topic is None:
        results = _offload_all(client, wait_ms)
    else:
        results = [(topic, client.offload(topic, wait_ms=wait_ms))]
    done = {}
    for name, one in results:
        done[name] = one
        if not output.is_json:
            note(
                f"{name}: uploaded {one.uploaded_segments} segment"
                f"{'s' * (one.uploaded_segments != 1)}, {format_size(one.uploaded_bytes)}; "
                f"{one.remaining_segments} remain"
            )
    if output.is_json:
        print_json(done[topic] if topic is not None else {"topics": done})
    remaining = sum(one.remaining_segments for one in done.values())
    if wait_s and remaining:
        raise RetriableError(
            f"{remaining} segments are not uploaded after {wait_s:g} s; uploads continue. "
            "`/readyz` reports what is degraded, and the broker's log why"
        )


def _offload_all(client: Client, wait_ms: int | None) -> Iterator[tuple[str, OffloadResult]]:
    """By topic, without those that are deleted meanwhile: each may take its wait."""
    for name in topic_names(client):
        with suppress(UnknownTopic):
            yield name, client.offload(name, wait_ms=wait_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactOptions(ClientOptions):
    """The broker, and with `spark` the bucket that executors use."""

    spark: MergeOnSpark = False
    store: SparkStoreOption = None
    endpoint: EndpointOption = None
    region: RegionOption = None
    master: MasterOption = None
    conf: ConfOption = None

    def source(self, topics: Sequence[str]) -> dict[str, str]:
        """The options of the Spark source."""
        if self.store is None:
            raise typer.BadParameter("--spark requires --store: executors use the bucket directly")
        named = {
            "store": self.store,
            "server": self.server,
            "endpoint": self.endpoint,
            "region": self.region,
            "token": self.token,
            "tokenFile": self.token_file,
            "caFile": self.ca_file,
            "subscribe": ",".join(topics),
        }
        return {name: str(value) for name, value in named.items() if value is not None}


@app.command("compact")
@takes(CompactOptions)
def compact(
    options: CompactOptions, topics: TopicsArgument, output: OutputOption = Output.AUTO
) -> None:
    """Merge small segments that are only in the bucket, so that reading takes fewer requests.

    Neighbouring ones become one; records and offsets stay as they are. May be interrupted, and
    repeated. `cold.merge.min.bytes` has it done in the background.
    """
    if options.spark:
        done = _merge_on_spark(options, topics)
        output.report({"topics": topics, **done}, f"{', '.join(topics)}: {_merged_text(done)}")
        return

    def merge(client: Client) -> None:
        for topic in topics:
            done = _merge_by_broker(client, topic)
            output.report({"topic": topic, **done}, f"{topic}: {_merged_text(done)}")

    with_client(options, merge)


def _merge_by_broker(client: Client, topic: str) -> dict[str, int]:
    segments = new = size_bytes = 0
    with progress_bar(f"compact {topic}", in_bytes=True) as move:
        remaining = True
        while remaining:
            done = client.merge(topic, wait_ms=MERGE_STEP_MS)
            segments, new = segments + done.merged_segments, new + done.new_segments
            size_bytes += done.merged_bytes
            move(completed=size_bytes)
            remaining = done.remaining_segments > 0
    return {"merged_segments": segments, "new_segments": new, "merged_bytes": size_bytes}


def _merge_on_spark(options: CompactOptions, topics: Sequence[str]) -> dict[str, int]:
    source = options.source(topics)
    with (
        naming_flags(),
        job("tierlog storage compact", master=options.master, conf=options.conf) as session,
        task_bar("compact") as progress,
    ):
        from tierlog.spark_reader.jobs.merge import merge as run_merge

        return run_merge(session, source, progress=progress)._asdict()


def _merged_text(done: Mapping[str, int]) -> str:
    size = format_size(done["merged_bytes"])
    return f"{done['merged_segments']} segments, {size}, became {done['new_segments']}"


@app.command("trim")
@client_command
def trim(
    client: Client,
    topic: TopicArgument,
    before_offset: Annotated[
        int, typer.Option("--before", min=0, help="The new log start offset.")
    ],
    partition: Annotated[int, typer.Option("--partition", "-p", min=0, help="The partition.")],
    output: OutputOption = Output.AUTO,
) -> None:
    """Delete all records below an offset (Kafka's DeleteRecords)."""
    start = client.trim(topic, partition, before_offset=before_offset)
    output.report(
        {"topic": topic, "partition": partition, "log_start_offset": start},
        f"{topic}-{partition} starts at {start}",
    )


def _partitions(client: Client, topic: str, partition: int | None) -> list[int]:
    if partition is not None:
        return [partition]
    found = client.describe_topic(topic)
    note_damaged(found)
    return [one.partition for one in found.partitions]


verify_app = typer.Typer()


Report = dict[str, Any]  # as JSON has it
Check = Callable[[str], Report]


Deep = Annotated[bool, typer.Option("--deep", help="Read every byte.")]
OnSpark = Annotated[
    bool, typer.Option("--spark", help="With --store: read every byte, on Spark's executors.")
]


@verify_app.command("verify")
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
    with naming_flags(), job("tierlog storage verify", master=master, conf=conf) as session:
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
        rows = [
            (one["kind"], one["partition"], one.get("object_key") or one.get("file"), one["detail"])
            for one in report["problems"]
        ]
        print_table(topic, ("problem", "partition", "where", "what"), rows)
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


for part in (manifest_app, verify_app, repair_app):  # the order in help
    app.add_typer(part)
