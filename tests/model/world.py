"""One partition, some replicas, and a bucket: all that is on disk, in memory and on the way.

* The bucket has two chains: the versions of the set, which say who leads, and the manifest.
* A `World` is a value: a step makes another one. So a walk can go anywhere, and a search knows
  where it has been.
* `committed`, `trimmed` and `Replica.asked` are known to the checks alone: what was ever shown to
  readers, what was ever answered to a trim, and what was committed when a read began.
* A version, a write-ahead object or a fetch that was sent is on the way for ever. It may land at
  any time, twice, after its sender's death, or never.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from tierlog.broker.replication.election import FIRST_GENERATION, Kept
from tierlog.broker.replication.in_sync import STORE, Fetch, InForce, Leadership
from tierlog.broker.replication.write_ahead import Slice

NODES = "ABC"
WINDOW = 2  # write-ahead objects on their way
Record = tuple[int, int]  # (epoch, a number that no other record has)
Log = tuple[Record, ...]


class Violation(AssertionError):
    """Something that the protocol promises does not hold."""


class Role(StrEnum):
    IDLE = "idle"
    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Manifest(NamedTuple):
    """A version of the manifest, whose fence is its own; `cold`: the records that it names."""

    version: int = 0
    epoch: int = 0
    owner: str = ""
    cold: Log = ()
    log_start: int = 0


class WalObject(NamedTuple):
    """None in place of `slice`: a fence."""

    slice: Slice | None
    records: Log = ()
    asked: int = 0  # the writer's `round` when it was written
    log_start: int = 0  # that the manifest had then


class Writer(NamedTuple):
    """A leader's end of its write-ahead chain. `sent`: objects that are not acknowledged yet."""

    chain: str
    next_number: int = 0
    end_offset: int = 0  # of what was sent
    acked: int = 0  # up to where it is acknowledged
    sent: tuple[tuple[int, WalObject], ...] = ()
    is_fenced: bool = False


class Reading(NamedTuple):
    """A claim on behalf of the bucket, in preparation. `listed`: by number, is it a fence."""

    version: InForce
    manifest: Manifest  # when it began
    listed: tuple[tuple[int, bool], ...] | None = None


class Replica(NamedTuple):
    """From `alive` on all of it is gone with the process. `log` keeps what was deleted: what is
    below `log_start`, and what is below `local_start` and in the bucket.
    """

    node: int
    kept: Kept
    log: Log = ()
    flushed: int = 0
    log_start: int = 0
    local_start: int = 0
    shown: int = 0  # the high watermark's checkpoint
    life: int = 0
    alive: bool = True
    role: Role = Role.IDLE
    epoch: int = 0  # of the leader followed
    leader: str | None = None
    answered: int = 0
    lead: Leadership | None = None
    sent: InForce | None = None
    manifest: Manifest | None = None  # claimed by this leader, or committed since, and read back
    offered: Manifest | None = None  # sent, and not decided
    round: int = 0  # how often it was asked for a linearizable read
    asked: tuple[int, int] | None = None  # that round, and how much was committed then
    writer: Writer | None = None
    reading: Reading | None = None

    @property
    def me(self) -> str:
        return self.kept.replica_id

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """`leader-epoch-checkpoint`."""
        return epochs_of(self.log)


class Budget(NamedTuple):
    """How often each may happen yet."""

    records: int = 6
    claims: int = 6
    changes: int = 6
    crashes: int = 4
    losses: int = 1
    reassignments: int = 0
    trims: int = 0
    reads: int = 0
    offloads: int = 0
    deletions: int = 0
    collections: int = 2
    wal_objects: int = 0
    fences: int = 0
    resignations: int = 2
    hints: int = 6
    alone: int = 2


class World(NamedTuple):
    replicas: tuple[Replica, ...]
    chain: tuple[InForce, ...]
    left: Budget
    min_in_sync: int = 2
    has_store: bool = False  # the bucket may be a member
    collected: int = 0  # version numbers up to here are free again
    stray: frozenset[InForce] = frozenset()  # landed in such a number
    puts: frozenset[InForce] = frozenset()
    manifest: Manifest = Manifest()
    manifest_puts: frozenset[Manifest] = frozenset()
    fetches: frozenset[Fetch] = frozenset()
    wals: tuple[tuple[str, tuple[tuple[int, WalObject], ...]], ...] = ()
    wal_puts: frozenset[tuple[str, int, WalObject]] = frozenset()
    next_record: int = 1
    committed: Log = ()
    trimmed: int = 0

    @property
    def newest(self) -> InForce:
        return self.chain[-1]

    @property
    def cold(self) -> Log:
        return self.manifest.cold

    def with_replica(self, replica: Replica, **changes: object) -> World:
        n = replica.node
        replicas = (*self.replicas[:n], replica, *self.replicas[n + 1 :])
        return self._replace(replicas=replicas, **changes)

    def wal(self, chain: str) -> dict[int, WalObject]:
        return next((dict(objects) for name, objects in self.wals if name == chain), {})

    def with_wal(self, chain: str, objects: dict[int, WalObject]) -> World:
        others = [item for item in self.wals if item[0] != chain]
        return self._replace(wals=tuple(sorted([*others, (chain, tuple(objects.items()))])))


def new_world(
    nodes: int = 3,
    *,
    left: Budget | None = None,
    min_in_sync: int = 2,
    in_sync: str = "ABC",
    replicas: str = "ABC",
    with_store: bool = False,
) -> World:
    """Nobody leads yet; the nodes in `in_sync` are members of the set of version 1, and those in
    `replicas` are to have the partition.
    """
    members = {f"{name}.{FIRST_GENERATION}" for name in in_sync[:nodes]}
    members |= {STORE} if with_store else set()
    wanted = frozenset(NODES.index(name) for name in replicas[:nodes])
    first = InForce(1, 0, None, wanted, frozenset(members))
    there = tuple(
        Replica(n, Kept(f"{NODES[n]}.{FIRST_GENERATION}", version=1, members=first.in_sync))
        for n in range(nodes)
    )
    return World(there, (first,), left or Budget(), min_in_sync, with_store)


def node_of(member: str) -> int:
    return NODES.index(member[0])


def epochs_of(log: Log) -> list[tuple[int, int]]:
    starts: list[tuple[int, int]] = []
    for offset, (epoch, _) in enumerate(log):
        if not starts or starts[-1][0] != epoch:
            starts.append((epoch, offset))
    return starts


def agreed(one: Log, other: Log) -> int:
    """How many records both begin with."""
    both = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))
