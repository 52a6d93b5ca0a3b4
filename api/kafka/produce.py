"""Produce: a partition's batch goes from the frame to its log, checked once.

* The batch is never copied: the memoryview of the frame is what is checked, stamped and written. It
  is compressed anew only where the topic's `compression.type` says so.
* A request is checked on the event loop if that is little work, otherwise in a thread; what follows
  it on its connection waits for that, so that appends are queued in the order of the requests.
* One callback a request, made by the thread that completes its last append.
* A partition that fails has its code in the answer; the others are appended. With acks=0 there is
  no answer: the connection ends.
* A transaction's first batch in a partition waits until the coordinator has noted the partition,
  for a client of V2 (KIP-890), or has said that it is noted, where another broker coordinates; or
  until it is loaded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final

from tierlog.api.kafka.calls import Answer, Call, EndConnection, Later
from tierlog.api.kafka.error_codes import Code, Refused, code_of, text_of
from tierlog.api.kafka.groups import check_transactional_id
from tierlog.api.kafka.nodes import node_of
from tierlog.api.kafka.partitions import topic_of, topic_of_id
from tierlog.api.kafka.settings import MIB
from tierlog.api.kafka.transactions import begin_in, transactions_of
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.produced_batches import (
    check_batches,
    is_small_uncompressed_batch,
    limits_of,
    stays_as_produced,
)
from tierlog.api.serving.workers import call_on_loop
from tierlog.broker.data_folder.data_folder import TopicPartition
from tierlog.broker.partition.partition import Partition
from tierlog.broker.transaction_coordinator.transaction import ProducerEpoch
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.hot_tier.producer_state import Verify
from tierlog.record_format import codecs
from tierlog.record_format.batch import TRANSACTIONAL_BIT
from tierlog.record_format.errors import (
    InvalidRecord,
    LogOfflineError,
    NotLeader,
    RequestTooLarge,
    TierlogError,
    TransactionRefused,
)
from tierlog.record_format.kafka_messages.messages import (
    ProduceRequest,
    ProduceResponse,
)
from tierlog.record_format.produced import ProducedBatches

_ACKS: Final = {acks.value: acks for acks in Acks}
_BY_ID: Final = 13  # the first version that names topics by their ids
_WITH_ZSTD: Final = 7
_WITH_LEADERS: Final = 10  # who leads instead (KIP-951)
_KNOWS_ABORTABLE: Final = 11
_ADDS_PARTITIONS: Final = 12  # to the transaction (KIP-890)
_COMES_AGAIN: Final = frozenset(
    {
        Code.CONCURRENT_TRANSACTIONS,
        Code.COORDINATOR_LOAD_IN_PROGRESS,
        Code.COORDINATOR_NOT_AVAILABLE,
        Code.NOT_COORDINATOR,
    }
)
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

    @property
    def place(self) -> TopicPartition:
        assert self.partition is not None, "it was found"
        return self.partition.topic, self.partition.number

    @property
    def producer(self) -> ProducerEpoch:
        assert self.produced is not None, "it was checked"
        header = self.produced.headers[0]
        return ProducerEpoch(header.producer_id, header.producer_epoch)


def produce(
    call: Call, request: ProduceRequest
) -> Answer | Later | Coroutine[Any, Any, Answer | Later]:
    work = _Produce(call, request)
    if not (work.is_small and work.check_inline()):
        return work.check_in_thread()
    return work.begin_transactions() if work.waits_for_coordinator else work.append()


class _Produce:
    def __init__(self, call: Call, request: ProduceRequest) -> None:
        self._call, self._request = call, request
        self._acks = _ACKS.get(request.acks)
        self._transactional_id = request.transactional_id
        self._refusal = (
            None
            if request.transactional_id is None
            else check_transactional_id(call, request.transactional_id)
        )
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
            if self._refusal is not None:
                raise Refused(self._refusal)
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
        if sum([len(piece.records) for piece in self._pieces]) <= _INLINE_COMPRESSED_BYTES:
            return True  # whatever it holds
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
        return await self.begin_transactions() if self.waits_for_coordinator else self.append()

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
        config = partition.config
        limits = limits_of(
            config,
            now_ms=self._call.context.broker.clock(),
            expanded_max_bytes=expanded_max_bytes,
            batch_max_bytes=expanded_max_bytes,
            records=self._call.context.settings.records_max,
            transactions=True,
            check_values=self._call.context.broker.schema_validation.checks(
                partition.topic, config.schema_validation
            ),
        )
        if self._transactional_id is None:
            _refuse_transactions(records)
        produced = check_batches(records, limits, config.compression_type)
        if len(produced.headers) > 1:
            raise InvalidRecord("a partition's records must be one batch")
        if produced.headers[0].codec == codecs.ZSTD and self._call.version < _WITH_ZSTD:
            detail = f"zstd needs version {_WITH_ZSTD} of Produce"
            raise Refused(Code.UNSUPPORTED_COMPRESSION_TYPE, detail)
        return produced

    # --- transactions -----------------------------------------------------------------------------

    @property
    def waits_for_coordinator(self) -> bool:
        transactional_id = self._transactional_id
        if transactional_id is None or not any(map(_is_transactional, self._pieces)):
            return False
        transactions = transactions_of(self._call)
        if not transactions.log.is_ready_for(transactional_id):
            return True
        asks = self._call.version >= _ADDS_PARTITIONS or not transactions.is_here(transactional_id)
        return asks and any(self._new_pieces(transactional_id))

    def _new_pieces(self, transactional_id: str) -> Iterator[_Piece]:
        """Those whose partitions are not in the transaction yet."""
        transactions = transactions_of(self._call)
        for piece in filter(_is_transactional, self._pieces):
            try:
                transactions.check_takes_part(transactional_id, piece.producer, piece.place)
            except TransactionRefused:
                yield piece

    async def begin_transactions(self) -> Answer | Later:
        """Have the partitions that are new in the transaction noted, or, by clients before V2,
        looked for where another broker coordinates; then append.
        """
        transactional_id, new = self._transactional_id, list[_Piece]()
        assert transactional_id is not None, "it has transactional batches"
        transactions, adds = transactions_of(self._call), self._call.version >= _ADDS_PARTITIONS
        try:
            if not transactions.log.is_ready_for(transactional_id):
                await self._call.context.write(transactions.log.prepare_for, transactional_id)
            if adds or not transactions.is_here(transactional_id):
                new = list(self._new_pieces(transactional_id))
            if new:
                places, producer = [piece.place for piece in new], new[0].producer
                await begin_in(self._call, transactional_id, producer, places, adds=adds)
        except (TierlogError, OSError) as error:
            for piece in new or filter(_is_transactional, self._pieces):
                piece.error, piece.produced = error, None
        return self.append()

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
                    piece.appended = piece.partition.append(
                        piece.produced, acks=self._acks, verify=self._verify(piece)
                    )
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
        if self._acks is Acks.ALL and any(map(_is_replicated, self._pieces)):
            self._expire(later, complete)
        return later

    def _expire(self, later: Later, complete: Callable[[], None]) -> None:
        """Answer once the client's time is over: replicas in sync may be silent for longer."""

        def expire() -> None:
            for piece in self._pieces:
                if piece.appended is not None and not piece.appended.done():
                    piece.appended, piece.error = None, Refused(Code.REQUEST_TIMED_OUT)
            complete()

        timer = later.get_loop().call_later(max(0, self._request.timeout_ms) / 1000, expire)
        later.add_done_callback(lambda _: timer.cancel())

    def _verify(self, piece: _Piece) -> Verify | None:
        if self._transactional_id is None:
            return None
        return transactions_of(self._call).verify(self._transactional_id, piece.place)

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
                    partition_responses=[
                        _result(next(pieces), self._call.version) for _ in topic.partition_data
                    ],
                )
                for topic in self._request.topic_data
            ],
            node_endpoints=self._leaders() if self._call.version >= _WITH_LEADERS else [],
        )

    def _leaders(self) -> list[ProduceResponse.NodeEndpoint]:
        """Of the partitions that other brokers lead."""
        found = {node_of(piece.error) for piece in self._pieces if piece.error is not None}
        return [ProduceResponse.NodeEndpoint(*one) for one in found if one is not None]


