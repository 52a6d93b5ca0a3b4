"""Every call of the HTTP API as a value: one function per call, a method of both clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Final, Literal, NamedTuple, cast
from urllib.parse import quote

import msgspec

from record_format.batch import iter_headers
from record_format.clock import wall_clock_ms
from record_format.codecs import NONE
from record_format.errors import InvalidRequest, InvalidTopicName
from tierlog.client import answers
from tierlog.client.answers import (
    ConfigValue,
    FetchedBatches,
    FetchedRecords,
    OffsetAndTimestamp,
    ProducerIdentity,
    nothing,
    read_batches,
    read_manifest,
    read_readiness,
    reader,
)
from tierlog.client.exchange import Call, Repeat
from tierlog.client.records import (
    DEFAULT_BATCH_BYTES,
    NewRecord,
    Value,
    decode_fetched,
    from_time,
    to_batches,
    to_json,
)
from tierlog.client.times import Time, to_ms
from tierlog.client.wire import JSON, RECORD_BATCHES, Place, Reply, Request, headers, query

Acks = Literal["0", "1", "all"]
Isolation = Literal["read_uncommitted", "read_committed"]
Start = int | Literal["earliest", "latest", "earliest-local"]

DEFAULT_FETCH_BYTES: Final = 1 << 20
VERIFY_WAIT_S: Final = 3600.0


class Limits(NamedTuple):
    """How much a fetch returns, and how long it may wait for something to be there."""

    max_bytes: int = DEFAULT_FETCH_BYTES
    max_records: int | None = None
    min_bytes: int = 1
    wait_ms: int = 0
    isolation: Isolation = "read_uncommitted"


class Sequenced(NamedTuple):
    """An idempotent produce: these identify a repeat of it."""

    producer: ProducerIdentity
    sequence: int


DEFAULT_LIMITS: Final = Limits()
ACKS: Final = ("0", "1", "all")


def check_acks(acks: Acks) -> Acks:
    """Raises InvalidRequest. Kafka's clients take numbers, so 0 and 1 are understood as well."""
    if str(acks) not in ACKS:
        raise InvalidRequest(f"acks is one of {', '.join(ACKS)}, not {acks!r}")
    return cast("Acks", str(acks))


def start_of(offset: Start) -> Start:
    """A number as records have theirs: numpy's is no int, and text is compared with none. Raises
    TypeError.
    """
    if isinstance(offset, str):
        return int(offset) if offset.isdecimal() else offset
    return index(offset)


# --- topics ---------------------------------------------------------------------------------------


def create_topic(
    name: str, *, partitions: int = 1, config: Mapping[str, ConfigValue] | None = None
) -> Call[answers.TopicDescription]:
    """Create a topic; durable when this returns. Raises TopicExists.

    Not retried once it was sent: a repeat after the topic was created would answer `topic-exists`.
    """
    body = {"name": name, "partitions": partitions, "config": dict(config or {})}
    request = _json_request("POST", "/v1/topics", body, Place(name))
    return Call(request, reader(answers.TopicDescription), Repeat.DUPLICATES)


def list_topics(
    *, prefix: str | None = None, internal: bool = False
) -> Call[tuple[answers.Topic, ...]]:
    """The topics by name; with `internal` also those of tierlog's own."""
    asked = query(prefix=prefix or None, internal=internal or None)
    read = reader(_Topics)
    return Call(Request("GET", "/v1/topics", asked), lambda reply: read(reply).topics)


def describe_topic(topic: str) -> Call[answers.TopicDescription]:
    """A topic's configuration and partitions. Raises UnknownTopic."""
    return Call(_get(_topic_path(topic), Place(topic)), reader(answers.TopicDescription))


def alter_topic(
    topic: str,
    *,
    config: Mapping[str, ConfigValue | None] | None = None,
    partitions: int | None = None,
) -> Call[answers.TopicDescription]:
    """Change keys (None restores the default) or add partitions."""
    body: dict[str, object] = {}
    if config is not None:
        body["config"] = dict(config)
    if partitions is not None:
        body["partitions"] = partitions
    request = _json_request("PATCH", _topic_path(topic), body, Place(topic))
    return Call(request, reader(answers.TopicDescription))


def delete_topic(topic: str) -> Call[None]:
    """The topic is gone when this returns; its files and objects go in the background.

    Not retried once it was sent: another topic of that name may have been created since.
    """
    request = Request("DELETE", _topic_path(topic), place=Place(topic))
    return Call(request, nothing, Repeat.DUPLICATES)


# --- produce --------------------------------------------------------------------------------------


def produce(
    topic: str,
    records: Iterable[NewRecord | Value],
    *,
    partition: int | None = None,
    acks: Acks = "all",
    sequenced: Sequenced | None = None,
) -> Call[answers.Produced]:
    """Append records as JSON in one request. After AnswerLost they may or may not be there."""
    return produce_body(
        topic,
        to_json(records),
        content_type=JSON,
        partition=partition,
        acks=acks,
        sequenced=sequenced,
    )


