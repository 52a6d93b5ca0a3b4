"""All metrics of a broker, in one table, from which `/metrics` and the reference in docs/ are made.

* Names follow Prometheus' conventions: `_total` counts since the start, `_seconds` and `_bytes` are
  base units.
* The cardinality of labels is bounded: paths are templates, and only the first `TOPICS_MAX` topics
  and `PARTITIONS_MAX` partitions, by name, have labels of their own.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

TOPICS_MAX: Final = 1_000
PARTITIONS_MAX: Final = 1_000
OTHER_TOPICS: Final = "(other)"  # no topic can have this name

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """`name`: as in `/metrics`; of a histogram, without `_bucket`, `_sum` and `_count`.
    `in_cluster`: only of a broker that has joined one.
    """

    name: str
    kind: Kind
    doc: str
    labels: tuple[str, ...] = ()
    in_cluster: bool = False


_CALL: Final = ("method", "path")
_STORE: Final = ("purpose", "operation")

METRICS: Final = (
    # --- the HTTP server
    Metric(
        "tierlog_http_requests_total", "counter", "Requests served, by status", (*_CALL, "status")
    ),
    Metric(
        "tierlog_http_request_seconds",
        "histogram",
        "From a request's head until the last byte of its response is handed to the kernel",
        _CALL,
    ),
    Metric("tierlog_http_errors_total", "counter", "Problem responses, by code", ("code",)),
    Metric("tierlog_http_requests_in_progress", "gauge", "Requests in progress"),
    Metric("tierlog_http_waiting_requests", "gauge", "Long polls and tails that are waiting"),
    Metric("tierlog_http_connections", "gauge", "Open connections"),
    Metric("tierlog_http_inflight_bytes", "gauge", "Bytes of requests in progress held in memory"),
    Metric(
        "tierlog_http_unsent_memory_bytes",
        "gauge",
        "Bytes of memory that hold responses to slow readers",
    ),
    Metric(
        "tierlog_http_unsent_disk_bytes",
        "gauge",
        "Bytes of files that hold responses to slow readers",
    ),
    Metric(
        "tierlog_http_shared_pages_total",
        "counter",
        "Pages at the end of a log, by whether one written for another reader could be shared",
        ("result",),
    ),
    Metric(
        "tierlog_http_shared_pages_bytes",
        "gauge",
        "Bytes of pages at the end of a log, kept for other readers",
    ),
    # --- the Kafka listener
    Metric(
        "tierlog_kafka_requests_total",
        "counter",
        "Requests of Kafka clients answered, by API and error: once under each error in the "
        "answer, also of a topic or partition, or under NONE",
        ("api", "error"),
    ),
    Metric("tierlog_kafka_received_bytes_total", "counter", "Bytes of requests of Kafka clients"),
    Metric("tierlog_kafka_sent_bytes_total", "counter", "Bytes of answers to Kafka clients"),
    Metric("tierlog_kafka_connections", "gauge", "Open connections of Kafka clients"),
    Metric(
        "tierlog_kafka_request_memory_bytes",
        "gauge",
        "Bytes of requests of Kafka clients in progress held in memory",
    ),
    Metric(
        "tierlog_kafka_failed_authentications_total",
        "counter",
        "Attempts of Kafka clients to authenticate that failed",
    ),
    Metric(
        "tierlog_kafka_throttled_requests_total",
        "counter",
        "Requests of Kafka clients above http.client.requests.max, answered with a throttle time",
    ),
    # --- groups, share groups and transactions that this broker coordinates
    Metric(
        "tierlog_group_count",
        "gauge",
        "Groups that this broker coordinates, by type and state (Kafka's group-count, "
        "consumer-group-count, share-group-count and NumGroups)",
        ("protocol", "state"),
    ),
    Metric(
        "tierlog_group_rebalances_total",
        "counter",
        "Rebalances of groups: those that a classic group completed, new epochs of the others "
        "(Kafka's group-completed-rebalance-count, consumer-group-rebalance-count, "
        "share-group-rebalance-count)",
        ("protocol",),
    ),
    Metric(
        "tierlog_num_offsets",
        "gauge",
        "Committed offsets of the groups that this broker coordinates (Kafka's NumOffsets)",
    ),
    Metric(
        "tierlog_offset_commits_total",
        "counter",
        "Offsets that groups committed (Kafka's offset-commit-count)",
    ),
    Metric(
        "tierlog_offset_expirations_total",
        "counter",
        "Offsets that offsets.retention.minutes forgot (Kafka's offset-expiration-count)",
    ),
    Metric(
        "tierlog_offset_deletions_total",
        "counter",
        "Offsets that somebody deleted, alone or with their group (Kafka's offset-deletion-count)",
    ),
    Metric(
        "tierlog_coordinator_num_partitions",
        "gauge",
        "Partitions of a coordinator's topic that are here, by state: active, loading, failed "
        "(Kafka's num-partitions)",
        ("topic", "state"),
    ),
    Metric(
        "tierlog_partition_load_time_seconds",
        "histogram",
        "How long a coordinator took to load a partition of its topic (Kafka's "
        "partition-load-time-avg and -max)",
        ("topic",),
    ),
    Metric(
        "tierlog_share_in_flight_message_count",
        "gauge",
        "Records of the partitions led here that share groups were given and are not done with, "
        "or lie above one (Kafka's InFlightMessageCount)",
    ),
    Metric(
        "tierlog_share_acquisition_lock_timeouts_total",
        "counter",
        "Records that a member of a share group kept for too long (Kafka's "
        "AcquisitionLockTimeoutPerSec)",
    ),
    Metric(
        "tierlog_share_record_acknowledgements_total",
        "counter",
        "Records that members of share groups acknowledged, by type (Kafka's "
        "RecordAcknowledgementsPerSec)",
        ("ack_type",),
    ),
    Metric(
        "tierlog_transactional_ids",
        "gauge",
        "Transactional ids that this broker coordinates, by the state of the last transaction",
        ("state",),
    ),
    Metric(
        "tierlog_transaction_timeouts_total",
        "counter",
        "Transactions that this broker aborted since they took longer than their producer allowed",
    ),
    Metric(
        "tierlog_partitions_with_late_transactions_count",
        "gauge",
        "Partitions led here whose transaction is older than transaction.max.timeout.ms and five "
        "minutes: it hangs (Kafka's PartitionsWithLateTransactionsCount)",
    ),
    # --- the cluster, of a broker that has joined one
    Metric(
        "tierlog_active_broker_count",
        "gauge",
        "Brokers of the cluster that live, as this one sees them (Kafka's ActiveBrokerCount)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_fenced_broker_count",
        "gauge",
        "Brokers that are down without having stopped (Kafka's FencedBrokerCount)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_leader_count",
        "gauge",
        "Partitions that this broker leads (Kafka's LeaderCount)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_offline_partitions_count",
        "gauge",
        "Partitions of the cluster that nobody is known to lead (Kafka's OfflinePartitionsCount)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_under_replicated_partitions",
        "gauge",
        "Partitions that this broker leads with fewer replicas in sync than there are (Kafka's "
        "UnderReplicatedPartitions)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_under_min_isr_partition_count",
        "gauge",
        "Partitions that this broker leads with fewer replicas in sync than min.insync.replicas: "
        "writes with acks=all are refused (Kafka's UnderMinIsrPartitionCount)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_at_min_isr_partition_count",
        "gauge",
        "Partitions with several replicas that this broker leads, and of which one fewer in sync "
        "would be too few for a write with acks=all (Kafka's AtMinIsrPartitionCount)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_reassigning_partitions",
        "gauge",
        "Partitions that this broker leads, whose replicas other brokers are to have (Kafka's "
        "ReassigningPartitions)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_isr_shrinks_total",
        "counter",
        "Changes by which a replica left the set of those in sync, of partitions that this broker "
        "leads (Kafka's IsrShrinksPerSec)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_isr_expands_total",
        "counter",
        "Changes by which a replica joined that set (Kafka's IsrExpandsPerSec)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_failed_isr_updates_total",
        "counter",
        "Attempts to write a change of such a set to the bucket that were not confirmed, and are "
        "repeated (Kafka's FailedIsrUpdatesPerSec)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_leader_election_seconds",
        "histogram",
        "Elections that this broker won, from its claim until it led (Kafka's "
        "LeaderElectionRateAndTimeMs)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_replica_fetcher_max_lag",
        "gauge",
        "Offsets by which the replica of this broker that is furthest behind its leader is behind, "
        "by what the leaders said a second ago (Kafka's MaxLag of ReplicaFetcherManager)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_replica_fetches_total",
        "counter",
        "Answers that the replicas of this broker were given, by node id of the leader (the least "
        "of their rates is Kafka's MinFetchRate)",
        ("leader",),
        in_cluster=True,
    ),
    Metric(
        "tierlog_replication_bytes_in_total",
        "counter",
        "Bytes of record batches that those answers had (Kafka's ReplicationBytesInPerSec)",
        ("leader",),
        in_cluster=True,
    ),
    Metric(
        "tierlog_preferred_replica_imbalance_count",
        "gauge",
        "Partitions that a balance would move to another broker (Kafka's "
        "PreferredReplicaImbalanceCount)",
        in_cluster=True,
    ),
    Metric(
        "tierlog_hand_overs_total",
        "counter",
        "Partitions that this broker was to hand over to another, by whether it did",
        ("result",),
        in_cluster=True,
    ),
    Metric(
        "tierlog_hand_over_pause_seconds",
        "histogram",
        "How long a partition refused appends while it was handed over",
        in_cluster=True,
    ),
    Metric(
        "tierlog_http_passed_on_total",
        "counter",
        "Calls, or parts of one, passed on to another broker, by its answer: answered, refused (to "
        "be sent again elsewhere), lost (no answer)",
        ("result",),
        in_cluster=True,
    ),
    # --- records in and out
    Metric("tierlog_produced_records_total", "counter", "Records produced over HTTP"),
    Metric(
        "tierlog_produced_bytes_total",
        "counter",
        "Bytes of the batches of records produced over HTTP",
    ),
    Metric(
        "tierlog_fetched_records_total",
        "counter",
        "Records fetched over HTTP, by tier; for raw batches, the offsets that they span",
        ("tier",),
    ),
    Metric(
        "tierlog_fetched_bytes_total",
        "counter",
        "Bytes of batches and segments read for responses, by tier",
        ("tier",),
    ),
    # --- the broker
    Metric(
        "tierlog_degraded",
        "gauge",
        "Entries that /readyz lists as degraded: down or delayed while all partitions are served",
    ),
    Metric(
        "tierlog_background_errors_total",
        "counter",
        "Attempts of background tasks that failed: at one partition, or a whole round",
        ("task",),
    ),
    Metric(
        "tierlog_background_failing",
        "gauge",
        "Partitions at which the last attempt of a task failed; or 1 if its last round did",
        ("task",),
    ),
    # --- the log
    Metric(
        "tierlog_log_write_seconds",
        "histogram",
        "One write to a log, of all the appends that were waiting for it",
    ),
    Metric("tierlog_log_flush_seconds", "histogram", "One flush of a log to disk"),
    Metric(
        "tierlog_log_commit_seconds",
        "histogram",
        "An append with acks=all, from its submission until it is flushed to disk",
    ),
    Metric("tierlog_topics", "gauge", "Topics"),
    Metric(
        "tierlog_partitions",
        "gauge",
        "Partitions: serving, offline (its disk failed), leadership-lost, damaged (not opened)",
        ("state",),
    ),
    Metric("tierlog_topic_bytes", "gauge", "Bytes of a topic, by tier", ("topic", "tier")),
    Metric(
        "tierlog_topic_segments",
        "gauge",
        "Segments of a topic; one in both tiers counts once",
        ("topic",),
    ),
    Metric(
        "tierlog_partition_high_watermark",
        "gauge",
        "Offset below which consumers read",
        ("topic", "partition"),
    ),
    Metric(
        "tierlog_partition_log_start_offset",
        "gauge",
        "Earliest readable offset, in either tier",
        ("topic", "partition"),
    ),
    Metric(
        "tierlog_partition_log_end_offset",
        "gauge",
        "Next offset to be assigned",
        ("topic", "partition"),
    ),
    Metric(
        "tierlog_partitions_not_shown",
        "gauge",
        f"Partitions beyond the first {PARTITIONS_MAX:,}, which have no offsets here",
    ),
    Metric("tierlog_disk_free_bytes", "gauge", "Bytes free on the disk of the data folder"),
    Metric(
        "tierlog_disk_reserve_bytes",
        "gauge",
        "disk.reserve.bytes: with less free, writes are refused",
    ),
    # --- the bucket
    Metric(
        "tierlog_offload_lag_bytes",
        "gauge",
        "Bytes that are local only, including active segments",
        ("topic",),
    ),
    Metric(
        "tierlog_offload_held_up_partitions",
        "gauge",
        "Partitions whose next segment is damaged or gone: nothing is uploaded before a repair",
    ),
    Metric("tierlog_offload_lag_segments", "gauge", "Segments that are local only", ("topic",)),
    Metric(
        "tierlog_offload_lag_seconds",
        "gauge",
        "How long the oldest local-only segment of a topic has waited",
        ("topic",),
    ),
    Metric("tierlog_store_available", "gauge", "1 if the store answers and can be used, else 0"),
    Metric(
        "tierlog_store_requests_total",
        "counter",
        "Requests that reached the store, including those that failed",
        _STORE,
    ),
    Metric(
        "tierlog_store_errors_total",
        "counter",
        "Requests to the store that failed, or did not reach it",
        _STORE,
    ),
    Metric("tierlog_store_sent_bytes_total", "counter", "Bytes sent to the store", _STORE),
    Metric(
        "tierlog_store_received_bytes_total", "counter", "Bytes received from the store", _STORE
    ),
    Metric(
        "tierlog_store_cost_dollars_total",
        "counter",
        "What the requests cost by the price.* settings, without storage",
        _STORE,
    ),
    Metric("tierlog_chunk_cache_hits_total", "counter", "Cold chunks found on disk"),
    Metric("tierlog_chunk_cache_misses_total", "counter", "Cold chunks fetched from the store"),
    Metric(
        "tierlog_chunk_cache_evictions_total", "counter", "Chunks evicted to make room for others"
    ),
    Metric("tierlog_chunk_cache_chunks", "gauge", "Chunks on disk"),
    Metric(
        "tierlog_chunk_cache_bytes",
        "gauge",
        "Bytes of the cache's disk, by state: cached, reserved (being fetched), lingering "
        "(evicted, but still open)",
        ("state",),
    ),
    Metric("tierlog_chunk_cache_limit_bytes", "gauge", "Bytes of disk that the cache may use"),
    # --- the process, beside the client library's process_ and python_ metrics
    Metric("tierlog_build_info", "gauge", "1, by version", ("version",)),
)
BY_NAME: Final = {metric.name: metric for metric in METRICS}
