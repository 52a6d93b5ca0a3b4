"""Transactions over HTTP: begin, offsets, commit, abort, and what is shown of them.

* The rules are those of Kafka's clients of V2 (KIP-890): a produce adds its partition, and the
  epoch rises with each end.
* A call that Kafka would tell to come again, since the id's last transaction is still being ended,
  waits for that, `TURN_TIMEOUT_S` at most. An end returns once readers of committed records see it,
  or after that time; decided it is in any case.
* Every call may be repeated after a lost answer. One that begins only fences its own first attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Final, Literal, NoReturn
from urllib.parse import quote

import msgspec
from fastapi import Response
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.http import strict_json
from tierlog.api.http.cluster.splitting import ask_others
from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import (
    JsonResponse,
    TheContext,
    TheExchange,
    TheGrant,
    body_as,
    query_as,
)
from tierlog.api.http.groups.handlers import OffsetsToCommit, new_offsets
from tierlog.api.http.groups.handlers import check_here as check_group_here
from tierlog.api.http.problems import AbortedByShutdown
from tierlog.api.http.schemas import (
    AssignedTopic,
    TransactionalProducer,
    TransactionList,
    TransactionState,
    TransactionSummary,
)
from tierlog.api.serving.grants import Grant, Scope
from tierlog.broker.data_folder.data_folder import TopicPartition
from tierlog.broker.group_coordinator.group_events import Identity
from tierlog.broker.group_coordinator.groups import MAX_NAME_LENGTH
from tierlog.broker.group_coordinator.offset_log import InTransaction
from tierlog.broker.transaction_coordinator.coordinator import CONCURRENT, NONE, Outcome, Reply
from tierlog.broker.transaction_coordinator.transaction import (
    V2,
    ProducerEpoch,
    Transaction,
)
from tierlog.broker.transaction_coordinator.transactions import Transactions
from tierlog.record_format.errors import (
    ConcurrentTransactions,
    Forbidden,
    ProducerFenced,
    RetriableError,
    TransactionRefused,
    UnknownTransaction,
)

TURN_TIMEOUT_S: Final = 10.0
ASK_AGAIN_S: Final = 0.05  # a coordinator elsewhere, whose last transaction is being ended
ID_MAX_LENGTH: Final = 255
PAGE: Final = 1000
TOGETHER_MAX: Final = 10_000
_DEFAULT_TIMEOUT_MS: Final = 60_000  # Kafka's transaction.timeout.ms
_FENCED: Final = frozenset(("PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"))
ProducerId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Epoch = Annotated[int, Meta(ge=0, le=2**15 - 1)]


class TransactionToBegin(msgspec.Struct, forbid_unknown_fields=True):
    """`timeout_ms`: after which the broker aborts a transaction; 60,000 by default."""

    transactional_id: Annotated[str, Meta(min_length=1, max_length=ID_MAX_LENGTH)]
    timeout_ms: Annotated[int, Meta(ge=1, le=2**31 - 1)] | UnsetType = UNSET


class TransactionToEnd(msgspec.Struct, forbid_unknown_fields=True):
    producer_id: ProducerId
    producer_epoch: Epoch


class TransactionPart(TransactionToEnd, kw_only=True, forbid_unknown_fields=True):
    transactional_id: Annotated[str, Meta(min_length=1, max_length=ID_MAX_LENGTH)]


class TransactionToCommit(TransactionToEnd, kw_only=True, forbid_unknown_fields=True):
    """`together`: transactions in progress of other ids, committed by the same decision."""

    together: Annotated[list[TransactionPart], Meta(max_length=TOGETHER_MAX)] = []


class TransactionOffsets(OffsetsToCommit, kw_only=True, forbid_unknown_fields=True):
    """A group's offsets that count once the transaction is committed."""

    group: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    producer_id: ProducerId
    producer_epoch: Epoch


class ListTransactionsQuery(msgspec.Struct, forbid_unknown_fields=True):
    state: (
        Literal[
            "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"
        ]
        | UnsetType
    ) = UNSET
    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = PAGE


