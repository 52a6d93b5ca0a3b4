"""Calls on a topic's pins: names under which manifests, and their objects, are kept.

A name is pinned in every partition that has a manifest, or in none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from fastapi import Response
from msgspec import Meta

from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import JsonResponse, TheContext, body_as
from tierlog.api.http.schemas import PinList, PinState
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.pins import Pin, Pins, check_pin_name, pin_topic
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.record_format.errors import UnknownManifestVersion


class PinToCreate(msgspec.Struct, forbid_unknown_fields=True):
    """`expires_ms`: when it ends; null if never."""

    name: str
    expires_ms: Annotated[int, Meta(ge=0, le=MAX_OFFSET)] | None = None


async def list_pins(context: TheContext, topic: str) -> Response:
    return JsonResponse(await context.read_cold(listed_pins, context, topic))


def listed_pins(context: Context, topic: str) -> PinList:
    """All pins of a topic by partition and name, expired ones too. Waits for the bucket."""
    found = _pins(context, topic)
    return PinList(
        topic, [_shown(number, one) for number, pins in found.items() for one in pins.all_pins()]
    )


async def create_pin(
    context: TheContext, topic: str, body: Annotated[PinToCreate, body_as(PinToCreate)]
) -> Response:
    made = await context.write_cold(
        pin_topic, _pins(context, topic), body.name, expires_ms=body.expires_ms
    )
    if not made:
        raise UnknownManifestVersion(f"{topic} has no manifest yet: nothing was offloaded")
    return JsonResponse(
        PinList(topic, [_shown(number, one) for number, one in made.items()]), status=201
    )


async def delete_pin(context: TheContext, topic: str, pin: str) -> Response:
    """One that does not exist is not an error; a name that none can have is."""
    check_pin_name(pin, loc="pin")
    await context.write_cold(_delete, _pins(context, topic), pin)
    return Response(status_code=204)


def _delete(partitions: Mapping[int, Pins], name: str) -> None:
    for pins in partitions.values():
        pins.delete_pin(name)


def _pins(context: Context, topic: str) -> dict[int, Pins]:
    """By partition; none without a bucket. Raises UnknownTopic, and if a partition is damaged."""
    found = context.broker.topic(topic)
    pins = {one.number: one.pins for one in found.local_partitions() if one.pins is not None}
    bucket, clock, record = context.broker.bucket, context.broker.clock, found.record
    if bucket is not None:  # pins are in it: those of other brokers' partitions need no leader
        for number in found.numbers:
            if number not in found.partitions:
                keys = PartitionKeys(record.name, record.topic_id, number)
                manifests = ManifestStore(bucket.store, keys, StoreOptions(clock=clock))
                pins[number] = Pins(manifests, clock=clock)
    return dict(sorted(pins.items()))


def _shown(partition: int, pin: Pin) -> PinState:
    return PinState(pin.name, partition, pin.version, pin.created_ms, pin.expires_ms)
