"""What the cluster says of itself, and of changes that need several brokers.

To reassign the only replica of a partition is to hand it over. The answers of a broker alone are
those of one Kafka broker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.error_codes import Code, Refused, code_of, text_of
from tierlog.api.kafka.metadata import describe
from tierlog.api.kafka.nodes import (
    NOBODY,
    NODE_ID,
    Node,
    Replicas,
    controller_id,
    nodes_of,
    own_id,
    replicas_of,
)
from tierlog.api.kafka.operations import UNASKED, operations_of_cluster, operations_of_topic
from tierlog.api.kafka.partitions import (
    ADMINISTERING,
    DESCRIBING,
    refusal_of,
    seen_topics,
    topic_of,
)
from tierlog.broker.partition.partition import Partition
from tierlog.broker.topics.topic_replicas import check_replicas
from tierlog.broker.topics.topics import Topic
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.errors import Forbidden, TierlogError, UnknownTopic
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
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)

if TYPE_CHECKING:
    from tierlog.broker.cluster.reassignments import Ongoing
    from tierlog.broker.data_folder.data_folder import TopicIdPartition

_METADATA_TOPIC: Final = "__cluster_metadata"
_BROKERS: Final = 1  # an endpoint type; 2 are the controllers
PARTITIONS_MAX: Final = 2000  # max.request.partition.size.limit


_UNCLEAN: Final = 1  # an election type; 0 is of the preferred leader
_NO_LEADER: Final = {
    False: Code.PREFERRED_LEADER_NOT_AVAILABLE,
    True: Code.ELIGIBLE_LEADERS_NOT_AVAILABLE,
}

_Cursor = DescribeTopicPartitionsResponse.Cursor
_Ongoing = ListPartitionReassignmentsResponse.OngoingPartitionReassignment


def describe_cluster(call: Call, request: DescribeClusterRequest) -> DescribeClusterResponse:
    if request.endpoint_type != _BROKERS:
        return DescribeClusterResponse(
            error_code=Code.MISMATCHED_ENDPOINT_TYPE,
            error_message="The request was sent to an endpoint of the wrong type.",
            endpoint_type=_BROKERS,
        )
    asked, nodes = request.include_cluster_authorized_operations, nodes_of(call)
    return DescribeClusterResponse(
        cluster_id=call.context.broker.folder.cluster_id,
        controller_id=controller_id(nodes),
        brokers=[DescribeClusterResponse.DescribeClusterBroker(*one) for one in nodes],
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
    answer, nodes = DescribeTopicPartitionsResponse(), nodes_of(call)
    first = request.cursor or DescribeTopicPartitionsRequest.Cursor("", 0)
    for name in _names(call, request):
        if name < first.topic_name:
            continue
        start = first.partition_index if name == first.topic_name else 0
        if left <= 0:
            answer.next_cursor = _Cursor(name, start)
            break
        page, count = _page(call, name, nodes, start=start, limit=left)
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
    call: Call, name: str, nodes: list[Node], *, start: int, limit: int
) -> tuple[DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic, int]:
    """The topic, with some of its partitions, and how many it has."""
    page = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic(
        name=name, topic_authorized_operations=operations_of_topic(call, name)
    )
    try:
        topic = describe(call, topic_of(call, name, DESCRIBING), nodes)
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
                    partition_index=one.number, partition_size=one.size_bytes
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


async def elect_leaders(call: Call, request: ElectLeadersRequest) -> ElectLeadersResponse:
    """A partition with one replica is led by it, or by none: asked of all, those are named. If it
    has several it is handed over to the first, unless that is not in sync.
    """
    if refusal_of(call, ADMINISTERING):
        return ElectLeadersResponse(error_code=Code.CLUSTER_AUTHORIZATION_FAILED)
    nodes = nodes_of(call)
    return ElectLeadersResponse(
        replica_election_results=[
            ElectLeadersResponse.ReplicaElectionResult(
                one.topic,
                [
                    await _elected(call, one.topic, number, nodes, type_=request.election_type)
                    for number in one.partitions
                ],
            )
            for one in _places(call, request, nodes)
        ]
    )


def _places(
    call: Call, request: ElectLeadersRequest, nodes: list[Node]
) -> list[ElectLeadersRequest.TopicPartitions]:
    if request.topic_partitions is not None:
        return request.topic_partitions
    found = []
    for name in seen_topics(call):
        with suppress(UnknownTopic):  # deleted meanwhile
            topic = call.context.broker.topic(name)
            wanting = [
                n
                for n in topic.numbers
                if not _has_leader(call, topic, n, nodes) or _preferred_of(call, topic, n, nodes)
            ]
            found.append(ElectLeadersRequest.TopicPartitions(name, wanting))
    return found


def _has_leader(call: Call, topic: Topic, number: int, nodes: list[Node]) -> bool:
    if call.context.broker.cluster is None:
        return True
    return replicas_of(call, topic, number, nodes).leader_id != NOBODY


def _preferred_of(call: Call, topic: Topic, number: int, nodes: list[Node]) -> Replicas | None:
    """Its replicas, if the first lives and is in sync and does not lead it."""
    found = replicas_of(call, topic, number, nodes)
    preferred = next(iter(found.nodes), NOBODY)
    may_lead = preferred in found.in_sync and preferred not in found.offline
    return found if may_lead and found.leader_id not in (NOBODY, preferred) else None


async def _elected(
    call: Call, name: str, number: int, nodes: list[Node], *, type_: int
) -> ElectLeadersResponse.PartitionResult:
    refusal, cluster = _not_elected(call, name, number, nodes, type_=type_), None
    if refusal.error_code == Code.ELECTION_NOT_NEEDED and type_ != _UNCLEAN:
        cluster = call.context.broker.cluster
    try:
        if cluster is None:
            return refusal
        topic = call.context.broker.topic(name)
        found = _preferred_of(call, topic, number, nodes)
        if found is None:
            return refusal
        place = topic.record.topic_id, number
        source, target = found.leader_id, found.nodes[0]
        hand_over = cluster.moves.move_leader
        await call.context.write_cold(hand_over, place, source=source, target=target)
    except TierlogError as error:
        code = Code.PREFERRED_LEADER_NOT_AVAILABLE
        return ElectLeadersResponse.PartitionResult(number, code, str(error))
    return ElectLeadersResponse.PartitionResult(number, Code.NONE, None)


def _not_elected(
    call: Call, name: str, number: int, nodes: list[Node], *, type_: int
) -> ElectLeadersResponse.PartitionResult:
    code, text = _partition_code(call, name, number), "No such topic or partition."
    if code == Code.NONE:
        code, text = Code.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition."
        with suppress(UnknownTopic):  # deleted meanwhile
            topic = call.context.broker.topic(name)
            if not _has_leader(call, topic, number, nodes):
                count = len(replicas_of(call, topic, number, nodes).nodes)
                several = count > 1 or (count == 0 and topic.record.is_replicated)
                code, text = _without_leader(several=several, is_unclean=type_ == _UNCLEAN)
    return ElectLeadersResponse.PartitionResult(number, code, text)


def _without_leader(*, several: bool, is_unclean: bool) -> tuple[Code, str]:
    """`several`: it has more than one replica, or is to have."""
    if is_unclean and several:
        return (
            Code.POLICY_VIOLATION,
            "No election is unclean: a replica that is not in sync would lose what is "
            "acknowledged. One that is in sync is elected once its broker runs.",
        )
    return _NO_LEADER[is_unclean], "The broker that has it does not answer."


async def alter_partition_reassignments(
    call: Call, request: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    """Each is ordered, and goes on in the background."""
    if refusal := refusal_of(call, ADMINISTERING):
        return AlterPartitionReassignmentsResponse(
            error_code=Code.CLUSTER_AUTHORIZATION_FAILED, error_message=refusal
        )
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        responses=[
            AlterPartitionReassignmentsResponse.ReassignableTopicResponse(
                topic.name,
                [
                    await _reassigned(
                        call, topic.name, one, is_fixed=not request.allow_replication_factor_change
                    )
                    for one in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )


async def _reassigned(
    call: Call,
    name: str,
    one: AlterPartitionReassignmentsRequest.ReassignablePartition,
    *,
    is_fixed: bool,
) -> AlterPartitionReassignmentsResponse.ReassignablePartitionResponse:
    """`is_fixed`: the number of replicas may not change (KIP-860)."""
    answer = AlterPartitionReassignmentsResponse.ReassignablePartitionResponse(one.partition_index)
    cluster, number = call.context.broker.cluster, one.partition_index
    try:
        topic = topic_of(call, name, ADMINISTERING)
        _check_number(topic, number)
        place = topic.record.topic_id, number
        if one.replicas is None:
            if cluster is None:
                raise Refused(Code.NO_REASSIGNMENT_IN_PROGRESS)
            await call.context.write_cold(cluster.reassignments.cancel, place)
            return answer
        if cluster is None:
            check_replicas([one.replicas], living={NODE_ID}, factor=1)
            return answer
        if is_fixed:
            _check_factor(call, topic, number, one.replicas)
        await call.context.write_cold(cluster.reassignments.begin, place, one.replicas)
    except TierlogError as error:
        answer.error_code, answer.error_message = code_of(error), text_of(error)
    return answer


def _check_factor(call: Call, topic: Topic, number: int, wanted: list[int]) -> None:
    """Raises Refused."""
    now = replicas_of(call, topic, number, nodes_of(call))
    factor = len(now.nodes) - len(now.adding)
    if len(wanted) != factor:
        raise Refused(
            Code.INVALID_REPLICATION_FACTOR,
            f"The replication factor is changed from {factor} to {len(wanted)}",
        )


async def list_partition_reassignments(
    call: Call, request: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    if refusal := refusal_of(call, DESCRIBING):
        return ListPartitionReassignmentsResponse(
            error_code=Code.CLUSTER_AUTHORIZATION_FAILED, error_message=refusal
        )
    cluster = call.context.broker.cluster
    moving: dict[TopicIdPartition, Ongoing] = {}
    if cluster is not None:
        moving = await call.context.write_cold(cluster.reassignments.list_ongoing)
    wanted = None
    if request.topics is not None:
        wanted = {(one.name, number) for one in request.topics for number in one.partition_indexes}
    found: dict[str, list[_Ongoing]] = {}
    for (topic_id, number), one in sorted(moving.items()):
        with suppress(UnknownTopic):  # deleted meanwhile
            name = call.context.broker.topic_by_id(topic_id).record.name
            if call.session.grant.sees_topic(name) and (wanted is None or (name, number) in wanted):
                ongoing = _Ongoing(number, *map(list, one))
                found.setdefault(name, []).append(ongoing)
    return ListPartitionReassignmentsResponse(
        topics=[
            ListPartitionReassignmentsResponse.OngoingTopicReassignment(name, partitions)
            for name, partitions in found.items()
        ]
    )


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
    nodes = nodes_of(call)
    voter = next((one for one in nodes), Node(own_id(call), *call.advertised))
    listener = DescribeQuorumResponse.Listener("CONTROLLER", voter.host, voter.port)
    return DescribeQuorumResponse(
        topics=[DescribeQuorumResponse.TopicData(_METADATA_TOPIC, [_quorum(voter.node_id)])],
        nodes=[DescribeQuorumResponse.Node(voter.node_id, [listener])],
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


def _quorum(node_id: int) -> DescribeQuorumResponse.PartitionData:
    now_ms = wall_clock_ms()
    return DescribeQuorumResponse.PartitionData(
        partition_index=0,
        leader_id=node_id,
        leader_epoch=1,
        high_watermark=0,
        current_voters=[
            DescribeQuorumResponse.ReplicaState(
                node_id, last_fetch_timestamp=now_ms, last_caught_up_timestamp=now_ms
            )
        ],
    )


# --- what there is none of ------------------------------------------------------------------------


def describe_client_quotas(
    _: Call, __: DescribeClientQuotasRequest
) -> DescribeClientQuotasResponse:
    return DescribeClientQuotasResponse(entries=[])