# --- a producer's calls ---------------------------------------------------------------------------


async def begin_transactions(
    context: TheContext,
    grant: TheGrant,
    body: Annotated[TransactionToBegin, body_as(TransactionToBegin)],
) -> Response:
    name = body.transactional_id
    grant.check_transactional_id(name)
    transactions = await _ready(context, name)
    timeout_ms = _timeout_ms(body, most=context.broker.settings.transaction_max_timeout_ms)
    begin = partial(
        transactions.coordinator.init_producer, name, timeout_ms=timeout_ms, expected=None
    )
    producer = await _ask(context, (name,), lambda reply: begin(reply=reply))
    return JsonResponse(
        TransactionalProducer(name, *producer),
        status=201,
        headers={"location": f"/v1/transactions/{quote(name, safe='')}"},
    )


def _timeout_ms(body: TransactionToBegin, *, most: int) -> int:
    if body.timeout_ms is UNSET:
        return min(_DEFAULT_TIMEOUT_MS, most)
    if body.timeout_ms > most:
        detail = f"transaction.max.timeout.ms is {most}, and this is {body.timeout_ms}"
        strict_json.refuse_field("timeout_ms", detail)
    return body.timeout_ms


async def commit_transaction(
    context: TheContext,
    grant: TheGrant,
    transactional_id: str,
    body: Annotated[TransactionToCommit, body_as(TransactionToCommit)],
) -> Response:
    if not body.together:
        return await _end(context, grant, transactional_id, body, commit=True)
    parts = {transactional_id: ProducerEpoch(body.producer_id, body.producer_epoch)}
    for index, one in enumerate(body.together):
        if one.transactional_id in parts:
            strict_json.refuse_field(f"together[{index}]", "an id that is named twice")
        parts[one.transactional_id] = ProducerEpoch(one.producer_id, one.producer_epoch)
    for name in parts:
        grant.check_transactional_id(name)
    coordinator = (await _ready(context, transactional_id)).coordinator
    commit = partial(coordinator.commit_together, parts)
    next_producer = await _ask(context, tuple(parts), lambda reply: commit(reply=reply))
    await _settled(context, tuple(parts), TURN_TIMEOUT_S)
    return JsonResponse(TransactionalProducer(transactional_id, *next_producer))


async def abort_transaction(
    context: TheContext,
    grant: TheGrant,
    transactional_id: str,
    body: Annotated[TransactionToEnd, body_as(TransactionToEnd)],
) -> Response:
    return await _end(context, grant, transactional_id, body, commit=False)


async def _end(
    context: Context, grant: Grant, name: str, body: TransactionToEnd, *, commit: bool
) -> Response:
    grant.check_transactional_id(name)
    transactions = await _ready(context, name)
    producer = ProducerEpoch(body.producer_id, body.producer_epoch)
    end = partial(
        transactions.coordinator.end_transaction, name, producer, commit=commit, version=V2
    )
    try:
        next_producer = await _ask(context, (name,), lambda reply: end(reply=reply))
    except TransactionRefused:
        if not (commit and _has_nothing(transactions.coordinator.describe(name), producer)):
            raise
        next_producer = producer
    await _settled(context, (name,), TURN_TIMEOUT_S)
    return JsonResponse(TransactionalProducer(name, *next_producer))


def _has_nothing(found: Transaction | None, producer: ProducerEpoch) -> bool:
    """Whether the producer has added nothing since it began, or since its last end: a commit of
    that is done.
    """
    return found is not None and found.producer == producer and not found.is_open


