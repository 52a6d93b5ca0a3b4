"""Topics in memory: the rule for names, the configuration, the open partitions.

* A topic's name is checked here before it becomes a folder name or an object key: Kafka's rule
  allows neither a slash nor `..`.
* `Topic.partitions` only grows; a deleted topic is removed from the broker's map first, so that no
  new call reaches it.
* A partition whose log could not be opened is in `Topic.damaged`, not in `partitions`: iterating
  over the open partitions skips it, and looking it up raises the reason.
* The structs here encode to JSON as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.partition.damaged_partition import DamagedPartition
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.segment_listing import tier_sizes
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.errors import (
    FieldProblem,
    InvalidTopicName,
    NotLeader,
    TierlogError,
    UnknownPartition,
)
from tierlog.record_format.topic_rules import ConfigValue, name_problem


def check_topic_name(name: str) -> None:
    """Raises InvalidTopicName."""
    if problem := name_problem(name):
        raise InvalidTopicName(problem, problems=(FieldProblem("name", problem),))


class TopicSummary(msgspec.Struct, frozen=True, order=True, kw_only=True, omit_defaults=True):
    """`replication_factor`: left out if it is 1."""

    name: str
    topic_id: str
    partitions: int
    config: dict[str, ConfigValue]
    replication_factor: int = 1


class LeaderState(msgspec.Struct, frozen=True, kw_only=True):
    node_id: int
    url: str


class PartitionState(msgspec.Struct, frozen=True, kw_only=True):
    """`leader`, and the node ids of those that have it and that are in sync: left out by a broker
    that answers for its part alone. One that is alone names itself as the leader. `replica_lags`:
    by how many offsets each of `replicas` is behind the log end, -1 if its leader does not know.
    Those that are being added and removed: left out if there are none; `store_in_sync`: left out
    unless the bucket is a replica in sync.
    """

    partition: int
    log_start_offset: int
    local_log_start_offset: int
    high_watermark: int
    log_end_offset: int
    leader_epoch: int
    hot_bytes: int
    cold_bytes: int
    cold_end_offset: int
    segments: int
    offload_lag_bytes: int
    leader: LeaderState | UnsetType = UNSET
    replicas: list[int] | UnsetType = UNSET
    in_sync_replicas: list[int] | UnsetType = UNSET
    replica_lags: list[int] | UnsetType = UNSET
    adding_replicas: list[int] | UnsetType = UNSET
    removing_replicas: list[int] | UnsetType = UNSET
    store_in_sync: bool | UnsetType = UNSET


class DamagedState(msgspec.Struct, frozen=True):
    """A partition whose log could not be opened, or whose leader does not answer, and why. Calls on
    it fail for the same reason.
    """

    partition: int
    detail: str


class TopicState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`replication_factor`: left out if it is 1."""

    name: str
    topic_id: str
    config: dict[str, ConfigValue]
    effective_config: dict[str, ConfigValue]
    partitions: list[PartitionState]
    damaged_partitions: list[DamagedState] = []
    replication_factor: int = 1


class Elsewhere(Protocol):
    """What is known here of the partitions that other brokers of the cluster have."""

    def error_for(self, record: TopicRecord, number: int) -> TierlogError:
        """What to raise for a call on it: NotLeader or LeaderUnknown."""
        ...

    def log_end_offset(self, record: TopicRecord, number: int) -> int | None:
        """As its leader last said; None if no leader is known."""
        ...


