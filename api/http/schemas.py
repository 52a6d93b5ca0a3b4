"""The types of the JSON in responses: handlers fill them in, and the OpenAPI document shows them.

Types that the broker returns and that are encoded unchanged are defined there.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.broker.group_coordinator.groups import OffsetState
from tierlog.broker.partition.segment_listing import SegmentState
from tierlog.broker.schema_registry.decoding import DecodedBy
from tierlog.broker.topics.topics import TopicState, TopicSummary
from tierlog.repair.local_repair import Action, RepairStep

PROBLEM_REF: Final = "#/components/schemas/ProblemDetails"


class TopicList(msgspec.Struct):
    topics: list[TopicSummary]


class AlteredTopic(TopicState, kw_only=True, frozen=True, omit_defaults=True):
    """As it is now. `warning_details`: each of the warnings in words."""

    warnings: list[str] = msgspec.field(default_factory=list)
    warning_details: dict[str, str] = msgspec.field(default_factory=dict)


class RepairReport(msgspec.Struct):
    """`steps`: what a repair does, in its order. A running broker carries out those with an action
    of `running`, which lose nothing; the others need it stopped, or cannot be done here.
    """

    topic: str
    applied: bool
    running: list[Action]
    steps: list[RepairStep]


class OffsetsState(msgspec.Struct):
    log_start_offset: int
    local_log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    log_end_offset: int
    leader_epoch: int


class OffsetAtTime(msgspec.Struct):
    """Both null if no record is at or after that time."""

    offset: int | None
    timestamp: int | None


class SegmentList(msgspec.Struct):
    """`next_from_offset`: where the next page begins; null at the end."""

    segments: list[SegmentState]
    next_from_offset: int | None


class ManifestSegment(msgspec.Struct):
    base_offset: int
    last_offset: int
    size_bytes: int
    records: int
    min_timestamp: int | None
    max_timestamp: int | None
    leader_epoch: int
    object_key: str
    crc32c: str
    indexes_key: str
    indexes_crc32c: str
    indexes_size_bytes: int


class EpochState(msgspec.Struct):
    """`owner` wrote under this epoch from `base_offset` on."""

    leader_epoch: int
    base_offset: int
    owner: str


class GapState(msgspec.Struct):
    """Offsets that a restore skipped: `next_offset` is the first after them."""

    base_offset: int
    next_offset: int


class ManifestState(msgspec.Struct):
    topic: str
    topic_id: str
    partition: int
    version: int
    created_ms: int
    leader_epoch: int
    owner: str
    log_start_offset: int
    end_offset: int
    epochs: list[EpochState]
    gaps: list[GapState]
    segments: list[ManifestSegment]
    next_from_offset: int | None


class PinState(msgspec.Struct):
    """`expires_ms`: null if never."""

    name: str
    partition: int
    version: int
    created_ms: int
    expires_ms: int | None


class PinList(msgspec.Struct):
    topic: str
    pins: list[PinState]


class Trimmed(msgspec.Struct):
    log_start_offset: int


class PartitionResult(msgspec.Struct):
    partition: int
    base_offset: int
    last_offset: int
    records: int
    log_append_time: int | None
    duplicate: bool


class Produced(msgspec.Struct):
    """`warning_details`: each of the warnings in words; only if there are any."""

    topic: str
    results: list[PartitionResult]
    warnings: list[str]
    warning_details: dict[str, str] | UnsetType = UNSET


class Accepted(msgspec.Struct):
    """`acks=0`: the records were accepted; their append is not awaited."""

    topic: str
    accepted: int


class ProducerIdentity(msgspec.Struct):
    producer_id: int
    producer_epoch: int


class TransactionalProducer(msgspec.Struct):
    """Who produces in the id's next transaction, and ends it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class TransactionSummary(msgspec.Struct):
    """`state` is Kafka's: Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit,
    CompleteAbort. `age_ms` and `partitions`: of a transaction in progress.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    age_ms: int | None
    partitions: int


class TransactionList(msgspec.Struct):
    """`next_after`: the next page begins after this id; null at the end."""

    transactions: list[TransactionSummary]
    next_after: str | None


class AssignedTopic(msgspec.Struct):
    topic: str
    partitions: list[int]


class Membership(msgspec.Struct):
    """What a member of a group reads, in this generation."""

    member_id: str
    generation: int
    assignment: list[AssignedTopic]


class TransactionState(msgspec.Struct):
    """As in the list; it is aborted when its age is `timeout_ms`. `partitions`: of visible topics,
    and of `__consumer_offsets` for groups' offsets.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    age_ms: int | None
    partitions: list[AssignedTopic]


