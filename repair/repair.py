"""Repairs a topic: its damaged logs, its corrupt segments, its bucket. `repair_topic` is the entry.

* Repair writes to the bucket, so each partition is claimed first. A plan writes nothing, and only
  checks whether a claim would be refused.
* A log that could not be opened is repaired on disk only, and is then served without a restart.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tierlog.broker.broker import Broker
from tierlog.broker.damaged_partition import DamagedPartition
from tierlog.broker.partition import Partition
from tierlog.broker.topic_registry import TopicRecord
from tierlog.broker.topics import Topic
from tierlog.repair.bucket_repair import BucketRepair
from tierlog.repair.corrupt_segments import NO_BUCKET, CorruptSegments
from tierlog.repair.local_repair import LocalRepair
from tierlog.repair.repair_step import Action, RepairStep
from tierlog.repair.verify import check_topic_object


def repair_topic(
    broker: Broker,
    name: str,
    *,
    apply: bool = False,
    deep: bool = False,
    accept_loss: bool = False,
) -> list[RepairStep]:
    """The steps that would repair the topic's logs and bucket; `apply` carries them out.

    `accept_loss` allows steps that give up records of which there is no other copy. Raises
    UnknownTopic, FencedError, StoreUnavailable, CorruptDataError, Throttled (another repair is in
    progress).
    """
    topic = broker.topic(name)
    with broker.one_at_a_time("repair"):
        steps = [
            _repair_log(broker, topic, damaged, apply=apply, accept_loss=accept_loss)
            for damaged in topic.damaged.values()
        ]
        for partition in topic.partitions.values():
            if not partition.has_bucket:
                corrupt = _corrupt_segments(broker, partition)
                planned = list(corrupt.plan(NO_BUCKET, deep=deep))
                steps += [
                    corrupt.apply(step, accept_loss=accept_loss) if apply else step
                    for step in planned
                ]
        for repair in _bucket_repairs(broker, topic, claim=apply):
            steps += [
                repair.apply(one, accept_loss=accept_loss) if apply else one.step
                for one in repair.plan(deep=deep)
            ]
        return steps + _repair_topic_object(broker, name, apply=apply)


def _repair_log(
    broker: Broker, topic: Topic, damaged: DamagedPartition, *, apply: bool, accept_loss: bool
) -> RepairStep:
    bucket = broker.bucket
    cold = bucket.find_cold_log(topic.record, damaged.number) if bucket is not None else None
    cold_end = cold.end_offset if cold else 0
    repair = LocalRepair(broker.folder, damaged, cold_end_offset=cold_end)
    if not apply or not repair.is_allowed(accept_loss=accept_loss):
        return repair.step
    end_offset, cuts = repair.prepare(), repair.step.action is Action.CUT
    is_open = broker.reopen_damaged(topic, damaged, end_offset=end_offset, cuts=cuts)
    return repair.step.mark_done() if is_open else repair.step


def _corrupt_segments(broker: Broker, partition: Partition) -> CorruptSegments:
    return CorruptSegments(partition, broker.folder.damaged, broker.background.holes)


def _bucket_repairs(broker: Broker, topic: Topic, *, claim: bool) -> Iterator[BucketRepair]:
    if broker.bucket is None:
        return
    store = broker.bucket.store_status.require_store()
    for partition in topic.partitions.values():
        if partition.has_bucket:
            partition.claim() if claim else partition.check_claim()
            yield BucketRepair(
                partition,
                store,
                scratch=broker.folder.scratch("repair"),
                corrupt=_corrupt_segments(broker, partition),
                policy=broker.background.janitor.policy,
                clock=broker.clock,
            )


def _repair_topic_object(broker: Broker, name: str, *, apply: bool) -> list[RepairStep]:
    """Write a new version of the topic object, by which a restore finds the topic. The partitions
    are claimed, so it is ours to write. An unreadable version is not deleted.
    """
    record = broker.registry.by_name(name)
    if broker.bucket is None or record is None or record.dirty:
        return []  # a dirty record is published anyway
    found = check_topic_object(broker.bucket.store_status.require_store(), record)
    steps = [
        RepairStep(
            action=Action.WRITE_TOPIC,
            partition=problem.partition,
            detail=f"{problem.kind}: {problem.detail}",
            object_key=problem.object_key,
        )
        for problem in found.problems
    ]
    return [_write_topic(broker, step, record) for step in steps] if apply else steps


def _write_topic(broker: Broker, step: RepairStep, record: TopicRecord) -> RepairStep:
    assert broker.bucket is not None, "a topic object is in a bucket"
    broker.registry.mark_unpublished(record.topic_id)
    broker.bucket.publish_topics(broker.registry)
    now = broker.registry.by_name(record.name)
    return msgspec.structs.replace(step, done=now is not None and not now.dirty)
