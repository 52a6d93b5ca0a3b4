"""All calls of the API, in one table: path, handler, parameters, bodies, responses, problems.

Those on topics, records and logs are here; the others stand beside their handlers, as `calls`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from tierlog.api.http import schemas
from tierlog.api.http.admin import operations, pins, topics
from tierlog.api.http.calls import (
    BINARY,
    ELSEWHERE,
    NO_PARTITION,
    NO_TOPIC,
    PARTITION,
    TOPIC,
    Body,
    Call,
    OtherResponse,
)
from tierlog.api.http.cluster.calls import CLUSTER_CALLS
from tierlog.api.http.docs import examples
from tierlog.api.http.fetch import many
from tierlog.api.http.fetch.segments import get_segment
from tierlog.api.http.fetch.single import FetchQuery, fetch
from tierlog.api.http.fetch.tail import TailQuery, tail_partition, tail_topic
from tierlog.api.http.groups.calls import GROUP_CALLS, TRANSACTION_CALLS
from tierlog.api.http.header_values import BATCHES, EVENTS, JSON, NDJSON, OCTETS
from tierlog.api.http.metrics.registry import CONTENT_TYPE
from tierlog.api.http.produce.append import ProduceQuery
from tierlog.api.http.produce.columns import RecordsIn
from tierlog.api.http.produce.handlers import new_producer, produce_to_partition, produce_to_topic
from tierlog.api.http.registry.calls import REGISTRY_CALLS
from tierlog.broker.background.copier import Offloaded
from tierlog.broker.background.merger import Merged
from tierlog.broker.reports import StorageReport
from tierlog.broker.topics.topics import TopicState
from tierlog.record_format.findings import VerifyReport
from tierlog.record_format.segment_entry import MergePlan, SegmentEntry

_LINE_REF: Final = {"$ref": "#/components/schemas/RecordLine"}
_EVENT: Final[Any] = {
    "description": "A record, or `error` with a problem as its data, which ends the stream.",
    "type": "object",
    "required": ["data"],
    "properties": {
        "id": {
            "type": "string",
            "description": "an offset, or of a topic `partition:offset` of each partition, joined "
            "by commas; as `Last-Event-ID` it resumes after this record",
        },
        "event": {"enum": ["message", "error"], "default": "message"},
        "data": {
            "type": "string",
            "contentMediaType": JSON,
            "contentSchema": {"anyOf": [_LINE_REF, {"$ref": schemas.PROBLEM_REF}]},
        },
    },
}
_REPLICAS: Final = ("invalid-replication-factor", "invalid-replica-assignment")
_READING: Final = (
    *NO_PARTITION,
    *ELSEWHERE,
    "watermark-unknown",
    "leadership-lost",
    "cold-object-missing",
    "cold-object-corrupt",
    "corrupt-log",
    "store-unavailable",
    "disk-full",  # no space for chunks from the bucket
)
_WRITING: Final = (
    *NO_PARTITION,
    *ELSEWHERE,
    "not-enough-replicas",
    "leader-changed",
    "invalid-record",
    "schema-mismatch",
    "record-too-large",
    "leadership-lost",
    "log-offline",
    "disk-full",
)
_PINNING: Final = (
    *NO_TOPIC,
    "corrupt-log",
    "log-offline",
    "cold-object-missing",
    "cold-object-corrupt",
    "store-unavailable",
)
_TRANSACTING: Final = (
    "producer-fenced",
    "transaction-refused",
    "concurrent-transactions",
    "starting",
    "store-unavailable",
)

_EVENTS: Final = Body(schema=_EVENT, of_items=True, example=examples.EVENT)
_RECORDS_EXAMPLE: Final = {
    "records": [
        {"key": "N14228", "value": {"carrier": "UA", "delay": 2}},
        {"value_base64": "AAEC", "headers": [{"name": "source", "value": "tower"}]},
    ]
}
_NOT_READY: Final = {
    "ready": False,
    "reasons": ["flights-0: its log is offline: the local disk failed"],
    "degraded": [],
}
_LINES_EXAMPLE: Final = '{"carrier":"UA"}\n{"carrier":"AA"}\n'
_LOG_HEADERS: Final = {
    "Log-Start-Offset": "the earliest offset that can be read",
    "Log-High-Watermark": "consumers read up to, but not including, this offset",
    "Log-Next-Offset": "the offset for the next fetch",
    "Log-Up-To-Date": "true if the next offset is the high watermark",
    "Log-Tier": "hot, cold or mixed",
    "Log-Topic-Id": "id of the topic; a topic re-created under the same name has another",
}
_SEGMENT_BODY: Final = {OCTETS: Body(schema=BINARY), BATCHES: Body(schema=BINARY)}
_SEGMENT_HEADERS: Final = {
    "ETag": "derived from topic id, size and checksum",
    "Cache-Control": "private, no-cache: compaction may rewrite a segment, the ETag tells",
    "Accept-Ranges": "bytes",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Log-Tier": "hot or cold",
}

_topic_call = partial(Call, tag="topics")
_record_call = partial(Call, tag="records")
_log_call = partial(Call, tag="log")
_operator_call = partial(Call, tag="running it")

_TOPIC_CALLS: Final = (
    _topic_call(
        method="POST",
        path="/v1/topics",
        endpoint=topics.create_topic,
        summary="Create a topic",
        body={JSON: Body(schema=topics.CreateTopic, example={"name": "flights", "partitions": 3})},
        status=201,
        response={JSON: Body(schema=schemas.AlteredTopic)},
        response_headers={"Location": "the topic's path"},
        problems=(
            "invalid-config",
            "invalid-topic-name",
            *_REPLICAS,
            "topic-exists",
            "leader-unknown",
            "store-unavailable",
            "disk-full",
        ),
    ),
    _topic_call(
        method="GET",
        path="/v1/topics",
        endpoint=topics.list_topics,
        summary="List topics by name",
        query=topics.ListTopicsQuery,
        response={JSON: Body(schema=schemas.TopicList)},
    ),
    _topic_call(
        method="GET",
        path=TOPIC,
        endpoint=topics.get_topic,
        summary="Describe a topic and its partitions",
        response={JSON: Body(schema=TopicState)},
        problems=NO_TOPIC,
    ),
    _topic_call(
        method="PATCH",
        path=TOPIC,
        endpoint=topics.alter_topic,
        summary="Change the configuration or add partitions",
        body={
            JSON: Body(
                schema=topics.AlterTopic,
                example={"config": {"retention.ms": 60000, "segment.bytes": None}},
            )
        },
        response={JSON: Body(schema=schemas.AlteredTopic)},
        problems=(
            *NO_TOPIC,
            "leadership-lost",
            "invalid-config",
            "invalid-partition-count",
            "invalid-replica-assignment",
            "leader-unknown",
            "store-unavailable",
            "disk-full",
        ),
    ),
    _topic_call(
        method="DELETE",
        path=TOPIC,
        endpoint=topics.delete_topic,
        summary="Delete a topic, its files and its objects",
        status=204,
        problems=(*NO_TOPIC, "leadership-lost", "disk-full"),
    ),
)


_ACKS: Final = "`acks`: respond immediately (0), once appended (1) or once flushed (all, -1)."
_BATCHES_ARE_PLAIN: Final = (
    " Record batches are transactional if `Transactional-Id` is given, and only then; control "
    "batches are refused."
)


def _produce(path: str, *, to_partition: bool) -> Call:
    body = {
        JSON: Body(schema=RecordsIn, example=_RECORDS_EXAMPLE),
        NDJSON: Body(schema={}, of_items=True, example=_LINES_EXAMPLE),
        OCTETS: Body(schema=BINARY),
    }
    headers: dict[str, str] = {}
    problems: tuple[str, ...] = _WRITING
    if to_partition:
        body[BATCHES] = Body(schema=BINARY)
        headers = {
            "If-Offset-Match": "append only if the log ends at exactly this offset",
            "Producer-Id": "the id of an idempotent producer; requires the next two headers",
            "Producer-Epoch": "the producer's epoch",
            "Producer-Sequence": "the sequence number of the first record",
            "Transactional-Id": "the records are in the transaction of this id, percent-encoded as "
            "in a path; its producer is in the headers, or in the record batches",
        }
        problems = (
            *_WRITING,
            "corrupt-batch",
            "offset-mismatch",
            "out-of-order-sequence",
            *_TRANSACTING,
        )
    return _record_call(
        method="POST",
        path=path,
        handler=produce_to_partition if to_partition else produce_to_topic,
        summary="Produce to a partition" if to_partition else "Produce to a topic",
        description=_ACKS + (_BATCHES_ARE_PLAIN if to_partition else ""),
        query=ProduceQuery,
        headers=headers,
        body=body,
        response={JSON: Body(schema=schemas.Produced)},
        other_responses={
            202: OtherResponse(
                "`acks=0`: the records were accepted, their append is not awaited",
                {JSON: Body(schema=schemas.Accepted)},
            )
        },
        problems=problems,
    )


_TAILING: Final = (
    "Server-sent events. `offset` or `timestamp`, not both, as for a fetch, default `latest`; "
    "`Last-Event-ID` wins. There is no id until the first event: whoever reconnects before it "
    "starts at `offset` again, and `latest` leaves out what was appended meanwhile."
)
_TAILING_ALL: Final = (
    " Refused while a partition is damaged or lost: follow the others one by one, or with `POST "
    "/v1/fetch`. An id names every partition: above some 5,000 it is longer than the head of a "
    "request may be, and nothing can resume after it."
)


def _tail(path: str, *, whole_topic: bool) -> Call:
    return _record_call(
        method="GET",
        path=path,
        handler=tail_topic if whole_topic else tail_partition,
        summary="Follow a topic" if whole_topic else "Follow a partition",
        description=_TAILING + (_TAILING_ALL if whole_topic else ""),
        query=TailQuery,
        headers={"Last-Event-ID": "the id of the last event received; resumes after it"},
        response={EVENTS: _EVENTS},
        response_headers={} if whole_topic else _LOG_HEADERS,
        problems=(*_READING, "offset-trimmed", "offset-past-end"),
    )


_MERGING: Final = ("invalid-request", "leadership-lost", "store-unavailable")

_RECORD_CALLS: Final = (
    _produce(TOPIC + "/records", to_partition=False),
    _produce(PARTITION + "/records", to_partition=True),
    _record_call(
        method="GET",
        path=PARTITION + "/records",
        handler=fetch,
        immediate=True,
        summary="Fetch from an offset, a keyword or a time",
        description=(
            "`offset`: a number, `earliest` (default), `latest` or `earliest-local`; `timestamp` "
            "instead: milliseconds or RFC 3339. One of them, not both. An event stream has "
            "the parameters of `tail`. `key`, or `key_base64`: only records of this key (with "
            "record batches: only batches that may have it). Chunks in the bucket whose key filter "
            "lacks it are not read; what is on local disk is. A page may then be empty before the "
            "end of the log, after five seconds or what `http.search.max.*` allows: go on at "
            "`next_offset`. At the end, `wait_ms` waits for the key. "
            "With `decode=true` a key or value that begins with the id of a schema (a zero byte, "
            "and four of it) is what it says, as JSON; `key_schema` and `value_schema` name the "
            "schema, or say why it is as it was. Not with record batches or event streams, nor "
            "for records above 1 MiB. "
            "HEAD returns only the headers. In a cluster, what is in the "
            "bucket is also read while the partition's leader does not answer: then there is "
            "`Log-Leader: unknown`, the high watermark is the last one known, and "
            "`Log-Up-To-Date` is false."
        ),
        query=FetchQuery,
        headers={"Last-Event-ID": "for an event stream, as for `tail`"},
        response={
            JSON: Body(schema=schemas.FetchedPartition),
            NDJSON: Body(schema=schemas.RecordLine, of_items=True, example=examples.LINE),
            BATCHES: Body(schema=BINARY),
            EVENTS: _EVENTS,
        },
        response_headers=_LOG_HEADERS,
        problems=(*_READING, "offset-trimmed", "offset-past-end"),
    ),
    _tail(PARTITION + "/tail", whole_topic=False),
    _tail(TOPIC + "/tail", whole_topic=True),
    _record_call(
        method="POST",
        path="/v1/fetch",
        handler=many.fetch_many,
        summary="Fetch from many partitions in one long poll",
        body={
            JSON: Body(
                schema=many.FetchMany,
                example={"partitions": [{"topic": "flights", "partition": 0, "offset": 0}]},
            )
        },
        response={
            JSON: Body(
                schema=(schemas.FetchedPartition, schemas.FetchError), listed_as="partitions"
            )
        },
        only_reads=True,
    ),
    _record_call(
        method="POST",
        path="/v1/producers",
        endpoint=new_producer,
        summary="Get an id for an idempotent producer",
        response={JSON: Body(schema=schemas.ProducerIdentity)},
    ),
)

_LOG_CALLS: Final = (
    _log_call(
        method="GET",
        path=PARTITION + "/offsets",
        endpoint=topics.get_offsets,
        summary="The partition's offsets, or the offset at a time",
        query=topics.OffsetsQuery,
        response={JSON: Body(schema=(schemas.OffsetsState, schemas.OffsetAtTime))},
        problems=_READING,
    ),
    _log_call(
        method="GET",
        path=PARTITION + "/segments",
        endpoint=topics.list_segments,
        summary="The segments of both tiers, oldest first",
        query=topics.PageQuery,
        response={JSON: Body(schema=schemas.SegmentList)},
        problems=_READING,
    ),
    _log_call(
        method="GET",
        path=PARTITION + "/segments/{base_offset}",
        handler=get_segment,
        immediate=True,
        summary="A segment's bytes",
        headers={
            "Range": "bytes=first-last",
            "If-Range": "an ETag",
            "If-Match": "ETags",
            "If-None-Match": "ETags",
        },
        response=_SEGMENT_BODY,
        response_headers=_SEGMENT_HEADERS,
        other_responses={
            206: OtherResponse(
                "the range",
                _SEGMENT_BODY,
                {**_SEGMENT_HEADERS, "Content-Range": "bytes first-last/size"},
            ),
            304: OtherResponse("the client's copy is current", headers=_SEGMENT_HEADERS),
        },
        problems=(*_READING, "unknown-segment", "range-not-satisfiable", "precondition-failed"),
    ),
    _log_call(
        method="GET",
        path=PARTITION + "/manifest",
        endpoint=topics.get_manifest,
        summary="The current manifest, or an older version",
        query=topics.ManifestQuery,
        response={JSON: Body(schema=schemas.ManifestState)},
        problems=(*_READING, "unknown-manifest-version"),
    ),
    _log_call(
        method="POST",
        path=PARTITION + "/trim",
        endpoint=topics.trim,
        summary="Move the log start (Kafka's DeleteRecords)",
        body={JSON: Body(schema=topics.Trim, example={"before_offset": 1000})},
        response={JSON: Body(schema=schemas.Trimmed)},
        problems=(
            *NO_PARTITION,
            *ELSEWHERE,
            "offset-past-end",
            "leadership-lost",
            "log-offline",
            "disk-full",
        ),
    ),
    _log_call(
        method="GET",
        path=PARTITION + "/merge",
        endpoint=operations.merge_plan,
        summary="Which segments may be merged, for a job that merges them elsewhere",
        description="Of the oldest first, and not always all: ask again after they were merged.",
        response={JSON: Body(schema=MergePlan)},
        problems=(*NO_PARTITION, *ELSEWHERE, *_MERGING),
    ),
    _log_call(
        method="POST",
        path=PARTITION + "/merge",
        endpoint=operations.commit_merged,
        summary="Commit a segment that a job made in place of those whose bytes it has",
        description=(
            "Its objects are in the partition's folder of the bucket, and are checked there. "
            "Repeating it changes nothing."
        ),
        body={JSON: Body(schema=SegmentEntry, example=examples.MERGED_SEGMENT)},
        status=204,
        problems=(*NO_PARTITION, *ELSEWHERE, *_MERGING, "unknown-segment"),
    ),
    _log_call(
        method="POST",
        path=TOPIC + "/offload",
        endpoint=operations.offload,
        summary="Roll the active segments and upload all rolled segments",
        query=operations.OffloadQuery,
        response={JSON: Body(schema=Offloaded)},
        problems=(*NO_TOPIC, "leadership-lost", "log-offline", "store-unavailable"),
    ),
    _log_call(
        method="POST",
        path=TOPIC + "/merge",
        endpoint=operations.merge,
        summary="Merge neighbouring small segments that are only in the bucket",
        description=(
            "Merged segments are within `segment.bytes`, `segment.ms` and a tenth of "
            "`retention.*`. One merge is made, and others begin for `wait_ms`; repeat it while "
            "`remaining_segments` is above 0."
        ),
        query=operations.MergeQuery,
        response={JSON: Body(schema=Merged)},
        problems=(*NO_TOPIC, *_MERGING, "log-offline", "disk-full"),
    ),
    _log_call(
        method="POST",
        path=TOPIC + "/verify",
        endpoint=operations.verify,
        summary="Check both tiers of a topic against the manifest",
        description=(
            "The response lists the problems, each with its object or file. Only one verification "
            "runs at a time."
        ),
        query=operations.VerifyQuery,
        response={JSON: Body(schema=VerifyReport)},
        problems=(*NO_TOPIC, "store-unavailable"),
        only_reads=True,
    ),
    _log_call(
        method="POST",
        path=TOPIC + "/repair",
        endpoint=operations.repair,
        summary="The steps that repair what a verification finds; with `apply` those without loss",
        description=(
            "Without `apply` nothing is changed. With it a running broker carries out what loses "
            "nothing (`running`): steps that give up records, as their `detail` says, need it "
            "stopped, and `tierlog storage repair --apply --accept-loss`. Only one repair runs at "
            "a time."
        ),
        query=operations.RepairQuery,
        response={JSON: Body(schema=schemas.RepairReport)},
        problems=(*NO_TOPIC, "leadership-lost", "log-offline", "store-unavailable", "disk-full"),
    ),
    _log_call(
        method="GET",
        path=TOPIC + "/pins",
        endpoint=pins.list_pins,
        summary="The pins of a topic, expired ones too",
        response={JSON: Body(schema=schemas.PinList)},
        problems=_PINNING,
    ),
    _log_call(
        method="POST",
        path=TOPIC + "/pins",
        endpoint=pins.create_pin,
        summary="Pin the manifests in force, and all objects that they name",
        description="What is pinned is kept, whatever is compacted or expires, until the pin "
        "is deleted or `expires_ms` (milliseconds since 1970) has passed. Trims and the topic's "
        "deletion override pins.",
        body={JSON: Body(schema=pins.PinToCreate, example={"name": "june"})},
        status=201,
        response={JSON: Body(schema=schemas.PinList)},
        problems=(*_PINNING, "pin-exists", "unknown-manifest-version"),
    ),
    _log_call(
        method="DELETE",
        path=TOPIC + "/pins/{pin}",
        endpoint=pins.delete_pin,
        summary="Delete a pin; one that does not exist is not an error",
        status=204,
        problems=_PINNING,
    ),
)

_OPERATIONS_CALLS: Final = (
    _operator_call(
        method="GET",
        path="/healthz",
        endpoint=operations.healthz,
        summary="The process is alive",
        response={JSON: Body(schema=schemas.Alive)},
    ),
    _operator_call(
        method="GET",
        path="/readyz",
        endpoint=operations.readyz,
        summary="Every partition is served",
        response={JSON: Body(schema=schemas.Ready)},
        other_responses={
            503: OtherResponse(
                "not ready, with the reasons",
                {JSON: Body(schema=schemas.Ready, example=_NOT_READY)},
            )
        },
    ),
    _operator_call(
        method="GET",
        path="/metrics",
        endpoint=operations.metrics,
        summary="Prometheus metrics",
        response={CONTENT_TYPE.partition(";")[0]: Body(schema={"type": "string"})},
    ),
    _operator_call(
        method="GET",
        path="/v1/storage",
        endpoint=operations.storage,
        summary="Bytes and segments by tier, offload lag, cache, requests to the store",
        response={JSON: Body(schema=StorageReport)},
    ),
)

CALLS: Final = (
    *_TOPIC_CALLS,
    *_RECORD_CALLS,
    *_LOG_CALLS,
    *GROUP_CALLS,
    *TRANSACTION_CALLS,
    *_OPERATIONS_CALLS,
    *CLUSTER_CALLS,
    *REGISTRY_CALLS,
)
