"""What the broker says of itself: readiness, and what is stored where at which price.

Nothing here touches the disk's data or the bucket; it may be asked for often.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.broker import Broker
from broker.partition import TierSizes
from cold_tier.chunk_cache import CacheUsage
from cold_tier.store_ledger import PriceTable, Usage


class Readiness(NamedTuple):
    """`reasons`: why some partition does not serve. `degraded`: what waits though all serve."""

    reasons: list[str]
    degraded: list[str]

    @property
    def ready(self) -> bool:
        return not self.reasons


class TopicStorage(NamedTuple):
    topic: str
    partitions: int
    sizes: TierSizes
    offload_lag_ms: int


class StorageReport(NamedTuple):
    """`store_usage`: requests and bytes by purpose and operation since the start."""

    store: str | None
    topics: list[TopicStorage]
    cache: CacheUsage | None
    store_usage: dict[tuple[str, str], Usage]
    cost_dollars: dict[str, float]


def readiness(broker: Broker) -> Readiness:
    reasons, degraded = [], []
    for partition in broker.partitions():
        if partition.log.offline:
            reasons.append(f"{partition}: its log is offline: the local disk failed")
        if partition.leadership_lost:
            reasons.append(f"leadership lost: {partition.leadership_lost}")
    bucket = broker.bucket
    if bucket is not None and bucket.refusal:
        degraded.append(f"store refused: {bucket.refusal}")
    elif bucket is not None and bucket.unavailable:
        degraded.append(f"store unavailable: {bucket.unavailable}")
    return Readiness(reasons, degraded)


def storage_report(broker: Broker, prices: PriceTable | None = None) -> StorageReport:
    topics = []
    now_ms = broker.clock()
    for summary in broker.list_topics(internal=True):
        partitions = list(broker.topic(summary.name).partitions.values())
        sizes = [partition.tiers() for partition in partitions]
        lag_ms = max(partition.offload_lag_ms(now_ms) for partition in partitions)
        topics.append(TopicStorage(summary.name, len(partitions), _total(sizes), lag_ms))
    bucket = broker.bucket
    if bucket is None:
        return StorageReport(None, topics, None, {}, {})
    ledger = bucket.store.ledger
    usage = {(str(purpose), str(op)): count for (purpose, op), count in ledger.usage().items()}
    cost = {str(k): v for k, v in ledger.cost(prices or PriceTable()).items()}
    return StorageReport(bucket.store.url, topics, bucket.cache.usage(), usage, cost)


def _total(sizes: list[TierSizes]) -> TierSizes:
    return TierSizes(*(sum(column) for column in zip(*sizes, strict=True)))
