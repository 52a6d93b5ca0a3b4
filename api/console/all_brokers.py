"""Pages about all brokers of a cluster, whichever is asked.

* A page asks each other broker for its part, by its own address or another of the console's, with
  the token that it was given. Whoever is asked so answers with the figures as JSON.
* A page never fails for a broker: one that is dead, or does not answer in time, is named on it.
* A broker alone asks nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import msgspec

from tierlog.api.console.rendering import HEADERS
from tierlog.api.http.cluster.splitting import gateway_of, token_of
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.responses import Response, json_response
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.workarounds import decode_json

if TYPE_CHECKING:
    from tierlog.broker.membership.members import Member

T = TypeVar("T")
ANSWER_S: Final = 3.0
ALONE: Final = -1  # instead of a node id


class Silent(NamedTuple):
    """A broker whose part is missing."""

    node_id: int
    url: str
    reason: str


class Parts(NamedTuple, Generic[T]):
    """By node id, of those that answered."""

    found: dict[int, T]
    silent: list[Silent]


def own_node(context: Context) -> int:
    cluster = context.broker.cluster
    return ALONE if cluster is None else cluster.members.me.node_id


def part_response(part: object) -> Response:
    """For another broker's page. It is no fragment: no page swaps it in."""
    return json_response(part, headers=HEADERS)


async def ask_all(
    context: Context, exchange: Exchange, kind: type[T], *, target: str = ""
) -> Parts[T]:
    """The parts of all other brokers that may lead something. `target`: another address than that
    which was requested.
    """
    cluster = context.broker.cluster
    if cluster is None or exchange.is_forwarded:
        return Parts({}, [])
    me = cluster.members.me.node_id
    others = [one for one in cluster.members.members() if one.node_id != me and _may_lead(one)]
    asked = [_ask(context, exchange, one, target, kind) for one in others]
    answers = dict(zip([one.node_id for one in others], await asyncio.gather(*asked), strict=True))
    silent = [one for one in answers.values() if isinstance(one, Silent)]
    found = {node_id: one for node_id, one in answers.items() if not isinstance(one, Silent)}
    return Parts(found, silent)


def _may_lead(other: Member) -> bool:
    """One that has stopped has given away all that it led."""
    return other.is_alive or other.state != "stopped"


async def _ask(
    context: Context, exchange: Exchange, other: Member, target: str, kind: type[T]
) -> T | Silent:
    if not other.is_alive:
        return Silent(other.node_id, other.url, "it is down")
    gateway = gateway_of(context)
    query: bytes = exchange.scope["query_string"]
    own: bytes = exchange.scope["raw_path"] + (b"?" + query if query else b"")
    path = target.encode() or own
    request = gateway.request(exchange, other.url, path, method="GET", headers=token_of(exchange))
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await gateway.ask(request, writes=False)
        return decode_json(answer.body, kind)
    except TimeoutError:
        return Silent(other.node_id, other.url, f"no answer within {ANSWER_S:.0f} s")
    except (TierlogError, msgspec.MsgspecError) as error:
        return Silent(other.node_id, other.url, str(error))
