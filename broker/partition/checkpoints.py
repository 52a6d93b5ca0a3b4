"""What a data folder records of offsets (`data_folder` lists the files): the checkpoints, in
Kafka's format; and in `cuts.json` logs that a repair truncated, or of which a restore found
nothing.

* A damaged partition's rows are preserved: with a recovery point of 0 the next start would truncate
  a log that this start refused to open.
* A log start is durable before it is visible, and before anything below it is deleted.
* Reading the state and writing the file is one atomic step: an older state never overwrites a
  newer.
* Rows are keyed by topic name. Before a name is used again, the deleted topic's rows are removed
  (`forget`).
* A truncation is recorded before the first byte is removed, and forgotten once the new offsets of
  groups that had read further are flushed. After a crash in between, or if those offsets cannot be
  read or written, the groups are set back later. If startup finds a truncation without an end, it
  records the log's end before anything is appended.

Thread-safe; each change is durable when the call returns. Everything that writes raises OSError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Protocol

from tierlog.broker.data_folder.data_folder import (
    CLEANER_CHECKPOINT,
    COMPACTION_REACHED,
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
    DataFolder,
    Document,
    TopicIdPartition,
    TopicPartition,
    format_topic_id_partition,
    parse_topic_id_partition,
)
from tierlog.broker.partition.partition import Partition
from tierlog.hot_tier.cleaner import Interrupted

TRUNCATIONS: Final = Document("cuts.json", "cuts", dict[str, int | None])


class NotOpen(Protocol):
    """A partition that is not served, and whose rows are kept."""

    @property
    def topic(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def recovery_point(self) -> int | None: ...
    @property
    def log_start_offset(self) -> int | None: ...


class Checkpoints:
    """Recovery points, high watermarks and log starts: the current state of the logs."""

    def __init__(
        self,
        folder: DataFolder,
        partitions: Callable[[], Iterable[Partition]],
        damaged: Callable[[], Iterable[NotOpen]],
    ) -> None:
        self._folder, self._partitions, self._damaged = folder, partitions, damaged
        self._lock = threading.RLock()
        self._rows: dict[str, Mapping[TopicPartition, int] | None] = dict.fromkeys(
            (RECOVERY_POINTS, HIGH_WATERMARKS, LOG_STARTS)
        )  # by file; None if they are not known

    def forget(self, name: str) -> None:
        """Remove, durably, the rows of a deleted topic."""
        with self._lock:
            if any(
                rows is None or any(name == one for one, _ in rows) for rows in self._rows.values()
            ):
                self.save()

    def forget_log(self, place: TopicPartition) -> None:
        """Remove, durably, the rows of a log that is gone, before there is another. The others stay
        as they are in the files: at the start their logs are not open yet.
        """
        with self._lock:
            for name in self._rows:
                rows = self._folder.read_checkpoint(name)
                if place in rows:
                    self._rows[name] = None
                    kept = {one: at for one, at in rows.items() if one != place}
                    self._folder.write_checkpoint(name, kept)

    def save(self) -> None:
        """Bring all three files up to date."""
        with self._lock:
            partitions = tuple(self._partitions())
            damaged = self._damaged()
            known = {_place(d): at for d in damaged if (at := d.recovery_point) is not None}
            self._write(RECOVERY_POINTS, {_place(p): p.flushed_end for p in partitions} | known)
            self._write(HIGH_WATERMARKS, {_place(p): p.high_watermark for p in partitions} | known)
            self._save_log_starts({})

    def move_log_start(
        self, one: Partition | NotOpen, offset: int, *, move: Callable[[int], int]
    ) -> int:
        """Advance the log start of a partition, or of a replica that follows, by `move`, and return
        it; it never moves back. On an error nothing has moved.

        Raises OSError (a full disk), LogOfflineError, ShuttingDown.
        """
        with self._lock:
            self._save_log_starts({one: offset})
            return move(offset)

    def _save_log_starts(self, moved: Mapping[object, int]) -> None:
        """A log that begins at 0, on disk, needs no row.

        `moved` is keyed by partition, because its name may belong to another topic by now.
        """
        starts = {}
        for partition in self._partitions():
            start = max(partition.log_start_offset, moved.get(partition, 0))
            if start > 0 or partition.first_local_offset > 0:
                starts[_place(partition)] = start
        for one in self._damaged():
            if (at := one.log_start_offset) is not None or one in moved:
                starts[_place(one)] = max(at or 0, moved.get(one, 0))
        self._write(LOG_STARTS, starts)

    def _write(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        """An idle broker does not write: the file has these offsets already."""
        before, self._rows[name] = self._rows[name], None  # an error leaves them unknown
        if before != offsets:
            self._folder.write_checkpoint(name, offsets)
        self._rows[name] = offsets


class CompactionOffsets:
    """How far each log is compacted, and how far a round may have reached. The latter is recorded
    before the round begins: once the topic is no longer compacted, only that explains the gaps of a
    round that did not finish.
    """

    def __init__(self, folder: DataFolder) -> None:
        self._cleaned = _Rows(folder, CLEANER_CHECKPOINT)
        self._reached = _Rows(folder, COMPACTION_REACHED)
        self._lock = threading.Lock()  # for changes of the two

    def cleaned(self, partition: Partition) -> int | None:
        """The offset below which the log is clean; None if it was never compacted."""
        return self._cleaned.offsets.get(_place(partition))

    def cleaned_before(self, place: TopicPartition) -> int:
        """How far any round ever got, even an unfinished one; 0 for none. Everything below it was
        flushed.
        """
        return max(rows.offsets.get(place, 0) for rows in (self._cleaned, self._reached))

    def begin_round(self, partition: Partition, end_offset: int) -> None:
        """Record how far the round may reach. Raises Interrupted if the partition was deleted."""
        reached = max(end_offset, self._reached.offsets.get(_place(partition), 0))
        self._put(self._reached, partition, reached)

    def end_round(self, partition: Partition, end_offset: int) -> None:
        """Record how far the log is clean. Raises Interrupted if the partition was deleted."""
        self._put(self._cleaned, partition, end_offset)

    def start_over(self, partition: Partition) -> None:
        """Nothing counts as clean any more: the log is about to get older segments back."""
        with self._lock:
            place, offsets = _place(partition), self._cleaned.offsets
            self._cleaned.save({other: at for other, at in offsets.items() if other != place})

    def truncate(self, ends: Mapping[TopicPartition, int]) -> None:
        """Lower the offsets to the ends of truncated logs; call it before anything is appended. The
        offsets above are assigned again, and a tombstone there would otherwise be dropped without
        the value that it deletes.
        """
        with self._lock:
            for rows in (self._cleaned, self._reached):
                low = {place: min(at, ends.get(place, at)) for place, at in rows.offsets.items()}
                rows.save(low)

    def reconcile_at_start(self, partitions: Iterable[Partition], topics: Collection[str]) -> None:
        """As `truncate`, for truncations that a crash interrupted; and forget deleted topics."""
        self.truncate({_place(one): one.log_end_offset for one in partitions})
        self._keep(lambda topic: topic in topics)

    def forget(self, name: str) -> None:
        """Remove, durably, the rows of a deleted topic."""
        self._keep(lambda topic: topic != name)

    def _keep(self, is_kept: Callable[[str], bool]) -> None:
        with self._lock:
            for rows in (self._cleaned, self._reached):
                rows.save({place: at for place, at in rows.offsets.items() if is_kept(place[0])})

    def _put(self, rows: _Rows, partition: Partition, offset: int) -> None:
        with self._lock:
            if partition.is_gone:  # its rows were, or will be, forgotten
                raise Interrupted
            rows.save({**rows.offsets, _place(partition): offset})


class _Rows:
    """`offsets` by partition, and the checkpoint file that stores them."""

    def __init__(self, folder: DataFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self.offsets: Mapping[TopicPartition, int] = folder.read_checkpoint(name)

    def save(self, offsets: dict[TopicPartition, int]) -> None:
        """Durable before they are visible."""
        if offsets != self.offsets:
            self._folder.write_checkpoint(self._name, offsets)
            self.offsets = offsets


class Truncations:
    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ends = TRUNCATIONS.read_document(folder.path) or {}

    @property
    def ends(self) -> dict[TopicIdPartition, int]:
        """The new ends of truncated logs, where they are known."""
        return {
            parse_topic_id_partition(name): end
            for name, end in self._ends.items()
            if end is not None
        }

    def begin(self, place: TopicIdPartition) -> None:
        """Record a truncation that is about to begin. Raises ShuttingDown, OSError."""
        self._put(place, None)

    def end(self, place: TopicIdPartition, end_offset: int) -> None:
        """Record the new end: from there on offsets are assigned again. Raises ShuttingDown,
        OSError.
        """
        self._put(place, end_offset)

    def reconcile_at_start(
        self, partitions: Iterable[Partition], topic_ids: Collection[str]
    ) -> None:
        """Record the ends of logs whose truncation was interrupted; forget deleted topics."""
        if not self._ends:
            return
        ends = {
            format_topic_id_partition(one.topic_id, one.number): one.log_end_offset
            for one in partitions
        }
        with self._lock:
            self._save(
                {
                    name: ends.get(name) if end is None else end
                    for name, end in self._ends.items()
                    if parse_topic_id_partition(name)[0] in topic_ids
                }
            )

    def forget(self, done: Iterable[tuple[TopicIdPartition, int]]) -> None:
        """Remove truncations that groups have followed. Raises ShuttingDown, OSError."""
        gone = {(format_topic_id_partition(*place), end) for place, end in done}
        with self._lock:
            self._save({name: end for name, end in self._ends.items() if (name, end) not in gone})

    def _put(self, place: TopicIdPartition, end_offset: int | None) -> None:
        with self._lock:
            self._save({**self._ends, format_topic_id_partition(*place): end_offset})

    def _save(self, ends: dict[str, int | None]) -> None:
        if ends != self._ends:
            TRUNCATIONS.write_document(self._folder.path, ends, write=self._folder.write)
            self._ends = ends


def _place(one: Partition | NotOpen) -> TopicPartition:
    return one.topic, one.number
