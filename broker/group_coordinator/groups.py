"""Consumer group offsets in `__consumer_offsets`, in Kafka's format.

* A commit is in the log, flushed, before it is acknowledged; the in-memory view follows the log
  (`offset_log`).
* The topic is created at the first commit. It is an ordinary topic: compacted, offloaded, restored.
* The view is read from the log in the background, partition by partition (`coordinator_log`). If
  that needs a store that is down, calls of its groups fail with a retriable error; nothing else
  waits for it.
* A topic's offsets are deleted with it. Tombstones that cannot be written then are written with the
  next commit, or after the next start, which finds that the topic is gone.
* Who is in a group, and which partitions it reads, is the coordinator's (`group_coordinator`), from
  the same log. A commit is checked against it: of a consumer that is in no group, it is accepted
  while nobody is in the group.
* If a log was truncated, groups that had read further are set back to its end, as soon as there is
  a view. Until all of that is written, the truncation stays recorded (`truncations`).

Thread-safe. Every call may block on the flush, or while its group's partition is loaded.

--- requests: Validates group requests: the name, and the offsets of one commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import structlog

from tierlog.broker.data_folder.data_folder import TopicIdPartition, TopicPartition
from tierlog.broker.group_coordinator.consumer_protocol import CONSUMER
from tierlog.broker.group_coordinator.coordinator import GroupCoordinator
from tierlog.broker.group_coordinator.expiration import expired_offsets
from tierlog.broker.group_coordinator.group_configs import GroupConfigs
from tierlog.broker.group_coordinator.group_events import (
    GroupError,
    Identity,
    Limits,
    State,
    refusal,
)
from tierlog.broker.group_coordinator.group_states import CLASSIC
from tierlog.broker.group_coordinator.group_topics import GroupTopics
from tierlog.broker.group_coordinator.offset_log import (
    Committed,
    GroupView,
    InTransaction,
    OffsetLog,
    PendingAppend,
    Row,
)
from tierlog.broker.partition.checkpoints import Truncations
from tierlog.broker.partition.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.coordinator_log import CoordinatorLog, IsGone, home_number
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topic_replicas import NewTopic
from tierlog.broker.topics.topics import Topic
from tierlog.host.clock import monotonic_ms
from tierlog.hot_tier.log_writer import AppendResult
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.consumer_offsets import (
    NO_EPOCH,
    TOPIC,
    Commit,
    CommitKey,
)
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import (
    FieldProblem,
    InvalidRequest,
    LeaderUnknown,
    NotLeader,
    Throttled,
    TierlogError,
    UnknownGroup,
    UnknownTopic,
    UnknownTopicOrPartition,
)
from tierlog.record_format.topic_rules import ConfigValue

log = structlog.get_logger(__name__)

EXPIRY_INTERVAL_MS: Final = 600_000  # Kafka's offsets.retention.check.interval.ms
UNKNOWN_END: Final = (-1, -1)  # of a partition that no broker of the cluster is known to lead
NOBODY: Final = Identity("", None)  # a consumer that is in no group
# Kafka's own for this topic; one partition, as one broker reads it all at each start.
CONFIG: Final[Mapping[str, ConfigValue]] = {
    "cleanup.policy": "compact",
    "segment.bytes": 100 << 20,
    "compression.type": "producer",
}


class OffsetState(msgspec.Struct, frozen=True):
    """`lag`: the offsets left to read, not counting the gaps of restores. It and `log_end_offset`
    are -1 while no broker of the cluster is known to lead the partition.
    """

    topic: str
    partition: int
    offset: int
    log_end_offset: int
    lag: int
    metadata: str


@dataclass(slots=True)
class OffsetCounts:
    """Offsets of groups since the start. Changed under the lock of the offsets' log."""

    committed: int = 0
    expired: int = 0
    deleted: int = 0


