"""What a consumer calls next: a fetch, and from which partition, or a commit for its group.

* A consumer that ends reads one partition after another; if the end is not written yet, its fetches
  wait in the broker.
* A follower whose first fetch succeeded retries however long the broker is away: see `_policy`.
* A follower of one partition long-polls. A follower of several fetches in turn from those that are
  not up to date; after each turn, one request finds those of the others that have records. Once all
  are up to date, that request is a long poll.
* A follower of a whole topic looks for added partitions every `METADATA_MAX_AGE_MS`, and reads them
  from their beginning, or for a group from its commits.
* A member of a group reads what the group assigns to it, from the group's commits. When the group
  distributes its partitions anew, it commits, joins again, and begins at the commits again: what it
  was assigned before may have been another's in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from math import inf
from operator import index
from typing import Any, Final, NamedTuple

from tierlog.client import calls, group_calls
from tierlog.client.exchange import (
    UNLIMITED_ATTEMPTS,
    Call,
    Pause,
    RetryPolicy,
    Steps,
    exchange,
)
from tierlog.client.membership import Member, Membership
from tierlog.client.progress import GroupProgress, PartitionCursor
from tierlog.client.records import ConsumedRecord
from tierlog.client.responses import (
    METADATA_MAX_AGE_MS,
    FetchedBatches,
    GroupOffset,
    TopicDescription,
)
from tierlog.client.wire import Start
from tierlog.record_format.errors import (
    OffsetOutOfRange,
    UnknownGroup,
)

FOLLOW_WAIT_MS: Final = 10_000
AWAITED_MAX: Final = 1000  # partitions in one long poll, by the API's limit
AWAITED_IN_TURN_MS: Final = 500  # a long poll that other partitions have to wait for


def schedule_fetches(
    template: PartitionCursor,
    partitions: Iterable[int] | None,
    offset: Start | Mapping[int, Start],
    *,
    group: str | None,
    membership: Membership,
    retries: RetryPolicy,
) -> Steps[FetchSchedule]:
    """A schedule of the partitions (None: all), each with a cursor like `template`. With `group`
    they begin at its commits, where there are any; without `partitions` it is joined.

    Raises TypeError for a mapping by anything but numbers, whose offsets would not be found.
    """
    if isinstance(offset, Mapping):
        offset = {_partition(key): start for key, start in offset.items()}
    whole_topic, progress = partitions is None, None
    if group is not None:
        member = Member(group, template.topic, membership) if whole_topic else None
        progress = GroupProgress(group, template, member)
    schedule = FetchSchedule(template, offset, retries, whole_topic=whole_topic, progress=progress)
    if progress is not None and progress.member is not None:
        return schedule  # it joins first
    if partitions is None or progress is not None:
        topic = yield from _described(template, retries)
        partitions = topic.read_order if partitions is None else partitions
        offset = yield from _starts(progress, topic, offset, retries)
    schedule.read_from(partitions, offset)
    return schedule


def _described(template: PartitionCursor, policy: RetryPolicy) -> Steps[TopicDescription]:
    topic = yield from exchange(calls.describe_topic(template.topic), policy)
    template.check_topic_id(topic.topic_id)
    return topic


def _starts(
    progress: GroupProgress | None,
    topic: TopicDescription,
    offset: Start | Mapping[int, Start],
    policy: RetryPolicy,
) -> Steps[Start | Mapping[int, Start]]:
    """Where the partitions begin: for a group, at its commits, where there are any."""
    if progress is None:
        return offset
    committed: tuple[GroupOffset, ...] = ()
    with suppress(UnknownGroup):
        call = group_calls.group(progress.name, stable=progress.stable)
        committed = (yield from exchange(call, policy)).offsets
    return progress.start_offsets(committed, topic, offset)


def _partition(key: int) -> int:
    try:
        return index(key)
    except TypeError:
        raise TypeError(f"offset: expected partitions as in {{0: 5}}, not {key!r}") from None


class ScheduledCall(NamedTuple):
    """The steps of one call, and what turns its result into records."""

    steps: Steps[Any]
    to_records: Callable[[Any], list[ConsumedRecord]]


def _no_records(_: object) -> list[ConsumedRecord]:
    return []


def _pause(seconds: float) -> Steps[None]:
    yield Pause(seconds)


class FetchSchedule:
    """The order of a consumer's calls: fetches, and with `progress` what its group needs between
    them.

    `whole_topic`: partitions that are added to the topic are read too, when following.
    """

    def __init__(
        self,
        template: PartitionCursor,
        offset: Start | Mapping[int, Start],
        retries: RetryPolicy,
        *,
        whole_topic: bool,
        progress: GroupProgress | None,
    ) -> None:
        self._template, self._offset = template, offset
        self._retries, self.progress = retries, progress
        self._member = None if progress is None else progress.member
        self._queue: deque[PartitionCursor] = deque()
        self._returned: PartitionCursor | None = None  # whose records were returned last
        self._initial_ends: dict[int, int | None] = {}
        self._has_joined = False
        self._adds_partitions = whole_topic and template.follow and self._member is None
        self._refreshed_s: float | None = None

    def read_from(self, partitions: Iterable[int], offset: Start | Mapping[int, Start]) -> None:
        """Read these partitions, instead of others."""
        self._queue = deque(self._template.for_partitions(partitions, offset))
        self._returned = None
        for cursor in self._queue:
            cursor.initial_end = self._initial_ends.get(cursor.partition)

    @property
    def _policy(self) -> RetryPolicy:
        """The retries of each call of this consumer. A policy of one attempt stays at one."""
        unlimited = self._template.follow and (
            self._has_joined or any(cursor.has_fetched for cursor in self._queue)
        )
        if not unlimited or self._retries.attempts == 1:
            return self._retries
        return replace(self._retries, attempts=UNLIMITED_ATTEMPTS, deadline_s=inf)

    def next_call(self, now_s: float) -> ScheduledCall | None:
        """None when all cursors are done. Calling it means that the records of the previous call
        are consumed, or if a member must join again, those that were taken back.
        """
        for_group = None if self.progress is None else self._for_group(self.progress, now_s)
        if for_group is not None:
            return ScheduledCall(for_group, _no_records)
        if (refresh := self._topic_refresh(now_s)) is not None:
            return refresh
        while self._queue and self._queue[0].done:
            self._queue.popleft()
        if not self._queue:
            return self._last_call()
        cursor, wait_ms = self._queue[0], 0
        if cursor.follow and len(self._queue) > 1:
            if cursor.at_end:
                return self._await_records(now_s)
            self._queue.rotate(-1)
        elif cursor.at_end:
            wait_ms = self._limit_wait(cursor.limits.wait_ms or FOLLOW_WAIT_MS, now_s)
        call = cursor.next_fetch(wait_ms=wait_ms)
        steps = self._fetch(cursor, call, self._policy)
        return ScheduledCall(steps, partial(self._advance, cursor))

    def _for_group(self, progress: GroupProgress, now_s: float) -> Steps[None] | None:
        if self._member is not None and self._member.must_join:
            return self._join(progress, self._member)
        if self._returned is not None:
            progress.consumed_all(self._returned)
        return progress.commit_in_turn(self._policy) if progress.is_commit_due(now_s) else None

    def _join(self, progress: GroupProgress, member: Member) -> Steps[None]:
        yield from progress.commit_in_turn(self._policy)
        topic = yield from _described(self._template, self._policy)
        partitions = yield from member.join(self._policy)
        self._has_joined = True
        progress.forget()
        offset = yield from _starts(progress, topic, self._offset, self._policy)
        self.read_from(partitions, offset)

    def _last_call(self) -> ScheduledCall | None:
        """The last commit; a member without a partition waits until it has one."""
        if self._member is not None and self._template.follow:
            return ScheduledCall(_pause(self._member.settings.heartbeat_interval_s), _no_records)
        if self.progress is not None and self.progress.has_uncommitted:
            return ScheduledCall(self.progress.commit_in_turn(self._policy), _no_records)
        return None

    def _fetch(
        self, cursor: PartitionCursor, call: Call[FetchedBatches], policy: RetryPolicy
    ) -> Steps[FetchedBatches]:
        try:
            return (yield from exchange(call, policy))
        except OffsetOutOfRange:
            if cursor.topic_id is not None:  # the topic may have been re-created, and be shorter
                topic = yield from exchange(calls.describe_topic(cursor.topic), policy)
                cursor.check_topic_id(topic.topic_id)
            raise

    def _advance(self, cursor: PartitionCursor, fetched: FetchedBatches) -> list[ConsumedRecord]:
        is_first = cursor.topic_id is None
        records = cursor.advance(fetched)
        self._initial_ends[cursor.partition] = cursor.initial_end
        if is_first:  # the topic was not described: the first fetch sets its id for all partitions
            for other in self._queue:
                other.check_topic_id(fetched.topic_id)
        self._returned = cursor
        return records

    def _topic_refresh(self, now_s: float) -> ScheduledCall | None:
        if self._refreshed_s is None:
            self._refreshed_s = now_s
        age_ms = (now_s - self._refreshed_s) * 1000
        if not self._adds_partitions or age_ms < METADATA_MAX_AGE_MS:
            return None
        self._refreshed_s = now_s
        return ScheduledCall(self._add_partitions(), _no_records)

    def _add_partitions(self) -> Steps[None]:
        template = self._template
        topic = yield from _described(template, self._policy)
        known = {cursor.partition for cursor in self._queue}
        added = [number for number in topic.all_partitions if number not in known]
        self._queue.extend(replace(template, timestamp=None).for_partitions(added, "earliest"))

    def _limit_wait(self, wait_ms: int, now_s: float) -> int:
        return self.progress.limit_wait(wait_ms, now_s) if self.progress else wait_ms

    def _await_records(self, now_s: float) -> ScheduledCall:
        """Find which of the up-to-date partitions have records, as many as a request may name. It
        waits for one, unless there are others to fetch from.
        """
        up_to_date = takewhile(lambda cursor: cursor.at_end, self._queue)
        awaited = list(islice(up_to_date, AWAITED_MAX))
        self._queue.rotate(-len(awaited))
        topic, limits = awaited[0].topic, awaited[0].limits
        wait_ms = limits.wait_ms or FOLLOW_WAIT_MS
        if not all(cursor.at_end for cursor in self._queue):
            wait_ms = 0
        elif len(awaited) < len(self._queue):
            wait_ms = min(wait_ms, AWAITED_IN_TURN_MS)
        call = calls.await_records(
            topic,
            {cursor.partition: cursor.reached_offset for cursor in awaited},
            isolation=limits.isolation,
            wait_ms=self._limit_wait(wait_ms, now_s),
        )
        return ScheduledCall(exchange(call, self._policy), partial(self._fetch_first, awaited))

    def _fetch_first(
        self, awaited: Sequence[PartitionCursor], readable: Container[int]
    ) -> list[ConsumedRecord]:
        for cursor in awaited:
            cursor.at_end = cursor.partition not in readable
        self._queue = deque(sorted(self._queue, key=lambda cursor: cursor.at_end))
        return []
