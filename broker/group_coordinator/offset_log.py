"""Writes to `__consumer_offsets`, and its contents in memory (`GroupView`), in the log's order.

* Appends are made under `lock`, and applied to the view in that order once they are flushed, never
  in the order in which threads wake up.
* A row that could not be written is `unwritten`: it is retried until it succeeds, or until a later
  commit of its key supersedes it.
* The view is rebuilt from the log alone, whatever is in it: compacted or not, tombstones, other
  kinds of records, transactions (applied at the commit marker, dropped at an abort). Only the
  newest commit of each partition is kept; the log is read in windows.
* The newest records of each group's members are kept as they are (`metadata`), for the coordinator.
* A record that cannot be decoded is skipped and counted: one bad record from a foreign broker does
  not cost every group its offsets. A batch that fails its checksum is an error: the disk failed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import structlog

from tierlog.broker.data_folder.data_folder import TopicPartition
from tierlog.broker.group_coordinator.consumer_group_records import read_key
from tierlog.broker.partition.partition import Partition
from tierlog.broker.topics.coordinator_log import home_partition, stored_batches
from tierlog.broker.topics.topics import Topic
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.hot_tier.producer_state import Verify
from tierlog.record_format.batch import NO_PRODUCER_ID, BatchHeader, check_crc, iter_headers
from tierlog.record_format.consumer_offsets import (
    Commit,
    CommitKey,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from tierlog.record_format.decode import EndMarker, Record, decode_batch, end_marker_of
from tierlog.record_format.errors import (
    CorruptDataError,
    LeaderUnknown,
    NotLeader,
    TierlogError,
)
from tierlog.record_format.kafka_messages.source import MessageError
from tierlog.record_format.produced import build_produced

log = structlog.get_logger(__name__)


class Row(NamedTuple):
    """`commit` is None for a tombstone."""

    key: CommitKey
    commit: Commit | None


class InTransaction(NamedTuple):
    """The producer whose transaction a commit is part of. `verify`: see `producer_state`."""

    producer_id: int
    producer_epoch: int
    verify: Verify


class PendingAppend(NamedTuple):
    """An append in progress; rows are applied in the order of appends. `producer_id`: of the
    transaction that they are part of, or -1.
    """

    rows: Sequence[Row]
    future: Future[AppendResult]
    producer_id: int = NO_PRODUCER_ID


class OffsetLog:
    """`topic` returns None if the topic does not exist yet. `view`: what was read of the log so
    far; `lock` guards it and `unwritten`.
    """

    def __init__(self, topic: Callable[[], Topic | None], *, clock: Callable[[], int]) -> None:
        self._topic, self._clock = topic, clock
        self.lock = threading.RLock()
        self.view = GroupView()
        self.unwritten: dict[CommitKey, Commit | None] = {}  # None: a tombstone
        self._pending: deque[PendingAppend] = deque()
        self._ended: deque[tuple[int, bool]] = deque()  # transactions, not in the view yet

    @property
    def known(self) -> GroupView:
        """The view; call it under the lock."""
        while self._ended:
            producer_id, is_commit = self._ended.popleft()
            self.view.end_transaction(producer_id, committed=is_commit)
        return self.view

    def follow_end(self, producer_id: int, marker: EndMarker, ended: Future[AppendResult]) -> None:
        """A transaction's marker is being written. Without the lock, which whoever waits for a
        flush may hold: it takes effect with the next look at the view.
        """

        def follow(future: Future[AppendResult]) -> None:
            if future.exception() is None:
                self._ended.append((producer_id, marker.committed))

        ended.add_done_callback(follow)

    def append(
        self,
        home: Partition,
        rows: Sequence[Row],
        *,
        tombstones: Sequence[bytes] = (),
        within: InTransaction | None = None,
    ) -> PendingAppend:
        """Append rows, and tombstones of other keys, all or none. Call it under the lock: the order
        of appends is the order of `_pending`.
        """
        producer_id, producer_epoch, verify = within or (NO_PRODUCER_ID, -1, None)
        values = [None if row.commit is None else encode_value(row.commit) for row in rows]
        keys = [*(encode_key(row.key) for row in rows), *tombstones]
        batches = build_produced(
            [*values, *(None for _ in tombstones)],
            keys=keys,
            timestamps=[self._clock()] * len(keys),
            max_message_bytes=home.config.max_message_bytes,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            transactional=within is not None,
        )
        appended = home.append(batches, acks=Acks.ALL, verify=verify)
        pending = PendingAppend(rows, appended, producer_id)
        self._pending.append(pending)
        return pending

    def complete(self, pending: PendingAppend) -> None:
        """Wait for the flush, then apply everything appended up to this, in order."""
        try:
            pending.future.result()
        finally:
            with self.lock:
                while any(one is pending for one in self._pending):
                    self._apply_first()

    def settle(self) -> None:
        """Wait until the view has everything that was appended so far."""
        with self.lock:
            last = self._pending[-1] if self._pending else None
        if last is not None:
            with suppress(TierlogError):  # whoever appended it raises the error
                self.complete(last)

    def complete_all(self) -> None:
        """Complete every append in progress. Call it under the lock."""
        while self._pending:
            self._apply_first()

    def _apply_first(self) -> None:
        """Hardly waits: earlier appends of a log are flushed no later than the later ones."""
        pending = self._pending.popleft()
        if pending.future.exception() is not None:
            return  # the caller that appended it raises the error
        record_offset = pending.future.result().base_offset
        if pending.producer_id != NO_PRODUCER_ID:
            self.known.hold(pending.producer_id, pending.rows, record_offset=record_offset)
            return
        for key, commit in pending.rows:
            self.unwritten.pop(key, None)
            if commit is None:
                self.known.remove(key)
            else:
                self.known.put_commit(key, commit, record_offset=record_offset)

    def write_unwritten(self) -> None:
        """Try to append the unwritten rows; those that fail stay unwritten."""
        with self.lock:
            started = self._append_unwritten()
        for pending in started:
            try:
                self.complete(pending)
            except TierlogError as error:
                log.warning("offsets not written yet", error=str(error))

    def _append_unwritten(self) -> list[PendingAppend]:
        self.complete_all()  # a commit appended since supersedes the unwritten row of its key
        topic = self._topic()
        if topic is None:
            return []
        by_home: dict[Partition, list[Row]] = {}
        for key in sorted(self.unwritten):
            with suppress(NotLeader, LeaderUnknown):  # whose it is writes them
                by_home.setdefault(home_partition(key.group, topic), []).append(
                    Row(key, self.unwritten[key])
                )
        started = []
        for home, rows in by_home.items():
            try:
                started.append(self.append(home, rows))
            except TierlogError as error:
                log.warning("offsets not written yet", partition=str(home), error=str(error))
        return started


class Committed(NamedTuple):
    """A commit, and the offset of its own record: a later record wins."""

    commit: Commit
    record_offset: int


class _Change(NamedTuple):
    """`commit` is None for a tombstone."""

    key: CommitKey
    commit: Commit | None
    record_offset: int


class GroupView:
    def __init__(self) -> None:
        self.groups: dict[str, dict[TopicPartition, Committed]] = {}
        self.metadata: dict[str, dict[bytes, bytes]] = {}  # of groups with members, by key
        self.count = 0
        self.unreadable = 0
        # By producer; their count is bounded with that of the commits.
        self._open_transactions: dict[int, dict[CommitKey, _Change]] = {}

    @property
    def held_count(self) -> int:
        return sum(map(len, self._open_transactions.values()))

    def held_places(self, group: str) -> set[TopicPartition]:
        """Those for which a transaction in progress has a commit."""
        return {
            (key.topic, key.partition)
            for changes in self._open_transactions.values()
            for key in changes
            if key.group == group
        }

    # --- changes ----------------------------------------------------------------------------------

    def put_commit(self, key: CommitKey, commit: Commit, *, record_offset: int) -> None:
        offsets = self.groups.setdefault(key.group, {})
        self.count += key[1:] not in offsets
        offsets[key.topic, key.partition] = Committed(commit, record_offset)

    def set_back(self, key: CommitKey, commit: Commit) -> None:
        """Replace an existing commit before its new record is written."""
        offsets = self.groups[key.group]
        place = (key.topic, key.partition)
        offsets[place] = offsets[place]._replace(commit=commit)

    def remove(self, key: CommitKey) -> None:
        offsets = self.groups.get(key.group, {})
        if offsets.pop((key.topic, key.partition), None) is not None:
            self.count -= 1
        if not offsets:
            self.groups.pop(key.group, None)

    def commits(self) -> Iterator[tuple[CommitKey, Commit]]:
        for group, offsets in self.groups.items():
            for (topic, partition), committed in offsets.items():
                yield CommitKey(group, topic, partition), committed.commit

    def take_in(self, other: GroupView) -> None:
        """What another partition of the log has: other groups."""
        self.groups |= other.groups
        self.count += other.count
        for producer_id, changes in other._open_transactions.items():
            self._open_transactions.setdefault(producer_id, {}).update(changes)

    def forget_groups(self, is_gone: Callable[[str], bool]) -> None:
        for group in [name for name in self.groups if is_gone(name)]:
            self.count -= len(self.groups.pop(group))
        for changes in self._open_transactions.values():
            for key in [key for key in changes if is_gone(key.group)]:
                del changes[key]

    # --- the log ----------------------------------------------------------------------------------

    def replay(self, partition: Partition) -> None:
        """Apply one partition's whole log. May block; raises what reads raise."""
        for batches in stored_batches(partition):
            self.apply(batches)
        if self.unreadable:
            log.warning(
                "records of unknown format skipped",
                partition=str(partition),
                records=self.unreadable,
            )

    def apply(self, batches: bytes) -> None:
        """Apply whole batches, in log order. Raises CorruptBatch."""
        for header in iter_headers(batches):
            check_crc(batches, header)
            self._apply_batch(batches, header)

    def _apply_batch(self, data: bytes, header: BatchHeader) -> None:
        if header.is_control:
            marker = end_marker_of(data, header)
            if marker is not None:
                self.end_transaction(header.producer_id, committed=marker.committed)
            return
        changes = list(self._changes(data, header))
        if header.is_transactional:
            self._hold(header.producer_id, changes)
            return
        for change in changes:
            self._apply(change)

    def _changes(self, data: bytes, header: BatchHeader) -> Iterator[_Change]:
        for record in decode_batch(data, header):
            try:
                key = decode_key(record.key or b"")
                if key is None:
                    self._note_metadata(record)
                    continue
                commit = None if record.value is None else decode_value(record.value)
            except (CorruptDataError, MessageError):
                self.unreadable += 1
                continue
            yield _Change(key, commit, record.offset)

    def _note_metadata(self, record: Record) -> None:
        """Raises MessageError. Other types of records, of share groups and later, are skipped."""
        key = bytes(record.key or b"")
        found = read_key(key)
        if found is None:
            return
        of_group = self.metadata.setdefault(found[0], {})
        of_group.pop(key, None)
        if record.value is not None:
            of_group[key] = bytes(record.value)
        elif not of_group:
            del self.metadata[found[0]]

    def _apply(self, change: _Change) -> None:
        if change.commit is None:
            self.remove(change.key)
        else:
            self.put_commit(change.key, change.commit, record_offset=change.record_offset)

    def hold(self, producer_id: int, rows: Sequence[Row], *, record_offset: int) -> None:
        """Commits of a transaction, until its end."""
        self._hold(producer_id, [_Change(*row, record_offset) for row in rows])

    def _hold(self, producer_id: int, changes: Sequence[_Change]) -> None:
        held = self._open_transactions.setdefault(producer_id, {})
        held.update((change.key, change) for change in changes)

    def end_transaction(self, producer_id: int, *, committed: bool) -> None:
        """A commit outside of the transaction, made after the transaction's record, wins."""
        changes = self._open_transactions.pop(producer_id, {})
        for change in changes.values() if committed else ():
            key = change.key
            found = self.groups.get(key.group, {}).get((key.topic, key.partition))
            if found is None or found.record_offset < change.record_offset:
                self._apply(change)
