"""Every call of the HTTP API as a value: one function each, a method of both clients."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

from tierlog.client import responses
from tierlog.client.exchange import Call
from tierlog.client.records import (
    DEFAULT_BATCH_BYTES,
    NewRecord,
    Time,
    Value,
    decode_fetched,
    from_timestamp,
    to_batches,
    to_json,
    to_ms,
)
from tierlog.client.responses import (
    FetchedBatches,
    FetchedRecords,
    OffsetAndTimestamp,
    ProducerIdentity,
    json_reader,
    no_content,
    read_batches,
    read_manifest,
    read_readiness,
)
from tierlog.client.wire import (
    DEFAULT_LIMITS,
    JSON,
    RECORD_BATCHES,
    Acks,
    Isolation,
    Limits,
    Query,
    Request,
    Response,
    Start,
    Subject,
    check_acks,
    json_request,
    normalize_start,
    query,
)
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.codecs import NONE
from tierlog.record_format.decode import Record
from tierlog.record_format.errors import InvalidTopicName
from tierlog.record_format.segment_entry import MergePlan, SegmentEntry
from tierlog.record_format.topic_rules import ConfigValue

VERIFY_WAIT_S: Final = 3600.0
MERGE_WAIT_S: Final = 600.0  # one merge, of at most `segment.bytes`


class Sequenced(NamedTuple):
    """Makes a produce idempotent: the broker recognises a retry by these."""

    producer: ProducerIdentity
    sequence: int


def create_topic(
    name: str,
    *,
    partitions: int | None = None,
    config: Mapping[str, ConfigValue] | None = None,
    replication_factor: int | None = None,
    replicas: Sequence[Sequence[int]] = (),
) -> Call[responses.AlteredTopic]:
    """Create a topic; durable when this returns. One partition, with as many replicas as the broker
    says, unless others are given. `replicas`: by partition, the node ids of the brokers that are to
    have it. Raises TopicExists, InvalidReplicationFactor, InvalidReplicaAssignment.

    Not retried once it was sent: a retry after the topic was created would fail with TopicExists.
    """
    body: dict[str, object] = {"name": name, "config": dict(config or {})}
    if partitions is not None:
        body["partitions"] = partitions
    if replication_factor is not None:
        body["replication_factor"] = replication_factor
    if replicas:
        body["replicas"] = replicas
    request = json_request("POST", "/v1/topics", body, Subject(name))
    return Call(request, json_reader(responses.AlteredTopic), idempotent=False)


def list_topics(
    *, prefix: str | None = None, internal: bool = False
) -> Call[tuple[responses.Topic, ...]]:
    """List topics by name; with `internal`, tierlog's own as well."""
    parameters = query(prefix=prefix or None, internal=internal or None)
    read = json_reader(responses.TopicList)
    return Call(Request("GET", "/v1/topics", parameters), lambda response: read(response).topics)


def describe_topic(topic: str) -> Call[responses.TopicDescription]:
    """Describe a topic's configuration and partitions. Raises UnknownTopic."""
    request = Request("GET", _topic_path(topic), subject=Subject(topic))
    return Call(request, json_reader(responses.TopicDescription))


def find_schema(schema_id: int) -> Call[responses.RegisteredSchema]:
    """The schema that has this id in the registry. Raises UnknownSchema."""
    request = Request("GET", f"/schemas/ids/{schema_id}")
    return Call(request, json_reader(responses.RegisteredSchema))


def find_schema_version(
    subject: str, version: int | None = None, *, deleted: bool = False
) -> Call[responses.RegisteredSchema]:
    """A version of a subject, by default its latest; with `deleted`, also one that was deleted, but
    not for good. Raises UnknownSchema.
    """
    path = f"/subjects/{quote(subject, safe='')}/versions/{version or 'latest'}"
    request = Request("GET", path, query(deleted=deleted or None))
    return Call(request, json_reader(responses.RegisteredSchema))


def alter_topic(
    topic: str,
    *,
    config: Mapping[str, ConfigValue | None] | None = None,
    partitions: int | None = None,
    replicas: Sequence[Sequence[int]] = (),
) -> Call[responses.AlteredTopic]:
    """Change settings (None restores the default) or add partitions. `replicas`: as of
    `create_topic`, of those that are added.
    """
    body: dict[str, object] = {}
    if config is not None:
        body["config"] = dict(config)
    if partitions is not None:
        body["partitions"] = partitions
    if replicas:
        body["replicas"] = replicas
    request = json_request("PATCH", _topic_path(topic), body, Subject(topic))
    return Call(request, json_reader(responses.AlteredTopic))


