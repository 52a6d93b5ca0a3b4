"""Appends to partitions that other brokers of the cluster lead: part of a produce to a topic.

The batches are built and checked here, and sent as they are: the leader has nothing to parse.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from tierlog.api.http import header_values
from tierlog.api.http.cluster.splitting import gateway_of, token_of, while_led_elsewhere
from tierlog.api.http.context import AllCompleted, Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.produce.append import AppendedElsewhere, ProduceRequest
from tierlog.api.http.schemas import Produced
from tierlog.hot_tier.log_writer import AppendResult
from tierlog.record_format.errors import ShuttingDown
from tierlog.record_format.produced import ProducedBatches
from tierlog.record_format.workarounds import decode_json


def append_elsewhere(
    context: Context,
    exchange: Exchange,
    request: ProduceRequest,
    number: int,
    produced: ProducedBatches,
) -> Future[AppendResult]:
    """As an append here, to a partition that another broker leads."""
    appended: Future[AppendResult] = Future()
    task = asyncio.ensure_future(_append(context, exchange, request, number, produced))

    def done(_: object) -> None:
        if task.cancelled():
            appended.set_exception(ShuttingDown("the broker is shutting down"))
        elif (error := task.exception()) is not None:
            appended.set_exception(error)
        else:
            appended.set_result(task.result())

    task.add_done_callback(done)
    return appended


async def _append(
    context: Context,
    exchange: Exchange,
    request: ProduceRequest,
    number: int,
    produced: ProducedBatches,
) -> AppendResult:
    gateway, name = gateway_of(context), request.topic.record.name
    path = f"/v1/topics/{name}/partitions/{number}/records?acks={request.query.acks}"
    headers = [*token_of(exchange), (b"content-type", header_values.BATCHES.encode())]

    async def here() -> AppendResult:
        future = request.topic.partition(number).append(produced, acks=request.acks)
        await AllCompleted([future])
        return future.result()

    async def there(url: str) -> AppendResult:
        sent = gateway.request(
            exchange, url, path.encode(), method="POST", headers=headers, body=produced.body
        )
        answer = await gateway.ask(sent, writes=True)
        if answer.status == 202:
            return AppendedElsewhere(-1, -1, None, duplicate=False, log_start_offset=-1)
        (one,) = decode_json(answer.body, Produced).results
        return AppendedElsewhere(
            one.base_offset,
            one.last_offset,
            one.log_append_time,
            duplicate=one.duplicate,
            log_start_offset=-1,
        )

    return await while_led_elsewhere(context, here, there)
