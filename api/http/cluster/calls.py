"""The calls of a cluster, in one table: operators', and those that brokers make to each other."""

from __future__ import annotations

from functools import partial
from typing import Final

from tierlog.api.http import schemas
from tierlog.api.http.calls import BINARY, ELSEWHERE, NO_PARTITION, PARTITION, Body, Call
from tierlog.api.http.cluster import handlers
from tierlog.api.http.cluster.replica_fetch import fetch_replicas
from tierlog.api.http.header_values import JSON, REPLICA_FETCH
from tierlog.broker.membership.peers import (
    GroupConfigCall,
    LeaderReport,
    Reassigned,
    SchemaCall,
    TransactionPart,
)
from tierlog.broker.replication.messages import ReplicaFetch
from tierlog.record_format.schema_state import SourceOfId
from tierlog.record_format.share_state import StateAnswer
from tierlog.record_format.topic_rules import ConfigValue

_BROKER: Final = "/v1/cluster/brokers/{node}"
_OPERATED_BROKER: Final = (
    "not-in-cluster",
    "unknown-broker",
    "broker-in-use",
    "broker-unavailable",
    "store-unavailable",
)

_REASSIGNED: Final = (*NO_PARTITION, *ELSEWHERE, "not-in-cluster", "store-unavailable")
_REPLICA_EXAMPLE: Final = {"node_id": 2, "wait_ms": 500, "max_bytes": 8388608, "partitions": []}

_call = partial(Call, tag="cluster")

CLUSTER_CALLS: Final = (
    _call(
        method="GET",
        path="/v1/cluster",
        endpoint=handlers.get_cluster,
        summary="The brokers of the cluster",
        response={JSON: Body(schema=schemas.ClusterState)},
        problems=("not-in-cluster",),
    ),
    _call(
        method="GET",
        path="/v1/cluster/leaders",
        endpoint=handlers.get_leaders,
        summary="What this broker leads",
        response={JSON: Body(schema=LeaderReport)},
        problems=("not-in-cluster",),
    ),
    _call(
        method="POST",
        path="/v1/cluster/news",
        endpoint=handlers.hear_news,
        summary="Brokers tell each other what has changed",
        description="This broker looks at these topics in the bucket, and claims the partitions "
        "that were assigned to it, before it answers.",
        body={JSON: Body(schema=handlers.News, example={"sender": 1, "topics": ["flights"]})},
        response={JSON: Body(schema=LeaderReport)},
        problems=("not-in-cluster", "store-unavailable"),
    ),
    _call(
        method="POST",
        path="/v1/cluster/transaction-parts",
        endpoint=handlers.take_part,
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
    _call(
        method="POST",
        path="/v1/cluster/transaction-markers",
        endpoint=handlers.write_markers,
        summary="A transaction's coordinator ends it in a broker's partitions",
        description="For each marker `NONE` once it is durable, or Kafka's name of an error. "
        "It may be repeated.",
        body={JSON: Body(schema=handlers.Markers, example={"markers": []})},
        response={JSON: Body(schema=list[str], example=["NONE"])},
        problems=("not-in-cluster",),
    ),
    _call(
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
    _call(
        method="POST",
        path="/v1/cluster/group-configs",
        endpoint=handlers.call_group_configs,
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
    _call(
        method="POST",
        path="/v1/cluster/share-states",
        endpoint=handlers.ask_share_states,
        summary="A share partition's leader, or its group's coordinator, asks who keeps its state",
        description="For each call the state, once it is durable, or Kafka's name of an error. "
        "They may be repeated.",
        body={
            JSON: Body(
                schema=handlers.StateCalls,
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
    _call(
        method="POST",
        path="/v1/cluster/schemas",
        endpoint=handlers.find_schema,
        summary="A partition's leader asks the schema registry's, to check values",
        description="Id, kind and text of the schema with this id, or of a version of the subject, "
        "and the names and texts of what it refers to, if the subject has it; else nothing.",
        body={JSON: Body(schema=SchemaCall, example={"subject": "flights-value", "schema_id": 1})},
        response={JSON: Body(schema=list[SourceOfId], example=[[1, ["AVRO", '"string"', []]]])},
        problems=("not-in-cluster", *ELSEWHERE),
        only_reads=True,
    ),
    _call(
        method="POST",
        path="/v1/cluster/rebalance",
        endpoint=handlers.rebalance,
        summary="Share out what the brokers lead",
        description="Makes the first `max_moves` moves after which no broker leads two partitions "
        "more than another, or has two replicas more. Call it again until none is `left`. Replicas "
        "go on being copied in the background. `dry_run` shows all moves.",
        body={JSON: Body(schema=handlers.Rebalance, example={"dry_run": True})},
        response={JSON: Body(schema=schemas.PlannedMoves)},
        problems=("not-in-cluster", "leader-unknown", "broker-unavailable", "store-unavailable"),
    ),
    _call(
        method="POST",
        path=_BROKER + "/drain",
        endpoint=handlers.drain,
        summary="Have a broker give away all that it leads",
        description="It is given no partitions any more, and hands over those that it has, one "
        "after another; where there are several replicas another broker has its own first. `GET "
        "/v1/cluster` says how many `replicas` it still has. That outlives restarts. The answer is "
        "the plan; with `dry_run` it is all that happens.",
        body={JSON: Body(schema=handlers.Drain, example={})},
        response={JSON: Body(schema=schemas.PlannedMoves)},
        problems=_OPERATED_BROKER,
    ),
    _call(
        method="DELETE",
        path=_BROKER + "/drain",
        endpoint=handlers.undrain,
        summary="Let a drained broker have partitions again",
        status=204,
        problems=_OPERATED_BROKER,
    ),
    _call(
        method="DELETE",
        path=_BROKER,
        endpoint=handlers.remove,
        summary="Remove a broker that has stopped for ever",
        description="Refused while it runs, and while it has a partition. Its data folder cannot "
        "join the cluster again.",
        status=204,
        problems=_OPERATED_BROKER,
    ),
    _call(
        method="POST",
        path=PARTITION + "/leader",
        endpoint=handlers.move_leader,
        summary="Hand a partition over to another broker",
        description="Uploads all of it, and then lets the other broker lead. Appends are refused "
        "while its end is uploaded, for `paused_ms`; reads go on.",
        body={JSON: Body(schema=handlers.NewLeader, example={"node_id": 2})},
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
    _call(
        method="POST",
        path=PARTITION + "/replicas",
        endpoint=handlers.reassign,
        summary="Have other brokers have a partition's replicas",
        description="Returns when that is ordered. New replicas copy what their leader has on its "
        "disk, and once all are in sync the others are given up: `GET /v1/cluster/reassignments` "
        "shows it until then. It goes on whoever leads. There may be more or fewer replicas than "
        "before, but not one instead of several, or several instead of one.",
        body={JSON: Body(schema=handlers.NewReplicas, example={"replicas": [2, 0]})},
        response={JSON: Body(schema=Reassigned)},
        problems=(*_REASSIGNED, "invalid-replica-assignment"),
    ),
    _call(
        method="DELETE",
        path=PARTITION + "/replicas",
        endpoint=handlers.cancel_reassignment,
        summary="End a reassignment: the replicas are to be those of before",
        response={JSON: Body(schema=Reassigned)},
        problems=(*_REASSIGNED, "no-reassignment"),
    ),
    _call(
        method="GET",
        path="/v1/cluster/reassignments",
        endpoint=handlers.list_reassignments,
        summary="The partitions whose replicas are being changed",
        response={JSON: Body(schema=schemas.OngoingReassignments)},
        problems=("not-in-cluster",),
    ),
)