def produce_encoded(
    topic: str,
    records: Iterable[NewRecord | Value],
    *,
    partition: int,
    codec: int = NONE,
    acks: Acks = "all",
    max_message_bytes: int = DEFAULT_BATCH_BYTES,
) -> Call[answers.Produced]:
    """Append records to one partition as batches made on this side: the fast way for bytes.

    `max_message_bytes`: the batch limit, if the topic's `max.message.bytes` is not Kafka's default.
    """
    now_ms = wall_clock_ms()
    batches = to_batches(records, now_ms=now_ms, codec=codec, max_bytes=max_message_bytes)
    return produce_batches(topic, batches, partition=partition, acks=acks)


def produce_batches(
    topic: str,
    batches: bytes,
    *,
    partition: int,
    acks: Acks = "all",
    expected_offset: int | None = None,
) -> Call[answers.Produced]:
    """Append record batches; with `expected_offset`, only if the log ends exactly there.

    A repeat is harmless if they carry a producer's sequence.
    """
    call = produce_body(
        topic,
        batches,
        content_type=RECORD_BATCHES,
        partition=partition,
        acks=acks,
        expected_offset=expected_offset,
    )
    if all(header.base_sequence >= 0 for header in iter_headers(batches)):
        return Call(call.request, call.read, Repeat.HARMLESS)
    return call


def produce_body(
    topic: str,
    body: bytes,
    *,
    content_type: str,
    partition: int | None,
    acks: Acks,
    sequenced: Sequenced | None = None,
    expected_offset: int | None = None,
    envelope: bool = False,
) -> Call[answers.Produced]:
    """Produce a body in any of the media types that the API accepts."""
    path = _topic_path(topic) if partition is None else _partition_path(topic, partition)
    fields = headers(
        {
            "content-type": content_type,
            "if-offset-match": expected_offset,
            "producer-id": sequenced.producer.producer_id if sequenced else None,
            "producer-epoch": sequenced.producer.producer_epoch if sequenced else None,
            "producer-sequence": sequenced.sequence if sequenced else None,
        }
    )
    place = Place(
        topic,
        -1 if partition is None else partition,
        -1 if expected_offset is None else expected_offset,
    )
    asked = query(acks=check_acks(acks), envelope=envelope or None)
    request = Request("POST", f"{path}/records", asked, fields, body, place=place)
    # A conditional append repeats itself out: its second copy finds another log end. That would
    # hide the success of the first, so it is the caller's to look.
    repeat = Repeat.HARMLESS if sequenced else Repeat.DUPLICATES
    return Call(request, reader(answers.Produced), repeat)


def init_producer() -> Call[ProducerIdentity]:
    """Get a producer identity that nobody else has; an extra one that nobody uses does no harm."""
    return Call(Request("POST", "/v1/producers"), reader(ProducerIdentity))


# --- fetch ----------------------------------------------------------------------------------------


