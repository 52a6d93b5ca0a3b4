"""A broker's replicas in a simulation: the classes that a broker runs, without its threads, its
clock and its network. What they hand to threads waits in queues, for the world's next steps.

* Before each request to the bucket, each sync of the disk and on both ways of a fetch the world may
  let others go on (`World.pass_time`). A node that was killed meanwhile ends there (`Killed`).
* A node is of one life: it ends with a crash, and the next one opens what the disk kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation.replica_store import SteppedWriter
from tierlog.broker.background.compactor import Compactor, Rehydrator
from tierlog.broker.background.janitor import Janitor
from tierlog.broker.background.task_failures import TaskFailures
from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.cluster.first_sets import FirstSets
from tierlog.broker.cluster.hand_over import HandOver
from tierlog.broker.data_folder.data_folder import DataFolder, TopicIdPartition
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.membership.members import Member
from tierlog.broker.membership.own_node import Timing
from tierlog.broker.opening.log_opener import LogOpener
from tierlog.broker.partition.holes import Holes
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.fetcher import Fetcher
from tierlog.broker.replicas.replica import Replica
from tierlog.broker.replicas.replicas import Replicas
from tierlog.broker.replication.messages import NO_SESSION, Fetched, FetchedRows, ReplicaFetch
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.host.file_slice import close_all
from tierlog.object_store.memory import MemoryStore
from tierlog.object_store.probe import StoreTraits
from tierlog.record_format.errors import (
    LeaderUnknown,
    ObjectExists,
    OutcomeUnknownError,
    PeerUnavailable,
    StoreUnavailable,
    TierlogError,
    UnknownBroker,
)

if TYPE_CHECKING:
    from tests.simulation.replica_world import World

SESSION_MS, LAG_MS = 1_000, 1_500
NEVER_MS = 10**9
LEADERS = ("produce", "read", "copy", "compact", "keep_up", "roll", "trim", "hand_over", "reassign")
LEADERS += ("prefer",)


class Killed(BaseException):
    """The node's process has ended."""


class Queue(Executor):
    """Calls wait here until the world makes them."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], object]] = deque()

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        self.calls.append(partial(call, *args, **named))
        return Future()

    def start(self, call: Callable[[], object]) -> None:
        self.calls.append(call)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.calls.clear()


class Line:
    """A node's connection to the bucket."""

    def __init__(self, node: Node, store: MemoryStore) -> None:
        self._node, self._store = node, store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, body: bytes | memoryview, **options: Any) -> Any:
        return self._change(key, partial(self._store.put, key, bytes(body), **options), **options)

    def put_file(self, key: str, path: Path, **options: Any) -> Any:
        return self._change(key, partial(self._store.put_file, key, path, **options))

    def _change(
        self, key: str, change: Callable[[], Any], *, if_absent: bool = False, **_: Any
    ) -> Any:
        world, lost = self._node.world, OutcomeUnknownError if if_absent else StoreUnavailable
        fault = self._begin(key)
        if fault in ("late", "lost before"):
            if fault == "late" and if_absent:
                world.late.append((key, change))
            raise lost(f"{key}: no answer")
        done = change()
        if fault == "lost after":
            raise lost(f"{key}: no answer")
        world.pass_time(self._node, self._node.may_go_on)
        return done

    def get(self, key: str, **options: Any) -> Any:
        return self._ask(key, partial(self._store.get, key, **options))

    def get_range(self, key: str, start: int, end: int, **options: Any) -> Any:
        return self._ask(key, partial(self._store.get_range, key, start, end, **options))

    def head(self, key: str) -> Any:
        return self._ask(key, partial(self._store.head, key))

    def list(self, prefix: str, **options: Any) -> Any:
        return self._ask(prefix, partial(self._store.list, prefix, **options))

    def delete(self, keys: Sequence[str]) -> None:
        self._ask(keys[0], partial(self._store.delete, keys))

    def _ask(self, key: str, question: Callable[[], Any]) -> Any:
        if self._begin(key) == "lost before":
            raise StoreUnavailable(f"{key}: no answer")
        answer = question()
        self._node.world.pass_time(self._node, self._node.may_go_on)
        return answer

    def _begin(self, key: str) -> str:
        node = self._node
        if threading.get_ident() != node.world.thread:
            return ""  # it is waited for, among others in any order
        node.world.pass_time(node, node.may_go_on)
        if node.is_cut_off:
            raise StoreUnavailable(f"{key}: down")
        return node.world.store_fault(node)


def deliver(change: Callable[[], object]) -> None:
    """A request whose sender has given up arrives now."""
    with suppress(ObjectExists):
        change()


