"""Who owns one partition in the bucket: this folder's claim, and whether another folder took over.

* Nothing is uploaded, committed or deleted before the claim is committed. A foreign epoch ends the
  leadership for good: `leadership_lost` says why, and the partition refuses calls with that reason.
* Only one caller at a time changes the manifest in force: claims, commits and collections run
  within `exclusive`. Reading it needs no lock, nor does a take-over, which comes before
  everything else.
* After `retire` nothing of a deleted topic is changed, so that what its deletion emptied stays
  empty.
* Everything here except the properties may block on the store.

An answer to a producer rests on a look at the manifest in force (`OwnerCheck`): does this folder
still own the partition?

* It rests on a look that began at most `fence.check.ms` before it, on a clock that counts
  suspension: a process that slept looks before it answers. `FenceChecker` looks at half that
  interval, so that an owner that is awake compares two clock values and never waits.
* Only a store that does not answer lets an owner go on. All partitions share that knowledge
  (`Silence`), and the checker renews it: an outage is waited for once, by whoever finds it, not by
  each group.
* In a cluster one look stands for all partitions: a claim that breaks the rules is announced before
  it is made (`manifest.forced_claims`), and every other change of the owner is the owner's own.
* Damage is not a claim: what cannot be read fences nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

import structlog

from tierlog.broker.data_folder.bucket_state import BucketState, OwnerEpochs
from tierlog.host.clock import boottime_ms
from tierlog.host.threads import run_in_daemon_thread
from tierlog.manifest import transitions
from tierlog.manifest.forced_claims import announce_forced_claim
from tierlog.manifest.state import EpochStart, Manifest
from tierlog.manifest.store import ManifestStore
from tierlog.manifest.transitions import Claim
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    DiskFull,
    FencedError,
    ManifestConflict,
    StoreUnavailable,
    UnknownTopic,
)
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)


class Ownership:
    """Thread-safe. Call `prepare` before anything except `recorded` and `is_older_than`."""

    def __init__(
        self, manifests: ManifestStore, bucket_state: BucketState, *, clock: Callable[[], int]
    ) -> None:
        self._manifests, self._bucket_state, self._clock = manifests, bucket_state, clock
        self._lock = threading.Lock()
        self._claim: Claim | None = None
        self.claimed = False
        self.leadership_lost: str | None = None
        self._is_retired = False

    def __str__(self) -> str:
        return str(self._manifests.keys)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the exclusive right to change the manifest. A FencedError ends the leadership.

        Raises UnknownTopic once it is retired.
        """
        with self._lock, self._fencing():
            self.check_live()
            yield

    def retire(self) -> None:
        """The topic was deleted: no further change to the manifest begins. One in progress
        (`is_busy`) may finish.
        """
        self._is_retired = True

    def check_live(self) -> None:
        """Raises UnknownTopic once it is retired."""
        if self._is_retired:
            raise UnknownTopic(self._manifests.keys.topic)

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    @contextmanager
    def _fencing(self) -> Iterator[None]:
        try:
            yield
        except FencedError as error:
            self.leadership_lost = str(error)
            log.error("leadership lost", partition=str(self), reason=self.leadership_lost)
            raise

    # --- the claim --------------------------------------------------------------------------------

    def prepare(
        self,
        owner: str,
        epochs: tuple[EpochStart, ...],
        *,
        take_over: bool,
        elected: bool = False,
    ) -> None:
        """Build the claim. It may be sent once the epochs are durable in the data folder, or, of a
        replica that is `elected`, in force.
        """
        seen = self._bucket_state.manifest
        recorded = self._bucket_state.recorded
        self._claim = Claim(owner, epochs, recorded, take_over, elected, seen=seen)

    @property
    def _prepared(self) -> Claim:
        if self._claim is None:
            raise DiskFull(f"{self}: no epoch to claim it under: there is no room to record one")
        return self._claim

    @property
    def epoch(self) -> int:
        """The epoch that was, or will be, claimed."""
        return self._prepared.epoch

    @property
    def recorded(self) -> OwnerEpochs:
        return self._bucket_state.recorded

    def claim(self, *, log_start_offset: int, log_end_offset: int) -> bool:
        """Become the owner in the bucket; False if it already is. Raises FencedError."""
        with self.exclusive():  # an operator's command may claim at the same time as the copier
            if self.claimed:
                return False
            manifest = self._manifests.claim_manifest(
                self._prepared,
                log_start_offset=log_start_offset,
                at_least=self._bucket_state.version,
                before_commit=partial(self._before_claim, log_end_offset=log_end_offset),
            )
            self._bucket_state.record_manifest(manifest)
            self.claimed = True
        log.info("partition claimed", partition=str(self), epoch=self.epoch)
        return True

    def _before_claim(self, in_force: Manifest | None, *, log_end_offset: int) -> None:
        if in_force is not None:
            self._record_and_check_reaches(in_force, log_end_offset)
        self._record_claim()

    def _record_claim(self) -> None:
        self._bucket_state.record_claim(self._prepared.owner, self.epoch)
        self._claim = self._prepared._replace(recorded=self._bucket_state.recorded)

    def take_over(
        self,
        seen: Manifest | None,
        *,
        log_start_offset: int,
        tail: Sequence[SegmentEntry],
        gap_end: int,
    ) -> Manifest:
        """Commit the prepared claim on top of `seen`, with the uploaded `tail`, followed by a gap
        up to `gap_end` if that is above the tail's end.

        A claim with a tail is not recorded here: the local log has to continue above the gap first.
        Raises ManifestConflict if the bucket has moved on from `seen`: reload and retry.
        """
        claim, now_ms = self._prepared, self._clock()
        assert seen is not None or not tail, "a tail extends what is in the bucket"

        def transition(manifest: Manifest) -> Manifest:
            if seen is not None and manifest.end_offset != seen.end_offset:
                raise ManifestConflict(f"{self}: the bucket's end moved to {manifest.end_offset}")
            manifest = transitions.apply_claim(manifest, claim)
            if log_start_offset > manifest.end_offset:  # trimmed while the store was down
                manifest = transitions.follow_log_start(
                    manifest,
                    log_start_offset,
                    trimmed_to=self._bucket_state.trimmed_to,
                    pages=self._manifests,
                    now_ms=now_ms,
                )
            manifest = transitions.add_segments(manifest, tail)
            if gap_end > manifest.end_offset:
                manifest = transitions.record_gap(manifest, end_offset=gap_end)
            return manifest

        keys = self._manifests.keys
        announce_forced_claim(self._manifests.objects, keys.topic_id, keys.partition, claim.owner)
        self._record_claim()
        try:
            if seen is not None:
                manifest = self._manifests.commit_manifest(seen, transition)
            else:
                manifest = self._manifests.claim_manifest(
                    claim, log_start_offset=log_start_offset, gap_end=gap_end
                )
            self._manifests.confirm(manifest)
        except FencedError as error:
            raise ManifestConflict(str(error)) from error
        if seen is None and manifest.version > 1:
            raise ManifestConflict(f"{self}: another folder wrote the first manifest meanwhile")
        if not tail:
            self._bucket_state.record_manifest(manifest)
            self.claimed = True
        log.info("partition taken over", partition=str(self), epoch=claim.epoch)
        return manifest

    # --- checking the owner in force --------------------------------------------------------------

    def check_claim(self, *, log_end_offset: int) -> None:
        """Raise FencedError if a claim would. Changes nothing. An unreadable manifest does not
        prevent a claim.
        """
        newest = self._newest_of_ours()
        if newest is not None:
            self._check_reaches(newest, log_end_offset)

    def check_fence(self, *, log_end_offset: int) -> None:
        """Check for a foreign epoch; before the claim, for anything that would refuse it."""
        seen = self._bucket_state.manifest
        if self.claimed and seen is not None:
            with self._fencing():
                self._manifests.check_fence(seen)
            return
        with self.exclusive():
            newest = None if self.claimed else self._newest_of_ours()
            if newest is not None:
                self._record_and_check_reaches(newest, log_end_offset)

    def is_older_than(self, in_force: Manifest) -> bool:
        """Whether this folder is an older copy of one that continued under the same epoch."""
        return self._manifests.is_stale_copy(self._bucket_state.manifest, in_force)

    def _newest_of_ours(self) -> Manifest | None:
        """The manifest in force; None if there is none or it cannot be read. Raises FencedError if
        it belongs to another folder.
        """
        try:
            newest = self._manifests.load_manifest(at_least=self._bucket_state.version)
        except CorruptDataError:
            return None
        if newest is not None:
            transitions.check_may_claim(newest, self._prepared)
            # Versions committed since the claim are this folder's own.
            seen = self._bucket_state.manifest if self.claimed else self._prepared.seen
            if not self._prepared.elected:
                self._manifests.check_not_stale_copy(seen, newest)
        return newest

    def _record_and_check_reaches(self, newest: Manifest, log_end_offset: int) -> None:
        """As `_check_reaches`; also record for the next start how far the log had reached."""
        if newest.end_offset > log_end_offset:
            try:
                self._bucket_state.record_manifest(newest)
            except OSError as error:  # the claim is refused anyway
                log.warning("manifest not recorded", partition=str(self), error=str(error))
        self._check_reaches(newest, log_end_offset)

    def _check_reaches(self, manifest: Manifest, log_end_offset: int) -> None:
        if manifest.end_offset > log_end_offset:
            raise FencedError(
                f"{self}: the bucket reaches offset {manifest.end_offset}, this folder only "
                f"{log_end_offset}: it is an older copy, or lost files; restart the broker to "
                "see what can be done"
            )


