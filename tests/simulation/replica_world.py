"""Brokers' replicas of one partition, with everything that may happen to them: one seeded source of
chance says whose step is next, what fails, what is lost and for how long everything takes.

* A step is a whole one of a broker's background work, a client's call, or a fault. Wherever it
  waits for the bucket, the disk or another broker, others may go on (`pass_time`), for one step or
  for many: then the broker that waits is as good as stopped by SIGSTOP, and goes on with what it
  knew.
* A request to the bucket may fail before or after its effect, or land once its sender has given up.
* In a seventh of the seeds the partition is one folder's alone at first, and gets a set later. In
  another seventh it is compacted, by whoever leads. In another the bucket is a replica, always or
  as a stand-in: then all disks may be lost.
* A killed broker finds what a process leaves, or what a machine keeps that loses power. A disk may
  fail to sync something: its broker is to acknowledge nothing of it, and somebody else to lead.
"""

from __future__ import annotations

import errno
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import structlog

from tests.simulation.failing_disk import SYNCS, FailingDisk
from tests.simulation.replica_clients import Clients
from tests.simulation.replica_compacted import KEYS, CompactedTruth
from tests.simulation.replica_healing import finish
from tests.simulation.replica_node import (
    LAG_MS,
    NEVER_MS,
    SESSION_MS,
    Killed,
    Node,
    deliver,
)
from tests.simulation.replica_store import check_store, collect
from tests.simulation.replica_truth import Shown, Truth, Wrong, batches_of, producers_of
from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.membership.members import Member
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.replica import Replica, Role
from tierlog.broker.replication.in_sync import STORE
from tierlog.broker.replication.messages import ReplicaFetch
from tierlog.hot_tier.log_config import LogConfig
from tierlog.manifest.keys import PartitionKeys
from tierlog.object_store.memory import MemoryStore
from tierlog.record_format.errors import TierlogError

TOPIC, TOPIC_ID = "t", "MjD0UKSJT2qa6zQLS6M5HA"
DEPTH_MAX = 3
COMPACTED = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": 0.0,
    "delete.retention.ms": NEVER_MS,
    "retention.bytes": -1,
}


class Store(MemoryStore):
    """`changes`: how often something was written."""

    changes = 0

    def put(self, key: str, body: bytes | memoryview, **options: Any) -> Any:
        done = super().put(key, body, **options)
        self.changes += 1
        return done


