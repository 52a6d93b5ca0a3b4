"""The cold tier of one partition: uploads, manifest commits and garbage collection; `cold_reads`
has the reads. And that of a partition without a bucket: empty, so that nobody has to ask for one.

* Nothing is uploaded, committed or deleted before the claim (`Ownership`), nor after a foreign
  epoch ended the leadership. The manifest in force is changed only within `Ownership.exclusive`.
* A commit is recorded in the data folder before the next one is made, and before anything local is
  deleted because of it. A commit whose response was lost may have landed: the manifest is reloaded
  before anything relies on it.
* Everything here except the properties may block on the store.
* The empty tier has no record, and never counts as having one: its `end_offset` is 0, whatever the
  log holds. Local segments are then deleted by the topic's retention alone. Nobody else can own the
  partition, so there is nothing to claim, and nothing to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from tierlog.broker.bucket.cold_reads import ColdReads
from tierlog.broker.bucket.ownership import OwnerCheck, Ownership, Silence
from tierlog.broker.bucket.store_status import StoreStatus
from tierlog.broker.data_folder.bucket_state import BucketState
from tierlog.broker.data_folder.disk_reserve import raising_disk_full
from tierlog.cold_tier.cold_reader import ColdReader
from tierlog.cold_tier.key_search import KeySearch
from tierlog.cold_tier.merged_segment import MergedFiles, as_entry_of
from tierlog.cold_tier.segment_check import check_segment
from tierlog.cold_tier.segment_uploader import SegmentFiles, SegmentUploader
from tierlog.host.file_slice import TierRead
from tierlog.host.waiting import Wait
from tierlog.hot_tier.log_config import LogConfig
from tierlog.manifest import transitions
from tierlog.manifest.codec import mergeable_pages
from tierlog.manifest.garbage import Collector, GarbagePlan, GarbagePolicy
from tierlog.manifest.invariants import InvalidTransition
from tierlog.manifest.keys import base_offset_of
from tierlog.manifest.pins import Pins
from tierlog.manifest.state import Manifest, PageSource, live_size_bytes
from tierlog.manifest.store import ManifestStore
from tierlog.manifest.versions import VersionStat, outcome_unknown
from tierlog.record_format.crc32c import crc32c_joined
from tierlog.record_format.errors import (
    CorruptDataError,
    FieldProblem,
    InvalidConfig,
    InvalidRequest,
    UnknownManifestVersion,
    UnknownSegment,
)
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.segment_entry import (
    MergePlan,
    SegmentEntry,
    name_of,
    segment_keys_of,
)


class ColdLog:
    """`reads` serves its records and entries; `ownership` guards every write to the bucket.
    `filters_keys` is of uploads that begin from now on.
    """

    exists: Final = True

    def __init__(
        self,
        manifests: ManifestStore,
        reader: ColdReader,
        uploader: SegmentUploader,
        *,
        bucket_state: BucketState,
        store_status: StoreStatus,
        silence: Silence,
        clock: Callable[[], int],
        filters_keys: bool,
    ) -> None:
        self.filters_keys = filters_keys
        self._manifests, self.bucket_state = manifests, bucket_state
        self.store_status = store_status
        self.reads = ColdReads(
            manifests, reader, bucket_state=bucket_state, store_status=store_status
        )
        self._uploader, self._clock = uploader, clock
        self.pins = Pins(manifests, clock=clock)
        self.ownership = Ownership(manifests, bucket_state, clock=clock)
        self.owner_check = OwnerCheck(self.ownership, silence)
        self._may_be_behind = False  # the bucket may be one commit ahead of `manifest`
        self._uploading: list[int] = []  # base offsets

    def __str__(self) -> str:
        return str(self._manifests.keys)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest last seen in force. Immutable: readers take it once."""
        return self.bucket_state.manifest

    @property
    def end_offset(self) -> int:
        """Every record from the log start up to it is in the bucket; 0 if no manifest is known."""
        manifest = self.manifest
        return manifest.end_offset if manifest else 0

    @property
    def size_bytes(self) -> int:
        manifest = self.manifest
        return live_size_bytes(manifest) if manifest else 0

    @property
    def segment_boundaries(self) -> frozenset[int]:
        """Offsets that no segment may span: the end of the cold tier and the ends of its gaps."""
        gaps = self.manifest.gaps if self.manifest else ()
        return frozenset((self.end_offset, *(gap.end_offset for gap in gaps)))

    @property
    def is_busy(self) -> bool:
        """Whether something is being uploaded, or the manifest changed."""
        return bool(self._uploading) or self.ownership.is_busy

    def load_newest(self) -> Manifest | None:
        """The manifest in force, loaded from the bucket but not recorded; None if there is none."""
        return self._manifests.load_manifest(at_least=self.bucket_state.version)

    def has_manifest(self) -> bool:
        """Whether the bucket has any, even one that this folder knows to be out of date."""
        return self._manifests.load_manifest() is not None

    # --- ownership and the store, for `Partition` -------------------------------------------------

    @property
    def is_claimed(self) -> bool:
        return self.ownership.claimed

    @property
    def leadership_lost(self) -> str | None:
        return self.ownership.leadership_lost

    @property
    def is_owner_look_due(self) -> bool:
        return self.owner_check.is_due

    @property
    def owner_looked_ms(self) -> int:
        return self.owner_check.looked_ms

    def look_for_owner(self, *, log_end_offset: int, in_time: bool) -> None:
        look = self.owner_check.look_in_time if in_time else self.owner_check.look
        look(log_end_offset=log_end_offset)

    def claim(self, *, log_start_offset: int, log_end_offset: int) -> bool:
        return self.ownership.claim(
            log_start_offset=log_start_offset, log_end_offset=log_end_offset
        )

    def check_claim(self, *, log_end_offset: int) -> None:
        self.ownership.check_claim(log_end_offset=log_end_offset)

    def retire(self) -> None:
        self.ownership.retire()

    @property
    def is_store_reachable(self) -> bool:
        return self.store_status.is_reachable

    def check_clock(self) -> None:
        self.store_status.check_clock()

    def recheck_store(self) -> bool:
        return self.store_status.recheck()

    def record_trim(self, before_offset: int) -> None:
        self.bucket_state.record_trim(before_offset)

    # --- writing ----------------------------------------------------------------------------------

    def offload(self, files: SegmentFiles) -> SegmentEntry:
        """Upload one sealed segment, commit it, and read the commit back."""
        with self.uploading(files.base_offset):
            entry = self.upload_files(files)
            self.commit_transition(lambda manifest: transitions.add_segments(manifest, [entry]))
        return entry

    @contextmanager
    def uploading(self, base_offset: int) -> Iterator[None]:
        """Keep uncommitted objects of this segment, or page, from being collected as garbage.
        Raises UnknownTopic once the topic is deleted.
        """
        self._uploading.append(base_offset)
        try:
            self.ownership.check_live()  # afterwards: a deletion retires this, then asks `is_busy`
            yield
        finally:
            self._uploading.remove(base_offset)

    def upload_files(self, files: SegmentFiles) -> SegmentEntry:
        """Upload a segment's objects and confirm them; the entry to commit. Call it, and commit,
        within `uploading`. Raises CorruptDataError if a file cannot be read, DiskFull if the
        process has no descriptor for it.
        """
        try:
            with raising_disk_full(files.log):
                return self._uploader.upload_segment(
                    files,
                    folder=self._manifests.keys.segments,
                    leader_epoch=self.ownership.epoch,
                    filters_keys=self.filters_keys,
                )
        except OSError as error:  # of the local file: the store raises its own errors
            file = str(error.filename or files.log)
            raise CorruptDataError(f"cannot be read: {error.strerror}", file=file) from error

    def replace_compacted(self, old: Sequence[SegmentEntry], files: SegmentFiles) -> SegmentEntry:
        """Upload the segment that compaction made of `old`, and commit it in their place."""
        with self.uploading(files.base_offset):
            uploaded, now_ms = self.upload_files(files), self._clock()
            last_offset = min(uploaded.last_offset, old[-1].last_offset)  # no entry covers a gap
            entry = msgspec.structs.replace(uploaded, last_offset=last_offset)
            self.commit_transition(
                lambda manifest: transitions.replace_segments(
                    manifest, old, [entry], pages=self._manifests, now_ms=now_ms
                )
            )
        return entry

    def replace_merged(self, run: Sequence[SegmentEntry], files: MergedFiles) -> None:
        """Upload the segment that has the bytes of all of `run`, check it, and commit it in their
        place. Raises CorruptDataError if it is not what was expected.
        """
        with self.uploading(files.base_offset):
            merged = as_entry_of(run, self.upload_files(files))
            self._commit_merged(run, merged, log_crc32c=files.log_crc32c)

    def merge_plan(self, runs: list[list[SegmentEntry]], *, index_interval_bytes: int) -> MergePlan:
        """Of these runs, for whoever makes the merged segments elsewhere."""
        return MergePlan(
            runs=runs,
            segments_folder=self._manifests.keys.segments,
            leader_epoch=self.ownership.epoch,
            index_interval_bytes=index_interval_bytes,
            filters_keys=self.filters_keys,
            chunk_bytes=self._uploader.chunk_bytes,
            reads_back=self._uploader.reads_back,
        )

    def commit_merged(self, run: Sequence[SegmentEntry], merged: SegmentEntry) -> None:
        """Commit a segment that was uploaded elsewhere in place of `run`. Its bytes are those of
        the run if it has their CRC-32C. Raises UnknownSegment if the run has
        changed, InvalidRequest for keys of another folder.
        """
        whole = (run[0].base_offset, run[-1].last_offset) if run else ()
        if (merged.base_offset, merged.last_offset) != whole:
            raise UnknownSegment(
                f"{self}: no segments that are only in the bucket begin at {merged.base_offset} "
                f"and end at {merged.last_offset}: they have changed; ask for a new plan"
            )
        own = f"{self._manifests.keys.segments}{name_of(merged.log_key)}.log"
        if merged.keys != segment_keys_of(own) or base_offset_of(own) != merged.base_offset:
            raise InvalidRequest(f"{self}: {merged.log_key} is not the key of such a segment")
        crc = 0
        for one in run:
            crc = crc32c_joined(crc, one.log_crc32c, second_bytes=one.size_bytes)
        try:
            self._commit_merged(run, merged, log_crc32c=crc)
        except InvalidTransition as error:
            raise UnknownSegment(str(error)) from error

    def _commit_merged(
        self, run: Sequence[SegmentEntry], merged: SegmentEntry, *, log_crc32c: int
    ) -> None:
        """Raises CorruptDataError if it is not there as it should be. It is looked at under the
        lock of collections, which could delete an object that nothing names yet.
        """
        keys, now_ms = self._manifests.keys, self._clock()

        def checked(manifest: Manifest) -> Manifest:
            store = self._manifests.objects
            found = check_segment(store, merged, partition=keys.partition, deep=False)
            if merged.log_crc32c != log_crc32c or found.problems:
                detail = found.problems[0].detail if found.problems else "has other bytes"
                raise CorruptDataError(f"merged wrongly: {detail}", file=merged.log_key)
            return transitions.merge_segments(
                manifest, run, merged, pages=self._manifests, now_ms=now_ms
            )

        self.commit_transition(checked)

    def follow_log_start(self, log_start_offset: int) -> None:
        """Advance the manifest's log start to that of the local log. Does nothing before the claim,
        which calls it.
        """
        manifest = self.manifest
        if not self.ownership.claimed or manifest is None:
            return
        if log_start_offset <= manifest.log_start_offset:
            return
        trimmed_to, now_ms = self.bucket_state.trimmed_to, self._clock()
        self.commit_transition(
            lambda manifest: transitions.follow_log_start(
                manifest,
                log_start_offset,
                trimmed_to=trimmed_to,
                pages=self._manifests,
                now_ms=now_ms,
            )
        )

    def merge_pages(self) -> None:
        """Merge small pages of the manifest, if there are any, so that no commit has to."""
        if not self.ownership.claimed or self.manifest is None:
            return
        if run := mergeable_pages(self.manifest):
            with self.uploading(run[0].base_offset):  # the base offset of the merged page
                self.commit_transition(self._manifests.write_merged_page(run))

    @property
    def pages(self) -> PageSource:
        """Gives manifest transitions the pages that they need."""
        return self._manifests

    def collection_plan(self, manifest: Manifest, policy: GarbagePolicy) -> GarbagePlan:
        """What `collect_garbage` would delete; `manifest` is the one in force."""
        return self._collector(policy).plan_collection(manifest, now_ms=self._clock())

    def garbage_plan(self, policy: GarbagePolicy) -> GarbagePlan | None:
        """What `collect_garbage` would delete now; None if there is no manifest."""
        manifest = self.load_newest()
        return self.collection_plan(manifest, policy) if manifest is not None else None

    def _collector(self, policy: GarbagePolicy) -> Collector:
        is_uploading = self._uploading.__contains__
        return Collector(self._manifests, self.pins, policy, is_uploading=is_uploading)

    def collect_garbage(self, policy: GarbagePolicy) -> int:
        """Delete the objects that no manifest version needs any more; the number deleted.

        Raises FencedError, before anything is deleted, if another folder is the owner.
        """
        if not self.ownership.claimed:
            return 0
        collector = self._collector(policy)
        with self.ownership.exclusive():
            self._reload()
            assert self.manifest is not None, "a claimed partition has a manifest"
            plan = collector.plan_collection(self.manifest, now_ms=self._clock())
            gone = len(plan.objects) + len(plan.orphans) + len(plan.versions) + len(plan.uploads)
            if gone or plan.pins:
                self._may_be_behind = True
                self.bucket_state.record_manifest(collector.delete_garbage(self.manifest, plan))
                self._may_be_behind = False
        return gone

    def commit_transition(self, transition: Callable[[Manifest], Manifest]) -> Manifest:
        """Commit and record it. Raises FencedError, StoreUnavailable: it has no effect, now or
        later; OutcomeUnknownError.
        """
        with self.ownership.exclusive():
            assert self.manifest is not None, "only a claimed partition commits"
            if self._may_be_behind:
                self._reload()  # each commit is recorded before the next: see `is_stale_copy`
            self._may_be_behind = True
            manifest = self._manifests.commit_manifest(self.manifest, transition)
            if manifest is not self.manifest:
                with outcome_unknown(str(self)):
                    self._manifests.confirm(manifest)
                self.bucket_state.record_manifest(manifest)
            self._may_be_behind = False
            return manifest

    def assign_to(self, folder: str, *, log_end_offset: int) -> None:
        """Let only this folder claim the partition next. Raises InvalidTransition unless the bucket
        has every record below `log_end_offset`.
        """

        def assigned(manifest: Manifest) -> Manifest:
            if manifest.end_offset < log_end_offset:
                raise InvalidTransition(
                    f"{self}: the bucket ends at {manifest.end_offset}, the log at {log_end_offset}"
                )
            return transitions.assign(manifest, folder)

        self.commit_transition(assigned)

    def resolve_failed_commit(self) -> None:
        """Find out whether a commit that failed has landed. Call it before an upload that relies on
        `manifest`. Raises FencedError, StoreUnavailable.
        """
        with self.ownership.exclusive():
            if self._may_be_behind:
                self._reload()

    def _reload(self) -> None:
        """Make `manifest` the one in force. Call it within `exclusive`."""
        assert self.manifest is not None, "only a claimed partition commits"
        newest = self._manifests.check_fence(self.manifest)
        if newest is not self.manifest:
            self.bucket_state.record_manifest(newest)
        self._may_be_behind = False

    # --- configuration ----------------------------------------------------------------------------

    def check_change(
        self, now: LogConfig, changed: LogConfig, *, log_start_offset: int, first_local_offset: int
    ) -> None:
        """Refuse a setting that cannot apply while some segments are only in the bucket. A setting
        that was on already may stay: the segments of a restored compacted topic are still being
        fetched back to disk. Does not contact the store.
        """
        manifest = self.manifest
        if manifest is None or not manifest.segment_count:
            return
        if now.remote_storage_enable and not changed.remote_storage_enable:
            raise _refused("remote.storage.enable", f"{self} has segments in the bucket")
        oldest = manifest.find_run(log_start_offset)  # a trim may be ahead of the bucket
        is_cold = oldest and max(oldest.base_offset, log_start_offset) < first_local_offset
        if changed.compacts and not now.compacts and is_cold:
            why = "has segments that are only in the bucket; compaction needs all on local disk"
            raise _refused("cleanup.policy", f"{self} {why}")


