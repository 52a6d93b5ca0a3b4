"""Metadata: the broker, the topics and who leads them. One broker leads them all.

* A topic that does not exist is created if the client and `auto.create.topics.enable` allow it.
* A client sees the topics that its token may see; others are as if they did not exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.context import NODE_ID
from tierlog.api.kafka.error_codes import Code, Refused, code_of
from tierlog.api.kafka.operations import UNASKED, operations_of_cluster, operations_of_topic
from tierlog.api.kafka.partitions import (
    ADMINISTERING,
    DESCRIBING,
    NO_ID,
    seen_topics,
    topic_of,
    topic_of_id,
)
from tierlog.broker.topics import Topic
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.errors import Forbidden, TierlogError, TopicExists, UnknownTopic
from tierlog.record_format.kafka_messages.messages import MetadataRequest, MetadataResponse

_ALL_IF_EMPTY = 0  # the version in which no topics are all topics


async def metadata(call: Call, request: MetadataRequest) -> MetadataResponse:
    context = call.context
    wants_all = request.topics is None or (not request.topics and call.version == _ALL_IF_EMPTY)
    if wants_all:
        topics = list(_described(call, seen_topics(call)))
    else:
        topics = [
            await _one(call, wanted, creates=request.allow_auto_topic_creation)
            for wanted in request.topics or ()
        ]
    if request.include_topic_authorized_operations:
        for topic in topics:
            if topic.name is not None:
                topic.topic_authorized_operations = operations_of_topic(call, topic.name)
    asked = request.include_cluster_authorized_operations
    host, port = call.advertised
    return MetadataResponse(
        brokers=[MetadataResponse.MetadataResponseBroker(node_id=NODE_ID, host=host, port=port)],
        cluster_id=context.broker.folder.cluster_id,
        controller_id=NODE_ID,
        topics=topics,
        cluster_authorized_operations=operations_of_cluster(call) if asked else UNASKED,
    )


def _described(
    call: Call, names: Iterable[str]
) -> Iterable[MetadataResponse.MetadataResponseTopic]:
    for name in names:
        with suppress(UnknownTopic):  # deleted meanwhile
            yield describe(call.context.broker.topic(name))


async def _one(
    call: Call, wanted: MetadataRequest.MetadataRequestTopic, *, creates: bool
) -> MetadataResponse.MetadataResponseTopic:
    broker = call.context.broker
    if wanted.topic_id != NO_ID:
        return _by_id(call, wanted.topic_id)
    name = wanted.name or ""
    try:
        try:
            return describe(topic_of(call, name, DESCRIBING))
        except UnknownTopic:
            if not (creates and call.context.settings.auto_create_topics):
                raise
            call.session.grant.check_scopes(ADMINISTERING)
        with suppress(TopicExists):  # another client was faster
            await call.context.write(
                broker.create_topic, name, partitions=call.context.settings.num_partitions
            )
        return describe(broker.topic(name))
    except TierlogError as error:
        return MetadataResponse.MetadataResponseTopic(error_code=code_of(error), name=name)


def _by_id(call: Call, topic_id: bytes) -> MetadataResponse.MetadataResponseTopic:
    try:
        return describe(topic_of_id(call, topic_id, DESCRIBING))
    except (Refused, Forbidden):
        return MetadataResponse.MetadataResponseTopic(
            error_code=Code.UNKNOWN_TOPIC_ID, name=None, topic_id=topic_id
        )


def describe(topic: Topic) -> MetadataResponse.MetadataResponseTopic:
    record = topic.record
    return MetadataResponse.MetadataResponseTopic(
        name=record.name,
        topic_id=parse_topic_id(record.topic_id).bytes,
        is_internal=record.internal,
        partitions=[_partition(topic, number) for number in range(record.partitions)],
    )


def _partition(topic: Topic, number: int) -> MetadataResponse.MetadataResponsePartition:
    found = topic.partitions.get(number)
    is_led = found is not None and not found.is_defunct
    return MetadataResponse.MetadataResponsePartition(
        error_code=Code.NONE if is_led else Code.LEADER_NOT_AVAILABLE,
        partition_index=number,
        leader_id=NODE_ID if is_led else -1,
        leader_epoch=found.offsets().leader_epoch if found is not None else -1,
        replica_nodes=[NODE_ID],
        isr_nodes=[NODE_ID] if is_led else [],
        offline_replicas=[] if is_led else [NODE_ID],
    )
