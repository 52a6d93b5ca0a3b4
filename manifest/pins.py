"""Pins: named protection of a manifest version, and of all objects it references, from garbage
collection.

`<partition>/pins/<name>.json`, sealed JSON of kind `pin`: name, version, created_ms, expires_ms
(null: never), nonce.

* A pin is immutable; to move one, delete and re-create it.
* After creating a pin, its creator checks that every object exists and is still referenced or
  listed: a concurrent collection first delists objects, then reads the pins, then deletes.
* Versions are not listed before they are deleted, a day after their successor was created. So a
  version can be pinned only while its successor is younger than half a day.
* Trims and topic deletion override pins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain

import msgspec

from tierlog.manifest.keys import JSON, base_offset_of, is_pin_name
from tierlog.manifest.state import Manifest, PageRef, references_object
from tierlog.manifest.store import DAY_MS, ManifestStore, random_name
from tierlog.manifest.versions import get_object
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import (
    FieldProblem,
    InvalidRequest,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    PinExists,
    StoreUnavailable,
    TierlogError,
    UnknownManifestVersion,
)

KIND_PIN = "pin"
PIN_MAX_BYTES = 64 * 1024
PINS_MAX = 1000
PINNED_WITHIN_MS = DAY_MS // 2


class Pin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    version: int
    created_ms: int
    expires_ms: int | None
    nonce: str

    def is_active(self, now_ms: int) -> bool:
        return self.expires_ms is None or now_ms < self.expires_ms


def check_pin_name(name: str, *, loc: str) -> None:
    """Raises InvalidRequest."""
    if not is_pin_name(name):
        msg = f"invalid pin name {name!r}: use 1 to 128 characters of [a-zA-Z0-9._-]"
        raise InvalidRequest(msg, problems=(FieldProblem(loc, msg),))


class Pins:
    """The pins of one partition."""

    def __init__(self, manifests: ManifestStore, *, clock: Callable[[], int]) -> None:
        self._manifests = manifests
        self._objects = manifests.objects
        self._keys = manifests.keys
        self._clock = clock

    def all_pins(self) -> list[Pin]:
        """All pins by name, including expired ones. Raises CorruptManifest if one is unreadable."""
        read = map(self.read_pin, self.list_keys())
        return [pin for pin in read if pin is not None]

    def list_keys(self) -> list[str]:
        """The keys of all pins by name. There are at most PINS_MAX."""
        listed = self._objects.list(self._keys.pins, limit=PINS_MAX)
        return [stat.key for stat in listed if stat.key.endswith(JSON)]

    def create_pin(self, name: str, version: int, *, expires_ms: int | None = None) -> Pin:
        """Pin `version`, which must be recent. Raises InvalidRequest (invalid or taken name),
        UnknownManifestVersion (also if it is too old), MissingObject (part of it was already
        collected).

        If a check fails for any reason, the pin is deleted again, so that the call can be retried.
        """
        check_pin_name(name, loc="name")
        if len(self._objects.list(self._keys.pins, limit=PINS_MAX)) >= PINS_MAX:
            raise InvalidRequest(f"the partition already has {PINS_MAX} pins, which is the limit")
        pin = Pin(
            name=name,
            version=version,
            created_ms=self._clock(),
            expires_ms=expires_ms,
            nonce=random_name(),
        )
        self._write(pin)
        try:
            self._check_recent(pin)
            self._check_whole(version)
        except TierlogError:
            with suppress(StoreUnavailable):
                self.delete_pin(name)
            raise
        return pin

    def pin_newest(self, name: str, *, expires_ms: int | None) -> Pin | None:
        """Pin the manifest in force; None if there is none yet. Raises as `create_pin`."""
        manifest = self._manifests.load_manifest()
        if manifest is None:
            return None
        return self.create_pin(name, manifest.version, expires_ms=expires_ms)

    def has_pin(self, name: str) -> bool:
        """Whether the pin exists, even if it cannot be read."""
        return is_pin_name(name) and self._objects.head(self._keys.pin(name)) is not None

    def delete_pin(self, name: str) -> None:
        """Delete a pin; it need not exist."""
        if is_pin_name(name):
            self._objects.delete([self._keys.pin(name)])

    def missing_objects(self, version: int) -> Iterator[str]:
        """Keys that the version references but that are missing or about to be deleted.

        An object that the manifest in force references counts as present, since it cannot be
        collected. One that it does not even list as removed is being deleted, or already was.
        """
        pinned = self._manifests.load_version(version)
        current = self._manifests.load_manifest(at_least=version)
        listed = self._listed(current) if current else frozenset()
        for key in self._named(pinned):
            base_offset = base_offset_of(key)
            in_force = (
                current is not None
                and base_offset is not None
                and references_object(current, key, base_offset=base_offset, pages=self._manifests)
            )
            if not in_force and (key not in listed or self._objects.head(key) is None):
                yield key

    def _listed(self, manifest: Manifest) -> frozenset[str]:
        """Keys of removed objects that have not been deleted yet."""
        pages = map(self._manifests.objects_removed_with, manifest.removed_pages)
        return frozenset(one.key for one in chain(manifest.removed, *pages))

    def _named(self, manifest: Manifest) -> Iterator[str]:
        # Pages first: if one is missing, its entries cannot be read.
        yield from (page.key for page in manifest.pages if isinstance(page, PageRef))
        for entry in self._manifests.iter_entries(manifest):
            yield from entry.keys

    def _check_recent(self, pin: Pin) -> None:
        """Compares only times of the store: the pinning process may have been suspended."""
        there = self._objects.head(self._keys.pin(pin.name))
        successor = next(iter(self._manifests.versions.stats(after=pin.version, limit=1)), None)
        if there and successor and there.modified_ms - successor.modified_ms > PINNED_WITHIN_MS:
            raise UnknownManifestVersion(
                f"version {pin.version} is about to be garbage-collected: pin a newer one"
            )

    def _check_whole(self, version: int) -> None:
        for key in self.missing_objects(version):
            raise MissingObject(f"an object of version {version} is missing", file=key)
        self._manifests.load_version(version)

    def _write(self, pin: Pin) -> None:
        key = self._keys.pin(pin.name)
        body = sealed_json.encode(pin, kind=KIND_PIN)
        try:
            self._objects.put(key, body, if_absent=True)
        except (ObjectExists, OutcomeUnknownError) as problem:
            there = self.read_pin(key)
            if there is None:
                raise OutcomeUnknownError(
                    f"{key}: no response, and the object is not there"
                ) from problem
            if there != pin:
                raise PinExists(f"pin {pin.name!r} already exists") from problem

    def read_pin(self, key: str) -> Pin | None:
        """None if it does not exist. Raises CorruptManifest."""
        try:
            data = get_object(self._objects, key, max_bytes=PIN_MAX_BYTES)
        except MissingObject:
            return None
        return sealed_json.decode(data, kind=KIND_PIN, file=key, document=Pin)


def pin_topic(
    partitions: Mapping[int, Pins], name: str, *, expires_ms: int | None
) -> dict[int, Pin]:
    """Pin the manifests in force of a topic's partitions under one name: of all that have one, or
    of none. Raises as `create_pin`; after StoreUnavailable some may be pinned.
    """
    made: dict[int, Pin] = {}
    try:
        for number, pins in partitions.items():
            pin = pins.pin_newest(name, expires_ms=expires_ms)
            if pin is not None:
                made[number] = pin
    except TierlogError:
        for number in made:
            partitions[number].delete_pin(name)
        raise
    return made
