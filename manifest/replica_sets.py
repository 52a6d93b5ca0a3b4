"""Who leads a replicated partition, and which replicas are in sync:
`<topic>/<id>/<partition>/replicas/<version>.json`, kind `replica-set`.

* It is the truth about leadership, as Kafka's controller has it (KIP-497, KIP-966). A claim and a
  change of the set are both the next version, created once, so one of two comes to be.
* Apart from the manifest, since a thousand of these have to be written in seconds when a broker
  fails. The manifest has its own fence, and is claimed by whoever leads.
* The newest whole version counts. Older ones are deleted, so a number may be free again to a writer
  that slept: who writes one looks afterwards whether it is the newest (`is_newest`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from tierlog.manifest.keys import NODE_ID_MAX, PartitionKeys
from tierlog.manifest.store import random_name
from tierlog.manifest.versions import CreateOutcome, VersionChain
from tierlog.object_store.store import ObjectStore
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import CorruptManifest

KIND_REPLICA_SET: Final = "replica-set"
MAX_REPLICA_SET_BYTES: Final = 64 * 1024
VERSIONS_KEPT: Final = 4
STORE: Final = "store"  # no replica's id: they have a dot


class ReplicaSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version. `replicas`: node ids, the preferred leader first. `in_sync`, `leader`: replica
    ids (`broker.replication.election`); no leader: whoever is in sync may claim at once. `target`:
    the replicas that there are to be, until there are; `original`: those that there were before.
    `wal`: the write-ahead chain that makes the bucket, STORE, one of those in sync.
    """

    topic_id: str
    partition: int
    version: int
    leader_epoch: int
    leader: str | None
    replicas: tuple[int, ...]
    in_sync: tuple[str, ...]
    target: tuple[int, ...] = ()
    original: tuple[int, ...] = ()
    wal: str | None = None
    nonce: str = ""


def first_set(
    place: tuple[str, int], *, epoch: int, replicas: Iterable[int], in_sync: Iterable[str]
) -> ReplicaSet:
    """Version 1 of a partition's: nobody leads."""
    return ReplicaSet(
        topic_id=place[0],
        partition=place[1],
        version=1,
        leader_epoch=epoch,
        leader=None,
        replicas=tuple(replicas),
        in_sync=tuple(sorted(in_sync)),
        nonce=random_name(),
    )


class NewestSet(NamedTuple):
    """`taken`: the highest version number in use, above that of the set if later ones are void."""

    taken: int
    found: ReplicaSet | None


class ReplicaSets:
    """Of one partition. Thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        keys: PartitionKeys,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._keys = keys
        self._chain = VersionChain(
            store, keys.replica_sets, max_bytes=MAX_REPLICA_SET_BYTES, pause=pause
        )

    def load_newest(self) -> NewestSet:
        """Raises CorruptManifest, StoreUnavailable."""
        newest = self._chain.read_newest()
        if newest.version == 0:
            return NewestSet(newest.taken, None)
        file = self._chain.key(newest.version)
        found = sealed_json.decode(
            newest.data, kind=KIND_REPLICA_SET, file=file, document=ReplicaSet
        )
        place = (self._keys.topic_id, self._keys.partition, newest.version)
        if (found.topic_id, found.partition, found.version) != place:
            raise CorruptManifest(
                f"is version {found.version} of {found.topic_id}-{found.partition}", file=file
            )
        if problem := _problem(found):
            raise CorruptManifest(problem, file=file)
        return NewestSet(newest.taken, found)

    def create_version(self, after: ReplicaSet) -> CreateOutcome:
        """Create this version, unless its number is taken. Repeat it with the same nonce after
        OutcomeUnknownError, and StoreUnavailable: it may be there, or appear later.
        """
        assert after.nonce
        assert not _problem(after)
        body = sealed_json.encode(after, kind=KIND_REPLICA_SET)
        return self._chain.create_version(after.version, body)

    def is_newest(self, version: int) -> bool:
        """One LIST. Older versions are deleted."""
        versions = [stat.version for stat in self._chain.stats(after=max(0, version - 1000))]
        if versions[-1:] != [version]:
            return False
        self._chain.delete_versions(versions[:-VERSIONS_KEPT])
        return True


def _problem(one: ReplicaSet) -> str:
    """Why no broker of ours would write it; empty if one would."""
    for what in ("replicas", "target", "original"):
        node_ids: tuple[int, ...] = getattr(one, what)
        is_sound = all(0 <= node_id <= NODE_ID_MAX for node_id in node_ids)
        if not is_sound or len(set(node_ids)) < len(node_ids):
            return f"{what}: {list(node_ids)}"
    if not one.replicas:
        return "it has no replicas"
    if not one.in_sync or len(set(one.in_sync)) < len(one.in_sync):
        return f"replicas in sync are {list(one.in_sync)}"
    if (STORE in one.in_sync) is (one.wal is None):
        return f"replicas in sync are {list(one.in_sync)}, with the chain {one.wal}"
    if one.leader is not None and one.leader not in one.in_sync:
        return f"leader {one.leader} is not in sync"
    if one.version < 1 or one.leader_epoch < 0:
        return f"version {one.version}, leader epoch {one.leader_epoch}"
    return ""
