"""`tierlog storage`: both tiers and the manifest, through the broker or from the bucket alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierlog.cli import storage_check, storage_manifest, storage_repair
from tierlog.cli.options import (
    BucketOptions,
    ClientOrBucket,
    OutputOption,
    TopicArgument,
    TopicOrAll,
    client_command,
    client_or_bucket_command,
    topic_names,
)
from tierlog.cli.output import (
    Output,
    format_size,
    format_time,
    note,
    print_documents,
    print_json,
    print_members,
)
from tierlog.cli.topic import note_damaged
from tierlog.record_format.errors import RetriableError, UnknownTopic

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.responses import OffloadResult, Segment

app = typer.Typer(no_args_is_help=True, add_completion=False)
for part in (storage_manifest, storage_check, storage_repair):
    app.add_typer(part.app)

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

SEGMENT_COLUMNS: Final[tuple[str, ...]] = (
    "partition",
    "offsets",
    "records",
    "size",
    "from",
    "to",
    "tier",
    "crc32c",
)


@app.command("report")
@client_command
def report(client: Client, output: OutputOption = Output.AUTO) -> None:
    """Show each tier's bytes and segments, the offload lag, the cache, and store requests."""
    document = client.storage_report()
    if output.is_json:
        print_json(document)
        return
    print_members(document)
    for name, value in document.items():
        if isinstance(value, dict):
            print_members(value, title=f"\n{name}")
        elif isinstance(value, list) and value:
            print_documents(f"\n{name}", value)


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
    columns = SEGMENT_COLUMNS
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
