"""The broker's responses as types, and how they are parsed. Members that a newer broker adds are
ignored; a body that does not belong to this API is UnexpectedAnswer.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from tierlog.client.problems import AppendWarning, UnexpectedAnswer
from tierlog.client.wire import Response
from tierlog.record_format.decode import Record
from tierlog.record_format.schema_records import Kind, Reference, Schema
from tierlog.record_format.topic_rules import ConfigValue
from tierlog.record_format.workarounds import decode_json

T = TypeVar("T")

Tier = Literal["hot", "cold", "mixed"]

METADATA_MAX_AGE_MS: Final = 300_000  # Kafka's metadata.max.age.ms


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic in a list."""

    name: str
    topic_id: str
    partitions: int
    config: dict[str, ConfigValue]
    replication_factor: int = 1


class RegisteredSchema(
    msgspec.Struct, frozen=True, kw_only=True, rename={"schema_type": "schemaType"}
):
    """A schema. By its id alone, the answer has neither that nor a subject and a version."""

    schema: str
    schema_type: Kind = "AVRO"
    references: tuple[Reference, ...] = ()
    id: int = 0
    subject: str = ""
    version: int = 0

    def to_schema(self) -> Schema:
        return Schema(self.schema_type, self.schema, self.references)


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    node_id: int
    url: str


class PartitionDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything from the log start up to `cold_end_offset` is in the bucket. The node ids of those
    that have it, that are in sync, and that a reassignment adds and removes: only of a cluster.
    `replica_lags`: by how many offsets each of `replicas` is behind the log end, -1 if that is not
    known.
    """

    partition: int
    log_start_offset: int
    local_log_start_offset: int
    high_watermark: int
    log_end_offset: int
    leader_epoch: int
    hot_bytes: int
    cold_bytes: int
    cold_end_offset: int
    segments: int
    offload_lag_bytes: int
    leader: Leader | None = None
    replicas: tuple[int, ...] = ()
    in_sync_replicas: tuple[int, ...] = ()
    replica_lags: tuple[int, ...] = ()
    adding_replicas: tuple[int, ...] = ()
    removing_replicas: tuple[int, ...] = ()
    store_in_sync: bool = False


class DamagedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition whose log the broker could not open, and why; it is not in `partitions`."""

    partition: int
    detail: str


