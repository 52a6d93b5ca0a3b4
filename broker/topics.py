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

import msgspec

from tierlog.broker.damaged_partition import DamagedPartition
from tierlog.broker.partition import Partition
from tierlog.broker.segment_listing import tier_sizes
from tierlog.broker.topic_registry import TopicRecord
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.errors import FieldProblem, InvalidTopicName, UnknownPartition
from tierlog.record_format.topic_rules import ConfigValue, name_problem


def check_topic_name(name: str) -> None:
    """Raises InvalidTopicName."""
    if problem := name_problem(name):
        raise InvalidTopicName(problem, problems=(FieldProblem("name", problem),))


class TopicSummary(msgspec.Struct, frozen=True, order=True, kw_only=True):
    name: str
    topic_id: str
    partitions: int
    config: dict[str, ConfigValue]


class PartitionState(msgspec.Struct, frozen=True, kw_only=True):
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


class DamagedState(msgspec.Struct, frozen=True):
    """A partition whose log could not be opened, and why. Calls on it fail for the same reason."""

    partition: int
    detail: str


class TopicState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    topic_id: str
    config: dict[str, ConfigValue]
    effective_config: dict[str, ConfigValue]
    partitions: list[PartitionState]
    damaged_partitions: list[DamagedState] = []


class Topic:
    """One live topic and its partitions, the open and the damaged ones, each in order."""

    def __init__(
        self, record: TopicRecord, partitions: Mapping[int, Partition | DamagedPartition]
    ) -> None:
        self.record = record
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

    @property
    def numbers(self) -> list[int]:
        """The numbers of all partitions that the folder has."""
        return sorted([*self.partitions, *self.damaged])

    def next_partition(self) -> int:
        """For the records without a key of one request: round robin over the partitions that
        append, or over all if none does.
        """
        numbers, turn = self._in_turn, next(self._turns)
        turns = (numbers[at % len(numbers)] for at in range(turn, turn + len(numbers)))
        return next(filter(self._appends, turns), numbers[turn % len(numbers)])

    def _appends(self, number: int) -> bool:
        partition = self.partitions.get(number)
        return partition is not None and not (partition.is_defunct or partition.log.offline)

    def partition(self, number: int) -> Partition:
        """Raises UnknownPartition; CorruptDataError or LogOfflineError for a damaged one."""
        found = self.partitions.get(number)
        if found is not None:
            return found
        if number in self.damaged:
            raise self.damaged[number].error()
        raise UnknownPartition(self.record.name, number)

    def all_partitions(self) -> list[Partition]:
        """All partitions, in order. Raises if one is damaged: for calls on the whole topic."""
        return [self.partition(number) for number in self.numbers]

    def summary(self) -> TopicSummary:
        record = self.record
        return TopicSummary(
            name=record.name,
            topic_id=record.topic_id,
            partitions=record.partitions,
            config=dict(self.config.overrides),
        )

    def describe(self) -> TopicState:
        """The description for `GET /v1/topics/{topic}`. It may wait for the disk: the first look at
        a segment after a start reads its time index.
        """
        return TopicState(
            name=self.record.name,
            topic_id=self.record.topic_id,
            config=dict(self.config.overrides),
            effective_config=self.config.effective(),
            partitions=[_describe(partition) for partition in self.partitions.values()],
            damaged_partitions=[
                DamagedState(number, str(one.reason)) for number, one in self.damaged.items()
            ],
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
