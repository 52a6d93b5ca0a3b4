"""Verifies the metadata of one partition in the bucket: manifest, pages and pins, not the segments.

* Everything is read from the bucket with a cache of its own, not from the broker's memory.
* If a page cannot be read, only its entries are left unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise

from tierlog.manifest.codec import PageCache
from tierlog.manifest.invariants import entry_violation, uncovered
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.pins import Pin, Pins
from tierlog.manifest.state import Manifest, PageRef, live_entries
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import (
    CorruptDataError,
    CorruptManifest,
    MissingObject,
    UnknownManifestVersion,
)
from tierlog.record_format.findings import Findings, ProblemKind
from tierlog.record_format.segment_entry import SegmentEntry


class ManifestCheck:
    """One verification of one partition. `at_least`: the version last seen in force.

    All methods raise StoreUnavailable, ConfigurationError.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: PartitionKeys,
        *,
        clock: Callable[[], int],
        at_least: int = 0,
    ) -> None:
        self._store, self._clock, self._at_least = store, clock, at_least
        self._manifests = ManifestStore(store, keys, StoreOptions(clock=clock), cache=PageCache())
        self.findings = Findings(keys.partition)

    def manifest(self) -> Manifest | None:
        """The manifest in force; None if there is none, or it cannot be read."""
        self.findings.checked.partitions += 1
        try:
            manifest = self._manifests.load_manifest(at_least=self._at_least)
            if manifest is None:
                self._manifests.check_never_existed()
        except MissingObject as bad:
            self._add(ProblemKind.MANIFEST_MISSING, bad.detail, key=bad.file)
        except CorruptDataError as bad:
            self._add(ProblemKind.MANIFEST_CORRUPT, bad.detail, key=bad.file)
        else:
            return manifest
        return None

    def checked_entries(self, manifest: Manifest) -> Iterator[SegmentEntry]:
        """All live entries in readable pages, oldest first. Missing offsets are reported.

        Entries on either side of an unreadable page are not compared.
        """
        before: SegmentEntry | None = None
        for page in manifest.pages:
            found = self._page(manifest, page) if isinstance(page, PageRef) else None
            if found is not None:
                self._compare_borders(manifest, chain([before] if before else [], found))
                yield from found
            before = found[-1] if found else None
        yield from manifest.segments  # decoding has checked these

    def _page(self, manifest: Manifest, page: PageRef) -> tuple[SegmentEntry, ...] | None:
        self.findings.checked.pages += 1
        try:
            live = live_entries(page, self._manifests)
        except MissingObject:
            self._add(ProblemKind.PAGE_MISSING, "the object is missing", key=page.key)
            return None
        except CorruptDataError as bad:
            self._add(ProblemKind.PAGE_CORRUPT, bad.detail, key=page.key)
            return None
        said = (page.base_offset, page.last_offset, page.entry_count, page.size_bytes)
        sums = (len(live), sum(entry.size_bytes for entry in live))
        found = (live[0].base_offset, live[-1].last_offset, *sums) if live else (None, None, *sums)
        if said != found:
            detail = f"(base, last, entries, bytes) is {found}, in the manifest {said}"
            self._add(ProblemKind.PAGE_CORRUPT, detail, key=page.key)
        for broken in chain.from_iterable(entry_violation(manifest, entry) for entry in live):
            self._add(ProblemKind.PAGE_CORRUPT, broken, key=page.key)
        return live

    def _compare_borders(self, manifest: Manifest, entries: Iterator[SegmentEntry]) -> None:
        for left, right in pairwise(entries):
            if right.base_offset <= left.last_offset:
                detail = f"the segment at {right.base_offset} overlaps the one before it"
                self._add(ProblemKind.OVERLAP, detail, key=right.log_key)
            if (hole := uncovered(manifest, left.next_offset, right.base_offset)) is not None:
                detail = f"offsets {hole[0]} to {hole[1] - 1} are in no segment"
                self._add(ProblemKind.GAP, detail, key=right.log_key)

    def pins(self) -> None:
        """Check that every pin that has not expired is of a version with all its objects."""
        pins = Pins(self._manifests, clock=self._clock)
        for key in pins.list_keys():
            try:
                pin = pins.read_pin(key)
            except CorruptManifest as bad:
                self._add(ProblemKind.PIN_BROKEN, bad.detail, key=key)
                continue
            if pin is not None and pin.is_active(self._clock()):
                self._pin(pins, pin, key)

    def _pin(self, pins: Pins, pin: Pin, key: str) -> None:
        self.findings.checked.objects += 1
        try:
            missing = next(pins.missing_objects(pin.version), None)
        except (UnknownManifestVersion, CorruptDataError) as bad:
            self._add(ProblemKind.PIN_BROKEN, bad, key=key)
            return
        if missing is not None:
            detail = f"version {pin.version} references {missing}, which is missing"
            self._add(ProblemKind.PIN_BROKEN, detail, key=key)

    def _add(self, kind: ProblemKind, detail: object, *, key: str) -> None:
        self.findings.add_problem(
            kind, detail, object_key=self._store.full_key(key) if key else None
        )
