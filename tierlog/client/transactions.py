"""`client.transaction()`: records and offsets, of which readers see all or none.

Rules that keep it honest:

* The broker is asked for the producer's id and epoch once, at the first `with`; each end answers
  with those of the next transaction. So a process that was fenced stays fenced: asking again, it
  would fence its successor.
* The records are sent as any producer's, batched and each once. After the first that fails, or an
  offset that is refused, nothing more is sent, and the transaction can only be aborted.
* An end whose answer was lost is asked for again, over a broker's restart. If it remains unknown,
  the error says so, and a new `transaction` with the id finds out: what was not committed is
  aborted by its beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from tierlog.client import responses
from tierlog.client.async_producer import AsyncProducer
from tierlog.client.batching import Batching, Delivery, RecordMetadata
from tierlog.client.exchange import (
    RESTART_TIMEOUT_S,
    UNLIMITED_ATTEMPTS,
    Call,
    RetryPolicy,
    Steps,
    exchange,
)
from tierlog.client.group_calls import OffsetCommit, offset_rows
from tierlog.client.producer import Producer
from tierlog.client.records import HeadersLike, NewRecord, Time, Value, as_records
from tierlog.client.responses import ProducerIdentity, json_reader, no_content
from tierlog.client.sender import Within
from tierlog.client.wire import Request, Subject, json_request, path_segment, query
from tierlog.record_format.encode import NO_HEADERS
from tierlog.record_format.errors import ProducerFenced, TierlogError

if TYPE_CHECKING:
    import asyncio

    from tierlog.client.client import AsyncClient, Client

log = logging.getLogger(__name__)

# --- calls ----------------------------------------------------------------------------------------


def begin_transactions(
    transactional_id: str, *, timeout_ms: int | None = None
) -> Call[ProducerIdentity]:
    """Fence the producer that used the id before, and abort the transaction that it left open.
    Returns the producer to go on with, at once or when that is done.
    """
    body: dict[str, object] = {"transactional_id": transactional_id}
    if timeout_ms is not None:
        body["timeout_ms"] = timeout_ms
    request = json_request("POST", "/v1/transactions", body, Subject())
    return Call(request, json_reader(ProducerIdentity))


def end_transaction(
    within: Within, *, commit: bool, together: Sequence[Within] = ()
) -> Call[ProducerIdentity]:
    """Returns the producer of the next transaction. `together`: those of other ids, committed by
    the same decision. Idempotent. Raises ProducerFenced.
    """
    path = f"{_path(within.transactional_id)}/{'commit' if commit else 'abort'}"
    body = _fields(within.identity)
    if together:
        body["together"] = [
            {"transactional_id": one.transactional_id, **_fields(one.identity)} for one in together
        ]
    request = json_request("POST", path, body, Subject())
    return Call(request, json_reader(ProducerIdentity))


def commit_offsets_within(
    within: Within,
    group: str,
    offsets: Iterable[OffsetCommit],
    *,
    member_id: str = "",
    generation: int = -1,
) -> Call[None]:
    """Commit offsets that count once the transaction is committed. Idempotent."""
    body = {
        **_fields(within.identity),
        "group": group,
        "offsets": offset_rows(offsets),
        "member_id": member_id,
        "generation": generation,
    }
    request = json_request("POST", f"{_path(within.transactional_id)}/offsets", body, Subject())
    return Call(request, no_content)


def list_transactions(
    *, state: str | None = None, after: str | None = None
) -> Call[responses.TransactionPage]:
    """A page of the transactional ids by name; the next one is `after` its `next_after`."""
    request = Request("GET", "/v1/transactions", query(state=state, after=after))
    return Call(request, json_reader(responses.TransactionPage))


def describe_transaction(transactional_id: str) -> Call[responses.TransactionDescription]:
    """An id's producer, and its last transaction. Raises UnknownTransaction."""
    request = Request("GET", _path(transactional_id))
    return Call(request, json_reader(responses.TransactionDescription))


def _path(transactional_id: str) -> str:
    return f"/v1/transactions/{path_segment(transactional_id, what='a transactional id')}"


def _fields(identity: ProducerIdentity) -> dict[str, object]:
    return {"producer_id": identity.producer_id, "producer_epoch": identity.producer_epoch}


# --- what both have -------------------------------------------------------------------------------


class _TransactionCore:
    """Whether it can begin, and how it begins and ends."""

    _client: Any

    def __init__(
        self,
        client: Any,
        transactional_id: str,
        *,
        timeout_ms: int | None = None,
        batching: Batching | None = None,
    ) -> None:
        self._begin_call: Final = begin_transactions(transactional_id, timeout_ms=timeout_ms)
        self._client, self._batching = client, batching
        self.transactional_id: Final = transactional_id
        self._identity: ProducerIdentity | None = None
        self._within: Within | None = None  # while one is in progress
        self._unusable: TierlogError | None = None
        self._refused: TierlogError | None = None  # offsets of the one in progress

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.transactional_id!r} of {self._client!r}>"

    @property
    def _in_progress(self) -> Within:
        if self._within is None:
            raise RuntimeError("no transaction is in progress: use it in a `with`")
        return self._within

    def _begin(self) -> Steps[Within]:
        if self._within is not None:
            raise RuntimeError("its transaction is in progress")
        if isinstance(self._unusable, ProducerFenced):
            raise ProducerFenced(str(self._unusable))
        if self._unusable is not None:
            detail = "how its last transaction ended is unknown; create a new one"
            raise RuntimeError(detail) from self._unusable
        if self._identity is None:
            self._identity = yield from exchange(self._begin_call, self._client.retries)
        self._within, self._refused = Within(self.transactional_id, self._identity), None
        return self._within

    def _end(self, *, commit: bool) -> Steps[None]:
        within, self._within = self._in_progress, None
        call = end_transaction(within, commit=commit)
        try:
            self._identity = yield from exchange(call, _until_told(self._client.retries))
        except TierlogError as error:
            self._unusable = error
            raise

    def _abort(self) -> Steps[None]:
        """What was raised before is more important than why it could not be aborted: the broker
        does it after the time-out.
        """
        try:
            yield from self._end(commit=False)
        except TierlogError as error:
            log.warning("transaction %r was not aborted: %s", self.transactional_id, error)

    def _commit_offsets(self, call: Call[None]) -> Steps[None]:
        try:
            yield from exchange(call, self._client.retries)
        except TierlogError as error:
            self._refused = error
            raise


