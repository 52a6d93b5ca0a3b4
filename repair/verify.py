"""Verifies that everything is complete: the bucket against the manifest, the disk against both.

* `verify_topic` works on a broker's partitions; `verify_bucket` needs nothing but the bucket, so
  that it can be run from anywhere, even if the broker is lost.
* It only reads. Findings are returned; it raises only if it cannot check (the store does not
  respond), or the topic does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tierlog.broker.broker import Broker
from tierlog.broker.partition import Partition
from tierlog.broker.topic_registry import TopicRecord
from tierlog.manifest.keys import PartitionKeys, topic_versions
from tierlog.manifest.state import live_size_bytes
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.manifest.topic_objects import TopicObject, TopicObjects
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import CorruptDataError, UnknownTopic
from tierlog.record_format.findings import Findings, ProblemKind, VerifyReport
from tierlog.repair.bucket_check import (
    CheckOptions,
    Progress,
    check_partition,
    entry_in_force,
    no_progress,
)
from tierlog.repair.local_check import check_local

Clock = Callable[[], int]


def verify_topic(broker: Broker, name: str, *, deep: bool = False) -> VerifyReport:
    """Check both tiers of every partition against the manifest.

    Raises UnknownTopic, StoreUnavailable, ConfigurationError, Throttled (another verification is
    in progress).
    """
    topic = broker.topic(name)
    with broker.one_at_a_time("verification"):
        store = broker.bucket.store_status.require_store() if broker.bucket is not None else None
        found = Findings(-1)
        record = _published_record(broker, name)
        if store is not None and record is not None:
            there = check_topic_object(store, record)
            if _published_record(broker, name) == record:  # otherwise it was altered meanwhile
                found.merge(there)
        for number, damaged in topic.damaged.items():
            local = Findings(number)
            file = getattr(damaged.reason, "file", None) or None
            local.add_problem(ProblemKind.SEGMENT_CORRUPT, str(damaged.reason), file=file)
            found.merge(local)
        for partition in topic.partitions.values():
            found.merge(_check_partition(broker, partition, topic.record, store, deep=deep))
    if any(partition.is_deleted for partition in topic.partitions.values()):
        raise UnknownTopic(name)  # deleted meanwhile: so its objects are missing
    return found.report()


def _published_record(broker: Broker, name: str) -> TopicRecord | None:
    """None if the bucket does not have the topic's present state yet."""
    record = broker.registry.by_name(name)
    return None if record is None or record.dirty else record


def _check_partition(
    broker: Broker,
    partition: Partition,
    record: TopicRecord,
    store: ObjectStore | None,
    *,
    deep: bool,
) -> Findings:
    clock, find_hole = broker.clock, broker.background.holes.find
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
        found.add_problem(ProblemKind.TOPIC_OBJECT, bad.detail, object_key=store.full_key(bad.file))
        return found
    if there is None:
        detail = "the bucket has no topic object: a restore would not find the topic"
        found.add_problem(ProblemKind.TOPIC_OBJECT, detail, object_key=key)
    elif there.deleted or (there.partitions, dict(there.config)) != (
        record.partitions,
        record.config,
    ):
        detail = f"the newest version ({there.version}) differs from this broker's topic"
        found.add_problem(ProblemKind.TOPIC_OBJECT, detail, object_key=key)
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
