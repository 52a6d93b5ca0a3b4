"""What happens to a group, and what comes of it: the values that go into its state machine
(`classic_group`, `consumer_group`) and come out.

Groups, members, generations and errors have Kafka's names.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from tierlog.record_format.errors import GroupRefused

if TYPE_CHECKING:
    from tierlog.broker.group_coordinator.assignors import Target, TopicPartition
    from tierlog.record_format.kafka_messages.messages import GroupMetadataValue

NEVER: Final = math.inf
NO_MEMBER: Final = ""
HTTP_HOST: Final = "http"  # the host of members for whom the broker assigns, if they lead


class State(StrEnum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"
    ASSIGNING = "Assigning"  # of a consumer group, as the next
    RECONCILING = "Reconciling"


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
    INVALID_REQUEST = "INVALID_REQUEST"
    FENCED_MEMBER_EPOCH = "FENCED_MEMBER_EPOCH"
    STALE_MEMBER_EPOCH = "STALE_MEMBER_EPOCH"
    UNRELEASED_INSTANCE_ID = "UNRELEASED_INSTANCE_ID"
    UNSUPPORTED_ASSIGNOR = "UNSUPPORTED_ASSIGNOR"
    UNSUPPORTED_VERSION = "UNSUPPORTED_VERSION"
    INVALID_REGULAR_EXPRESSION = "INVALID_REGULAR_EXPRESSION"


_MEANINGS: Final = {
    GroupError.UNKNOWN_MEMBER_ID: "it has members, and who calls is none of them, or no longer",
    GroupError.FENCED_INSTANCE_ID: "another member has this instance id now",
    GroupError.ILLEGAL_GENERATION: "its partitions were distributed anew since",
    GroupError.REBALANCE_IN_PROGRESS: "its partitions are being distributed anew",
    GroupError.INCONSISTENT_GROUP_PROTOCOL: "its members have no assignor in common with who joins",
    GroupError.INVALID_SESSION_TIMEOUT: "the session time-out has to be within "
    "group.min.session.timeout.ms and group.max.session.timeout.ms",
    GroupError.GROUP_MAX_SIZE_REACHED: "it has group.max.size members",
    GroupError.STALE_MEMBER_EPOCH: "the member's epoch is another, or its partitions are others'",
    GroupError.NON_EMPTY_GROUP: "it has members, which have to leave it first",
}


def refusal(group: str, error: GroupError) -> GroupRefused:
    meaning = _MEANINGS.get(error)
    return GroupRefused(error, f"group {group!r}: {error}{f': {meaning}' if meaning else ''}")


class Limits(NamedTuple):
    max_size: int
    initial_rebalance_delay_ms: int
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
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


class Heartbeat(NamedTuple):
    """Of a member of a consumer group (KIP-848). None, and a time-out of -1, is what it was.
    `owned`: what it has. `patterns` resolves them for this client.
    """

    member_id: str
    epoch: int
    client_id: str
    client_host: str
    patterns: Patterns
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topics: frozenset[str] | None = None
    pattern: str | None = None
    assignor: str | None = None
    owned: Target | None = None

    @property
    def is_full(self) -> bool:
        has_topics = self.topics is not None or self.pattern is not None
        return has_topics and self.rebalance_timeout_ms != -1 and self.owned is not None


class ShareBeat(NamedTuple):
    """Of a member of a share group (KIP-932). None is what it was."""

    member_id: str
    epoch: int
    client_id: str
    client_host: str
    rack_id: str | None = None
    topics: frozenset[str] | None = None


class HeartbeatAnswer(NamedTuple):
    """`assignment` is None if it is what it was."""

    error: GroupError
    detail: str = ""
    member_id: str = NO_MEMBER
    epoch: int = 0
    interval_ms: int = 0
    assignment: Target | None = None


class Patterns(typing.Protocol):
    """Regular expressions of topics, as one client may use them."""

    def check(self, pattern: str) -> None:
        """Raises GroupRefused for what is none."""

    def resolve(
        self, patterns: Iterable[str], topics: Iterable[str]
    ) -> dict[str, frozenset[str]]: ...


class Answer(NamedTuple):
    """`to` is whatever the event was given."""

    to: object
    body: Joined | Synced | HeartbeatAnswer


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


class RecordKind(IntEnum):
    """The types of a group's records in `__consumer_offsets`."""

    CLASSIC = 2
    EPOCH = 3
    PARTITION_METADATA = 4  # Kafka's before 4.1: deleted
    MEMBER = 5
    TARGET_EPOCH = 6
    TARGET = 7
    CURRENT = 8
    SHARE_MEMBER = 10
    SHARE_EPOCH = 11
    SHARE_TARGET_EPOCH = 12
    SHARE_TARGET = 13
    SHARE_CURRENT = 14
    SHARE_STATES = 15
    PATTERN = 16


class RecordKey(NamedTuple):
    """`of`: the member, or the pattern."""

    kind: RecordKind
    of: str = ""


class Resolution(NamedTuple):
    """Patterns to be resolved outside; what they match comes back with the event `resolved`."""

    patterns: tuple[str, ...]
    by: Patterns


@dataclass(slots=True)
class Effects:
    """`answers` may be given at once, `confirmed` when what came before is durable. `keys`: records
    of a consumer or share group to be written, in this order and all or none. `is_downgraded`: its
    members all speak the classic protocol now; `is_rebalanced`: and have to join again.
    `uninitialized`: what a share group will read; `confirmed` waits for that to be durable.
    """

    answers: list[Answer] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    confirmed: list[Answer] = field(default_factory=list)
    keys: list[RecordKey] = field(default_factory=list)
    resolution: Resolution | None = None
    uninitialized: Sequence[TopicPartition] = ()
    is_downgraded: bool = False
    is_rebalanced: bool = True


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