class Groups:
    def __init__(
        self,
        topics: LiveTopics,
        truncations: Truncations,
        configs: GroupConfigs,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        call_after: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._topics, self.truncations, self._configs = topics, truncations, configs
        self._clock, self._settings = clock, settings
        self.log = CoordinatorLog(
            topics,
            NewTopic(
                TOPIC,
                settings.offsets_topic_num_partitions or 1,
                CONFIG,
                settings.offsets_topic_replication_factor,
            ),
            load=self._load_partition,
            forget=self._forget_groups,
            clock=clock,
        )
        self.coordinator = GroupCoordinator(
            self.log.append,
            Limits(
                settings.group_max_size,
                settings.group_initial_rebalance_delay_ms,
                settings.group_min_session_timeout_ms,
                settings.group_max_session_timeout_ms,
            ),
            configs.consumer_limits,
            share_limits=configs.share_group_limits,
            topics=GroupTopics(topics),
            call_after=call_after,
            now_ms=monotonic_ms,
            wall_ms=clock,
        )
        self._expire_again_ms = monotonic_ms() + EXPIRY_INTERVAL_MS
        self._offsets = OffsetLog(lambda: self.log.topic, clock=clock)
        self.counts = OffsetCounts()
        self._deleted_topics: set[str] = set()  # since what is not loaded yet was written
        self._applied: set[tuple[TopicIdPartition, int]] = set()  # truncations, to the view

    # --- the view ---------------------------------------------------------------------------------

    def _load_partition(self, partition: Partition) -> None:
        """Raises what reads raise."""
        self._configs.log.load()
        view = GroupView()
        view.replay(partition)
        with self._offsets.lock:
            gone = {key for key, commit in view.commits() if self._is_deleted(key.topic, commit)}
            for key in gone:
                view.remove(key)
            self._offsets.unwritten.update(dict.fromkeys(gone))
            self._set_back_groups(view, self.truncations.ends)
            self.coordinator.load(view.metadata)
            self._offsets.view.take_in(view)
            self._follow_truncations()

    def _forget_groups(self, is_gone: IsGone) -> None:
        with self._offsets.lock:
            self._offsets.complete_all()
            self.coordinator.forget_groups(is_gone)
            self._offsets.known.forget_groups(is_gone)
            for key in [key for key in self._offsets.unwritten if is_gone(key.group)]:
                del self._offsets.unwritten[key]

    def run_round(self) -> None:
        """In the background: load what came, and write what is still unwritten."""
        self.log.load()
        self._deleted_topics.clear()
        self._write_unwritten()
        if monotonic_ms() >= self._expire_again_ms:
            self._expire_again_ms = monotonic_ms() + EXPIRY_INTERVAL_MS
            self.expire_offsets()

    def _write_unwritten(self) -> None:
        if self._offsets.unwritten:
            self._offsets.write_unwritten()
        self._forget_truncations()

    def _is_deleted(self, name: str, commit: Commit) -> bool:
        """Whether the commit's topic was deleted, even if another now has its name."""
        topic = self._topic_or_none(name)
        if topic is None or commit.topic_id is None:
            return topic is None or name in self._deleted_topics
        return commit.topic_id != parse_topic_id(topic.record.topic_id)

    def _committed(self, group: str) -> list[tuple[TopicPartition, Committed]]:
        self.log.load_home(group)
        with self.log.held(group), self._offsets.lock:
            return sorted(self._offsets.known.groups.get(group, {}).items())

    # --- calls ------------------------------------------------------------------------------------

    def commit_offsets(
        self,
        group: str,
        offsets: Sequence[NewOffset],
        *,
        member: Identity = NOBODY,
        generation: int = -1,
        within: InTransaction | None = None,
        is_old: bool = False,
    ) -> None:
        """Commit all of the offsets or none; durable when this returns. `within`: they count once
        that producer's transaction is committed. `generation` is the epoch of a consumer group's
        member; `is_old`: the call has none.

        Raises InvalidRequest, UnknownTopic, UnknownPartition, GroupRefused (for a member that may
        not commit), Throttled (too many offsets over all groups), and what an append raises.
        """
        check_group_name(group)
        check_offsets(offsets, metadata_max_bytes=self._settings.offset_metadata_max_bytes)
        self.log.load_home(group)
        if self._applied:  # after a crash, this commit would be set back too
            self._write_unwritten()
        self._rows(group, offsets)  # first: a refused commit does not create the topic
        home = self.home(group)
        with self.log.held(group), self._offsets.lock:
            rows = self._rows(group, offsets)  # again: a topic may have been deleted since
            checking = self.coordinator.checking_commit(
                group,
                member,
                generation,
                exists=self._has(group),
                in_transaction=within is not None,
                places=_places(rows),
                is_old=is_old,
            )
            with checking:
                self._check_room(rows)
                pending = self._offsets.append(home, rows, within=within)
                self.counts.committed += len(rows)
        self._offsets.complete(pending)
        if self._offsets.unwritten:
            self._offsets.write_unwritten()

    def group(self, name: str) -> list[OffsetState]:
        """The group's offsets by topic and partition. Raises UnknownGroup."""
        check_group_name(name)
        found = self._committed(name)
        if not found:
            raise UnknownGroup(f"there is no group {name!r}")
        return self._shown(found)

    def check_fetch(self, group: str, member_id: str | None, epoch: int) -> None:
        """Raises GroupRefused for a member of a consumer group whose epoch is another."""
        self.log.load_home(group)
        with self.log.held(group):
            self.coordinator.check_fetch(group, member_id, epoch)

    def confirm(self, group: str) -> Future[None]:
        """Completes once all is known that was accepted before this call by another broker that
        coordinated the group: await it before what is to be read on from is read. Fails as `home`
        of `CoordinatorLog` does, and with LeaderUnknown. Does not wait.
        """
        try:
            return self.log.confirm_here(group)
        except UnknownTopic:
            confirmed: Future[None] = Future()
            confirmed.set_result(None)
        except TierlogError as error:
            confirmed = Future()
            confirmed.set_exception(error)
        return confirmed

    def settle(self) -> None:
        """Wait for the flush of all that was accepted before this call. Who reads on from a commit
        must not begin before one that was accepted: it would commit less.
        """
        self._offsets.settle()

    def committed(self, group: str) -> dict[TopicPartition, Commit]:
        """What is committed, with everything that was accepted before this call."""
        self.settle()
        return {
            place: commit
            for place, (commit, _) in self._committed(group)
            if not self._is_deleted(place[0], commit)
        }

    def unstable(self, group: str) -> set[TopicPartition]:
        """Those whose offset a transaction in progress may change."""
        self.log.load_home(group)
        with self._offsets.lock:
            return self._offsets.known.held_places(group)

    def home(self, group: str) -> Partition:
        """The partition of its offsets. Raises what `CoordinatorLog.prepare_for` and `home` do."""
        self.log.prepare_for(group)
        return self.log.home(group)

    def offsets_place(self, group: str) -> TopicPartition:
        """The partition of its offsets, wherever it is. Raises what creating a topic does."""
        return TOPIC, home_number(group, self.log.ensure_topic())

    def follow_end(self, producer_id: int, marker: EndMarker, ended: Future[AppendResult]) -> None:
        """The end of a producer's transaction is being written to the offsets' log."""
        self._offsets.follow_end(producer_id, marker, ended)

    def names(self) -> list[str]:
        """All groups, also those without offsets."""
        self.log.load()
        with self._offsets.lock:
            return sorted({*self._offsets.known.groups, *self.coordinator.names()})

    def count_by_state(self) -> Counter[tuple[str, str]]:
        """How many groups there are here, by type and state: one that has only offsets is classic.
        Loads nothing.
        """
        found = self.coordinator.count_by_state()
        with self._offsets.lock:
            found[CLASSIC, State.EMPTY] += len(
                self._offsets.known.groups.keys() - self.coordinator.names()
            )
        return found

    def count_offsets(self) -> int:
        with self._offsets.lock:
            return self._offsets.known.count

    def _has(self, group: str) -> bool:
        return group in self._offsets.known.groups

    def all_groups(self) -> Iterator[tuple[str, list[OffsetState]]]:
        """Every group, sorted by name, with its offsets."""
        self.log.load()
        with self._offsets.lock:
            names = sorted(self._offsets.known.groups)
        for name in names:
            yield name, self._shown(self._committed(name))

    def delete(self, group: str, *, check: Callable[[set[str]], None] = lambda _: None) -> None:
        """Delete a group, durably, unless `check` of the topics of its offsets raises. Raises
        UnknownGroup, and GroupRefused if somebody is in it.
        """
        check_group_name(group)
        self.log.load_home(group)
        with self.log.held(group), self._offsets.lock:
            self._offsets.complete_all()
            found = self._offsets.known.groups.get(group, {})
            if not found and self.coordinator.describe(group) is None:
                raise UnknownGroup(f"there is no group {group!r}")
            check({name for name, _ in found})
            pending = self._append_deletion(group, list(found))
            self.counts.deleted += len(found)
        if pending is not None:
            self._offsets.complete(pending)

    def _append_deletion(
        self, group: str, places: Iterable[TopicPartition]
    ) -> PendingAppend | None:
        with self.coordinator.deleting(group) as tombstones:
            rows = [Row(CommitKey(group, *place), None) for place in places]
            if not (rows or tombstones):
                return None
            return self._offsets.append(self.log.home(group), rows, tombstones=tombstones)

    def delete_offsets(self, group: str, places: Sequence[TopicPartition]) -> set[str]:
        """Delete offsets of a group, durably, but for the topics that it reads, which are returned.
        Raises UnknownGroup, and GroupRefused for a group of other members than consumers.
        """
        check_group_name(group)
        self.log.load_home(group)
        with (
            self.log.held(group),
            self._offsets.lock,
            self.coordinator.holding(),
        ):
            self._offsets.complete_all()
            found = self._offsets.known.groups.get(group, {})
            now = self.coordinator.describe(group)
            if not found and now is None:
                raise UnknownGroup(f"there is no group {group!r}")
            if now is not None and now.members and now.protocol_type != CONSUMER:
                raise refusal(group, GroupError.NON_EMPTY_GROUP)
            read = self.coordinator.subscribed_topics(group)
            kept = {name for name, _ in places if read is None or name in read}
            gone = [one for one in places if one in found and one[0] not in kept]
            rows = [Row(CommitKey(group, *one), None) for one in gone]
            pending = self._offsets.append(self.log.home(group), rows) if rows else None
            self.counts.deleted += len(rows)
        if pending is not None:
            self._offsets.complete(pending)
        return kept

    def expire_offsets(self) -> None:
        """Forget the offsets that nobody has used for `offsets.retention.minutes`, and the groups
        that nobody is in and that have no offsets.
        """
        for one in [self._expire(name) for name in self.names()]:
            if one is not None:
                self._offsets.complete(one)

    def _expire(self, group: str) -> PendingAppend | None:
        with self._offsets.lock, self.coordinator.holding():
            found = self._offsets.known.groups.get(group, {})
            empty_since_ms = self.coordinator.empty_since_ms(group)
            expired = expired_offsets(
                {place: commit for place, (commit, _) in found.items()},
                empty_since_ms=empty_since_ms,
                subscribed=self.coordinator.subscribed_topics(group),
                retention_minutes=self._settings.offsets_retention_minutes,
                now_ms=self._clock(),
            )
            self.counts.expired += len(expired)
            if len(expired) == len(found) and empty_since_ms is not None:
                return self._append_deletion(group, expired)
            rows = [Row(CommitKey(group, *place), None) for place in expired]
            return self._offsets.append(self.log.home(group), rows) if rows else None

    def forget_topic(self, name: str) -> None:
        """Drop the offsets of a deleted topic: from memory now, from the log now or later.

        Offsets that were committed since on a new topic of the same name stay.
        """
        if name == TOPIC:
            self.log.load()
            return
        with self._offsets.lock:
            if not self.log.is_loaded:
                self._deleted_topics.add(name)
            self._offsets.complete_all()
            view = self._offsets.known
            present = self._topic_or_none(name)
            since = parse_topic_id(present.record.topic_id) if present is not None else None
            gone = {
                key
                for key, commit in view.commits()
                if key.topic == name and (since is None or commit.topic_id != since)
            }
            for key in gone:
                view.remove(key)
            self._offsets.unwritten.update(dict.fromkeys(gone))
        self._offsets.write_unwritten()

    def follow_truncations(self) -> None:
        """Set back groups that had read past the end of a truncated log: they would skip the
        records written in place of the lost ones. If the offsets cannot be read or written, this is
        retried later.
        """
        try:
            with self._offsets.lock:
                self._offsets.complete_all()
                self._follow_truncations()
            self._write_unwritten()
        except (TierlogError, OSError) as error:
            log.error("group offsets not set back yet", error=str(error))

    def _follow_truncations(self) -> None:
        """Apply those that are new to all that is loaded."""
        ends = dict(self.truncations.ends.items() - self._applied)
        self._applied |= ends.items()
        self._set_back_groups(self._offsets.known, ends)

    def _set_back_groups(self, view: GroupView, ends: Mapping[TopicIdPartition, int]) -> None:
        """The new offsets are still to be written."""
        for key, commit in list(view.commits()) if ends else ():
            topic = self._topic_or_none(key.topic)
            end = ends.get((topic.record.topic_id, key.partition)) if topic is not None else None
            if end is not None and end < commit.offset:
                back = commit._replace(offset=end, leader_epoch=NO_EPOCH)
                view.set_back(key, back)
                self._offsets.unwritten[key] = back
                log.warning("group offset set back", group=key.group, topic=key.topic, offset=end)

    def _forget_truncations(self) -> None:
        """Forget truncations whose new offsets are durable. Raises ShuttingDown, OSError."""
        if not self.log.is_loaded:
            return
        with self._offsets.lock:
            has_unwritten = any(commit is not None for commit in self._offsets.unwritten.values())
            if self._applied and not has_unwritten:
                self.truncations.forget(self._applied)
                self._applied.clear()

    # --- topics -----------------------------------------------------------------------------------

    def _topic_or_none(self, name: str) -> Topic | None:
        try:
            return self._topics.find(name)
        except UnknownTopic:
            return None

    def _rows(self, group: str, offsets: Sequence[NewOffset]) -> list[Row]:
        """Raises UnknownTopic, UnknownPartition."""
        now_ms = self._clock()
        rows = []
        for one in offsets:
            topic = self._topics.find(one.topic)
            if one.topic_id not in (None, topic.record.topic_id):
                raise UnknownTopic.recreated(one.topic)
            topic.check_number(one.partition)
            topic_id = parse_topic_id(topic.record.topic_id)
            commit = Commit(one.offset, one.metadata, now_ms, one.leader_epoch, topic_id)
            rows.append(Row(CommitKey(group, one.topic, one.partition), commit))
        return rows

    def _check_room(self, rows: Sequence[Row]) -> None:
        view = self._offsets.known
        known, kept = view.groups, view.count + view.held_count
        limit = self._settings.group_commits_max
        if kept + len(rows) <= limit:
            return
        new = sum(row.key[1:] not in known.get(row.key.group, {}) for row in rows)
        if kept + new > limit:
            raise Throttled(
                f"{kept} offsets are committed, and at most {limit} are kept: delete "
                "groups that are no longer needed"
            )

    def _shown(self, found: Iterable[tuple[TopicPartition, Committed]]) -> list[OffsetState]:
        """Skips partitions that were deleted meanwhile, even if others now have their names. A lag
        of 0 is shown where nobody is known to lead.
        """
        shown = []
        for (topic, number), (commit, _) in found:
            if self._is_deleted(topic, commit):
                continue
            try:
                end, lag = self.end_and_lag(topic, number, commit.offset)
            except UnknownTopicOrPartition:
                continue
            except LeaderUnknown:
                end, lag = commit.offset, 0
            shown.append(OffsetState(topic, number, commit.offset, end, lag, commit.metadata))
        return shown

    def end_and_lag(self, name: str, number: int, offset: int) -> tuple[int, int]:
        """For a damaged partition, from its last checkpoint; for one of another broker, as that
        last said, UNKNOWN_END if none is known. Raises UnknownTopicOrPartition.
        """
        topic = self._topics.find(name)
        if (damaged := topic.damaged.get(number)) is not None:
            end = damaged.recovery_point or 0
            return end, max(0, end - offset)
        try:
            partition = topic.partition(number)
        except (NotLeader, LeaderUnknown):
            elsewhere = topic.end_elsewhere(number)
            return UNKNOWN_END if elsewhere is None else (elsewhere, max(0, elsewhere - offset))
        end = partition.offsets().log_end_offset
        return end, lag_of(partition, offset, end)


def _places(rows: Iterable[Row]) -> list[tuple[bytes, int]]:
    """By the topics' ids."""
    commits = ((row.commit, row.key.partition) for row in rows)
    return [(one.topic_id.bytes, number) for one, number in commits if one and one.topic_id]


def lag_of(partition: Partition, offset: int, log_end_offset: int) -> int:
    """The number of offsets in [offset, log end), not counting the gaps of restores."""
    skipped = sum(
        max(0, min(gap.end_offset, log_end_offset) - max(gap.start_offset, offset))
        for gap in partition.gaps
    )
    return max(0, log_end_offset - offset - skipped)


MAX_NAME_LENGTH: Final = 255


class NewOffset(NamedTuple):
    """The next offset that the group will read. `topic_id`, if given, must be the topic's."""

    topic: str
    partition: int
    offset: int
    metadata: str = ""
    topic_id: str | None = None
    leader_epoch: int = NO_EPOCH


def check_group_name(name: str) -> None:
    """Any text of 1 to 255 characters. Raises InvalidRequest."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        detail = f"a group's name has 1 to {MAX_NAME_LENGTH} characters, this one {len(name)}"
        raise InvalidRequest(detail, problems=(FieldProblem("group", detail),))


def check_offsets(offsets: Sequence[NewOffset], *, metadata_max_bytes: int) -> None:
    """Check the offsets of one commit. Raises InvalidRequest, which names each invalid one."""
    problems = []
    seen: set[tuple[str, int]] = set()
    for index, one in enumerate(offsets):
        size = len(one.metadata.encode())
        if size > metadata_max_bytes:
            detail = f"metadata has at most {metadata_max_bytes} bytes, not {size}"
            problems.append(FieldProblem(f"offsets[{index}].metadata", detail))
        if one[:2] in seen:
            detail = f"{one.topic}-{one.partition} is given twice"
            problems.append(FieldProblem(f"offsets[{index}]", detail))
        seen.add(one[:2])
    if not offsets:
        problems.append(FieldProblem("offsets", "at least one offset is required"))
    if problems:
        detail = "; ".join(f"{loc}: {msg}" for loc, msg in problems[:5])
        raise InvalidRequest(detail, problems=tuple(problems[:100]))
