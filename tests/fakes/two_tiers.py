"""A broker with its HTTP server, on real files, with part of its log in a bucket."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.fakes.served_broker import served_broker
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.broker import Broker
from tierlog.client.client import Client
from tierlog.hot_tier.log_writer import Acks
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.object_store.open import open_store
from tierlog.record_format.produced import build_produced

START_MS = 1_700_000_000_000


class Written(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes


class TwoTiers:
    """The records written, by partition, and where to read them."""

    def __init__(self, broker: Broker, url: str, store_url: str) -> None:
        self.broker, self.url, self.store_url = broker, url, store_url
        self.written: dict[tuple[str, int], list[Written]] = {}
        self._rng = random.Random(1)

    def create(self, topic: str, *, partitions: int = 3, **config: object) -> None:
        small = {"segment.bytes": 16384, "local.retention.bytes": 16384, "retention.ms": -1}
        small["offload.max.lag.ms"] = 86_400_000  # what is hot stays so however long the tests take
        small |= {"compression.type": "lz4", **config}
        self.broker.create_topic(topic, partitions=partitions, config=small)
        for partition in range(partitions):
            self.written[topic, partition] = []

    def produce(self, topic: str, records: int) -> None:
        """Produce `records` to each partition, in batches of 50, with unordered timestamps."""
        for (name, partition), written in self.written.items():
            if name != topic:
                continue
            for _ in range(records // 50):
                self._append(topic, partition, written)

    def _append(self, topic: str, partition: int, written: list[Written]) -> None:
        first = len(written)
        for offset in range(first, first + 50):
            at = START_MS + offset * 1000 + self._rng.randrange(-5000, 5000)
            key = b"key-%d" % (offset % 7) if offset % 3 else None
            written.append(Written(offset, at, key, self._rng.randbytes(100)))
        new = written[first:]
        batches = build_produced(
            [record.value for record in new],
            keys=[record.key for record in new],
            timestamps=[record.timestamp for record in new],
            max_message_bytes=1 << 20,
        )
        self.broker.partition(topic, partition).append(batches, acks=Acks.ALL).result(10)

    def offload(self, topic: str) -> None:
        self.broker.offload(topic, wait_ms=20_000)

    def cold_end(self, topic: str, partition: int) -> int:
        with Client(self.url) as client:
            topic_id = client.describe_topic(topic).topic_id
        keys = PartitionKeys(topic, topic_id, partition)
        store = open_store(self.store_url)
        manifest = ManifestStore(store, keys, StoreOptions(clock=lambda: START_MS)).load_manifest()
        return 0 if manifest is None else manifest.end_offset


@contextmanager
def two_tiers(
    root: Path, *, adopted: Sequence[Path] = (), http: HttpSettings | None = None
) -> Iterator[TwoTiers]:
    """`adopted`: Kafka's partition folders, to begin with."""
    store_url = f"file://{root / 'bucket'}"
    data = root / "data"
    for folder in adopted:
        shutil.copytree(folder, data / folder.name)
    store = open_store(store_url)
    with served_broker(data, store=store, http=http, cache_bytes=64 << 20) as served:
        yield TwoTiers(served.broker, served.server.url, store_url)
