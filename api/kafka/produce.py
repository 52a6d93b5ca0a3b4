"""Produce: a partition's batch goes from the frame to its log, checked once.

* The batch is never copied: the memoryview of the frame is what is checked, stamped and written. It
  is compressed anew only where the topic's `compression.type` says so.
* A request is checked on the event loop if that is little work, otherwise in a thread; what follows
  it on its connection waits for that, so that appends are queued in the order of the requests.
* One callback a request, made by the thread that completes its last append.
* A partition that fails has its code in the answer; the others are appended. With acks=0 there is
  no answer: the connection ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final

from tierlog.api.kafka.calls import Answer, Call, EndConnection, Later
from tierlog.api.kafka.error_codes import Code, Refused, code_of, text_of
from tierlog.api.kafka.partitions import topic_of, topic_of_id
from tierlog.api.kafka.settings import MIB
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.produced_batches import (
    check_batches,
    is_small_uncompressed_batch,
    limits_of,
    stays_as_produced,
)
from tierlog.api.serving.workers import call_on_loop
from tierlog.broker.partition import Partition
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.record_format import codecs
from tierlog.record_format.batch import TRANSACTIONAL_BIT
from tierlog.record_format.errors import (
    InvalidRecord,
    LogOfflineError,
    RequestTooLarge,
    TierlogError,
)
from tierlog.record_format.kafka_messages.messages import (
    ProduceRequest,
    ProduceResponse,
)
from tierlog.record_format.produced import ProducedBatches

_ACKS: Final = {acks.value: acks for acks in Acks}
_BY_ID: Final = 13  # the first version that names topics by their ids
_WITH_ZSTD: Final = 7
_ATTRIBUTES_AT: Final = 22  # in a batch, of those that are in use
_INLINE_BYTES: Final = MIB  # of uncompressed batches, checked on the event loop
_INLINE_COMPRESSED_BYTES: Final = 16 << 10
_EXPANDED_PER_BYTE: Final = _INLINE_BYTES // _INLINE_COMPRESSED_BYTES
# Kafka's Topic.isInternal: written by the broker alone.
_INTERNAL: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


class _Piece:
    """The records of one partition on their way to its log."""

    __slots__ = ("appended", "error", "number", "partition", "produced", "records")

    def __init__(self, number: int, records: memoryview) -> None:
        self.number, self.records = number, records
        self.partition: Partition | None = None
        self.produced: ProducedBatches | None = None
        self.appended: Future[AppendResult] | None = None
        self.error: BaseException | None = None


def produce(
    call: Call, request: ProduceRequest
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    work = _Produce(call, request)
    if work.is_small and work.check_inline():
        return work.append()
    return work.check_in_thread()


class _Produce:
    def __init__(self, call: Call, request: ProduceRequest) -> None:
        self._call, self._request = call, request
        self._acks = _ACKS.get(request.acks)
        self._pieces = [
            self._found(topic, data)
            for topic in request.topic_data
            for data in topic.partition_data
        ]

    def _found(
        self,
        topic: ProduceRequest.TopicProduceData,
        data: ProduceRequest.PartitionProduceData,
    ) -> _Piece:
        records = data.records
        piece = _Piece(data.index, records if isinstance(records, memoryview) else memoryview(b""))
        try:
            if self._acks is None:
                raise Refused(Code.INVALID_REQUIRED_ACKS, f"acks is {self._request.acks}")
            piece.partition = self._partition(topic, data.index)
        except TierlogError as error:
            piece.error = error
        return piece

    def _partition(self, topic: ProduceRequest.TopicProduceData, number: int) -> Partition:
        call, scopes = self._call, (Scope.PRODUCE,)
        found = (
            topic_of(call, topic.name, scopes)
            if call.version < _BY_ID
            else topic_of_id(call, topic.topic_id, scopes)
        )
        if found.record.name in _INTERNAL:
            raise Refused(Code.INVALID_TOPIC_EXCEPTION, f"{found.record.name} is internal")
        return found.partition(number)

    # --- checking ---------------------------------------------------------------------------------

    @property
    def is_small(self) -> bool:
        return sum([_work_bytes(piece) for piece in self._pieces]) <= _INLINE_BYTES

    def check_inline(self) -> bool:
        """False if a batch expands so far that a thread has to check it."""
        self.check(expanded_max_bytes=_INLINE_BYTES)
        return not any(
            isinstance(piece.error, RequestTooLarge) and piece.error.limit_bytes == _INLINE_BYTES
            for piece in self._pieces
        )

    async def check_in_thread(self) -> Answer | Later:
        most = self._call.context.settings.expanded_max_bytes
        await self._call.context.parse(self.check, expanded_max_bytes=most)
        return self.append()

    def check(self, *, expanded_max_bytes: int) -> None:
        for piece in self._pieces:
            if piece.partition is not None:
                piece.error = piece.produced = None
                try:
                    piece.produced = self._checked(
                        piece.partition, piece.records, expanded_max_bytes
                    )
                except TierlogError as error:
                    piece.error = error

    def _checked(
        self, partition: Partition, records: memoryview, expanded_max_bytes: int
    ) -> ProducedBatches:
        config = partition.log.config
        limits = limits_of(
            config,
            now_ms=self._call.context.broker.clock(),
            expanded_max_bytes=expanded_max_bytes,
            batch_max_bytes=expanded_max_bytes,
            records=self._call.context.settings.records_max,
        )
        _refuse_transactions(records)
        produced = check_batches(records, limits, config.compression_type)
        if len(produced.headers) > 1:
            raise InvalidRecord("a partition's records must be one batch")
        if produced.headers[0].codec == codecs.ZSTD and self._call.version < _WITH_ZSTD:
            detail = f"zstd needs version {_WITH_ZSTD} of Produce"
            raise Refused(Code.UNSUPPORTED_COMPRESSION_TYPE, detail)
        return produced

    # --- appending --------------------------------------------------------------------------------

    def append(self) -> Answer | Later:
        """Queue all appends. The answer follows once they are done."""
        for piece in self._pieces:
            if (
                piece.partition is not None
                and piece.produced is not None
                and self._acks is not None
            ):
                try:
                    piece.appended = piece.partition.append(piece.produced, acks=self._acks)
                except TierlogError as error:
                    piece.error = error
        waits = [piece.appended for piece in self._pieces if piece.appended is not None]
        if not waits:
            return self._answer()
        later: Later = asyncio.get_running_loop().create_future()

        def complete() -> None:
            if later.done():
                return  # the client is gone
            try:
                later.set_result(self._answer())
            except EndConnection as end:
                later.set_exception(end)

        _when_all_done(waits, complete)
        return later

    def _answer(self) -> Answer:
        for piece in self._pieces:
            if piece.appended is not None and (error := piece.appended.exception()) is not None:
                piece.error = _cause(piece.partition, error)
        if self._acks is Acks.NONE:
            for piece in self._pieces:
                if piece.error is not None:
                    raise EndConnection(f"acks=0, and partition {piece.number}: {piece.error}")
            return None
        pieces = iter(self._pieces)
        return ProduceResponse(
            responses=[
                ProduceResponse.TopicProduceResponse(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partition_responses=[_result(next(pieces)) for _ in topic.partition_data],
                )
                for topic in self._request.topic_data
            ]
        )


def _refuse_transactions(records: memoryview) -> None:
    if len(records) > _ATTRIBUTES_AT and records[_ATTRIBUTES_AT] & TRANSACTIONAL_BIT:
        raise Refused(Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "transactions are not supported")


def _work_bytes(piece: _Piece) -> int:
    """Estimate the work of checking it, in bytes of an uncompressed batch of few records."""
    if piece.partition is None:
        return 0
    size_bytes = len(piece.records)
    is_plain = is_small_uncompressed_batch(piece.records)
    if is_plain and stays_as_produced(piece.partition.log.config.compression_type):
        return size_bytes
    return size_bytes * _EXPANDED_PER_BYTE


def _when_all_done(futures: Sequence[Future[Any]], complete: Callable[[], None]) -> None:
    """Call `complete` once on the event loop, whatever threads complete the futures."""
    loop, count, last = asyncio.get_running_loop(), itertools.count(1), len(futures)

    def done(_: Future[Any]) -> None:
        if next(count) == last:  # `next` is atomic: one thread sees the last number
            call_on_loop(loop, complete)

    for future in futures:
        future.add_done_callback(done)


def _cause(partition: Partition | None, error: BaseException) -> BaseException:
    """A log may be offline because its topic was deleted, not because its disk failed."""
    if isinstance(error, LogOfflineError) and partition is not None:
        try:
            partition.check_leadership()
        except TierlogError as reason:
            return reason
    return error


def _result(piece: _Piece) -> ProduceResponse.PartitionProduceResponse:
    if piece.error is not None or piece.appended is None:
        return _failure(piece.number, piece.error)
    result = piece.appended.result()
    time_ms = result.log_append_time
    return ProduceResponse.PartitionProduceResponse(
        index=piece.number,
        base_offset=result.base_offset,
        log_append_time_ms=-1 if time_ms is None else time_ms,
        log_start_offset=result.log_start_offset,
    )


def _failure(number: int, error: BaseException | None) -> ProduceResponse.PartitionProduceResponse:
    assert error is not None, "it was appended or refused"
    records = error.records if isinstance(error, InvalidRecord) else ()
    text = text_of(error)
    return ProduceResponse.PartitionProduceResponse(
        index=number,
        error_code=code_of(error),
        base_offset=-1,
        record_errors=[ProduceResponse.BatchIndexAndErrorMessage(one, text) for one in records],
        error_message=text,
    )
