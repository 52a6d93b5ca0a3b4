"""The page about transactions: what the coordinators say of each transactional id, and which
producers the logs have in a transaction (Kafka's DescribeTransactions and DescribeProducers).

* Both are asked of all brokers: an id's coordinator and its partitions' leaders may be others.
* A producer in a transaction that no coordinator knows hangs: nobody will end it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from tierlog.api.console.actions import refusal
from tierlog.api.console.all_brokers import ask_all, part_response
from tierlog.api.console.group_pages import in_spans
from tierlog.api.console.rendering import fragment
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.groups.transactions import described, may_see
from tierlog.api.http.responses import Response
from tierlog.api.http.schemas import TransactionState
from tierlog.api.serving.grants import Grant
from tierlog.broker.broker import Broker
from tierlog.broker.partition.partition import Partition
from tierlog.record_format.errors import TierlogError

SHOWN_MAX: Final = 200
# A producer may begin between the answers of two brokers.
HANGS_AFTER_MS: Final = 60_000


class OpenProducer(msgspec.Struct, frozen=True):
    """A producer in a transaction, as a partition's log has it. `held_back`: how many offsets
    `read_committed` does not reach because of it.
    """

    topic: str
    partition: int
    producer_id: int
    epoch: int
    first_offset: int
    held_back: int
    last_timestamp: int


class TransactionsPart(msgspec.Struct, frozen=True):
    """What a broker knows, as far as it is visible to the token; at most SHOWN_MAX and one each.
    `known`: the producers in a transaction, of all ids.
    """

    transactions: list[TransactionState]
    producers: list[OpenProducer]
    known: list[int]


class ProducerLine(NamedTuple):
    """`transactional_id`: empty if the token may not see it."""

    producer: OpenProducer
    transactional_id: str
    hangs: bool


async def transactions(context: Context, exchange: Exchange) -> Response:
    own = await context.read(_part, context.broker, exchange.grant)
    if exchange.is_forwarded:
        return part_response(own)
    asked = await ask_all(context, exchange, TransactionsPart)
    parts = [own, *asked.found.values()]
    found = sorted((one for part in parts for one in part.transactions), key=_oldest_first)
    producers = _lines(parts, now_ms=context.broker.clock(), is_whole=not asked.silent)
    return fragment(
        "transactions.html",
        transactions=[(one, in_spans(one.partitions)) for one in found[: SHOWN_MAX + 1]],
        producers=producers[: SHOWN_MAX + 1],
        shown_max=SHOWN_MAX,
        silent=asked.silent,
        refusal=refusal(exchange.grant, "GET", "/v1/transactions"),
    )


def _oldest_first(one: TransactionState) -> tuple[float, str]:
    return (1 if one.age_ms is None else -one.age_ms), one.transactional_id


def _part(broker: Broker, grant: Grant) -> TransactionsPart:
    """Raises what loading the coordinators' log does. First the logs: a producer that begins in
    between is known.
    """
    producers = sorted(_open_producers(broker, grant), key=lambda one: -one.held_back)
    broker.transactions.log.load()
    found, now_ms = broker.transactions.coordinator.transactions(), broker.clock()
    shown = [described(one, grant, now_ms) for one in found if may_see(grant, one.transactional_id)]
    return TransactionsPart(
        sorted(shown, key=_oldest_first)[: SHOWN_MAX + 1],
        producers[: SHOWN_MAX + 1],
        [one.producer_id for one in found if one.is_open],
    )


def _open_producers(broker: Broker, grant: Grant) -> Iterator[OpenProducer]:
    for partition in broker.partitions():
        if grant.sees_topic(partition.topic):
            with suppress(TierlogError):  # it is not served, and its own page says why
                yield from _open_in(partition)


def _open_in(partition: Partition) -> Iterator[OpenProducer]:
    now = partition.offsets()
    if now.last_stable_offset == now.high_watermark:
        return
    partition.check_leadership()
    for one in partition.producers():
        if one.is_in_transaction:
            first = one.transaction_first_offset
            yield OpenProducer(
                partition.topic,
                partition.number,
                one.producer_id,
                one.epoch,
                first,
                max(0, now.high_watermark - first),
                one.last_timestamp,
            )


def _lines(parts: Iterable[TransactionsPart], *, now_ms: int, is_whole: bool) -> list[ProducerLine]:
    """`is_whole`: all coordinators have answered."""
    parts = list(parts)
    known = {producer_id for part in parts for producer_id in part.known}
    names = {one.producer_id: one.transactional_id for part in parts for one in part.transactions}
    lines = [
        ProducerLine(
            one,
            names.get(one.producer_id, ""),
            is_whole
            and one.producer_id not in known
            and now_ms - one.last_timestamp > HANGS_AFTER_MS,
        )
        for part in parts
        for one in part.producers
    ]
    return sorted(lines, key=lambda line: -line.producer.held_back)