async def commit_in_transaction(
    context: TheContext,
    grant: TheGrant,
    transactional_id: str,
    body: Annotated[TransactionOffsets, body_as(TransactionOffsets)],
) -> Response:
    grant.check_transactional_id(transactional_id)
    grant.check_scopes((Scope.READ,))  # as for any commit
    offsets = new_offsets(context, grant, body)
    transactions = context.broker.transactions
    place = await context.write(transactions.offsets_place, body.group)
    check_group_here(context, body.group)  # its log is written here, wherever the id's is
    producer = ProducerEpoch(body.producer_id, body.producer_epoch)
    await take_part(context, transactional_id, producer, place)
    try:
        await context.write(
            context.broker.groups.commit_offsets,
            body.group,
            offsets,
            member=Identity(body.member_id, None),
            generation=body.generation,
            within=InTransaction(*producer, transactions.verify(transactional_id, place)),
        )
    except TransactionRefused as refusal:
        raise as_problem(refusal) from refusal
    return Response(status_code=204)


async def take_part(
    context: Context, transactional_id: str, producer: ProducerEpoch, place: TopicPartition
) -> None:
    """Add a partition to the producer's transaction, which begins with the first. Raises what
    `_ask` does.
    """
    transactions = context.broker.transactions
    if not transactions.log.is_ready_for(transactional_id):
        await context.write(transactions.log.prepare_for, transactional_id)
    try:
        transactions.check_takes_part(transactional_id, producer, place)
        return
    except TransactionRefused:
        pass
    if not transactions.is_here(transactional_id):
        await _take_part_elsewhere(transactions, transactional_id, producer, place)
        return
    coordinator = transactions.coordinator
    add = partial(coordinator.add_partitions, transactional_id, producer, (place,), version=V2)
    await _ask(context, (transactional_id,), lambda reply: add(reply=reply))


async def _take_part_elsewhere(
    transactions: Transactions,
    transactional_id: str,
    producer: ProducerEpoch,
    place: TopicPartition,
) -> None:
    """Another broker of the cluster coordinates it. Raises as `take_part`."""
    until_s = time.monotonic() + TURN_TIMEOUT_S
    while True:
        try:
            asked = transactions.take_part(transactional_id, producer, (place,), adds=True)
            await asyncio.wrap_future(asked)
            return
        except TransactionRefused as refusal:
            if refusal.reason != CONCURRENT:
                raise as_problem(refusal) from refusal
        if time.monotonic() >= until_s:
            raise _concurrent(transactional_id)
        await asyncio.sleep(ASK_AGAIN_S)


# --- the coordinator ------------------------------------------------------------------------------


async def _ready(context: Context, transactional_id: str) -> Transactions:
    """The transactions, whose coordinator can be called. Raises what `prepare_for` does; NotLeader
    or LeaderUnknown if another broker of the cluster coordinates this one.
    """
    transactions = context.broker.transactions
    if not transactions.log.is_ready_for(transactional_id):
        await context.write(transactions.log.prepare_for, transactional_id)
    check_here(context, transactional_id)
    return transactions


def check_here(context: Context, transactional_id: str) -> None:
    if context.broker.cluster is not None:
        context.broker.transactions.log.check_here(transactional_id)


async def _ask(
    context: Context, names: Sequence[str], begin: Callable[[Reply], None]
) -> ProducerEpoch:
    """The producer to go on with. Waits for the end of the ids' last transactions.

    Raises ProducerFenced, TransactionRefused, ConcurrentTransactions, and what an append raises.
    """
    until_s = time.monotonic() + TURN_TIMEOUT_S
    while True:
        outcome: Outcome = await context.waiting.answer_later(begin, _as_it_is, stop=_stopped)
        if outcome.reason == NONE:
            return outcome.producer
        if outcome.reason != CONCURRENT:
            raise _error(outcome)
        if not await _settled(context, names, until_s - time.monotonic()):
            raise _concurrent(names[0])


