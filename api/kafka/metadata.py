"""Metadata: the brokers, the topics and who leads them.

* A topic that does not exist is created if the client and `auto.create.topics.enable` allow it.
* A client sees the topics that its token may see; others are as if they did not exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.error_codes import Code, Refused, code_of
from tierlog.api.kafka.nodes import NOBODY, Node, controller_id, nodes_of, replicas_of
from tierlog.api.kafka.operations import UNASKED, operations_of_cluster, operations_of_topic
from tierlog.api.kafka.partitions import (
    ADMINISTERING,
    DESCRIBING,
    NO_ID,
    seen_topics,
    topic_of,
    topic_of_id,
)
from tierlog.broker.topics.topics import Topic
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.errors import Forbidden, TierlogError, TopicExists, UnknownTopic
from tierlog.record_format.kafka_messages.messages import MetadataRequest, MetadataResponse

_ALL_IF_EMPTY = 0  # the version in which no topics are all topics
_BY_ID = 12  # the first version that asks by id; two before it have the field


async def metadata(call: Call, request: MetadataRequest) -> MetadataResponse:
    context = call.context
    if call.version < _BY_ID and any(map(_has_no_name_alone, request.topics or ())):
        return _refused(request)
    nodes = nodes_of(call)
    wants_all = request.topics is None or (not request.topics and call.version == _ALL_IF_EMPTY)
    if wants_all:
        topics = list(_described(call, seen_topics(call), nodes))
    else:
        topics = [
            await _one(call, wanted, nodes, creates=request.allow_auto_topic_creation)
            for wanted in request.topics or ()
        ]
    if request.include_topic_authorized_operations:
        for topic in topics:
            if topic.name is not None:
                topic.topic_authorized_operations = operations_of_topic(call, topic.name)
    asked = request.include_cluster_authorized_operations
    return MetadataResponse(
        brokers=[MetadataResponse.MetadataResponseBroker(*one) for one in nodes],
        cluster_id=context.broker.folder.cluster_id,
        controller_id=controller_id(nodes),
        topics=topics,
        cluster_authorized_operations=operations_of_cluster(call) if asked else UNASKED,
    )


def _has_no_name_alone(wanted: MetadataRequest.MetadataRequestTopic) -> bool:
    return wanted.name is None or wanted.topic_id != NO_ID


def _refused(request: MetadataRequest) -> MetadataResponse:
    topics = [
        MetadataResponse.MetadataResponseTopic(
            error_code=Code.INVALID_REQUEST, name=wanted.name or "", topic_id=wanted.topic_id
        )
        for wanted in request.topics or ()
    ]
    return MetadataResponse(topics=topics)


def _described(
    call: Call, names: Iterable[str], nodes: list[Node]
) -> Iterable[MetadataResponse.MetadataResponseTopic]:
    for name in names:
        with suppress(UnknownTopic):  # deleted meanwhile
            yield describe(call, call.context.broker.topic(name), nodes)


async def _one(
    call: Call,
    wanted: MetadataRequest.MetadataRequestTopic,
    nodes: list[Node],
    *,
    creates: bool,
) -> MetadataResponse.MetadataResponseTopic:
    broker = call.context.broker
    if wanted.topic_id != NO_ID:
        return _by_id(call, wanted.topic_id, nodes)
    name = wanted.name or ""
    try:
        try:
            return describe(call, topic_of(call, name, DESCRIBING), nodes)
        except UnknownTopic:
            if not (creates and call.context.settings.auto_create_topics):
                raise
            call.session.grant.check_scopes(ADMINISTERING)
        with suppress(TopicExists):  # another client was faster
            await call.context.write(
                broker.create_topic, name, partitions=call.context.settings.num_partitions
            )
        return describe(call, broker.topic(name), nodes)
    except TierlogError as error:
        return MetadataResponse.MetadataResponseTopic(error_code=code_of(error), name=name)


def _by_id(
    call: Call, topic_id: bytes, nodes: list[Node]
) -> MetadataResponse.MetadataResponseTopic:
    try:
        return describe(call, topic_of_id(call, topic_id, DESCRIBING), nodes)
    except (Refused, Forbidden):
        return MetadataResponse.MetadataResponseTopic(
            error_code=Code.UNKNOWN_TOPIC_ID, name=None, topic_id=topic_id
        )


def describe(call: Call, topic: Topic, nodes: list[Node]) -> MetadataResponse.MetadataResponseTopic:
    record = topic.record
    return MetadataResponse.MetadataResponseTopic(
        name=record.name,
        topic_id=parse_topic_id(record.topic_id).bytes,
        is_internal=record.internal,
        partitions=[_partition(call, topic, number, nodes) for number in range(record.partitions)],
    )


def _partition(
    call: Call, topic: Topic, number: int, nodes: list[Node]
) -> MetadataResponse.MetadataResponsePartition:
    found = replicas_of(call, topic, number, nodes)
    return MetadataResponse.MetadataResponsePartition(
        error_code=Code.LEADER_NOT_AVAILABLE if found.leader_id == NOBODY else Code.NONE,
        partition_index=number,
        leader_id=found.leader_id,
        leader_epoch=found.leader_epoch,
        replica_nodes=found.nodes,
        isr_nodes=found.in_sync,
        offline_replicas=found.offline,
    )
