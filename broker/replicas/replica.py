"""A partition's replica on this broker: its log, what it keeps, whom it follows.

* `lock` guards the role and everything that changes the log as a follower. Whoever stops following
  holds it: what an answer still brings afterwards is not for the role that there is then.
* What an answer says is on the medium before the next fetch reports it: the epoch adopted, the log
  start, the records.
* Records come as the leader has them, in the leader's segments: replicas are the same files (R11).
* A replica is cut only by the epochs that its leader answers with, and never below what it knows to
  be committed: it goes offline before that (R7).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from tierlog.broker.bucket.cold_log import ColdLog
from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.kept_file import KeptFiles
from tierlog.broker.replication.election import (
    Kept,
    cut_offset,
    keep_followed,
    may_follow,
    renew,
)
from tierlog.broker.replication.in_sync import InForce
from tierlog.broker.replication.messages import (
    NONE,
    OUT_OF_RANGE,
    PartitionAnswer,
    PartitionFetch,
)
from tierlog.broker.replication.store_writer import Feed
from tierlog.broker.replication.term import NEVER_MS, Term
from tierlog.cold_tier.write_ahead_object import StoredPart
from tierlog.host.clock import monotonic_ms
from tierlog.hot_tier.log import PartitionLog
from tierlog.manifest.replica_sets import NewestSet, ReplicaSet, ReplicaSets
from tierlog.manifest.state import Manifest
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.errors import LogOfflineError, StoreUnavailable

log = structlog.get_logger(__name__)


NO_EPOCH: Final = 0


class Role(StrEnum):
    IDLE = "idle"
    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"
    OFFLINE = "offline"


class Following(NamedTuple):
    node_id: int
    leader: str
    epoch: int


class Leaderless(NamedTuple):
    """Since when it is known that this version names no leader."""

    version: int
    since_ms: int


class Replica:
    """`kept` is changed by `keep` alone. `newest`: the last version of the set that was read, or
    written; `sent`: one that was sent, and whose number is not known to be taken.
    """

    def __init__(
        self,
        topic: str,
        place: TopicIdPartition,
        opened: PartitionLog,
        cold: ColdLog | None,
        *,
        sets: ReplicaSets,
        files: KeptFiles,
        kept: Kept,
        on_log_start: Callable[[Replica, int], None],
        save_recovery_point: Callable[[], None],
        monotonic: Callable[[], int] = monotonic_ms,
    ) -> None:
        self.topic, self.place, self.number = topic, place, place[1]
        self.log, self.cold, self.sets, self._files, self.kept = opened, cold, sets, files, kept
        self._on_log_start, self._save_recovery_point = on_log_start, save_recovery_point
        self._monotonic = monotonic
        self.lock = threading.RLock()
        self.stepping = threading.Lock()  # held by whoever looks at the bucket, or writes to it
        self.role = Role.IDLE
        self.newest: NewestSet | None = None
        self.sent: ReplicaSet | None = None
        self.following: Following | None = None
        self.term: Term | None = None
        self.partition: Partition | None = None  # what serves it, while it leads
        self.refused = False  # by the leader that it follows: it does not lead, or not under that
        self.heard_ms = monotonic()  # from the leader
        self._answered = 0
        self.look_again_ms = NEVER_MS  # at the bucket
        self.leaderless: Leaderless | None = None
        self.yields_until_ms = NEVER_MS  # it gave up leading: another is to
        self.patience_ms = 0  # with members that do not fetch, before it gives up
        self.candidate_since_ms = NEVER_MS
        self.feed: Feed | None = None  # what is written of it for the bucket

    def __str__(self) -> str:
        return str(self.log)

    # --- what is kept -----------------------------------------------------------------------------

    def keep(self, kept: Kept) -> None:
        """Durable when this returns. Raises OSError."""
        if kept != self.kept:
            self._files.write_kept(self.place, kept, was_opened=True)
            self.kept = kept

    # For the checkpoints (`NotOpen`).

    @property
    def recovery_point(self) -> int:
        return self.log.flushed_end

    @property
    def high_watermark(self) -> int:
        return self.log.high_watermark

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    # --- following --------------------------------------------------------------------------------

    def follow(self, node_id: int, leader: str, epoch: int) -> None:
        """Follow it from now on. If it may not be followed (R6), it is only told so (R13). Raises
        OSError.
        """
        with self.lock:
            is_fit = may_follow(self.kept, leader=leader, epoch=epoch)
            to = Following(node_id, leader, epoch if is_fit else NO_EPOCH)
            if self.role not in (Role.IDLE, Role.FOLLOWER) or self.following == to:
                return
            if is_fit:
                self.keep(keep_followed(self.kept, epoch))
            self.role, self.following = Role.FOLLOWER, to
            self.refused, self.heard_ms, self._answered = False, self._monotonic(), 0
        log.info("following", partition=str(self), node_id=node_id, leader_epoch=to.epoch)

    def stop_following(self, role: Role = Role.IDLE) -> None:
        with self.lock:
            if self.role is Role.FOLLOWER:
                self.role, self.following = role, None

    def next_fetch(self, node_id: int) -> PartitionFetch | None:
        """What it has to say to that broker; None if it does not follow it."""
        with self.lock:
            if self.following is None or self.following.node_id != node_id:
                return None
            epochs = self.log.epochs
            return PartitionFetch(
                topic_id=self.place[0],
                partition=self.number,
                replica_id=self.kept.replica_id,
                leader_epoch=self.following.epoch,
                seen=self.kept.seen,
                last_epoch=epochs[-1].epoch if epochs else -1,
                end_offset=self.log.log_end_offset,
                flushed_end=self.log.flushed_end,
                log_start_offset=self.log.log_start_offset,
                answered=self._answered,
                high_watermark=self.log.high_watermark,
            )

    def take(self, answer: PartitionAnswer, body: memoryview) -> bool:
        """What the leader answers; whether something is to be flushed. Raises LogOfflineError,
        DiskFull, CorruptDataError, OSError.
        """
        with self.lock:
            if self.following is None or self.following.epoch != answer.leader_epoch:
                self.refused = self.refused or answer.error != NONE
                return False
            if answer.error == OUT_OF_RANGE:
                self._begin_anew(answer)
                return False
            self.refused = answer.is_refusal
            if self.refused:
                return False
            self._answered, self.heard_ms = answer.number, self._monotonic()
            if answer.diverging is not None:
                self._cut(answer.diverging)
                return False
            return self._append(answer, body)

    def _append(self, answer: PartitionAnswer, body: memoryview) -> bool:
        before = self.log.log_end_offset
        if answer.segment_base_offset > self.log.active_base_offset:
            self.log.roll_at(answer.segment_base_offset)
        if answer.log_start_offset > self.log.log_start_offset:
            # First: with an empty log the append may begin below it, where no crash finds it again.
            self._follow_log_start(answer)
        if body:
            self.log.append_replicated(body, self._producers_at)
        if answer.local_log_start_offset > self.log.first_local_offset:
            self._keep_log_start()
            self.log.delete_local(answer.local_log_start_offset)
        has_grown = self.log.log_end_offset > before  # also by a roll, which fills a hole
        if not has_grown:
            self.commit(answer)
        return has_grown

    def commit(self, answer: PartitionAnswer) -> None:
        """After the flush: what the leader knows to be committed, and this replica has."""
        with self.lock:
            if self.following is not None and self.following.epoch == answer.leader_epoch:
                self.log.commit_up_to(min(answer.high_watermark, self.log.flushed_end))

    def _follow_log_start(self, answer: PartitionAnswer) -> None:
        start = min(answer.log_start_offset, answer.high_watermark, self.log.flushed_end)
        self.log.commit_up_to(start)
        if start > self.log.log_start_offset:
            self._on_log_start(self, start)

    def _keep_log_start(self) -> None:
        """Durably, before it is not that of the local log: a start that finds none, nor a manifest,
        which a follower does not read, would take what is only in the bucket for trimmed.
        """
        self._on_log_start(self, min(self.log.log_start_offset, self.log.high_watermark))

    def _producers_at(self, offset: int) -> bytes | None:
        return None if self.cold is None else self.cold.reads.producers_at(offset)

    def _begin_anew(self, answer: PartitionAnswer) -> None:
        """The leader has deleted what comes next from its disk, or does not know the epoch that
        this log ends in. What is below where it begins is in the bucket, or trimmed.
        """
        offset = answer.local_log_start_offset
        self._check_uncommitted(offset)
        manifest = self.cold.load_newest() if self.cold is not None else None
        in_bucket = 0 if manifest is None else manifest.end_offset
        if offset > max(in_bucket, answer.log_start_offset):
            raise StoreUnavailable(f"{self}: the bucket ends at {in_bucket}, below {offset}")
        producers = None
        if self.cold is not None and manifest is not None:
            producers = self.cold.reads.producers_at(offset, manifest)
        self._keep_log_start()
        self.log.begin_anew_at(offset, producers, self._save_recovery_point)
        if self.cold is not None and manifest is not None:
            # Only now: what it names is taken for committed in this log.
            self.cold.bucket_state.record_manifest(manifest)
        self._follow_log_start(answer)
        log.info("a replica begins at its leader's local start", partition=str(self), offset=offset)

    def _cut(self, at: tuple[int, int]) -> None:
        end = self.log.log_end_offset
        starts = [(one.epoch, one.start_offset) for one in self.log.epochs]
        offset = cut_offset(starts, at, log_end_offset=end)
        self._check_uncommitted(offset)
        log.warning("a replica is cut", partition=str(self), offset=offset, log_end_offset=end)
        self.log.cut(offset, self._save_recovery_point)

    def _check_uncommitted(self, offset: int) -> None:
        """Whether what is from there on may go."""
        if offset < self.log.high_watermark:
            self.go_offline(f"its leader parts from it at {offset}, below what is committed")
            raise LogOfflineError(f"{self}: it was to be cut below its high watermark")

    def follow_manifest(self, manifest: Manifest | None) -> None:
        """What it names is committed, and its log start too: a leader of before may have advanced
        both.
        """
        if manifest is None:
            return
        flushed_end = self.log.flushed_end
        self.log.commit_up_to(min(manifest.end_offset, flushed_end))
        start = min(manifest.log_start_offset, flushed_end)
        if start > self.log.log_start_offset:
            self._on_log_start(self, start)

    # --- with the bucket's log --------------------------------------------------------------------

    def begin_with_store(self, manifest: Manifest | None) -> None:
        """Keep what is committed, or nothing if the manifest ends above that: then begin where it
        ends. It gives up what it flushed, so it is another replica before it does (M7). Raises
        LogOfflineError, DiskFull, CorruptDataError, StoreUnavailable, OSError.
        """
        with self.lock:
            self.keep(renew(self.kept))
            offset = 0 if manifest is None else manifest.end_offset
            if manifest is None or offset <= self.log.high_watermark:
                self.log.cut(self.log.high_watermark, self._save_recovery_point)
            else:
                assert self.cold is not None, "its manifest is in a bucket"
                producers = self.cold.reads.producers_at(offset, manifest)
                self._keep_log_start()
                self.log.begin_anew_at(offset, producers, self._save_recovery_point)
            if self.cold is not None and manifest is not None:
                self.cold.bucket_state.record_manifest(manifest)

    def append_stored(self, part: StoredPart, data: bytes) -> None:
        """What comes next of the bucket's log. Raises CorruptBatch, DiskFull, LogOfflineError."""
        with self.lock:
            if part.segment_base_offset > self.log.active_base_offset:
                self.log.roll_at(part.segment_base_offset)
            known = self.log.log_end_offset
            ends = (one.end_position for one in iter_headers(data) if one.next_offset <= known)
            body = memoryview(data)[max(ends, default=0) :]
            self.log.append_replicated(body)
            if self.log.log_end_offset < part.end_offset:  # what compaction left without a batch
                self.log.roll_at(part.end_offset)

    def go_offline(self, reason: str) -> None:
        with self.lock:
            self.role, self.following = Role.OFFLINE, None
        log.error("a replica is offline", partition=str(self), reason=reason)

    @property
    def node_ids(self) -> tuple[int, ...]:
        """The brokers that have a replica, as far as is known."""
        found = None if self.newest is None else self.newest.found
        return () if found is None else found.replicas

    @property
    def newest_version(self) -> int:
        return 0 if self.newest is None else self.newest.taken

    def note_heard(self) -> None:
        """Its leader has nothing new to say."""
        self.refused, self.heard_ms = False, self._monotonic()

    def silent_ms(self) -> int:
        """For how long its leader has not been heard."""
        return self._monotonic() - self.heard_ms


def as_version(after: InForce, before: ReplicaSet, *, nonce: str) -> ReplicaSet:
    """The version to write: as `before`, with what `after` decides. What is to stay after a
    reassignment comes first.
    """
    order = (*before.target, *before.replicas) if before.target else before.replicas
    known = dict.fromkeys(one for one in order if one in after.replicas)
    return replace(
        before,
        version=after.version,
        leader_epoch=after.epoch,
        leader=after.leader,
        replicas=(*known, *sorted(after.replicas - known.keys())),
        in_sync=tuple(sorted(after.in_sync)),
        wal=after.wal,
        nonce=nonce,
    )


def folder_of(replica_id: str) -> str:
    return replica_id.rpartition(".")[0]
