"""What happens to a group, and what comes of it: the values that go into its state machine
(`classic_group`) and come out.

Groups, members, generations and errors have Kafka's names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from tierlog.record_format.kafka_messages.messages import GroupMetadataValue

NEVER: Final = math.inf
NO_MEMBER: Final = ""


class State(StrEnum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class GroupError(StrEnum):
    """Kafka's names; NONE is success."""

    NONE = "NONE"
    COORDINATOR_NOT_AVAILABLE = "COORDINATOR_NOT_AVAILABLE"
    NOT_COORDINATOR = "NOT_COORDINATOR"
    UNKNOWN_SERVER_ERROR = "UNKNOWN_SERVER_ERROR"
    UNKNOWN_MEMBER_ID = "UNKNOWN_MEMBER_ID"
    MEMBER_ID_REQUIRED = "MEMBER_ID_REQUIRED"
    FENCED_INSTANCE_ID = "FENCED_INSTANCE_ID"
    ILLEGAL_GENERATION = "ILLEGAL_GENERATION"
    INCONSISTENT_GROUP_PROTOCOL = "INCONSISTENT_GROUP_PROTOCOL"
    REBALANCE_IN_PROGRESS = "REBALANCE_IN_PROGRESS"
    GROUP_MAX_SIZE_REACHED = "GROUP_MAX_SIZE_REACHED"
    INVALID_GROUP_ID = "INVALID_GROUP_ID"
    INVALID_SESSION_TIMEOUT = "INVALID_SESSION_TIMEOUT"
    GROUP_ID_NOT_FOUND = "GROUP_ID_NOT_FOUND"
    NON_EMPTY_GROUP = "NON_EMPTY_GROUP"


class Limits(NamedTuple):
    max_size: int
    initial_rebalance_delay_ms: int
    new_member_join_timeout_ms: int = 300_000  # Kafka's group.new.member.join.timeout.ms


class Protocol(NamedTuple):
    name: str
    metadata: bytes


class Join(NamedTuple):
    """`new_id` is the id of a new member. `requires_id` from version 4 of JoinGroup on, and
    `can_skip_assignment` from 9.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    protocol_type: str
    protocols: tuple[Protocol, ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    new_id: str
    requires_id: bool = True
    can_skip_assignment: bool = True


class Sync(NamedTuple):
    """`assignments`: the leader's, by member."""

    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None
    protocol_name: str | None
    assignments: Mapping[str, bytes]


class Identity(NamedTuple):
    member_id: str
    instance_id: str | None


class JoinedMember(NamedTuple):
    member_id: str
    instance_id: str | None
    metadata: bytes


class Joined(NamedTuple):
    """The answer to a join. `members` is given to the leader alone."""

    error: GroupError
    member_id: str
    generation: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = NO_MEMBER
    members: Sequence[JoinedMember] = ()
    skip_assignment: bool = False


class Synced(NamedTuple):
    """The answer to a sync."""

    error: GroupError
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


class Answer(NamedTuple):
    """`to` is whatever the event was given."""

    to: object
    body: Joined | Synced


class Write(NamedTuple):
    """A record of the group's, to be written; `then` comes back with the outcome."""

    value: GroupMetadataValue
    then: Assigned | Replaced | None


class Assigned(NamedTuple):
    generation: int
    assignments: Mapping[str, bytes]


class Replaced(NamedTuple):
    """A static member's new id, and what to go back to if it could not be written."""

    instance_id: str
    new_id: str
    old: Member
    can_skip_assignment: bool


class Effects(NamedTuple):
    answers: list[Answer]
    writes: list[Write]


@dataclass(slots=True)
class Member:
    """`deadline_ms`: of its session. `joining`, `syncing`: who waits for an answer, if anybody."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    protocols: tuple[Protocol, ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    assignment: bytes = b""
    is_new: bool = False
    joining: object | None = None
    syncing: object | None = None
    deadline_ms: float = NEVER

    def metadata(self, protocol: str | None) -> bytes:
        return next((one.metadata for one in self.protocols if one.name == protocol), b"")
