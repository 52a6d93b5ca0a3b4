"""Calls on the cluster: which brokers there are, which partitions each leads, and their moving.

* Any broker may be asked. A rebalance is a few moves to a call, so that no call takes minutes and
  its caller sees how far it is; a drain is an order that the broker carries out by itself.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import Response
from msgspec import Meta

from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import (
    JsonResponse,
    TheContext,
    TheExchange,
    ThePartition,
    WithoutBody,
    body_as,
)
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.schemas import (
    BrokerState,
    ClusterState,
    OngoingReassignment,
    OngoingReassignments,
    PlannedMove,
    PlannedMoves,
)
from tierlog.broker.membership.peers import GroupConfigCall, Marker, SchemaCall, TransactionPart
from tierlog.broker.share_coordinator.share_state_peers import CALLS_MAX
from tierlog.record_format.errors import NotInCluster, UnknownBroker
from tierlog.record_format.share_state import StateCall

if TYPE_CHECKING:
    from tierlog.broker.cluster.cluster import Cluster
    from tierlog.broker.cluster.moves import Moves
    from tierlog.broker.cluster.placement import Move


class News(msgspec.Struct, forbid_unknown_fields=True):
    """`sender`: the node id of who sends it; `topics`: names that have changed; `assigned`: topic
    id and number of each partition, as in `led`: those that the sender has come to lead.
    """

    sender: int
    topics: list[str] = []
    assigned: list[tuple[str, int]] = []
    led: list[tuple[str, int]] = []


class Markers(msgspec.Struct, forbid_unknown_fields=True):
    markers: list[Marker]


class StateCalls(msgspec.Struct, forbid_unknown_fields=True):
    """In the order in which they are carried out."""

    calls: Annotated[list[StateCall], Meta(max_length=CALLS_MAX)]


class NewLeader(msgspec.Struct, forbid_unknown_fields=True):
    node_id: int


class NewReplicas(msgspec.Struct, forbid_unknown_fields=True):
    """Node ids; the first is to lead."""

    replicas: Annotated[list[int], Meta(min_length=1)]


class Rebalance(msgspec.Struct, forbid_unknown_fields=True):
    """`max_moves`: at most so many, from the front of the plan."""

    dry_run: bool = False
    max_moves: Annotated[int, Meta(ge=1)] = 1


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    dry_run: bool = False


async def get_cluster(context: TheContext) -> Response:
    cluster = _cluster_of(context)
    led, has = cluster.leaders.count_led(), cluster.leaders.count_replicas()
    brokers = [
        BrokerState(**one._asdict(), leads=led.get(one.node_id, 0), replicas=has[one.node_id])
        for one in cluster.members.members()
    ]
    short = await context.read(cluster.sets.count_short, context.broker.topics())
    return JsonResponse(
        ClusterState(
            cluster_id=context.broker.folder.cluster_id,
            node_id=cluster.members.me.node_id,
            brokers=brokers,
            offline_partitions=short.offline,
            under_replicated_partitions=short.under_replicated,
            under_min_isr_partitions=short.under_min_isr,
        )
    )


async def get_leaders(context: TheContext) -> Response:
    return JsonResponse(await context.read(_cluster_of(context).report))


async def hear_news(context: TheContext, body: Annotated[News, body_as(News)]) -> Response:
    cluster = _cluster_of(context)
    hear = partial(cluster.hear_news, led=body.led)
    report = await context.write_cold(hear, body.sender, body.topics, body.assigned)
    return JsonResponse(report)


async def take_part(
    context: TheContext, body: Annotated[TransactionPart, body_as(TransactionPart)]
) -> Response:
    _cluster_of(context)
    return JsonResponse(await context.write(context.broker.transactions.answer_part, body))


async def write_markers(
    context: TheContext, body: Annotated[Markers, body_as(Markers)]
) -> Response:
    _cluster_of(context)
    return JsonResponse(
        await context.write(context.broker.transactions.write_markers, body.markers)
    )


async def call_group_configs(
    context: TheContext, body: Annotated[GroupConfigCall, body_as(GroupConfigCall)]
) -> Response:
    _cluster_of(context)
    return JsonResponse(await context.write(context.broker.group_configs.answer, body))


async def ask_share_states(
    context: TheContext, body: Annotated[StateCalls, body_as(StateCalls)]
) -> Response:
    _cluster_of(context)
    return JsonResponse(await context.write(context.broker.share_groups.answer_states, body.calls))


async def find_schema(
    context: TheContext, body: Annotated[SchemaCall, body_as(SchemaCall)]
) -> Response:
    _cluster_of(context)
    found = await context.read(context.broker.schema_registry.find_here, body)
    return JsonResponse([] if found is None else [found])


async def move_leader(
    context: TheContext,
    topic: str,
    partition: ThePartition,
    body: Annotated[NewLeader, body_as(NewLeader)],
) -> Response:
    moved = await context.write_cold(
        _cluster_of(context).move, topic, partition.number, node_id=body.node_id
    )
    return JsonResponse(moved._asdict())


async def reassign(
    context: TheContext,
    topic: str,
    partition: ThePartition,
    body: Annotated[NewReplicas, body_as(NewReplicas)],
) -> Response:
    reassign_here = _cluster_of(context).reassign
    return JsonResponse(
        await context.write_cold(reassign_here, topic, partition.number, body.replicas)
    )


async def cancel_reassignment(
    context: TheContext, topic: str, partition: ThePartition, _: Annotated[None, WithoutBody]
) -> Response:
    reassign_here = _cluster_of(context).reassign
    return JsonResponse(await context.write_cold(reassign_here, topic, partition.number, ()))


async def list_reassignments(context: TheContext) -> Response:
    cluster = _cluster_of(context)
    found = await context.write_cold(cluster.reassignments.list_ongoing)
    shown = [
        OngoingReassignment(
            topic=cluster.moves.name_of(place),
            partition=place[1],
            replicas=list(one.replicas),
            adding=list(one.adding),
            removing=list(one.removing),
        )
        for place, one in found.items()
    ]
    return JsonResponse(OngoingReassignments(sorted(shown)))


async def rebalance(
    context: TheContext, body: Annotated[Rebalance, body_as(Rebalance)]
) -> Response:
    return JsonResponse(await context.write_cold(_rebalance, _cluster_of(context).moves, body))


def _rebalance(moves: Moves, body: Rebalance) -> PlannedMoves:
    plan = moves.plan_balance()
    if body.dry_run:
        return _planned(moves, plan)
    now = plan[: body.max_moves]
    moves.run_moves(now)
    return _planned(moves, now, left=len(plan) - len(now))


def _planned(moves: Moves, plan: list[Move], *, left: int = 0) -> PlannedMoves:
    made = [
        PlannedMove(
            moves.name_of(one.place), one.place[1], one.source, one.target, list(one.replicas)
        )
        for one in plan
    ]
    return PlannedMoves(moves=made, left=left)


async def drain(
    context: TheContext, exchange: TheExchange, body: Annotated[Drain, body_as(Drain)]
) -> Response:
    cluster, node_id = _cluster_of(context), _node_id(exchange)

    def order() -> PlannedMoves:
        cluster.members.find_member(node_id)
        plan = cluster.moves.plan_drain(node_id)
        if not body.dry_run:
            cluster.moves.set_draining(node_id, draining=True)
        return _planned(cluster.moves, plan)

    return JsonResponse(await context.write_cold(order))


async def undrain(
    context: TheContext, exchange: TheExchange, _: Annotated[None, WithoutBody]
) -> Response:
    node_id, moves = _node_id(exchange), _cluster_of(context).moves
    await context.write_cold(moves.set_draining, node_id, draining=False)
    return Response(status_code=204)


async def remove(
    context: TheContext, exchange: TheExchange, _: Annotated[None, WithoutBody]
) -> Response:
    await context.write_cold(_cluster_of(context).remove, _node_id(exchange))
    return Response(status_code=204)


def _node_id(exchange: Exchange) -> int:
    """Raises UnknownBroker, InvalidRequest."""
    return exchange.number("node", missing=lambda n: UnknownBroker(f"{n} is no node id"))


def _cluster_of(context: Context) -> Cluster:
    cluster = context.broker.cluster
    if cluster is None:
        raise NotInCluster("this broker is alone: it was started without --join")
    return cluster
