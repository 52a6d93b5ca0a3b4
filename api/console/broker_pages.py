"""The pages about the brokers of a cluster, and from which partitions are moved.

* As in `actions`: a page shows what would be done, and its form calls the API.
* What a broker says of itself is asked of it; who is a member, and lives, is what this one sees.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.console.actions import refusal
from tierlog.api.console.all_brokers import Silent, ask_all, part_response
from tierlog.api.console.rates import rate
from tierlog.api.console.rendering import fragment
from tierlog.api.console.replicas import BUCKET, Held, count_held
from tierlog.api.console.samples import Sampler
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.metrics.registry import broker_version
from tierlog.api.http.responses import Response
from tierlog.broker.partition.segment_listing import tier_sizes
from tierlog.record_format.errors import NotInCluster

if TYPE_CHECKING:
    from tierlog.broker.cluster.cluster import Cluster
    from tierlog.broker.cluster.placement import Move
    from tierlog.broker.membership.members import Member

MOVES_SHOWN: Final = 200
NodeId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class DrainQuery(msgspec.Struct, forbid_unknown_fields=True):
    node: NodeId


class MoveQuery(msgspec.Struct, forbid_unknown_fields=True):
    to: NodeId | UnsetType = UNSET


class BrokerPart(msgspec.Struct):
    """What a broker says of itself. Rates are in bytes a second, over its last two samples."""

    version: str
    in_rate: float
    out_rate: float
    log_bytes: int
    free_bytes: int
    disk_bytes: int


class BrokerLine(NamedTuple):
    """`part`: None of one that does not answer."""

    member: Member
    leads: int
    held: Held
    part: BrokerPart | None
    silent: Silent | None
    is_asked: bool

    @property
    def state(self) -> str:
        """As people say it: one that left no word is down."""
        member = self.member
        return member.state if member.is_alive or member.state == "stopped" else "down"


class PlannedMove(NamedTuple):
    topic: str
    partition: int
    source: int
    target: int


async def brokers(context: Context, exchange: Exchange, sampler: Sampler) -> Response:
    cluster = _cluster_of(context)
    own = await context.read(_own_part, context, sampler)
    if exchange.is_forwarded:
        return part_response(own)
    asked = await ask_all(context, exchange, BrokerPart)
    me, led = cluster.members.me.node_id, cluster.leaders.count_led()
    held = await context.read(count_held, context)
    parts, silent = {me: own, **asked.found}, {one.node_id: one for one in asked.silent}
    lines = [
        BrokerLine(
            one,
            leads=led.get(one.node_id, 0),
            held=held.get(one.node_id, Held()),
            part=parts.get(one.node_id),
            silent=silent.get(one.node_id),
            is_asked=one.node_id == me,
        )
        for one in cluster.members.members()
    ]
    short = await context.read(cluster.sets.count_short, context.broker.topics())
    return fragment(
        "brokers.html",
        lines=lines,
        cluster_id=context.broker.folder.cluster_id,
        short=short,
        has_replicas=bool(held),
        bucket=held.get(BUCKET),
        refusal=refusal(exchange.grant, "POST", "/v1/cluster/rebalance"),
    )


def _own_part(context: Context, sampler: Sampler) -> BrokerPart:
    broker = context.broker
    last = list(sampler.samples)[-2:]
    in_rate = rate(last[0], last[1], "produced_bytes") if len(last) == 2 else 0.0
    out_rate = rate(last[0], last[1], "sent_bytes") if len(last) == 2 else 0.0
    disk = os.statvfs(broker.folder.path)
    return BrokerPart(
        version=broker_version(),
        in_rate=in_rate,
        out_rate=out_rate,
        log_bytes=sampler.report.hot_bytes if sampler.report else 0,
        free_bytes=broker.reserve.free_bytes,
        disk_bytes=disk.f_frsize * disk.f_blocks,
    )


async def balance_page(context: Context, exchange: Exchange) -> Response:
    cluster = _cluster_of(context)
    denied = refusal(exchange.grant, "POST", "/v1/cluster/rebalance")
    plan = [] if denied else await context.read_cold(cluster.moves.plan_balance)
    return fragment("balance.html", plan=_shown(cluster, plan), count=len(plan), refusal=denied)


async def drain_page(context: Context, exchange: Exchange) -> Response:
    """Raises UnknownBroker."""
    node_id, cluster = exchange.query(DrainQuery).node, _cluster_of(context)
    denied = refusal(exchange.grant, "POST", "/v1/cluster/brokers/{node}/drain")
    member = cluster.members.find_member(node_id)
    is_draining = member.state == "draining"
    plan = [] if denied else await context.read_cold(cluster.moves.plan_drain, node_id)
    return fragment(
        "drain.html",
        member=member,
        is_draining=is_draining,
        has=cluster.leaders.count_replicas()[node_id],
        plan=_shown(cluster, plan),
        count=len(plan),
        refusal=denied,
    )


async def move_page(context: Context, exchange: Exchange) -> Response:
    """A page of the partition's leader."""
    query, cluster = exchange.query(MoveQuery), _cluster_of(context)
    partition = context.broker.partition(exchange.topic, exchange.partition)
    me = cluster.members.me
    led = cluster.leaders.count_led()
    targets = [
        (one, led.get(one.node_id, 0))
        for one in cluster.members.members()
        if one.node_id != me.node_id and one.is_alive and one.state == "running"
    ]
    chosen = next((one for one, _ in targets if one.node_id == query.to), None)
    return fragment(
        "move.html",
        name=partition.topic,
        number=partition.number,
        leader=me,
        targets=targets,
        chosen=chosen,
        now=partition.offsets(),
        to_upload=tier_sizes(partition).offload_lag_bytes,
        refusal=refusal(exchange.grant, "POST", "/v1/topics/{topic}/partitions/{partition}/leader"),
    )


def _shown(cluster: Cluster, plan: list[Move]) -> list[PlannedMove]:
    return [
        PlannedMove(cluster.moves.name_of(one.place), one.place[1], one.source, one.target)
        for one in plan[:MOVES_SHOWN]
    ]


def _cluster_of(context: Context) -> Cluster:
    if (cluster := context.broker.cluster) is None:
        raise NotInCluster("this broker is alone: it was started without --join")
    return cluster
