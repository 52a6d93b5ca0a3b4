"""The state machine of a share group's members, and its assignor. What a real Kafka answers is
compared in `test_share_groups_match_kafka`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.broker.group_coordinator.test_consumer_group import Topics, id_of
from tierlog.broker.group_coordinator.assignors import Reader, simple_assignor
from tierlog.broker.group_coordinator.consumer_group import ConsumerLimits
from tierlog.broker.group_coordinator.coordinator import GroupCoordinator
from tierlog.broker.group_coordinator.group_events import (
    GroupError,
    HeartbeatAnswer,
    Limits,
    ShareBeat,
)
from tierlog.broker.group_coordinator.share_group import ShareGroupLimits
from tierlog.record_format.errors import StoreUnavailable

Reply = Callable[[BaseException | None], None]


class Broker:
    """A coordinator, its log by key, and where its groups' partitions are initialized: `waiting`,
    if they are not at once.
    """

    def __init__(self, log: dict[bytes, bytes] | None = None, **counts: int) -> None:
        self.log = {} if log is None else log
        self.topics, self.now_ms = Topics(**counts), 0
        self.waiting: list[Reply] | None = None
        self.due: list[Callable[[], None]] = []
        self.coordinator = GroupCoordinator(
            self._append,
            Limits(10, 0),
            lambda _: ConsumerLimits(10, 10),
            share_limits=lambda _: ShareGroupLimits(3, assignment_interval_ms=0),
            topics=self.topics,
            call_after=lambda _, call: self.due.append(call),
            now_ms=lambda: self.now_ms,
            wall_ms=lambda: 77,
        )
        self.coordinator.load({"g": dict(self.log)} if self.log else {})

    def _append(self, _: str, rows: list[tuple[bytes, bytes | None]]) -> Future[None]:
        for key, value in rows:
            self.log.pop(key, None)
            if value is not None:
                self.log[key] = value
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def initialize(self, group: str, places: object, *, epoch: int, reply: Reply) -> None:
        if self.waiting is None:
            reply(None)
        else:
            self.waiting.append(reply)

    def begin(self, member: str, epoch: int, *topics: str) -> list[HeartbeatAnswer]:
        answers: list[HeartbeatAnswer] = []
        beat = ShareBeat(member, epoch, "c", "/h", None, frozenset(topics) if topics else None)
        self.coordinator.beat_share("g", beat, self, answers.append)
        return answers

    def beat(self, member: str, epoch: int, *topics: str) -> HeartbeatAnswer:
        (answer,) = self.begin(member, epoch, *topics)
        return answer

    def partitions(self, member: str) -> int:
        found = self.coordinator.describe_share("g")
        assert found is not None
        given = (one for one in found.members if one.member.member_id == member)
        return sum(len(topic.partitions) for one in given for topic in one.assignment)


def test_a_member_has_partitions_once_it_is_known_where_the_group_begins() -> None:
    broker = Broker(a=2)
    broker.waiting = []
    assert broker.begin("m", 0, "a") == []  # the answer waits for it
    broker.waiting.pop()(None)
    assert broker.partitions("m") == 0
    answer = broker.beat("m", 2)
    assert answer.assignment == {(id_of("a"), 0), (id_of("a"), 1)}


def test_what_could_not_be_initialized_is_tried_again() -> None:
    broker = Broker(a=1)
    broker.waiting = []
    answers = broker.begin("m", 0, "a")
    broker.waiting.pop()(StoreUnavailable("no"))
    assert answers[0].error is GroupError.COORDINATOR_NOT_AVAILABLE
    broker.waiting = None
    broker.beat("m", 2)
    assert broker.beat("m", 2).assignment == {(id_of("a"), 0)}


def test_a_topic_that_grows_is_read_whole() -> None:
    broker = Broker(a=1)
    broker.beat("m", 0, "a")
    broker.beat("m", 2)
    broker.topics.set("a", 3)
    epoch = broker.beat("m", 3).epoch
    broker.beat("m", epoch)
    assert broker.partitions("m") == 3


def test_a_group_is_the_same_after_a_restart() -> None:
    broker = Broker(a=2)
    broker.beat("m", 0, "a")
    broker.beat("n", 0, "a")
    broker.beat("m", 2)
    restarted = Broker(broker.log, a=2)
    assert restarted.coordinator.describe_share("g") == broker.coordinator.describe_share("g")
    assert restarted.beat("m", 3).error is GroupError.NONE


def test_a_member_that_is_silent_is_removed_and_an_empty_group_stays() -> None:
    broker = Broker(a=1)
    broker.beat("m", 0, "a")
    broker.now_ms = 45_000
    broker.due[0]()
    assert broker.beat("m", 2).error is GroupError.UNKNOWN_MEMBER_ID
    assert broker.coordinator.empty_since_ms("g") is None  # it does not expire
    assert broker.beat("m", 0, "a").epoch == 4


def test_there_are_no_more_members_than_the_limit() -> None:
    broker = Broker(a=1)
    errors = [broker.beat(f"m{number}", 0, "a").error for number in range(4)]
    assert errors == [GroupError.NONE] * 3 + [GroupError.GROUP_MAX_SIZE_REACHED]


def reader(number: int, topics: Any, had: Any) -> Reader:
    return Reader(f"m{number}", None, frozenset(topics), frozenset(had))


TOPIC_IDS = [b"a", b"b", b"c"]


@given(
    st.lists(st.sets(st.sampled_from(TOPIC_IDS)), min_size=1, max_size=9),
    st.dictionaries(st.sampled_from(TOPIC_IDS), st.integers(0, 5)),
    st.booleans(),
)
def test_every_partition_has_a_reader_and_every_reader_partitions(
    read: list[set[bytes]], counts: dict[bytes, int], are_alike: bool
) -> None:
    subscriptions = [read[0]] * len(read) if are_alike else read
    topics = set().union(*subscriptions)
    partitions = {topic: range(counts.get(topic, 0)) for topic in topics}
    readers = [reader(number, one, ()) for number, one in enumerate(subscriptions)]
    given_ = simple_assignor(readers, partitions)
    owners = Counter(place for places in given_.values() for place in places)
    assert owners.keys() == {(topic, n) for topic, all_ in partitions.items() for n in all_}
    for one in readers:
        assert {topic for topic, _ in given_[one.member_id]} <= one.topics
        is_able = any(partitions[topic] for topic in one.topics)
        assert bool(given_[one.member_id]) is is_able
    again = [
        reader(number, one.topics, given_[one.member_id]) for number, one in enumerate(readers)
    ]
    assert simple_assignor(again, partitions) == given_  # nothing moves
