"""All calls of the API, in one table: path, handler, parameters, bodies, responses, problems."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from tierlog.api.http import schemas, transactions
from tierlog.api.http.admin import cluster, group_members, groups, operations, pins, topics
from tierlog.api.http.calls import Body, Call, OtherResponse
from tierlog.api.http.docs import examples
from tierlog.api.http.fetch import many
from tierlog.api.http.fetch.replicas import fetch_replicas
from tierlog.api.http.fetch.segments import get_segment
from tierlog.api.http.fetch.single import FetchQuery, fetch
from tierlog.api.http.fetch.tail import TailQuery, tail_partition, tail_topic
from tierlog.api.http.header_values import BATCHES, EVENTS, JSON, NDJSON, OCTETS, REPLICA_FETCH
from tierlog.api.http.metrics.registry import CONTENT_TYPE
from tierlog.api.http.produce.append import ProduceQuery
from tierlog.api.http.produce.columns import RecordsIn
from tierlog.api.http.produce.handlers import new_producer, produce_to_partition, produce_to_topic
from tierlog.api.http.registry.calls import REGISTRY_CALLS
from tierlog.broker.background.copier import Offloaded
from tierlog.broker.background.merger import Merged
from tierlog.broker.cluster.peers import (
    GroupConfigCall,
    LeaderReport,
    Reassigned,
    SchemaCall,
    TransactionPart,
)
from tierlog.broker.replication.messages import ReplicaFetch
from tierlog.broker.reports import StorageReport
from tierlog.broker.share_coordinator.share_state import StateAnswer
from tierlog.broker.topics import TopicState
from tierlog.record_format.findings import VerifyReport
from tierlog.record_format.schema_state import SourceOfId
from tierlog.record_format.topic_rules import ConfigValue

BINARY: Final[Any] = {"type": "string", "format": "binary"}
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
NO_TOPIC: Final = ("unknown-topic",)
# In a cluster: the first to a direct client alone.
ELSEWHERE: Final = ("not-leader", "leader-unknown", "broker-unavailable")
NO_PARTITION: Final = ("unknown-topic", "unknown-partition")
REPLICAS: Final = ("invalid-replication-factor", "invalid-replica-assignment")
READING: Final = (
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
WRITING: Final = (
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
PINNING: Final = (
    *NO_TOPIC,
    "corrupt-log",
    "log-offline",
    "cold-object-missing",
    "cold-object-corrupt",
    "store-unavailable",
)
# Of a call on groups that has to load their offsets from the log first.
REBUILDING: Final = (
    *ELSEWHERE,
    "leadership-lost",
    "cold-object-missing",
    "cold-object-corrupt",
    "corrupt-log",
    "starting",
    "store-unavailable",
)
REBUILDING_TO_WRITE: Final = (*REBUILDING, "log-offline", "disk-full")

TRANSACTING: Final = (
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
_REPLICA_EXAMPLE: Final = {"node_id": 2, "wait_ms": 500, "max_bytes": 8388608, "partitions": []}
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
_TOPIC: Final = "/v1/topics/{topic}"
_PARTITION: Final = _TOPIC + "/partitions/{partition}"
_GROUP: Final = "/v1/groups/{group}"

_topic_call = partial(Call, tag="topics")
_record_call = partial(Call, tag="records")
_log_call = partial(Call, tag="log")
_group_call = partial(Call, tag="groups")
_transaction_call = partial(Call, tag="transactions")
_operator_call = partial(Call, tag="running it")
_cluster_call = partial(Call, tag="cluster")

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
            *REPLICAS,
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
        path=_TOPIC,
        endpoint=topics.get_topic,
        summary="Describe a topic and its partitions",
        response={JSON: Body(schema=TopicState)},
        problems=NO_TOPIC,
    ),
    _topic_call(
        method="PATCH",
        path=_TOPIC,
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
        path=_TOPIC,
        endpoint=topics.delete_topic,
        summary="Delete a topic, its files and its objects",
        status=204,
        problems=(*NO_TOPIC, "leadership-lost", "disk-full"),
    ),
)


_TRANSACTION: Final = "/v1/transactions/{transactional_id}"
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
    problems: tuple[str, ...] = WRITING
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
            *WRITING,
            "corrupt-batch",
            "offset-mismatch",
            "out-of-order-sequence",
            *TRANSACTING,
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
        problems=(*READING, "offset-trimmed", "offset-past-end"),
    )


_RECORD_CALLS: Final = (
    _produce(_TOPIC + "/records", to_partition=False),
    _produce(_PARTITION + "/records", to_partition=True),
    _record_call(
        method="GET",
        path=_PARTITION + "/records",
        handler=fetch,
        immediate=True,
        summary="Fetch from an offset, a keyword or a time",
        description=(
            "`offset`: a number, `earliest` (default), `latest` or `earliest-local`; `timestamp` "
            "instead: milliseconds or RFC 3339. One of them, not both. An event stream has "
            "the parameters of `tail`. `key`, or `key_base64`: only records of this key (with "
            "record batches: only batches that may have it). Chunks in the bucket whose key filter "
            "lacks it are not read. A page may then be empty before the end of the log, after five "
            "seconds or what `http.search.max.*` allows: go on at `next_offset`. "
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
        problems=(*READING, "offset-trimmed", "offset-past-end"),
    ),
    _tail(_PARTITION + "/tail", whole_topic=False),
    _tail(_TOPIC + "/tail", whole_topic=True),
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
        path=_PARTITION + "/offsets",
        endpoint=topics.get_offsets,
        summary="The partition's offsets, or the offset at a time",
        query=topics.OffsetsQuery,
        response={JSON: Body(schema=(schemas.OffsetsState, schemas.OffsetAtTime))},
        problems=READING,
    ),
    _log_call(
        method="GET",
        path=_PARTITION + "/segments",
        endpoint=topics.list_segments,
        summary="The segments of both tiers, oldest first",
        query=topics.PageQuery,
        response={JSON: Body(schema=schemas.SegmentList)},
        problems=READING,
    ),
    _log_call(
        method="GET",
        path=_PARTITION + "/segments/{base_offset}",
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
        problems=(*READING, "unknown-segment", "range-not-satisfiable", "precondition-failed"),
    ),
    _log_call(
        method="GET",
        path=_PARTITION + "/manifest",
        endpoint=topics.get_manifest,
        summary="The current manifest, or an older version",
        query=topics.ManifestQuery,
        response={JSON: Body(schema=schemas.ManifestState)},
        problems=(*READING, "unknown-manifest-version"),
    ),
    _log_call(
        method="POST",
        path=_PARTITION + "/trim",
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
        method="POST",
        path=_TOPIC + "/offload",
        endpoint=operations.offload,
        summary="Roll the active segments and upload all rolled segments",
        query=operations.OffloadQuery,
        response={JSON: Body(schema=Offloaded)},
        problems=(*NO_TOPIC, "leadership-lost", "log-offline", "store-unavailable"),
    ),
    _log_call(
        method="POST",
        path=_TOPIC + "/merge",
        endpoint=operations.merge,
        summary="Merge neighbouring small segments that are only in the bucket",
        description=(
            "Merged segments are within `segment.bytes`, `segment.ms` and a tenth of "
            "`retention.*`. One merge is made, and others begin for `wait_ms`; repeat it while "
            "`remaining_segments` is above 0."
        ),
        query=operations.MergeQuery,
        response={JSON: Body(schema=Merged)},
        problems=(
            *NO_TOPIC,
            "invalid-request",
            "leadership-lost",
            "log-offline",
            "disk-full",
            "store-unavailable",
        ),
    ),
    _log_call(
        method="POST",
        path=_TOPIC + "/verify",
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
        path=_TOPIC + "/repair",
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
        path=_TOPIC + "/pins",
        endpoint=pins.list_pins,
        summary="The pins of a topic, expired ones too",
        response={JSON: Body(schema=schemas.PinList)},
        problems=PINNING,
    ),
    _log_call(
        method="POST",
        path=_TOPIC + "/pins",
        endpoint=pins.create_pin,
        summary="Pin the manifests in force, and all objects that they name",
        description="What is pinned is kept, whatever is compacted or expires, until the pin "
        "is deleted or `expires_ms` (milliseconds since 1970) has passed. Trims and the topic's "
        "deletion override pins.",
        body={JSON: Body(schema=pins.PinToCreate, example={"name": "june"})},
        status=201,
        response={JSON: Body(schema=schemas.PinList)},
        problems=(*PINNING, "pin-exists", "unknown-manifest-version"),
    ),
    _log_call(
        method="DELETE",
        path=_TOPIC + "/pins/{pin}",
        endpoint=pins.delete_pin,
        summary="Delete a pin; one that does not exist is not an error",
        status=204,
        problems=PINNING,
    ),
)

_GROUP_CALLS: Final = (
    _group_call(
        method="PUT",
        path=_GROUP + "/offsets",
        endpoint=groups.commit_offsets,
        summary="Commit the offsets that a group reads next",
        description="The commit is durable when the call returns. Partitions that are not listed "
        "keep their offsets. With `topic_id` (as in `Log-Topic-Id`) a commit is refused if the "
        "topic was deleted and re-created meanwhile.",
        body={
            JSON: Body(
                schema=groups.OffsetsToCommit,
                example={"offsets": [{"topic": "flights", "partition": 0, "offset": 1000}]},
            )
        },
        status=204,
        problems=(*NO_PARTITION, "group-refused", *REBUILDING_TO_WRITE),
    ),
    _group_call(
        method="POST",
        path=_GROUP + "/members",
        endpoint=group_members.join_group,
        summary="Join a group, or join again",
        description="Waits until all members have joined, and returns the partitions that this one "
        "reads. A new member gives no `member_id`; it is dropped `session_timeout_ms` after its "
        "last heartbeat, or if it does not join again within `rebalance_timeout_ms` of another's "
        "coming or going, and reads nothing until it has. Kafka's consumers may be in the same "
        "group, with the assignor `range`, `roundrobin` or `cooperative-sticky`.",
        body={
            JSON: Body(
                schema=group_members.JoinRequest,
                example={"topics": ["flights"], "session_timeout_ms": 10000},
            )
        },
        response={JSON: Body(schema=schemas.Membership)},
        problems=("group-refused", *REBUILDING_TO_WRITE),
    ),
    _group_call(
        method="POST",
        path=_GROUP + "/members/{member}/heartbeat",
        endpoint=group_members.heartbeat,
        summary="Stay in a group",
        description="With the `reason` REBALANCE_IN_PROGRESS, commit what was read and join again "
        "with the same `member_id`; with ILLEGAL_GENERATION join again; with UNKNOWN_MEMBER_ID "
        "join without it.",
        body={JSON: Body(schema=group_members.HeartbeatRequest, example={"generation": 1})},
        status=204,
        problems=("group-refused", *REBUILDING_TO_WRITE),
    ),
    _group_call(
        method="DELETE",
        path=_GROUP + "/members/{member}",
        endpoint=group_members.leave_group,
        summary="Leave a group",
        status=204,
        problems=("group-refused", *REBUILDING_TO_WRITE),
    ),
    _group_call(
        method="GET",
        path=_GROUP,
        endpoint=groups.get_group,
        summary="A group's offsets, lag and members",
        description="With `stable`, 503 `concurrent-transactions` while a transaction in progress "
        "has offsets of the group: who reads on from them would repeat what it did.",
        query=groups.GroupQuery,
        response={JSON: Body(schema=schemas.GroupState)},
        problems=("unknown-group", "concurrent-transactions", *REBUILDING),
    ),
    _group_call(
        method="DELETE",
        path=_GROUP,
        endpoint=groups.delete_group,
        summary="Delete a group that nobody is in, with its offsets",
        status=204,
        problems=("unknown-group", "group-refused", *REBUILDING_TO_WRITE),
    ),
    _group_call(
        method="GET",
        path="/v1/groups",
        endpoint=groups.list_groups,
        summary="List groups by name",
        response={JSON: Body(schema=schemas.GroupList)},
        problems=REBUILDING,
    ),
)

_PRODUCER_EXAMPLE: Final = {"producer_id": 3543849216634336, "producer_epoch": 4}
_TRANSACTION_CALLS: Final = (
    _transaction_call(
        method="POST",
        path="/v1/transactions",
        endpoint=transactions.begin_transactions,
        summary="Begin with a transactional id (Kafka's InitProducerId)",
        description="Fences the producer that used the id before, and aborts what it left; waits "
        "until that is done. A transaction begins with the first produce that has the id in "
        "`Transactional-Id`, or with offsets, and is aborted by the broker `timeout_ms` later. "
        "Sequences begin with 0 in each partition and transaction.",
        body={
            JSON: Body(schema=transactions.TransactionToBegin, example={"transactional_id": "etl"})
        },
        status=201,
        response={JSON: Body(schema=schemas.TransactionalProducer)},
        response_headers={"Location": "the transactional id's path"},
        problems=("concurrent-transactions", *REBUILDING_TO_WRITE),
    ),
    _transaction_call(
        method="GET",
        path="/v1/transactions",
        endpoint=transactions.list_transactions,
        summary="List transactional ids by name",
        query=transactions.ListTransactionsQuery,
        response={JSON: Body(schema=schemas.TransactionList)},
        problems=REBUILDING,
    ),
    _transaction_call(
        method="GET",
        path=_TRANSACTION,
        endpoint=transactions.get_transaction,
        summary="A transactional id's producer, and its last transaction",
        response={JSON: Body(schema=schemas.TransactionState)},
        problems=("unknown-transaction", *REBUILDING),
    ),
    _transaction_call(
        method="POST",
        path=_TRANSACTION + "/offsets",
        endpoint=transactions.commit_in_transaction,
        summary="Commit a group's offsets with the transaction",
        description="They count once the transaction is committed. Needs a token with the scope "
        "`read` as well.",
        body={
            JSON: Body(
                schema=transactions.TransactionOffsets,
                example={
                    **_PRODUCER_EXAMPLE,
                    "group": "etl",
                    "offsets": [{"topic": "flights", "partition": 0, "offset": 1000}],
                },
            )
        },
        status=204,
        problems=(
            *NO_PARTITION,
            "group-refused",
            "producer-fenced",
            "transaction-refused",
            "concurrent-transactions",
            *REBUILDING_TO_WRITE,
        ),
    ),
    *(
        _transaction_call(
            method="POST",
            path=f"{_TRANSACTION}/{verb}",
            endpoint=endpoint,
            summary=summary,
            description="Returns once readers of committed records see it, with the producer of "
            "the next transaction, whose epoch is higher. The same call again gets the same "
            "response." + more,
            body={JSON: Body(schema=schema, example=_PRODUCER_EXAMPLE)},
            response={JSON: Body(schema=schemas.TransactionalProducer)},
            problems=(
                "producer-fenced",
                "transaction-refused",
                "concurrent-transactions",
                *REBUILDING_TO_WRITE,
            ),
        )
        for verb, endpoint, schema, summary, more in (
            (
                "commit",
                transactions.commit_transaction,
                transactions.TransactionToCommit,
                "Commit the transaction",
                " `producer-fenced`: it was aborted, since it took too long or another producer "
                "began with the id. With `together` the transactions of several ids are committed "
                "by one decision, all or none: those of one job's tasks.",
            ),
            (
                "abort",
                transactions.abort_transaction,
                transactions.TransactionToEnd,
                "Abort the transaction",
                "",
            ),
        )
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

_BROKER: Final = "/v1/cluster/brokers/{node}"
_OPERATED_BROKER: Final = (
    "not-in-cluster",
    "unknown-broker",
    "broker-in-use",
    "broker-unavailable",
    "store-unavailable",
)

_REASSIGNED: Final = (*NO_PARTITION, *ELSEWHERE, "not-in-cluster", "store-unavailable")

_CLUSTER_CALLS: Final = (
    _cluster_call(
        method="GET",
        path="/v1/cluster",
        endpoint=cluster.get_cluster,
        summary="The brokers of the cluster",
        response={JSON: Body(schema=schemas.ClusterState)},
        problems=("not-in-cluster",),
    ),
    _cluster_call(
        method="GET",
        path="/v1/cluster/leaders",
        endpoint=cluster.get_leaders,
        summary="What this broker leads",
        response={JSON: Body(schema=LeaderReport)},
        problems=("not-in-cluster",),
    ),
    _cluster_call(
        method="POST",
        path="/v1/cluster/news",
        endpoint=cluster.hear_news,
        summary="Brokers tell each other what has changed",
        description="This broker looks at these topics in the bucket, and claims the partitions "
        "that were assigned to it, before it answers.",
        body={JSON: Body(schema=cluster.News, example={"sender": 1, "topics": ["flights"]})},
        response={JSON: Body(schema=LeaderReport)},
        problems=("not-in-cluster", "store-unavailable"),
    ),
    _cluster_call(
        method="POST",
        path="/v1/cluster/transaction-parts",
        endpoint=cluster.take_part,
        summary="A partition's leader asks a transaction's coordinator",
        description="Whether the partitions are in the producer's transaction; with `adds` they "
        "are from then on. `NONE`, or Kafka's name of the reason why not.",
        body={
            JSON: Body(
                schema=TransactionPart,
                example={
                    "transactional_id": "billing",
                    "producer_id": 4294967296,
                    "producer_epoch": 0,
                    "partitions": [["flights", 0]],
                    "adds": False,
                },
            )
        },
        response={JSON: Body(schema=str, example="NONE")},
        problems=("not-in-cluster",),
    ),
    _cluster_call(
        method="POST",
        path="/v1/cluster/transaction-markers",
        endpoint=cluster.write_markers,
        summary="A transaction's coordinator ends it in a broker's partitions",
        description="For each marker `NONE` once it is durable, or Kafka's name of an error. "
        "It may be repeated.",
        body={JSON: Body(schema=cluster.Markers, example={"markers": []})},
        response={JSON: Body(schema=list[str], example=["NONE"])},
        problems=("not-in-cluster",),
    ),
    _cluster_call(
        method="POST",
        path="/v1/replica/fetch",
        handler=fetch_replicas,
        summary="A follower reads what it lacks of a leader's partitions",
        description="Between brokers. `session_id` 0 begins a session, and names all partitions; "
        "the next ones, whose `number` counts up from 1, name what is new, and in `forgotten` what "
        "is not followed any more. The answer begins with the length of its head (4 bytes, "
        "big-endian) and the head, a JSON array of the session's id, which is another one if "
        "nothing of the fetch counted, and an array with a row for each partition of which there "
        "is something to say; the batches of the rows follow, in their order, `size_bytes` of "
        "each. A row is `topic_id`, `partition`, `leader_epoch`, `number`, `high_watermark`, "
        "`log_start_offset`, `local_log_start_offset`, `segment_base_offset`, `size_bytes`, "
        "`diverging` and `error`, without the names. Waits up to `wait_ms` for one.",
        body={JSON: Body(schema=ReplicaFetch, example=_REPLICA_EXAMPLE)},
        response={REPLICA_FETCH: Body(schema=BINARY)},
        problems=("not-in-cluster", "disk-full"),
        only_reads=True,
    ),
    _cluster_call(
        method="POST",
        path="/v1/cluster/group-configs",
        endpoint=cluster.call_group_configs,
        summary="Brokers ask the leader of the groups' configurations",
        description="For those of all groups, or of one; with `config` it is changed first, and "
        "`null` restores a default. What differs from the defaults, by group.",
        body={
            JSON: Body(
                schema=GroupConfigCall,
                example={"group": "jobs", "config": {"share.auto.offset.reset": "earliest"}},
            )
        },
        response={
            JSON: Body(
                schema=dict[str, dict[str, ConfigValue]],
                example={"jobs": {"share.auto.offset.reset": "earliest"}},
            )
        },
        problems=("not-in-cluster", "invalid-config", "leader-unknown"),
    ),
    _cluster_call(
        method="POST",
        path="/v1/cluster/share-states",
        endpoint=cluster.ask_share_states,
        summary="A share partition's leader, or its group's coordinator, asks who keeps its state",
        description="For each call the state, once it is durable, or Kafka's name of an error. "
        "They may be repeated.",
        body={
            JSON: Body(
                schema=cluster.StateCalls,
                example={
                    "calls": [{"what": "read", "key": ["jobs", "AAAAAAAAAAAAAAAAAAAAAQ==", 0]}]
                },
            )
        },
        response={
            JSON: Body(
                schema=list[StateAnswer],
                example=[
                    {"reason": "NOT_COORDINATOR", "detail": "broker 2 keeps it", "state": None}
                ],
            )
        },
        problems=("not-in-cluster",),
    ),
    _cluster_call(
        method="POST",
        path="/v1/cluster/schemas",
        endpoint=cluster.find_schema,
        summary="A partition's leader asks the schema registry's, to check values",
        description="Id, kind and text of the schema with this id, or of a version of the subject, "
        "and the names and texts of what it refers to, if the subject has it; else nothing.",
        body={JSON: Body(schema=SchemaCall, example={"subject": "flights-value", "schema_id": 1})},
        response={JSON: Body(schema=list[SourceOfId], example=[[1, ["AVRO", '"string"', []]]])},
        problems=("not-in-cluster", *ELSEWHERE),
        only_reads=True,
    ),
    _cluster_call(
        method="POST",
        path="/v1/cluster/rebalance",
        endpoint=cluster.rebalance,
        summary="Share out what the brokers lead",
        description="Makes the first `max_moves` moves after which no broker leads two partitions "
        "more than another, or has two replicas more. Call it again until none is `left`. Replicas "
        "go on being copied in the background. `dry_run` shows all moves.",
        body={JSON: Body(schema=cluster.Rebalance, example={"dry_run": True})},
        response={JSON: Body(schema=schemas.PlannedMoves)},
        problems=("not-in-cluster", "leader-unknown", "broker-unavailable", "store-unavailable"),
    ),
    _cluster_call(
        method="POST",
        path=_BROKER + "/drain",
        endpoint=cluster.drain,
        summary="Have a broker give away all that it leads",
        description="It is given no partitions any more, and hands over those that it has, one "
        "after another; where there are several replicas another broker has its own first. `GET "
        "/v1/cluster` says how many `replicas` it still has. That outlives restarts. The answer is "
        "the plan; with `dry_run` it is all that happens.",
        body={JSON: Body(schema=cluster.Drain, example={})},
        response={JSON: Body(schema=schemas.PlannedMoves)},
        problems=_OPERATED_BROKER,
    ),
    _cluster_call(
        method="DELETE",
        path=_BROKER + "/drain",
        endpoint=cluster.undrain,
        summary="Let a drained broker have partitions again",
        status=204,
        problems=_OPERATED_BROKER,
    ),
    _cluster_call(
        method="DELETE",
        path=_BROKER,
        endpoint=cluster.remove,
        summary="Remove a broker that has stopped for ever",
        description="Refused while it runs, and while it has a partition. Its data folder cannot "
        "join the cluster again.",
        status=204,
        problems=_OPERATED_BROKER,
    ),
    _cluster_call(
        method="POST",
        path=_PARTITION + "/leader",
        endpoint=cluster.move_leader,
        summary="Hand a partition over to another broker",
        description="Uploads all of it, and then lets the other broker lead. Appends are refused "
        "while its end is uploaded, for `paused_ms`; reads go on.",
        body={JSON: Body(schema=cluster.NewLeader, example={"node_id": 2})},
        response={JSON: Body(schema=schemas.MovedLeader)},
        problems=(
            *NO_PARTITION,
            *ELSEWHERE,
            "not-in-cluster",
            "leadership-lost",
            "log-offline",
            "store-unavailable",
            "disk-full",
        ),
    ),
    _cluster_call(
        method="POST",
        path=_PARTITION + "/replicas",
        endpoint=cluster.reassign,
        summary="Have other brokers have a partition's replicas",
        description="Returns when that is ordered. New replicas copy what their leader has on its "
        "disk, and once all are in sync the others are given up: `GET /v1/cluster/reassignments` "
        "shows it until then. It goes on whoever leads. There may be more or fewer replicas than "
        "before, but not one instead of several, or several instead of one.",
        body={JSON: Body(schema=cluster.NewReplicas, example={"replicas": [2, 0]})},
        response={JSON: Body(schema=Reassigned)},
        problems=(*_REASSIGNED, "invalid-replica-assignment"),
    ),
    _cluster_call(
        method="DELETE",
        path=_PARTITION + "/replicas",
        endpoint=cluster.cancel_reassignment,
        summary="End a reassignment: the replicas are to be those of before",
        response={JSON: Body(schema=Reassigned)},
        problems=(*_REASSIGNED, "no-reassignment"),
    ),
    _cluster_call(
        method="GET",
        path="/v1/cluster/reassignments",
        endpoint=cluster.list_reassignments,
        summary="The partitions whose replicas are being changed",
        response={JSON: Body(schema=schemas.OngoingReassignments)},
        problems=("not-in-cluster",),
    ),
)

CALLS: Final = (
    *_TOPIC_CALLS,
    *_RECORD_CALLS,
    *_LOG_CALLS,
    *_GROUP_CALLS,
    *_TRANSACTION_CALLS,
    *_OPERATIONS_CALLS,
    *_CLUSTER_CALLS,
    *REGISTRY_CALLS,
)
