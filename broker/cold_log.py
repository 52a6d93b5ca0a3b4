"""The cold side of one partition: the manifest in force, and the claim on it.

* The last one seen is also on local disk, fsynced, before anything local goes on the strength of
  it: so `earliest`, and the border between 410 and 503, are true from the start, with the store
  down too.
* Until the claim is committed nothing is uploaded, committed or deleted. A foreign epoch ends that
  for good: `leadership_lost` says why, and the partition answers with it.
* Everything here may block on the store but the properties.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from broker.cold_reads import ColdReads, producers_at_end
from broker.sent_claims import Pairs, encode_sent, read_sent, recorded_pairs, sent_path
from cold_tier.cold_reader import ColdReader
from cold_tier.segment_uploader import UploadedSegment
from hot_tier.log_config import LogConfig
from hot_tier.segment_views import SegmentFiles
from manifest import transitions
from manifest.codec import decode_copy, encode_manifest
from manifest.garbage import Collector, GarbagePlan, GarbagePolicy
from manifest.keys import PartitionKeys
from manifest.pins import Pins
from manifest.state import EpochStart, Manifest, SegmentEntry
from manifest.store import ManifestStore
from manifest.transitions import Claim
from record_format.errors import (
    CorruptDataError,
    FencedError,
    InvalidConfig,
    ManifestConflict,
    StoreUnavailable,
)

log = structlog.get_logger(__name__)


class Upload(Protocol):
    def __call__(
        self, files: SegmentFiles, *, folder: str, leader_epoch: int
    ) -> UploadedSegment: ...


class ColdLog(ColdReads):
    """`epochs`: this folder's own history, the last of it the epoch to claim."""

    def __init__(
        self,
        manifests: ManifestStore,
        reader: ColdReader,
        upload: Upload,
        *,
        full_key: Callable[[str], str],
        copy_path: Path,
        write_note: Callable[[Path, bytes], None],
        clock: Callable[[], int],
        on_unavailable: Callable[[StoreUnavailable], None],
        is_ours: Callable[[], bool],
    ) -> None:
        super().__init__(
            manifests,
            reader,
            read_copy(copy_path, manifests.keys),
            full_key=full_key,
            on_unavailable=on_unavailable,
            is_ours=is_ours,
        )
        self._upload, self._clock = upload, clock
        self._copy_path, self._write_note = copy_path, write_note
        self._pins = Pins(manifests, clock=clock)
        self._lock = threading.Lock()
        self._claim: Claim | None = None
        self._sent = read_sent(copy_path)
        self.claimed = False
        self._unsure = False  # whether the bucket may be a commit ahead of what is known
        self._going_up: list[int] = []  # base offsets
        self.leadership_lost: str | None = None

    @property
    def borders(self) -> frozenset[int]:
        """Offsets that no segment may reach across: its own end, and those of its gaps."""
        gaps = self.manifest.gaps if self.manifest else ()
        return frozenset((self.end_offset, *(gap.end_offset for gap in gaps)))

    # --- ownership --------------------------------------------------------------------------------

    def prepare_claim(self, owner: str, epochs: tuple[EpochStart, ...], *, take_over: bool) -> None:
        """What `claim` will say; the epochs are durable in the data folder already."""
        self._claim = Claim(owner, epochs, self.recorded, take_over, seen=self.manifest)

    @property
    def recorded(self) -> Pairs:
        """The (owner, epoch) pairs in force under which the bucket is known to be this folder's."""
        return recorded_pairs(self.manifest, self._sent)

    def claim(self, *, log_start_offset: int, log_end_offset: int) -> None:
        """Become the owner in the bucket; at once where that is done. Raises FencedError."""
        assert self._claim is not None, "the opener prepares a claim"
        with self._lock, self._fencing():  # an operator may ask for it while the copier does
            if self.claimed:
                return
            at_least = self.manifest.version if self.manifest else 0

            def before_commit(in_force: Manifest | None) -> None:
                if in_force is not None:
                    self._refuse_beyond(in_force, log_end_offset)
                self._note_sent()

            manifest = self._manifests.claim(
                self._claim,
                log_start_offset=log_start_offset,
                at_least=at_least,
                before_commit=before_commit,
            )
            self._publish(manifest)
            self.claimed = True
        log.info("partition claimed", partition=str(self), epoch=self._claim.epoch)
        self.follow_log_start(log_start_offset)

    def _note_sent(self) -> None:
        """From here on the claim may be in force, whatever becomes of its answer."""
        assert self._claim is not None, "the opener prepares a claim"
        pair = (self._claim.owner, self._claim.epoch)
        if pair not in self._sent:
            noted = self.manifest.leader_epoch if self.manifest else -1
            sent = frozenset({pair, *(one for one in self._sent if one[1] >= noted)})
            self._write_note(sent_path(self._copy_path), encode_sent(sent))
            self._sent = sent
        self._claim = self._claim._replace(recorded=self.recorded)

    def check_claim(self, *, log_end_offset: int) -> None:
        """Raises FencedError where a claim would; nothing is changed. What cannot be read keeps
        nobody from a claim.
        """
        newest = self._newest_of_ours()
        if newest is not None:
            self._check_reaches(newest, log_end_offset)

    def _newest_of_ours(self) -> Manifest | None:
        """Raises FencedError where what is in force is of another folder."""
        assert self._claim is not None, "the opener prepares a claim"
        try:
            newest = self.load_newest()
        except CorruptDataError:
            return None
        if newest is not None:
            transitions.check_recorded(newest, self._claim.recorded)
            self._manifests.check_not_older(self._claim.seen, newest)
        return newest

    def _refuse_beyond(self, newest: Manifest, log_end_offset: int) -> None:
        """As `_check_reaches`, and the next start knows how far the log had reached."""
        if newest.end_offset > log_end_offset:
            try:
                self._publish(newest)
            except OSError as error:  # it is refused all the same
                log.warning("manifest not noted", partition=str(self), error=str(error))
        self._check_reaches(newest, log_end_offset)

    def _check_reaches(self, manifest: Manifest, log_end_offset: int) -> None:
        if manifest.end_offset > log_end_offset:
            raise FencedError(
                f"{self}: the bucket reaches to offset {manifest.end_offset}, this folder to "
                f"{log_end_offset}: it is an older copy, or lost files; a restart of the "
                "broker says what can be done"
            )

    def is_older_than(self, in_force: Manifest) -> bool:
        """Whether the folder is an older copy of one that went on under the same epoch."""
        return self._manifests.is_older(self.manifest, in_force)

    def load_newest(self) -> Manifest | None:
        """The manifest in force, asked of the bucket; None where there is none. Not published."""
        return self._manifests.load(at_least=self.manifest.version if self.manifest else 0)

    def producers_at_end(self, manifest: Manifest | None) -> bytes | None:
        return producers_at_end(self._manifests, manifest)

    def take_over(
        self,
        seen: Manifest | None,
        *,
        log_start_offset: int,
        tail: Sequence[SegmentEntry],
        gap_end: int,
    ) -> Manifest:
        """Commit the prepared claim on top of `seen`, with the uploaded `tail`, and then a gap up
        to `gap_end` where that is above its end.

        One with a tail is not noted here: the local log has to go on above the gap first. Raises
        ManifestConflict where the bucket has moved on from `seen`: look at it anew.
        """
        claim, now_ms = self._claim, self._clock()
        assert claim is not None, "the opener prepares a claim"
        assert seen is not None or not tail, "a tail follows what is in the bucket"

        def taken(manifest: Manifest) -> Manifest:
            if seen is not None and manifest.end_offset != seen.end_offset:
                raise ManifestConflict(f"{self}: the bucket's end moved to {manifest.end_offset}")
            manifest = transitions.take_claim(manifest, claim)
            if tail and log_start_offset > manifest.end_offset:  # trimmed while the store was down
                manifest = transitions.drop_expired(
                    manifest, log_start_offset, pages=self._manifests, now_ms=now_ms
                )
            manifest = transitions.add_segments(manifest, tail)
            if gap_end > manifest.end_offset:
                manifest = transitions.record_gap(manifest, end_offset=gap_end)
            return manifest

        self._note_sent()
        try:
            if seen is not None:
                manifest = self._manifests.commit(seen, taken)
            else:
                manifest = self._manifests.claim(
                    claim, log_start_offset=log_start_offset, gap_end=gap_end
                )
            self._manifests.confirm(manifest)
        except FencedError as error:
            raise ManifestConflict(str(error)) from error
        if seen is None and manifest.version > 1:
            raise ManifestConflict(f"{self}: another folder made the first manifest meanwhile")
        if not tail:
            self._publish(manifest)
            self.claimed = True
        log.info("partition taken over", partition=str(self), epoch=claim.epoch)
        return manifest

    def check_fence(self, *, log_end_offset: int) -> None:
        """Look for a foreign epoch; before the claim, for whatever will refuse it."""
        if self.claimed and self.manifest is not None:
            with self._fencing():
                self._manifests.check_fence(self.manifest)
            return
        with self._lock, self._fencing():
            newest = None if self.claimed else self._newest_of_ours()
            if newest is not None:
                self._refuse_beyond(newest, log_end_offset)

    # --- writing ----------------------------------------------------------------------------------

    def offload(self, files: SegmentFiles) -> SegmentEntry:
        """Upload one sealed segment, commit it, read the commit back."""
        with self.going_up(files.base_offset):
            entry = self.upload(files)
            self.commit(lambda manifest: transitions.add_segments(manifest, [entry]))
        return entry

    @contextmanager
    def going_up(self, base_offset: int) -> Iterator[None]:
        """Within, what is uploaded of the segment and not committed yet is no garbage."""
        self._going_up.append(base_offset)
        try:
            yield
        finally:
            self._going_up.remove(base_offset)

    def upload(self, files: SegmentFiles) -> SegmentEntry:
        """The entry of a segment whose objects are in the bucket and confirmed; to be committed,
        both while it is `going_up`.
        """
        assert self._claim is not None, "the opener prepares a claim"
        uploaded = self._upload(
            files, folder=self._manifests.keys.segments, leader_epoch=self._claim.epoch
        )
        modified_ms = files.log.stat().st_mtime_ns // 1_000_000
        return SegmentEntry(**uploaded._asdict(), modified_ms=modified_ms)

    def replace(self, old: Sequence[SegmentEntry], files: SegmentFiles) -> SegmentEntry:
        """Upload what compaction made of the segments `old`, and commit it in their place."""
        with self.going_up(files.base_offset):
            uploaded, now_ms = self.upload(files), self._clock()
            last_offset = min(uploaded.last_offset, old[-1].last_offset)  # a gap is in no entry
            entry = msgspec.structs.replace(uploaded, last_offset=last_offset)
            self.commit(
                lambda manifest: transitions.replace(
                    manifest, old, [entry], pages=self._manifests, now_ms=now_ms
                )
            )
        return entry

    def trim(self, before_offset: int) -> None:
        """The bucket's log start follows. Before the claim, which brings it along: nothing."""
        self._advance(transitions.trim, before_offset)

    def drop_expired(self, before_offset: int) -> None:
        """As `trim`, for retention: pins keep what it drops."""
        self._advance(transitions.drop_expired, before_offset)

    def follow_log_start(self, log_start_offset: int) -> None:
        """Catch up with a log start that moved while the store was down, or before the claim.

        Retention moves it to a border of segments, where pins keep what is dropped.
        """
        if self.manifest is None or log_start_offset <= self.manifest.log_start_offset:
            return
        holder = next(self.entries(log_start_offset), None)
        if holder is None or holder.base_offset >= log_start_offset:
            self.drop_expired(log_start_offset)
        else:
            self.trim(log_start_offset)

    def merge_pages(self) -> None:
        """Bring small pages of the manifest together, now and then, so that no commit has to."""
        if self.claimed and self.manifest is not None:
            merging = self._manifests.merging(self.manifest)
            if merging is not None:
                self.commit(merging)

    @property
    def pages(self) -> transitions.PageSource:
        """What transitions of this partition's manifest read its pages by."""
        return self._manifests

    def collection_plan(self, manifest: Manifest, policy: GarbagePolicy) -> GarbagePlan:
        """What `collect` would delete now; `manifest` is the one in force."""
        return self._collector(policy).plan(manifest, now_ms=self._clock())

    def _collector(self, policy: GarbagePolicy) -> Collector:
        under_way = self._going_up.__contains__
        return Collector(self._manifests, self._pins, policy, is_under_way=under_way)

    def collect(self, policy: GarbagePolicy) -> int:
        """Delete from the bucket what no version needs any more; how many objects.

        Raises FencedError, before anything is deleted, for a foreign owner.
        """
        if not self.claimed:
            return 0
        collector = self._collector(policy)
        with self._lock, self._fencing():
            self._catch_up()
            assert self.manifest is not None, "a claimed partition has a manifest"
            plan = collector.plan(self.manifest, now_ms=self._clock())
            gone = len(plan.objects) + len(plan.orphans) + len(plan.versions) + len(plan.uploads)
            if gone or plan.pins:
                self._unsure = True
                self._publish(collector.apply(self.manifest, plan))
                self._unsure = False
        return gone

    def commit(self, transition: Callable[[Manifest], Manifest]) -> Manifest:
        """Commit and publish. Raises FencedError, StoreUnavailable, OutcomeUnknownError."""
        with self._lock, self._fencing():
            assert self.manifest is not None, "only a claimed partition commits"
            if self._unsure:
                self._catch_up()  # each is noted before the next one: see `is_older`
            self._unsure = True
            manifest = self._manifests.commit(self.manifest, transition)
            if manifest is not self.manifest:
                self._manifests.confirm(manifest)
                self._publish(manifest)
            self._unsure = False
            return manifest

    def settle(self) -> None:
        """See what became of a commit that failed: it may be there. Before anything is uploaded on
        the strength of what is known. Raises FencedError, StoreUnavailable.
        """
        with self._lock, self._fencing():
            if self._unsure:
                self._catch_up()

    def _catch_up(self) -> None:
        """Under the lock: what is in force is what is known."""
        assert self.manifest is not None, "only a claimed partition commits"
        newest = self._manifests.check_fence(self.manifest)
        if newest is not self.manifest:
            self._publish(newest)
        self._unsure = False

    def _advance(self, move: Callable[..., Manifest], before_offset: int) -> None:
        if not self.claimed:
            return
        now_ms = self._clock()
        self.commit(
            lambda manifest: move(manifest, before_offset, pages=self._manifests, now_ms=now_ms)
        )

    @contextmanager
    def _fencing(self) -> Iterator[None]:
        """A foreign epoch ends this folder's leadership, for good."""
        try:
            yield
        except FencedError as error:
            self.leadership_lost = str(error)
            log.error("leadership lost", partition=str(self), reason=self.leadership_lost)
            raise

    # --- configuration ----------------------------------------------------------------------------

    def check_config(self, config: LogConfig, *, local_log_start_offset: int) -> None:
        """Refuse what cannot hold while segments are in the bucket only."""
        oldest = next(self.entries(0), None)
        if oldest is None:
            return
        if not config.remote_storage_enable:
            raise InvalidConfig(f"remote.storage.enable: {self} has segments in the bucket")
        if config.compacts and oldest.base_offset < local_log_start_offset:
            raise InvalidConfig(
                f"cleanup.policy: {self} has segments that are only in the bucket, and compaction "
                "works on local ones"
            )

    # --- the copy on local disk -------------------------------------------------------------------

    def _publish(self, manifest: Manifest) -> None:
        self._write_note(self._copy_path, encode_manifest(manifest))
        self.manifest = manifest


def read_copy(path: Path, keys: PartitionKeys) -> Manifest | None:
    """The manifest that this folder saw in force last; None where there is none to be read."""
    if not path.exists():
        return None
    try:
        return decode_copy(path.read_bytes(), keys=keys, file=str(path))
    except CorruptDataError as error:
        # Only the bucket's own word is lost with it: reads below answer 503 until it is back.
        partition = f"{keys.topic}-{keys.partition}"
        log.warning("manifest copy unreadable", partition=partition, error=str(error))
        return None
