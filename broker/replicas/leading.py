"""What this broker leads: a replica's log is served as a partition, for one term.

* A claim that is in force but cannot be served yet is not led: its log is a follower's until then.
* Those that follow are told at once, and many at a time: a broker may come to lead a thousand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.opening.log_opener import LogOpener
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.replica import Replica, Role
from tierlog.broker.replicas.store_member import StoreMember
from tierlog.broker.replication.in_sync import InForce
from tierlog.broker.replication.term import StoreRole, Term
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.record_format.errors import LeaderChanged, TierlogError, UnknownTopic

log = structlog.get_logger(__name__)

STORE_ROLES: Final = {str(one): one for one in StoreRole}  # faster than StoreRole(…)


class Leading:
    """Each call is about one replica, and made by one thread at a time for it. `on_moved`: a
    partition is led here from now on, or no longer; `gone`: what to answer for it then; `tell`:
    this broker leads those, which another follows.
    """

    def __init__(
        self,
        topics: LiveTopics,
        opener: LogOpener,
        store: StoreMember,
        settings: BrokerSettings,
        *,
        on_moved: Callable[[Partition], None],
        gone: Callable[[TopicRecord, int], TierlogError],
        tell: Callable[[int, Sequence[TopicIdPartition]], None],
        threads: Executor,
        monotonic: Callable[[], int],
    ) -> None:
        self._topics, self._opener, self._store, self._settings = topics, opener, store, settings
        self._on_moved, self._gone, self._tell = on_moved, gone, tell
        self._threads, self._monotonic = threads, monotonic
        self._lock = threading.Lock()
        self._to_tell: list[Replica] = []  # led here since the others were told
        self._is_telling = self._is_closed = False

    def close(self) -> None:
        """Nobody is told of what is led from now on."""
        with self._lock:
            self._is_closed = True

    def lead(self, replica: Replica, in_force: InForce) -> None:
        """Its claim is in force: serve it. Raises StoreUnavailable, CorruptDataError, OSError."""
        topic = self._topics.find_by_id(replica.place[0])
        partition = self._opener.lead(replica.log, topic.record, epoch=in_force.epoch)
        try:
            if replica.log.log_end_offset > 0:
                partition.load_manifest()
                replica.follow_manifest(partition.manifest)
            replica.log.begin_term(in_force.epoch)
        except BaseException:  # it claims again, and until then it is a follower's log
            partition.retire()
            raise
        term = Term(
            replica.log,
            in_force,
            lag_ms=self._settings.replica_lag_time_max_ms,
            min_in_sync=partial(self.min_in_sync, replica),
            store_role=lambda: STORE_ROLES[topic.config.replication_store],
            store_log_start=partial(_log_start_in_bucket, partition),
            monotonic=self._monotonic,
        )
        if topic.config.compacts:
            partition.compaction.follow_bucket()
        partition.term, partition.on_claimed = term, replica.follow_manifest
        if replica.feed is not None and replica.feed.chain == in_force.wal:
            term.write_for_store(replica.feed)
        else:
            self._store.close_feed(replica)
        replica.role, replica.term, replica.partition = Role.LEADER, term, partition
        term.begin()
        self._topics.serve(partition)
        log.info("leading", partition=str(replica), leader_epoch=in_force.epoch)
        self._on_moved(partition)
        self._tell_of(replica)

    def step_down(self, replica: Replica) -> None:
        """Another leads, or is to."""
        term, partition = replica.term, replica.partition
        assert term is not None
        assert partition is not None
        replica.role, replica.term, replica.partition = Role.IDLE, None, None
        with suppress(UnknownTopic):  # it was deleted meanwhile, with its partitions
            record = self._topics.find_by_id(replica.place[0]).record
            self._topics.retire_partition(partition, partial(self._gone, record, replica.number))
        replica.log.end_term()
        partition.fail_appends(partial(LeaderChanged, f"{partition} is led elsewhere now"))
        term.end()
        self._store.close_feed(replica)
        log.info("leading no longer", partition=str(replica), leader_epoch=term.epoch)
        self._on_moved(partition)

    def min_in_sync(self, replica: Replica) -> int:
        """By the fewer of the replicas that there are to be and that there were: writes go on while
        more are added, and the others may go if fewer are to stay.
        """
        topic, newest = self._topics.find_by_id(replica.place[0]), replica.newest
        found = None if newest is None else newest.found
        wanted = () if found is None else found.replicas
        if found is not None and found.target:
            wanted = min(found.target, found.original, key=len)
        count = len(wanted) or topic.record.replication_factor
        return topic.config.effective_min_in_sync(count)

    # --- telling the others -----------------------------------------------------------------------

    def _tell_of(self, replica: Replica) -> None:
        """Have the other replicas follow at once. What comes while others are told waits for the
        next call, so that a broker that comes to lead a thousand partitions makes few.
        """
        with self._lock:
            self._to_tell.append(replica)
            if self._is_telling or self._is_closed:
                return
            self._is_telling = True
            self._threads.submit(self._tell_all)

    def _tell_all(self) -> None:
        while told := self._next_to_tell():
            for node_id in sorted({one for replica in told for one in replica.node_ids}):
                self._tell(node_id, [one.place for one in told if node_id in one.node_ids])

    def _next_to_tell(self) -> list[Replica]:
        with self._lock:
            told, self._to_tell = self._to_tell, []
            self._is_telling = bool(told)
            return told


def _log_start_in_bucket(partition: Partition) -> int:
    manifest = partition.manifest
    return 0 if manifest is None else manifest.log_start_offset
