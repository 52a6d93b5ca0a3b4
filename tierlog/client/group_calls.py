"""Calls on groups, and the progress of a consumer that reads for a group.

Rules that keep it honest:

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
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tierlog.client import responses
from tierlog.client.exchange import Call, RetryPolicy, Steps, exchange
from tierlog.client.membership import NOBODY, Identity, Member, group_path
from tierlog.client.records import ConsumedRecord
from tierlog.client.responses import json_reader, no_content
from tierlog.client.wire import Request, Response, Start, Subject, json_request, query
from tierlog.record_format.errors import GroupRefused, InvalidRequest, TierlogError

if TYPE_CHECKING:
    from tierlog.client.scheduling import PartitionCursor

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S: Final = 5.0  # Kafka's auto.commit.interval.ms


class OffsetCommit(NamedTuple):
    """The next offset that a group reads from a partition. With `topic_id` the commit is refused
    (UnknownTopic) if the topic was re-created.
    """

    topic: str
    partition: int
    offset: int
    metadata: str | None = None
    topic_id: str | None = None


def commit_offsets(
    group: str, offsets: Iterable[OffsetCommit], *, member_id: str = "", generation: int = -1
) -> Call[None]:
    """Commit a group's offsets; durable when this returns. Other partitions keep theirs.

    While a group has members they alone commit: with their id, in their generation.

    Idempotent. Raises GroupRefused, TypeError.
    """
    rows = offset_rows(offsets)
    subject = Subject(rows[0]["topic"], rows[0]["partition"]) if len(rows) == 1 else Subject()
    fields: dict[str, Any] = {"offsets": rows}
    if member_id:  # an older broker knows no members
        fields |= {"member_id": member_id, "generation": generation}
    request = json_request("PUT", f"{group_path(group)}/offsets", fields, subject)
    return Call(request, no_content)


def offset_rows(offsets: Iterable[OffsetCommit]) -> list[dict[str, Any]]:
    """As they are sent. Raises TypeError."""
    return [offset._asdict() for offset in _as_commits(offsets)]


def _as_commits(offsets: Iterable[OffsetCommit]) -> list[OffsetCommit]:
    """Refuses a single commit: as a tuple, it would be iterated by its fields."""
    if isinstance(offsets, (OffsetCommit, str, bytes, Mapping)):
        raise TypeError(
            "offsets: expected a list of OffsetCommit, "
            f"not one {type(offsets).__name__}; put it in a list"
        )
    commits: list[OffsetCommit] = []
    given: Iterable[object] = offsets
    for index, offset in enumerate(given):
        if not isinstance(offset, OffsetCommit):
            kind = type(offset).__name__
            raise TypeError(f"offsets[{index}]: expected an OffsetCommit, not {kind}")
        commits.append(offset)
    return commits


def group(name: str, *, stable: bool = False) -> Call[responses.Group]:
    """Get a group's offsets and lag. `stable`: not while a transaction in progress has some.

    Raises UnknownGroup, ConcurrentTransactions.
    """
    request = Request("GET", group_path(name), query(stable=stable or None))
    return Call(request, json_reader(responses.Group))


def groups() -> Call[tuple[responses.GroupSummary, ...]]:
    """List all groups by name."""
    read = json_reader(_Groups)
    return Call(Request("GET", "/v1/groups"), lambda response: read(response).groups)


def delete_group(name: str) -> Call[None]:
    """Delete a group's offsets. Raises UnknownGroup.

    Not retried once it was sent: a retry after the deletion would fail with UnknownGroup.
    """
    return Call(Request("DELETE", group_path(name)), no_content, idempotent=False)


class _Groups(msgspec.Struct):
    groups: tuple[responses.GroupSummary, ...]


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
