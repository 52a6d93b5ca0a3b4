"""What the broker answers, typed, and how it is read. Members that a newer broker adds are ignored;
what does not belong to this API is UnexpectedAnswer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from record_format import typed_json
from record_format.decode import Record
from tierlog.client.problems import UnexpectedAnswer
from tierlog.client.wire import Reply

T = TypeVar("T")

ConfigValue = int | float | bool | str
Tier = Literal["hot", "cold", "mixed"]

TOPIC_KNOWN_MS: Final = 300_000  # then it is asked for again: Kafka's metadata.max.age.ms


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as a list shows it."""

    name: str
    topic_id: str
    partitions: int
    config: dict[str, ConfigValue]


class PartitionDescription(msgspec.Struct, frozen=True, kw_only=True):
    partition: int
    log_start_offset: int
    local_log_start_offset: int
    high_watermark: int
    log_end_offset: int
    leader_epoch: int
    hot_bytes: int
    cold_bytes: int
    segments: int
    offload_lag_bytes: int


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

    @property
    def damaged_last(self) -> list[int]:
        """All its partitions, in the order to read them: damaged ones come last, because the broker
        refuses them and says why.
        """
        damaged = [one.partition for one in self.damaged_partitions]
        return [one.partition for one in self.partitions] + damaged

    @property
    def numbers(self) -> list[int]:
        """Of all its partitions, including damaged ones: whoever reads the topic wants those as
        well.
        """
        return sorted(self.damaged_last)

    @property
    def spread(self) -> int:
        """What keys are spread over. An adopted topic may lack some partitions of it."""
        return max(self.numbers, default=-1) + 1

    @property
    def takers(self) -> list[int]:
        """Where a record may go that may go anywhere."""
        return [one.partition for one in self.partitions] or self.numbers


class Offsets(msgspec.Struct, frozen=True, kw_only=True):
    log_start_offset: int
    local_log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    log_end_offset: int
    leader_epoch: int


class OffsetAndTimestamp(NamedTuple):
    """The first record at or after a time."""

    offset: int
    timestamp: int


class ProduceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one partition took of a request. `last_offset` is inclusive."""

    partition: int
    base_offset: int
    last_offset: int
    records: int
    log_append_time: int | None = None
    duplicate: bool = False


class Produced(msgspec.Struct, frozen=True, kw_only=True):
    """Under acks=0 `results` is empty and `accepted` counts the records, which may yet be lost."""

    topic: str
    results: tuple[ProduceResult, ...] = ()
    warnings: tuple[str, ...] = ()
    accepted: int | None = None


class ProducerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker knows an idempotent producer by."""

    producer_id: int
    producer_epoch: int


class FetchedBatches(NamedTuple):
    """Whole record batches as they lie on disk; the first may begin before the offset asked for."""

    batches: bytes
    next_offset: int
    log_start_offset: int
    high_watermark: int
    up_to_date: bool
    tier: Tier
    topic_id: str


class FetchedRecords(NamedTuple):
    records: list[Record]
    next_offset: int
    log_start_offset: int
    high_watermark: int
    up_to_date: bool
    tier: Tier
    topic_id: str


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """`last_offset` is inclusive; `records` and times are null if nobody counted them."""

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
    """One page of a manifest: the document as it came, and where the next page begins.

    `gaps`: [start, end) each, of offsets that a restore or a take-over skipped.
    """

    version: int
    leader_epoch: int
    owner: str
    log_start_offset: int
    segments: tuple[Mapping[str, object], ...]
    next_from_offset: int | None
    document: Mapping[str, object]
    gaps: tuple[tuple[int, int], ...] = ()


class Offloaded(msgspec.Struct, frozen=True, kw_only=True):
    uploaded_segments: int
    uploaded_bytes: int
    remaining_segments: int


class GroupOffset(msgspec.Struct, frozen=True, kw_only=True):
    """The next offset that a group reads; `lag` is how many are left."""

    topic: str
    partition: int
    offset: int
    log_end_offset: int
    lag: int
    metadata: str = ""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    offsets: tuple[GroupOffset, ...]


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A group as a list shows it; `partitions` and `lag` are over all its topics."""

    group: str
    topics: tuple[str, ...]
    partitions: int
    lag: int


class Readiness(NamedTuple):
    """`reasons` says why the broker is not ready; `degraded`, what is waiting although it is."""

    ready: bool
    reasons: tuple[str, ...]
    degraded: tuple[str, ...]


# --- out of a reply -------------------------------------------------------------------------------


def reader(kind: type[T]) -> Callable[[Reply], T]:
    def read(reply: Reply) -> T:
        try:
            return typed_json.decode(reply.body, kind)
        except msgspec.DecodeError as error:
            raise UnexpectedAnswer(
                f"an answer that is none of this API ({error}): is that a tierlog broker?"
            ) from error

    return read


def read_batches(reply: Reply) -> FetchedBatches:
    fields = reply.headers
    try:
        return FetchedBatches(
            reply.body,
            next_offset=int(fields["log-next-offset"]),
            log_start_offset=int(fields["log-start-offset"]),
            high_watermark=int(fields["log-high-watermark"]),
            up_to_date=fields["log-up-to-date"] == "true",
            tier=msgspec.convert(fields["log-tier"], Tier),
            topic_id=fields["log-topic-id"],
        )
    except (KeyError, ValueError) as error:
        raise UnexpectedAnswer(
            f"a fetch without its headers ({error}): a proxy's answer?"
        ) from error


def read_manifest(reply: Reply) -> ManifestPage:
    document = reader(dict[str, object])(reply)
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


def read_readiness(reply: Reply) -> Readiness:
    document = reader(dict[str, object])(reply)
    return Readiness(
        reply.status == 200, _texts(document.get("reasons")), _texts(document.get("degraded"))
    )


def nothing(reply: Reply) -> None:
    """For calls answered without a body (204): a page that some proxy answers with is not that."""
    if reply.status != 204:
        raise UnexpectedAnswer(f"status {reply.status} instead of 204: is that a tierlog broker?")


def _texts(found: object) -> tuple[str, ...]:
    items: Sequence[object] = found if isinstance(found, list) else ()
    return tuple(
        item if isinstance(item, str) else msgspec.json.encode(item).decode() for item in items
    )
