"""What is known about a replicated partition, as plain lists, and what must hold after every step.

| I1  | a member of the set in force has, flushed, all that is committed, and each answered trim   |
|     | and the producers of all that is committed above the log start, and of nothing else        |
| I2  | the leader in force has all that is committed                                              |
| I3  | what any leader shows, deposed or not, is a beginning of what is committed                 |
| I4  | offset and epoch determine a batch, byte for byte                                          |
| I5  | what the manifest names is committed, and so is its log start                              |
| I6  | what a replica deleted from its disk is in the manifest, or below a leader's log start     |
| I7  | the manifest's epochs rise, and each is one that its owner was elected under               |
| R3  | the set is never made smaller than the minimum                                             |
| R8  | a leader in force that knows its end shows all that was committed when it was elected      |

Besides: what was acknowledged is where it was said to be, and no producer's batch is there twice.
Not counting those below the log start: as in Kafka, a replica that begins there never saw them.
"""

from __future__ import annotations

from typing import NamedTuple

from tierlog.broker.replicas.replica import folder_of
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.replica_sets import ReplicaSet, ReplicaSets
from tierlog.manifest.state import Manifest
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.object_store.memory import MemoryStore
from tierlog.record_format.batch import BatchHeader, iter_headers, parse_header


class Wrong(AssertionError):
    """Something that the protocol promises does not hold."""


class Batch(NamedTuple):
    base_offset: int
    next_offset: int
    epoch: int
    producer: tuple[int, int]  # id and base sequence
    body: bytes


class Shown(NamedTuple):
    """One replica as it is now."""

    name: str
    replica_id: str
    batches: list[Batch]
    flushed_end: int
    high_watermark: int
    log_start_offset: int
    first_local_offset: int
    led_epoch: int | None  # None: it does not lead
    is_settled: bool
    has_led: bool  # it leads, or was killed while it led, and was not looked at since
    producers: dict[int, tuple[int, int]]  # by id: last sequence and offset


def producers_of(log: PartitionLog) -> dict[int, tuple[int, int]]:
    last = ((one.producer_id, one.batches[-1]) for one in log.producers() if one.batches)
    return {number: (batch.last_sequence, batch.last_offset) for number, batch in last}


def batch_of(body: bytes, header: BatchHeader) -> Batch:
    producer = (header.producer_id, header.base_sequence)
    data = body[header.position : header.end_position]
    return Batch(header.base_offset, header.next_offset, header.leader_epoch, producer, data)


def batches_of(log: PartitionLog) -> list[Batch]:
    """All that its local segments have, flushed or not."""
    found: list[Batch] = []
    offset = log.first_local_offset
    while offset < log.log_end_offset:
        read = log.read_for_replica(offset, max_bytes=1 << 20)
        try:
            body = b"".join(piece.read() for piece in read.slices)
        finally:
            read.close()
        if not body:
            break
        found += (batch_of(body, one) for one in iter_headers(body))
        offset = found[-1].next_offset
    return found