class TopicDescription(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    topic_id: str
    config: dict[str, ConfigValue]
    effective_config: dict[str, ConfigValue]
    partitions: tuple[PartitionDescription, ...]
    damaged_partitions: tuple[DamagedPartition, ...] = ()
    replication_factor: int = 1

    @property
    def read_order(self) -> list[int]:
        """All partitions, damaged ones last: the broker refuses to read those, and says why."""
        damaged = [one.partition for one in self.damaged_partitions]
        return [one.partition for one in self.partitions] + damaged

    @property
    def all_partitions(self) -> list[int]:
        """In ascending order, including damaged ones, which a reader of the topic must not miss."""
        return sorted(self.read_order)

    @property
    def partition_count(self) -> int:
        """The number that keys are hashed over. An adopted topic may lack some partitions."""
        return max(self.all_partitions, default=-1) + 1

    @property
    def available_partitions(self) -> list[int]:
        """Those that a record without key and partition may be sent to."""
        return [one.partition for one in self.partitions] or self.all_partitions


class Offsets(msgspec.Struct, frozen=True, kw_only=True):
    log_start_offset: int
    local_log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    log_end_offset: int
    leader_epoch: int


class AlteredTopic(TopicDescription, frozen=True, kw_only=True):
    """A topic after it was created or altered. `warning_details`: each of the warnings in words."""

    warnings: tuple[str, ...] = ()
    warning_details: Mapping[str, str] = msgspec.field(default_factory=dict)


class OffsetAndTimestamp(NamedTuple):
    """The first record at or after a time."""

    offset: int
    timestamp: int


class ProduceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was appended to one partition. `last_offset` is inclusive."""

    partition: int
    base_offset: int
    last_offset: int
    records: int
    log_append_time: int | None = None
    duplicate: bool = False


class ProduceResponse(msgspec.Struct, frozen=True, kw_only=True):
    """With acks=0 `results` is empty and `accepted` counts the records, which may still be lost.

    `warning_details` has the text of each of the `warnings`. Clients also show it, as an
    `AppendWarning`.
    """

    topic: str
    results: tuple[ProduceResult, ...] = ()
    warnings: tuple[str, ...] = ()
    warning_details: Mapping[str, str] = msgspec.field(default_factory=dict)
    accepted: int | None = None


class ProducerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies an idempotent producer."""

    producer_id: int
    producer_epoch: int


class TransactionListing(msgspec.Struct, frozen=True, kw_only=True):
    """A transactional id in a list. `age_ms` and `partitions`: of a transaction in progress."""

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    age_ms: int | None
    partitions: int


class TransactionPage(msgspec.Struct, frozen=True, kw_only=True):
    """`next_after`: None at the end."""

    transactions: tuple[TransactionListing, ...]
    next_after: str | None


class AssignedTopic(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partitions: tuple[int, ...]


class TransactionDescription(msgspec.Struct, frozen=True, kw_only=True):
    """`partitions`: of a transaction in progress, as far as the token may see them."""

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    age_ms: int | None
    partitions: tuple[AssignedTopic, ...]


class FetchedBatches(NamedTuple):
    """Whole record batches as they lie on disk; the first may begin before the offset asked for.
    `is_end_known`: false while the partition's leader does not answer: the log ends at
    `high_watermark` or above.
    """

    batches: bytes
    next_offset: int
    log_start_offset: int
    high_watermark: int
    up_to_date: bool
    tier: Tier
    topic_id: str
    is_end_known: bool = True


class AwaitedPartition(msgspec.Struct):
    """A partition that cannot be read has no high watermark, but an error."""

    partition: int
    high_watermark: int | None = None


class AwaitedPartitions(msgspec.Struct):
    partitions: list[AwaitedPartition]

    def readable(self, offsets: Mapping[int, int]) -> frozenset[int]:
        """The partitions that reach beyond these offsets, or have an error for a fetch to raise."""
        return frozenset(
            one.partition
            for one in self.partitions
            if one.high_watermark is None or one.high_watermark > offsets.get(one.partition, 0)
        )


class FetchedRecords(NamedTuple):
    """All but `records` as in `FetchedBatches`."""

    records: list[Record]
    next_offset: int
    log_start_offset: int
    high_watermark: int
    up_to_date: bool
    tier: Tier
    topic_id: str
    is_end_known: bool = True


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """`last_offset` is inclusive; `records` and timestamps are None if they are not known."""

    base_offset: int
    last_offset: int
    size_bytes: int
    records: int | None
    min_timestamp: int | None
    max_timestamp: int | None
    tier: Literal["hot", "cold", "both"]
    active: bool = False
    object_key: str | None = None
    crc32c: str | None = None


class SegmentsPage(msgspec.Struct, frozen=True, kw_only=True):
    segments: tuple[Segment, ...]
    next_from_offset: int | None = None


class ManifestPage(NamedTuple):
    """One page of a manifest: `document` as it was received, and where the next page begins.

    `gaps`: offset ranges [start, end) that a restore or a take-over skipped.
    """

    version: int
    leader_epoch: int
    owner: str
    log_start_offset: int
    segments: tuple[Mapping[str, object], ...]
    next_from_offset: int | None
    document: Mapping[str, object]
    gaps: tuple[tuple[int, int], ...] = ()


class OffloadResult(msgspec.Struct, frozen=True, kw_only=True):
    uploaded_segments: int
    uploaded_bytes: int
    remaining_segments: int


class MergeResult(msgspec.Struct, frozen=True, kw_only=True):
    """`merged_segments` became `new_segments`; `remaining_segments` can be merged as well."""

    merged_segments: int
    new_segments: int
    merged_bytes: int
    remaining_segments: int


class GroupOffset(msgspec.Struct, frozen=True, kw_only=True):
    """The next offset that a group reads; `lag` is the number of offsets from there on."""

    topic: str
    partition: int
    offset: int
    log_end_offset: int
    lag: int
    metadata: str = ""


class GroupMember(msgspec.Struct, frozen=True, kw_only=True):
    """`instance_id`: of a static member. `assignment`: what it reads."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    assignment: tuple[AssignedTopic, ...]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is Kafka's, as Empty or Stable; empty from a broker that knows no members."""

    group: str
    offsets: tuple[GroupOffset, ...]
    state: str = ""
    generation: int = 0
    protocol_type: str = ""
    members: tuple[GroupMember, ...] = ()
    type: str = "classic"


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a list; `partitions` and `lag` are totals over its topics."""

    group: str
    topics: tuple[str, ...]
    partitions: int
    lag: int
    state: str = ""
    members: int = 0
    type: str = "classic"


class Readiness(NamedTuple):
    """`reasons`: why the broker is not ready. `degraded`: what does not work although it is."""

    ready: bool
    reasons: tuple[str, ...]
    degraded: tuple[str, ...]


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """A broker of a cluster. `leads`, `replicas`: of how many partitions; `kafka`: HOST:PORT, or
    empty.
    """

    node_id: int
    url: str
    state: Literal["running", "draining", "stopped", "removed"]
    is_alive: bool
    leads: int
    replicas: int = 0
    kafka: str = ""
    zone: str = ""
    folder_id: str = ""
    incarnation: int = 0


class ClusterDescription(msgspec.Struct, frozen=True, kw_only=True):
    """`node_id`: of the broker that answered."""

    cluster_id: str
    node_id: int
    brokers: tuple[Broker, ...]
    offline_partitions: int = 0
    under_replicated_partitions: int = 0
    under_min_isr_partitions: int = 0


class LedPartition(NamedTuple):
    topic_id: str
    partition: int
    leader_epoch: int
    log_end_offset: int
    cold_end_offset: int


class LedSet(NamedTuple):
    """`lags`: `PartitionDescription.replica_lags`. `adding`, `removing`: by a reassignment.
    `has_store`: the bucket is in sync too.
    """

    topic_id: str
    partition: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    lags: tuple[int, ...]
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    has_store: bool = False


class LedPartitions(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker leads. `sets`: of those with several replicas."""

    node_id: int
    leaders: tuple[LedPartition, ...]
    sets: tuple[LedSet, ...] = ()


class Move(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`source` and `target`: node ids. `replicas`: those that there are to be, if there are several
    of the partition.
    """

    topic: str
    partition: int
    source: int
    target: int
    replicas: tuple[int, ...] = ()


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """`left`: how many are still to be made."""

    moves: tuple[Move, ...]
    left: int


class Reassigned(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a partition; all are node ids. Nothing is being added or removed: it is
    done.
    """

    leader: int
    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


class Reassignment(msgspec.Struct, frozen=True, kw_only=True):
    """One that goes on; all are node ids."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


class Reassignments(msgspec.Struct, frozen=True, kw_only=True):
    reassignments: tuple[Reassignment, ...]


class MovedLeader(msgspec.Struct, frozen=True, kw_only=True):
    """`paused_ms`: how long appends were refused."""

    node_id: int
    end_offset: int
    paused_ms: int


class TopicList(msgspec.Struct):
    topics: tuple[Topic, ...]


class OffsetAt(msgspec.Struct):
    offset: int | None
    timestamp: int | None


class Trimmed(msgspec.Struct):
    log_start_offset: int


# --- parsing --------------------------------------------------------------------------------------


def shown_warnings(result: T) -> T:
    """Show the warnings of a response that has some as `AppendWarning`, at the caller's line.

    Raises it where a filter says so; the records are appended all the same.
    """
    if isinstance(result, ProduceResponse):
        for code in result.warnings:
            text = result.warning_details.get(code, code)
            warnings.warn(AppendWarning(text), stacklevel=_levels_of_ours())
    return result


def _levels_of_ours() -> int:
    """Up to the first frame that is none of tierlog's."""
    frame, levels = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tierlog."):
        frame, levels = frame.f_back, levels + 1
    return levels


def json_reader(kind: type[T]) -> Callable[[Response], T]:
    def read_json(response: Response) -> T:
        try:
            return decode_json(response.body, kind)
        except msgspec.DecodeError as error:
            raise UnexpectedAnswer(
                f"the response does not belong to this API ({error}): is that a tierlog broker?"
            ) from error

    return read_json


def read_batches(response: Response) -> FetchedBatches:
    fields = response.headers
    try:
        return FetchedBatches(
            response.body,
            next_offset=int(fields["log-next-offset"]),
            log_start_offset=int(fields["log-start-offset"]),
            high_watermark=int(fields["log-high-watermark"]),
            up_to_date=fields["log-up-to-date"] == "true",
            tier=msgspec.convert(fields["log-tier"], Tier),
            topic_id=fields["log-topic-id"],
            is_end_known="log-leader" not in fields,
        )
    except (KeyError, ValueError) as error:
        raise UnexpectedAnswer(
            f"a fetch response without its headers ({error}): did a proxy send it?"
        ) from error


def read_manifest(response: Response) -> ManifestPage:
    document = json_reader(dict[str, object])(response)
    try:
        return ManifestPage(
            version=msgspec.convert(document["version"], int),
            leader_epoch=msgspec.convert(document["leader_epoch"], int),
            owner=str(document.get("owner")),
            log_start_offset=msgspec.convert(document["log_start_offset"], int),
            segments=msgspec.convert(document["segments"], tuple[dict[str, object], ...]),
            next_from_offset=msgspec.convert(document.get("next_from_offset"), int | None),
            document=document,
            gaps=tuple(
                (one["base_offset"], one["next_offset"])
                for one in msgspec.convert(document.get("gaps", []), list[dict[str, int]])
            ),
        )
    except (KeyError, msgspec.ValidationError) as error:
        raise UnexpectedAnswer(f"not a manifest of this API ({error})") from error


def read_readiness(response: Response) -> Readiness:
    document = json_reader(dict[str, object])(response)
    return Readiness(
        response.status == 200,
        _strings(document.get("reasons")),
        _strings(document.get("degraded")),
    )


def no_content(response: Response) -> None:
    """For calls that return nothing (204 No Content); a proxy's page is not accepted."""
    if response.status != 204:
        raise UnexpectedAnswer(
            f"status {response.status} instead of 204: is that a tierlog broker?"
        )


def _strings(value: object) -> tuple[str, ...]:
    items: Sequence[object] = value if isinstance(value, list) else ()
    return tuple(
        item if isinstance(item, str) else msgspec.json.encode(item).decode() for item in items
    )
