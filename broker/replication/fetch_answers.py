"""What a broker answers to the replicas that fetch from it.

* A fetch is read up to the end of the log, not of what is committed, and never across the border of
  a segment.
* What a replica says in its fetch counts before it is answered (`Term.note_fetch`); under another
  epoch it is only told so, and counts for what it has seen.
* A watermark alone answers no fetch that waits, or each record would cost two (KAFKA-9731).
* Where its log parts from the leader's it is told by epochs, and nothing is sent (KIP-595).
* A log whose last epoch is older than all that are known, and that has more than it knows to be
  committed, may have parted anywhere: it begins anew where the first known one does. Kafka's
  LeaderEpochFileCache takes it for right up to there, and its producers stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from tierlog.broker.data_folder import TopicIdPartition
from tierlog.broker.partition import Partition
from tierlog.broker.replication import election
from tierlog.broker.replication.in_sync import Fetch
from tierlog.broker.replication.messages import (
    Answered,
    FetchError,
    PartitionAnswer,
    PartitionFetch,
    ReplicaFetch,
)
from tierlog.broker.replication.replica import OUT_OF_RANGE, Replica
from tierlog.broker.replication.term import Term
from tierlog.host.waiting import Wait
from tierlog.record_format.errors import OffsetTrimmed

NOT_LEADER: FetchError = "not-leader"
FENCED: FetchError = "fenced-leader-epoch"
UNKNOWN: FetchError = "unknown-partition"


class FetchAnswers:
    """Thread-safe. `replicas`: those of this broker, as they are now."""

    def __init__(self, replicas: Mapping[TopicIdPartition, Replica]) -> None:
        self._replicas = replicas

    def answer_fetch(self, request: ReplicaFetch) -> list[Answered]:
        """What is new for the replicas that ask. May block."""
        answers: list[Answered] = []
        left = request.max_bytes
        for one in request.partitions:
            answered = self._answer(one, request.node_id, left)
            if answered is not None:
                left = max(0, left - answered.answer.size_bytes)
                answers.append(answered)
        if request.wait_ms and all(one.may_wait for one in answers):
            return []
        return answers

    def _answer(self, one: PartitionFetch, node_id: int, left: int) -> Answered | None:
        replica = self._replicas.get((one.topic_id, one.partition))
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
        number = term.note_fetch(_fetch_of(one, node_id), diverges=at is not None)
        if one.leader_epoch != term.epoch:
            return _refusal(one, term.epoch, FENCED)
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
            return self._read(one, now, term, left)
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

    def _read(
        self, one: PartitionFetch, now: PartitionAnswer, term: Term, left: int
    ) -> Answered | None:
        if one.end_offset < now.local_log_start_offset:
            return Answered(replace(now, error=OUT_OF_RANGE))
        if one.end_offset >= term.log.log_end_offset:
            starts = (now.log_start_offset, now.local_log_start_offset)
            if term.tells(one.replica_id, starts):
                return Answered(now)
            is_behind = one.high_watermark < min(now.high_watermark, one.flushed_end)
            return Answered(now, may_wait=True) if is_behind else None
        if left <= 0:
            return None  # another partition has taken what the follower has room for
        try:
            read = term.log.read_for_replica(
                one.end_offset, max_bytes=min(one.max_bytes, left), wait=Wait.WAIT
            )
        except OffsetTrimmed:
            return Answered(replace(now, error=OUT_OF_RANGE))
        answer = replace(
            now,
            segment_base_offset=read.segment_base_offset,
            size_bytes=sum(piece.size_bytes for piece in read.slices),
        )
        return Answered(answer, read.slices)

    def wait_for_news(
        self, request: ReplicaFetch, callback: Callable[[], None]
    ) -> Callable[[], None]:
        """Call it once when there is something new for one of them. Returns a function that
        cancels it.
        """
        once = _Once(callback)
        for one in request.partitions:
            replica = self._replicas.get((one.topic_id, one.partition))
            term = None if replica is None else replica.term
            if term is not None:
                once.cancels.append(term.wait_for_news(one.replica_id, one.end_offset, once))
        return once.cancel


class _Once:
    """A callback that is called once, by whichever comes first."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback
        self._lock = threading.Lock()
        self.cancels: list[Callable[[], object]] = []

    def __call__(self) -> None:
        with self._lock:
            callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def cancel(self) -> None:
        with self._lock:
            self._callback = None
        for cancel in self.cancels:
            cancel()


def _fetch_of(one: PartitionFetch, node_id: int) -> Fetch:
    return Fetch(
        replica_id=one.replica_id,
        node=node_id,
        epoch=one.leader_epoch,
        seen=one.seen,
        last_epoch=one.last_epoch,
        end_offset=one.end_offset,
        flushed_end=one.flushed_end,
        log_start_offset=one.log_start_offset,
        answered=one.answered,
    )


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