def delete_topic(topic: str) -> Call[None]:
    """Delete a topic. Its files and objects are deleted in the background.

    Not retried once it was sent: another topic of that name may have been created since.
    """
    request = Request("DELETE", _topic_path(topic), subject=Subject(topic))
    return Call(request, no_content, idempotent=False)


def produce(
    topic: str,
    records: Iterable[NewRecord | Value],
    *,
    partition: int | None = None,
    acks: Acks = "all",
    sequenced: Sequenced | None = None,
    key_schema: str | int | None = None,
    value_schema: str | int | None = None,
) -> Call[responses.ProduceResponse]:
    """Append records as JSON in one request. After AnswerLost they may or may not be appended.

    `value_schema`: values are JSON, and the broker encodes them by a schema of the subject
    `<topic>-value`: "latest", a version's number, or "id:" and an id. `key_schema`: the same of
    keys, by one of `<topic>-key`.
    """
    schemas = {"key": key_schema, "value": value_schema}
    return produce_body(
        topic,
        to_json(records, of_json=[part for part, given in schemas.items() if given is not None]),
        content_type=JSON,
        partition=partition,
        acks=acks,
        sequenced=sequenced,
        key_schema=key_schema,
        value_schema=value_schema,
    )


def _named_schema(part: str, given: str | int | None) -> dict[str, str]:
    if given is None:
        return {}
    text = str(given)
    named = f"{part}_schema_id" if text.startswith("id:") else f"{part}_schema_version"
    return {named: text.removeprefix("id:")}


