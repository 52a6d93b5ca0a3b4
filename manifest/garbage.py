"""What may be deleted from the bucket, and when: pure decisions, and the one place that acts on
them.

| what                                  | goes                                                    |
|---------------------------------------|---------------------------------------------------------|
| an object that a transition dropped   | `grace_ms` after that, and no pinned version names it   |
| the same, dropped by a trim           | `grace_ms` after that, pinned or not                    |
| an object that no manifest ever named | `grace_ms` after it was written                         |
| an upload in parts that nobody ended  | `grace_ms` after it was begun                           |
| what is going up of a segment or page | not now, whatever its age: clocks jump                  |
| a version                             | `keep_ms` after its successor came, `keep_min` newer    |
|                                       | ones exist, and it is not pinned                        |
| a pin                                 | when it has expired                                     |

* Only the owner collects. It checks that it still is the owner, and that the version it planned by
  is still in force: a commit whose answer was lost may since have named what looked unused.
* It first commits a version that has forgotten the objects, looks at the pins once more, and then
  deletes. Whoever pins checks afterwards that nothing it needs was forgotten: one of the two sees
  the other. What a crash between commit and deletion leaves, nobody names: it is deleted by age.
* The age of a version counts from its successor: a reader may have loaded it until then.
* If a page cannot be read, all that it may name counts as named; the rest is still collected. A
  page that lists dropped objects is then deleted by itself after its grace; what it listed is
  deleted by age.
* Memory is bounded: a plan holds at most `limit` keys, and names are looked up, not collected. An
  orphan may have to wait for objects that were dropped before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice, pairwise
from typing import NamedTuple

from manifest.invariants import where
from manifest.keys import base_offset_of
from manifest.paging import references_object
from manifest.pins import Pin, Pins
from manifest.state import Manifest, PageRef, Reason, RemovedObject, RemovedPage, SegmentEntry
from manifest.store import DAY_MS, ManifestStore
from manifest.transitions import PageSource, forget_removed
from manifest.versions import LIST_LIMIT, IncompleteUpload, Stat, VersionStat
from record_format.errors import (
    CorruptDataError,
    CorruptManifest,
    ManifestConflict,
    UnknownManifestVersion,
)

IsReferenced = Callable[[str], bool]
IsUploading = Callable[[int], bool]
"""Whether the segment, or page, of that base offset is going up just now, and not committed yet."""


class GarbagePolicy(NamedTuple):
    grace_ms: int = DAY_MS
    keep_ms: int = DAY_MS
    keep_min: int = 100
    limit: int = 10_000


DEFAULT_POLICY = GarbagePolicy()


class GarbagePlan(NamedTuple):
    """What one round would delete. `forget`: what the manifest then no longer lists."""

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
    """Keys of dropped objects whose grace is over and that nothing holds."""
    for entry in removed:
        over = now_ms - entry.removed_ms >= grace_ms
        if over and (entry.reason is Reason.TRIM or not is_pinned(entry.key)):
            yield entry.key


def expired_versions(
    stats: Iterable[VersionStat], *, newest: int, now_ms: int, policy: GarbagePolicy
) -> Iterator[int]:
    """Numbers of versions that may go, pins aside. `stats` in order; the last one never goes."""
    for stat, successor in pairwise(stats):
        if stat.version > newest - policy.keep_min:
            return
        if now_ms - successor.modified_ms >= policy.keep_ms:
            yield stat.version


def nothing_uploading(_base_offset: int) -> bool:
    """For callers that upload nothing."""
    return False


def orphans(
    stats: Iterable[Stat], *, now_ms: int, grace_ms: int, is_named: IsReferenced
) -> Iterator[str]:
    """Keys of objects that are old enough and that nothing names or lists as removed."""
    for stat in stats:
        if now_ms - stat.modified_ms >= grace_ms and not is_named(stat.key):
            yield stat.key


class Collector:
    """Garbage collection of one partition."""

    def __init__(
        self,
        manifests: ManifestStore,
        pins: Pins,
        policy: GarbagePolicy = DEFAULT_POLICY,
        *,
        is_uploading: IsUploading = nothing_uploading,
    ) -> None:
        self._manifests = manifests
        self._pins = pins
        self._policy = policy
        self._is_under_way = is_uploading

    def plan(self, manifest: Manifest, *, now_ms: int) -> GarbagePlan:
        """What would go now; changes nothing. `manifest` is the one in force."""
        pins = self._pins.all()
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
        return base_offset is not None and self._is_under_way(base_offset)

    def _pinned_versions(self, active: list[Pin]) -> list[Manifest]:
        found = []
        for pin in active:
            with suppress(UnknownManifestVersion):  # who pinned it died before finding that out
                found.append(self._manifests.load_version(pin.version))
        return found

    def apply(self, manifest: Manifest, plan: GarbagePlan) -> Manifest:
        """Delete what the plan names. Raises, before anything is deleted, FencedError for a foreign
        owner, and ManifestConflict where `manifest` is not in force. Returns what is afterwards.
        """
        current = self._manifests.check_fence_by_list(manifest)
        if current is not manifest:
            raise ManifestConflict(
                f"{where(current)} is in force, the plan is of {where(manifest)}"
            )
        for pin in self._pins.all() if plan.pins else ():
            if pin.name in plan.pins and pin.nonce in plan.pins_seen:  # else it was made anew
                self._pins.delete(pin.name)
        forgotten = self._manifests.commit(current, lambda s: forget_removed(s, plan.forget))
        pinned_since = self._pinned_since(plan)
        is_pinned = self._references_any(self._pinned_versions(pinned_since))
        kept = {pin.version for pin in pinned_since}
        self._manifests.versions.delete([one for one in plan.versions if one not in kept])
        gone = [key for key in (*plan.objects, *plan.orphans) if not is_pinned(key)]
        for keys in _batches(tuple(gone)):
            self._manifests.objects.delete(keys)
        for upload in plan.uploads:
            self._manifests.objects.abort_upload(upload)
        return forgotten

    def _pinned_since(self, plan: GarbagePlan) -> list[Pin]:
        return [pin for pin in self._pins.all() if pin.nonce not in plan.pins_seen]

    def _due_objects(
        self, manifest: Manifest, is_pinned: IsReferenced, *, now_ms: int
    ) -> tuple[tuple[str, ...], frozenset[str]]:
        grace_ms, limit = self._policy.grace_ms, self._policy.limit
        due = expired_removals(
            manifest.removed, now_ms=now_ms, grace_ms=grace_ms, is_pinned=is_pinned
        )
        keys = list(islice(due, limit))
        forget = set(keys)
        for page in manifest.removed_pages:
            if len(keys) >= limit:
                break
            if now_ms - page.removed_ms < grace_ms:
                continue
            listed = self._removed_with(page) or [page.own_object]  # what it named goes by age then
            gone = list(
                expired_removals(listed, now_ms=now_ms, grace_ms=grace_ms, is_pinned=is_pinned)
            )
            if len(gone) == len(listed):  # a page with a pinned object waits as a whole
                keys += gone  # the page itself is the last of them
                forget.add(page.key)
        return tuple(keys), frozenset(forget)

    def _removed_with(self, page: RemovedPage) -> list[RemovedObject] | None:
        """All that goes with a page, which is the last of it; None if it cannot be read."""
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
        while page := self._manifests.list_versions(after=after, limit=LIST_LIMIT):
            yield from page
            after = page[-1].version

    def _orphans(
        self, manifest: Manifest, is_pinned: IsReferenced, *, now_ms: int
    ) -> tuple[str, ...]:
        removed = {entry.key for entry in manifest.removed}
        in_force = self._references_any([manifest])

        def is_named(key: str) -> bool:
            return key in removed or self._is_uploading(key) or in_force(key) or is_pinned(key)

        found = orphans(
            self._own_objects(), now_ms=now_ms, grace_ms=self._policy.grace_ms, is_named=is_named
        )
        nobodys = tuple(islice(found, self._policy.limit))
        for page in manifest.removed_pages if nobodys else ():
            if (listed := self._removed_with(page)) is None:
                return ()  # any may be in it, and have its grace
            dropped = {entry.key for entry in listed}
            nobodys = tuple(key for key in nobodys if key not in dropped)
        return nobodys

    def _own_objects(self) -> Iterator[Stat]:
        """Segment objects and pages; a name that is none of ours is left alone."""
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
            assert base_offset is not None, f"{key} is no name of ours"
            try:
                return any(
                    references_object(manifest, key, base_offset=base_offset, pages=pages)
                    for manifest in manifests
                )
            except CorruptDataError:
                return True  # for all that is known

        return named


class _FailFastPages:
    """Pages, of which one that cannot be read is not asked for again: a trim takes also those that
    a pinned version names.
    """

    def __init__(self, pages: PageSource) -> None:
        self._pages = pages
        self._failed: set[str] = set()  # keys alone: an error keeps all that its frames hold

    def entries(self, page: PageRef, /) -> tuple[SegmentEntry, ...]:
        if page.key in self._failed:
            raise CorruptManifest("the page could not be read just now", file=page.key)
        try:
            return self._pages.entries(page)
        except CorruptDataError:
            self._failed.add(page.key)
            raise


def _batches(keys: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for start in range(0, len(keys), LIST_LIMIT):
        yield keys[start : start + LIST_LIMIT]
