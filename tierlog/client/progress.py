"""How far a consumer has read: in a partition, and for its group.

* A cursor moves only past records that it returned, so that a failed fetch is repeated, and its
  next offset is what a group may commit.
* Without an `end_offset`, the first response fixes `initial_end`: records appended meanwhile do not
  keep a consumer from ending. A given end is waited for; so is the end of a partition whose leader
  does not answer, which a response from the bucket does not know.
* A consumer of committed records is also at the end at the last stable offset: the response then
  makes no progress.
* A record counts as consumed when the next one is requested, or when the loop over the records ends
  normally: a record that was being processed when the consumer failed is read again (at least
  once).
* Offsets are committed between fetches, at most every `COMMIT_INTERVAL_S`, before its partitions
  are distributed anew, and once at the end. No fetch waits past the time of the next commit, nor
  for longer than a heartbeat's interval.
* A commit that is refused as of an earlier generation commits nothing: the records since the last
  one are read again, by whoever has their partitions now.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from operator import index
from typing import Final

from tierlog.client import calls, responses
from tierlog.client.exchange import Call, RetryPolicy, Steps, exchange
from tierlog.client.group_calls import OffsetCommit, commit_offsets
from tierlog.client.membership import NOBODY, Identity, Member
from tierlog.client.records import ConsumedRecord, decode_fetched, from_timestamp
from tierlog.client.responses import FetchedBatches
from tierlog.client.wire import DEFAULT_LIMITS, Limits, Response, Start, normalize_start
from tierlog.record_format.errors import GroupRefused, InvalidRequest, TierlogError, UnknownTopic

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S: Final = 5.0  # Kafka's auto.commit.interval.ms


@dataclass(slots=True)
class PartitionCursor:
    """One consumer's progress in one partition. `follow`: never done. `topic_id`: None until it is
    known. `end_offset`: by partition only in what others are made like.

    Raises InvalidRequest for a follower with an end.
    """

    topic: str
    partition: int = 0
    topic_id: str | None = None
    next_offset: Start = "earliest"
    timestamp: int | None = None
    end_offset: int | Mapping[int, int] | None = None
    follow: bool = False
    limits: Limits = DEFAULT_LIMITS
    initial_end: int | None = None
    at_end: bool = False
    has_fetched: bool = False

    def __post_init__(self) -> None:
        if self.follow and self.end_offset is not None:
            raise InvalidRequest("a follower never ends: give either follow or end_offset")

    def for_partitions(
        self, partitions: Iterable[int], offset: Start | Mapping[int, Start]
    ) -> list[PartitionCursor]:
        """One cursor like this for each partition, also if it is named twice, at its offset;
        "earliest" for partitions that a mapping leaves out, and without an end likewise.

        Raises TypeError for a single number, and for anything that is not a number.
        """
        if isinstance(partitions, int):
            raise TypeError(f"partitions: expected a list of numbers, as in [{partitions}]")
        if self.timestamp is not None:
            offset = "earliest"  # not used: the first fetch is by the timestamp
        ends = self.end_offset
        return [
            replace(
                self,
                partition=partition,
                next_offset=normalize_start(
                    offset.get(partition, "earliest") if isinstance(offset, Mapping) else offset
                ),
                end_offset=_number(ends.get(partition) if isinstance(ends, Mapping) else ends),
            )
            for partition in dict.fromkeys(map(index, partitions))
        ]

    @property
    def reached_offset(self) -> int:
        """Where the next fetch begins. Only after the first one."""
        assert isinstance(self.next_offset, int), "a response has resolved it"
        return self.next_offset

    def next_fetch(self, *, wait_ms: int = 0) -> Call[FetchedBatches]:
        """The next fetch; only a consumer at the end should wait."""
        return calls.fetch_batches(
            self.topic,
            self.partition,
            offset=self.next_offset,
            timestamp=self.timestamp,
            limits=self.limits._replace(wait_ms=wait_ms),
        )

    def advance(self, fetched: FetchedBatches) -> list[ConsumedRecord]:
        """Return the records of a response to `next_fetch`, and move past them. Raises UnknownTopic
        if the topic was re-created.
        """
        self.check_topic_id(fetched.topic_id)
        self.has_fetched = True
        if self.initial_end is None and not self.follow and fetched.is_end_known:
            self.initial_end = fetched.high_watermark
        end = self.initial_end if self._end is None else self._end
        records, corrupt_from = decode_fetched(
            fetched.batches,
            partial(ConsumedRecord, self.topic, self.partition),
            of=f"{self.topic}-{self.partition}",
            from_offset=self.next_offset
            if isinstance(self.next_offset, int)
            else fetched.log_start_offset,
            end_offset=end if self.timestamp is None else None,
            next_offset=fetched.next_offset,
        )
        if self.limits.key is not None:
            records = [record for record in records if record.key == self.limits.key]
        if self.timestamp is not None:
            # Before the cut at the end: the first record at that time may lie beyond it.
            found = from_timestamp(records, self.timestamp)
            records = [one for one in found if end is None or one.offset < end]
        self.at_end = fetched.up_to_date or fetched.next_offset == self.next_offset
        self.next_offset, self.timestamp = fetched.next_offset, None
        if corrupt_from is not None:
            self.at_end, self.next_offset = False, corrupt_from
        if end is not None:
            self.next_offset = min(self.next_offset, end)
        return records

    def check_topic_id(self, topic_id: str) -> None:
        """Raises UnknownTopic if the topic was re-created under its name."""
        if self.topic_id not in (None, topic_id):
            raise UnknownTopic.recreated(self.topic)
        self.topic_id = topic_id

    @property
    def done(self) -> bool:
        """Whether there is nothing left to fetch."""
        if self.follow or self.timestamp is not None or not isinstance(self.next_offset, int):
            return False
        if self._end is not None:
            return self.next_offset >= self._end
        return self.at_end or (
            self.initial_end is not None and self.next_offset >= self.initial_end
        )

    @property
    def _end(self) -> int | None:
        assert not isinstance(self.end_offset, Mapping), "`for_partitions` chose one"
        return self.end_offset


def _number(offset: int | None) -> int | None:
    return None if offset is None else index(offset)


class GroupProgress:
    """How far one consumer has read for its group, and how much of that is committed. `member`:
    None for one that chose its partitions itself. `in_hand`: the record that the loop has.
    """

    def __init__(self, name: str, template: PartitionCursor, member: Member | None) -> None:
        if template.timestamp is not None:
            raise InvalidRequest(
                "a group continues from its commits: give either group or timestamp"
            )
        self.name, self.member, self._topic = name, member, template.topic
        self.stable = template.limits.isolation == "read_committed"
        self.in_hand: ConsumedRecord | None = None
        self._topic_id: str | None = None
        self._committed_s: float | None = None
        self._consumed: dict[int, int] = {}
        self._committed: dict[int, int] = {}

    def start_offsets(
        self,
        committed: Iterable[responses.GroupOffset],
        topic: responses.TopicDescription,
        default: Start | Mapping[int, Start],
    ) -> Mapping[int, Start]:
        """Where each partition begins: at its commit, or with a warning at the log start above it;
        without a commit at `default`.
        """
        self._topic_id = topic.topic_id
        starts: dict[int, Start] = (
            {**default}
            if isinstance(default, Mapping)
            else dict.fromkeys(topic.all_partitions, default)
        )
        log_starts = {one.partition: one.log_start_offset for one in topic.partitions}
        for one in committed:
            if one.topic == topic.name:
                self._committed[one.partition] = one.offset
                starts[one.partition] = self._resume_at(one.partition, log_starts)
        return starts

    def _resume_at(self, partition: int, log_starts: Mapping[int, int]) -> int:
        committed, log_start = self._committed[partition], log_starts.get(partition, 0)
        if committed >= log_start:
            return committed
        unread = f"offsets {committed} to {log_start - 1} of {self._topic}-{partition}"
        log.warning("group %s never read %s: they are deleted", self.name, unread)
        return log_start

    def hand_out(self, record: ConsumedRecord, now_s: float) -> None:
        """The loop gets this record; all before it in its partition are consumed."""
        self._consumed[record.partition] = record.offset
        self.in_hand = record
        if self.member is not None:
            self.member.hand_out(now_s)

    def take_back(self) -> bool:
        """The record in hand is consumed. Whether the loop may get the next one that was fetched:
        not before a member that must join again has done so.
        """
        assert self.in_hand is not None, "`hand_out` sets it"
        self._consumed[self.in_hand.partition] = self.in_hand.offset + 1
        self.in_hand = None
        if self.member is None:
            return True
        self.member.take_back()
        return not self.member.must_join

    def consumed_in_hand(self) -> None:
        """The record in hand is consumed, although the loop has not asked for the next one."""
        assert self.in_hand is not None, "checked by the caller"
        self._consumed[self.in_hand.partition] = self.in_hand.offset + 1

    def consumed_all(self, cursor: PartitionCursor) -> None:
        """All records that the cursor returned are consumed."""
        if isinstance(cursor.next_offset, int):
            self._consumed[cursor.partition] = cursor.next_offset

    def is_commit_due(self, now_s: float) -> bool:
        if self._committed_s is None:
            self._committed_s = now_s
        if now_s - self._committed_s < COMMIT_INTERVAL_S or not self.has_uncommitted:
            return False
        self._committed_s = now_s
        return True

    def limit_wait(self, wait_ms: int, now_s: float) -> int:
        """How long a fetch may wait in the broker, if no commit is due."""
        if self.member is not None:  # it may have to join again
            wait_ms = min(wait_ms, self.member.settings.heartbeat_interval_ms)
        if not self.has_uncommitted:
            return wait_ms
        assert self._committed_s is not None, "`is_commit_due` sets it"
        left_s = self._committed_s + COMMIT_INTERVAL_S - now_s
        return min(wait_ms, ceil(left_s * 1000))

    def commit_consumed(self) -> Call[None] | None:
        """A commit of all offsets that are not committed; None if there are none. They count as
        committed once the broker has confirmed it.
        """
        uncommitted = self._uncommitted()
        if not uncommitted:
            return None
        offsets = [
            OffsetCommit(self._topic, partition, offset, topic_id=self._topic_id)
            for partition, offset in uncommitted.items()
        ]
        who = self._identity
        call = commit_offsets(
            self.name, offsets, member_id=who.member_id, generation=who.generation
        )

        def note_committed(response: Response) -> None:
            call.read(response)
            self._committed.update(uncommitted)

        return replace(call, read=note_committed)

    def commit_in_turn(self, policy: RetryPolicy) -> Steps[None]:
        """Commit what is consumed. If the group refuses, forget it: a member then joins again.

        Raises GroupRefused if it is not a member.
        """
        who, commit = self._identity, self.commit_consumed()
        if commit is None:
            return
        try:
            yield from exchange(commit, policy)
        except GroupRefused as refused:
            if self.member is None:
                raise
            log.warning("what was read since the last commit will be read again: %s", refused)
            self.member.refuse(refused, who)
            self.forget()

    @contextmanager
    def logging_what_is_lost(self) -> Iterator[None]:
        """Of a last commit, whose error nobody gets: the loop ends with another, or by choice."""
        try:
            yield
        except TierlogError as error:
            log.warning("group %s: the last records are not committed: %s", self.name, error)

    def leave(self) -> Call[None] | None:
        return None if self.member is None else self.member.leave()

    def forget(self) -> None:
        """Where it is: its partitions are another's, or begin anew at the group's commits."""
        self._consumed.clear()
        self._committed.clear()

    def forget_membership(self) -> None:
        """After a fork: it is the other process that is in the group."""
        if self.member is not None and self.member.identity != NOBODY:
            self.member.forget()
            self.forget()

    @property
    def _identity(self) -> Identity:
        return NOBODY if self.member is None else self.member.identity

    @property
    def has_uncommitted(self) -> bool:
        return bool(self._uncommitted())

    def _uncommitted(self) -> dict[int, int]:
        return {
            partition: offset
            for partition, offset in sorted(self._consumed.items())
            if self._committed.get(partition) != offset
        }
