"""The broker's settings. Read at the edge (flags, environment, file) and passed in; never global.

Times are in milliseconds, sizes in bytes. A limit that depends on the disk's size is None until
`resolve` has filled it in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from tierlog.object_store.ledger import PriceTable

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    data_dir: Path

    offload_concurrency: int = 4
    offload_bandwidth: int | None = None
    offload_part_bytes: int = 16 * MIB
    cache_bytes: int | None = None
    cache_chunk_bytes: int = 8 * MIB
    cold_requests_max: int = 32
    cold_memory_max: int = 128 * MIB

    gc_grace_ms: int = 86_400_000
    manifest_versions_min: int = 100
    fence_check_ms: int = 10_000
    store_start_timeout_ms: int = 5_000
    restore_offset_gap: int = 1_000_000_000

    disk_reserve_bytes: int | None = None
    recovery_checkpoint_ms: int = 10_000
    producer_id_expiration_ms: int = 86_400_000
    retention_check_interval_ms: int = 30_000
    shutdown_timeout_ms: int = 30_000

    log_cleaner_dedupe_buffer_bytes: int = 128 * MIB
    log_cleaner_backoff_ms: int = 15_000

    append_threads: int = 8
    group_commits_max: int = 1_000_000
    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    group_initial_rebalance_delay_ms: int = 0
    group_max_size: int = 10_000
    offset_metadata_max_bytes: int = 4_096
    offsets_topic_num_partitions: int = 1
    offsets_retention_minutes: int | None = None

    prices: PriceTable = field(default_factory=PriceTable)

    allow_single_writer_store: bool = False
    take_over: bool = False

    def resolve(self) -> BrokerSettings:
        """A copy with the defaults that depend on the disk: 10% cache, 5% reserve."""
        disk = os.statvfs(self.data_dir)
        total = disk.f_frsize * disk.f_blocks
        cache = total // 10 if self.cache_bytes is None else self.cache_bytes
        reserve = total // 20 if self.disk_reserve_bytes is None else self.disk_reserve_bytes
        return replace(self, cache_bytes=cache, disk_reserve_bytes=reserve)
