"""How far each group has read: offsets in `__consumer_offsets`, as Kafka keeps them.

* A commit is in the log, flushed, before it is answered; the view in memory follows the log
  (`offset_log`).
* The topic is created at the first commit. It is a topic like any other: compacted, offloaded,
  restored.
* The view is rebuilt from the log in the background at startup. If that needs a store that is down,
  calls on groups are refused as retriable; nothing else waits for it.
* A topic's offsets are deleted with it. Tombstones that could not be written then are kept:
  they are written with the next commit, or at the next start, which knows that the topic is gone.
* If a log was cut, groups that had read further go back to its end, as soon as there is a view;
  what could not be written of that is kept too, and the cut stays noted until it is (`cuts`).

Thread-safe. Every call may block: on the flush, or on the first rebuild.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from broker.data_folder import TopicIdPartition, TopicPartition
from broker.groups.offset_log import OffsetLog, Row, home_partition
from broker.groups.requests import NewOffset, check_group_name, check_offsets
from broker.groups.truncations import Truncations
from broker.groups.view import Committed, GroupView
from broker.partition import Partition
from broker.topics import Topic
from record_format.checkpoint_files import parse_topic_id
from record_format.config_value import ConfigValue
from record_format.consumer_offsets import (
    NO_EPOCH,
    TOPIC,
    Commit,
    CommitKey,
)
from record_format.errors import (
    Starting,
    Throttled,
    TierlogError,
    UnknownGroup,
    UnknownTopic,
    UnknownTopicOrPartition,
)

log = structlog.get_logger(__name__)

MAX_REBUILD_WAIT_S: Final = 5.0
# Kafka's own for this topic; one partition, as one broker reads it all at each start.
CONFIG: Final[Mapping[str, ConfigValue]] = {
    "cleanup.policy": "compact",
    "segment.bytes": 100 << 20,
    "compression.type": "producer",
}


class OffsetState(msgspec.Struct, frozen=True):
    """`lag`: offsets left to read, without gaps that a restore left."""

    topic: str
    partition: int
    offset: int
    log_end_offset: int
    lag: int
    metadata: str


class Groups:
    """`find_topic` raises UnknownTopic; `make_topic` returns the topic, new or not."""

    def __init__(
        self,
        *,
        find_topic: Callable[[str], Topic],
        make_topic: Callable[[str, Mapping[str, ConfigValue]], Topic],
        clock: Callable[[], int],
        commits_max: int,
        cuts: Truncations,
    ) -> None:
        self._find_topic, self._make_topic, self._clock = find_topic, make_topic, clock
        self._commits_max, self._cuts = commits_max, cuts
        self._offsets = OffsetLog(lambda: self._topic_or_none(TOPIC), clock=clock)
        self._gone: set[str] = set()  # deleted before the view was there
        self._followed: set[tuple[TopicIdPartition, int]] = set()  # cuts that the view knows of
        self._rebuilding = threading.Lock()

    # --- the view ---------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Read the log, if nobody has yet. Raises StoreUnavailable, CorruptDataError, Starting."""
        if self._offsets.view is not None:
            return
        if not self._rebuilding.acquire(timeout=MAX_REBUILD_WAIT_S):
            raise Starting("committed offsets are still being read")
        try:
            if self._offsets.view is None:
                self._publish(self._replay())
        finally:
            self._rebuilding.release()

    def run_round(self) -> None:
        """In the background: the first rebuild, and what is unwritten yet."""
        self.rebuild()
        if self._offsets.unwritten:
            self._offsets.write_unwritten()
        self._forget_cuts()

    def _replay(self) -> GroupView:
        view = GroupView()
        topic = self._topic_or_none(TOPIC)
        if topic is not None:
            for partition in topic.all_partitions():
                view.replay(partition)
        return view

    def _publish(self, view: GroupView) -> None:
        with self._offsets.lock:
            if TOPIC in self._gone:
                view = GroupView()
            gone = {key for key, commit in view.commits() if self._is_gone(key.topic, commit)}
            for key in gone:
                view.remove(key)
            self._offsets.view, self._offsets.unwritten = view, dict.fromkeys(gone)
            self._gone.clear()
            self._take_back(view)

    def _is_gone(self, name: str, commit: Commit) -> bool:
        """Whether the commit is on a topic that is there no more, be it one of the same name."""
        topic = self._topic_or_none(name)
        if topic is None or name in self._gone:
            return True
        return commit.topic_id not in (None, parse_topic_id(topic.record.topic_id))

    def _committed(self, group: str) -> list[tuple[TopicPartition, Committed]]:
        self.rebuild()
        if (topic := self._topic_or_none(TOPIC)) is not None:
            home_partition(group, topic).check_leadership()  # whoever took it over has newer ones
        with self._offsets.lock:
            return sorted(self._offsets.known.groups.get(group, {}).items())

    # --- calls ------------------------------------------------------------------------------------

    def commit(self, group: str, offsets: Sequence[NewOffset]) -> None:
        """Durable when this returns; all of them, or none.

        Raises InvalidRequest, UnknownTopic, UnknownPartition, Throttled (too many commits in all),
        and what an append raises.
        """
        check_group_name(group)
        check_offsets(offsets)
        self.rebuild()
        self._rows(group, offsets)  # a refused commit does not make the topic
        home = home_partition(group, self._make_topic(TOPIC, CONFIG))
        with self._offsets.lock:
            rows = self._rows(group, offsets)  # looks again: a topic may have been deleted since
            self._check_room(rows)
            pending = self._offsets.append(home, rows)
        self._offsets.settle(pending)
        if self._offsets.unwritten:
            self._offsets.write_unwritten()

    def group(self, name: str) -> list[OffsetState]:
        """By topic and partition. Raises UnknownGroup."""
        check_group_name(name)
        found = self._committed(name)
        if not found:
            raise UnknownGroup(f"there is no group {name!r}")
        return self._shown(found)

    def all_groups(self) -> Iterator[tuple[str, list[OffsetState]]]:
        """Every group by name, as `group` has it."""
        self.rebuild()
        with self._offsets.lock:
            names = sorted(self._offsets.known.groups)
        for name in names:
            yield name, self._shown(self._committed(name))

    def delete(self, group: str) -> None:
        """Forget a group's offsets, durably. Raises UnknownGroup."""
        check_group_name(group)
        self.rebuild()
        with self._offsets.lock:
            self._offsets.settle_all()
            found = self._offsets.known.groups.get(group)
            topic = self._topic_or_none(TOPIC)
            if not found or topic is None:
                raise UnknownGroup(f"there is no group {group!r}")
            rows = [Row(CommitKey(group, *place), None) for place in found]
            pending = self._offsets.append(home_partition(group, topic), rows)
        self._offsets.settle(pending)

    def forget_topic(self, name: str) -> None:
        """The topic was deleted: its offsets go from memory now, from the log where that works.

        Those that a group committed since on a new topic of the name stay.
        """
        with self._offsets.lock:
            if self._offsets.view is None:
                self._gone.add(name)
                return
            self._offsets.settle_all()
            view = self._offsets.view
            if name == TOPIC:
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
        """Set back groups that had read further than a log that was cut now reaches: they would
        skip what is written in place of what was lost. If that cannot be looked up, or written, it
        is done later.
        """
        try:
            self.rebuild()
            with self._offsets.lock:
                self._offsets.settle_all()
                self._take_back(self._offsets.known)
            self._offsets.write_unwritten()
            self._forget_cuts()
        except (TierlogError, OSError) as error:
            log.error("groups not set back yet", error=str(error))

    def _take_back(self, view: GroupView) -> None:
        """In the view, of the cuts that it does not know of yet; the records are unwritten."""
        ends = {cut for cut in self._cuts.ends.items() if cut not in self._followed}
        self._followed |= ends
        for key, commit in list(view.commits()) if ends else ():
            topic = self._topic_or_none(key.topic)
            place = (topic.record.topic_id if topic else "", key.partition)
            for end in (end for cut, end in ends if cut == place and end < commit.offset):
                back = commit._replace(offset=end, leader_epoch=NO_EPOCH)
                view.set_back(key, back)
                self._offsets.unwritten[key] = back
                log.warning("group set back", group=key.group, topic=key.topic, offset=end)

    def _forget_cuts(self) -> None:
        """Those that groups have followed durably. Raises ShuttingDown, OSError."""
        with self._offsets.lock:
            owes_offsets = any(commit is not None for commit in self._offsets.unwritten.values())
            if self._followed and not owes_offsets:
                self._cuts.forget(self._followed)
                self._followed.clear()

    # --- topics -----------------------------------------------------------------------------------

    def _topic_or_none(self, name: str) -> Topic | None:
        try:
            return self._find_topic(name)
        except UnknownTopic:
            return None

    def _rows(self, group: str, offsets: Sequence[NewOffset]) -> list[Row]:
        """Raises UnknownTopic, UnknownPartition."""
        now_ms = self._clock()
        rows = []
        for one in offsets:
            topic = self._find_topic(one.topic)
            if one.topic_id not in (None, topic.record.topic_id):
                raise UnknownTopic.recreated(one.topic)
            topic.partition(one.partition)
            topic_id = parse_topic_id(topic.record.topic_id)
            commit = Commit(one.offset, one.metadata, now_ms, topic_id=topic_id)
            rows.append(Row(CommitKey(group, one.topic, one.partition), commit))
        return rows

    def _check_room(self, rows: Sequence[Row]) -> None:
        known, kept = self._offsets.known.groups, self._offsets.known.count
        if kept + len(rows) <= self._commits_max:
            return
        new = sum(row.key[1:] not in known.get(row.key.group, {}) for row in rows)
        if kept + new > self._commits_max:
            raise Throttled(
                f"{kept} offsets are committed, and at most {self._commits_max} are kept: "
                "delete groups that nobody needs"
            )

    def _shown(self, found: Iterable[tuple[TopicPartition, Committed]]) -> list[OffsetState]:
        """Without partitions that went in this moment, be there others of the name by now."""
        shown = []
        for (topic, number), (commit, _) in found:
            if self._is_gone(topic, commit):
                continue
            try:
                end, lag = self._end_and_lag(topic, number, commit.offset)
            except UnknownTopicOrPartition:
                continue
            shown.append(OffsetState(topic, number, commit.offset, end, lag, commit.metadata))
        return shown

    def _end_and_lag(self, name: str, number: int, offset: int) -> tuple[int, int]:
        """Of a damaged partition as its last checkpoint has it. Raises UnknownTopicOrPartition."""
        topic = self._find_topic(name)
        if (damaged := topic.damaged.get(number)) is not None:
            end = damaged.recovery_point or 0
            return end, max(0, end - offset)
        partition = topic.partition(number)
        end = partition.offsets().log_end_offset
        return end, lag_of(partition, offset, end)


def lag_of(partition: Partition, offset: int, log_end_offset: int) -> int:
    """Offsets in [offset, log end), without those that a restore left out."""
    manifest = partition.cold.manifest if partition.cold is not None else None
    gaps = manifest.gaps if manifest is not None else ()
    skipped = sum(
        max(0, min(gap.end_offset, log_end_offset) - max(gap.start_offset, offset)) for gap in gaps
    )
    return max(0, log_end_offset - offset - skipped)
