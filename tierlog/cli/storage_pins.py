"""`tierlog storage pin | unpin | pins`: names that keep manifest versions from garbage collection.

They work on the bucket alone: whoever reads a bucket may pin what is read. A name is pinned in
every partition of the topic, or in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from record_format.clock import wall_clock_ms
from record_format.errors import StoreUnavailable, TierlogError, UnknownManifestVersion
from tierlog.cli.client_options import OutputOption, TopicArgument
from tierlog.cli.offline import BucketOptions
from tierlog.cli.option_groups import takes
from tierlog.cli.output import Output, moment, note, print_json, print_table

if TYPE_CHECKING:
    from cold_tier.object_store import ObjectStore
    from manifest.pins import Pin, Pins
    from manifest.store import ManifestStore

app = typer.Typer()

DAY_MS = 86_400_000

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="1 to 128 of the characters a-z, A-Z, 0-9, dot, underscore and dash."
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
            help="Let the pin expire after this many days; never by default.",
        ),
    ] = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Keep the current manifests, and every object they name, under a name."""
    expires_ms = None if days is None else wall_clock_ms() + int(days * DAY_MS)
    with bucket.opened() as store:
        partitions = list(_partitions(store, topic))
        try:
            made = _pin_all(partitions, name, expires_ms=expires_ms)
        except (StoreUnavailable, KeyboardInterrupt):
            note(
                f"{name} may be left as a pin of some partitions: `tierlog storage unpin {topic} "
                f"{name}` removes it"
            )
            raise
    if not made:
        raise UnknownManifestVersion(f"{topic} has no manifest yet: nothing is in the bucket")
    _show(topic, made, output)


def _pin_all(
    partitions: list[tuple[int, ManifestStore, Pins]], name: str, *, expires_ms: int | None
) -> list[tuple[int, Pin]]:
    made: list[tuple[int, Pin]] = []
    try:
        for number, manifests, pins in partitions:
            manifest = manifests.load()
            if manifest is not None:  # a partition without one has nothing to keep
                made.append((number, pins.create(name, manifest.version, expires_ms=expires_ms)))
    except TierlogError:
        taken = {number for number, _ in made}
        for number, _, pins in partitions:
            if number in taken:
                pins.delete(name)
        raise
    return made


@app.command("unpin")
@takes(BucketOptions)
def unpin(
    bucket: BucketOptions,
    topic: TopicArgument,
    name: NameArgument,
) -> None:
    """Remove a pin; removing one that does not exist is not an error."""
    found = False
    with bucket.opened() as store:
        for _, _, pins in _partitions(store, topic):
            found |= pins.has(name)
            pins.delete(name)
    note(f"{topic}: pin {name!r} removed" if found else f"{topic}: there is no pin {name!r}")


@app.command("pins")
@takes(BucketOptions)
def list_pins(
    bucket: BucketOptions,
    topic: TopicArgument,
    output: OutputOption = Output.AUTO,
) -> None:
    """List all pins of a topic, including expired ones."""
    with bucket.opened() as store:
        found = [
            (number, one) for number, _, pins in _partitions(store, topic) for one in pins.all()
        ]
    _show(topic, found, output)


def _partitions(store: ObjectStore, topic: str) -> Iterator[tuple[int, ManifestStore, Pins]]:
    from manifest.keys import PartitionKeys
    from manifest.pins import Pins
    from manifest.store import ManifestStore, StoreOptions
    from manifest.topic_objects import TopicObjects

    found = TopicObjects(store).find(topic)
    for number in range(found.partitions):
        keys = PartitionKeys(found.name, found.topic_id, number)
        manifests = ManifestStore(store, keys, StoreOptions(clock=wall_clock_ms))
        yield number, manifests, Pins(manifests, clock=wall_clock_ms)


def _show(topic: str, pins: list[tuple[int, Pin]], output: Output) -> None:
    if output.is_json:
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
        print_json({"topic": topic, "pins": shown})
        return
    rows = [
        (one.name, number, one.version, moment(one.created_ms), moment(one.expires_ms))
        for number, one in pins
    ]
    print_table(topic, ("pin", "partition", "version", "created", "expires"), rows)