class GroupMember(msgspec.Struct):
    """`instance_id`: of a static member. `assignment`: what it reads of the visible topics."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    assignment: list[AssignedTopic]


class GroupState(msgspec.Struct):
    """`state` is Kafka's: Empty, PreparingRebalance, CompletingRebalance, Stable; in a group of
    KIP-848 Assigning and Reconciling, and its epoch is `generation`. `type`: classic, consumer or
    share; an offset of a share group is where what it has not done with begins.
    """

    group: str
    offsets: list[OffsetState]
    state: str
    generation: int
    protocol_type: str
    members: list[GroupMember]
    type: str


class GroupSummary(msgspec.Struct):
    """`partitions`: the number with a committed offset; `lag`: their total."""

    group: str
    topics: list[str]
    partitions: int
    lag: int
    state: str
    members: int
    type: str


class GroupList(msgspec.Struct):
    groups: list[GroupSummary]


class Alive(msgspec.Struct):
    status: Literal["alive"] = "alive"


class Ready(msgspec.Struct):
    """`reasons`: why it is not ready; `degraded`: what is down although every partition serves."""

    ready: bool
    reasons: list[str]
    degraded: list[str]


class RecordHeader(msgspec.Struct):
    name: str
    value: str | UnsetType | None = UNSET
    value_base64: str | UnsetType | None = UNSET


class FetchedRecord(msgspec.Struct):
    """`*_base64` replaces a member whose bytes are not UTF-8."""

    offset: int
    timestamp: int
    headers: list[RecordHeader]
    key: Any | UnsetType = UNSET
    key_base64: str | UnsetType | None = UNSET
    value: Any | UnsetType = UNSET
    value_base64: str | UnsetType | None = UNSET
    key_schema: DecodedBy | UnsetType = UNSET
    value_schema: DecodedBy | UnsetType = UNSET


class RecordLine(FetchedRecord, kw_only=True):
    """A line of NDJSON, or the data of an event."""

    partition: int


class FetchedPartition(msgspec.Struct):
    topic: str
    partition: int
    records: list[FetchedRecord]
    next_offset: int
    log_start_offset: int
    high_watermark: int
    tier: Literal["hot", "cold", "mixed"]


class FetchError(msgspec.Struct):
    """The problem of a partition, in place of its records."""

    topic: str
    partition: int
    error: Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": PROBLEM_REF})]


class BrokerState(msgspec.Struct):
    """A broker of the cluster. `leads`: how many partitions, as it last said; `replicas`: how many
    it has, as their leaders last said; `kafka`: HOST:PORT that Kafka clients are given, or empty.
    """

    node_id: int
    folder_id: str
    url: str
    kafka: str
    zone: str
    state: Literal["running", "draining", "stopped", "removed"]
    incarnation: int
    is_alive: bool
    leads: int
    replicas: int


class ClusterState(msgspec.Struct):
    """`node_id`: of the broker that answers. Partitions that nobody leads, and of those that are
    led: with fewer replicas in sync than they have, and than `min.insync.replicas`.
    """

    cluster_id: str
    node_id: int
    brokers: list[BrokerState]
    offline_partitions: int
    under_replicated_partitions: int
    under_min_isr_partitions: int


class PlannedMove(msgspec.Struct, omit_defaults=True):
    """`source` and `target`: node ids. `replicas`: those that there are to be; of a partition with
    one replica they are left out.
    """

    topic: str
    partition: int
    source: int
    target: int
    replicas: list[int] = []


class OngoingReassignment(msgspec.Struct, order=True):
    """Of one partition; all are node ids."""

    topic: str
    partition: int
    replicas: list[int]
    adding: list[int]
    removing: list[int]


class OngoingReassignments(msgspec.Struct):
    reassignments: list[OngoingReassignment]


class PlannedMoves(msgspec.Struct):
    """`left`: how many are still to be made."""

    moves: list[PlannedMove]
    left: int


class MovedLeader(msgspec.Struct):
    """`paused_ms`: how long appends were refused."""

    node_id: int
    end_offset: int
    paused_ms: int