async def _settled(context: Context, names: Sequence[str], timeout_s: float) -> bool:
    """Wait until the ids' last transactions are carried out. False if it takes too long."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            for name in names:
                if not await _is_settled(context, name):
                    return False
    except TimeoutError:
        return False
    return True


async def _is_settled(context: Context, name: str) -> bool:
    """Once it is. False if the server stops before."""
    cancels: list[Callable[[], None]] = []

    def begin(reply: Callable[[bool], None]) -> None:
        coordinator = context.broker.transactions.coordinator
        cancels.append(coordinator.when_settled(name, partial(reply, True)))

    try:
        return await context.waiting.answer_later(begin, bool, stop=lambda: False)
    finally:
        for cancel in cancels:
            cancel()


def _error(outcome: Outcome) -> BaseException:
    cause = outcome.cause
    if isinstance(cause, TransactionRefused):
        return as_problem(cause)
    return cause or RetriableError(f"the transactions' coordinator says {outcome.reason}")


def as_problem(refusal: TransactionRefused) -> Exception:
    """The refusal by the class that says what its client does."""
    if refusal.reason in _FENCED:
        return ProducerFenced(
            f"{refusal}: another producer has begun with this id, or the transaction took longer "
            "than its time-out and was aborted"
        )
    if refusal.reason == CONCURRENT:
        return ConcurrentTransactions(str(refusal))
    return refusal


def _concurrent(name: str) -> ConcurrentTransactions:
    return ConcurrentTransactions(
        f"transactional id {name!r}: its last transaction has not been ended within "
        f"{TURN_TIMEOUT_S:g} s"
    )


def _as_it_is(outcome: Outcome) -> Outcome:
    return outcome


def _stopped() -> NoReturn:
    raise AbortedByShutdown("the broker shut down before the coordinator had answered")


# --- what is shown --------------------------------------------------------------------------------


async def list_transactions(
    context: TheContext,
    grant: TheGrant,
    exchange: TheExchange,
    query: Annotated[ListTransactionsQuery, query_as(ListTransactionsQuery)],
) -> Response:
    await context.read(context.broker.transactions.log.load)
    found = sorted(
        one
        for one in context.broker.transactions.coordinator.transactions()
        if one.transactional_id > query.after
        and query.state in (UNSET, one.state.shown)
        and may_see(grant, one.transactional_id)
    )
    now_ms = context.broker.clock()
    here = [_summary(one, now_ms) for one in found[: query.limit + 1]]
    others = await ask_others(context, exchange, TransactionList)
    rows = [*here, *(one for part in others for one in part.transactions)]
    rows.sort(key=lambda one: one.transactional_id)
    is_last = len(rows) <= query.limit and all(one.next_after is None for one in others)
    page = rows[: query.limit]
    return JsonResponse(TransactionList(page, None if is_last else page[-1].transactional_id))


def may_see(grant: Grant, transactional_id: str) -> bool:
    try:
        grant.check_transactional_id(transactional_id)
    except Forbidden:
        return False
    return True


def _summary(found: Transaction, now_ms: int) -> TransactionSummary:
    return TransactionSummary(
        found.transactional_id,
        found.state.shown,
        found.producer_id,
        found.epoch,
        _age_ms(found, now_ms),
        len(found.partitions),
    )


def _age_ms(found: Transaction, now_ms: int) -> int | None:
    return max(0, now_ms - found.start_ms) if found.is_open else None


async def get_transaction(context: TheContext, grant: TheGrant, transactional_id: str) -> Response:
    grant.check_transactional_id(transactional_id)
    await context.read(context.broker.transactions.log.load_home, transactional_id)
    check_here(context, transactional_id)
    found = context.broker.transactions.coordinator.describe(transactional_id)
    if found is None:
        raise UnknownTransaction(f"there is no transactional id {transactional_id!r}")
    return JsonResponse(described(found, grant, context.broker.clock()))


def described(found: Transaction, grant: Grant, now_ms: int) -> TransactionState:
    return TransactionState(
        found.transactional_id,
        found.state.shown,
        found.producer_id,
        found.epoch,
        found.timeout_ms,
        _age_ms(found, now_ms),
        [
            AssignedTopic(topic, numbers)
            for topic, numbers in found.by_topic.items()
            if grant.sees_topic(topic)
        ],
    )
