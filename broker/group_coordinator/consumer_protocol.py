"""What Kafka's consumers send each other through their group (protocol type `consumer`): which
topics a member wants, and which partitions it gets. Kafka's range assignor.

A pure function and its bytes; for members that leave the assignment to the broker, and to show what
others have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
)
from tierlog.record_format.kafka_messages.source import MessageError

RANGE: Final = "range"
_VERSION: Final = 0  # read by all

Assignment = Mapping[str, list[int]]
"""Partitions by topic."""


def encode_subscription(topics: Iterable[str]) -> bytes:
    wanted = ConsumerProtocolSubscription(topics=sorted(set(topics)), user_data=None)
    return codec.encode_versioned(wanted, _VERSION)


def decode_subscription(data: bytes) -> frozenset[str]:
    """Raises MessageError."""
    return frozenset(codec.decode_versioned(ConsumerProtocolSubscription, data).topics)


def encode_assignment(assignment: Assignment) -> bytes:
    rows = [
        ConsumerProtocolAssignment.TopicPartition(topic=topic, partitions=partitions)
        for topic, partitions in sorted(assignment.items())
    ]
    value = ConsumerProtocolAssignment(assigned_partitions=rows, user_data=None)
    return codec.encode_versioned(value, _VERSION)


def decode_assignment(data: bytes) -> dict[str, list[int]]:
    """Nothing for a member that has none, or whose bytes are not a consumer's."""
    try:
        found = codec.decode_versioned(ConsumerProtocolAssignment, data) if data else None
    except MessageError:
        found = None
    return {one.topic: list(one.partitions) for one in (found.assigned_partitions if found else ())}


def range_assignment(
    wanted: Mapping[str, frozenset[str]], partitions_of: Callable[[str], list[int]]
) -> dict[str, dict[str, list[int]]]:
    """By member, what it gets: of each topic a range, the first members one more (Kafka's
    RangeAssignor). `wanted`: the topics by member, in the order of members.
    """
    given: dict[str, dict[str, list[int]]] = {member: {} for member in wanted}
    for topic in sorted(set().union(*wanted.values())):
        members = [member for member, topics in wanted.items() if topic in topics]
        partitions = partitions_of(topic)
        size, longer = divmod(len(partitions), len(members))
        start = 0
        for number, member in enumerate(members):
            end = start + size + (number < longer)
            if end > start:
                given[member][topic] = partitions[start:end]
            start = end
    return given
