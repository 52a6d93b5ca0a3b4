"""`POST /v1/replica/fetch`: what a follower lacks of the partitions that this broker leads.

    | 4 bytes | length of the head, big-endian                                     |
    | head    | JSON: `FetchHead`, with the rows                                   |
    | batches | of each row with a `size_bytes`, in the order of the rows          |

* A long poll, as `POST /v1/fetch`: a fetch that waits is an entry with the replicas, and a timer.
  When the time is over the answer has the watermarks that the follower lacks, or no row.
* Batches are sent from the log's files. No answer is held in memory.
* It is for this broker alone: a follower asks again where the leader is.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final, NamedTuple

import msgspec

from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import json_body
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch.long_poll import LongPoll
from tierlog.api.http.header_values import REPLICA_FETCH, preferred
from tierlog.api.http.responses import NO_STORE, AnyResponse, FramedResponse
from tierlog.api.http.settings import MIB
from tierlog.api.serving.workers import call_on_loop
from tierlog.broker.replication.messages import (
    NO_SESSION,
    Answered,
    FetchHead,
    ReplicaFetch,
    Replicas,
    Taken,
)
from tierlog.host.file_slice import close_all
from tierlog.record_format.errors import NotInCluster

BODY_MAX_BYTES: Final = 16 * MIB  # some 100,000 partitions
_TYPE: Final = (b"content-type", REPLICA_FETCH.encode())
LENGTH_BYTES: Final = 4


class _Found(NamedTuple):
    """`taken`: None for a fetch of which nothing counts."""

    taken: Taken | None
    rows: list[Answered]

    def close(self) -> None:
        for row in self.rows:
            close_all(row.slices)


async def fetch_replicas(context: Context, exchange: Exchange) -> AnyResponse:
    preferred(exchange.header(b"accept"), offered=(REPLICA_FETCH,))
    replicas = _replicas_of(context)
    request = await json_body(context, exchange, ReplicaFetch, limit=BODY_MAX_BYTES)
    found = await context.read(_take, replicas, request)
    if found.taken is not None and not found.rows and request.wait_ms:
        found = await _wait(context, exchange, found.taken, wait_ms=request.wait_ms)
    return _framed(found)


async def _wait(context: Context, exchange: Exchange, taken: Taken, *, wait_ms: int) -> _Found:
    loop, found = asyncio.get_running_loop(), _Found(taken, [])
    with LongPoll(context.waiting, exchange, wait_ms=wait_ms) as poll:
        while not (poll.over or found.rows):
            cancel = taken.wait_for_news(partial(call_on_loop, loop, poll.wake))
            try:
                await poll.wait(())
            finally:
                cancel()
            if poll.cancelled:
                break
            await context.access.recheck(exchange)
            found = await context.read(_answer, taken, poll.over)
    return found


def _take(replicas: Replicas, request: ReplicaFetch) -> _Found:
    taken = replicas.take_fetch(request)
    return _Found(None, []) if taken is None else _answer(taken, not request.wait_ms)


def _answer(taken: Taken, is_over: bool) -> _Found:
    return _Found(taken, taken.answer(is_over=is_over))


def _framed(found: _Found) -> FramedResponse:
    taken, rows = found
    slices = [piece for row in rows for piece in row.slices]
    session_id = NO_SESSION if taken is None else taken.session_id
    head = msgspec.json.encode(
        FetchHead(session_id=session_id, partitions=[row.answer for row in rows])
    )
    sizes = (sum(one.answer.size_bytes for one in rows), sum(one.size_bytes for one in slices))
    assert sizes[0] == sizes[1], "a row says how many bytes its slices have"
    prefix = len(head).to_bytes(LENGTH_BYTES, "big") + head
    return FramedResponse(200, [_TYPE, NO_STORE], prefix, tuple(slices))


def _replicas_of(context: Context) -> Replicas:
    cluster = context.broker.cluster
    if cluster is None:
        raise NotInCluster("this broker has no replicas: it was started without --join")
    return cluster.replicas
