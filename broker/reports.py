"""The broker's reports: readiness, and what is stored in which tier at what cost.

Nothing here reads logs or the bucket, so it may be called often. `readiness`, on the event loop, at
most looks whether a folder or file still exists. The structs encode to JSON as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.partition.damaged_partition import DamagedPartition
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.segment_listing import offload_lag_ms, tier_sizes
from tierlog.broker.topics.topics import Topic
from tierlog.cold_tier.chunk_cache import ChunkCacheReport
from tierlog.object_store.ledger import PriceTable, StoreLedger


class Readiness(NamedTuple):
    """`reasons`: why a partition is not served. `degraded`: problems while all are served."""

    reasons: list[str]
    degraded: list[str]


class TopicStorage(msgspec.Struct, frozen=True, kw_only=True):
    """`segments`: over both tiers, each once. `offload_lag_ms`: the age of the oldest segment that
    waits for its upload.
    """

    topic: str
    partitions: int
    segments: int
    hot_segments: int
    cold_segments: int
    hot_bytes: int
    cold_bytes: int
    offload_lag_bytes: int
    offload_lag_segments: int
    offload_lag_ms: int


class StoreUse(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to the store since the broker started, and their cost by the price table."""

    purpose: str
    operation: str
    requests: int
    failures: int
    sent_bytes: int
    received_bytes: int
    cost_dollars: float


class DivergedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of diverged records that a take-over set aside."""

    folder: str
    size_bytes: int


class StorageReport(msgspec.Struct, frozen=True, kw_only=True):
    """`store` and `cache` are null without a bucket."""

    store: str | None
    hot_segments: int
    cold_segments: int
    hot_bytes: int
    cold_bytes: int
    offload_lag_bytes: int
    offload_lag_ms: int
    topics: list[TopicStorage]
    cache: ChunkCacheReport | None
    store_requests: list[StoreUse]
    cost_dollars: float
    diverged: list[DivergedLog]


def readiness(
    partitions: Iterable[Partition],
    damaged: Iterable[DamagedPartition],
    bucket: Bucket | None,
    diverged: Iterable[Path],
    *,
    blocked: Mapping[Partition, str],
    holes: Mapping[Partition, str],
    disk_full_error: str | None,
    membership_lost: str | None = None,
) -> Readiness:
    reasons = [f"{one}: {one.reason}" for one in damaged]
    if membership_lost is not None:
        reasons.append(f"membership lost: {membership_lost}")
    folders = [path for path in diverged if path.is_dir()]
    degraded = [f"diverged records set aside by a take-over: {path}" for path in folders]
    remedy = "`tierlog storage repair --deep` shows how to repair it"
    degraded += [
        f"{one} is not offloaded any more: {why}; {remedy}"
        for one, why in sorted(blocked.items(), key=lambda item: str(item[0]))
    ]
    degraded += sorted(f"{one}: {why}; {remedy}" for one, why in holes.items())
    if disk_full_error is not None:
        degraded.append(f"writes are refused: {disk_full_error}")
    for partition in partitions:
        if partition.is_offline:
            reasons.append(f"{partition}: its log is offline: the local disk failed")
        degraded += [
            f"{partition}: its start cut what followed the last whole batch; it is kept in {path} "
            "until you delete that file"
            for path in partition.cut_files
            if path.is_file()
        ]
        if partition.leadership_lost:
            reasons.append(f"leadership lost: {partition.leadership_lost}")
    if bucket is not None and bucket.silence.reason:
        degraded.append(
            "whether another broker took partitions over is unknown, and records are acknowledged: "
            f"the store does not answer: {bucket.silence.reason}"
        )
    if bucket is not None and bucket.store_status.trouble:
        degraded.append(bucket.store_status.trouble)
    return Readiness(reasons, degraded)


def storage_report(
    topics: Iterable[Topic],
    bucket: Bucket | None,
    *,
    now_ms: int,
    prices: PriceTable,
    diverged: Iterable[Path],
) -> StorageReport:
    stored = [_topic_storage(topic, now_ms) for topic in topics]
    uses = _store_uses(bucket.store.ledger, prices) if bucket else []
    return StorageReport(
        store=bucket.store.url if bucket else None,
        hot_segments=sum(one.hot_segments for one in stored),
        cold_segments=sum(one.cold_segments for one in stored),
        hot_bytes=sum(one.hot_bytes for one in stored),
        cold_bytes=sum(one.cold_bytes for one in stored),
        offload_lag_bytes=sum(one.offload_lag_bytes for one in stored),
        offload_lag_ms=max((one.offload_lag_ms for one in stored), default=0),
        topics=stored,
        cache=bucket.cache.usage() if bucket else None,
        store_requests=uses,
        cost_dollars=sum(use.cost_dollars for use in uses),
        diverged=_diverged_logs(diverged),
    )


def _diverged_logs(folders: Iterable[Path]) -> list[DivergedLog]:
    found = []
    for folder in folders:
        with suppress(FileNotFoundError, NotADirectoryError):  # removed, perhaps at this moment
            size_bytes = sum(path.stat().st_size for path in folder.iterdir())
            found.append(DivergedLog(folder=str(folder), size_bytes=size_bytes))
    return found


def _topic_storage(topic: Topic, now_ms: int) -> TopicStorage:
    partitions = list(topic.partitions.values())
    sizes = [tier_sizes(partition) for partition in partitions]
    return TopicStorage(
        topic=topic.record.name,
        partitions=len(partitions) + len(topic.damaged),
        segments=sum(one.segments for one in sizes),
        hot_segments=sum(one.hot_segments for one in sizes),
        cold_segments=sum(one.cold_segments for one in sizes),
        hot_bytes=sum(one.hot_bytes for one in sizes),
        cold_bytes=sum(one.cold_bytes for one in sizes),
        offload_lag_bytes=sum(one.offload_lag_bytes for one in sizes),
        offload_lag_segments=sum(one.offload_lag_segments for one in sizes),
        offload_lag_ms=max(
            (offload_lag_ms(one.waiting, now_ms=now_ms) for one in sizes), default=0
        ),
    )


def _store_uses(ledger: StoreLedger, prices: PriceTable) -> list[StoreUse]:
    return [
        StoreUse(
            purpose=purpose,
            operation=operation,
            **usage._asdict(),
            cost_dollars=prices.cost(operation, usage),
        )
        for (purpose, operation), usage in sorted(ledger.usage().items())
    ]