class World:
    def __init__(self, seed: int, root: Path, disk: FailingDisk, trace: list[str]) -> None:
        self.random, self.root, self.disk, self.trace = Random(seed), root, disk, trace
        random = self.random
        self.now_ms, self.depth, self.thread = 10**12, 0, threading.get_ident()
        self.clock: Callable[[], int] = lambda: self.now_ms
        self.store, self.lives = Store(), 0
        self.late: list[tuple[str, Callable[[], object]]] = []
        self.old_fetches: list[tuple[int, ReplicaFetch]] = []
        self.messages: list[tuple[int, Callable[[Node], object]]] = []
        self.cut: set[tuple[int, int]] = set()
        self.loses_messages = self.store_fails = 0.0
        self.disk_pauses = True
        # In a fifth of the seeds, by a chance of its own: the others are as they would be without.
        self.disk_chance, self.disk_fails = Random(~seed), 0.005 if seed % 5 == 4 else 0.0
        self.is_quiet = True  # until all are there
        self.fetch_max_bytes = random.choice((300, 1000, 1 << 20))
        self.count = random.choice((3, 3, 4, 5))
        factor = random.choice((2, 3, 3, 3))
        min_in_sync = {"min.insync.replicas": random.choice((1, 2, 2))}
        self.begins_alone = seed % 7 == 3
        if self.begins_alone:
            factor, min_in_sync = 1, {}
        self.is_compacted = seed % 7 == 4
        policy: dict[str, Any] = COMPACTED if self.is_compacted else {}
        self.has_store, self.store_role = seed % 7 == 5, ("always", "stand-in")[seed // 7 % 2]
        if self.has_store:
            policy = {"replication.store": self.store_role}
            factor = random.choice((1, 2, 3)) if self.store_role == "always" else factor
        self.record = TopicRecord(
            name=TOPIC,
            topic_id=TOPIC_ID,
            partitions=1,
            config={
                "segment.bytes": 1024,
                "segment.index.bytes": 480,
                "flush.ms": NEVER_MS,
                "file.delete.delay.ms": 0,
                "local.retention.bytes": random.choice((1, 2048, 4000)),
                "retention.bytes": random.choice((-1, -1, 4000)),
                "retention.ms": -1,
                "offload.max.lag.ms": -1,
                **min_in_sync,
                **policy,
            },
            created_ms=self.now_ms,
            replication_factor=factor,
            dirty=False,
        )
        self.place: TopicIdPartition = (TOPIC_ID, 0)
        keys = PartitionKeys(TOPIC, *self.place)
        truth = CompactedTruth if self.is_compacted else Truth
        self.truth = truth(self.store, keys, config=LogConfig.parse(self.record.config))
        self._changes_seen = 0
        self._store_checked = 0, 0, 0
        self._checked: dict[Node, tuple[object, ...]] = {}
        self.clients = Clients(self)
        self.folder_ids: dict[int, str] = {}
        self.nodes: list[Node | None] = [None] * self.count
        self.folders: list[Path] = []
        self.led: dict[int, bool] = {}  # by number of those that are dead, as `Node.has_led`
        self.running: list[Node] = []
        self.ended: list[Node] = []
        self.wrong: Wrong | None = None
        faults = {name: often * random.choice((0, 1, 1, 3)) for name, often in FAULTS.items()}
        steps = WORK | {name: often for name, often in faults.items() if often}
        if self.begins_alone:
            steps |= {"reassign": 6}
        if self.is_compacted:
            steps |= {"compact": 4, "trim": 0}
        if self.has_store:
            steps |= STORE_WORK
        self._names, self._weights = list(steps), list(accumulate(steps.values()))
        self._likely_pause = random.choice((0.0, 0.02, 0.1))
        self.disk.before_call = self._before_disk_call

    def begin(self) -> None:
        """All brokers start, and the topic is created."""
        for number in range(self.count):
            self.folders.append(self._new_folder(number))
            self._start(number)
        factor = self.record.replication_factor
        replicas = self.random.sample(range(self.count), factor)
        first = self.nodes[0]
        assert first is not None
        if self.begins_alone:
            to, never = self.folder_ids[replicas[0]], lambda _: False
            first.bucket.assign(self.record, 0, to, may_take_from=never)
        else:
            first.replicas.create(self.record, 0, replicas, folders=self.folder_ids)
        for number in replicas:
            self.nodes[number].settle()  # type: ignore[union-attr]
        self.is_quiet = False

    # --- time -------------------------------------------------------------------------------------

    def pass_time(self, node: Node, may_go_on: bool) -> None:
        """The node waits: let others go on for a while, and itself, if its locks are free."""
        if node.is_dead:
            raise Killed
        if self.is_quiet or threading.get_ident() != self.thread or self.depth >= DEPTH_MAX:
            return
        if self.random.random() >= self._likely_pause:
            return
        was, node.is_frozen = node.is_frozen, not may_go_on or self.random.random() < 0.3
        self.depth += 1
        self.trace.append(f"  {node} waits{' frozen' if node.is_frozen else ''}")
        try:
            for _ in range(self.random.choice((1, 2, 4, 30))):
                self.step()
        finally:
            self.depth -= 1
            node.is_frozen = was
            self.trace.append(f"  {node} goes on")
        if node.is_dead:
            raise Killed

    def _before_disk_call(self, call: str) -> None:
        if not self.disk_pauses or not self.running or threading.get_ident() != self.thread:
            return
        node = self.running[-1]
        if call in ("sync_bytes", "sync_folder", "rename"):
            was, node.is_in_disk = node.is_in_disk, True
            try:
                self.pass_time(node, False)
            finally:
                node.is_in_disk = was
        elif node.is_dead:
            raise Killed
        if call in SYNCS and self._fails_now(node):
            node.disk_failed = True
            self.trace.append(f"  the disk of {node} fails: {call}")
            raise OSError(errno.EIO, f"{node}: {call}")

    def _fails_now(self, node: Node) -> bool:
        is_spared = self.is_quiet or node.doing[:1] == ["start"]  # it would not have started
        return not is_spared and self.disk_chance.random() < self.disk_fails

    @contextmanager
    def _without_pauses(self) -> Iterator[None]:
        was, self.disk_pauses = self.disk_pauses, False
        try:
            yield
        finally:
            self.disk_pauses = was

    def store_fault(self, node: Node) -> str:
        if self.is_quiet or self.random.random() >= self.store_fails:
            return ""
        return self.random.choice(("late", "lost before", "lost after"))

    # --- whose step is next -----------------------------------------------------------------------

    def step(self) -> None:
        self.now_ms += self.random.choice((1, 5, 20, 100, 300))
        name = self.random.choices(self._names, cum_weights=self._weights)[0]
        number = self.random.randrange(self.count)
        if name in FAULTS:
            self.trace.append(f"{name} {self.nodes[number] or number}")
            getattr(self, name)(number)
        elif able := [one for one in self.nodes if one and not one.is_frozen and one.has(name)]:
            self.act(self.random.choice(able), name)
        self.check()

    def act(self, node: Node, name: str) -> None:
        """One step of a node, unless it is doing something that this would wait for."""
        if node.doing and not self._is_free(node, name):
            return
        kind = "work" if name in ("work", "appends", "fetch", "hear", "put") else name
        node.doing.append(kind)
        self.running.append(node)
        self.trace.append(f"{name} {node}")
        try:
            getattr(self.clients if name in CLIENTS else self, name)(node)
        except Killed:
            assert node.is_dead, "it ends itself alone"
        except Wrong as wrong:
            self.wrong = self.wrong or wrong
        except (TierlogError, OSError) as error:
            if isinstance(error, OSError) and not node.disk_failed:
                raise
            self.trace.append(f"    {type(error).__name__}: {error}"[:150])
        finally:
            self.running.pop()
            node.doing.pop()
            if self.wrong is not None:  # a broker's own handler may have swallowed it
                raise self.wrong

    def _is_free(self, node: Node, name: str) -> bool:
        if set(node.doing) - {"work"} or node._holds_lock():
            return False
        if name in ("work", "hear"):
            return not node.is_stepping
        return name in ("appends", "fetch", "produce", "read", "resolve", "due", "flush", "put")

    # --- what brokers do --------------------------------------------------------------------------

    def due(self, node: Node) -> None:
        node.replicas.run_round()

    def work(self, node: Node) -> None:
        node.work.calls.popleft()()

    def appends(self, node: Node) -> None:
        node.appends.calls.popleft()()

    def fetch(self, node: Node) -> None:
        free = [one for one in node.fetchers.values() if not getattr(one, "is_busy", False)]
        if not free:
            return
        fetcher: Any = self.random.choice(free)
        fetcher.is_busy = True
        try:
            fetcher.fetch_once()
        finally:
            fetcher.is_busy = False

    def copy(self, node: Node) -> None:
        node.copy()

    def compact(self, node: Node) -> None:
        node.compact()

    def flush(self, node: Node) -> None:
        """Write the next object for the bucket."""
        node.store_writer.write()

    def put(self, node: Node) -> None:
        """One of those that were written lands."""
        node.store_writer.land(self.random.randrange(len(node.store_writer.puts.calls)))

    def collect(self, node: Node) -> None:
        collect(node)

    def adopt(self, node: Node) -> None:
        """It is told that only the bucket has it, rightly or not."""
        if not node.is_stepping:
            node.replicas.settle(self.place, is_named=True)

    def keys_for(self, values: Sequence[bytes]) -> list[bytes] | None:
        """Few, so that most records are superseded; by another chance than what happens."""
        if not self.is_compacted:
            return None
        return [b"k%d" % (crc32(value) % KEYS) for value in values]

    def keep_up(self, node: Node) -> None:
        node.keep_up()

    def roll(self, node: Node) -> None:
        if node.partition is not None:
            node.partition.upkeep.roll()

    def save(self, node: Node) -> None:
        node.topics.checkpoints.save()

    def prefer(self, node: Node) -> None:
        node.replicas.prefer()

    def hand_over(self, node: Node) -> None:
        partition, other = node.partition, self.random.randrange(self.count)
        if partition is None or other == node.number or node.is_stepping:
            return
        target = self._member(node, other)
        if partition.term is not None:
            node.replicas.moves.hand_over(partition, target, timeout_s=0)

    def reassign(self, node: Node) -> None:
        """Of a partition that is one folder's alone: it gets a set first."""
        partition, factor = node.partition, self.record.replication_factor
        if self.begins_alone:
            factor = self.random.choice((1, 2, 3))
        if partition is None or node.is_stepping or self.count == factor:
            return
        target = self.random.sample(range(self.count), factor)
        if partition.term is None:
            partition = node.first_sets.begin_set(partition)
        node.replicas.moves.reassign(partition, target)

    def hear(self, node: Node) -> None:
        """What another broker says that it leads; or something that it said some time ago."""
        if self.messages and self.random.random() < 0.7:
            at = self.random.randrange(len(self.messages))
            number, call = self.messages[at]
            if self.nodes[number] is node:
                del self.messages[at]
                call(node)
            return
        number = self.random.randrange(self.count)
        other = self.nodes[number]
        if other is None or other is node or other.is_frozen:
            return
        if {(number, node.number), (node.number, number)} & self.cut:
            return
        self.hear_report(node, other)

    def hear_report(self, node: Node, other: Node) -> None:
        shown = other.replicas.shown(self.place)
        if shown is None:
            return
        node.replicas.look_if_replaced(lambda _: shown.leader_epoch)
        if node.number in shown.replicas and not node.replicas.has(self.place):
            node.settle()

    def sees(self, node: Node) -> None:
        """Who it takes for dead: mostly those that are."""
        dead = {n for n, one in enumerate(self.nodes) if one is None or one.is_frozen}
        if self.random.random() < 0.1:
            dead |= {self.random.randrange(self.count)}
        node.presumed_dead = dead - {node.number}

    def send_name(self, node: Node, number: int, places: Sequence[TopicIdPartition]) -> None:
        self._send(node, number, lambda to: to.settle())

    def send_leads(self, node: Node, number: int, led: Sequence[TopicIdPartition]) -> None:
        sender = node.number
        self._send(node, number, lambda to: to.replicas.look_at(led, leader=sender))

    def _send(self, node: Node, number: int, call: Callable[[Node], object]) -> None:
        if number != node.number and (node.number, number) not in self.cut:
            self.messages = [*self.messages[-20:], (number, call)]

    def _member(self, node: Node, number: int) -> Member:
        return node.replicas._members.find_member(number)

    # --- faults -----------------------------------------------------------------------------------

    def kill(self, number: int) -> None:
        node = self.nodes[number]
        if node is None:
            return
        self.end(node, power_fails=self.random.random() < 0.6)

    def end(self, node: Node, *, power_fails: bool) -> None:
        number = node.number
        folder = self._new_folder(number, is_made=False)
        with self._without_pauses():
            self.disk.crash_broker(
                self.folders[number], folder, self.random, power_fails=power_fails
            )
        node.is_dead = True
        self.late += (one for one in node.store_writer.in_flight() if self.random.random() < 0.5)
        self.led[number] = node.has_led or (node.partition is not None)
        self.nodes[number] = None
        self.ended.append(node)
        self.folders[number] = folder

    def kill_all(self, number: int) -> None:
        for one in self.nodes:
            if one is not None:
                self.end(one, power_fails=True)

    def start(self, number: int) -> None:
        if self.nodes[number] is None:
            self._start(number)

    def _start(self, number: int) -> None:
        with self._without_pauses():
            node = Node(self, number, self.folders[number])
        self.folder_ids[number] = node.folder.owner
        node.has_led = self.led.pop(number, False)
        self.nodes[number] = node
        self.running.append(node)
        try:
            node.open()
            node.know(self.record)
            if node.topics.unsettled():
                node.settle()
        except Killed:
            assert node.is_dead
        finally:
            self.running.pop()
            node.doing.pop()
        if node.replicas._damaged:
            raise Wrong(f"{node}: {node.replicas._damaged}")

    def wipe(self, number: int) -> None:
        """It comes back with an empty disk, or without its log; not if it might be the last one
        that has what is committed.
        """
        node, newest = self.nodes[number], self.truth.newest
        if newest is None or not self._may_lose(number):
            return
        if node is not None:
            self.end(node, power_fails=False)
        if self.random.random() < 0.5:
            self.folders[number] = self._new_folder(number)
        else:
            shutil.rmtree(self.folders[number] / f"{TOPIC}-0", ignore_errors=True)
        self._start(number)

    def _may_lose(self, number: int) -> bool:
        sent = [one.replica.sent for one in self.nodes if one and one.replica and one.replica.sent]
        sets = [one.in_sync for one in (self.truth.newest, *sent) if one is not None]
        return not self.late and all(
            STORE in one or len(self._there(one) - {number}) >= 2 for one in sets
        )

    def _there(self, in_sync: Sequence[str]) -> set[int]:
        """The members' brokers that have what they said, as far as the disks say."""
        return {
            number
            for number in range(self.count)
            for one in in_sync
            if one == self.replica_id(number)
        }

    def replica_id(self, number: int) -> str | None:
        node = self.nodes[number]
        if node is not None:
            return None if node.replica is None else node.replica.kept.replica_id
        path = self.folders[number] / "tierlog/replicas" / f"{TOPIC_ID}-0.json"
        is_there = path.exists() and (self.folders[number] / f"{TOPIC}-0").exists()
        found = path.read_bytes().partition(b'"replica_id":"')[2] if is_there else b""
        return found.partition(b'"')[0].decode() or None

    def cut_link(self, number: int) -> None:
        other = self.random.randrange(self.count)
        self.cut.add((number, other))
        if self.random.random() < 0.5:
            self.cut.add((other, number))

    def heal_links(self, number: int) -> None:
        self.cut.clear()
        self.loses_messages = self.random.choice((0.0, 0.0, 0.3))

    def fail_store(self, number: int) -> None:
        self.store_fails = self.random.choice((0.1, 0.3, 1.0))
        if (node := self.nodes[number]) is not None:
            node.is_cut_off = self.random.random() < 0.3

    def heal_store(self, number: int) -> None:
        self.store_fails = 0.0
        for node in self.nodes:
            if node is not None:
                node.is_cut_off = False

    def land(self, number: int) -> None:
        if self.late:
            _, change = self.late.pop(self.random.randrange(len(self.late)))
            deliver(change)

    def hear_again(self, number: int) -> None:
        """A fetch of some time ago arrives once more."""
        if self.old_fetches:
            to, request = self.random.choice(self.old_fetches)
            node = self.nodes[to]
            if node is not None and not node.is_frozen:
                node.answer(request)

    def wait(self, number: int) -> None:
        self.now_ms += self.random.choice((SESSION_MS, LAG_MS, 5_000))

    def _new_folder(self, number: int, *, is_made: bool = True) -> Path:
        self.lives += 1
        path = self.root / f"{'abcde'[number]}{self.lives}"
        if is_made:
            (path / "tierlog").mkdir(parents=True)
            stat = path.stat()
            owner = f"{path.name} {stat.st_dev}:{stat.st_ino}"
            (path / "tierlog/owner").write_text(owner)
        return path

    # --- after every step -------------------------------------------------------------------------

    def check(self) -> None:
        try:
            self._check()
        except Wrong as wrong:
            self.wrong = self.wrong or wrong
            raise

    def _check(self) -> None:
        is_new = self.store.changes != self._changes_seen
        if is_new:
            self._changes_seen = self.store.changes
            self.truth.note_bucket()
        whole = [one for one in self.nodes if one is not None and not one.is_in_disk]
        for node in whole:
            if (alone := node.alone) is not None:
                self._check_alone(node, alone)
        self._check_store()
        there = [(one, replica) for one in whole if (replica := one.replica) is not None]
        for node, replica in sorted(there, key=_leads_not):
            self._check_node(node, replica, is_new=is_new)

    def _check_store(self) -> None:
        now = self.store.changes, self.truth.end, self.truth.trimmed
        if self.has_store and now != self._store_checked:
            self._store_checked = now
            check_store(self.truth, self.store, TOPIC_ID)

    def _check_alone(self, node: Node, partition: Partition) -> None:
        log = partition._log
        if log.offline or log._state.closing:
            return
        self.truth.check_replica(
            Shown(
                str(node),
                "",
                batches_of(log),
                log.flushed_end,
                log.high_watermark,
                log.log_start_offset,
                log.first_local_offset,
                log.leader_epoch,
                True,
                True,
                producers_of(log),
            )
        )
        node.has_led = False

    def _check_node(self, node: Node, replica: Replica, *, is_new: bool) -> None:
        if replica.role is Role.OFFLINE:
            if not node.disk_failed:
                raise Wrong(f"{node} is offline")
            return  # there may be half a log
        log, term = replica.log, replica.term
        now = (
            log,
            log.log_end_offset,
            log.flushed_end,
            log.high_watermark,
            log.first_local_offset,
            log.log_start_offset,
            log.epochs,
            log.sealed.swap_sequence,
            None if term is None else (term.epoch, term.is_settled),
        )
        if not is_new and self._checked.get(node) == now:
            return
        self._checked[node] = now
        self.truth.check_replica(
            Shown(
                str(node),
                replica.kept.replica_id,
                batches_of(log),
                log.flushed_end,
                log.high_watermark,
                log.log_start_offset,
                log.first_local_offset,
                None if term is None else term.epoch,
                term is not None and term.is_settled,
                term is not None or node.has_led,
                producers_of(log),
            )
        )
        node.has_led = False

    def close(self) -> None:
        self.disk.heal()
        self.disk.before_call = lambda call: None
        for node in (*self.nodes, *self.ended):
            if node is not None:
                node.release()


WORK = {
    "due": 6,
    "work": 14,
    "appends": 12,
    "fetch": 20,
    "produce": 10,
    "resolve": 5,
    "read": 2,
    "hear": 4,
    "sees": 3,
    "copy": 3,
    "keep_up": 2,
    "roll": 1,
    "save": 1,
    "trim": 2,
    "hand_over": 1,
    "prefer": 1,
    "reassign": 1,
}
STORE_WORK = {"due": 14, "work": 24, "flush": 16, "put": 24, "collect": 1, "adopt": 1}
FAULTS = {
    "kill": 1.0,
    "kill_all": 0.1,
    "start": 5,
    "wipe": 0.4,
    "cut_link": 1.0,
    "heal_links": 1.0,
    "fail_store": 0.7,
    "heal_store": 1.5,
    "land": 1.0,
    "hear_again": 1.0,
    "wait": 1.5,
}


CLIENTS = ("produce", "resolve", "read", "trim")


def _leads_not(there: tuple[Node, Replica]) -> bool:
    return there[1].partition is None


class Lines:
    """Where log lines go: to the trace. One that says that there is a bug ends the run."""

    def __init__(self, trace: list[str]) -> None:
        self._trace = trace

    def __call__(self, _: object, level: str, event: dict[str, Any]) -> Any:
        is_bug = event.pop("exc_info", False)
        text = " ".join(f"{key}={value}" for key, value in event.items())
        self._trace.append(f"    [{level}] {text}")
        if is_bug:
            self._trace.append(traceback.format_exc())
            raise Wrong(f"a bug: {text}")
        raise structlog.DropEvent


def run_seed(seed: int, root: Path, disk: FailingDisk, *, steps: int, trace: list[str]) -> None:
    """Raises Wrong, and whatever else goes wrong. `trace` is what has happened until then."""
    disk.forget()
    root.mkdir(parents=True)
    before = structlog.get_config()
    structlog.configure(processors=[Lines(trace)])
    world = World(seed, root, disk, trace)
    try:
        world.begin()
        for _ in range(2 * steps if world.has_store else steps):
            world.step()
        finish(world)
    finally:
        world.close()
        structlog.configure(**before)
        shutil.rmtree(root)