class Topic:
    """One live topic and its partitions, the open and the damaged ones, each in order."""

    def __init__(
        self,
        record: TopicRecord,
        partitions: Mapping[int, Partition | DamagedPartition],
        *,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.record, self._elsewhere = record, elsewhere
        self.config = LogConfig.parse(record.config)
        self.partitions: dict[int, Partition] = {}
        self.damaged: dict[int, DamagedPartition] = {}
        self._turns = itertools.count()  # one a request: its keyless records share a partition
        self.add_partitions(partitions)

    def add_partitions(self, partitions: Mapping[int, Partition | DamagedPartition]) -> None:
        """Add partitions. The maps are replaced: a concurrent iteration sees the old ones."""
        opened = {n: one for n, one in partitions.items() if not isinstance(one, DamagedPartition)}
        damaged = {n: one for n, one in partitions.items() if isinstance(one, DamagedPartition)}
        self.partitions = dict(sorted((self.partitions | opened).items()))
        rest = {n: one for n, one in self.damaged.items() if n not in opened}
        self.damaged = dict(sorted((rest | damaged).items()))
        self._in_turn = list(self.partitions) or self.numbers

    def remove_partition(self, number: int) -> None:
        """It was handed over. The maps are replaced, as by `add_partitions`."""
        self.partitions = {n: one for n, one in self.partitions.items() if n != number}

    @property
    def is_shared(self) -> bool:
        """Whether other brokers may lead partitions of it."""
        return self._elsewhere is not None

    @property
    def numbers(self) -> list[int]:
        """The numbers of all partitions: that the folder has, or the cluster."""
        if self._elsewhere is not None:
            return list(range(self.record.partitions))
        return sorted([*self.partitions, *self.damaged])

    def next_partition(self) -> int:
        """For the records without a key of one request: round robin over the partitions that
        append, or over all if none does.
        """
        numbers = self._in_turn if self._elsewhere is None else self.numbers
        turn = next(self._turns)
        turns = (numbers[at % len(numbers)] for at in range(turn, turn + len(numbers)))
        return next(filter(self._appends, turns), numbers[turn % len(numbers)])

    def _appends(self, number: int) -> bool:
        partition = self.partitions.get(number)
        if partition is None and number not in self.damaged:
            return self._elsewhere is not None and self._is_led(number)
        return partition is not None and not (partition.is_defunct or partition.is_offline)

    def _is_led(self, number: int) -> bool:
        assert self._elsewhere is not None
        return isinstance(self._elsewhere.error_for(self.record, number), NotLeader)

    def partition(self, number: int) -> Partition:
        """Raises UnknownPartition; CorruptDataError or LogOfflineError for a damaged one; NotLeader
        or LeaderUnknown for one that is elsewhere in the cluster.
        """
        found = self.partitions.get(number)
        if found is not None:
            return found
        if number in self.damaged:
            raise self.damaged[number].error()
        if self._elsewhere is not None and 0 <= number < self.record.partitions:
            raise self._elsewhere.error_for(self.record, number)
        raise UnknownPartition(self.record.name, number)

    def check_led_here(self, number: int) -> None:
        """Raises NotLeader, LeaderUnknown if it is elsewhere in the cluster."""
        if self._elsewhere is not None and number not in (*self.partitions, *self.damaged):
            self.partition(number)

    def check_number(self, number: int) -> None:
        """As `partition` raises, except that it may be elsewhere in the cluster."""
        if self._elsewhere is None or not 0 <= number < self.record.partitions:
            self.partition(number)
        elif number in self.damaged:
            raise self.damaged[number].error()

    def end_elsewhere(self, number: int) -> int | None:
        """The log end offset of a partition that another broker has, as far as it is known."""
        if self._elsewhere is None or number in self.partitions:
            return None
        return self._elsewhere.log_end_offset(self.record, number)

    def all_partitions(self) -> list[Partition]:
        """All partitions, in order. Raises if one is damaged, or elsewhere: for calls on the whole
        topic.
        """
        return [self.partition(number) for number in self.numbers]

    def local_partitions(self) -> list[Partition]:
        """Those of this broker, in order. Raises if one is damaged."""
        return [self.partition(number) for number in sorted([*self.partitions, *self.damaged])]

    def effective_config(self) -> dict[str, ConfigValue]:
        return self.config.effective(replication_factor=self.record.replication_factor)

    def summary(self) -> TopicSummary:
        record = self.record
        return TopicSummary(
            name=record.name,
            topic_id=record.topic_id,
            partitions=record.partitions,
            config=dict(self.config.overrides),
            replication_factor=record.replication_factor,
        )

    def describe(self) -> TopicState:
        """The description for `GET /v1/topics/{topic}`. It may wait for the disk: the first look at
        a segment after a start reads its time index.
        """
        return TopicState(
            name=self.record.name,
            topic_id=self.record.topic_id,
            config=dict(self.config.overrides),
            effective_config=self.effective_config(),
            partitions=[_describe(partition) for partition in self.partitions.values()],
            damaged_partitions=[
                DamagedState(number, str(one.reason)) for number, one in self.damaged.items()
            ],
            replication_factor=self.record.replication_factor,
        )


def _describe(partition: Partition) -> PartitionState:
    now, tiers = partition.offsets(), tier_sizes(partition)
    return PartitionState(
        partition=partition.number,
        log_start_offset=now.log_start_offset,
        local_log_start_offset=now.local_log_start_offset,
        high_watermark=now.high_watermark,
        log_end_offset=now.log_end_offset,
        leader_epoch=now.leader_epoch,
        hot_bytes=tiers.hot_bytes,
        cold_bytes=tiers.cold_bytes,
        cold_end_offset=tiers.cold_end_offset,
        segments=tiers.segments,
        offload_lag_bytes=tiers.offload_lag_bytes,
    )