class Network:
    """How a node speaks with the others."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def fetch_replicas(
        self, url: str, request: ReplicaFetch, *, asked: Collection[TopicIdPartition]
    ) -> FetchedRows:
        world, me, to = self._node.world, self._node.number, int(url)
        world.pass_time(self._node, True)
        self._check(me, to)
        asked = world.nodes[to]
        if asked is None or asked.is_frozen:
            raise PeerUnavailable(f"{url}: refused")
        fetched = asked.answer(request)
        world.check()  # what it says may have committed something, which others go on with
        world.old_fetches = [*world.old_fetches[-5:], (to, request)]
        world.pass_time(self._node, True)
        self._check(to, me)
        return fetched

    def _check(self, one: int, other: int) -> None:
        world = self._node.world
        if (one, other) in world.cut or world.random.random() < world.loses_messages:
            raise PeerUnavailable("no answer")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not simulated")


class Sightings:
    """Who there is, as this node sees it: the world says who it takes for alive, rightly or not."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def me(self) -> Member:
        return self._member(self._node.number, self._node.folder.owner)

    def members(self) -> list[Member]:
        known = self._node.world.folder_ids.items()
        return [self._member(number, folder_id) for number, folder_id in known]

    def member(self, number: int) -> Member | None:
        folder_id = self._node.world.folder_ids.get(number)
        return None if folder_id is None else self._member(number, folder_id)

    def find_member(self, number: int) -> Member:
        if (found := self.member(number)) is None:
            raise UnknownBroker(str(number))
        return found

    def member_of(self, folder_id: str) -> Member | None:
        return next((one for one in self.members() if one.folder_id == folder_id), None)

    def has_beaten_since(self, number: int, since_ms: int) -> bool:
        return number not in self._node.presumed_dead

    def doubt(self) -> None:
        pass

    def _member(self, number: int, folder_id: str) -> Member:
        is_alive = number not in self._node.presumed_dead
        return Member(number, folder_id, str(number), "", "", "running", 1, is_alive)