def produce_encoded(
    topic: str,
    records: Iterable[NewRecord | Value],
    *,
    partition: int,
    codec: int = NONE,
    acks: Acks = "all",
    max_message_bytes: int = DEFAULT_BATCH_BYTES,
) -> Call[responses.ProduceResponse]:
    """Append records to one partition as batches encoded by the client: the fast way for bytes.

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
    transactional_id: str | None = None,
) -> Call[responses.ProduceResponse]:
    """Append record batches; with `expected_offset`, only if the log ends exactly there; with
    `transactional_id`, to its producer's transaction, if they are transactional.

    Idempotent if every batch carries a producer's id.
    """
    call = produce_body(
        topic,
        batches,
        content_type=RECORD_BATCHES,
        partition=partition,
        acks=acks,
        expected_offset=expected_offset,
        transactional_id=transactional_id,
    )
    # Not by the sequence: some clients number the batches of no producer, too.
    if all(header.producer_id >= 0 for header in iter_headers(batches)):
        return Call(call.request, call.read)
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
    transactional_id: str | None = None,
    envelope: bool = False,
    key_schema: str | int | None = None,
    value_schema: str | int | None = None,
) -> Call[responses.ProduceResponse]:
    """Produce a body of any media type that the API accepts."""
    path = _topic_path(topic) if partition is None else partition_path(topic, partition)
    fields = {"content-type": content_type}
    if expected_offset is not None:
        fields["if-offset-match"] = str(expected_offset)
    if transactional_id is not None:
        fields["transactional-id"] = quote(transactional_id, safe="")
    if sequenced is not None:
        fields |= {
            "producer-id": str(sequenced.producer.producer_id),
            "producer-epoch": str(sequenced.producer.producer_epoch),
            "producer-sequence": str(sequenced.sequence),
        }
    subject = Subject(
        topic,
        -1 if partition is None else partition,
        -1 if expected_offset is None else expected_offset,
    )
    parameters = query(
        acks=check_acks(acks),
        envelope=envelope or None,
        **_named_schema("key", key_schema),
        **_named_schema("value", value_schema),
    )
    request = Request("POST", f"{path}/records", parameters, fields, body, subject=subject)
    # A conditional append is not retried either: the retry would fail on the log end that the first
    # attempt moved, and hide its success. The caller has to check.
    idempotent = sequenced is not None
    return Call(request, json_reader(responses.ProduceResponse), idempotent=idempotent)


def init_producer() -> Call[ProducerIdentity]:
    """Allocate a unique producer identity; one that is never used does no harm."""
    return Call(Request("POST", "/v1/producers"), json_reader(ProducerIdentity))


def fetch_batches(
    topic: str,
    partition: int,
    *,
    offset: Start = "earliest",
    timestamp: Time | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Call[FetchedBatches]:
    """Fetch whole record batches as stored, unverified; the first may begin below the offset."""
    parameters = query(
        offset=offset if timestamp is None else None,
        timestamp=to_ms(timestamp),
        max_bytes=limits.max_bytes,
        max_records=limits.max_records,
        min_bytes=limits.min_bytes if limits.min_bytes != 1 else None,
        wait_ms=limits.wait_ms or None,
        isolation=limits.isolation if limits.isolation != "read_uncommitted" else None,
        key_base64=None if limits.key is None else b64encode(limits.key).decode(),
    )
    request = Request(
        "GET",
        f"{partition_path(topic, partition)}/records",
        parameters,
        {"accept": RECORD_BATCHES},
        extra_wait_s=limits.wait_ms / 1000,
        subject=Subject(topic, partition),
    )
    return Call(request, read_batches)


def await_records(
    topic: str, offsets: Mapping[int, int], *, isolation: Isolation, wait_ms: int
) -> Call[frozenset[int]]:
    """Wait until any of the partitions has a record at or after its offset. Returns those that may
    have one, or that cannot be read.
    """
    body = {
        "partitions": [
            {"topic": topic, "partition": partition, "offset": offset}
            for partition, offset in offsets.items()
        ],
        "max_bytes": 1,  # it returns the first record: there is no call that only waits
        "wait_ms": wait_ms,
        "isolation": isolation,
    }
    request = json_request("POST", "/v1/fetch", body, Subject(topic))
    read = json_reader(responses.AwaitedPartitions)
    return Call(
        request._replace(extra_wait_s=wait_ms / 1000), lambda got: read(got).readable(offsets)
    )


def fetch(
    topic: str,
    partition: int,
    *,
    offset: Start = "earliest",
    timestamp: Time | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Call[FetchedRecords]:
    """Fetch records from an offset, a keyword, or a timestamp; the client verifies and decodes
    them.

    Records of the first batch that precede the requested offset or timestamp are left out.
    """
    start = normalize_start(offset)
    raw = fetch_batches(topic, partition, offset=start, timestamp=timestamp, limits=limits)
    from_offset = start if isinstance(start, int) and timestamp is None else 0
    from_ms = to_ms(timestamp)

    def read_fetched(response: Response) -> FetchedRecords:
        fetched = raw.read(response)
        records, corrupt_from = decode_fetched(
            fetched.batches,
            Record,
            of=f"{topic}-{partition}",
            from_offset=max(from_offset, fetched.log_start_offset),
            end_offset=fetched.next_offset,
            next_offset=fetched.next_offset,
        )
        if corrupt_from is not None:
            fetched = fetched._replace(next_offset=corrupt_from, up_to_date=False)
        if from_ms is not None:
            records = from_timestamp(records, from_ms)
        if limits.key is not None:
            records = [record for record in records if record.key == limits.key]
        if limits.max_records is not None and len(records) > limits.max_records:
            # Batches are fetched whole: the next fetch begins at the first record left out.
            next_offset = records[limits.max_records].offset
            fetched = fetched._replace(next_offset=next_offset, up_to_date=False)
        return FetchedRecords(records[: limits.max_records], *fetched[1:])

    return Call(raw.request, read_fetched)


def offsets(topic: str, partition: int) -> Call[responses.Offsets]:
    """Get a partition's start and end offsets, over both tiers and on local disk."""
    return Call(_get_of(topic, partition, "offsets"), json_reader(responses.Offsets))


def offset_for_timestamp(
    topic: str, partition: int, timestamp: Time
) -> Call[OffsetAndTimestamp | None]:
    """Find the first record at or after a time, in either tier; None if all are older."""
    request = _get_of(topic, partition, "offsets", query(timestamp=to_ms(timestamp)))
    parse = json_reader(responses.OffsetAt)

    def read_position(response: Response) -> OffsetAndTimestamp | None:
        found = parse(response)
        if found.offset is None or found.timestamp is None:
            return None
        return OffsetAndTimestamp(found.offset, found.timestamp)

    return Call(request, read_position)


def segments_page(
    topic: str, partition: int, *, from_offset: int | None
) -> Call[responses.SegmentsPage]:
    request = _get_of(topic, partition, "segments", query(from_offset=from_offset))
    return Call(request, json_reader(responses.SegmentsPage))


