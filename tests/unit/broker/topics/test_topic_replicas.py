"""What may be asked of the replicas of a topic."""

import pytest

from tierlog.broker.topics.topic_replicas import check_min_in_sync, choose_factor
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.errors import (
    InvalidConfig,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
)

LIVING = {1, 2, 3}


def test_a_factor_is_given_is_that_of_the_assignment_or_the_default() -> None:
    assert choose_factor(None, {}, default=2, living=LIVING) == 2
    assert choose_factor(3, {}, default=2, living=LIVING) == 3
    assert choose_factor(None, {0: [1, 2], 1: [2, 3]}, default=1, living=LIVING) == 2


@pytest.mark.parametrize("factor", [-1, 0, 4])
def test_a_factor_is_at_most_the_number_of_brokers_that_live(factor: int) -> None:
    with pytest.raises(InvalidReplicationFactor, match=r"Replication factor|only 3 broker"):
        choose_factor(factor, {}, default=1, living=LIVING)


@pytest.mark.parametrize(
    ("replicas", "why"),
    [
        ({0: []}, "an empty replica list"),
        ({0: [1, 9]}, "broker 9, but no such broker"),
        ({0: [1, 2, 1]}, "the broker 1 more than once"),
        ({0: [1, 2], 1: [3]}, r"1 replica\(s\), but .* previous partitions, which have 2"),
    ],
)
def test_replicas_are_living_brokers_once_each_and_as_many_of_every_partition(
    replicas: dict[int, list[int]], why: str
) -> None:
    with pytest.raises(InvalidReplicaAssignment, match=why):
        choose_factor(None, replicas, default=1, living=LIVING)


def test_a_topic_cannot_ask_for_more_replicas_in_sync_than_it_has() -> None:
    given = {"min.insync.replicas": 3}
    config = LogConfig.parse(given)
    check_min_in_sync(config, factor=3, given=given)
    with pytest.raises(InvalidConfig, match=r"min\.insync\.replicas is 3"):
        check_min_in_sync(config, factor=2, given=given)
    check_min_in_sync(config, factor=2, given={"retention.ms": 1})  # it has fewer since
    check_min_in_sync(LogConfig.parse({}), factor=1, given={})
