"""Produce and Fetch for one partition each, as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fakes.produce_requests import NOW_MS
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.kafka_messages.messages import FetchRequest, ProduceRequest


def batch_of(*values: bytes, **fields: Any) -> bytes:
    return bytes(encode_batch(list(values), timestamps=[NOW_MS] * len(values), **fields))


def produce_request(*records: tuple[str, int, bytes | None], acks: int = -1) -> ProduceRequest:
    """`records`: topic, partition, batch."""
    topics = [
        ProduceRequest.TopicProduceData(
            name=topic, partition_data=[ProduceRequest.PartitionProduceData(number, batch)]
        )
        for topic, number, batch in records
    ]
    return ProduceRequest(acks=acks, timeout_ms=30_000, topic_data=topics)


def fetch_request(
    *wanted: tuple[str, int, int],
    session: tuple[int, int] = (0, -1),
    partition_max_bytes: int = 1 << 20,
    current_leader_epoch: int = -1,
    **fields: Any,
) -> FetchRequest:
    """`wanted`: topic, partition, offset. It does not wait, unless `max_wait_ms` says so."""
    topics = [
        FetchRequest.FetchTopic(
            topic=topic,
            partitions=[
                FetchRequest.FetchPartition(
                    partition=number,
                    fetch_offset=offset,
                    partition_max_bytes=partition_max_bytes,
                    current_leader_epoch=current_leader_epoch,
                )
            ],
        )
        for topic, number, offset in wanted
    ]
    given = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 50 << 20, **fields}
    return FetchRequest(topics=topics, session_id=session[0], session_epoch=session[1], **given)


def values_in(records: bytes | memoryview) -> list[bytes | None]:
    data = bytes(records)
    return [one.value for header in iter_headers(data) for one in decode_batch(data, header)]


def partitions_of(answer: Any) -> list[Any]:
    """Of all topics of an answer to Produce or Fetch."""
    found: list[Any] = []
    for topic in answer.responses:
        parts: Sequence[Any] = getattr(topic, "partition_responses", None) or topic.partitions
        found += parts
    return found