def manifest(
    topic: str, partition: int, *, version: int | None = None, from_offset: int | None = None
) -> Call[responses.ManifestPage]:
    """Get the current manifest, or an older version that is still kept; segments are paged."""
    parameters = query(version=version, from_offset=from_offset)
    return Call(_get_of(topic, partition, "manifest", parameters), read_manifest)


def storage_report() -> Call[dict[str, object]]:
    """Report each tier's size, the offload lag, and the store's requests and their cost."""
    return Call(Request("GET", "/v1/storage"), json_reader(dict[str, object]))


def metrics() -> Call[str]:
    """Get the broker's metrics, in Prometheus' text format."""
    return Call(Request("GET", "/metrics"), lambda response: response.body.decode(errors="replace"))


def offload(topic: str, *, wait_ms: int | None = None) -> Call[responses.OffloadResult]:
    """Roll the active segments and upload all rolled segments; with `wait_ms`, wait until that is
    done.
    """
    request = Request(
        "POST",
        f"{_topic_path(topic)}/offload",
        query(wait_ms=wait_ms),
        extra_wait_s=(wait_ms or 0) / 1000,
        subject=Subject(topic),
    )
    return Call(request, json_reader(responses.OffloadResult))


def merge(topic: str, *, wait_ms: int = 0) -> Call[responses.MergeResult]:
    """Merge neighbouring small segments that are only in the bucket. One merge is made, and others
    begin for `wait_ms`: repeat it while `remaining_segments` is above 0.
    """
    request = Request(
        "POST",
        f"{_topic_path(topic)}/merge",
        query(wait_ms=wait_ms),
        extra_wait_s=wait_ms / 1000 + MERGE_WAIT_S,
        subject=Subject(topic),
    )
    return Call(request, json_reader(responses.MergeResult))


def merge_plan(topic: str, partition: int) -> Call[MergePlan]:
    """Which segments may be merged, for whoever makes the merged segments elsewhere. Not always
    all: ask again after they were merged.
    """
    return Call(_get_of(topic, partition, "merge"), json_reader(MergePlan))


def commit_merged(topic: str, partition: int, merged: SegmentEntry) -> Call[None]:
    """Commit a segment that was made by a plan in place of those whose bytes it has. Repeating it
    changes nothing. Raises UnknownSegment if they have changed.
    """
    path = f"{partition_path(topic, partition)}/merge"
    request = json_request("POST", path, msgspec.to_builtins(merged), Subject(topic, partition))
    return Call(request, lambda _: None)


def verify(topic: str, *, deep: bool = False) -> Call[dict[str, object]]:
    """Check both tiers against the manifest; `deep` reads every byte, which may take long."""
    request = Request(
        "POST",
        f"{_topic_path(topic)}/verify",
        query(deep=1 if deep else None),
        extra_wait_s=VERIFY_WAIT_S,
        subject=Subject(topic),
    )
    return Call(request, json_reader(dict[str, object]))


def trim(topic: str, partition: int, *, before_offset: int) -> Call[int]:
    """Delete all records below `before_offset` (Kafka's DeleteRecords); returns the log start
    afterwards.
    """
    path = f"{partition_path(topic, partition)}/trim"
    request = json_request(
        "POST", path, {"before_offset": before_offset}, Subject(topic, partition)
    )
    read = json_reader(responses.Trimmed)
    return Call(request, lambda response: read(response).log_start_offset)


def is_alive() -> Call[bool]:
    return Call(Request("GET", "/healthz"), lambda _: True, once=True)


def readiness() -> Call[responses.Readiness]:
    """Whether every partition is served, and if not, why. Not retried."""
    not_ready = frozenset((503,))  # `/readyz` responds so, with its reasons: it is no failure
    request = Request("GET", "/readyz")
    return Call(request, read_readiness, expected_statuses=not_ready, once=True)


def _topic_path(topic: str) -> str:
    """Raises InvalidTopicName for names that URL normalization would remove; the broker checks the
    rest.
    """
    if topic in {"", ".", ".."}:
        raise InvalidTopicName(f"{topic!r} is not a topic name")
    return f"/v1/topics/{quote(topic, safe='')}"


def partition_path(topic: str, partition: int) -> str:
    return f"{_topic_path(topic)}/partitions/{partition}"


def _get_of(topic: str, partition: int, what: str, parameters: Query = ()) -> Request:
    path = f"{partition_path(topic, partition)}/{what}"
    return Request("GET", path, parameters, subject=Subject(topic, partition))
