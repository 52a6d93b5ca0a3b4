"""`tierlog storage pin | unpin | pins`: protect manifest versions from garbage collection.

They work on the bucket alone: any reader of a bucket may pin what it reads. A name is pinned in
every partition of the topic, or in none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.cli.bucket_options import BucketOptions
from tierlog.cli.client_options import OutputOption, TopicArgument
from tierlog.cli.option_groups import takes
from tierlog.cli.output import Output, format_time, note
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.errors import StoreUnavailable, TierlogError, UnknownManifestVersion

if TYPE_CHECKING:
    from tierlog.manifest.pins import Pin, Pins
    from tierlog.manifest.store import ManifestStore

app = typer.Typer()

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
    expires_ms = None if days is None else wall_clock_ms() + int(days * DAY_MS)
    with bucket.reader() as reader:
        partitions = list(reader.pins(topic))
        try:
            made = _pin_all(partitions, name, expires_ms=expires_ms)
        except (StoreUnavailable, KeyboardInterrupt):
            note(
                f"some partitions may be pinned as {name}: `tierlog storage unpin {topic} {name}` "
                "removes these pins"
            )
            raise
    if not made:
        raise UnknownManifestVersion(f"{topic} has no manifest yet: nothing was offloaded")
    _show(topic, made, output)


def _pin_all(
    partitions: list[tuple[int, ManifestStore, Pins]], name: str, *, expires_ms: int | None
) -> list[tuple[int, Pin]]:
    made: list[tuple[int, Pin]] = []
    try:
        for number, manifests, pins in partitions:
            manifest = manifests.load_manifest()
            if manifest is not None:  # a partition without a manifest has nothing to pin
                made.append(
                    (number, pins.create_pin(name, manifest.version, expires_ms=expires_ms))
                )
    except TierlogError:
        taken = {number for number, _ in made}
        for number, _, pins in partitions:
            if number in taken:
                pins.delete_pin(name)
        raise
    return made


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
            found |= pins.has(name)
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
        found = [(number, one) for number, _, pins in reader.pins(topic) for one in pins.all()]
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