class Node:
    """One life of one broker. `is_frozen`: it does nothing, and answers nobody. `doing`: the steps
    of it that have begun and not ended, the last one last. `has_led`: its former life ended as a
    leader, perhaps with a log start that nobody has looked at since. `disk_failed`: once is enough.
    """

    has_led = disk_failed = False

    def __init__(self, world: World, number: int, path: Path) -> None:
        self.world, self.number, self.path, self.place = world, number, path, world.place
        self.is_dead = self.is_frozen = self.is_cut_off = self.is_in_disk = False
        self.presumed_dead: set[int] = set()
        self.doing: list[str] = ["start"]
        self.work, self.appends = Queue(), Queue()
        self.fetchers: dict[int, Fetcher] = {}
        self.folder = DataFolder(path)
        self.settings = BrokerSettings(
            data_dir=path,
            disk_reserve_bytes=0,
            cache_bytes=1 << 20,
            cluster_join=True,
            log_cleaner_dedupe_buffer_bytes=1 << 16,
            session_timeout_ms=SESSION_MS,
            replica_lag_time_max_ms=LAG_MS,
            replica_fetch_max_bytes=world.fetch_max_bytes,
        ).resolve()
        clock = world.clock
        self.line: Any = Line(self, world.store)
        self.bucket = Bucket(
            self.folder,
            self.line,
            self.settings,
            clock=clock,
            boot_clock=clock,
            pause=self.pause,
        )
        self.bucket.store_status.traits = StoreTraits(checks_checksums=True)
        self.opener = LogOpener(
            self.folder,
            self.settings,
            self.bucket,
            self.appends.start,
            clock=clock,
            check_room=lambda: None,
        )
        self.topics = LiveTopics(self.folder, self.opener, clock=clock)
        self.store_writer = SteppedWriter(self, self.line, Queue)
        self.replicas = Replicas(
            self.folder,
            Sightings(self),  # type: ignore[arg-type]
            self.topics,
            self.bucket,
            Network(self),  # type: ignore[arg-type]
            opener=self.opener,
            settings=self.settings,
            store_writer=self.store_writer,
            on_moved=lambda partition: None,
            gone=lambda record, number: LeaderUnknown("led elsewhere", retry_after_s=1),
            name=partial(world.send_name, self),
            tell=partial(world.send_leads, self),
            timing=Timing(clock, monotonic=clock, pause=self.pause),
            threads=self.work,
            start_fetching=self._begin_fetching,
        )
        hand_over: Any = HandOver(self.topics, None, offload=None, not_here=None)  # type: ignore[arg-type]
        self.first_sets = FirstSets(self.topics, self.replicas, hand_over)
        self.janitor = Janitor(
            self.topics,
            self.settings,
            clock=clock,
            holes=Holes(self.topics.compaction_offsets),
            failures=TaskFailures(),
        )
        self.compactor = Compactor(
            self.topics,
            self.settings,
            clock=clock,
            failures=TaskFailures(),
            rehydrate=Rehydrator(
                self.bucket,
                scratch=self.folder.scratch("bring-back"),
                clock=clock,
                check_room=_has_room,
            ),
        )
        self.janitor.close()
        self.janitor._trims = _Trims()  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.path.name

    def open(self) -> None:
        self.topics.open_all(take_over=False, cluster=_InCluster(self.replicas))
        self.topics.checkpoints.save()

    def know(self, record: TopicRecord) -> None:
        self.topics.follow_topic(record)

    def settle(self) -> None:
        """As `Settling.settle_all` for a place that another speaks of: a replica, or its alone."""
        if self.replicas.has(self.place):
            self.replicas.settle(self.place, is_named=True)
            return
        was_replica = self.replicas.keeps(self.place)
        if self.replicas.settle(self.place, is_named=True) or was_replica:
            return
        self.topics.settle(*self.place)

    def _begin_fetching(self, fetcher: Fetcher) -> None:
        self.fetchers[fetcher.node_id] = fetcher

    def pause(self, seconds: float) -> None:
        self.world.now_ms += max(1, round(seconds * 1000))
        self.world.pass_time(self, self.may_go_on)

    # --- what there is ----------------------------------------------------------------------------

    @property
    def replica(self) -> Replica | None:
        return self.replicas._replicas.get(self.place)

    @property
    def alone(self) -> Partition | None:
        """The partition, if it is this folder's alone."""
        found = None if self.replica is not None else self.topics._by_id.get(self.place[0])
        return None if found is None else found.partitions.get(self.place[1])

    @property
    def partition(self) -> Partition | None:
        replica = self.replica
        return self.alone if replica is None else replica.partition

    @property
    def may_go_on(self) -> bool:
        """Whether other threads of this node may run while this one waits: their locks are free."""
        return self.doing[-1:] == ["work"] and not self._holds_lock()

    def _holds_lock(self) -> bool:
        replica = self.replica
        return replica is not None and replica.lock._is_owned()  # type: ignore[attr-defined]

    @property
    def is_stepping(self) -> bool:
        replica = self.replica
        return replica is not None and replica.stepping.locked()

    def answer(self, request: ReplicaFetch) -> FetchedRows:
        taken = self.replicas.take_fetch(request)
        if taken is None:
            return FetchedRows(NO_SESSION, [])
        found = []
        for one in taken.answer(is_over=False) or taken.answer(is_over=True):
            body = b"".join(piece.read() for piece in one.slices)
            close_all(one.slices)
            found.append(Fetched(one.answer, memoryview(body)))
        return FetchedRows(taken.session_id, found)

    def has(self, name: str) -> bool:
        """Whether it has something of the kind to do."""
        if name in LEADERS:
            return self.partition is not None
        if name == "fetch":
            return bool(self.fetchers)
        if name == "flush":
            return self.store_writer.has_more
        if name == "put":
            return bool(self.store_writer.puts.calls)
        return name not in ("work", "appends") or bool(getattr(self, name).calls)

    # --- what it does in the background -----------------------------------------------------------

    def copy(self) -> None:
        """As the copier does."""
        partition = self.partition
        if partition is None or not partition.has_bucket or partition.leadership_lost:
            return
        partition.claim()
        upkeep = partition.upkeep
        upkeep.resolve_failed_commit()
        upkeep.follow_log_start()
        pending, compaction = upkeep.pending_uploads(), partition.compaction
        if not partition.is_mirrored and (not pending or compaction.may_be_followed):
            compaction.follow(stopping=lambda: False)
        elif pending:
            upkeep.upload_segment(pending[0])

    def compact(self) -> None:
        """As the compactor does."""
        self.compactor._backoff.clear()
        self.compactor.run_round()

    def keep_up(self) -> None:
        """As the janitor does."""
        partition = self.partition
        if partition is not None:
            self.janitor.maintain(partition)

    def release(self) -> None:
        """The process has ended, and the system closes its files."""
        self.opener.close_timer()
        replica, alone = self.replica, self.alone
        with suppress(TierlogError, OSError):
            if replica is not None:
                replica.log.abandon()
            elif alone is not None:
                alone.upkeep.abandon_log()
        self.folder.close()
        self.bucket.close()


def _has_room(_: int) -> None:
    pass


class _Trims:
    """`BucketTrims` without its threads."""

    def commit_trim(self, partition: Partition) -> None:
        partition.upkeep.follow_log_start()


class _InCluster:
    topics: Any = None  # no test creates any

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas

    def error_for(self, record: TopicRecord, number: int) -> TierlogError:
        return LeaderUnknown(f"{record.name}-{number}", retry_after_s=1)

    def log_end_offset(self, record: TopicRecord, number: int) -> int | None:
        return None
