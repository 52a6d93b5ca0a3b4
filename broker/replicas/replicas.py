"""The replicas of this broker: opened, followed and led; and what it answers to those that follow.

* A partition is a replica's once there is a set of replicas of it in the bucket, however many they
  are. Until then it is some folder's alone, which hands it over through the bucket (`hand_over`) or
  writes the first version of its set (`begin_set`). There is no way back.
* At the start a place is a replica's if something is kept about it (`KeptFiles`), and the folder
  does not list it as its own.
* A partition that is led here is served by a `Partition` around the replica's log, one for each
  term. Nobody else changes the log meanwhile.
* Work that waits for the store or a disk is done in threads, one at a time for a replica, so that a
  store that hangs delays no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

import structlog

from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.data_folder.data_folder import DataFolder, TopicIdPartition, TopicPartition
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.membership.members import Members
from tierlog.broker.membership.own_node import Timing
from tierlog.broker.membership.peers import Peers
from tierlog.broker.opening.log_opener import LogOpener
from tierlog.broker.opening.opened_log import OpenedLog, Wanted
from tierlog.broker.partition.damaged_partition import DamagedPartition
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.elections import Elections, in_force_of
from tierlog.broker.replicas.fetch_answers import FetchAnswers
from tierlog.broker.replicas.fetcher import Fetcher, Fetchers
from tierlog.broker.replicas.kept_file import KeptFiles
from tierlog.broker.replicas.leading import Leading
from tierlog.broker.replicas.replica import Replica, Role
from tierlog.broker.replicas.replica_moves import ReplicaMoves, shown_of
from tierlog.broker.replicas.store_member import StoreMember
from tierlog.broker.replication import election
from tierlog.broker.replication.messages import ShownSet
from tierlog.broker.replication.store_writer import StoreWriter
from tierlog.broker.replication.term import NEVER_MS
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topics import Topic
from tierlog.hot_tier.log import PartitionLog
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.replica_sets import ReplicaSets, first_set
from tierlog.record_format.errors import (
    CorruptDataError,
    TierlogError,
    UnknownTopic,
)

log = structlog.get_logger(__name__)

THREADS_MAX: Final = 32
TIDY_INTERVAL_MS: Final = 30_000


class Replicas:
    """Thread-safe. `on_moved`: a partition is led here from now on, or no longer; `name` has
    another broker lead partitions that nobody leads; `tell`: this one leads those now.
    `threads` are shut down by `stop`; `start_fetching` has a thread fetch from another broker.
    """

    def __init__(
        self,
        folder: DataFolder,
        members: Members,
        topics: LiveTopics,
        bucket: Bucket,
        peers: Peers,
        *,
        opener: LogOpener,
        settings: BrokerSettings,
        store_writer: StoreWriter,
        on_moved: Callable[[Partition], None],
        gone: Callable[[TopicRecord, int], TierlogError],
        name: Callable[[int, Sequence[TopicIdPartition]], None],
        tell: Callable[[int, Sequence[TopicIdPartition]], None],
        timing: Timing,
        threads: Executor,
        start_fetching: Callable[[Fetcher], None] = Fetcher.start,
    ) -> None:
        self._folder, self._members, self._topics, self._opener = folder, members, topics, opener
        self._bucket, self._settings, self._timing = bucket, settings, timing
        self._on_moved, self._gone = on_moved, gone
        self._files = KeptFiles(folder.path, folder_id=folder.owner, write=folder.write)
        self._lock = threading.Lock()
        self._replicas: dict[TopicIdPartition, Replica] = {}
        self._damaged: dict[TopicIdPartition, DamagedPartition] = {}
        self._working: set[TopicIdPartition] = set()
        self._threads = threads
        self._tidy_again_ms = NEVER_MS
        self._is_closed = False
        self._store_writer = store_writer
        self._store = StoreMember(store_writer, bucket.store)
        self._leading = Leading(
            topics,
            opener,
            self._store,
            settings,
            on_moved=on_moved,
            gone=gone,
            tell=tell,
            threads=threads,
            monotonic=timing.monotonic,
        )
        answers = FetchAnswers(self._replicas, monotonic=timing.monotonic)
        self.take_fetch = answers.take_fetch
        self._fetchers = Fetchers(
            members,
            peers,
            settings,
            replicas=lambda: list(self._replicas.values()),
            on_refused=self._do_what_is_due,
            start=start_fetching,
            monotonic=timing.monotonic,
        )
        self.elections = Elections(
            members,
            settings,
            self._store,
            self._leading,
            follow=self._fetchers.follow,
            remove=self._remove,
            hand_over=self._hand_over_to_any,
            heard_ms=answers.heard_ms,
            monotonic=timing.monotonic,
        )
        self.moves = ReplicaMoves(self._replicas, members, self.elections, name=name)

    # --- opening ----------------------------------------------------------------------------------

    def open_all(
        self, points: Mapping[TopicPartition, int], starts: Mapping[TopicPartition, int]
    ) -> None:
        """At the start: the logs of all replicas that this folder has. None is served yet. What is
        kept of one that was removed, or lost before it began anew, is for when it is asked for.
        """
        for place in self._files.places():
            try:
                record = self._topics.find_by_id(place[0]).record
            except UnknownTopic:
                self._files.forget(place)
                continue
            if place[1] not in record.absent:  # its set was not begun
                self._files.forget(place)
                continue
            name = (record.name, place[1])
            rows = points.get(name), starts.get(name)
            try:
                if self._is_anything_left(record, place):
                    self._open(record, place, *rows, at_start=True)
            except CorruptDataError as error:
                log.error(
                    "a replica is damaged", partition=f"{name[0]}-{name[1]}", error=str(error)
                )
                self._damaged[place] = DamagedPartition(*name, error, *rows)

    def _is_anything_left(self, record: TopicRecord, place: TopicIdPartition) -> bool:
        """Whether there is a log, or was one that nobody has given up."""
        exists = self._folder.partition_folder(record.name, place[1]).exists()
        return exists or self._files.read_kept(place)[1]

    def _open(
        self,
        record: TopicRecord,
        place: TopicIdPartition,
        recovery_point: int | None = None,
        log_start_offset: int | None = None,
        *,
        at_start: bool,
    ) -> Replica | None:
        kept, was_opened = self._files.read_kept(place)
        exists = self._folder.partition_folder(record.name, place[1]).exists()
        if was_opened and not exists:
            kept, was_opened = election.renew(kept), False
            self._files.write_kept(place, kept, was_opened=False)  # before there is an empty log
            log.warning("a replica's log is gone: it begins anew", topic=record.name)
        if not was_opened and at_start:
            self._topics.checkpoints.forget_log((record.name, place[1]))
            recovery_point = log_start_offset = None
        wanted = Wanted(
            record, place[1], recovery_point, log_start_offset, at_start=at_start and exists
        )
        opened = self._opener.open_replica(wanted)
        if isinstance(opened, DamagedPartition):
            self._damaged[place] = opened
            return None
        kept = _fitting(kept, opened.log)
        known_end = 0 if opened.cold is None else opened.cold.end_offset
        known = max(known_end, opened.log.log_start_offset)
        opened.log.replicate(min(known, opened.log.flushed_end))
        self._files.write_kept(place, kept, was_opened=True)
        return self._add(record, place, opened, kept)

    def _add(
        self, record: TopicRecord, place: TopicIdPartition, opened: OpenedLog, kept: election.Kept
    ) -> Replica:
        replica = Replica(
            record.name,
            place,
            opened.log,
            opened.cold,
            sets=self._sets_of(record, place[1]),
            files=self._files,
            kept=kept,
            on_log_start=self._move_log_start,
            save_recovery_point=self._topics.checkpoints.save,
            monotonic=self._timing.monotonic,
        )
        with self._lock:
            self._replicas[place] = replica
        self._topics.note_replica(place)
        return replica

    def begin_set(self, partition: Partition) -> None:
        """Make a replica of a partition that is this folder's alone, and to which nothing is
        appended: the only one of its set. Once it returns nothing else can become of it; it is led
        then, unless the bucket did not answer. Raises OSError, ShuttingDown, LogOfflineError.
        """
        place = partition.topic_id, partition.number
        kept = election.keep_alone(self._folder.owner, epoch=partition.offsets().leader_epoch)
        with self._topics.changing():
            record = self._topics.find_by_id(place[0]).record
            self._files.write_kept(place, kept, was_opened=True)
            try:
                self._topics.leave(partition)
            except BaseException:
                self._files.forget(place)
                raise
            self._topics.retire_partition(partition, partial(self._gone, record, place[1]))
            opened = self._opener.replicate(partition, record)
            replica = self._add(record, place, opened, kept)
        self._on_moved(partition)
        self._do(replica, partial(self.elections.look, replica))

    def not_led(self) -> Iterator[Replica | DamagedPartition]:
        """Those that have rows in the checkpoints, and are not in a topic."""
        for replica in list(self._replicas.values()):
            if replica.partition is None:
                yield replica
        yield from list(self._damaged.values())

    def _move_log_start(self, replica: Replica, offset: int) -> None:
        saved_as = replica.partition or replica
        self._topics.checkpoints.move_log_start(saved_as, offset, move=replica.log.trim)

    # --- what there is to do ----------------------------------------------------------------------

    def has(self, place: TopicIdPartition) -> bool:
        """Whether there is a replica here, or a damaged one."""
        return place in self._replicas or place in self._damaged

    def keeps(self, place: TopicIdPartition) -> bool:
        """Whether there is a replica here, or was one."""
        return self._files.has(place)

    def settle(self, place: TopicIdPartition, *, is_named: bool) -> bool:
        """Its set may have changed: look, and lead it in turn if nobody does. Whether it has a set.
        `is_named`: this broker was chosen to lead it then, at once, or to have what only the bucket
        has. Raises StoreUnavailable, CorruptDataError, UnknownTopic.
        """
        replica, found = self._replicas.get(place), None
        if replica is None:
            topic = self._topics.find_by_id(place[0])
            found = self._sets_of(topic.record, place[1]).load_newest()
            if found.found is None:
                return found.taken > 0
            is_wanted = self._members.me.node_id in found.found.replicas
            if is_wanted or (is_named and self.elections.is_abandoned(in_force_of(found))):
                replica = self._open_if_not_here(topic, place)
        if replica is not None:
            look = partial(self.elections.look, replica, is_named=is_named, found=found)
            self._do(replica, look)
        return True

    def _open_if_not_here(self, topic: Topic, place: TopicIdPartition) -> Replica | None:
        with self._topics.changing():
            known = self._replicas.get(place)
            if known is not None or place[1] in topic.partitions:
                return known
            return self._open(topic.record, place, at_start=False)

    def create(
        self,
        record: TopicRecord,
        number: int,
        node_ids: Sequence[int],
        *,
        folders: Mapping[int, str],
    ) -> None:
        """Write the first version of a new partition's set: all are in sync, since all are empty;
        nobody leads. Raises StoreUnavailable, OutcomeUnknownError.
        """
        first = first_set(
            (record.topic_id, number),
            epoch=0,
            replicas=node_ids,
            in_sync=[f"{folders[one]}.{election.FIRST_GENERATION}" for one in node_ids],
        )
        self._sets_of(record, number).create_version(first)

    def is_ended_chain(self, chain: str) -> bool:
        """Of this folder's chains: it is of a former life, or was fenced."""
        return chain != self._store_writer.chain

    def is_abandoned(self, record: TopicRecord, number: int) -> bool:
        """Whether only the bucket has it. Raises StoreUnavailable, CorruptDataError."""
        newest = self._sets_of(record, number).load_newest()
        return newest.found is not None and self.elections.is_abandoned(in_force_of(newest))

    def has_set(self, record: TopicRecord, number: int) -> bool:
        """Raises StoreUnavailable."""
        return self._sets_of(record, number).load_newest().taken > 0

    def _sets_of(self, record: TopicRecord, number: int) -> ReplicaSets:
        keys = PartitionKeys(record.name, record.topic_id, number)
        return ReplicaSets(self._bucket.store, keys, pause=self._timing.pause)

    def nodes_of_set(self, record: TopicRecord, number: int) -> set[int] | None:
        """The brokers that have a replica, or are to have one; None if it has no set. Raises
        StoreUnavailable, CorruptDataError.
        """
        found = self._sets_of(record, number).load_newest().found
        return None if found is None else {*found.replicas, *found.target}

    def look_at(self, places: Iterable[TopicIdPartition], *, leader: int) -> None:
        """That broker leads these partitions: look at those that follow another."""
        for place in places:
            if (replica := self._replicas.get(place)) is None:
                continue
            to = replica.following
            follows = to is not None and to.node_id == leader and not replica.refused
            if replica.partition is None and not follows:
                self._work(replica, partial(self.elections.look, replica))

    def look_if_replaced(self, epoch_of: Callable[[TopicIdPartition], int]) -> None:
        """Look at what is led here where another broker says that it leads it, under this epoch."""
        for replica in list(self._replicas.values()):
            term = replica.term
            if term is not None and epoch_of(replica.place) > term.epoch:
                self._work(replica, partial(self.elections.look, replica))

    def run_round(self) -> None:
        """In the background, and often: nothing here waits."""
        now_ms = self._timing.monotonic()
        tidies = now_ms >= self._tidy_again_ms
        if tidies:
            self._tidy_again_ms = now_ms + TIDY_INTERVAL_MS
        for replica in list(self._replicas.values()):
            is_idle = not self._do_what_is_due(replica)
            if is_idle and tidies and replica.role is Role.FOLLOWER:
                self._work(replica, partial(self._tidy, replica))

    def _do_what_is_due(self, replica: Replica) -> bool:
        """Whether there is something to do about it."""
        try:
            step = self.elections.next_step(replica)
        except UnknownTopic:  # it is being deleted
            return False
        if step is not None:
            self._work(replica, partial(self._take_next_step, replica))
        return step is not None

    def _take_next_step(self, replica: Replica) -> None:
        """What is due by now: another may have sent a version since it was looked at."""
        step = self.elections.next_step(replica)
        if step is not None:
            step()

    def prefer(self) -> None:
        """Hand over what another broker is preferred to lead, and has in sync (Kafka's
        auto.leader.rebalance.enable).
        """
        for replica in list(self._replicas.values()):
            partition, preferred = replica.partition, replica.node_ids[:1]
            if partition is not None and self.moves.may_lead_instead(partition)[:1] == [*preferred]:
                self._work(replica, partial(self.moves.hand_over_to_any, replica, preferred))

    def _hand_over_to_any(self, replica: Replica, node_ids: Sequence[int]) -> None:
        self.moves.hand_over_to_any(replica, node_ids)

    def _tidy(self, replica: Replica) -> None:
        """What the janitor does for partitions that are led here."""
        replica.log.reap()
        replica.log.expire_producers(idle_ms=self._settings.producer_id_expiration_ms)

    def _work(self, replica: Replica, step: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed or replica.place in self._working:
                return
            self._working.add(replica.place)
            self._threads.submit(self._work_now, replica, step)

    def _work_now(self, replica: Replica, step: Callable[[], None]) -> None:
        try:
            self._do(replica, step)
        except (TierlogError, OSError) as error:
            log.warning("a replica waits", partition=str(replica), error=str(error))
        except Exception:
            log.exception("a replica's step failed: a bug", partition=str(replica))
        finally:
            with self._lock:
                self._working.discard(replica.place)

    def _do(self, replica: Replica, step: Callable[[], None]) -> None:
        """As `_work`, in this thread, after what is under way."""
        with replica.stepping:
            step()

    # --- what is shown ----------------------------------------------------------------------------

    def shown(self, place: TopicIdPartition) -> ShownSet | None:
        """The set of a partition that is led here, and has one."""
        replica = self._replicas.get(place)
        return None if replica is None else shown_of(replica, self._members)

    def max_lag(self, log_end_of: Callable[[TopicIdPartition], int | None]) -> int:
        """By how many offsets the replica here that is furthest behind is behind its leader, by
        what the leaders said last.
        """
        behind = (
            end - replica.log.log_end_offset
            for place, replica in list(self._replicas.items())
            if replica.term is None and (end := log_end_of(place)) is not None
        )
        return max(0, *behind, 0)

    def count_reassigning(self) -> int:
        """Partitions that are led here, and are to have other replicas."""
        led = [one.newest for one in list(self._replicas.values()) if one.term is not None]
        return sum(bool(one and one.found and one.found.target) for one in led)

    def count_fetches(self) -> dict[int, tuple[int, int]]:
        """As `Fetchers.count_answers`."""
        return self._fetchers.count_answers()

    def followed_leader(self, place: TopicIdPartition) -> tuple[int, int] | None:
        """(leader epoch, node id) of whom the replica here follows."""
        replica = self._replicas.get(place)
        following = None if replica is None else replica.following
        return None if following is None else (following.epoch, following.node_id)

    # --- ending -----------------------------------------------------------------------------------

    def drop_topic(self, topic_id: str) -> None:
        """It was deleted: close its logs, so that their folders can be set aside."""
        for place in [one for one in self._replicas if one[0] == topic_id]:
            with self._lock:
                replica = self._replicas.pop(place)
            with replica.lock:
                replica.role, replica.following = Role.OFFLINE, None
                if replica.term is not None:
                    replica.term.end()
                self._store.close_feed(replica)
                replica.term = replica.partition = None
                replica.log.abandon()
            self._files.forget(place)

    def _remove(self, replica: Replica) -> None:
        """Give up the log of one that this broker is not to have any longer (H9)."""
        with self._lock:
            if self._replicas.pop(replica.place, None) is None:
                return
        with replica.lock:
            replica.role, replica.following = Role.OFFLINE, None
            replica.log.abandon()
            kept = election.renew(replica.kept)
            self._files.write_kept(replica.place, kept, was_opened=False)
        record = self._topics.find_by_id(replica.place[0]).record
        self._opener.remove_files(record, replica.number)
        self._topics.checkpoints.save()

    def stop(self, *, timeout_s: float) -> None:
        """Follow nobody, and claim nothing, from now on."""
        with self._lock:
            self._is_closed = True
        self._leading.close()
        self._store_writer.close()
        self._fetchers.close(timeout_s)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def abandon(self) -> None:
        """After a start that failed."""
        self.stop(timeout_s=1)
        for replica in list(self._replicas.values()):
            replica.log.abandon()

    def close_logs(self) -> bool:
        """Those that are not led; whether all were closed cleanly."""
        clean = not self._damaged
        for replica in list(self._replicas.values()):
            if replica.partition is None:
                with replica.lock:
                    try:
                        clean = replica.log.close() and clean
                    except TierlogError as error:
                        log.error(
                            "log not closed cleanly", partition=str(replica), error=str(error)
                        )
                        clean = False
        return clean


def _fitting(kept: election.Kept, log: PartitionLog) -> election.Kept:
    """What is kept, unless the log is of an epoch that it does not know: then the file is lost, or
    an older one, and so are promises (R6).
    """
    latest = log.epochs[-1].epoch if log.epochs else 0
    return kept if latest <= kept.seen else election.renew(kept)._replace(seen=latest)
