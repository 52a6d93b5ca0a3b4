"""`tierlog storage`: the two tiers and the manifest, through the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli import storage_check
from tierlog.cli.client_options import OutputOption, client_command
from tierlog.cli.output import Output, cell, moment, note, print_json, print_table, size

if TYPE_CHECKING:
    from tierlog.client import Client

app = typer.Typer(help="What is hot, what is cold, and the manifest.", no_args_is_help=True)
app.add_typer(storage_check.app)

Topic = Annotated[str, typer.Argument(metavar="TOPIC")]
Partition = Annotated[
    int | None, typer.Option("--partition", "-p", min=0, help="One partition; all by default.")
]


@app.command("report")
@client_command
def report(client: Client, output: OutputOption = Output.AUTO) -> None:
    """Bytes and segments by tier, what is not offloaded yet, the cache, requests to the store."""
    document = client.storage_report()
    if output.is_json:
        print_json(document)
        return
    plain = {name: value for name, value in document.items() if not isinstance(value, (list, dict))}
    print_table("", ("", ""), [(name, _shown(name, value)) for name, value in plain.items()])
    for name, value in document.items():
        if isinstance(value, dict):
            print_table(f"\n{name}", ("", ""), [(one, _shown(one, value[one])) for one in value])
        elif isinstance(value, list) and value:
            _print_rows(name, value)


@app.command("segments")
@client_command
def segments(
    client: Client,
    topic: Topic,
    partition: Partition = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Every segment, oldest first: where it begins, how large it is, and in which tier it lies."""
    found = {
        one: list(client.segments(topic, one)) for one in _partitions(client, topic, partition)
    }
    if output.is_json:
        print_json(
            {
                "topic": topic,
                "partitions": [
                    {"partition": one, "segments": listed} for one, listed in found.items()
                ],
            }
        )
        return
    columns = ("partition", "offsets", "records", "size", "from", "to", "tier", "crc32c")
    rows = [
        (
            one,
            f"{segment.base_offset} - {segment.last_offset}",
            segment.records,
            size(segment.size_bytes),
            moment(segment.min_timestamp),
            moment(segment.max_timestamp),
            segment.tier + (" active" if segment.active else ""),
            segment.crc32c,
        )
        for one, listed in found.items()
        for segment in listed
    ]
    print_table(topic, columns, rows)


@app.command("manifest")
@client_command
def manifest(
    client: Client,
    topic: Topic,
    partition: Annotated[int, typer.Option("--partition", "-p", min=0)] = 0,
    version: Annotated[
        int | None, typer.Option(min=0, help="An older version; the one in force by default.")
    ] = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """The manifest of a partition, or a version of it that is still kept."""
    page = client.manifest(topic, partition, version=version)
    document = dict(page.document)
    entries = list(page.segments)
    while page.next_from_offset is not None:
        page = client.manifest(
            topic, partition, version=page.version, from_offset=page.next_from_offset
        )
        entries += page.segments
    document |= {"segments": entries, "next_from_offset": None}
    if output.is_json:
        print_json(document)
        return
    head = [
        (name, _shown(name, value))
        for name, value in document.items()
        if not isinstance(value, (list, dict)) and name != "next_from_offset"
    ]
    print_table(f"{topic}-{partition}", ("", ""), head)
    rows = [
        (
            entry.get("base_offset"),
            entry.get("last_offset"),
            entry.get("records", entry.get("record_count")),
            size(_int(entry.get("size_bytes"))),
            entry.get("object_key", entry.get("log_key")),
        )
        for entry in entries
    ]
    print_table("", ("base offset", "last offset", "records", "size", "object"), rows)


@app.command("offload")
@client_command
def offload(
    client: Client,
    topic: Topic,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, max=3600, help="Seconds to wait; 0 returns at once.")
    ] = 60.0,
    output: OutputOption = Output.AUTO,
) -> None:
    """Roll the active segments and upload all that is rolled."""
    done = client.offload(topic, wait_ms=int(wait_s * 1000) or None)
    if output.is_json:
        print_json(done)
    else:
        note(
            f"uploaded {done.uploaded_segments} segments, {size(done.uploaded_bytes)}; "
            f"{done.remaining_segments} remain"
        )


@app.command("trim")
@client_command
def trim(
    client: Client,
    topic: Topic,
    before_offset: Annotated[int, typer.Option("--before", min=0, help="The new log start.")],
    partition: Annotated[int, typer.Option("--partition", "-p", min=0)] = 0,
    output: OutputOption = Output.AUTO,
) -> None:
    """Give up all records below an offset (Kafka's DeleteRecords)."""
    start = client.trim(topic, partition, before_offset=before_offset)
    if output.is_json:
        print_json({"log_start_offset": start})
    else:
        note(f"{topic}-{partition} begins at {start}")


def _partitions(client: Client, topic: str, partition: int | None) -> list[int]:
    if partition is not None:
        return [partition]
    return [one.partition for one in client.describe_topic(topic).partitions]


def _print_rows(name: str, rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    cells = [[_shown(column, row.get(column)) for column in columns] for row in rows]
    print_table(f"\n{name}", [column.replace("_", " ") for column in columns], cells)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and "bytes" in name:
        return size(value)
    if isinstance(value, int) and name.endswith("_ms") and value > 10**12:
        return moment(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return cell(value)


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None
