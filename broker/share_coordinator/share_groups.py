"""Share groups (KIP-932) over the broker's partitions; their state is in `__share_group_state`, in
Kafka's format.

* Who is in a group is the group coordinator's, and in `__consumer_offsets`; which records are with
  whom is the partition's leader's (`partitions`); what became of them is durable with who keeps the
  state (`coordinator`). In a cluster these may be three brokers.
* The topic is created for the first share group. It is offloaded and restored as every other, and
  what lies below the oldest snapshot is deleted, as by Kafka.
* Where a group begins (`share.auto.offset.reset`) is found by the first who reads, and written at
  once: Kafka's would be another one after a crash.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import structlog

from tierlog.broker.group_coordinator.assignors import TopicPartition
from tierlog.broker.group_coordinator.group_configs import GroupConfigs, duration_ms
from tierlog.broker.group_coordinator.group_events import (
    Effects,
    GroupError,
    HeartbeatAnswer,
    ShareBeat,
    refusal,
)
from tierlog.broker.group_coordinator.groups import Groups, OffsetState
from tierlog.broker.group_coordinator.share_group import ShareGroup
from tierlog.broker.membership.peers import Peers
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.tiered_reads import Fetched
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.share_coordinator.coordinator import (
    ShareCoordinator,
    ShareSummary,
    summary_of,
)
from tierlog.broker.share_coordinator.share_partition import Acquired, Wanted
from tierlog.broker.share_coordinator.share_partitions import SharePartitions
from tierlog.broker.share_coordinator.share_reads import narrowed, read_batches
from tierlog.broker.share_coordinator.share_state_peers import ShareStatePeers, answer_all
from tierlog.broker.topics.coordinator_log import CoordinatorLog, home_number, stored_records
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topic_replicas import NewTopic
from tierlog.host.clock import monotonic_ms
from tierlog.host.file_slice import FileSlice
from tierlog.host.threads import failed
from tierlog.hot_tier.log_writer import AppendResult
from tierlog.record_format.consumer_offsets import NO_EPOCH
from tierlog.record_format.errors import (
    GroupRefused,
    OffsetTrimmed,
    TierlogError,
    UnknownTopicOrPartition,
)
from tierlog.record_format.kafka_messages.source import MessageError
from tierlog.record_format.share_state import (
    UNKNOWN_START,
    ShareKey,
    ShareState,
    StateAnswer,
    StateCall,
    StateView,
    merge_batches,
)
from tierlog.record_format.topic_rules import ConfigValue

log = structlog.get_logger(__name__)

TOPIC: Final = "__share_group_state"
# Kafka's own for this topic; one partition, as one broker reads it all at each start.
CONFIG: Final[Mapping[str, ConfigValue]] = {
    "cleanup.policy": "delete",
    "retention.ms": -1,
    "segment.bytes": 100 << 20,
    "compression.type": "uncompressed",
}
# Kafka's share.coordinator.state.topic.prune.interval.ms, cold.partition.snapshot.interval.ms.
PRUNE_INTERVAL_MS: Final = 300_000


class ShareRead(NamedTuple):
    """What a member was given: whole batches, and which of their records are its."""

    slices: tuple[FileSlice, ...]
    acquired: list[Acquired]

    def close(self) -> None:
        for piece in self.slices:
            piece.close()


class ShareGroups:
    def __init__(
        self,
        topics: LiveTopics,
        groups: Groups,
        configs: GroupConfigs,
        settings: BrokerSettings,
        *,
        trim: Callable[[Partition, int], object],
        clock: Callable[[], int],
        call_after: Callable[[int, Callable[[], None]], None],
        peers: Peers | None = None,
    ) -> None:
        """`trim` advances a partition's log start, durably. `peers`: in a cluster."""
        self._topics, self._groups, self._configs = topics, groups, configs
        self._trim, self._clock = trim, clock
        self.coordinator = ShareCoordinator(
            self._append, partitions_max=settings.group_commits_max, wall_ms=clock
        )
        self.log = CoordinatorLog(
            topics,
            NewTopic(
                TOPIC,
                settings.share_coordinator_state_topic_num_partitions or 1,
                CONFIG,
                settings.share_coordinator_state_topic_replication_factor,
            ),
            load=self._load_partition,
            forget=self.coordinator.forget,
            clock=clock,
        )
        carry_out = self.coordinator.carry_out
        self._peers = None if peers is None else ShareStatePeers(peers, self.log, carry_out)
        self._ask = carry_out if self._peers is None else self._peers.ask
        self.partitions = SharePartitions(
            self._ask,
            limits_of=configs.share_limits,
            updates_per_snapshot=settings.share_coordinator_snapshot_update_records_per_snapshot,
            call_after=call_after,
            now_ms=monotonic_ms,
        )
        self._has_looked = False  # for topics that were deleted
        self._prune_again_ms = monotonic_ms() + PRUNE_INTERVAL_MS

    # --- its state --------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether states can be asked for; else `prepare` first."""
        return self.log.topic is not None and (self._peers is not None or self.log.is_loaded)

    def prepare(self) -> None:
        """Raises what loading the state and creating a topic do."""
        self.log.ensure_topic()
        if self._peers is None:  # else it is waited for
            self.log.load()

    def is_ready_for(self, group: str) -> bool:
        """As of a `CoordinatorLog`."""
        return self.is_ready and self._groups.log.is_ready_for(group)

    def prepare_for(self, group: str) -> None:
        """As of a `CoordinatorLog`."""
        self.prepare()
        self._groups.log.prepare_for(group)

    def check_ready(self, group: str) -> None:
        """As of a `CoordinatorLog`."""
        self._groups.log.check_ready(group)

    def run_round(self) -> None:
        """In the background: load the state, and delete what is no longer needed of its log."""
        was_loaded = self._has_looked and self.log.is_loaded
        self._groups.log.load()
        self.log.load()
        if not was_loaded:
            self._forget_deleted()
            self._has_looked = True
        if monotonic_ms() >= self._prune_again_ms:
            self._prune_again_ms = monotonic_ms() + PRUNE_INTERVAL_MS
            self.prune()

    def _load_partition(self, partition: Partition) -> None:
        view = StateView()
        for record in stored_records(partition):
            try:
                view.apply(bytes(record.key or b""), record.value, record.offset)
            except MessageError as error:
                log.warning("a record cannot be read", partition=str(partition), error=str(error))
        self.coordinator.load(view)

    def _append(
        self, home_key: str, rows: list[tuple[bytes, bytes | None]]
    ) -> Future[AppendResult]:
        return self.log.append(home_key, rows)

    def prune(self) -> None:
        """Delete what lies below the oldest snapshot that still counts. Raises what a trim does."""
        topic = self.log.topic
        if topic is None:
            return
        self.coordinator.snapshot_older(than_ms=PRUNE_INTERVAL_MS)
        for partition in topic.local_partitions():
            oldest = self.coordinator.oldest_needed(
                lambda key, number=partition.number: home_number(key, topic) == number  # type: ignore[misc]
            )
            if oldest is not None and oldest > partition.log_start_offset:
                self._trim(partition, oldest)

    def note_moved(self, topic_id: bytes, number: int) -> None:
        """A partition came to this broker of the cluster, or left it."""
        self.partitions.close_where(lambda key: key[1:] == (topic_id, number))

    def close(self) -> None:
        self.partitions.close()
        if self._peers is not None:
            self._peers.close()

    def answer_states(self, calls: Sequence[StateCall]) -> list[StateAnswer]:
        """For another broker of the cluster. Waits for the log."""
        for home in {one.key.home for one in calls}:
            with suppress(TierlogError, OSError):  # the answers will say
                self.log.load_home(home)
        return answer_all(self._carry_out_here, calls)

    def _carry_out_here(self, call: StateCall) -> Future[ShareState]:
        try:
            self.log.check_ready(call.key.home)
        except TierlogError as error:
            return failed(error)
        return self.coordinator.carry_out(call)

    # --- members ----------------------------------------------------------------------------------

    def beat(self, name: str, beat: ShareBeat, reply: Callable[[HeartbeatAnswer], None]) -> None:
        self._groups.coordinator.beat_share(name, beat, self, reply)

    def initialize(
        self,
        group: str,
        places: Iterable[TopicPartition],
        *,
        epoch: int,
        reply: Callable[[BaseException | None], None],
    ) -> None:
        when_all(self._initialize(group, dict.fromkeys(places, UNKNOWN_START), epoch), reply)

    def _initialize(
        self, group: str, starts: Mapping[TopicPartition, int], epoch: int
    ) -> list[Future[ShareState]]:
        call = partial(StateCall, what="initialize", state_epoch=epoch)
        return [
            self._ask(call(key=ShareKey(group, *place), start_offset=start))
            for place, start in starts.items()
        ]

    # --- reading ----------------------------------------------------------------------------------

    def begin_open(self, key: ShareKey, partition: Partition) -> tuple[object, Future[ShareState]]:
        """As of `SharePartitions`."""
        return self.partitions.begin_open(key, self._leader_epoch(partition))

    def _leader_epoch(self, partition: Partition) -> int:
        """Without a cluster there is nobody to fence; and a Kafka that is given the folder counts
        its own from 0.
        """
        return NO_EPOCH if self._peers is None else partition.offsets().leader_epoch

    def open(self, key: ShareKey, partition: Partition, state: ShareState, turn: object) -> None:
        """Find out where the group begins, if it is not known. May block. Raises what a search by
        time does, NotLeader, WatermarkUnknown.
        """
        partition.check_end_known()  # or the group is set back to what is known
        start, end = state.start_offset, partition.high_watermark
        if start == UNKNOWN_START:
            self._configs.refresh(key.group)
            start = self._reset_offset(key.group, partition)
        elif start > end:  # what it had read is lost: others will have these offsets
            log.warning("a share group was set back", group=key.group, partition=str(partition))
            start = end
        kept = [one._replace(last=min(one.last, end - 1)) for one in state.batches]
        batches = merge_batches((), [one for one in kept if one.first <= one.last], start=start)
        now = state._replace(start_offset=start, batches=batches)
        epoch = self._leader_epoch(partition)
        partition.check_leadership()  # what is told from now on closes it
        self.partitions.open(key, now, turn, leader_epoch=epoch, is_changed=now != state)

    def _reset_offset(self, group: str, partition: Partition) -> int:
        reset = str(self._configs.value(group, "share.auto.offset.reset"))
        if reset == "earliest":
            return partition.log_start_offset
        back_ms = duration_ms(reset)
        if back_ms is None:
            return partition.high_watermark
        found = partition.offset_for_timestamp(self._clock() - back_ms)
        return partition.high_watermark if found is None else found[0]

    def is_committed(self, group: str) -> bool:
        return self._configs.value(group, "share.isolation.level") == "read_committed"

    def end_offset(self, group: str, partition: Partition) -> int:
        """Where what the group may see ends now."""
        if self.is_committed(group):
            return partition.offsets().last_stable_offset
        return partition.high_watermark

    def read(
        self,
        key: ShareKey,
        partition: Partition,
        wanted: Wanted,
        *,
        max_bytes: int,
        reader: object,
    ) -> ShareRead | None:
        """Give records to a member; None: look again. May block. Raises GroupRefused, and what
        reads raise.
        """
        offset = self.partitions.begin_read(key, reader)
        if offset is None:
            return None
        try:
            if offset >= self.end_offset(key.group, partition):
                return None
            return self._read(
                key, partition, wanted, offset=offset, max_bytes=max_bytes, reader=reader
            )
        except OffsetTrimmed as trimmed:
            self.partitions.move_start(key, trimmed.log_start_offset)
            return None
        finally:
            self.partitions.end_read(key, reader)

    def _read(
        self,
        key: ShareKey,
        partition: Partition,
        wanted: Wanted,
        *,
        offset: int,
        max_bytes: int,
        reader: object,
    ) -> ShareRead | None:
        fetched: Fetched = partition.read(
            offset, max_bytes=max_bytes, committed=self.is_committed(key.group)
        )
        try:
            batches = read_batches(fetched, until=offset + wanted.max_records - 1)
            if not batches:
                self.partitions.skip(key, offset, fetched.next_offset)
            spans = [one.span for one in batches]
            acquired = self.partitions.acquire(
                key, wanted, spans, fetch_offset=offset, reader=reader
            )
        except BaseException:
            fetched.close()
            raise
        if not acquired:
            fetched.close()
            return None
        return ShareRead(narrowed(fetched.slices, batches, acquired), acquired)

    def summaries(
        self, group: str, places: Iterable[TopicPartition]
    ) -> tuple[dict[TopicPartition, ShareSummary], list[TierlogError]]:
        """Of those that the group reads; and why others are not known. Waits for who keeps them.
        Raises what `prepare` does.
        """
        self.prepare()
        asked = {
            place: self._ask(StateCall(what="read", key=ShareKey(group, *place)))
            for place in places
        }
        found, failures = dict[TopicPartition, ShareSummary](), list[TierlogError]()
        for place, one in asked.items():
            try:
                found[place] = summary_of(ShareKey(group, *place), one.result())
            except GroupRefused:
                pass  # it does not read it, or no longer
            except TierlogError as error:
                failures.append(error)
        return found, failures

    def read_places(self, group: str) -> list[TopicPartition]:
        """The partitions of which a group has a state. It has to be coordinated here."""
        with self._groups.coordinator.holding():
            try:
                read = self._groups.coordinator.share_group(group).initialized
            except GroupRefused:
                return []
            return [(topic_id, one) for topic_id, numbers in read.items() for one in numbers]

    def offsets(self, group: str) -> tuple[list[OffsetState], list[TierlogError]]:
        """Where what it has not done with begins, in each partition that it has read; and as
        `summaries`.
        """
        found = []
        summaries, failures = self.summaries(group, self.read_places(group))
        for place, one in summaries.items():
            name = self._groups.coordinator.topic_name(place[0])
            if name is None or one.start_offset == UNKNOWN_START:
                continue
            with suppress(UnknownTopicOrPartition):  # deleted meanwhile
                end, lag = self._groups.end_and_lag(name, place[1], one.start_offset)
                lag = lag if lag < 0 else max(0, lag - max(0, one.complete_count))
                found.append(OffsetState(name, place[1], one.start_offset, end, lag, ""))
        return sorted(found, key=lambda one: (one.topic, one.partition)), failures

    def release(self, group: str, member: str, places: Iterable[TopicPartition]) -> None:
        """The member reads them no longer: others get what it has."""
        for place in places:
            self.partitions.release(ShareKey(group, *place), member, _log_failure)

    def close_group(self, group: str) -> None:
        """None of its members has a session here any more."""
        self.partitions.close_where(lambda key: key.group == group)

    # --- administration ---------------------------------------------------------------------------

    def alter_offsets(self, group: str, starts: Mapping[TopicPartition, int]) -> None:
        """Begin anew at these offsets, durably; the group has to be empty, or is made. Raises
        GroupRefused, and what an append raises.
        """
        with self._groups.coordinator.holding():
            found = self._empty_group(group, creates=True)
            begun = self._initialize(group, starts, found.epoch)
        for one in begun:
            one.result()
        self.close_group(group)
        self._keep(found, lambda kept, now_ms: kept.mark_initialized(starts, now_ms))

    def delete_offsets(self, group: str, topic_ids: Iterable[bytes]) -> set[bytes]:
        """Forget what the group did with these topics, durably; it has to be empty. Returns those
        that it had read. Raises GroupRefused, and what an append raises.
        """
        with self._groups.coordinator.holding():
            found = self._empty_group(group)
            gone = {one for one in topic_ids if one in found.initialized}
        self._forget(found, gone)
        return gone

    def delete_states(self, group: str) -> None:
        """The group is about to be deleted. Raises GroupRefused if somebody is in it."""
        with self._groups.coordinator.holding():
            found = self._empty_group(group)
            gone = set(found.initialized)
        self._forget(found, gone)

    def forget_topic(self, topic_id: bytes) -> None:
        """It was deleted. What cannot be written now is found at the next start."""
        self.partitions.close_where(lambda key: key.topic_id == topic_id)
        for one in self.coordinator.summaries():
            if one.key.topic_id == topic_id:
                gone = self.coordinator.carry_out(StateCall(what="delete", key=one.key))
                gone.add_done_callback(lambda future: _log_failure(future.exception()))

        def forget(group: ShareGroup, now_ms: int) -> Effects:
            return group.forget_topics([topic_id], now_ms)

        for group in self._groups.coordinator.share_groups():
            if topic_id in group.initialized:
                self._groups.coordinator.keep_share_group(group, forget, _log_failure)

    def _forget_deleted(self) -> None:
        topic_ids = {one.key.topic_id for one in self.coordinator.summaries()}
        for group in self._groups.coordinator.share_groups():
            topic_ids.update(group.initialized)
        for topic_id in topic_ids:
            if self._groups.coordinator.topic_name(topic_id) is None:
                self.forget_topic(topic_id)

    def _empty_group(self, name: str, *, creates: bool = False) -> ShareGroup:
        found = self._groups.coordinator.share_group(name, creates=creates)
        if found.members:
            raise refusal(name, GroupError.NON_EMPTY_GROUP)
        return found

    def _forget(self, group: ShareGroup, topic_ids: Iterable[bytes]) -> None:
        """First the group's record: a state that is left over is written anew when it is read."""
        gone = set(topic_ids)
        if not gone:
            return
        keys = [ShareKey(group.name, *one) for one in self.read_places(group.name)]
        self._keep(group, lambda kept, now_ms: kept.forget_topics(gone, now_ms))
        asked = [
            self._ask(StateCall(what="delete", key=key)) for key in keys if key.topic_id in gone
        ]
        for one in asked:
            one.result()

    def _keep(self, group: ShareGroup, change: Callable[[ShareGroup, int], Effects]) -> None:
        done: Future[None] = Future()
        self._groups.coordinator.keep_share_group(group, change, partial(_complete, done))
        done.result()


def _complete(done: Future[None], error: BaseException | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _log_failure(error: BaseException | None) -> None:
    if error is not None:
        log.warning("share groups' state was not written", error=str(error))


def when_all(futures: Sequence[Future[Any]], reply: Callable[[BaseException | None], None]) -> None:
    """Call once all are done, with the first error, if there is one."""
    left, lock = len(futures), threading.Lock()

    def done(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        reply(next((e for one in futures if (e := one.exception()) is not None), None))

    if not futures:
        reply(None)
    for future in futures:
        future.add_done_callback(done)