NEVER_MS: Final = -(2**63)
LEAST_PATIENCE_MS: Final = 1000  # of a store across the ocean, whatever `fence.check.ms` is


class Silence:
    """Whether the store answers looks; `reason` is None while it does. Shared by all partitions.
    `all_looked_ms`: when the last look began that stands for all of them.
    """

    def __init__(self, *, check_ms: int, boot_clock: Callable[[], int] = boottime_ms) -> None:
        patience_ms = max(LEAST_PATIENCE_MS, check_ms // 5)
        self.check_ms, self.boot_clock, self.patience_s = check_ms, boot_clock, patience_ms / 1000
        # The next look of the checker begins after half the interval, and fails that much later.
        self._excused_ms = max(check_ms, check_ms // 2 + 2 * patience_ms)
        self._began_ms = self._answered_ms = self.all_looked_ms = NEVER_MS
        self.reason: str | None = None

    def excuses(self, now_ms: int) -> bool:
        return now_ms - self._began_ms <= self._excused_ms

    def note_unanswered(self, began_ms: int, reason: str) -> None:
        self.reason = reason
        self._began_ms = max(began_ms, self._began_ms)

    def note_waited(self, since_ms: int) -> None:
        """Looks have been waiting since then. A sleep meanwhile says nothing about the store."""
        has_slept = self.boot_clock() - since_ms > self.check_ms
        if self._answered_ms < since_ms and not has_slept:
            self.note_unanswered(since_ms, f"no answer within {self.patience_s:g} s")

    def note_all_looked(self, began_ms: int) -> None:
        """In a cluster: nobody has claimed a partition against the rules."""
        self.all_looked_ms = max(self.all_looked_ms, began_ms)
        self.note_answered(began_ms)

    def note_answered(self, began_ms: int) -> None:
        self._answered_ms = self.boot_clock()
        if began_ms >= self._began_ms:
            self._began_ms, self.reason = NEVER_MS, None


class _Look(NamedTuple):
    began_ms: int
    done: Future[None]


class OwnerCheck:
    """Of one partition. Thread-safe."""

    def __init__(self, ownership: Ownership, silence: Silence) -> None:
        self._ownership, self._silence = ownership, silence
        self._lock = threading.Lock()
        self._look: _Look | None = None
        self.looked_ms = silence.boot_clock()  # when the last look that was answered began

    @property
    def is_due(self) -> bool:
        """Whether an answer has to wait for a look."""
        now_ms = self._silence.boot_clock()
        looked_ms = max(self.looked_ms, self._silence.all_looked_ms)
        is_old = now_ms - looked_ms > self._silence.check_ms
        return is_old and not self._silence.excuses(now_ms)

    def look(self, *, log_end_offset: int) -> None:
        """Look now, however long it takes. Raises as `look_in_time` does."""
        began_ms = self._silence.boot_clock()
        try:
            self._check(began_ms, log_end_offset)
        except (StoreUnavailable, ConfigurationError) as error:
            self._silence.note_unanswered(began_ms, str(error))
            raise

    def look_in_time(self, *, log_end_offset: int) -> None:
        """Look now, in a thread that is left behind if the store takes too long: what it answers
        later still counts. Raises FencedError, UnknownTopic, StoreUnavailable, and what a look at a
        damaged manifest raises.
        """
        look = self._begin(log_end_offset)
        try:
            look.done.result(self._silence.patience_s)
        except TimeoutError as error:
            reason = f"no answer within {self._silence.patience_s:g} s"
            self._silence.note_unanswered(look.began_ms, reason)
            raise StoreUnavailable(reason) from error
        except (StoreUnavailable, ConfigurationError) as error:
            self._silence.note_unanswered(look.began_ms, str(error))
            raise

    def _begin(self, log_end_offset: int) -> _Look:
        """The look in progress, unless it began too long ago: before a sleep, or in an outage."""
        with self._lock:
            now_ms, look = self._silence.boot_clock(), self._look
            if look is None or look.done.done() or now_ms - look.began_ms > self._silence.check_ms:
                call = partial(self._check, now_ms, log_end_offset)
                look = self._look = _Look(now_ms, run_in_daemon_thread(call, name="owner-check"))
            return look

    def _check(self, began_ms: int, log_end_offset: int) -> None:
        try:
            self._ownership.check_fence(log_end_offset=log_end_offset)
        except (StoreUnavailable, ConfigurationError):
            raise
        except BaseException:
            self._note_answered(began_ms)
            raise
        self._note_answered(began_ms)

    def _note_answered(self, began_ms: int) -> None:
        self.looked_ms = max(self.looked_ms, began_ms)
        self._silence.note_answered(began_ms)
