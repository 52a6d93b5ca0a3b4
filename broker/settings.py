"""The broker's settings. Read at the edge (flags, environment, file) and passed in; never global.

Times are in milliseconds, sizes in bytes. A limit that depends on the disk's size is None until
`resolve` has filled it in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from tierlog.object_store.ledger import PriceTable

MIB = 1 << 20
RESERVE_BYTES_MAX: Final = 1024 * MIB
# Of a coordinator's topic in a cluster: two to six brokers, or twelve, have as many each. Not of
# transactions: those of several ids are committed by one decision only within a partition.
INTERNAL_PARTITIONS: Final = 12


class Migration(StrEnum):
    """Which groups change their protocol while they have members."""

    BIDIRECTIONAL = "bidirectional"
    UPGRADE = "upgrade"
    DOWNGRADE = "downgrade"
    DISABLED = "disabled"

    @property
    def upgrades(self) -> bool:
        return self in (Migration.BIDIRECTIONAL, Migration.UPGRADE)

    @property
    def downgrades(self) -> bool:
        return self in (Migration.BIDIRECTIONAL, Migration.DOWNGRADE)


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
    group_consumer_session_timeout_ms: int = 45_000
    group_consumer_heartbeat_interval_ms: int = 5_000
    group_consumer_max_size: int = 10_000
    group_consumer_assignment_interval_ms: int = 1_000
    group_consumer_regex_refresh_interval_ms: int = 600_000
    group_consumer_migration_policy: Migration = Migration.BIDIRECTIONAL
    group_share_session_timeout_ms: int = 45_000
    group_share_heartbeat_interval_ms: int = 5_000
    group_share_max_size: int = 200
    group_share_assignment_interval_ms: int = 1_000
    group_share_record_lock_duration_ms: int = 30_000
    group_share_min_record_lock_duration_ms: int = 15_000
    group_share_max_record_lock_duration_ms: int = 60_000
    group_share_delivery_count_limit: int = 5
    group_share_min_delivery_count_limit: int = 2
    group_share_max_delivery_count_limit: int = 10
    group_share_partition_max_record_locks: int = 2_000
    group_share_min_partition_max_record_locks: int = 100
    group_share_max_partition_max_record_locks: int = 4_000
    share_coordinator_snapshot_update_records_per_snapshot: int = 500
    share_coordinator_state_topic_num_partitions: int | None = None
    share_coordinator_state_topic_replication_factor: int | None = None
    offset_metadata_max_bytes: int = 4_096
    offsets_topic_num_partitions: int | None = None
    offsets_topic_replication_factor: int | None = None
    offsets_retention_minutes: int | None = None
    transaction_max_timeout_ms: int = 900_000
    transactional_id_expiration_ms: int = 604_800_000
    transaction_state_log_num_partitions: int | None = None
    transaction_state_log_replication_factor: int | None = None
    default_replication_factor: int = 1
    replica_lag_time_max_ms: int = 10_000
    replica_fetch_wait_max_ms: int = 500
    replica_fetch_max_bytes: int = 8 * MIB
    store_flush_ms: int = 250
    store_flush_max_bytes: int = 8 * MIB

    prices: PriceTable = field(default_factory=PriceTable)

    allow_single_writer_store: bool = False
    take_over: bool = False

    cluster_join: bool = False
    node_id: int | None = None
    advertised_url: str | None = None
    advertised_kafka: str = ""  # HOST:PORT that Kafka clients are given; empty: none are served
    broker_zone: str | None = None
    heartbeat_interval_ms: int = 2_000
    session_timeout_ms: int = 6_000
    rebalance_interval_ms: int = 300_000  # 0: only when somebody asks for it

    def resolve(self) -> BrokerSettings:
        """A copy with the defaults that depend on the disk: 10% cache, 5% reserve, 1 GiB at most;
        and with those of internal topics, which are spread over the brokers of a cluster.

        A twentieth of a laptop's disk is more than many a laptop has free.
        """
        disk = os.statvfs(self.data_dir)
        total = disk.f_frsize * disk.f_blocks
        cache = total // 10 if self.cache_bytes is None else self.cache_bytes
        reserve = (
            min(total // 20, RESERVE_BYTES_MAX)
            if self.disk_reserve_bytes is None
            else self.disk_reserve_bytes
        )
        partitions = INTERNAL_PARTITIONS if self.cluster_join else 1
        return replace(
            self,
            cache_bytes=cache,
            disk_reserve_bytes=reserve,
            offsets_topic_num_partitions=self.offsets_topic_num_partitions or partitions,
            transaction_state_log_num_partitions=self.transaction_state_log_num_partitions or 1,
            share_coordinator_state_topic_num_partitions=(
                self.share_coordinator_state_topic_num_partitions or partitions
            ),
        )
