"""The manifest of one partition in the bucket: load, claim, commit.

* A commit is a transition plus the state it was derived from. After a lost race it reloads, checks
  that owner and epoch are still those of the base (else FencedError), and reapplies the transition.
* A version number can also be free because that version was garbage-collected. So a writer that was
  suspended for half of the version retention reloads before its PUT, and checks afterwards that
  nothing newer exists. Its clock includes time in suspend.
* A commit that returned is in the bucket. Before the caller deletes local data because of it, it
  calls `confirm`, which reads the version back.
* Thread-safe: a lock serializes the commits of one partition; conditional PUTs order processes.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from tierlog.host.clock import boottime_ms
from tierlog.host.waiting import Wait
from tierlog.manifest.codec import (
    MAX_MANIFEST_BYTES,
    MAX_PAGE_BYTES,
    PageCache,
    build_page,
    decode_manifest,
    decode_page,
    decode_removed_page,
    encode_manifest,
    spill_overflow,
)
from tierlog.manifest.invariants import where
from tierlog.manifest.keys import PartitionKeys, base_offset_of
from tierlog.manifest.state import (
    EpochStart,
    Manifest,
    PageRef,
    RemovedObject,
    RemovedPage,
    RemovedPageKind,
    find_entry,
    find_entry_before,
    iter_entries,
    live_entries,
)
from tierlog.manifest.transitions import (
    TAKE_OVER,
    Claim,
    apply_claim,
    assign,
    check_may_claim,
    create,
    merge_pages,
    record_gap,
)
from tierlog.manifest.versions import (
    LIST_LIMIT,
    CreateOutcome,
    VersionChain,
    get_object,
    outcome_unknown,
)
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    CorruptDataError,
    CorruptManifest,
    FencedError,
    ManifestConflict,
    MissingObject,
    StoreUnavailable,
    UnknownManifestVersion,
)
from tierlog.record_format.sealed_json import is_truncated
from tierlog.record_format.segment_entry import SegmentEntry

DAY_MS = 24 * 3600 * 1000
COMMIT_ATTEMPTS = 16
TRUNCATED_UPLOADS_MAX = 4  # in one commit; then the connection is considered unusable
# The owner records each commit locally before the next. A crash can lose one such record, and a
# second one if a request that was given up before it arrived late.
UNRECORDED_COMMITS_MAX = 2
TRUNCATED_VERSIONS_MAX = 1024  # in a row; they are never deleted, because their numbers are taken

Transition = Callable[[Manifest], Manifest]


def random_name() -> str:
    """128 random bits in hex, for object names and nonces."""
    return uuid.uuid4().hex


class StoreOptions(NamedTuple):
    """Sources of time and randomness, which tests replace."""

    clock: Callable[[], int]
    boot_clock: Callable[[], int] = boottime_ms
    unique: Callable[[], str] = random_name
    pause: Callable[[float], None] = time.sleep


_Times = tuple[int, int]
"""(boot clock, wall clock), in ms."""


class ManifestStore:
    """One partition's manifest; also the `PageSource` of its transitions."""

    def __init__(
        self,
        store: ObjectStore,
        keys: PartitionKeys,
        options: StoreOptions,
        *,
        cache: PageCache | None = None,
    ) -> None:
        self.keys = keys
        self.objects = store
        self._options = options
        self._cache = cache or PageCache()
        self.versions = VersionChain(
            store, keys.versions, max_bytes=MAX_MANIFEST_BYTES, pause=options.pause
        )
        self._lock = threading.Lock()
        # (version, nonce, times): which state was known to be the newest, and when. A commit may
        # rely on it while it is recent.
        self._newest: tuple[int, str, _Times] = (-1, "", (0, 0))
        self._sent = ""  # the nonce of the latest PUT, whatever its outcome

    # --- reading ----------------------------------------------------------------------------------

    def load_manifest(self, *, at_least: int = 0) -> Manifest | None:
        """The manifest in force; None if the partition has none.

        `at_least`: the version last seen in force, which cannot be void. Raises CorruptManifest if
        it is truncated, and MissingObject if the newest version is below it.
        """
        for _ in range(COMMIT_ATTEMPTS):
            started = self._times()
            newest = self.versions.newest_version(at_least=max(0, at_least - 1))
            if newest < at_least:
                file = self.versions.key(at_least)
                raise MissingObject("the manifest version that was in force is missing", file=file)
            if newest == 0:
                return None
            data = self.versions.read_version(newest)
            if data is None:
                continue  # deleted between LIST and GET, so there are newer ones
            manifest = self._newest_valid(newest, data, at_least=at_least)
            if manifest is not None:
                self._newest = (manifest.version, manifest.nonce, started)
            return manifest
        raise ManifestConflict(
            f"{self.keys.folder}: versions are deleted faster than they can be read"
        )

    def check_never_existed(self) -> None:
        """For a caller that found no manifest: raises MissingObject if there are segments.

        Segments are uploaded only after a first version is committed, so the manifest was lost, and
        a new one would turn them into garbage.
        """
        there = self.objects.list(self.keys.segments, limit=LIST_LIMIT)
        if any(base_offset_of(stat.key) is not None for stat in there):
            raise MissingObject(
                "the manifest is missing although there are segments: restore its objects from a "
                "copy, or delete the segments to give them up",
                file=self.keys.versions,
            )

    def _newest_valid(self, newest: int, data: bytes, *, at_least: int) -> Manifest | None:
        """The newest version that is not void; None if there are only void versions. `data`: that
        of the newest.
        """
        if not is_truncated(data):
            return decode_manifest(data, keys=self.keys, version=newest)
        lowest = max(at_least, newest - TRUNCATED_VERSIONS_MAX, 1)
        for version, older in self.versions.whole_below(newest, lowest=lowest):
            return decode_manifest(older, keys=self.keys, version=version)
        if at_least == 0 and lowest == 1:
            return None
        raise CorruptManifest("there are only truncated versions", file=self.versions.key(newest))

    def load_version(self, version: int) -> Manifest:
        """Raises UnknownManifestVersion if it does not exist, or no longer."""
        data = self.versions.read_version(version) if version > 0 else None
        if data is None:
            raise UnknownManifestVersion(f"{self.keys} has no manifest version {version}")
        return decode_manifest(data, keys=self.keys, version=version)

    def page_entries(self, page: PageRef | RemovedPage, /) -> tuple[SegmentEntry, ...]:
        """All entries of a page, through the cache. Raises MissingObject, CorruptManifest."""
        if (cached := self._cache.cached_page(page.key)) is not None:
            return cached
        data = self._page_bytes(page.key, page.crc32c)
        entries = decode_page(data, keys=self.keys, file=page.key)
        self._cache.keep_page(page.key, entries)
        return entries

    def objects_removed_with(self, page: RemovedPage) -> list[RemovedObject]:
        """All objects that a removed page lists, followed by the page's own."""
        if page.kind is RemovedPageKind.REMOVED:
            data = self._page_bytes(page.key, page.crc32c)  # not cached: it is read rarely
            inside = list(decode_removed_page(data, keys=self.keys, file=page.key))
        else:
            inside = [
                RemovedObject(key, page.removed_ms, page.reason)
                for entry in self.page_entries(page)
                for key in entry.keys
            ]
        return [*inside, page.own_object]

    def _page_bytes(self, key: str, crc: int) -> bytes:
        data = get_object(self.objects, key, max_bytes=MAX_PAGE_BYTES)
        if crc32c_of(data) != crc:
            raise CorruptManifest("the page's checksum differs from the manifest's", file=key)
        return data

    def find_segment(
        self, manifest: Manifest, offset: int, wait: Wait = Wait.WAIT
    ) -> SegmentEntry | None:
        """The entry that contains `offset`, or else the next one; None at the cold tier's end.
        Raises WouldBlock if its page is not cached.
        """
        if wait is Wait.WAIT:
            return find_entry(manifest, offset, pages=self)
        entry = find_entry(manifest, offset, pages=self._cache)
        if entry is None and offset < manifest.end_offset:
            wait.before("a page of the manifest is fetched")
        return entry

    def find_segment_before(self, manifest: Manifest, offset: int) -> SegmentEntry | None:
        """The last entry that begins below `offset`; None if none does."""
        return find_entry_before(manifest, offset, pages=self)

    def iter_entries(
        self, manifest: Manifest, *, from_offset: int = 0, since_ms: int = -1
    ) -> Iterator[SegmentEntry]:
        """Live entries that end at or above `from_offset`, oldest first.

        Pages whose records are all older than `since_ms` are skipped.
        """
        return iter_entries(manifest, pages=self, from_offset=from_offset, since_ms=since_ms)

    # --- writing ----------------------------------------------------------------------------------

    def claim_manifest(
        self,
        claim: Claim,
        *,
        log_start_offset: int,
        at_least: int = 0,
        gap_end: int = 0,
        before_commit: Callable[[Manifest | None], None] = lambda _: None,
    ) -> Manifest:
        """Become the owner, by a commit, which for a new partition creates the first version.

        `gap_end`: a first version gets a gap up to there (the restore of a partition without a
        manifest). `before_commit` is called with the manifest in force before a claim that would
        succeed, and may raise to refuse it.

        Raises FencedError (see `apply_claim`), ManifestConflict, OutcomeUnknownError (claim again).
        """
        with self._lock:
            self._sent = ""
            for _ in range(COMMIT_ATTEMPTS):
                before = self.load_manifest(at_least=at_least)
                if before is not None and before.nonce == self._sent:
                    # Our PUT succeeded after all, although reading it back had failed.
                    return before
                if before is None:
                    self.check_never_existed()
                    after = create(self.keys, claim=claim, log_start_offset=log_start_offset)
                    if gap_end > after.end_offset:
                        after = record_gap(after, end_offset=gap_end)
                else:
                    if not claim.take_over:
                        check_may_claim(before, claim)
                        if not claim.elected:
                            self.check_not_stale_copy(claim.seen, before)
                    after = apply_claim(before, claim)
                before_commit(before)
                if after is before:
                    return after
                if (committed := self._publish(before or after, after)) is not None:
                    return committed
        raise ManifestConflict(f"{self.keys.folder}: {COMMIT_ATTEMPTS} conflicts in a row")

    def assign_new(self, folder: str, *, by: str) -> bool:
        """Write the first manifest of a partition that has none, which only this folder may then
        claim; False if another was faster. Raises OutcomeUnknownError, StoreUnavailable: repeat.
        """
        claim = Claim(by, (EpochStart(0, 0, by),), frozenset())
        first = assign(create(self.keys, claim=claim, log_start_offset=0), folder)
        with self._lock:
            return self._publish(first, first) is not None

    def check_not_stale_copy(self, seen: Manifest | None, in_force: Manifest) -> None:
        """Raise FencedError if `is_stale_copy`."""
        if self.is_stale_copy(seen, in_force):
            assert seen is not None, "a folder that recorded no version is not stale"
            raise FencedError(
                f"{where(in_force)}: this folder last recorded version {seen.version}; since then "
                f"epoch {in_force.leader_epoch} committed more versions than a crash explains: "
                "it is an older copy, and may lack acknowledged records; "
                "`tierlog serve --take-over` continues with it after a gap"
            )

    def is_stale_copy(self, seen: Manifest | None, in_force: Manifest) -> bool:
        """Whether the folder that last recorded `seen`, and claimed the epoch in force, lacks more
        than UNRECORDED_COMMITS_MAX commits of that epoch.

        Reads versions only if more than that many lie between; truncated ones do not count.
        """
        if seen is None or seen.leader_epoch > in_force.leader_epoch or in_force.assigned_to:
            return False
        if in_force.version - seen.version <= UNRECORDED_COMMITS_MAX:
            return False
        unrecorded = 1  # the one in force
        for version in range(in_force.version - 1, seen.version, -1):
            is_same_claim = self._is_same_claim(version, in_force)
            if is_same_claim is False:
                return False
            unrecorded += is_same_claim is True
            if unrecorded > UNRECORDED_COMMITS_MAX:
                return True
        return False

    def _is_same_claim(self, version: int, in_force: Manifest) -> bool | None:
        """Whether `version` was committed under the epoch in force; None if it is void.

        A version that was deleted or cannot be read counts as such.
        """
        try:
            data = self.versions.read_version(version)
            if data is not None and is_truncated(data):
                return None
            then = decode_manifest(data, keys=self.keys, version=version) if data else in_force
        except CorruptDataError:
            return True
        return (then.owner, then.leader_epoch) == (in_force.owner, in_force.leader_epoch)

    def commit_manifest(self, base: Manifest, transition: Transition) -> Manifest:
        """Commit `transition` on top of `base`, or of a later version of the same epoch.

        Returns the committed state, or the current one if the transition changes nothing. Raises
        FencedError, InvalidTransition, ManifestConflict, StoreUnavailable: it has no effect, now
        or later; OutcomeUnknownError. After any of them it is safe to retry with the same
        transition.
        """
        with self._lock:
            current = base if self._is_fresh(base) else self._reload(base)
            for _ in range(COMMIT_ATTEMPTS):
                after = transition(current)
                if after is current:
                    return current
                if (committed := self._publish(current, after)) is not None:
                    return committed
                current = self._reload(base)
        raise ManifestConflict(f"{where(base)}: {COMMIT_ATTEMPTS} conflicts in a row")

    def write_merged_page(self, run: Sequence[PageRef]) -> Transition:
        """Merge a run of small pages (`mergeable_pages`) into a large one, and write its object.

        Returns the transition that replaces them, for the caller to commit. If it is never
        committed, the object is an orphan, which is deleted by age.
        """
        entries = tuple(entry for page in run for entry in live_entries(page, self))
        merged, body = build_page(self.keys, entries, unique=self._options.unique())
        self._put_page(merged.key, body)
        now_ms = self._options.clock()
        return lambda current: merge_pages(current, run, merged, now_ms=now_ms)

    def check_fence(self, base: Manifest) -> Manifest:
        """The manifest in force: `base` if nothing is newer. Raises FencedError for another owner.

        Takes one request: if `base` was the newest recently, its successor cannot have been deleted
        yet, and a HEAD of that costs a twelfth of a LIST. Owners check every `fence.check.ms`.
        """
        if not self._is_fresh(base):
            return self.check_fence_by_list(base)
        started = self._times()
        if self.objects.head(self.versions.key(base.version + 1)) is not None:
            return self._reload(base)
        self._newest = (base.version, base.nonce, started)
        return base

    def check_fence_by_list(self, base: Manifest) -> Manifest:
        """`check_fence` without relying on clocks, for use before anything is deleted: all clocks
        stop in a virtual machine that its host pauses or reverts to a snapshot.
        """
        started = self._times()
        if self.versions.newest_version(at_least=base.version) > base.version:
            return self._reload(base)
        self._newest = (base.version, base.nonce, started)
        return base

    def confirm(self, manifest: Manifest) -> None:
        """Verify that the version is in the bucket as committed, and that no other owner followed.

        Called before deleting local segments that it references. Raises FencedError,
        CorruptManifest, MissingObject.
        """
        data = self.versions.read_version(manifest.version)
        if data is None:
            file = self.versions.key(manifest.version)
            raise MissingObject("a committed manifest version is missing", file=file)
        stored = decode_manifest(data, keys=self.keys, version=manifest.version)
        if stored != manifest:
            raise FencedError(f"{where(manifest)}: this version is another writer's")
        self.check_fence_by_list(manifest)

    def _reload(self, base: Manifest) -> Manifest:
        current = self.load_manifest(at_least=base.version)
        if current is None:
            raise MissingObject("the manifest is missing", file=self.keys.versions)
        if (current.owner, current.leader_epoch) != (base.owner, base.leader_epoch):
            raise FencedError(
                f"{where(current)}: epoch {current.leader_epoch} of owner {current.owner} "
                f"is in force, not {base.leader_epoch} of {base.owner}: another data folder "
                f"took the partition over; {TAKE_OVER}"
            )
        # The same object if nothing is newer: there may be void versions above `base`.
        return base if current == base else current

    def _is_fresh(self, base: Manifest) -> bool:
        """Whether `base` was the newest within half of the version retention, by both clocks."""
        version, nonce, seen = self._newest
        oldest_ms = max(abs(now - then) for now, then in zip(self._times(), seen, strict=True))
        return (version, nonce) == (base.version, base.nonce) and oldest_ms <= DAY_MS // 2

    def _times(self) -> _Times:
        return self._options.boot_clock(), self._options.clock()

    def _publish(self, before: Manifest, after: Manifest) -> Manifest | None:
        """PUT `after` as the successor of `before`; None if another writer was first."""
        now_ms = self._options.clock()
        spilled = spill_overflow(after, unique=self._options.unique)
        for key, body in spilled.objects:
            self._put_page(key, body)
        truncated = 0
        for version in range(before.version + 1, before.version + 1 + TRUNCATED_VERSIONS_MAX):
            stamped = replace(
                spilled.manifest, version=version, nonce=self._options.unique(), created_ms=now_ms
            )
            self._sent, started = stamped.nonce, self._times()
            created = self.versions.create_version(version, encode_manifest(stamped))
            if created is CreateOutcome.LOST:
                return None
            if created is CreateOutcome.OURS:
                with outcome_unknown(where(stamped)):
                    return self._confirm_newest(before, stamped, started=started)
            truncated += created is CreateOutcome.TRUNCATED
            if truncated == TRUNCATED_UPLOADS_MAX:
                raise StoreUnavailable(
                    f"{where(before)}: every upload of the next version is truncated"
                )
        raise ManifestConflict(
            f"{where(before)}: it is followed by {TRUNCATED_VERSIONS_MAX} truncated versions"
        )

    def _confirm_newest(
        self, before: Manifest, stamped: Manifest, *, started: _Times
    ) -> Manifest | None:
        """After a successful PUT: `stamped`, or None if its number was free only because the
        version that had it was deleted.
        """
        # Never skipped for the first version, since there is no fresh state before it.
        slow = not self._is_fresh(before)
        if slow and self.versions.newest_version(at_least=stamped.version) > stamped.version:
            self.versions.delete_versions([stamped.version])
            return None
        self._newest = (stamped.version, stamped.nonce, started)
        return stamped

    def _put_page(self, key: str, body: bytes) -> None:
        """Write a page. Unless the store reports its CRC-32C, read it back."""
        stat = self.objects.put(key, body)
        confirmed = (stat.size_bytes, stat.crc32c) == (len(body), crc32c_of(body))
        if not confirmed and get_object(self.objects, key, max_bytes=MAX_PAGE_BYTES) != body:
            raise CorruptManifest("the stored page differs from what was sent", file=key)
