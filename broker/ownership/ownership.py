"""Who owns one partition in the bucket: this folder's claim, and whether another took it over.

* Until the claim is committed nothing is uploaded, committed or deleted. A foreign epoch ends that
  for good: `leadership_lost` says why, and the partition answers with it.
* Only one caller at a time changes the manifest in force: claims, commits and collections run
  within `exclusive`. Reading it needs no lock, nor does a take-over, which comes before
  everything else.
* Nothing of a deleted topic is changed any more (`retire`), so that what its deletion left empty
  stays empty.
* Everything here except the properties may block on the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from broker.bucket_state import BucketState, OwnerEpochs
from manifest import transitions
from manifest.state import EpochStart, Manifest, SegmentEntry
from manifest.store import ManifestStore
from manifest.transitions import Claim
from record_format.errors import (
    CorruptDataError,
    FencedError,
    ManifestConflict,
    UnknownTopic,
)

log = structlog.get_logger(__name__)


class Ownership:
    """Thread-safe. `prepare` comes before everything else except `recorded` and `is_older_than`."""

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
        """Nobody else changes the manifest in force within. A FencedError ends the leadership.

        Raises UnknownTopic once it is retired.
        """
        with self._lock, self._fencing():
            self.check_live()
            yield

    def retire(self) -> None:
        """Its topic was deleted: nobody begins to change the manifest any more; a change in
        progress (`is_busy`) may end.
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

    def prepare(self, owner: str, epochs: tuple[EpochStart, ...], *, take_over: bool) -> None:
        """What `claim` will say; it is sent once the epochs are durable in the data folder."""
        seen = self._bucket_state.manifest
        self._claim = Claim(owner, epochs, self._bucket_state.recorded, take_over, seen=seen)

    @property
    def _prepared(self) -> Claim:
        assert self._claim is not None, "the opener prepares a claim"
        return self._claim

    @property
    def epoch(self) -> int:
        """The one that is claimed, or is to be."""
        return self._prepared.epoch

    @property
    def recorded(self) -> OwnerEpochs:
        return self._bucket_state.recorded

    def claim(self, *, log_start_offset: int, log_end_offset: int) -> bool:
        """Become the owner in the bucket; False if that is done already. Raises FencedError."""
        with self.exclusive():  # an operator may ask for it while the copier does
            if self.claimed:
                return False

            def before_commit(in_force: Manifest | None) -> None:
                if in_force is not None:
                    self._refuse_beyond(in_force, log_end_offset)
                self._note_sent()

            manifest = self._manifests.claim(
                self._prepared,
                log_start_offset=log_start_offset,
                at_least=self._bucket_state.version,
                before_commit=before_commit,
            )
            self._bucket_state.note(manifest)
            self.claimed = True
        log.info("partition claimed", partition=str(self), epoch=self.epoch)
        return True

    def _note_sent(self) -> None:
        self._bucket_state.note_sent(self._prepared.owner, self.epoch)
        self._claim = self._prepared._replace(recorded=self._bucket_state.recorded)

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
        ManifestConflict if the bucket has moved on from `seen`: look at it anew.
        """
        claim, now_ms = self._prepared, self._clock()
        assert seen is not None or not tail, "a tail follows what is in the bucket"

        def taken(manifest: Manifest) -> Manifest:
            if seen is not None and manifest.end_offset != seen.end_offset:
                raise ManifestConflict(f"{self}: the bucket's end moved to {manifest.end_offset}")
            manifest = transitions.apply_claim(manifest, claim)
            if log_start_offset > manifest.end_offset:  # trimmed while the store was down
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
            self._bucket_state.note(manifest)
            self.claimed = True
        log.info("partition taken over", partition=str(self), epoch=claim.epoch)
        return manifest

    # --- looking who is in force ------------------------------------------------------------------

    def check_claim(self, *, log_end_offset: int) -> None:
        """Raises FencedError if a claim would; nothing is changed. What cannot be read does not
        prevent a claim.
        """
        newest = self._newest_of_ours()
        if newest is not None:
            self._check_reaches(newest, log_end_offset)

    def check_fence(self, *, log_end_offset: int) -> None:
        """Look for a foreign epoch; before the claim, for anything that will refuse it."""
        seen = self._bucket_state.manifest
        if self.claimed and seen is not None:
            with self._fencing():
                self._manifests.check_fence(seen)
            return
        with self.exclusive():
            newest = None if self.claimed else self._newest_of_ours()
            if newest is not None:
                self._refuse_beyond(newest, log_end_offset)

    def is_older_than(self, in_force: Manifest) -> bool:
        """Whether the folder is an older copy of one that continued under the same epoch."""
        return self._manifests.is_stale_copy(self._bucket_state.manifest, in_force)

    def _newest_of_ours(self) -> Manifest | None:
        """Raises FencedError where what is in force is of another folder."""
        try:
            newest = self._manifests.load(at_least=self._bucket_state.version)
        except CorruptDataError:
            return None
        if newest is not None:
            transitions.check_recorded(newest, self._prepared.recorded)
            # Once it is claimed what came since is this folder's own.
            seen = self._bucket_state.manifest if self.claimed else self._prepared.seen
            self._manifests.check_not_stale_copy(seen, newest)
        return newest

    def _refuse_beyond(self, newest: Manifest, log_end_offset: int) -> None:
        """As `_check_reaches`, and the next start knows how far the log had reached."""
        if newest.end_offset > log_end_offset:
            try:
                self._bucket_state.note(newest)
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
