"""The contents of `__consumer_offsets` in memory: by group, the newest commit of each partition.

* Rebuilt from the log alone, whatever is in it: compacted or not, tombstones, other kinds of
  records, transactions of a real Kafka (applied at the commit marker, dropped at an abort).
* A record that cannot be decoded is skipped and counted: one bad record from a foreign broker does
  not cost every group its offsets. A batch that fails its checksum is an error: the disk failed.
* The log is read in windows of `WINDOW_BYTES`; only the newest commits are kept.

Not thread-safe: `groups` has the lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import structlog

from tierlog.broker.data_folder import TopicPartition
from tierlog.broker.partition import Partition
from tierlog.record_format.batch import BatchHeader, check_crc, iter_headers
from tierlog.record_format.consumer_offsets import Commit, CommitKey, decode_key, decode_value
from tierlog.record_format.decode import decode_batch, end_marker_of
from tierlog.record_format.errors import CorruptDataError, OffsetTrimmed

log = structlog.get_logger(__name__)

WINDOW_BYTES: Final = 1 << 20


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
        self.count = 0
        self.unreadable = 0
        self._open_transactions: dict[int, list[_Change]] = {}

    # --- changes ----------------------------------------------------------------------------------

    def put(self, key: CommitKey, commit: Commit, *, record_offset: int) -> None:
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

    # --- the log ----------------------------------------------------------------------------------

    def replay(self, partition: Partition) -> None:
        """Apply one partition's whole log. May block; raises what reads raise."""
        offset = partition.offsets().log_start_offset
        while offset < partition.offsets().high_watermark:
            try:
                fetched = partition.read(offset, max_bytes=WINDOW_BYTES)
            except OffsetTrimmed as trimmed:
                offset = trimmed.log_start_offset
                continue
            self.apply(b"".join(piece.read() for piece in fetched.slices))
            if fetched.next_offset <= offset:
                break  # compaction removed the last records
            offset = fetched.next_offset
        self._open_transactions.clear()  # the end of one is written only by a real Kafka
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
                self._end_transaction(header.producer_id, committed=marker.committed)
            return
        changes = list(self._changes(data, header))
        if header.is_transactional:
            self._open_transactions.setdefault(header.producer_id, []).extend(changes)
            return
        for change in changes:
            self._apply(change)

    def _changes(self, data: bytes, header: BatchHeader) -> Iterator[_Change]:
        for record in decode_batch(data, header):
            try:
                key = decode_key(record.key or b"")
                if key is None:
                    continue
                commit = None if record.value is None else decode_value(record.value)
            except CorruptDataError:
                self.unreadable += 1
                continue
            yield _Change(key, commit, record.offset)

    def _apply(self, change: _Change) -> None:
        if change.commit is None:
            self.remove(change.key)
        else:
            self.put(change.key, change.commit, record_offset=change.record_offset)

    def _end_transaction(self, producer_id: int, *, committed: bool) -> None:
        """A commit outside of the transaction, made after the transaction's record, wins."""
        changes = self._open_transactions.pop(producer_id, [])
        for change in changes if committed else ():
            key = change.key
            found = self.groups.get(key.group, {}).get((key.topic, key.partition))
            if found is None or found.record_offset < change.record_offset:
                self._apply(change)