def _until_told(policy: RetryPolicy) -> RetryPolicy:
    """A policy of one attempt stays at one."""
    if policy.attempts == 1:
        return policy
    deadline_s = max(policy.deadline_s, RESTART_TIMEOUT_S)
    return replace(policy, attempts=UNLIMITED_ATTEMPTS, deadline_s=deadline_s)


class _Aborted(RuntimeError):
    """Of a record that was not sent, since its transaction was aborted before."""


class Transaction(_TransactionCore):
    """The transactions of one id, one after the other: each `with` is one.

    Leaving the `with` commits; an exception aborts, and so does a record that failed, whose error
    is raised.
    """

    _client: Client
    _producer: Producer

    def __enter__(self) -> Self:
        within = self._client.run(self._begin())
        self._producer = Producer(self._client, self._batching, within=within)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._producer.abandon(_Aborted("the transaction was aborted"))
            self._client.run(self._abort())
            return
        self._producer.close()
        if (failure := self._producer.first_failure or self._refused) is not None:
            self._client.run(self._abort())
            raise failure
        self._client.run(self._end(commit=True))

    def send(
        self,
        topic: str,
        value: Value,
        *,
        key: Value = None,
        timestamp: Time | None = None,
        headers: HeadersLike = NO_HEADERS,
        partition: int | None = None,
    ) -> Delivery:
        """Buffer one record, as a producer's `send`."""
        self._in_progress  # noqa: B018  raises
        return self._producer.send(
            topic, value, key=key, timestamp=timestamp, headers=headers, partition=partition
        )

    def produce(
        self, topic: str, records: Iterable[NewRecord | Value], *, partition: int | None = None
    ) -> list[RecordMetadata]:
        """Append records, and return where each is."""
        sent = [
            self.send(
                topic,
                one.value,
                key=one.key,
                timestamp=one.timestamp,
                headers=one.headers,
                partition=partition if one.partition is None else one.partition,
            )
            for one in as_records(records)
        ]
        self._producer.flush()
        return [delivery.result() for delivery in sent]

    def commit_offsets(
        self,
        group: str,
        offsets: Iterable[OffsetCommit],
        *,
        member_id: str = "",
        generation: int = -1,
    ) -> None:
        """Commit a group's offsets with the transaction. While the group has members: as one."""
        call = commit_offsets_within(
            self._in_progress, group, offsets, member_id=member_id, generation=generation
        )
        self._client.run(self._commit_offsets(call))


class AsyncTransaction(_TransactionCore):
    """As `Transaction`, with `async with`."""

    _client: AsyncClient
    _producer: AsyncProducer

    async def __aenter__(self) -> Self:
        within = await self._client.run(self._begin())
        self._producer = AsyncProducer(self._client, self._batching, within=within)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            await self._producer.abandon(_Aborted("the transaction was aborted"))
            await self._client.run(self._abort())
            return
        await self._producer.aclose()
        if (failure := self._producer.first_failure or self._refused) is not None:
            await self._client.run(self._abort())
            raise failure
        await self._client.run(self._end(commit=True))

    async def send(
        self,
        topic: str,
        value: Value,
        *,
        key: Value = None,
        timestamp: Time | None = None,
        headers: HeadersLike = NO_HEADERS,
        partition: int | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Buffer one record, as a producer's `send`."""
        self._in_progress  # noqa: B018  raises
        return await self._producer.send(
            topic, value, key=key, timestamp=timestamp, headers=headers, partition=partition
        )

    async def produce(
        self, topic: str, records: Iterable[NewRecord | Value], *, partition: int | None = None
    ) -> list[RecordMetadata]:
        """Append records, and return where each is."""
        sent = [
            await self.send(
                topic,
                one.value,
                key=one.key,
                timestamp=one.timestamp,
                headers=one.headers,
                partition=partition if one.partition is None else one.partition,
            )
            for one in as_records(records)
        ]
        await self._producer.flush()
        return [await future for future in sent]

    async def commit_offsets(
        self,
        group: str,
        offsets: Iterable[OffsetCommit],
        *,
        member_id: str = "",
        generation: int = -1,
    ) -> None:
        """Commit a group's offsets with the transaction. While the group has members: as one."""
        call = commit_offsets_within(
            self._in_progress, group, offsets, member_id=member_id, generation=generation
        )
        await self._client.run(self._commit_offsets(call))
