"""Whether everything is there: the bucket against the manifest, and the disk against both.

* `verify_topic` has a broker's partitions; `verify_bucket` needs nothing but the bucket, so that it
  can be run from anywhere, even when the broker is gone.
* It only reads. What it finds is returned; it raises only for what keeps it from looking (the store
  does not answer), and for a topic that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from broker.partition import Partition
from broker.repair.bucket_check import (
    CheckOptions,
    Progress,
    check_partition,
    entry_in_force,
    no_progress,
)
from broker.repair.local_check import FindHole, check_local
from broker.topic_registry import TopicRecord
from broker.topics import Topic
from cold_tier.object_store import ObjectStore
from manifest.keys import PartitionKeys, topic_versions
from manifest.paging import live_size_bytes
from manifest.store import ManifestStore, StoreOptions
from manifest.topic_objects import TopicObject, TopicObjects
from record_format.errors import CorruptDataError
from record_format.findings import Findings, ProblemKind, VerifyReport

Clock = Callable[[], int]


class VerifyContext(NamedTuple):
    """How a broker's partitions are looked at."""

    deep: bool
    clock: Clock
    find_hole: FindHole


def verify_topic(
    topic: Topic,
    store: ObjectStore | None,
    looking: VerifyContext,
    *,
    settled: Callable[[], TopicRecord | None],
) -> VerifyReport:
    """Both tiers of every partition. `settled`: the topic's present state where the bucket was told
    of it.

    Raises StoreUnavailable, ConfigurationError.
    """
    found = Findings(-1)
    record = settled()
    if store is not None and record is not None:
        there = check_topic_object(store, record)
        if settled() == record:  # else it was altered meanwhile
            found.merge(there)
    for number, damaged in sorted(topic.damaged.items()):
        local = Findings(number)
        local.add(ProblemKind.SEGMENT_CORRUPT, str(damaged.reason))
        found.merge(local)
    for _, partition in sorted(topic.partitions.items()):
        found.merge(_check_partition(partition, topic.record, store, looking))
    return found.report()


def _check_partition(
    partition: Partition,
    record: TopicRecord,
    store: ObjectStore | None,
    looking: VerifyContext,
) -> Findings:
    deep, clock, find_hole = looking
    if store is None or partition.cold is None:
        found = check_local(partition, None, [], deep=deep, find_hole=find_hole)
        found.checked.partitions += 1
        return found
    seen = partition.cold.manifest
    keys = PartitionKeys(record.name, record.topic_id, partition.number)
    options = CheckOptions(clock=clock, deep=deep, at_least=seen.version if seen else 0)
    found, manifest, entries = check_partition(store, keys, options)
    if manifest is None and seen is not None:
        return found  # said already; what the disk has can be compared with nothing
    in_force = partial(entry_in_force, ManifestStore(store, keys, StoreOptions(clock=clock)))
    found.merge(
        check_local(partition, manifest, entries, deep=deep, find_hole=find_hole, in_force=in_force)
    )
    return found


def check_topic_object(store: ObjectStore, record: TopicRecord) -> Findings:
    """A restore finds the topic by this object."""
    found = Findings(0)
    key = store.full_key(topic_versions(record.name, record.topic_id))
    try:
        there = TopicObjects(store).load(record.name, record.topic_id)
    except CorruptDataError as bad:
        found.add(ProblemKind.TOPIC_OBJECT, bad.detail, object_key=store.full_key(bad.file))
        return found
    if there is None:
        detail = "the bucket has no topic object: a restore would not find the topic"
        found.add(ProblemKind.TOPIC_OBJECT, detail, object_key=key)
    elif there.deleted or (there.partitions, dict(there.config)) != (
        record.partitions,
        record.config,
    ):
        detail = f"the newest version ({there.version}) differs from what this broker has"
        found.add(ProblemKind.TOPIC_OBJECT, detail, object_key=key)
    return found


# --- with nothing but the bucket ------------------------------------------------------------------


def size_of(store: ObjectStore, topic: TopicObject, *, clock: Clock) -> int:
    """Bytes that a verification goes through; 0 for a partition whose manifest cannot be read."""
    total = 0
    for number in range(topic.partitions):
        keys = PartitionKeys(topic.name, topic.topic_id, number)
        try:
            manifest = ManifestStore(store, keys, StoreOptions(clock=clock)).load()
        except CorruptDataError:
            continue
        total += live_size_bytes(manifest) if manifest else 0
    return total


def verify_bucket(
    store: ObjectStore,
    topic: TopicObject,
    *,
    deep: bool,
    clock: Clock,
    progress: Progress = no_progress,
) -> VerifyReport:
    """The cold tier of a topic. Raises StoreUnavailable, ConfigurationError."""
    found = Findings(-1)
    for number in range(topic.partitions):
        keys = PartitionKeys(topic.name, topic.topic_id, number)
        options = CheckOptions(clock=clock, deep=deep, progress=progress)
        found.merge(check_partition(store, keys, options)[0])
    return found.report()
