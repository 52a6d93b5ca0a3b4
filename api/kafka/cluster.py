"""What a cluster of one broker says of itself, and of changes that need several.

The answers are those of one Kafka broker: nothing is reassigned, no leader has to be elected, and
each partition has one replica, here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.context import NODE_ID
from tierlog.api.kafka.error_codes import Code, Refused, code_of, text_of
from tierlog.api.kafka.metadata import describe
from tierlog.api.kafka.operations import UNASKED, operations_of_cluster, operations_of_topic
from tierlog.api.kafka.partitions import (
    ADMINISTERING,
    DESCRIBING,
    refusal_of,
    seen_topics,
    topic_of,
)
from tierlog.api.kafka.topic_changes import check_replicas
from tierlog.broker.partition import Partition
from tierlog.broker.topics import Topic
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.errors import Forbidden, TierlogError
from tierlog.record_format.kafka_messages.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
)

_METADATA_TOPIC: Final = "__cluster_metadata"
_BROKERS: Final = 1  # an endpoint type; 2 are the controllers
PARTITIONS_MAX: Final = 2000  # max.request.partition.size.limit
_TRANSACTION_STATES: Final = frozenset(
    (
        "Empty",
        "Ongoing",
        "PrepareCommit",
        "PrepareAbort",
        "CompleteCommit",
        "CompleteAbort",
        "Dead",
        "PrepareEpochFence",
    )
)


_Cursor = DescribeTopicPartitionsResponse.Cursor


def describe_cluster(call: Call, request: DescribeClusterRequest) -> DescribeClusterResponse:
    if request.endpoint_type != _BROKERS:
        return DescribeClusterResponse(
            error_code=Code.MISMATCHED_ENDPOINT_TYPE,
            error_message="The request was sent to an endpoint of the wrong type.",
            endpoint_type=_BROKERS,
        )
    host, port = call.advertised
    asked = request.include_cluster_authorized_operations
    return DescribeClusterResponse(
        cluster_id=call.context.broker.folder.cluster_id,
        controller_id=NODE_ID,
        brokers=[
            DescribeClusterResponse.DescribeClusterBroker(broker_id=NODE_ID, host=host, port=port)
        ],
        cluster_authorized_operations=operations_of_cluster(call) if asked else UNASKED,
    )


# --- partitions, page by page ---------------------------------------------------------------------


def describe_topic_partitions(
    call: Call, request: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    """Topics in the order of their names, up to the limit of partitions, then a cursor."""
    left = min(request.response_partition_limit, PARTITIONS_MAX)
    if left < 1:
        left = PARTITIONS_MAX
    answer = DescribeTopicPartitionsResponse()
    first = request.cursor or DescribeTopicPartitionsRequest.Cursor("", 0)
    for name in _names(call, request):
        if name < first.topic_name:
            continue
        start = first.partition_index if name == first.topic_name else 0
        if left <= 0:
            answer.next_cursor = _Cursor(name, start)
            break
        page, count = _page(call, name, start=start, limit=left)
        answer.topics.append(page)
        left -= len(page.partitions)
        if (end := start + len(page.partitions)) < count:
            answer.next_cursor = _Cursor(name, end)
            break
    return answer


def _names(call: Call, request: DescribeTopicPartitionsRequest) -> list[str]:
    if request.topics:
        return sorted({one.name for one in request.topics})
    return seen_topics(call)


def _page(
    call: Call, name: str, *, start: int, limit: int
) -> tuple[DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic, int]:
    """The topic, with some of its partitions, and how many it has."""
    page = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic(
        name=name, topic_authorized_operations=operations_of_topic(call, name)
    )
    try:
        topic = describe(topic_of(call, name, DESCRIBING))
    except TierlogError as error:
        page.error_code = code_of(error)
        return page, 0
    page.topic_id, page.is_internal = topic.topic_id, topic.is_internal
    page.partitions = [
        DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponsePartition(
            error_code=one.error_code,
            partition_index=one.partition_index,
            leader_id=one.leader_id,
            leader_epoch=one.leader_epoch,
            replica_nodes=one.replica_nodes,
            isr_nodes=one.isr_nodes,
            eligible_leader_replicas=[],
            last_known_elr=[],
            offline_replicas=one.offline_replicas,
        )
        for one in topic.partitions[start : start + limit]
    ]
    return page, len(topic.partitions)


# --- log dirs -------------------------------------------------------------------------------------


async def describe_log_dirs(call: Call, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    if refusal_of(call, DESCRIBING) or call.session.grant.topics:
        return DescribeLogDirsResponse(error_code=Code.CLUSTER_AUTHORIZATION_FAILED)
    return await call.context.read(_log_dir, call, request)


def _log_dir(call: Call, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    """The data folder. Sizes are of the local log: Kafka's answer has no place for the bucket's."""
    wanted = None
    if request.topics is not None:
        wanted = {one.topic: frozenset(one.partitions) for one in request.topics}
    path = call.context.broker.settings.data_dir
    disk = os.statvfs(path)
    return DescribeLogDirsResponse(
        results=[
            DescribeLogDirsResponse.DescribeLogDirsResult(
                log_dir=str(path),
                topics=list(_sizes(call, wanted)),
                total_bytes=disk.f_blocks * disk.f_frsize,
                usable_bytes=disk.f_bavail * disk.f_frsize,
            )
        ]
    )


def _sizes(
    call: Call, wanted: dict[str, frozenset[int]] | None
) -> Iterator[DescribeLogDirsResponse.DescribeLogDirsTopic]:
    by_topic: dict[str, list[Partition]] = {}
    for partition in call.context.broker.partitions():
        if wanted is None or partition.number in wanted.get(partition.topic, ()):
            by_topic.setdefault(partition.topic, []).append(partition)
    for name, partitions in sorted(by_topic.items()):
        yield DescribeLogDirsResponse.DescribeLogDirsTopic(
            name=name,
            partitions=[
                DescribeLogDirsResponse.DescribeLogDirsPartition(
                    partition_index=one.number, partition_size=one.log.size_bytes
                )
                for one in partitions
            ],
        )


def alter_replica_log_dirs(
    call: Call, request: AlterReplicaLogDirsRequest
) -> AlterReplicaLogDirsResponse:
    """There is one folder: a replica stays in it, and goes nowhere else."""
    here = str(call.context.broker.settings.data_dir)
    results: dict[str, list[AlterReplicaLogDirsResponse.AlterReplicaLogDirPartitionResult]] = {}
    for folder in request.dirs:
        for topic in folder.topics:
            for number in topic.partitions:
                code = _partition_code(call, topic.name, number)
                if code == Code.NONE and folder.path != here:
                    code = Code.LOG_DIR_NOT_FOUND
                results.setdefault(topic.name, []).append(
                    AlterReplicaLogDirsResponse.AlterReplicaLogDirPartitionResult(number, code)
                )
    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirsResponse.AlterReplicaLogDirTopicResult(name, found)
            for name, found in results.items()
        ]
    )


def _partition_code(call: Call, name: str, number: int) -> int:
    try:
        _check_number(topic_of(call, name, ADMINISTERING), number)
    except Forbidden:
        return Code.CLUSTER_AUTHORIZATION_FAILED
    except TierlogError as error:
        return code_of(error)
    return Code.NONE


def _check_number(topic: Topic, number: int) -> None:
    """Raises Refused."""
    if not 0 <= number < topic.record.partitions:
        raise Refused(Code.UNKNOWN_TOPIC_OR_PARTITION, "No such topic or partition.")


# --- leaders and replicas -------------------------------------------------------------------------


def elect_leaders(call: Call, request: ElectLeadersRequest) -> ElectLeadersResponse:
    """Each partition has its leader. Asked of all, those that need one are named: none."""
    if refusal_of(call, ADMINISTERING):
        return ElectLeadersResponse(error_code=Code.CLUSTER_AUTHORIZATION_FAILED)
    return ElectLeadersResponse(
        replica_election_results=[
            ElectLeadersResponse.ReplicaElectionResult(
                one.topic, [_not_elected(call, one.topic, number) for number in one.partitions]
            )
            for one in _places(call, request)
        ]
    )


def _places(call: Call, request: ElectLeadersRequest) -> list[ElectLeadersRequest.TopicPartitions]:
    if request.topic_partitions is not None:
        return request.topic_partitions
    return [ElectLeadersRequest.TopicPartitions(name, []) for name in seen_topics(call)]


def _not_elected(call: Call, name: str, number: int) -> ElectLeadersResponse.PartitionResult:
    code, text = _partition_code(call, name, number), "No such topic or partition."
    if code == Code.NONE:
        code, text = Code.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition."
    return ElectLeadersResponse.PartitionResult(number, code, text)


def alter_partition_reassignments(
    call: Call, request: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    if refusal := refusal_of(call, ADMINISTERING):
        return AlterPartitionReassignmentsResponse(
            error_code=Code.CLUSTER_AUTHORIZATION_FAILED, error_message=refusal
        )
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        responses=[
            AlterPartitionReassignmentsResponse.ReassignableTopicResponse(
                topic.name, [_reassigned(call, topic.name, one) for one in topic.partitions]
            )
            for topic in request.topics
        ],
    )


def _reassigned(
    call: Call, name: str, one: AlterPartitionReassignmentsRequest.ReassignablePartition
) -> AlterPartitionReassignmentsResponse.ReassignablePartitionResponse:
    answer = AlterPartitionReassignmentsResponse.ReassignablePartitionResponse(one.partition_index)
    try:
        _check_number(topic_of(call, name, ADMINISTERING), one.partition_index)
        if one.replicas is None:
            raise Refused(Code.NO_REASSIGNMENT_IN_PROGRESS)
        check_replicas([one.replicas])
    except TierlogError as error:
        answer.error_code, answer.error_message = code_of(error), text_of(error)
    return answer


def list_partition_reassignments(
    call: Call, _: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    if refusal := refusal_of(call, DESCRIBING):
        return ListPartitionReassignmentsResponse(
            error_code=Code.CLUSTER_AUTHORIZATION_FAILED, error_message=refusal
        )
    return ListPartitionReassignmentsResponse()


# --- the quorum -----------------------------------------------------------------------------------


def describe_quorum(call: Call, request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    """One voter, which leads and has everything: there is no log of metadata to be behind in."""
    if refusal := refusal_of(call, DESCRIBING):
        return DescribeQuorumResponse(
            error_code=Code.CLUSTER_AUTHORIZATION_FAILED, error_message=refusal
        )
    places = [
        (one.topic_name, part.partition_index) for one in request.topics for part in one.partitions
    ]
    if places != [(_METADATA_TOPIC, 0)]:
        return _unknown_quorum(request)
    host, port = call.advertised
    listener = DescribeQuorumResponse.Listener("CONTROLLER", host, port)
    return DescribeQuorumResponse(
        topics=[DescribeQuorumResponse.TopicData(_METADATA_TOPIC, [_quorum()])],
        nodes=[DescribeQuorumResponse.Node(NODE_ID, [listener])],
    )


def _unknown_quorum(request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    kind = DescribeQuorumResponse.PartitionData
    code = Code.UNKNOWN_TOPIC_OR_PARTITION
    return DescribeQuorumResponse(
        topics=[
            DescribeQuorumResponse.TopicData(
                topic.topic_name,
                [kind(one.partition_index, code) for one in topic.partitions],
            )
            for topic in request.topics
        ]
    )


def _quorum() -> DescribeQuorumResponse.PartitionData:
    now_ms = wall_clock_ms()
    return DescribeQuorumResponse.PartitionData(
        partition_index=0,
        leader_id=NODE_ID,
        leader_epoch=1,
        high_watermark=0,
        current_voters=[
            DescribeQuorumResponse.ReplicaState(
                NODE_ID, last_fetch_timestamp=now_ms, last_caught_up_timestamp=now_ms
            )
        ],
    )


# --- what there is none of ------------------------------------------------------------------------


def describe_client_quotas(
    _: Call, __: DescribeClientQuotasRequest
) -> DescribeClientQuotasResponse:
    return DescribeClientQuotasResponse(entries=[])


def list_transactions(_: Call, request: ListTransactionsRequest) -> ListTransactionsResponse:
    unknown = [one for one in request.state_filters if one not in _TRANSACTION_STATES]
    return ListTransactionsResponse(unknown_state_filters=unknown)


def describe_transactions(
    _: Call, request: DescribeTransactionsRequest
) -> DescribeTransactionsResponse:
    return DescribeTransactionsResponse(
        transaction_states=[
            DescribeTransactionsResponse.TransactionState(
                error_code=Code.TRANSACTIONAL_ID_NOT_FOUND, transactional_id=one
            )
            for one in request.transactional_ids
        ]
    )
