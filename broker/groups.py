"""Consumer group offsets in `__consumer_offsets`, in Kafka's format.

* A commit is in the log, flushed, before it is acknowledged; the in-memory view follows the log
  (`offset_log`).
* The topic is created at the first commit. It is an ordinary topic: compacted, offloaded, restored.
* The view is rebuilt from the log in the background at startup. If that needs a store that is down,
  group calls fail with a retriable error; nothing else waits for it.
* A topic's offsets are deleted with it. Tombstones that cannot be written then are written with the
  next commit, or after the next start, which finds that the topic is gone.
* Who is in a group, and which partitions it reads, is the coordinator's (`group_coordinator`), from
  the same log. A commit is checked against it: of a consumer that is in no group, it is accepted
  while nobody is in the group.
* If a log was truncated, groups that had read further are set back to its end, as soon as there is
  a view. Until all of that is written, the truncation stays recorded (`truncations`).

Thread-safe. Every call may block on the flush, or on the first rebuild.

--- requests: Validates group requests: the name, and the offsets of one commit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

import msgspec
import structlog

from tierlog.broker.checkpoints import Truncations
from tierlog.broker.data_folder import TopicIdPartition, TopicPartition
from tierlog.broker.group_coordinator.coordinator import CONSUMER, GroupCoordinator
from tierlog.broker.group_coordinator.expiration import expired_offsets
from tierlog.broker.group_coordinator.group_events import GroupError, Identity, Limits
from tierlog.broker.live_topics import LiveTopics
from tierlog.broker.offset_log import (
    Committed,
    GroupView,
    OffsetLog,
    PendingAppend,
    Row,
    home_partition,
)
from tierlog.broker.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics import Topic
from tierlog.host.clock import monotonic_ms
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.consumer_offsets import (
    NO_EPOCH,
    TOPIC,
    Commit,
    CommitKey,
)
from tierlog.record_format.errors import (
    FieldProblem,
    GroupRefused,
    InvalidRequest,
    Starting,
    Throttled,
    TierlogError,
    UnknownGroup,
    UnknownTopic,
    UnknownTopicOrPartition,
)
from tierlog.record_format.produced import build_produced
from tierlog.record_format.topic_rules import ConfigValue

log = structlog.get_logger(__name__)

MAX_REBUILD_WAIT_S: Final = 5.0
EXPIRY_INTERVAL_MS: Final = 600_000  # Kafka's offsets.retention.check.interval.ms
NOBODY: Final = Identity("", None)  # a consumer that is in no group
# Kafka's own for this topic; one partition, as one broker reads it all at each start.
CONFIG: Final[Mapping[str, ConfigValue]] = {
    "cleanup.policy": "compact",
    "segment.bytes": 100 << 20,
    "compression.type": "producer",
}


class OffsetState(msgspec.Struct, frozen=True):
    """`lag`: the offsets left to read, not counting the gaps of restores."""

    topic: str
    partition: int
    offset: int
    log_end_offset: int
    lag: int
    metadata: str


class Groups:
    def __init__(
        self,
        topics: LiveTopics,
        truncations: Truncations,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        call_after: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._topics, self.truncations = topics, truncations
        self._clock, self._settings = clock, settings
        self.coordinator = GroupCoordinator(
            self._append_metadata,
            Limits(settings.group_max_size, settings.group_initial_rebalance_delay_ms),
            call_after=call_after,
            now_ms=monotonic_ms,
            wall_ms=clock,
        )
        self._expire_again_ms = monotonic_ms() + EXPIRY_INTERVAL_MS
        self._offsets = OffsetLog(lambda: self._topic_or_none(TOPIC), clock=clock)
        self._deleted_topics: set[str] = set()  # since startup, before the view was built
        self._applied: set[tuple[TopicIdPartition, int]] = set()  # truncations, to the view
        self._rebuilding = threading.Lock()

    # --- the view ---------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Build the view, once. Raises StoreUnavailable, CorruptDataError, Starting."""
        if self._offsets.view is not None:
            return
        if not self._rebuilding.acquire(timeout=MAX_REBUILD_WAIT_S):
            raise Starting("committed offsets are still being loaded")
        try:
            if self._offsets.view is None:
                self._publish(self._replay())
        finally:
            self._rebuilding.release()

    def run_round(self) -> None:
        """In the background: build the view, and write what is still unwritten."""
        self.rebuild()
        self._write_unwritten()
        if monotonic_ms() >= self._expire_again_ms:
            self._expire_again_ms = monotonic_ms() + EXPIRY_INTERVAL_MS
            self.expire_offsets()

    def _write_unwritten(self) -> None:
        if self._offsets.unwritten:
            self._offsets.write_unwritten()
        self._forget_truncations()

    def _replay(self) -> GroupView:
        view = GroupView()
        topic = self._topic_or_none(TOPIC)
        if topic is not None:
            for partition in topic.all_partitions():
                view.replay(partition)
        return view

    def _publish(self, view: GroupView) -> None:
        with self._offsets.lock:
            if TOPIC in self._deleted_topics:
                view = GroupView()
            gone = {key for key, commit in view.commits() if self._is_deleted(key.topic, commit)}
            for key in gone:
                view.remove(key)
            self.coordinator.load(view.metadata)
            view.metadata.clear()
            self._offsets.view, self._offsets.unwritten = view, dict.fromkeys(gone)
            self._deleted_topics.clear()
            self._set_back_groups(view)

    def _is_deleted(self, name: str, commit: Commit) -> bool:
        """Whether the commit's topic was deleted, even if another now has its name."""
        topic = self._topic_or_none(name)
        if topic is None or name in self._deleted_topics:
            return True
        return commit.topic_id not in (None, parse_topic_id(topic.record.topic_id))

    def _committed(self, group: str) -> list[tuple[TopicPartition, Committed]]:
        self.rebuild()
        if (topic := self._topic_or_none(TOPIC)) is not None:
            home_partition(group, topic).check_leadership()  # a new owner has newer offsets
        with self._offsets.lock:
            return sorted(self._offsets.known.groups.get(group, {}).items())

    # --- the coordinator --------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the coordinator can be called; else `prepare` first."""
        return self._offsets.view is not None and self._topic_or_none(TOPIC) is not None

    def prepare(self) -> None:
        """Build the view, and create the topic. Raises what `rebuild` does, and what creating a
        topic does.
        """
        self.rebuild()
        self._ensure_topic()

    def _ensure_topic(self) -> Topic:
        partitions = self._settings.offsets_topic_num_partitions
        return self._topics.ensure(TOPIC, CONFIG, partitions=partitions)

    def _append_metadata(self, group: str, key: bytes, value: bytes | None) -> Future[AppendResult]:
        topic = self._topics.find(TOPIC)
        home = home_partition(group, topic)
        batches = build_produced(
            [value],
            keys=[key],
            timestamps=[self._clock()],
            max_message_bytes=home.log.config.max_message_bytes,
        )
        return home.append(batches, acks=Acks.ALL)

    # --- calls ------------------------------------------------------------------------------------

    def commit_offsets(
        self,
        group: str,
        offsets: Sequence[NewOffset],
        *,
        member: Identity = NOBODY,
        generation: int = -1,
    ) -> None:
        """Commit all of the offsets or none; durable when this returns.

        Raises InvalidRequest, UnknownTopic, UnknownPartition, GroupRefused (for a member that may
        not commit), Throttled (too many offsets over all groups), and what an append raises.
        """
        check_group_name(group)
        check_offsets(offsets, metadata_max_bytes=self._settings.offset_metadata_max_bytes)
        self.rebuild()
        if self._applied:  # after a crash, this commit would be set back too
            self._write_unwritten()
        self._rows(group, offsets)  # first: a refused commit does not create the topic
        home = home_partition(group, self._ensure_topic())
        with (
            self._offsets.lock,
            self.coordinator.checking_commit(group, member, generation, exists=self._has(group)),
        ):
            rows = self._rows(group, offsets)  # again: a topic may have been deleted since
            self._check_room(rows)
            pending = self._offsets.append(home, rows)
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

    def committed(self, group: str) -> dict[TopicPartition, Commit]:
        """What is committed, with everything that was accepted before this call."""
        self.rebuild()
        self._offsets.settle()
        return {
            place: commit
            for place, (commit, _) in self._committed(group)
            if not self._is_deleted(place[0], commit)
        }

    def names(self) -> list[str]:
        """All groups, also those without offsets."""
        self.rebuild()
        with self._offsets.lock:
            return sorted({*self._offsets.known.groups, *self.coordinator.states()})

    def _has(self, group: str) -> bool:
        return group in self._offsets.known.groups

    def all_groups(self) -> Iterator[tuple[str, list[OffsetState]]]:
        """Every group, sorted by name, with its offsets."""
        self.rebuild()
        with self._offsets.lock:
            names = sorted(self._offsets.known.groups)
        for name in names:
            yield name, self._shown(self._committed(name))

    def delete(self, group: str, *, check: Callable[[set[str]], None] = lambda _: None) -> None:
        """Delete a group, durably, unless `check` of the topics of its offsets raises. Raises
        UnknownGroup, and GroupRefused if somebody is in it.
        """
        check_group_name(group)
        self.rebuild()
        with self._offsets.lock:
            self._offsets.complete_all()
            found = self._offsets.known.groups.get(group, {})
            topic = self._topic_or_none(TOPIC)
            is_known = found or self.coordinator.describe(group) is not None
            if not is_known or topic is None:
                raise UnknownGroup(f"there is no group {group!r}")
            check({name for name, _ in found})
            pending = self._append_deletion(topic, group, list(found))
        if pending is not None:
            self._offsets.complete(pending)

    def _append_deletion(
        self, topic: Topic, group: str, places: Iterable[TopicPartition]
    ) -> PendingAppend | None:
        with self.coordinator.deleting(group) as key:
            rows = [Row(CommitKey(group, *place), None) for place in places]
            tombstones = [] if key is None else [key]
            if not (rows or tombstones):
                return None
            return self._offsets.append(home_partition(group, topic), rows, tombstones=tombstones)

    def delete_offsets(self, group: str, places: Sequence[TopicPartition]) -> set[str]:
        """Delete offsets of a group, durably, but for the topics that it reads, which are returned.
        Raises UnknownGroup, and GroupRefused for a group of other members than consumers.
        """
        check_group_name(group)
        self.rebuild()
        with self._offsets.lock, self.coordinator.holding():
            self._offsets.complete_all()
            found = self._offsets.known.groups.get(group, {})
            now = self.coordinator.describe(group)
            topic = self._topic_or_none(TOPIC)
            if topic is None or (not found and now is None):
                raise UnknownGroup(f"there is no group {group!r}")
            if now is not None and now.members and now.protocol_type != CONSUMER:
                raise GroupRefused(GroupError.NON_EMPTY_GROUP, f"group {group!r} has members")
            read = self.coordinator.subscribed_topics(group)
            kept = {name for name, _ in places if read is None or name in read}
            gone = [one for one in places if one in found and one[0] not in kept]
            rows = [Row(CommitKey(group, *one), None) for one in gone]
            pending = self._offsets.append(home_partition(group, topic), rows) if rows else None
        if pending is not None:
            self._offsets.complete(pending)
        return kept

    def expire_offsets(self) -> None:
        """Forget the offsets that nobody has used for `offsets.retention.minutes`, and the groups
        that nobody is in and that have no offsets.
        """
        topic = self._topic_or_none(TOPIC)
        pending = [] if topic is None else [self._expire(topic, name) for name in self.names()]
        for one in pending:
            if one is not None:
                self._offsets.complete(one)

    def _expire(self, topic: Topic, group: str) -> PendingAppend | None:
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
            if len(expired) == len(found) and empty_since_ms is not None:
                return self._append_deletion(topic, group, expired)
            rows = [Row(CommitKey(group, *place), None) for place in expired]
            return self._offsets.append(home_partition(group, topic), rows) if rows else None

    def forget_topic(self, name: str) -> None:
        """Drop the offsets of a deleted topic: from memory now, from the log now or later.

        Offsets that were committed since on a new topic of the same name stay.
        """
        with self._offsets.lock:
            if self._offsets.view is None:
                self._deleted_topics.add(name)
                return
            self._offsets.complete_all()
            view = self._offsets.view
            if name == TOPIC:
                self.coordinator.forget_all()
                self._offsets.view, self._offsets.unwritten = self._replay(), {}
                return
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
            self.rebuild()
            with self._offsets.lock:
                self._offsets.complete_all()
                self._set_back_groups(self._offsets.known)
            self._write_unwritten()
        except (TierlogError, OSError) as error:
            log.error("group offsets not set back yet", error=str(error))

    def _set_back_groups(self, view: GroupView) -> None:
        """Apply new truncations to the view; the new offsets are still to be written."""
        ends = dict(self.truncations.ends.items() - self._applied)
        self._applied |= ends.items()
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
            topic.partition(one.partition)
            topic_id = parse_topic_id(topic.record.topic_id)
            commit = Commit(one.offset, one.metadata, now_ms, one.leader_epoch, topic_id)
            rows.append(Row(CommitKey(group, one.topic, one.partition), commit))
        return rows

    def _check_room(self, rows: Sequence[Row]) -> None:
        known, kept = self._offsets.known.groups, self._offsets.known.count
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
        """Skips partitions that were deleted meanwhile, even if others now have their names."""
        shown = []
        for (topic, number), (commit, _) in found:
            if self._is_deleted(topic, commit):
                continue
            try:
                end, lag = self._end_and_lag(topic, number, commit.offset)
            except UnknownTopicOrPartition:
                continue
            shown.append(OffsetState(topic, number, commit.offset, end, lag, commit.metadata))
        return shown

    def _end_and_lag(self, name: str, number: int, offset: int) -> tuple[int, int]:
        """For a damaged partition, from its last checkpoint. Raises UnknownTopicOrPartition."""
        topic = self._topics.find(name)
        if (damaged := topic.damaged.get(number)) is not None:
            end = damaged.recovery_point or 0
            return end, max(0, end - offset)
        partition = topic.partition(number)
        end = partition.offsets().log_end_offset
        return end, lag_of(partition, offset, end)


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