class Truth:
    """`committed`: batches by base offset; `acked`: producers' ids and sequences by base offset."""

    def __init__(self, store: MemoryStore, keys: PartitionKeys, *, config: LogConfig) -> None:
        self._sets = ReplicaSets(store, keys)
        self._manifests = ManifestStore(store, keys, StoreOptions(clock=lambda: 0))
        self._config = config
        self.committed: dict[int, Batch] = {}
        self.committed_end = self.trimmed = 0
        self.log_start = 0  # the highest that a leader had
        self.acked: dict[int, tuple[int, int]] = {}
        self.acked_end = 0
        self.read: set[int] = set()  # base offsets
        self._by_epoch: dict[tuple[int, int], bytes] = {}
        self._last: dict[int, tuple[int, int]] = {}  # by producer: last sequence, base offset
        self._whose: dict[int, int] = {}  # producers by the last offsets of their batches
        self._producers: dict[tuple[int, int], int] = {}
        self._elected: dict[int, str] = {}  # replica ids by epoch
        self._alone_until = 0  # the last epoch in which the partition was one folder's alone
        self._committed_before: dict[int, int] = {}  # by epoch: up to where, when it was elected
        self.newest: ReplicaSet | None = None
        self.manifest: Manifest | None = None

    # --- what happens -----------------------------------------------------------------------------

    def acknowledge(self, base_offset: int, next_offset: int, producer: tuple[int, int]) -> None:
        if self.acked.setdefault(base_offset, producer) != producer:
            raise Wrong(f"offset {base_offset} is acknowledged twice")
        there = self.committed.get(base_offset)
        if there is not None and there.producer != producer:
            raise Wrong(f"offset {base_offset} is acknowledged to {producer}, and is {there}")
        self.acked_end = max(self.acked_end, next_offset)

    @property
    def end(self) -> int:
        return max(self.committed_end, self.acked_end)

    # --- the bucket -------------------------------------------------------------------------------

    def note_bucket(self) -> None:
        """Something was written there."""
        newest = self._sets.load_newest().found
        if newest is not None and newest != self.newest:
            self._note_set(newest)
        manifest = self._manifests.load_manifest()
        if manifest is not None and manifest != self.manifest:
            self._note_manifest(manifest)

    def _note_set(self, newest: ReplicaSet) -> None:
        before, self.newest = self.newest, newest
        if before is None:
            self._alone_until = newest.leader_epoch
        wanted = newest.replicas
        if newest.target:
            wanted = min(newest.target, newest.original, key=len)
        least = self._config.effective_min_in_sync(len(wanted))
        if before is not None and len(newest.in_sync) < min(least, len(before.in_sync)):
            raise Wrong(f"the set shrinks to {newest.in_sync}, below {least}")
        if newest.leader is None:
            return
        if self._elected.setdefault(newest.leader_epoch, newest.leader) != newest.leader:
            raise Wrong(f"epoch {newest.leader_epoch} has two leaders")
        self._committed_before.setdefault(newest.leader_epoch, self.end)

    def _note_manifest(self, manifest: Manifest) -> None:
        before, self.manifest = self.manifest, manifest
        if before is not None and manifest.leader_epoch < before.leader_epoch:
            raise Wrong(f"the manifest's epoch falls to {manifest.leader_epoch}")
        if self.newest is None or manifest.leader_epoch <= self._alone_until:
            self._elected.setdefault(manifest.leader_epoch, f"{manifest.owner}.0")
        elected = self._elected.get(manifest.leader_epoch)
        if elected is None or folder_of(elected) != manifest.owner:
            raise Wrong(f"{manifest.owner} owns the manifest under {manifest.leader_epoch}")

    # --- a replica --------------------------------------------------------------------------------

    def check_replica(self, it: Shown) -> None:
        for one in it.batches:
            self.note_same(it, one)
        if it.led_epoch is not None:
            self._extend(it)
        self.check_against(it, it.high_watermark)
        self._check_deleted(it)
        newest = self.newest
        if newest is None or it.replica_id not in newest.in_sync:
            return
        self._check_member(it)
        if (it.led_epoch, it.replica_id) == (newest.leader_epoch, newest.leader):
            before = self._committed_before[newest.leader_epoch]
            if it.is_settled and it.high_watermark < before:
                raise Wrong(f"{it.name} shows {it.high_watermark}, {before} was committed before")

    def note_same(self, it: Shown, batch: Batch) -> None:
        """It is there, flushed or not."""
        if self._by_epoch.setdefault((batch.base_offset, batch.epoch), batch.body) != batch.body:
            raise Wrong(f"{it.name}: offset {batch.base_offset} of epoch {batch.epoch} differs")

    def commit(self, batch: Batch) -> None:
        self.committed[batch.base_offset], self.committed_end = batch, batch.next_offset
        producer, sequence = batch.producer
        self._whose[batch.next_offset - 1] = producer
        if producer >= 0:
            last = sequence + batch.next_offset - batch.base_offset - 1
            self._last[producer] = last, batch.base_offset

    def _extend(self, it: Shown) -> None:
        for one in it.batches:
            if one.base_offset != self.committed_end or one.next_offset > it.high_watermark:
                continue
            if one.producer[0] >= 0:
                twice = self._producers.setdefault(one.producer, one.base_offset)
                if twice != one.base_offset and twice >= self.log_start:
                    raise Wrong(f"{one.producer} is at {twice} and at {one.base_offset}")
            wanted = self.acked.get(one.base_offset, one.producer)
            if wanted != one.producer:
                raise Wrong(f"offset {one.base_offset} was acknowledged to {wanted}: {one}")
            self.commit(one)
        if it.high_watermark > self.committed_end and it.first_local_offset <= self.committed_end:
            raise Wrong(f"{it.name} shows {it.high_watermark}, committed is {self.committed_end}")

    def check_against(self, it: Shown, end: int) -> None:
        """Whether it agrees with what is committed below `end`."""
        for one in it.batches:
            if one.base_offset >= end:
                return
            there = self.committed.get(one.base_offset)
            if there is not None and there.body != one.body:
                raise Wrong(f"{it.name} has another batch at {one.base_offset}: {one} {there}")
            wanted = self.acked.get(one.base_offset, one.producer)
            if wanted != one.producer:
                raise Wrong(f"{it.name}: {wanted} was acknowledged at {one.base_offset}: {one}")

    def _check_deleted(self, it: Shown) -> None:
        named = 0 if self.manifest is None else self.manifest.end_offset
        if it.has_led:
            self.log_start = max(self.log_start, it.log_start_offset)
        trimmed = 0 if self.manifest is None else self.manifest.log_start_offset
        if it.log_start_offset > max(trimmed, self.log_start):
            raise Wrong(f"{it.name} begins at {it.log_start_offset}, no leader above {trimmed}")
        if it.first_local_offset > max(named, self.log_start):
            raise Wrong(f"{it.name} deleted up to {it.first_local_offset}, the bucket has {named}")
        if named > self.end:
            raise Wrong(f"the manifest names {named}, committed is {self.end}")
        if self.manifest is not None and self.manifest.log_start_offset > self.end:
            raise Wrong(
                f"the manifest begins at {self.manifest.log_start_offset}, above {self.end}"
            )

    def _check_member(self, it: Shown) -> None:
        if it.flushed_end < self.end:
            raise Wrong(f"{it.name} is in sync with {it.flushed_end}, committed is {self.end}")
        if it.log_start_offset < self.trimmed:
            raise Wrong(f"{it.name} begins at {it.log_start_offset}, trimmed to {self.trimmed}")
        self.check_against(it, self.end)
        self.check_has_all(it)
        self._check_producers(it)

    def _check_producers(self, it: Shown) -> None:
        """What a member would take for a batch that is repeated, or would not."""
        for producer, (sequence, base_offset) in self._last.items():
            known, _ = it.producers.get(producer, (-1, -1))
            if base_offset >= self.log_start and known < sequence:
                raise Wrong(f"{it.name} knows {known} of producer {producer}, not {sequence}")
        for producer, (_, offset) in it.producers.items():
            if offset < self.committed_end and self._whose.get(offset, producer) != producer:
                raise Wrong(f"{it.name} knows offset {offset} of producer {producer}")

    def check_has_all(self, it: Shown) -> None:
        """A member; of what is above its local start."""
        there = {one.base_offset for one in it.batches}
        lost = [at for at in (*self.committed, *self.acked) if it.first_local_offset <= at]
        if missing := set(lost) - there:
            at = min(missing)
            if not any(one.base_offset < at < one.next_offset for one in it.batches):
                raise Wrong(f"{it.name} is in sync without offset {at}")

    def check_read(self, body: bytes, name: str) -> None:
        """A batch that a reader was given."""
        header = parse_header(body)
        there = self.committed.get(header.base_offset)
        if there is None or there.body != body:
            raise Wrong(f"{name} was read at {header.base_offset}: {header} is not there")
        self.read.add(header.base_offset)

    def check_was_read(self, log_start_offset: int) -> None:
        """All of it, since `read` was emptied."""
        lost = {at for at, one in self.committed.items() if one.next_offset > log_start_offset}
        lost -= self.read
        if lost:
            raise Wrong(f"offsets {sorted(lost)} were not read")
