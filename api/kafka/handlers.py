"""What the Kafka listener serves: the handler of each API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tierlog.api.kafka.acls import create_acls, delete_acls, describe_acls
from tierlog.api.kafka.calls import Calls, Handler, Row
from tierlog.api.kafka.cluster import (
    alter_partition_reassignments,
    alter_replica_log_dirs,
    describe_client_quotas,
    describe_cluster,
    describe_log_dirs,
    describe_quorum,
    describe_topic_partitions,
    elect_leaders,
    list_partition_reassignments,
)
from tierlog.api.kafka.configs import (
    alter_configs,
    describe_configs,
    incremental_alter_configs,
    list_config_resources,
)
from tierlog.api.kafka.consumer_groups import (
    consumer_group_describe,
    consumer_group_heartbeat,
)
from tierlog.api.kafka.fetch import fetch
from tierlog.api.kafka.group_offsets import (
    delete_groups,
    describe_groups,
    list_groups,
    offset_commit,
    offset_delete,
    offset_fetch,
)
from tierlog.api.kafka.groups import (
    find_coordinator,
    heartbeat,
    join_group,
    leave_group,
    sync_group,
)
from tierlog.api.kafka.log_offsets import list_offsets, offset_for_leader_epoch
from tierlog.api.kafka.metadata import metadata
from tierlog.api.kafka.produce import produce
from tierlog.api.kafka.producers import describe_producers
from tierlog.api.kafka.sasl import (
    describe_user_scram_credentials,
    sasl_authenticate,
    sasl_handshake,
)
from tierlog.api.kafka.share_fetch import share_acknowledge, share_fetch
from tierlog.api.kafka.share_groups import (
    alter_share_group_offsets,
    delete_share_group_offsets,
    describe_share_group_offsets,
    share_group_describe,
    share_group_heartbeat,
)
from tierlog.api.kafka.topic_changes import (
    create_partitions,
    create_topics,
    delete_records,
    delete_topics,
)
from tierlog.api.kafka.transactions import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    describe_transactions,
    end_txn,
    init_producer_id,
    list_transactions,
    txn_offset_commit,
    write_txn_markers,
)
from tierlog.api.kafka.versions import api_versions
from tierlog.record_format.kafka_messages.messages import struct_types

HANDLERS: Final[Mapping[str, Handler]] = {
    "Produce": produce,
    "Fetch": fetch,
    "ListOffsets": list_offsets,
    "Metadata": metadata,
    "OffsetCommit": offset_commit,
    "OffsetFetch": offset_fetch,
    "FindCoordinator": find_coordinator,
    "JoinGroup": join_group,
    "Heartbeat": heartbeat,
    "LeaveGroup": leave_group,
    "SyncGroup": sync_group,
    "DescribeGroups": describe_groups,
    "ListGroups": list_groups,
    "SaslHandshake": sasl_handshake,
    "CreateTopics": create_topics,
    "DeleteTopics": delete_topics,
    "DeleteRecords": delete_records,
    "InitProducerId": init_producer_id,
    "AddPartitionsToTxn": add_partitions_to_txn,
    "AddOffsetsToTxn": add_offsets_to_txn,
    "EndTxn": end_txn,
    "WriteTxnMarkers": write_txn_markers,
    "TxnOffsetCommit": txn_offset_commit,
    "DeleteGroups": delete_groups,
    "OffsetDelete": offset_delete,
    "OffsetForLeaderEpoch": offset_for_leader_epoch,
    "DescribeAcls": describe_acls,
    "CreateAcls": create_acls,
    "DeleteAcls": delete_acls,
    "DescribeConfigs": describe_configs,
    "AlterConfigs": alter_configs,
    "AlterReplicaLogDirs": alter_replica_log_dirs,
    "DescribeLogDirs": describe_log_dirs,
    "SaslAuthenticate": sasl_authenticate,
    "CreatePartitions": create_partitions,
    "ElectLeaders": elect_leaders,
    "IncrementalAlterConfigs": incremental_alter_configs,
    "AlterPartitionReassignments": alter_partition_reassignments,
    "ListPartitionReassignments": list_partition_reassignments,
    "DescribeClientQuotas": describe_client_quotas,
    "DescribeUserScramCredentials": describe_user_scram_credentials,
    "DescribeQuorum": describe_quorum,
    "DescribeCluster": describe_cluster,
    "DescribeProducers": describe_producers,
    "DescribeTransactions": describe_transactions,
    "ListTransactions": list_transactions,
    "ConsumerGroupHeartbeat": consumer_group_heartbeat,
    "ConsumerGroupDescribe": consumer_group_describe,
    "ListConfigResources": list_config_resources,
    "DescribeTopicPartitions": describe_topic_partitions,
    "ShareGroupHeartbeat": share_group_heartbeat,
    "ShareGroupDescribe": share_group_describe,
    "ShareFetch": share_fetch,
    "ShareAcknowledge": share_acknowledge,
    "DescribeShareGroupOffsets": describe_share_group_offsets,
    "AlterShareGroupOffsets": alter_share_group_offsets,
    "DeleteShareGroupOffsets": delete_share_group_offsets,
}
_PIPELINED: Final = frozenset(("Produce",))
# Also before a client has authenticated.
_OPEN: Final = frozenset(("ApiVersions", "SaslHandshake", "SaslAuthenticate"))


def all_calls() -> Calls:
    calls: dict[str, Row] = {}
    for name, handle in {**HANDLERS, "ApiVersions": api_versions(calls)}.items():
        request = f"{name}Request"
        calls[name] = Row(
            struct_types(request)[request],
            handle,
            is_pipelined=name in _PIPELINED,
            is_open=name in _OPEN,
            continues_exchange=handle is sasl_authenticate,
        )
    return calls
