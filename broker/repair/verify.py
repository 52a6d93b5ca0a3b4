"""Verifies that everything is complete: the bucket against the manifest, the disk against both.

* `verify_topic` works on a broker's partitions; `verify_bucket` needs nothing but the bucket, so
  that it can be run from anywhere, even if the broker is lost.
* It only reads. Findings are returned; it raises only if it cannot check (the store does not
  respond), or the topic does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tierlog.broker.partition import Partition
from tierlog.broker.repair.bucket_check import (
    CheckOptions,
    Progress,
    check_partition,
    entry_in_force,
    no_progress,
)
from tierlog.broker.repair.local_check import FindHole, check_local
from tierlog.broker.topic_registry import TopicRecord
from tierlog.broker.topics import Topic
from tierlog.manifest.keys import PartitionKeys, topic_versions
from tierlog.manifest.state import live_size_bytes
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.manifest.topic_objects import TopicObject, TopicObjects
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import CorruptDataError
from tierlog.record_format.findings import Findings, ProblemKind, VerifyReport

Clock = Callable[[], int]


class VerifyContext(NamedTuple):
    """What checking a broker's partitions needs."""

    deep: bool
    clock: Clock
    find_hole: FindHole


def verify_topic(
    topic: Topic,
    store: ObjectStore | None,
    context: VerifyContext,
    *,
    published: Callable[[], TopicRecord | None],
) -> VerifyReport:
    """Verify both tiers of every partition. `published` returns the topic's present state if the
    bucket has it.

    Raises StoreUnavailable, ConfigurationError.
    """
    found = Findings(-1)
    record = published()
    if store is not None and record is not None:
        there = check_topic_object(store, record)
        if published() == record:  # otherwise it was altered meanwhile
            found.merge(there)
    for number, damaged in topic.damaged.items():
        local = Findings(number)
        file = getattr(damaged.reason, "file", None) or None
        local.add(ProblemKind.SEGMENT_CORRUPT, str(damaged.reason), file=file)
        found.merge(local)
    for partition in topic.partitions.values():
        found.merge(_check_partition(partition, topic.record, store, context))
    return found.report()


def _check_partition(
    partition: Partition,
    record: TopicRecord,
    store: ObjectStore | None,
    context: VerifyContext,
) -> Findings:
    deep, clock, find_hole = context
    if store is None or not partition.has_bucket:
        found = check_local(partition, None, [], deep=deep, find_hole=find_hole)
        found.checked.partitions += 1
        return found
    seen = partition.manifest
    keys = PartitionKeys(record.name, record.topic_id, partition.number)
    options = CheckOptions(clock=clock, deep=deep, at_least=seen.version if seen else 0)
    found, manifest, entries = check_partition(store, keys, options)
    if manifest is None and seen is not None:
        return found  # reported already; there is nothing to compare the disk with
    in_force = partial(entry_in_force, ManifestStore(store, keys, StoreOptions(clock=clock)))
    found.merge(
        check_local(partition, manifest, entries, deep=deep, find_hole=find_hole, in_force=in_force)
    )
    return found


def check_topic_object(store: ObjectStore, record: TopicRecord) -> Findings:
    """Check the topic object, by which a restore finds the topic."""
    found = Findings(0)
    key = store.full_key(topic_versions(record.name, record.topic_id))
    try:
        there = TopicObjects(store).load_topic(record.name, record.topic_id)
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
        detail = f"the newest version ({there.version}) differs from this broker's topic"
        found.add(ProblemKind.TOPIC_OBJECT, detail, object_key=key)
    return found


# --- without a broker -----------------------------------------------------------------------------


def size_of(store: ObjectStore, topic: TopicObject, *, clock: Clock) -> int:
    """The bytes that a verification covers; an unreadable manifest counts as 0."""
    total = 0
    for number in range(topic.partitions):
        keys = PartitionKeys(topic.name, topic.topic_id, number)
        try:
            manifest = ManifestStore(store, keys, StoreOptions(clock=clock)).load_manifest()
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
    """Verify the cold tier of a topic. Raises StoreUnavailable, ConfigurationError."""
    found = Findings(-1)
    for number in range(topic.partitions):
        keys = PartitionKeys(topic.name, topic.topic_id, number)
        options = CheckOptions(clock=clock, deep=deep, progress=progress)
        found.merge(check_partition(store, keys, options)[0])
    return found.report()