def fetch_batches(
    topic: str,
    partition: int,
    *,
    offset: Start = "earliest",
    timestamp: Time | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Call[FetchedBatches]:
    """Whole record batches as they lie on disk, unchecked; the first may begin earlier."""
    asked = query(
        offset=offset if timestamp is None else None,
        timestamp=to_ms(timestamp),
        max_bytes=limits.max_bytes,
        max_records=limits.max_records,
        min_bytes=limits.min_bytes if limits.min_bytes != 1 else None,
        wait_ms=limits.wait_ms or None,
        isolation=limits.isolation if limits.isolation != "read_uncommitted" else None,
    )
    request = Request(
        "GET",
        f"{_partition_path(topic, partition)}/records",
        asked,
        {"accept": RECORD_BATCHES},
        extra_wait_s=limits.wait_ms / 1000,
        place=Place(topic, partition),
    )
    return Call(request, read_batches)


def fetch(
    topic: str,
    partition: int,
    *,
    offset: Start = "earliest",
    timestamp: Time | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Call[FetchedRecords]:
    """Records from an offset, a keyword, or a time on; decoded and checked by the client.

    If the first batch begins before the place asked for, the records before it are left out: by
    offset, or by time for a timestamp.
    """
    start = start_of(offset)
    raw = fetch_batches(topic, partition, offset=start, timestamp=timestamp, limits=limits)
    from_offset = start if isinstance(start, int) and timestamp is None else 0
    from_ms = to_ms(timestamp)

    def read(reply: Reply) -> FetchedRecords:
        found = raw.read(reply)
        records, broken_off_at = decode_fetched(
            found.batches,
            of=f"{topic}-{partition}",
            from_offset=max(from_offset, found.log_start_offset),
            end_offset=found.next_offset,
        )
        if broken_off_at is not None:
            found = found._replace(next_offset=broken_off_at, up_to_date=False)
        if from_ms is not None:
            records = from_time(records, from_ms)
        if limits.max_records is None or len(records) <= limits.max_records:
            return FetchedRecords(records, *found[1:])
        # A batch came whole: what is left out of it is what comes next.
        records, next_offset = records[: limits.max_records], records[limits.max_records].offset
        facts = found._replace(next_offset=next_offset, up_to_date=False)
        return FetchedRecords(records, *facts[1:])

    return Call(raw.request, read)


# --- offsets, segments, manifests, storage --------------------------------------------------------


def offsets(topic: str, partition: int) -> Call[answers.Offsets]:
    """Where a partition begins and ends, over both tiers and on disk alone."""
    path = f"{_partition_path(topic, partition)}/offsets"
    return Call(_get(path, Place(topic, partition)), reader(answers.Offsets))


def offset_for_timestamp(
    topic: str, partition: int, timestamp: Time
) -> Call[OffsetAndTimestamp | None]:
    """The first record at or after a time, in either tier; None if all are older."""
    path = f"{_partition_path(topic, partition)}/offsets"
    request = Request("GET", path, query(timestamp=to_ms(timestamp)), place=Place(topic, partition))
    parse = reader(_OffsetAt)

    def read(reply: Reply) -> OffsetAndTimestamp | None:
        found = parse(reply)
        if found.offset is None or found.timestamp is None:
            return None
        return OffsetAndTimestamp(found.offset, found.timestamp)

    return Call(request, read)


def segments_page(
    topic: str, partition: int, *, from_offset: int | None
) -> Call[answers.SegmentsPage]:
    path = f"{_partition_path(topic, partition)}/segments"
    asked = query(from_offset=from_offset)
    request = Request("GET", path, asked, place=Place(topic, partition))
    return Call(request, reader(answers.SegmentsPage))


def manifest(
    topic: str, partition: int, *, version: int | None = None, from_offset: int | None = None
) -> Call[answers.ManifestPage]:
    """The manifest in force, or a version that is still kept; its segments come in pages."""
    path = f"{_partition_path(topic, partition)}/manifest"
    asked = query(version=version, from_offset=from_offset)
    return Call(Request("GET", path, asked, place=Place(topic, partition)), read_manifest)


def storage_report() -> Call[dict[str, object]]:
    """What is in each tier, what is waiting to be uploaded, the store's requests and their cost."""
    return Call(Request("GET", "/v1/storage"), reader(dict[str, object]))


def metrics() -> Call[str]:
    """The broker's metrics, in Prometheus' text format."""
    return Call(Request("GET", "/metrics"), lambda reply: reply.body.decode(errors="replace"))


def offload(topic: str, *, wait_ms: int | None = None) -> Call[answers.Offloaded]:
    """Roll the active segments and upload all rolled segments; with `wait_ms`, wait until that is
    done.
    """
    request = Request(
        "POST",
        f"{_topic_path(topic)}/offload",
        query(wait_ms=wait_ms),
        extra_wait_s=(wait_ms or 0) / 1000,
        place=Place(topic),
    )
    return Call(request, reader(answers.Offloaded))


def verify(topic: str, *, deep: bool = False) -> Call[dict[str, object]]:
    """Check both tiers against the manifest; `deep` reads every byte, which may take long."""
    request = Request(
        "POST",
        f"{_topic_path(topic)}/verify",
        query(deep=1 if deep else None),
        extra_wait_s=VERIFY_WAIT_S,
        place=Place(topic),
    )
    return Call(request, reader(dict[str, object]))


def trim(topic: str, partition: int, *, before_offset: int) -> Call[int]:
    """Delete all records below `before_offset` (Kafka's DeleteRecords); returns the log start
    afterwards.
    """
    path = f"{_partition_path(topic, partition)}/trim"
    request = _json_request("POST", path, {"before_offset": before_offset}, Place(topic, partition))
    read = reader(_Trimmed)
    return Call(request, lambda reply: read(reply).log_start_offset)


def is_alive() -> Call[bool]:
    return Call(Request("GET", "/healthz"), lambda _: True)


def readiness() -> Call[answers.Readiness]:
    """`/readyz` answers 503 with its reasons: an answer, not a failure."""
    return Call(Request("GET", "/readyz"), read_readiness, answered_by=frozenset((503,)))


# --- answers of one member ------------------------------------------------------------------------


class _Topics(msgspec.Struct):
    topics: tuple[answers.Topic, ...]


class _OffsetAt(msgspec.Struct):
    offset: int | None
    timestamp: int | None


class _Trimmed(msgspec.Struct):
    log_start_offset: int


# --- paths ----------------------------------------------------------------------------------------


def _topic_path(topic: str) -> str:
    """Raises InvalidTopicName for names that a path would swallow; the broker checks the rest."""
    if topic in {"", ".", ".."}:
        raise InvalidTopicName(f"{topic!r} is not a topic name")
    return f"/v1/topics/{quote(topic, safe='')}"


def _partition_path(topic: str, partition: int) -> str:
    return f"{_topic_path(topic)}/partitions/{partition}"


def _get(path: str, place: Place) -> Request:
    return Request("GET", path, place=place)


def _json_request(method: str, path: str, body: Mapping[str, object], place: Place) -> Request:
    encoded = msgspec.json.encode(body)
    return Request(method, path, headers={"content-type": JSON}, body=encoded, place=place)
