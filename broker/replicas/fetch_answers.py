"""What a broker answers to the replicas that fetch from it.

* A fetch is read up to the end of the log, not of what is committed, and never across the border of
  a segment.
* What a fetch names counts before it is answered (`Term.note_fetch`); under another epoch the
  replica is only told so, and counts for what it has seen.
* What cannot be read fails for its partition alone: the replica is told nothing, and lags.
* A watermark alone answers no fetch that waits, or each record would cost two (KAFKA-9731).
* Where its log parts from the leader's it is told by epochs, and nothing is sent (KIP-595).
* A log whose last epoch is older than all that are known, and that has more than it knows to be
  committed, may have parted anywhere: it begins anew where the first known one does. Kafka's
  LeaderEpochFileCache takes it for right up to there, and its producers stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import structlog
from msgspec.structs import replace

from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.fetch_sessions import Entry, FetchSession, TakenFetch
from tierlog.broker.replicas.replica import Replica
from tierlog.broker.replication import election
from tierlog.broker.replication.messages import (
    NO_SESSION,
    OUT_OF_RANGE,
    Answered,
    FetchError,
    PartitionAnswer,
    PartitionFetch,
    ReplicaFetch,
)
from tierlog.broker.replication.term import NEVER_MS, Term
from tierlog.host.waiting import Wait
from tierlog.record_format.errors import OffsetTrimmed, TierlogError

log = structlog.get_logger(__name__)

NOT_LEADER: FetchError = "not-leader"
FENCED: FetchError = "fenced-leader-epoch"
UNKNOWN: FetchError = "unknown-partition"


class FetchAnswers:
    """Thread-safe. `replicas`: those of this broker, as they are now."""

    def __init__(
        self, replicas: Mapping[TopicIdPartition, Replica], *, monotonic: Callable[[], int]
    ) -> None:
        self._replicas, self._monotonic = replicas, monotonic
        self._sessions: dict[int, FetchSession] = {}  # by the node id of the broker that fetches
        self._lock = threading.Lock()

    def take_fetch(self, request: ReplicaFetch) -> TakenFetch | None:
        """None if it is not the next of the broker's session. May block."""
        node_id, before = request.node_id, None
        with self._lock:
            session = self._sessions.get(node_id)
            if request.session_id == NO_SESSION:
                before = session
                session = FetchSession(node_id, partial(self._answer, node_id), self._monotonic)
                kept = {one: it for one, it in self._sessions.items() if not it.is_empty}
                self._sessions = {**kept, node_id: session}
        if before is not None:
            before.close()
        if session is None or request.session_id not in (NO_SESSION, session.id):
            return None
        return session.take_in(request)

    def heard_ms(self, node_id: int) -> int:
        """When that broker last fetched anything here, or was answered."""
        session = self._sessions.get(node_id)
        return NEVER_MS if session is None else session.heard_ms

    def _answer(self, node_id: int, entry: Entry, left: int) -> Answered | None:
        one, entry.is_idle = entry.fetch, False
        replica = self._replicas.get(entry.place)
        term = None if replica is None else replica.term
        if replica is None or term is None:
            epoch = 0 if replica is None else replica.kept.seen
            return _refusal(one, epoch, UNKNOWN if replica is None else NOT_LEADER)
        partition = replica.partition
        if partition is None:
            return _refusal(one, term.epoch, NOT_LEADER)
        if not term.is_replica(node_id):  # it finds out that it was removed
            return _refusal(one, term.epoch, UNKNOWN)
        at = self._diverging(one, partition)
        number: int | None
        if entry.is_named:
            entry.is_named, number = False, term.note_fetch(entry.said, diverges=at is not None)
        else:
            number = term.note_unchanged(entry.said)
        if one.leader_epoch != term.epoch:
            return _refusal(one, term.epoch, FENCED)
        if number is None:
            return _refusal(one, term.epoch, UNKNOWN)
        now = PartitionAnswer(
            topic_id=one.topic_id,
            partition=one.partition,
            leader_epoch=term.epoch,
            number=number,
            high_watermark=term.log.high_watermark,
            log_start_offset=term.log.log_start_offset,
            local_log_start_offset=term.log.first_local_offset,
            diverging=at,
        )
        if at is None:
            return self._read(entry, now, term, left)
        if at[0] < 0:
            begins_at = at[1]
            now = replace(now, error=OUT_OF_RANGE, local_log_start_offset=begins_at, diverging=None)
        return Answered(now)

    def _diverging(self, one: PartitionFetch, partition: Partition) -> tuple[int, int] | None:
        """Where its log parts from this one; of no epoch, where it is to begin anew."""
        if one.last_epoch < 0 or one.end_offset < partition.first_local_offset:
            return None  # it has no record that could differ, or is to begin anew
        epochs = [(entry.epoch, entry.start_offset) for entry in partition.epochs_without_gap()]
        at = election.diverging(
            epochs,
            log_end_offset=partition.log_end_offset,
            last_epoch=one.last_epoch,
            end_offset=one.end_offset,
        )
        if at is None or at[0] >= 0:
            return at
        if one.end_offset <= one.high_watermark:
            return None
        return -1, max(epochs[0][1], partition.first_local_offset)

    def _read(self, entry: Entry, now: PartitionAnswer, term: Term, left: int) -> Answered | None:
        one, was_unreadable, entry.is_unreadable = entry.fetch, entry.is_unreadable, False
        if one.end_offset < now.local_log_start_offset:
            return Answered(replace(now, error=OUT_OF_RANGE))
        if one.end_offset >= term.log.log_end_offset:
            is_news = entry.lacks(now.log_start_offset, now.local_log_start_offset)
            if is_news or term.is_waited_for(one.replica_id):
                entry.local_start = now.local_log_start_offset
                return Answered(now)
            entry.is_idle, entry.term = True, term
            is_behind = one.high_watermark < min(now.high_watermark, one.flushed_end)
            return Answered(now, may_wait=True) if is_behind else None
        if left <= 0:
            return None  # another partition has taken what the follower has room for
        try:
            read = term.log.read_for_replica(one.end_offset, max_bytes=left, wait=Wait.WAIT)
        except OffsetTrimmed:
            return Answered(replace(now, error=OUT_OF_RANGE))
        except (TierlogError, OSError) as error:
            if not was_unreadable:
                log.error("not sent to a replica", partition=str(term.log), error=str(error))
            entry.is_idle, entry.is_unreadable, entry.term = True, True, term
            return None
        answer = replace(
            now,
            segment_base_offset=read.segment_base_offset,
            size_bytes=sum(piece.size_bytes for piece in read.slices),
        )
        return Answered(answer, read.slices)


def _refusal(one: PartitionFetch, epoch: int, error: FetchError) -> Answered:
    answer = PartitionAnswer(
        topic_id=one.topic_id,
        partition=one.partition,
        leader_epoch=epoch,
        number=0,
        high_watermark=0,
        log_start_offset=0,
        local_log_start_offset=0,
        error=error,
    )
    return Answered(answer)
