"""Calls on several partitions, which several brokers of a cluster lead.

* Each part goes to the broker that leads it, which answers for that part alone
  (`Tierlog-Forwarded`); the parts here are carried out here. A broker alone does neither.
* As in `gateway`: what nobody leads at the moment waits, and a write is sent again only if it
  certainly was not carried out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.broker.topics.topics import (
    DamagedState,
    LeaderState,
    PartitionState,
    Topic,
    TopicState,
)
from tierlog.record_format.errors import (
    ELSEWHERE,
    LeaderUnknown,
    NotLeader,
    PeerUnavailable,
    ShuttingDown,
    Starting,
    TierlogError,
)
from tierlog.record_format.workarounds import decode_json

if TYPE_CHECKING:
    from tierlog.api.http.cluster.gateway import Gateway
    from tierlog.broker.cluster.cluster import Cluster

T = TypeVar("T")
Part = TypeVar("Part", bound=msgspec.Struct)

SINGLE_NODE_ID: Final = 0  # as Kafka's clients are told
PAUSE_S: Final = 0.02
PAUSE_MAX_S: Final = 0.25
_RETRIED: Final = (*ELSEWHERE, PeerUnavailable, ShuttingDown)


def is_split(context: Context, exchange: Exchange) -> bool:
    """Whether other brokers are to be asked for their part of a call."""
    return context.gateway is not None and not exchange.is_forwarded


def gateway_of(context: Context) -> Gateway:
    assert context.gateway is not None, "in a cluster"
    return context.gateway


class _Refusal(msgspec.Struct):
    """Of a problem document, what decides whether to ask again, and whom."""

    code: str = ""
    detail: str = ""
    outcome: str = ""
    leader: dict[str, Any] | None = None
    leader_epoch: int = -1


def refusal_of(status: int, body: bytes) -> TierlogError | None:
    """The error of a problem after which the call may be sent again; None for any other."""
    if status not in (421, 503):
        return None
    try:
        found = decode_json(body, _Refusal)
    except msgspec.MsgspecError:
        return None
    if found.code == "not-leader" and found.leader is not None:
        node_id, url = found.leader.get("node_id", -1), found.leader.get("url", "")
        return NotLeader("it", node_id=node_id, url=url, leader_epoch=found.leader_epoch)
    if found.code == "leader-unknown":
        return LeaderUnknown(found.detail)
    if found.code == "starting":
        return Starting(found.detail)
    if found.code == "shutting-down" and not found.outcome:
        return ShuttingDown(found.detail)
    return None


async def while_led_elsewhere(
    context: Context, here: Callable[[], Awaitable[T]], there: Callable[[str], Awaitable[T]]
) -> T:
    """The result of `here`, or of `there` with the url of the broker that leads; both may be called
    again after a refusal. Raises the last one after `leader_wait_ms`.
    """
    began_s, pause_s = time.monotonic(), PAUSE_S
    url, failure = "", None
    while True:
        try:
            return await (there(url) if url else here())
        except _RETRIED as error:
            waited_ms = (time.monotonic() - began_s) * 1000
            failure = failure if isinstance(error, NotLeader) else error
            if waited_ms >= context.settings.leader_wait_ms or context.waiting.is_stopping:
                raise failure or LeaderUnknown(str(error)) from None
            before, url = url, error.url if isinstance(error, NotLeader) else ""
        if url and not before:
            continue  # this broker knows who leads
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def token_of(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    return [one for one in exchange.scope["headers"] if one[0] == b"authorization"]


# --- calls on a topic, and on all brokers ---------------------------------------------------------


async def ask_leaders(context: Context, exchange: Exchange, topic: Topic, kind: type[T]) -> list[T]:
    """What the same call is answered by all other brokers that lead partitions of the topic. Raises
    LeaderUnknown if nobody leads one, and the first error of a broker.
    """
    if not is_split(context, exchange):
        return []
    urls: dict[str, None] = {}
    for number in topic.numbers:
        if number not in topic.damaged:
            try:
                topic.partition(number)
            except NotLeader as error:
                urls[error.url] = None
    return await _ask_each(context, exchange, urls, kind)


async def ask_others(context: Context, exchange: Exchange, kind: type[T]) -> list[T]:
    """What the same call is answered by all other brokers that live. Raises their first error."""
    cluster = context.broker.cluster
    if cluster is None or not is_split(context, exchange):
        return []
    return await _ask_each(context, exchange, [one.url for one in cluster.news.others()], kind)


async def _ask_each(
    context: Context, exchange: Exchange, urls: Iterable[str], kind: type[T]
) -> list[T]:
    gateway = gateway_of(context)
    asked = [gateway.ask_same(exchange, url) for url in urls]
    return [decode_json(one.body, kind) for one in await asyncio.gather(*asked)]


def added(*parts: Part) -> Part:
    """One struct of several: numbers are added, ages are the greatest; of all else, the first's."""
    sums = {
        name: max(values) if name.endswith("_ms") else sum(values)
        for name in parts[0].__struct_fields__
        for values in [[getattr(one, name) for one in parts]]
        if isinstance(values[0], int | float) and not isinstance(values[0], bool)
    }
    return replace(parts[0], **sums)