def _refused(key: str, why: str) -> InvalidConfig:
    return InvalidConfig(f"{key}: {why}", problems=(FieldProblem(f"config.{key}", why),))


BOUNDARIES: Final[frozenset[int]] = frozenset()


class EmptyColdTier:
    """As much of `ColdLog`, and of its reads, as `Partition` uses."""

    exists: Final = False
    is_claimed: Final = True
    is_store_reachable: Final = False
    is_busy: Final = False
    is_owner_look_due: Final = False
    owner_looked_ms: Final = 0
    leadership_lost: str | None = None
    manifest: Manifest | None = None
    pins: Final = None
    end_offset: int = 0
    size_bytes: Final = 0
    segment_boundaries: Final = BOUNDARIES
    filters_keys: bool = False

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def reads(self) -> EmptyColdTier:
        return self

    def cold_entries(self, _from_offset: int) -> Iterator[SegmentEntry]:
        return iter(())

    def read_cold(self, offset: int, **_: object) -> TierRead:
        return TierRead((), offset)

    def find_key(self, offset: int, _search: KeySearch, *, end_offset: int) -> tuple[int, int]:
        return offset, end_offset

    def offset_for_timestamp(self, _timestamp: int, **_: int) -> None:
        return None

    def aborted_transactions(self, _offset: int, _end_offset: int) -> list[AbortedTxn]:
        return []

    def find_entry(self, _offset: int, _wait: Wait) -> SegmentEntry | None:
        return None

    def oldest_cold_entries(self, _from_offset: int) -> Iterator[SegmentEntry]:
        return iter(())

    def manifest_version(self, _version: int | None) -> Manifest:
        raise UnknownManifestVersion(
            f"{self._name} is on local disk alone: the broker has no object store, or its topic "
            "says remote.storage.enable=false"
        )

    def manifest_entries(self, _manifest: Manifest, **_: int) -> Iterator[SegmentEntry]:
        return iter(())

    def manifest_history(self, **_: int) -> list[VersionStat]:
        return []

    def object_key(self, key: str) -> str:
        return key

    def resolve_failed_commit(self) -> None:
        pass

    def garbage_plan(self, _policy: GarbagePolicy) -> GarbagePlan | None:
        return None

    def claim(self, **_: int) -> bool:
        return False

    def check_claim(self, **_: int) -> None:
        pass

    def look_for_owner(self, **_: int) -> None:
        pass

    def retire(self) -> None:
        pass

    def record_trim(self, before_offset: int) -> None:
        pass

    def follow_log_start(self, log_start_offset: int) -> None:
        pass

    def check_clock(self) -> None:
        pass

    def recheck_store(self) -> bool:
        return False

    def merge_pages(self) -> None:
        pass

    def collect_garbage(self, _policy: GarbagePolicy) -> int:
        return 0

    def check_change(self, *_: LogConfig, **__: int) -> None:
        pass
