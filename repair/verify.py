"""Verifies that everything is complete: the bucket against the manifest, the disk against both.

* `verify_topic` works on a broker's partitions; `verify_bucket` needs nothing but the bucket, so
  that it can be run from anywhere, even if the broker is lost.
* It only reads. Findings are returned; it raises only if it cannot check (the store does not
  respond), or the topic does not exist.
* Segments are checked in parallel, a bounded number at a time; problems are in offset order.
* A check may take longer than dropped objects are retained, so a problem of a segment counts only
  if the manifest in force still names the segment afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from tierlog.broker.broker import Broker
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.partition.partition import Partition
from tierlog.cold_tier.segment_check import check_segment
from tierlog.host.threads import Threads
from tierlog.manifest.keys import PartitionKeys, topic_versions
from tierlog.manifest.partition_check import ManifestCheck
from tierlog.manifest.state import Manifest, live_size_bytes
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.manifest.topic_objects import TopicObject, TopicObjects
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import CorruptDataError, UnknownTopic
from tierlog.record_format.findings import Findings, ProblemKind, VerifyReport
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.repair.local_check import check_local

Clock = Callable[[], int]


WORKERS = 8


Progress = Callable[[int], None]
"""Called with the bytes of segments checked since the last call."""


def no_progress(_size_bytes: int) -> None:
    """Ignores progress."""


class CheckOptions(NamedTuple):
    """`at_least`: the manifest version that the caller has seen in force."""

    clock: Callable[[], int]
    deep: bool = False
    progress: Progress = no_progress
    at_least: int = 0


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
    if any(partition.is_gone for partition in topic.partitions.values()):
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
    clock, find_hole = broker.clock, broker.background.holes.find_hole
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
    elif not record.is_state_of(there):
        detail = f"the newest version ({there.version}) differs from this broker's topic"
        found.add_problem(ProblemKind.TOPIC_OBJECT, detail, object_key=key)
    return found


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


def check_partition(
    store: ObjectStore, keys: PartitionKeys, options: CheckOptions
) -> tuple[Findings, Manifest | None, list[SegmentEntry]]:
    """The findings, and the manifest and entries that could be read, for further checks.

    Raises StoreUnavailable, ConfigurationError.
    """
    check = ManifestCheck(store, keys, clock=options.clock, at_least=options.at_least)
    manifest = check.manifest()
    if manifest is None:
        return check.findings, None, []
    entries = list(check.checked_entries(manifest))
    manifests = ManifestStore(store, keys, StoreOptions(clock=options.clock))
    _check_segments(store, manifests, entries, check.findings, options=options)
    check.pins()
    return check.findings, manifest, entries


def _check_segments(
    store: ObjectStore,
    manifests: ManifestStore,
    entries: list[SegmentEntry],
    findings: Findings,
    *,
    options: CheckOptions,
) -> None:
    """Check the objects of each entry; at most WORKERS at a time, results in order."""

    def check(entry: SegmentEntry) -> Findings:
        found = check_segment(store, entry, partition=findings.partition, deep=options.deep)
        options.progress(entry.size_bytes)
        if found.problems and not _is_still_named(manifests, entry):
            found.problems.clear()
        return found

    with Threads(WORKERS, name="verify") as pool:
        waiting: deque[Future[Findings]] = deque()
        try:
            for entry in entries:
                waiting.append(pool.submit(check, entry))
                if len(waiting) >= 2 * WORKERS:
                    findings.merge(waiting.popleft().result())
            while waiting:
                findings.merge(waiting.popleft().result())
        finally:
            for one in waiting:
                one.cancel()


def _is_still_named(manifests: ManifestStore, entry: SegmentEntry) -> bool:
    """Whether the manifest in force names this object; True if no manifest can be read."""
    there = entry_in_force(manifests, entry)
    return there is not None and there.log_key == entry.log_key


def entry_in_force(manifests: ManifestStore, entry: SegmentEntry) -> SegmentEntry | None:
    """The manifest's present entry for the offsets of `entry`; `entry` if it cannot be read."""
    try:
        manifest = manifests.load_manifest()
        return manifests.find_segment(manifest, entry.base_offset) if manifest else entry
    except CorruptDataError:
        return entry
