"""Garbage collection of one partition: which objects may be deleted from the bucket, and when.

| object                              | is deleted                                                |
|-------------------------------------|-----------------------------------------------------------|
| removed by a transition             | `grace_ms` after that, unless a pinned version needs it   |
| removed by a trim                   | `grace_ms` after that, pinned or not                      |
| orphan: never in any manifest       | `grace_ms` after it was written                           |
| incomplete multipart upload         | `grace_ms` after it was initiated                         |
| of a segment or page that is being  | never, whatever its age, since clocks can jump            |
| uploaded                            |                                                           |
| manifest version                    | `keep_ms` after its successor was created, if there are   |
|                                     | `keep_min` newer ones and it is not pinned                |
| pin                                 | when it has expired                                       |

* Only the owner collects. It checks that it still is the owner, and that the version its plan is
  based on is still in force: a commit whose response was lost may have referenced what looked
  unused.
* It first commits a version that no longer lists the objects, then reads the pins again, and then
  deletes. A client that pins a version checks afterwards that everything it needs is still listed,
  so one of the two sees the other. Objects left by a crash between commit and deletion are orphans.
* The age of a version counts from its successor, because until then readers may have loaded it.
* If a page cannot be read, everything it may reference counts as referenced; other objects are
  still collected. If it is a page of removed objects, only the page is deleted after its grace
  period, and the objects it listed become orphans.
* Memory is bounded: a plan has at most `limit` keys, and references are looked up, not collected.
  An orphan may have to wait for objects that were removed before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

from tierlog.host.deferred_errors import DeferredErrors
from tierlog.manifest.invariants import where
from tierlog.manifest.keys import base_offset_of
from tierlog.manifest.pins import Pin, Pins
from tierlog.manifest.state import (
    Manifest,
    PageRef,
    PageSource,
    Reason,
    RemovedObject,
    RemovedPage,
    references_object,
)
from tierlog.manifest.store import DAY_MS, ManifestStore
from tierlog.manifest.transitions import forget_removed
from tierlog.manifest.versions import LIST_LIMIT, VersionStat
from tierlog.object_store.store import IncompleteUpload, ObjectStat
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    CorruptManifest,
    ManifestConflict,
    UnknownManifestVersion,
)
from tierlog.record_format.segment_entry import SegmentEntry

IsReferenced = Callable[[str], bool]
IsUploading = Callable[[int], bool]
"""Whether the segment or page with that base offset is being uploaded and not yet committed."""


class GarbagePolicy(NamedTuple):
    grace_ms: int = DAY_MS
    keep_ms: int = DAY_MS
    keep_min: int = 100
    limit: int = 10_000


class GarbagePlan(NamedTuple):
    """What one round deletes. `forget`: the keys that the manifest then no longer lists."""

    objects: tuple[str, ...]
    forget: frozenset[str]
    orphans: tuple[str, ...]
    versions: tuple[int, ...]
    pins: tuple[str, ...]
    uploads: tuple[IncompleteUpload, ...] = ()
    pins_seen: frozenset[str] = frozenset()  # their nonces


def expired_removals(
    removed: Iterable[RemovedObject], *, now_ms: int, grace_ms: int, is_pinned: IsReferenced
) -> Iterator[str]:
    """Keys of removed objects whose grace period is over and that no pin protects."""
    for entry in removed:
        over = now_ms - entry.removed_ms >= grace_ms
        if over and (entry.reason is Reason.TRIM or not is_pinned(entry.key)):
            yield entry.key


def expired_versions(
    stats: Iterable[VersionStat], *, newest: int, now_ms: int, policy: GarbagePolicy
) -> Iterator[int]:
    """Versions that may be deleted if not pinned. `stats` are in order; the last one is kept."""
    for stat, successor in pairwise(stats):
        if stat.version > newest - policy.keep_min:
            return
        if now_ms - successor.modified_ms >= policy.keep_ms:
            yield stat.version


class Collector:
    """Garbage collection of one partition."""

    def __init__(
        self,
        manifests: ManifestStore,
        pins: Pins,
        policy: GarbagePolicy,
        *,
        is_uploading: IsUploading = lambda _: False,
    ) -> None:
        self._manifests = manifests
        self._pins = pins
        self._policy = policy
        self._is_base_uploading = is_uploading

    def plan_collection(self, manifest: Manifest, *, now_ms: int) -> GarbagePlan:
        """What would be deleted now; changes nothing. `manifest` is the one in force."""
        pins = self._pins.all_pins()
        active = [pin for pin in pins if pin.is_active(now_ms)]
        is_pinned = self._references_any(self._pinned_versions(active))
        objects, forget = self._due_objects(manifest, is_pinned, now_ms=now_ms)
        return GarbagePlan(
            objects=objects,
            forget=forget,
            orphans=self._orphans(manifest, is_pinned, now_ms=now_ms),
            versions=self._versions(manifest, active, now_ms=now_ms),
            pins=tuple(pin.name for pin in pins if not pin.is_active(now_ms)),
            uploads=self._stale_uploads(now_ms=now_ms),
            pins_seen=frozenset(pin.nonce for pin in pins),
        )

    def _stale_uploads(self, *, now_ms: int) -> tuple[IncompleteUpload, ...]:
        found = self._manifests.objects.incomplete_uploads(
            self._manifests.keys.segments, limit=self._policy.limit
        )
        return tuple(
            one
            for one in found
            if now_ms - one.initiated_ms >= self._policy.grace_ms
            and not self._is_uploading(one.key)
        )

    def _is_uploading(self, key: str) -> bool:
        base_offset = base_offset_of(key)
        return base_offset is not None and self._is_base_uploading(base_offset)

    def _pinned_versions(self, active: list[Pin]) -> list[Manifest]:
        found = []
        for version in {pin.version for pin in active}:
            with suppress(UnknownManifestVersion):  # its creator crashed before it noticed
                found.append(self._manifests.load_version(version))
        return found

    def delete_garbage(self, manifest: Manifest, plan: GarbagePlan) -> Manifest:
        """Execute the plan; returns the manifest afterwards.

        Raises FencedError for another owner, and ManifestConflict if `manifest` is not in force,
        before anything is deleted; ConfigurationError for what may not be deleted, after the rest.
        """
        current = self._manifests.check_fence_by_list(manifest)
        if current is not manifest:
            raise ManifestConflict(
                f"{where(current)} is in force, but the plan is based on {where(manifest)}"
            )
        forgotten = self._manifests.commit_manifest(
            current, lambda s: forget_removed(s, plan.forget)
        )
        self._delete(plan)
        return forgotten

    def _delete(self, plan: GarbagePlan) -> None:
        objects, versions = self._manifests.objects, self._manifests.versions
        refused = DeferredErrors(ConfigurationError)
        pins = self._pins.all_pins()
        pinned_since = [pin for pin in pins if pin.nonce not in plan.pins_seen]
        for pin in pins:  # at once: its name may be used again at any time
            if pin.name in plan.pins and pin not in pinned_since:
                with refused:
                    self._pins.delete_pin(pin.name)
        is_pinned = self._references_any(self._pinned_versions(pinned_since))
        kept = {pin.version for pin in pinned_since}
        keys = [versions.key(version) for version in plan.versions if version not in kept]
        keys += [key for key in (*plan.objects, *plan.orphans) if not is_pinned(key)]
        with refused:
            objects.delete(keys)
        for upload in plan.uploads:
            with refused:
                objects.abort_upload(upload)
        refused.raise_first()

    def _due_objects(
        self, manifest: Manifest, is_pinned: IsReferenced, *, now_ms: int
    ) -> tuple[tuple[str, ...], frozenset[str]]:
        grace_ms, limit = self._policy.grace_ms, self._policy.limit
        due = partial(expired_removals, now_ms=now_ms, grace_ms=grace_ms, is_pinned=is_pinned)
        keys = list(islice(due(manifest.removed), limit))
        forget = set(keys)
        for page in manifest.removed_pages:
            if len(keys) >= limit:
                break
            if now_ms - page.removed_ms < grace_ms:
                continue
            # If the page is unreadable, the objects it lists become orphans.
            listed = self._removed_with(page) or [page.own_object]
            page_keys = list(due(listed))
            if len(page_keys) == len(listed):  # a page with a pinned object is kept whole
                keys += page_keys  # the page's own object is the last
                forget.add(page.key)
        return tuple(keys), frozenset(forget)

    def _removed_with(self, page: RemovedPage) -> list[RemovedObject] | None:
        """The objects that the page lists, and last its own; None if it cannot be read."""
        try:
            return self._manifests.objects_removed_with(page)
        except CorruptDataError:
            return None

    def _versions(self, manifest: Manifest, active: list[Pin], *, now_ms: int) -> tuple[int, ...]:
        pinned = {pin.version for pin in active}
        due = expired_versions(
            self._all_versions(), newest=manifest.version, now_ms=now_ms, policy=self._policy
        )
        return tuple(islice((v for v in due if v not in pinned), self._policy.limit))

    def _all_versions(self) -> Iterator[VersionStat]:
        after = 0
        while page := self._manifests.versions.stats(after=after, limit=LIST_LIMIT):
            yield from page
            after = page[-1].version

    def _orphans(
        self, manifest: Manifest, is_pinned: IsReferenced, *, now_ms: int
    ) -> tuple[str, ...]:
        removed = {entry.key for entry in manifest.removed}
        in_force = self._references_any([manifest])

        def is_named(key: str) -> bool:
            return key in removed or self._is_uploading(key) or in_force(key) or is_pinned(key)

        grace_ms, limit = self._policy.grace_ms, self._policy.limit
        old = (stat.key for stat in self._own_objects() if now_ms - stat.modified_ms >= grace_ms)
        candidates = tuple(islice((key for key in old if not is_named(key)), limit))
        for page in manifest.removed_pages if candidates else ():
            if (listed := self._removed_with(page)) is None:
                return ()  # any of them may be listed there, still in its grace period
            dropped = {entry.key for entry in listed}
            candidates = tuple(key for key in candidates if key not in dropped)
        return candidates

    def _own_objects(self) -> Iterator[ObjectStat]:
        """Segment objects and pages. Objects with other names are left alone."""
        keys = self._manifests.keys
        for folder in (keys.segments, keys.pages):
            after = ""
            while page := self._manifests.objects.list(folder, start_after=after, limit=LIST_LIMIT):
                yield from (stat for stat in page if base_offset_of(stat.key) is not None)
                after = page[-1].key

    def _references_any(self, manifests: list[Manifest]) -> IsReferenced:
        pages = _FailFastPages(self._manifests)

        def named(key: str) -> bool:
            base_offset = base_offset_of(key)
            assert base_offset is not None, f"{key} is not a key of a segment or page"
            try:
                return any(
                    references_object(manifest, key, base_offset=base_offset, pages=pages)
                    for manifest in manifests
                )
            except CorruptDataError:
                return True  # it may be

        return named


class _FailFastPages:
    """A page source that tries each unreadable page only once.

    Pages of pinned versions may be missing, since trims override pins.
    """

    def __init__(self, pages: PageSource) -> None:
        self._pages = pages
        self._failed: set[str] = set()  # only the keys: an exception would keep its frames alive

    def page_entries(self, page: PageRef, /) -> tuple[SegmentEntry, ...]:
        if page.key in self._failed:
            raise CorruptManifest("an earlier attempt to read the page failed", file=page.key)
        try:
            return self._pages.page_entries(page)
        except CorruptDataError:
            self._failed.add(page.key)
            raise
