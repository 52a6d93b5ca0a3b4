"""The bucket as a replica, in the world of `replica_world`: a broker's writer without its threads,
and what must hold of what it wrote.

* An object is written when the world says so, and lands when the world says so: in any order, once
  its sender has given up, or after its broker has died.
* I1 for STORE: what a closed chain would show continues the manifest up to all that is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.replica_truth import Batch, Truth, Wrong, batch_of
from tierlog.broker.replication.in_sync import STORE
from tierlog.broker.replication.store_writer import Feed, StoreWriter
from tierlog.broker.replication.write_ahead_chain import ChainWriter, chain_folder
from tierlog.broker.replication.write_ahead_garbage import WriteAheadGarbage
from tierlog.cold_tier.write_ahead_object import Place, StoredPart, read_parts
from tierlog.manifest.replica_sets import ReplicaSet
from tierlog.object_store.memory import MemoryStore
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.checkpoint_files import parse_topic_id

if TYPE_CHECKING:
    from tests.simulation.replica_node import Node
    from tierlog.object_store.store import ObjectStore

OBJECT_BYTES = 700  # so that a part does not have all
TURNS_MAX = 10  # while a claim waits


class NotYet(BaseException):
    """An object is to be sent once more, when the world says so."""


def _not_yet(_: float) -> None:
    raise NotYet


class SteppedWriter(StoreWriter):
    def __init__(self, node: Node, store: ObjectStore, queue: Callable[[], Any]) -> None:
        self._node, self._queue = node, queue
        self.puts = queue()
        super().__init__(
            store,
            node.folder.owner,
            flush_ms=1,
            object_max_bytes=OBJECT_BYTES,
            open_chain=self._open_queued,
            start=lambda run: None,
            monotonic=node.world.clock,
        )

    def _open_queued(self, store: ObjectStore, folder: str) -> ChainWriter:
        self.puts = self._queue()
        return ChainWriter(store, folder, threads=self.puts, pause=_not_yet)

    @property
    def has_more(self) -> bool:
        return self._writer is not None and self._may_write()

    def write(self) -> None:
        if self.has_more:
            self._write_next()

    def land(self, at: int) -> None:
        calls, call = self.puts.calls, self.puts.calls[at]
        del calls[at]
        try:
            call()
        except NotYet:
            calls.append(call)

    def wait_until_stored(self, feed: Feed, end_offset: int, *, patience_s: float) -> bool:
        for _ in range(TURNS_MAX):
            if feed.is_over or feed.stored >= end_offset:
                break
            self.write()
            while self.puts.calls and not feed.is_over and self._node.world.random.random() < 0.9:
                self.land(self._node.world.random.randrange(len(self.puts.calls)))
        return super().wait_until_stored(feed, end_offset, patience_s=0)

    def in_flight(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What may land although its broker has died."""
        for call in self.puts.calls:
            key, body, _ = call.args
            yield key, partial(self._node.world.store.put, key, body, if_absent=True)


def collect(node: Node) -> None:
    """As a broker does with its own folder's objects."""
    garbage = WriteAheadGarbage(
        node.line,
        uploaded_end=lambda *_: _uploaded_end(node),
        follow_topics=lambda: None,
    )
    garbage.collect(node.folder.owner, ended=node.replicas.is_ended_chain)


def _uploaded_end(node: Node) -> int:
    """As `Cluster` tells it."""
    if node.partition is not None:
        return node.partition.cold_end_offset
    cold = node.bucket.find_cold_log(node.world.record, 0)
    manifest = None if cold is None else cold.load_newest()
    return 0 if manifest is None else manifest.end_offset


def check_store(truth: Truth, store: MemoryStore, topic_id: str) -> None:
    """Raises Wrong if STORE is a member, and lacks what is committed."""
    newest, manifest = truth.newest, truth.manifest
    if newest is None or STORE not in newest.in_sync:
        return
    end = start = 0
    if manifest is not None:
        end, start = manifest.end_offset, manifest.log_start_offset
    found = dict[int, Batch]()
    uploaded = end
    for part, batches in _stored(store, newest, Place(parse_topic_id(topic_id).bytes, 0)):
        if part.base_offset <= end:
            found |= {one.base_offset: one for one in batches}
            end = max(end, part.end_offset)
    if end < truth.end:
        raise Wrong(f"STORE is in sync with {end}, committed is {truth.end}")
    for at, batch in truth.committed.items():
        if at >= uploaded and at not in found and batch.next_offset > truth.log_start:
            raise Wrong(f"STORE is in sync without offset {at}")
        if at in found and found[at].body != batch.body:
            raise Wrong(f"STORE has another batch at {at}: {found[at]} {batch}")
    if start < truth.trimmed:
        raise Wrong(f"STORE begins at {start}, trimmed to {truth.trimmed}")


def _stored(
    store: MemoryStore, newest: ReplicaSet, place: Place
) -> list[tuple[StoredPart, list[Batch]]]:
    """What the chain has under the epoch in force, by offset."""
    assert newest.wal is not None, "it is STORE's"
    found: list[tuple[StoredPart, list[Batch]]] = []
    for stat in store.list(chain_folder(newest.wal), limit=10_000):
        body = store.get(stat.key, max_bytes=stat.size_bytes)
        parts = read_parts(lambda a, b: body[a:b], size_bytes=len(body), file=stat.key)  # noqa: B023
        for part in parts:
            if part.place == place and part.epoch == newest.leader_epoch:
                data = body[part.position : part.position + part.size_bytes]
                found.append((part, [batch_of(data, one) for one in iter_headers(data)]))
    return sorted(found, key=lambda one: one[0].base_offset)
