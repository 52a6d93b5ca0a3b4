"""Compaction of the topics that ask for it, one partition at a time, the dirtiest first.

* A partition that fails waits, longer each time, and does not hold up the others.
* How far it got is in `cleaner-offset-checkpoint` (Kafka's file), written when a round is done:
  after a crash a round is repeated, which changes nothing more. It is removed with the topic:
  otherwise a new topic of that name would have records counted as clean that are not.
* How far a round may get is noted before it begins: once the topic is no longer compacted, only
  that explains the gaps of a round that did not finish.
* Recovery points are saved after the dirty part is determined and before it is cleaned: a segment
  with gaps must not be above them, where recovery would take a gap for a loss.
* Nor may a tombstone be dropped while the bucket has not followed the earlier rounds: it may still
  hold the value, and `restore --tail` would put what is above the bucket's end behind it, without
  the tombstone.
* Segments that are only in the bucket (after a restore) cannot be compacted, and a tombstone must
  not be dropped while they may hold what it deletes: they are brought back first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import structlog

from broker.background.rehydration import Rehydrator, has_cold_only
from broker.data_folder import (
    CLEANER_CHECKPOINT,
    COMPACTION_REACHED,
    DataFolder,
    TopicPartition,
)
from broker.partition import Partition
from broker.settings import BrokerSettings
from hot_tier.cleanable import Cleanable
from hot_tier.cleaner import CleanerHooks, Interrupted
from record_format.batch_compaction import KeyTable
from record_format.errors import TierlogError
from record_format.key_table import make_key_table

log = structlog.get_logger(__name__)

FIRST_WAIT_MS = 60_000
MAX_WAIT_MS = 3_600_000
LOCK_WAIT_S = 0.2


class _Marks:
    """`offsets` by partition, as one checkpoint file has them."""

    def __init__(self, folder: DataFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self.offsets: Mapping[TopicPartition, int] = folder.read_checkpoint(name)

    def save(self, offsets: dict[TopicPartition, int]) -> None:
        """Durably, before anybody relies on them. Raises OSError."""
        if offsets != self.offsets:
            self._folder.write_checkpoint(self._name, offsets)
            self.offsets = offsets


class Compactor:
    def __init__(
        self,
        partitions: Callable[[], Iterable[Partition]],
        folder: DataFolder,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        save_recovery_points: Callable[[], None],
        rehydrate: Rehydrator | None,
    ) -> None:
        self._partitions, self._settings = partitions, settings
        self._rehydrate = rehydrate
        self._clock, self._save_recovery_points = clock, save_recovery_points
        self._checkpoints = _Marks(folder, CLEANER_CHECKPOINT)
        self._reached = _Marks(folder, COMPACTION_REACHED)
        self._lock = threading.Lock()  # around each change of them
        self._waits: dict[TopicPartition, tuple[int, int]] = {}  # since when, how long
        self._stopping = threading.Event()

    def stop(self) -> None:
        """The round in progress ends soon, with nothing half done."""
        self._stopping.set()

    def cleaned_before(self, partition: Partition) -> int:
        """How far a round ever got, even one that did not finish; 0 for none."""
        place = _place(partition)
        return max(one.offsets.get(place, 0) for one in (self._checkpoints, self._reached))

    def look_at_start(self, topics: Collection[str]) -> None:
        """As `follow_truncation`, for cuts that a crash interrupted; and forget what belongs to no
        topic.
        """
        self._cut({_place(one): one.log.log_end_offset for one in self._partitions()})
        self._keep(lambda place: place[0] in topics)

    def follow_truncation(self, topic: str, partition: int, end_offset: int) -> None:
        """Durably, before anything is appended: nothing above the end of a log that was cut is
        clean, because its offsets are assigned again. Otherwise a tombstone there would go without
        what it deletes. Raises OSError.
        """
        self._cut({(topic, partition): end_offset})

    def _cut(self, ends: Mapping[TopicPartition, int]) -> None:
        with self._lock:
            for marks in (self._checkpoints, self._reached):
                marks.save(
                    {place: min(at, ends.get(place, at)) for place, at in marks.offsets.items()}
                )

    def forget_topic(self, name: str) -> None:
        """Durably, what is known of a topic of that name. Raises OSError."""
        self._keep(lambda place: place[0] != name)

    def _keep(self, is_kept: Callable[[TopicPartition], bool]) -> None:
        with self._lock:
            for marks in (self._checkpoints, self._reached):
                marks.save({place: at for place, at in marks.offsets.items() if is_kept(place)})

    def run_round(self) -> None:
        """Clean every partition that is due. What a table holds is set aside only meanwhile."""
        self._complete_logs()
        due = self._due()
        if not due:
            return
        table = make_key_table(self._settings.log_cleaner_dedupe_buffer_bytes)
        for partition, _ in due:
            if self._stopping.is_set():
                return
            self._clean(partition, table)

    def _complete_logs(self) -> None:
        """Bring back what the disk lacks. Its log is cleaned from the start again afterwards."""
        for partition in list(self._partitions()):
            if self._rehydrate is None or self._stopping.is_set():
                return
            try:
                if not self._may_work_on(partition) or not has_cold_only(partition):
                    continue
                self._save_recovery_points()
                self._forget(partition)
                self._rehydrate(partition, stopping=self._stopping.is_set)
            except Interrupted:
                return
            except Exception as error:  # noqa: BLE001  it is reported, and holds up no other
                self._put_off(partition, error)

    def _due(self) -> list[tuple[Partition, Cleanable]]:
        """The dirtiest first."""
        live = list(self._partitions())
        places = {_place(partition) for partition in live}
        self._waits = {k: v for k, v in self._waits.items() if k in places}
        found = []
        for partition in live:
            if self._may_work_on(partition):
                cleanable = self._look(partition)
                if cleanable is not None:
                    found.append((partition, cleanable))
        return sorted(found, key=lambda one: one[1].dirty_ratio, reverse=True)

    def _look(self, partition: Partition) -> Cleanable | None:
        """What is to be cleaned, where it is due and all of it is here."""
        config = partition.log.config
        try:
            if has_cold_only(partition):
                return None
            cleanable = partition.log.sealed.cleanable(
                self._checkpoints.offsets.get(_place(partition))
            )
        except (TierlogError, OSError) as error:
            self._put_off(partition, error)
            return None
        is_due = cleanable.is_due(
            min_dirty_ratio=config.min_cleanable_dirty_ratio,
            max_lag_ms=config.max_compaction_lag_ms,
            now_ms=self._clock(),
        )
        return cleanable if is_due else None

    def _may_work_on(self, partition: Partition) -> bool:
        if not partition.log.config.compacts or partition.log.offline:
            return False
        if partition.leadership_lost:
            return False
        since_ms, wait_ms = self._waits.get(_place(partition), (0, 0))
        # A clock that was set back is no reason to wait for as long as it was ahead.
        return not 0 <= self._clock() - since_ms < wait_ms

    def _clean(self, partition: Partition, table: KeyTable) -> None:
        """Rounds until the dirty part is done: the table may not hold all its keys at once."""
        hooks = CleanerHooks(
            stopping=self._stopping.is_set,
            may_forget=lambda: partition.cold is None or partition.log.sealed.mirrored,
            swapping=lambda: self._swapping(partition),
        )
        try:
            while (cleanable := self._look(partition)) is not None:
                self._save_recovery_points()
                may_reach = max(
                    cleanable.end_offset, self._reached.offsets.get(_place(partition), 0)
                )
                self._note(self._reached, partition, may_reach)  # before the first gap
                done = partition.log.sealed.clean(cleanable, table, hooks)
                self._note(self._checkpoints, partition, done.end_offset)
                log.info(
                    "partition compacted",
                    partition=str(partition),
                    epoch=partition.log.leader_epoch,
                    from_offset=cleanable.first_dirty_offset,
                    end_offset=done.end_offset,
                    read_bytes=done.read_bytes,
                    written_bytes=done.written_bytes,
                )
                if done.complete:
                    break
            self._waits.pop(_place(partition), None)
        except Interrupted:
            return  # the next round begins again
        except Exception as error:  # noqa: BLE001  it is reported, and holds up no other
            self._put_off(partition, error)

    def _note(self, marks: _Marks, partition: Partition, end_offset: int) -> None:
        """Durably. Raises Interrupted where the partition was deleted meanwhile."""
        with self._lock:
            if all(one is not partition for one in self._partitions()):
                raise Interrupted
            marks.save({**marks.offsets, _place(partition): end_offset})

    def _forget(self, partition: Partition) -> None:
        with self._lock:
            place, marks = _place(partition), self._checkpoints
            marks.save({other: at for other, at in marks.offsets.items() if other != place})

    def _put_off(self, partition: Partition, error: Exception) -> None:
        if partition.is_deleted:
            return  # a topic that gets its name has nothing to wait for
        place = _place(partition)
        wait_ms = min(2 * self._waits.get(place, (0, FIRST_WAIT_MS // 2))[1], MAX_WAIT_MS)
        self._waits[place] = (self._clock(), wait_ms)
        log.warning(
            "compaction waits",
            partition=str(partition),
            error=str(error) or type(error).__name__,
            retry_in_ms=wait_ms,
            exc_info=None if isinstance(error, (TierlogError, OSError)) else error,
        )

    @contextmanager
    def _swapping(self, partition: Partition) -> Iterator[frozenset[int]]:
        """No upload reads the files meanwhile. Gives where the bucket ends, or may end, and where
        its gaps do: a local segment below stands for whole entries of its manifest.
        """
        lock = partition.log.sealed.lock
        while not lock.acquire(timeout=LOCK_WAIT_S):
            if self._stopping.is_set():
                raise Interrupted
        try:
            yield _borders(partition)
        finally:
            lock.release()


def _place(partition: Partition) -> TopicPartition:
    return partition.topic, partition.number


def _borders(partition: Partition) -> frozenset[int]:
    """The bucket may have one segment more than is known: by a commit whose answer was lost, or
    that a crash kept from being noted. Segments are committed one by one, in order.
    """
    cold = partition.cold
    if cold is None:
        return frozenset()
    views = partition.log.segments()
    may_be_cold = (v.last_offset + 1 for v in views if v.last_offset >= cold.end_offset)
    return cold.borders | {next(may_be_cold, cold.end_offset)}
