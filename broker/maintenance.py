"""The operator's commands: verify a topic, repair it, collect its garbage.

* One verification at a time: it may read every byte of both tiers. One repair at a time: they share
  a scratch folder, and would open a damaged log twice.
* Repair and collection write to the bucket, so each partition is claimed first. A plan writes
  nothing, and only checks whether a claim would be refused. A log that could not be opened is
  repaired on disk only, and is then served without a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec

from tierlog.broker.background.background_tasks import BackgroundTasks
from tierlog.broker.bucket import Bucket
from tierlog.broker.damaged_partition import DamagedPartition
from tierlog.broker.data_folder import DataFolder
from tierlog.broker.groups.groups import Groups
from tierlog.broker.live_topics import LiveTopics
from tierlog.broker.log_opener import LogOpener
from tierlog.broker.partition import Partition
from tierlog.broker.repair.corrupt_segments import NO_BUCKET, CorruptSegments
from tierlog.broker.repair.local_repair import LocalRepair
from tierlog.broker.repair.repair import Repair
from tierlog.broker.repair.repair_step import Action, RepairStep
from tierlog.broker.repair.verify import VerifyContext, check_topic_object, verify_topic
from tierlog.broker.topic_registry import TopicRecord
from tierlog.broker.topics import Topic
from tierlog.host.deferred_errors import DeferredErrors
from tierlog.manifest.garbage import GarbagePlan
from tierlog.record_format.errors import ConfigurationError, Throttled, UnknownTopic
from tierlog.record_format.findings import VerifyReport


class Maintenance:
    """Thread-safe."""

    def __init__(
        self,
        folder: DataFolder,
        topics: LiveTopics,
        bucket: Bucket | None,
        *,
        opener: LogOpener,
        background: BackgroundTasks,
        groups: Groups,
        clock: Callable[[], int],
    ) -> None:
        self._folder, self._topics, self._bucket = folder, topics, bucket
        self._opener, self._background, self._groups = opener, background, groups
        self._clock = clock
        self._policy = background.janitor.policy
        self._verifying, self._repairing = threading.Lock(), threading.Lock()

    def verify(self, topic: Topic, *, deep: bool) -> VerifyReport:
        with _only_one(self._verifying, "verification"):
            store = self._bucket.store_status.require_store() if self._bucket is not None else None
            published = partial(self._published_record, topic.record.name)
            context = VerifyContext(deep, self._clock, self._background.holes.find)
            report = verify_topic(topic, store, context, published=published)
        if any(partition.is_deleted for partition in topic.partitions.values()):
            raise UnknownTopic(topic.record.name)  # deleted meanwhile: so its objects are missing
        return report

    def _published_record(self, name: str) -> TopicRecord | None:
        """None if the bucket does not have the topic's present state yet."""
        record = self._topics.registry.by_name(name)
        return None if record is None or record.dirty else record

    def repair(
        self, topic: Topic, *, apply: bool, deep: bool, accept_loss: bool
    ) -> list[RepairStep]:
        with _only_one(self._repairing, "repair"):
            steps = [
                self._repair_log(topic, damaged, apply=apply, accept_loss=accept_loss)
                for damaged in topic.damaged.values()
            ]
            for partition in topic.partitions.values():
                if not partition.has_bucket:
                    steps += self._repair_segments(
                        partition, apply=apply, deep=deep, accept_loss=accept_loss
                    )
            for repair in self._repairs(topic, apply=apply):
                for one in repair.plan(deep=deep):
                    done = repair.apply(one, accept_loss=accept_loss) if apply else one.step
                    steps.append(done)
            return steps + self._repair_topic_object(topic, apply=apply)

    def collect_garbage(self, topic: Topic, *, apply: bool) -> dict[int, GarbagePlan]:
        plans: dict[int, GarbagePlan] = {}
        refused = DeferredErrors(ConfigurationError)  # for objects that may not be deleted
        for number, partition in topic.partitions.items():
            if not partition.has_bucket:
                continue
            self._check_owned(partition, claim=apply)
            if (plan := partition.garbage_plan(self._policy)) is not None:
                plans[number] = plan
            if apply:
                with refused:
                    partition.collect_garbage(self._policy)
        refused.raise_first()
        return plans

    def _check_owned(self, partition: Partition, *, claim: bool) -> None:
        """Claim the partition, or only check that a claim would succeed. Raises FencedError."""
        if claim:
            partition.claim()
        else:
            partition.check_claim()

    def _repair_log(
        self, topic: Topic, damaged: DamagedPartition, *, apply: bool, accept_loss: bool
    ) -> RepairStep:
        cold_end = self._cold_end(topic, damaged)
        repair = LocalRepair(self._folder, damaged, cold_end_offset=cold_end)
        if not apply or not repair.is_allowed(accept_loss=accept_loss):
            return repair.step
        end_offset, truncates = repair.prepare(), repair.step.action is Action.CUT
        place, truncations = (topic.record.topic_id, damaged.number), self._groups.truncations
        if truncates:
            end = {(topic.record.name, damaged.number): end_offset}
            self._topics.compaction_offsets.truncate(end)
            truncations.begin(place)
        opened = self._opener.reopen(topic.record, damaged, end_offset=end_offset, cuts=truncates)
        if isinstance(opened, DamagedPartition):
            topic.add({damaged.number: opened})
            return repair.step
        end_offset = opened.log.log_end_offset  # before anything is appended
        topic.add({damaged.number: opened})
        if truncates:  # first: the next steps may fail
            truncations.end(place, end_offset)
            self._groups.follow_truncations()
        # Otherwise the start after a crash finds the log below its old recovery point.
        self._topics.checkpoints.save()
        self._opener.forget_take_overs()
        return repair.step.mark_done()

    def _repair_segments(
        self, partition: Partition, *, apply: bool, deep: bool, accept_loss: bool
    ) -> list[RepairStep]:
        """Repair the segments of a log that has no copy in the bucket."""
        corrupt = self._corrupt_segments(partition)
        steps = list(corrupt.plan(NO_BUCKET, deep=deep))
        return [corrupt.apply(one, accept_loss=accept_loss) for one in steps] if apply else steps

    def _corrupt_segments(self, partition: Partition) -> CorruptSegments:
        return CorruptSegments(partition, self._folder.damaged, self._background.holes)

    def _repair_topic_object(self, topic: Topic, *, apply: bool) -> list[RepairStep]:
        """Write a new version of the topic object, by which a restore finds the topic. The
        partitions are claimed, so it is ours to write. An unreadable version is not deleted.
        """
        record = self._topics.registry.by_name(topic.record.name)
        if self._bucket is None or record is None or record.dirty:
            return []  # a dirty record is published anyway
        found = check_topic_object(self._bucket.store_status.require_store(), record)
        steps = [
            RepairStep(
                action=Action.WRITE_TOPIC,
                partition=problem.partition,
                detail=f"{problem.kind}: {problem.detail}",
                object_key=problem.object_key,
            )
            for problem in found.problems
        ]
        return [self._write_topic(step, record) for step in steps] if apply else steps

    def _write_topic(self, step: RepairStep, record: TopicRecord) -> RepairStep:
        assert self._bucket is not None, "a topic object is in a bucket"
        self._topics.registry.mark_unpublished(record.topic_id)
        self._bucket.publish_topics(self._topics.registry)
        now = self._topics.registry.by_name(record.name)
        return msgspec.structs.replace(step, done=now is not None and not now.dirty)

    def _cold_end(self, topic: Topic, damaged: DamagedPartition) -> int:
        cold = self._bucket.find_cold_log(topic.record, damaged.number) if self._bucket else None
        return cold.end_offset if cold else 0

    def _repairs(self, topic: Topic, *, apply: bool) -> Iterator[Repair]:
        if self._bucket is None:
            return
        store = self._bucket.store_status.require_store()
        for partition in topic.partitions.values():
            if partition.has_bucket:
                self._check_owned(partition, claim=apply)
                yield Repair(
                    partition,
                    store,
                    scratch=self._folder.scratch("repair"),
                    corrupt=self._corrupt_segments(partition),
                    policy=self._policy,
                    clock=self._clock,
                )


@contextmanager
def _only_one(lock: threading.Lock, what: str) -> Iterator[None]:
    if not lock.acquire(blocking=False):
        raise Throttled(f"a {what} is in progress; only one runs at a time")
    try:
        yield
    finally:
        lock.release()
