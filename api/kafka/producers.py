"""InitProducerId and DescribeProducers: the ids of idempotent producers, and what a log knows of
them.
"""

from __future__ import annotations

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.error_codes import Code, code_of, text_of
from tierlog.api.kafka.partitions import refusal_of, topic_of
from tierlog.api.serving.grants import Scope
from tierlog.hot_tier.producer_state import Producer, new_producer_id
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.kafka_messages.messages import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
)


def init_producer_id(call: Call, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """A new id in each case, as Kafka gives a producer without a transactional id, also where it
    has one already: it begins again at epoch 0.
    """
    if request.transactional_id is not None:
        return InitProducerIdResponse(error_code=Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if refusal_of(call, (Scope.PRODUCE,)):
        return InitProducerIdResponse(error_code=Code.CLUSTER_AUTHORIZATION_FAILED)
    return InitProducerIdResponse(producer_id=new_producer_id(), producer_epoch=0)


async def describe_producers(
    call: Call, request: DescribeProducersRequest
) -> DescribeProducersResponse:
    return DescribeProducersResponse(
        topics=[
            DescribeProducersResponse.TopicResponse(
                name=topic.name,
                partitions=[await _described(call, topic.name, n) for n in topic.partition_indexes],
            )
            for topic in request.topics
        ]
    )


async def _described(
    call: Call, topic: str, number: int
) -> DescribeProducersResponse.PartitionResponse:
    found = DescribeProducersResponse.PartitionResponse(partition_index=number)
    try:
        partition = topic_of(call, topic, (Scope.READ,)).partition(number)
        partition.check_leadership()
        producers = await call.context.read(partition.log.producers)  # the log's lock
        found.active_producers = [_state(producer) for producer in producers]
    except TierlogError as error:
        found.error_code = code_of(error)
        found.error_message = text_of(error)
    return found


def _state(producer: Producer) -> DescribeProducersResponse.ProducerState:
    return DescribeProducersResponse.ProducerState(
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        last_sequence=producer.last_sequence,
        last_timestamp=producer.last_timestamp,
        coordinator_epoch=producer.coordinator_epoch,
        current_txn_start_offset=producer.transaction_first_offset,
    )