async def describe_whole(context: Context, exchange: Exchange, here: TopicState) -> TopicState:
    """A topic's description with all its partitions, and their leaders. Those of a broker that does
    not answer are damaged. A broker alone is node 0, at the address that the client has asked.
    """
    cluster = context.broker.cluster
    if cluster is None:
        host = exchange.header(b"host")
        url = f"{exchange.scope.get('scheme', 'http')}://{host}" if host else ""
        return _led_by(here, LeaderState(node_id=SINGLE_NODE_ID, url=url))
    if not is_split(context, exchange):
        return here
    topic, me = context.broker.topic(here.name), cluster.members.me
    parts = [_led_by(here, LeaderState(node_id=me.node_id, url=me.url))]
    missing = {one.partition: one for one in here.damaged_partitions}
    elsewhere: dict[str, dict[int, NotLeader]] = {}
    for number in topic.numbers:
        try:
            topic.partition(number)
        except NotLeader as error:
            elsewhere.setdefault(error.url, {})[number] = error
        except TierlogError as error:
            missing.setdefault(number, DamagedState(number, str(error)))
    asked = [_describe_part(context, exchange, here.name, led) for led in elsewhere.values()]
    for state in await asyncio.gather(*asked):
        parts.append(state)
        missing |= {one.partition: one for one in state.damaged_partitions}
    partitions = {one.partition: one for part in parts for one in part.partitions}
    for number in topic.numbers:  # its leader has handed it over since this broker heard of it
        missing.setdefault(number, DamagedState(number, "it is being handed over"))
    return replace(
        here,
        partitions=[_with_set(cluster, topic, partitions[n]) for n in sorted(partitions)],
        damaged_partitions=[missing[n] for n in sorted(missing) if n not in partitions],
    )


def _with_set(cluster: Cluster, topic: Topic, partition: PartitionState) -> PartitionState:
    found = cluster.sets.shown(topic.record.topic_id, partition.partition)
    return replace(
        partition,
        replicas=found.replicas,
        in_sync_replicas=found.in_sync,
        replica_lags=found.lags,
        adding_replicas=list(found.adding) or UNSET,
        removing_replicas=list(found.removing) or UNSET,
        store_in_sync=found.has_store or UNSET,
    )


async def _describe_part(
    context: Context, exchange: Exchange, name: str, led: Mapping[int, NotLeader]
) -> TopicState:
    leader = next(iter(led.values()))
    gateway, path = gateway_of(context), f"/v1/topics/{name}".encode()
    sent = gateway.request(exchange, leader.url, path, method="GET", headers=token_of(exchange))
    try:
        answer = await gateway.ask(sent, writes=False)
    except TierlogError as error:
        damaged = [DamagedState(number, str(error)) for number in led]
        return TopicState(
            name=name,
            topic_id="",
            config={},
            effective_config={},
            partitions=[],
            damaged_partitions=damaged,
        )
    state = decode_json(answer.body, TopicState)
    return _led_by(state, LeaderState(node_id=leader.node_id, url=leader.url))


def _led_by(part: TopicState, leader: LeaderState) -> TopicState:
    return replace(part, partitions=[replace(one, leader=leader) for one in part.partitions])
