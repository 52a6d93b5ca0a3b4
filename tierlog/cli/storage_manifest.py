"""`tierlog storage manifest | pin | unpin | pins`: the versions of a manifest, and which are kept.

* `manifest` reads through the broker or from the bucket alone: both return the same document.
* Pins work on the bucket alone: any reader of a bucket may pin what it reads. A name is pinned in
  every partition of the topic, or in none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierlog.cli.options import (
    BucketOptions,
    ClientOrBucket,
    OutputOption,
    TopicArgument,
    client_or_bucket_command,
    takes,
)
from tierlog.cli.output import (
    Output,
    format_member,
    format_time,
    note,
    print_documents,
    print_json,
    print_members,
    print_table,
)
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.errors import StoreUnavailable, UnknownManifestVersion

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.manifest.pins import Pin


app = typer.Typer()


SEGMENT_COLUMNS: Final = ("base_offset", "last_offset", "records", "size_bytes", "object_key")


Partition = Annotated[int, typer.Option("--partition", "-p", min=0, help="The partition.")]
Version = Annotated[
    int | None, typer.Option(min=0, help="An older version; the current one by default.")
]
Diff = Annotated[
    tuple[int, int] | None,
    typer.Option("--diff", metavar="A B", help="Show what changed from version A to version B."),
]
History = Annotated[
    bool, typer.Option("--history", help="With --store: list the versions that are kept.")
]


@app.command("manifest")
@client_or_bucket_command
def manifest(
    source: ClientOrBucket,
    topic: TopicArgument,
    *,
    partition: Partition = 0,
    version: Version = None,
    diff: Diff = None,
    history: History = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """Show the manifest of a partition, or an older version that is still kept."""

    def load(number: int | None) -> dict[str, Any]:
        if isinstance(source, BucketOptions):
            return _offline_manifest(topic, partition, number, source)
        return _manifest(source, topic, partition, number)

    if history:
        if not isinstance(source, BucketOptions):
            raise typer.BadParameter("--history requires --store URL: it reads the bucket")
        _print_history(topic, partition, source, output)
        return
    if diff is not None:
        _print_diff(difference(load(diff[0]), load(diff[1])), output)
        return
    document = load(version)
    if output.is_json:
        print_json(document)
    else:
        head = {name: one for name, one in document.items() if name != "next_from_offset"}
        print_members(head, title=f"{topic}-{partition}")
        print_documents("", document["segments"], SEGMENT_COLUMNS)


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The difference of two manifest documents: changed members as [before, after], and segments
    added or removed, identified by their object.
    """
    members = sorted((before.keys() | after.keys()) - {"segments", "next_from_offset"})
    was, now = ({one["object_key"]: one for one in side["segments"]} for side in (before, after))
    return {
        "changed": {
            name: [before.get(name), after.get(name)]
            for name in members
            if before.get(name) != after.get(name)
        },
        "added": [one for key, one in now.items() if key not in was],
        "removed": [one for key, one in was.items() if key not in now],
    }


def _print_diff(found: dict[str, Any], output: Output) -> None:
    if output.is_json:
        print_json(found)
        return
    rows = [
        (name, format_member(name, was), format_member(name, now))
        for name, (was, now) in found["changed"].items()
    ]
    print_table("", ("", "before", "after"), rows)
    for what in ("added", "removed"):
        if found[what]:
            print_documents(f"\n{what}", found[what], SEGMENT_COLUMNS)
    if not found["added"] and not found["removed"]:
        note("segments: no difference")


def _manifest(client: Client, topic: str, partition: int, version: int | None) -> dict[str, Any]:
    page = client.manifest(topic, partition, version=version)
    document = dict(page.document)
    entries = list(page.segments)
    while page.next_from_offset is not None:
        page = client.manifest(
            topic, partition, version=page.version, from_offset=page.next_from_offset
        )
        entries += page.segments
    return document | {"segments": entries, "next_from_offset": None}


def _offline_manifest(
    name: str, partition: int, version: int | None, options: BucketOptions
) -> dict[str, Any]:
    from msgspec import structs, to_builtins

    with options.reader() as bucket:
        topic = bucket.topic(name)
        found = bucket.manifest(topic, partition, version=version)
        members = structs.asdict(found) | {"end_offset": found.end_offset}
        entries = [to_builtins(bucket.segment(one)) for one in bucket.segment_entries(topic, found)]
        return members | {"segments": entries}


def _print_history(name: str, partition: int, options: BucketOptions, output: Output) -> None:
    with options.reader() as bucket:
        versions = [one._asdict() for one in bucket.history(bucket.topic(name), partition)]
    if output.is_json:
        print_json({"versions": versions})
    else:
        print_documents(f"{name}-{partition}", versions)


DAY_MS = 86_400_000

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="1 to 128 characters: a-z, A-Z, 0-9, dot, underscore, dash."
    ),
]


@app.command("pin")
@takes(BucketOptions)
def pin(
    bucket: BucketOptions,
    topic: TopicArgument,
    name: NameArgument,
    *,
    days: Annotated[
        float | None,
        typer.Option(
            "--days",
            min=0,
            max=1_000_000,
            help="Expire after this many days; by default never.",
        ),
    ] = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Protect the current manifests, and all objects that they name, from garbage collection."""
    from tierlog.manifest.pins import pin_topic

    expires_ms = None if days is None else wall_clock_ms() + int(days * DAY_MS)
    with bucket.reader() as reader:
        partitions = {number: pins for number, _, pins in reader.pins(topic)}
        try:
            made = pin_topic(partitions, name, expires_ms=expires_ms)
        except (StoreUnavailable, KeyboardInterrupt):
            note(
                f"some partitions may be pinned as {name}: `tierlog storage unpin {topic} {name}` "
                "removes these pins"
            )
            raise
    if not made:
        raise UnknownManifestVersion(f"{topic} has no manifest yet: nothing was offloaded")
    _show(topic, list(made.items()), output)


@app.command("unpin")
@takes(BucketOptions)
def unpin(
    bucket: BucketOptions,
    topic: TopicArgument,
    name: NameArgument,
    output: OutputOption = Output.AUTO,
) -> None:
    """Remove a pin; removing one that does not exist is not an error."""
    found = False
    with bucket.reader() as reader:
        for _, _, pins in reader.pins(topic):
            found |= pins.has_pin(name)
            pins.delete_pin(name)
    output.report(
        {"topic": topic, "name": name, "removed": found},
        f"{topic}: pin {name!r} removed" if found else f"{topic}: there is no pin {name!r}",
    )


@app.command("pins")
@takes(BucketOptions)
def list_pins(
    bucket: BucketOptions,
    topic: TopicArgument,
    output: OutputOption = Output.AUTO,
) -> None:
    """List all pins of a topic, including expired ones."""
    with bucket.reader() as reader:
        found = [(number, one) for number, _, pins in reader.pins(topic) for one in pins.all_pins()]
    _show(topic, found, output)


def _show(topic: str, pins: list[tuple[int, Pin]], output: Output) -> None:
    shown = [
        {
            "name": one.name,
            "partition": number,
            "version": one.version,
            "created_ms": one.created_ms,
            "expires_ms": one.expires_ms,
        }
        for number, one in pins
    ]
    rows = [
        (one.name, number, one.version, format_time(one.created_ms), format_time(one.expires_ms))
        for number, one in pins
    ]
    columns = ("pin", "partition", "version", "created", "expires")
    output.table({"topic": topic, "pins": shown}, columns, rows, title=topic)
