"""What the Kafka listener serves: a row for each API, with the type to decode and its handler."""

from __future__ import annotations

from tierlog.api.kafka.calls import Calls, Row
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
from tierlog.api.kafka.producers import describe_producers, init_producer_id
from tierlog.api.kafka.versions import api_versions
from tierlog.record_format.kafka_messages.messages import (
    ApiVersionsRequest,
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    DescribeProducersRequest,
    FetchRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    InitProducerIdRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListGroupsRequest,
    ListOffsetsRequest,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    OffsetForLeaderEpochRequest,
    ProduceRequest,
    SyncGroupRequest,
)


def all_calls() -> Calls:
    calls = {
        "Produce": Row(ProduceRequest, produce, is_pipelined=True),
        "Fetch": Row(FetchRequest, fetch),
        "ListOffsets": Row(ListOffsetsRequest, list_offsets),
        "Metadata": Row(MetadataRequest, metadata),
        "OffsetCommit": Row(OffsetCommitRequest, offset_commit),
        "OffsetFetch": Row(OffsetFetchRequest, offset_fetch),
        "FindCoordinator": Row(FindCoordinatorRequest, find_coordinator),
        "JoinGroup": Row(JoinGroupRequest, join_group),
        "Heartbeat": Row(HeartbeatRequest, heartbeat),
        "LeaveGroup": Row(LeaveGroupRequest, leave_group),
        "SyncGroup": Row(SyncGroupRequest, sync_group),
        "DescribeGroups": Row(DescribeGroupsRequest, describe_groups),
        "ListGroups": Row(ListGroupsRequest, list_groups),
        "DeleteGroups": Row(DeleteGroupsRequest, delete_groups),
        "OffsetDelete": Row(OffsetDeleteRequest, offset_delete),
        "InitProducerId": Row(InitProducerIdRequest, init_producer_id),
        "OffsetForLeaderEpoch": Row(OffsetForLeaderEpochRequest, offset_for_leader_epoch),
        "DescribeProducers": Row(DescribeProducersRequest, describe_producers),
    }
    calls["ApiVersions"] = Row(ApiVersionsRequest, api_versions(calls), is_open=True)
    return calls