def _refuse_transactions(records: memoryview) -> None:
    if len(records) > _ATTRIBUTES_AT and records[_ATTRIBUTES_AT] & TRANSACTIONAL_BIT:
        detail = "a batch of a transaction, without a transactional id"
        raise Refused(Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, detail)


def _is_transactional(piece: _Piece) -> bool:
    return piece.produced is not None and piece.produced.headers[0].is_transactional


def _is_replicated(piece: _Piece) -> bool:
    return piece.partition is not None and piece.partition.term is not None


def _work_bytes(piece: _Piece) -> int:
    """Estimate the work of checking it, in bytes of an uncompressed batch of few records."""
    if piece.partition is None:
        return 0
    if piece.partition.config.schema_validation != "none":  # a schema may have to be looked for
        return _INLINE_BYTES + 1
    size_bytes = len(piece.records)
    is_plain = is_small_uncompressed_batch(piece.records)
    if is_plain and stays_as_produced(piece.partition.config.compression_type):
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


def _result(piece: _Piece, version: int) -> ProduceResponse.PartitionProduceResponse:
    if piece.error is not None or piece.appended is None:
        return _failure(piece.number, piece.error, version)
    result = piece.appended.result()
    time_ms = result.log_append_time
    return ProduceResponse.PartitionProduceResponse(
        index=piece.number,
        base_offset=result.base_offset,
        log_append_time_ms=-1 if time_ms is None else time_ms,
        log_start_offset=result.log_start_offset,
    )


def _produce_code(code: Code, version: int) -> Code:
    """What Kafka's partition leader makes of its transaction's coordinator's refusal."""
    if code is Code.PRODUCER_FENCED:
        return Code.INVALID_PRODUCER_EPOCH
    if code is Code.TRANSACTION_ABORTABLE and version < _KNOWS_ABORTABLE:
        return Code.INVALID_TXN_STATE
    if code is Code.CONCURRENT_TRANSACTIONS and version >= _ADDS_PARTITIONS:
        return code
    return Code.NOT_ENOUGH_REPLICAS if code in _COMES_AGAIN else code


def _failure(
    number: int, error: BaseException | None, version: int
) -> ProduceResponse.PartitionProduceResponse:
    assert error is not None, "it was appended or refused"
    records = error.records if isinstance(error, InvalidRecord) else ()
    text = text_of(error)
    failed = ProduceResponse.PartitionProduceResponse(
        index=number,
        error_code=_produce_code(code_of(error), version),
        base_offset=-1,
        record_errors=[ProduceResponse.BatchIndexAndErrorMessage(one, text) for one in records],
        error_message=text,
    )
    if isinstance(error, NotLeader) and version >= _WITH_LEADERS:
        failed.current_leader = ProduceResponse.LeaderIdAndEpoch(error.node_id, error.leader_epoch)
    return failed
