"""DescribeProducers: what a log knows of idempotent producers."""

from __future__ import annotations

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.error_codes import code_of, text_of
from tierlog.api.kafka.partitions import topic_of
from tierlog.api.serving.grants import Scope
from tierlog.hot_tier.producer_state import Producer
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.kafka_messages.messages import (
    DescribeProducersRequest,
    DescribeProducersResponse,
)


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
        producers = await call.context.read(partition.producers)  # the log's lock
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
