"""Calls on groups, and the progress of a consumer that reads for a group.

Rules that keep it honest:

* A record counts as consumed when the next one is requested, or when the loop over the records ends
  normally: a record that was being processed when the consumer failed is read again (at least
  once).
* Offsets are committed between fetches, at most every `COMMIT_INTERVAL_S`, and once at the end. No
  fetch waits past the time of the next commit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

import msgspec

from tierlog.client import responses
from tierlog.client.exchange import Call
from tierlog.client.records import ConsumedRecord
from tierlog.client.responses import json_reader, no_content
from tierlog.client.wire import Request, Response, Start, Subject, json_request
from tierlog.record_format.errors import InvalidRequest

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


def commit_offsets(group: str, offsets: Iterable[OffsetCommit]) -> Call[None]:
    """Commit a group's offsets; durable when this returns. Other partitions keep theirs.

    Idempotent. Raises TypeError.
    """
    rows = [offset._asdict() for offset in _as_commits(offsets)]
    subject = Subject(rows[0]["topic"], rows[0]["partition"]) if len(rows) == 1 else Subject()
    request = json_request("PUT", f"{_path(group)}/offsets", {"offsets": rows}, subject)
    return Call(request, no_content)


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


def group(name: str) -> Call[responses.Group]:
    """Get a group's offsets and lag. Raises UnknownGroup."""
    return Call(Request("GET", _path(name)), json_reader(responses.Group))


def groups() -> Call[tuple[responses.GroupSummary, ...]]:
    """List all groups by name."""
    read = json_reader(_Groups)
    return Call(Request("GET", "/v1/groups"), lambda response: read(response).groups)


def delete_group(name: str) -> Call[None]:
    """Delete a group's offsets. Raises UnknownGroup.

    Not retried once it was sent: a retry after the deletion would fail with UnknownGroup.
    """
    return Call(Request("DELETE", _path(name)), no_content, idempotent=False)


class _Groups(msgspec.Struct):
    groups: tuple[responses.GroupSummary, ...]


def _path(name: str) -> str:
    """Encodes `.` and `..` as well: URL normalization would remove them. Raises InvalidRequest."""
    if not name:
        raise InvalidRequest("a group's name must not be empty")
    encoded = quote(name, safe="")
    return "/v1/groups/" + (encoded.replace(".", "%2E") if name in {".", ".."} else encoded)


class GroupProgress:
    """How far one consumer has read for its group, and how much of that is committed."""

    def __init__(self, name: str, template: PartitionCursor) -> None:
        if template.timestamp is not None:
            raise InvalidRequest(
                "a group continues from its commits: give either group or timestamp"
            )
        self.name, self._topic = name, template.topic
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

    def consumed_before(self, record: ConsumedRecord) -> None:
        """All records of its partition before `record` are consumed."""
        self._consumed[record.partition] = record.offset

    def consumed_all(self, cursor: PartitionCursor) -> None:
        """All records that the cursor returned are consumed."""
        if isinstance(cursor.next_offset, int):
            self._consumed[cursor.partition] = cursor.next_offset

    def due_commit(self, now_s: float) -> Call[None] | None:
        if self._committed_s is None:
            self._committed_s = now_s
        if now_s - self._committed_s < COMMIT_INTERVAL_S:
            return None
        if (commit := self.commit_consumed()) is not None:
            self._committed_s = now_s
        return commit

    def limit_wait(self, wait_ms: int, now_s: float) -> int:
        """How long a fetch may wait in the broker, after `due_commit` returned None."""
        if not self._uncommitted():
            return wait_ms
        assert self._committed_s is not None, "`due_commit` sets it"
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
        call = commit_offsets(self.name, offsets)

        def note_committed(response: Response) -> None:
            call.read(response)
            self._committed.update(uncommitted)

        return replace(call, read=note_committed)

    def _uncommitted(self) -> dict[int, int]:
        return {
            partition: offset
            for partition, offset in sorted(self._consumed.items())
            if self._committed.get(partition) != offset
        }
