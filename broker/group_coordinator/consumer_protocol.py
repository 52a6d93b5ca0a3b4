"""What Kafka's consumers send each other through their group (protocol type `consumer`): which
topics a member wants, and which partitions it gets. Kafka's assignors on the members' side.

* Pure functions and their bytes; for members that leave the assignment to the broker, and to show
  what others have.
* `range` and `roundrobin` are Kafka's, partition by partition. `cooperative-sticky` is `range` of
  which nobody gets what another still has: who has it gives it up and joins again, and the next
  assignment is complete.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from typing import Final, NamedTuple

from tierlog.broker.group_coordinator.group_events import GroupError
from tierlog.record_format.errors import GroupRefused
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
)
from tierlog.record_format.kafka_messages.source import MessageError

CONSUMER: Final = "consumer"  # the protocol type
RANGE: Final = "range"
ROUND_ROBIN: Final = "roundrobin"
COOPERATIVE: Final = "cooperative-sticky"
_VERSION: Final = 0  # of an assignment, read by all
_OWNING: Final = 1  # of a subscription that says what its member has: nothing
_LAST_VERSION: Final = 3

Assigned = dict[str, list[int]]
Assignment = Mapping[str, list[int]]
"""Partitions by topic."""
PartitionsOf = Callable[[str], list[int]]


def encode_subscription(topics: Iterable[str]) -> bytes:
    wanted = ConsumerProtocolSubscription(topics=sorted(set(topics)), user_data=None)
    return codec.encode_versioned(wanted, _OWNING)


def decode_subscription(data: bytes) -> frozenset[str]:
    """Raises MessageError."""
    return frozenset(codec.decode_versioned(ConsumerProtocolSubscription, data).topics)


class Subscription(NamedTuple):
    """`owned`: topics and partitions that the member has; from version 1 on it says so."""

    topics: frozenset[str]
    owned: tuple[tuple[str, int], ...]
    rack_id: str | None


def read_subscription(data: bytes) -> Subscription:
    """Raises GroupRefused."""
    try:
        found = codec.decode_versioned(ConsumerProtocolSubscription, data)
    except MessageError as error:
        raise GroupRefused(GroupError.INCONSISTENT_GROUP_PROTOCOL, str(error)) from error
    owned = tuple((one.topic, part) for one in found.owned_partitions for part in one.partitions)
    return Subscription(frozenset(found.topics), owned, found.rack_id)


def encode_assignment_for(subscription: bytes, assignment: Assignment) -> bytes:
    """In the version in which the member subscribed."""
    (version,) = struct.unpack_from(">h", subscription)
    return encode_assignment(assignment, min(version, _LAST_VERSION))


def encode_assignment(assignment: Assignment, version: int = _VERSION) -> bytes:
    rows = [
        ConsumerProtocolAssignment.TopicPartition(topic=topic, partitions=partitions)
        for topic, partitions in sorted(assignment.items())
    ]
    value = ConsumerProtocolAssignment(assigned_partitions=rows, user_data=None)
    return codec.encode_versioned(value, version)


def decode_assignment(data: bytes) -> dict[str, list[int]]:
    """Nothing for a member that has none, or whose bytes are not a consumer's."""
    try:
        found = codec.decode_versioned(ConsumerProtocolAssignment, data) if data else None
    except MessageError:
        found = None
    return {one.topic: list(one.partitions) for one in (found.assigned_partitions if found else ())}


Wanted = Mapping[str, Subscription]
"""What each member wants and has, in the order of members."""


def assign(protocol: str, wanted: Wanted, partitions_of: PartitionsOf) -> dict[str, Assigned]:
    """By member, what it gets of the partitions that each topic has."""
    if protocol == ROUND_ROBIN:
        return _round_robin(wanted, partitions_of)
    given = _range(wanted, partitions_of)
    if protocol == COOPERATIVE:
        _leave_to_owners(given, wanted)
    return given


def _range(wanted: Wanted, partitions_of: PartitionsOf) -> dict[str, Assigned]:
    """Of each topic a range, the first members one more."""
    given: dict[str, Assigned] = {member: {} for member in wanted}
    for topic in _topics(wanted):
        members = [member for member, one in wanted.items() if topic in one.topics]
        partitions = partitions_of(topic)
        size, longer = divmod(len(partitions), len(members))
        start = 0
        for number, member in enumerate(members):
            end = start + size + (number < longer)
            if end > start:
                given[member][topic] = partitions[start:end]
            start = end
    return given


def _round_robin(wanted: Wanted, partitions_of: PartitionsOf) -> dict[str, Assigned]:
    """One after another to the next member that wants the topic."""
    given: dict[str, Assigned] = {member: {} for member in wanted}
    turns = cycle(wanted.items())
    for topic in _topics(wanted):
        for partition in partitions_of(topic):
            member = next(name for name, one in turns if topic in one.topics)
            given[member].setdefault(topic, []).append(partition)
    return given


def _leave_to_owners(given: Mapping[str, Assigned], wanted: Wanted) -> None:
    for member, assigned in given.items():
        others = {place for name, one in wanted.items() if name != member for place in one.owned}
        for topic, partitions in assigned.items():
            assigned[topic] = [one for one in partitions if (topic, one) not in others]


def _topics(wanted: Wanted) -> list[str]:
    return sorted(set().union(*(one.topics for one in wanted.values())))
