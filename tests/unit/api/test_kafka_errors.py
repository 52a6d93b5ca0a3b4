"""Which errors are counted of an answer to a Kafka client."""

from typing import Any

from tierlog.api.kafka.error_codes import Code, names_of_errors
from tierlog.record_format.kafka_messages.messages import (
    AddPartitionsToTxnResponse,
    ApiVersionsResponse,
    FetchResponse,
    HeartbeatResponse,
    ProduceResponse,
)


def produced(*codes: int) -> ProduceResponse:
    topic, part = ProduceResponse.TopicProduceResponse, ProduceResponse.PartitionProduceResponse
    parts = [part(index=number, error_code=code) for number, code in enumerate(codes)]
    return ProduceResponse(responses=[topic(name="t", partition_responses=parts)])


def test_an_error_of_a_partition_is_counted_under_its_name_and_once() -> None:
    full, unknown = Code.MESSAGE_TOO_LARGE, Code.UNKNOWN_TOPIC_OR_PARTITION
    for answer, expected in (
        (None, ["NONE"]),
        (FetchResponse(), ["NONE"]),
        (
            FetchResponse(error_code=Code.INVALID_FETCH_SESSION_EPOCH),
            ["INVALID_FETCH_SESSION_EPOCH"],
        ),
        (HeartbeatResponse(error_code=Code.REBALANCE_IN_PROGRESS), ["REBALANCE_IN_PROGRESS"]),
        (ApiVersionsResponse(error_code=12_345), ["other"]),
        (produced(0, 0), ["NONE"]),
        (produced(0, full, unknown, full), [unknown.name, full.name]),
        (in_transaction(unknown), [unknown.name]),
    ):
        assert sorted(names_of_errors(answer)) == sorted(expected)


def in_transaction(code: int) -> Any:
    kind = AddPartitionsToTxnResponse
    part = kind.AddPartitionsToTxnPartitionResult(partition_error_code=code)
    topic = kind.AddPartitionsToTxnTopicResult(results_by_partition=[part])
    return kind(results_by_topic_v3_and_below=[topic])
