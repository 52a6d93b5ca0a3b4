"""CreateTopics, DeleteTopics, CreatePartitions and DeleteRecords, with the refusals of Kafka's
controller (ReplicationControlManager, ControllerApis).

* Each topic is changed or refused by itself; one that is named twice is refused.
* What may be asked of replicas is the broker's to say (`broker.topics.topic_replicas`).
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable
from typing import Final

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.config_entries import entries_of
from tierlog.api.kafka.error_codes import Code, Refused, code_of, text_of
from tierlog.api.kafka.partitions import ADMINISTERING, NO_ID, topic_of, topic_of_id
from tierlog.broker.internal_topics import check_may_alter, check_may_create, check_may_delete
from tierlog.broker.topics.topic_replicas import NewTopic
from tierlog.broker.topics.topics import Topic
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.kafka_messages.messages import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from tierlog.record_format.topic_rules import ConfigValue

_DEFAULT: Final = -1
_HIGH_WATERMARK: Final = -1
_DUPLICATE: Final = "Duplicate topic name."


def repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


# --- CreateTopics ---------------------------------------------------------------------------------


async def create_topics(call: Call, request: CreateTopicsRequest) -> CreateTopicsResponse:
    twice = repeated(one.name for one in request.topics)
    done: list[CreateTopicsResponse.CreatableTopicResult] = []
    for one in request.topics:
        if one.name in twice:
            if all(other.name != one.name for other in done):
                done.append(_not_created(one.name, Refused(Code.INVALID_REQUEST, _DUPLICATE)))
            continue
        try:
            done.append(await _create(call, one, validate_only=request.validate_only))
        except (TierlogError, OSError) as error:
            done.append(_not_created(one.name, error))
    return CreateTopicsResponse(topics=done)


def _not_created(name: str, error: Exception) -> CreateTopicsResponse.CreatableTopicResult:
    return CreateTopicsResponse.CreatableTopicResult(
        name=name, error_code=code_of(error), error_message=text_of(error)
    )


async def _create(
    call: Call, wanted: CreateTopicsRequest.CreatableTopic, *, validate_only: bool
) -> CreateTopicsResponse.CreatableTopicResult:
    broker, name = call.context.broker, wanted.name
    call.session.grant.check_topic(name)
    call.session.grant.check_scopes(ADMINISTERING)
    check_may_create(name)
    asked = NewTopic(
        name,
        _partition_count(call, wanted),
        _config_of(wanted),
        _factor_of(wanted),
        {one.partition_index: one.broker_ids for one in wanted.assignments},
    )
    if validate_only:
        factor = broker.check_new_topic(asked)
        topic_id, effective = uuid.uuid4().bytes, LogConfig.parse(asked.config)
    else:
        await call.context.write(broker.create_topic, **asked._asdict())
        topic = broker.topic(name)
        topic_id, effective = parse_topic_id(topic.record.topic_id).bytes, topic.config
        factor = topic.record.replication_factor
    return CreateTopicsResponse.CreatableTopicResult(
        name=name,
        topic_id=topic_id,
        num_partitions=asked.partitions,
        replication_factor=factor,
        configs=[
            CreateTopicsResponse.CreatableTopicConfigs(
                name=entry.name, value=entry.value, config_source=entry.source
            )
            for entry in entries_of(effective, replication_factor=factor)
        ],
    )


def _partition_count(call: Call, wanted: CreateTopicsRequest.CreatableTopic) -> int:
    """Raises Refused."""
    if wanted.assignments:
        return _assigned_count(wanted)
    if wanted.num_partitions < _DEFAULT or wanted.num_partitions == 0:
        raise Refused(
            Code.INVALID_PARTITIONS,
            "Number of partitions was set to an invalid non-positive value.",
        )
    if wanted.num_partitions == _DEFAULT:
        return call.context.settings.num_partitions
    return wanted.num_partitions


def _factor_of(wanted: CreateTopicsRequest.CreatableTopic) -> int | None:
    """Raises Refused."""
    factor = wanted.replication_factor
    if factor < _DEFAULT or factor == 0:
        raise Refused(
            Code.INVALID_REPLICATION_FACTOR,
            "Replication factor must be larger than 0, or -1 to use the default value.",
        )
    return None if factor == _DEFAULT else factor


def _assigned_count(wanted: CreateTopicsRequest.CreatableTopic) -> int:
    """Raises Refused."""
    for what, given in (
        ("replicationFactor", wanted.replication_factor),
        ("numPartitions", wanted.num_partitions),
    ):
        if given != _DEFAULT:
            text = f"A manual partition assignment was specified, but {what} was not set to -1."
            raise Refused(Code.INVALID_REQUEST, text)
    numbers = sorted(one.partition_index for one in wanted.assignments)
    if numbers != list(range(len(numbers))):
        raise Refused(
            Code.INVALID_REPLICA_ASSIGNMENT,
            "partitions should be a consecutive 0-based integer sequence",
        )
    return len(numbers)


def _config_of(wanted: CreateTopicsRequest.CreatableTopic) -> dict[str, ConfigValue]:
    """Raises Refused."""
    for one in wanted.configs:
        if one.value is None:
            text = f"Null value not supported for topic configs: {one.name}"
            raise Refused(Code.INVALID_CONFIG, text)
    return {one.name: one.value for one in wanted.configs if one.value is not None}


# --- DeleteTopics ---------------------------------------------------------------------------------


async def delete_topics(call: Call, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    wanted = list(request.topics) or [
        DeleteTopicsRequest.DeleteTopicState(name=name) for name in request.topic_names
    ]
    twice = repeated(one.name for one in wanted if one.name is not None)
    done = []
    for one in wanted:
        result = DeleteTopicsResponse.DeletableTopicResult(name=one.name, topic_id=one.topic_id)
        try:
            if one.name in twice:
                raise Refused(Code.INVALID_REQUEST, _DUPLICATE)
            topic = _topic_to_delete(call, one)
            result.topic_id = parse_topic_id(topic.record.topic_id).bytes
            result.name = topic.record.name
            check_may_delete(topic.record.name)
            await call.context.write(call.context.broker.delete_topic, topic.record.name)
        except (TierlogError, OSError) as error:
            result.error_code, result.error_message = code_of(error), text_of(error)
        done.append(result)
    return DeleteTopicsResponse(responses=done)


def _topic_to_delete(call: Call, wanted: DeleteTopicsRequest.DeleteTopicState) -> Topic:
    """Raises Refused, Forbidden, UnknownTopic."""
    if wanted.name is not None and wanted.topic_id != NO_ID:
        raise Refused(Code.INVALID_REQUEST, "You may not specify both topic name and topic id.")
    if wanted.name is not None:
        return topic_of(call, wanted.name, ADMINISTERING)
    if wanted.topic_id == NO_ID:
        raise Refused(Code.INVALID_REQUEST, "Neither topic name nor id were specified.")
    return topic_of_id(call, wanted.topic_id, ADMINISTERING)


# --- CreatePartitions -----------------------------------------------------------------------------


async def create_partitions(
    call: Call, request: CreatePartitionsRequest
) -> CreatePartitionsResponse:
    twice = repeated(one.name for one in request.topics)
    done = []
    for one in request.topics:
        result = CreatePartitionsResponse.CreatePartitionsTopicResult(name=one.name)
        try:
            if one.name in twice:
                raise Refused(Code.INVALID_REQUEST, _DUPLICATE)
            await _add_partitions(call, one, validate_only=request.validate_only)
        except (TierlogError, OSError) as error:
            result.error_code, result.error_message = code_of(error), text_of(error)
        done.append(result)
    return CreatePartitionsResponse(results=done)


async def _add_partitions(
    call: Call, wanted: CreatePartitionsRequest.CreatePartitionsTopic, *, validate_only: bool
) -> None:
    broker, topic = call.context.broker, topic_of(call, wanted.name, ADMINISTERING)
    count = topic.record.partitions
    if wanted.count == count:
        raise Refused(Code.INVALID_PARTITIONS, f"Topic already has {count} partition(s).")
    if wanted.count < count:
        raise Refused(
            Code.INVALID_PARTITIONS,
            f"The topic {wanted.name} currently has {count} partition(s); {wanted.count} would not "
            "be an increase.",
        )
    _check_assignments(wanted, added=wanted.count - count)
    check_may_alter(wanted.name, config={}, partitions=wanted.count)
    given = enumerate(wanted.assignments or (), count)
    replicas = {number: one.broker_ids for number, one in given}
    if validate_only:
        broker.check_altered_topic(wanted.name, partitions=wanted.count, replicas=replicas)
    else:
        await call.context.write(
            broker.alter_topic, wanted.name, partitions=wanted.count, replicas=replicas
        )
        call.context.waiting.wake_topic(topic)


def _check_assignments(
    wanted: CreatePartitionsRequest.CreatePartitionsTopic, *, added: int
) -> None:
    if wanted.assignments is not None and len(wanted.assignments) != added:
        raise Refused(
            Code.INVALID_REPLICA_ASSIGNMENT,
            f"Attempted to add {added} additional partition(s), but only {len(wanted.assignments)} "
            "assignment(s) were specified.",
        )


# --- DeleteRecords --------------------------------------------------------------------------------


async def delete_records(call: Call, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    done = []
    for topic in request.topics:
        results = [await _delete_before(call, topic.name, one) for one in topic.partitions]
        done.append(
            DeleteRecordsResponse.DeleteRecordsTopicResult(name=topic.name, partitions=results)
        )
    return DeleteRecordsResponse(topics=done)


async def _delete_before(
    call: Call, name: str, wanted: DeleteRecordsRequest.DeleteRecordsPartition
) -> DeleteRecordsResponse.DeleteRecordsPartitionResult:
    context, number = call.context, wanted.partition_index
    result = DeleteRecordsResponse.DeleteRecordsPartitionResult(
        partition_index=number, low_watermark=-1
    )
    try:
        topic = topic_of(call, name, ADMINISTERING)
        if topic.record.internal:
            raise Refused(Code.INVALID_TOPIC_EXCEPTION)
        _check_policy(topic)
        partition = topic.partition(number)
        offset = partition.high_watermark if wanted.offset == _HIGH_WATERMARK else wanted.offset
        if offset < 0:
            raise Refused(Code.OFFSET_OUT_OF_RANGE)
        result.low_watermark = await context.write_cold(context.broker.trim, name, number, offset)
        context.waiting.wake_all(partition)  # a fetch may be waiting at a deleted offset
    except (TierlogError, OSError) as error:
        result.error_code = code_of(error)
    return result


def _check_policy(topic: Topic) -> None:
    """Records of a topic that is only compacted are not deleted by their age, nor by hand."""
    if "delete" not in topic.config.cleanup_policy.split(","):
        raise Refused(Code.POLICY_VIOLATION)
