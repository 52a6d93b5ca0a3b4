"""Who has a partition, as the brokers' reports say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tierlog.broker.cluster.shown_sets import Short, ShownSets
from tierlog.broker.membership.leaders import Leader, Leaders
from tierlog.broker.membership.peers import LeaderReport
from tierlog.hot_tier.log_config import LogConfig

ONE = Leader(3, 10, 0, 1)
THREE = Leader(4, 20, 5, 1, (1, 2, 3), (1, 3), (0, 7, -1))


def sets_of(leaders: Leaders) -> ShownSets:
    def find(topic_id: str, number: int) -> Leader | None:
        return leaders.find_leader((topic_id, number))

    return ShownSets(leaders, find)


def topic(topic_id: str, *, factor: int, partitions: int = 1, **config: object) -> Any:
    record = SimpleNamespace(topic_id=topic_id, replication_factor=factor)
    return SimpleNamespace(
        record=record, config=LogConfig.parse(config), numbers=list(range(partitions))
    )


def test_a_report_says_the_same_after_it_was_sent_and_is_as_before_without_sets() -> None:
    led = {("a", 0): ONE, ("b", 1): THREE}
    sent = msgspec.json.encode(LeaderReport.of(1, led))
    assert msgspec.json.decode(sent, type=LeaderReport).led == led
    assert b"sets" not in msgspec.json.encode(LeaderReport.of(1, {("a", 0): ONE}))


def test_a_partition_is_shown_with_the_set_that_its_leader_reported() -> None:
    leaders = Leaders()
    leaders.put_report(1, {("a", 0): ONE, ("b", 0): THREE})
    sets = sets_of(leaders)
    assert sets.shown("a", 0) == (3, 1, [1], [1], [0], (), (), False)
    assert sets.shown("b", 0) == (4, 1, [1, 2, 3], [1, 3], [0, 7, -1], (), (), False)
    assert sets.shown("c", 0) == (-1, None, [], [], [], (), (), False)


def test_the_last_set_is_shown_of_a_partition_whose_leader_is_gone() -> None:
    leaders = Leaders()
    leaders.put_report(1, {("a", 0): ONE, ("b", 0): THREE})
    leaders.keep_only([2, 3])
    sets = sets_of(leaders)
    assert sets.shown("a", 0) == (-1, None, [1], [], [], (), (), False)
    assert sets.shown("b", 0) == (-1, None, [1, 2, 3], [1, 3], [], (), (), False)
    leaders.put_report(3, {("b", 0): Leader(5, 21, 5, 3, (1, 2, 3), (2, 3), (1, 1, 0))})
    assert sets.shown("b", 0) == (5, 3, [1, 2, 3], [2, 3], [1, 1, 0], (), (), False)


def test_what_is_short_is_counted_of_all_or_of_one_leader() -> None:
    leaders = Leaders()
    alone = Leader(4, 20, 5, 2, (1, 2, 3), (2,), (0, 0, 0))
    leaders.put_report(1, {("a", 0): ONE, ("b", 0): THREE})
    leaders.put_report(2, {("b", 1): alone})
    topics = [topic("a", factor=1, partitions=2), topic("b", factor=3, partitions=3)]
    sets = sets_of(leaders)
    every = Short(offline=2, under_replicated=2, under_min_isr=1, at_min_isr=1)
    assert sets.count_short(topics) == every
    assert sets.count_short(topics, leader=1) == Short(under_replicated=1, at_min_isr=1)
    assert sets.count_short(topics, leader=2) == Short(under_replicated=1, under_min_isr=1)


def test_a_partition_that_is_still_alone_is_not_short_of_what_it_has_not() -> None:
    """As in Kafka: `min.insync.replicas` is bound by the replicas that there are."""
    leaders = Leaders()
    leaders.put_report(1, {("a", 0): ONE, ("a", 1): THREE})
    replicated = topic("a", factor=3, partitions=2, **{"min.insync.replicas": 2})
    assert sets_of(leaders).count_short([replicated]) == Short(under_replicated=1, at_min_isr=1)


@pytest.mark.parametrize(("has_store", "missing"), [(True, 0), (False, 1)])
def test_the_bucket_counts_as_a_replica_in_sync(has_store: bool, missing: int) -> None:
    leaders = Leaders()
    led = Leader(4, 20, 5, 1, (1,), (1,), (0,), has_store=has_store)
    leaders.put_report(1, {("a", 0): led})
    stored = topic("a", factor=1, **{"replication.store": "always"})
    assert sets_of(leaders).count_short([stored]) == Short(under_min_isr=missing)
