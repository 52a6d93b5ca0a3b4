"""Repairs a topic: its damaged logs, its corrupt segments, its bucket. `repair_topic` is the entry;
`plan_repair` plans the repair of a stopped broker's data folder, and changes nothing anywhere.

* Repair writes to the bucket, so each partition is claimed first. A plan writes nothing, and only
  checks whether a claim would be refused.
* A log that could not be opened is repaired on disk only, and is then served without a restart.
* A running broker carries out what loses nothing (`LOSSLESS`); the rest is for its stopped folder.
* A plan without a broker opens one without background work on an overlay, and lets it decide: a
  folder elsewhere with copies of the small files and links to those of one topic's logs
  (`hot_tier.closed_log`). The data folder itself stays locked meanwhile.
* The store of an overlay is only read. An attempt to write to it ends the plan with an error that
  says so.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn, cast

import msgspec

from tierlog.broker.broker import Broker
from tierlog.broker.bucket.store_status import PROBE, ProbeResult
from tierlog.broker.data_folder.data_folder import DataFolder, folder_lock
from tierlog.broker.data_folder.topic_registry import TopicRecord, TopicRegistry
from tierlog.broker.opening.take_over import TAKE_OVERS
from tierlog.broker.partition.damaged_partition import DamagedPartition
from tierlog.broker.partition.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.topics import Topic
from tierlog.host.clock import wall_clock_ms
from tierlog.hot_tier.closed_log import OverlayDisk, link_files
from tierlog.object_store.probe import StoreTraits
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import ConfigurationError, ObjectExists
from tierlog.repair.bucket_repair import BucketRepair
from tierlog.repair.local_repair import NO_BUCKET, Action, CorruptSegments, LocalRepair, RepairStep
from tierlog.repair.verify import check_topic_object

LEFT_OUT: Final = ("cache", "uploads", "scratch", "damaged")  # below `tierlog/`: large, not needed


def repair_topic(
    broker: Broker,
    name: str,
    *,
    apply: bool = False,
    deep: bool = False,
    accept_loss: bool = False,
    among: Collection[Action] = tuple(Action),
) -> list[RepairStep]:
    """The steps that would repair the topic's logs and bucket; `apply` carries out those `among`.

    `accept_loss` allows steps that give up records of which there is no other copy. Raises
    UnknownTopic, FencedError, StoreUnavailable, CorruptDataError, Throttled (another repair is in
    progress).
    """
    topic = broker.topic(name)
    with broker.one_at_a_time("repair"):
        steps = [
            _repair_log(broker, topic, damaged, among if apply else (), accept_loss=accept_loss)
            for damaged in list(topic.damaged.values())
        ]
        for partition in list(topic.partitions.values()):
            if not partition.has_bucket:
                corrupt = _corrupt_segments(broker, partition)
                planned = list(corrupt.plan(NO_BUCKET, deep=deep))
                steps += [
                    corrupt.apply(step, accept_loss=accept_loss)
                    if apply and step.action in among
                    else step
                    for step in planned
                ]
        for repair in _bucket_repairs(broker, topic, claim=apply):
            steps += [
                repair.apply(one, accept_loss=accept_loss)
                if apply and one.step.action in among
                else one.step
                for one in repair.plan(deep=deep)
            ]
        return steps + _repair_topic_object(broker, name, apply=apply)


def plan_repair(
    settings: BrokerSettings, store: ObjectStore | None, topic: str, *, deep: bool
) -> list[RepairStep]:
    """What `repair_topic` with `apply` would do. `store` is closed when this returns.

    Raises ConfigurationError, UnknownTopic, FencedError, StoreUnavailable, CorruptDataError.
    """
    with closing(store) if store else nullcontext(), planning(settings, store, topic) as broker:
        steps = repair_topic(broker, topic, deep=deep)
    place, data_dir = str(broker.folder.path), str(settings.data_dir)
    return [
        msgspec.structs.replace(step, detail=step.detail.replace(place, data_dir)) for step in steps
    ]


@contextmanager
def planning(
    settings: BrokerSettings, store: ObjectStore | None, topic: str | None = None
) -> Iterator[Broker]:
    """A broker that changes nothing, of that topic or of all; the folder is locked meanwhile.

    Raises ConfigurationError, StoreUnavailable, CorruptDataError.
    """
    with overlay(settings.data_dir, topic) as place:
        if store is not None:
            _believe_probe(place, store, single_writer=settings.allow_single_writer_store)
        broker = Broker.open_idle(
            replace(settings, data_dir=place, take_over=False),
            store=cast(ObjectStore, ReadOnlyStore(store)) if store is not None else None,
            disk=OverlayDisk(),
        )
        try:
            yield broker
        finally:
            broker.close()


def _repair_log(
    broker: Broker,
    topic: Topic,
    damaged: DamagedPartition,
    among: Collection[Action],
    *,
    accept_loss: bool,
) -> RepairStep:
    bucket = broker.bucket
    cold = bucket.find_cold_log(topic.record, damaged.number) if bucket is not None else None
    cold_end = cold.end_offset if cold else 0
    repair = LocalRepair(broker.folder, damaged, cold_end_offset=cold_end)
    if repair.step.action not in among or not repair.is_allowed(accept_loss=accept_loss):
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
    for partition in list(topic.partitions.values()):
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


class ReadOnlyStore:
    """A store of which only the calls that read are left."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put(self, key: str, _body: object, *, if_absent: bool = False, **_: object) -> NoReturn:
        if if_absent and self._store.head(key) is not None:
            raise ObjectExists(key)
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ConfigurationError(
            f"planning must not write to {self._store.url}, but the first start with this store "
            "does: start the broker once"
        )

    put_file = delete = abort_upload = _refuse


@contextmanager
def overlay(data_dir: Path, topic: str | None) -> Iterator[Path]:
    """A temporary folder to open in place of `data_dir`, with that topic or all. Raises
    ConfigurationError if a broker has the folder open, or a take-over has begun.
    """
    with folder_lock(data_dir), tempfile.TemporaryDirectory(prefix="tierlog-plan-") as made:
        if TAKE_OVERS.path(data_dir).exists():
            raise ConfigurationError(
                f"{data_dir}: its partitions are being taken over, after a restore or with "
                "--take-over: start the broker once to complete that, or use --apply"
            )
        place = Path(made)
        partition = re.compile((r".+" if topic is None else re.escape(topic)) + r"-\d{1,9}")
        for path in data_dir.iterdir():
            if path.is_file() and path.name != ".lock":
                shutil.copyfile(path, place / path.name)
            elif path.is_dir() and partition.fullmatch(path.name):
                link_files(path, place / path.name)
        leave_out = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(data_dir / "tierlog", place / "tierlog", ignore=leave_out)
        if topic is not None:
            _keep_one(TopicRegistry(place), topic)
        yield place


def _keep_one(registry: TopicRegistry, topic: str) -> None:
    for record in (*registry.live(), *registry.deleted()):
        if record.name != topic:
            registry.forget(record.topic_id)


def _believe_probe(place: Path, store: ObjectStore, *, single_writer: bool) -> None:
    """If a store was ever used, do not probe this one: a probe writes, and a plan needs none."""
    folder = DataFolder(place)
    if PROBE.read_document(place) is not None:
        believed = ProbeResult(
            store=(store.url, single_writer),
            place=store.identity,
            traits=StoreTraits(checks_checksums=False),  # so that none are tried
            probed_ms=wall_clock_ms(),
        )
        PROBE.write_document(place, believed)
    folder.put_back_clean_marker()
    folder.close()
