"""A transaction's calls: InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit,
EndTxn, WriteTxnMarkers; and what is shown of them: DescribeTransactions, ListTransactions.

* The coordinator answers, from the thread that flushed what the answer rests on.
* A client that knows V2 (KIP-890) says so by the versions of EndTxn, TxnOffsetCommit and Produce
  that it uses: the last two then add what they write to.
"""

from __future__ import annotations

from asyncio import wrap_future
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from tierlog.api.kafka.calls import Answer, Call, Later
from tierlog.api.kafka.error_codes import Code, Refused, code_of
from tierlog.api.kafka.group_offsets import (
    CheckedOffsets,
    CommitPartition,
    CommitTopic,
    group_code,
)
from tierlog.api.kafka.groups import (
    check_group,
    check_transactional_id,
    coordinator_code,
    prepare_for,
    when_ready,
)
from tierlog.api.kafka.partitions import ADMINISTERING, refusal_of, topic_of
from tierlog.api.kafka.patterns import compiled_pattern
from tierlog.api.serving.grants import Scope
from tierlog.broker.data_folder.data_folder import TopicPartition
from tierlog.broker.group_coordinator.group_events import Identity
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.group_coordinator.offset_log import InTransaction
from tierlog.broker.transaction_coordinator.coordinator import (
    Outcome,
    Reply,
    TransactionCoordinator,
)
from tierlog.broker.transaction_coordinator.transaction import (
    V1,
    V2,
    ProducerEpoch,
    State,
    Transaction,
)
from tierlog.broker.transaction_coordinator.transactions import COORDINATOR_EPOCH, Transactions
from tierlog.hot_tier.producer_state import new_producer_id
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import (
    GroupRefused,
    LeaderUnknown,
    PeerUnavailable,
    ShuttingDown,
    TierlogError,
    TooLarge,
    TransactionRefused,
)
from tierlog.record_format.kafka_messages.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

Handled = Answer | Later | Coroutine[Any, Any, Answer | Later]

_NO_PRODUCER: Final = ProducerEpoch(-1, -1)
_STOPPED: Final = Outcome("NOT_COORDINATOR")
_STATES: Final = frozenset({one.shown for one in State} | {"Dead", "PrepareEpochFence"})
# The first versions that know PRODUCER_FENCED (KIP-588), and those of V2 (KIP-890).
_FENCED_FROM: Final = {
    "InitProducerId": 4,
    "AddPartitionsToTxn": 2,
    "AddOffsetsToTxn": 2,
    "EndTxn": 2,
}
_V2_FROM: Final = {"TxnOffsetCommit": 5, "EndTxn": 5}
_BATCHED_FROM: Final = 4  # AddPartitionsToTxn: of brokers

_AddTopic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
_AddedTopic = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
_AddedPartition = AddPartitionsToTxnResponse.AddPartitionsToTxnPartitionResult
_Described = DescribeTransactionsResponse.TransactionState


def transactions_of(call: Call) -> Transactions:
    return call.context.broker.transactions


def _coordinator_of(call: Call) -> TransactionCoordinator:
    return transactions_of(call).coordinator


def _code(call: Call, api: str, reason: str) -> Code:
    if reason == "PRODUCER_FENCED" and call.version < _FENCED_FROM.get(api, 0):
        return Code.INVALID_PRODUCER_EPOCH
    return Code[reason]


def _version(call: Call, api: str) -> int:
    return V2 if call.version >= _V2_FROM[api] else V1


def _ask(
    call: Call,
    transactional_id: str,
    begin: Callable[[Reply], None],
    answer: Callable[[Outcome], Answer],
    refuse: Callable[[Code], Answer],
) -> Handled:
    """The answer that follows from the coordinator's, once it can be called."""

    def make() -> Later:
        return call.context.waiting.answer_later(begin, answer, stop=lambda: answer(_STOPPED))

    return when_ready(call, transactions_of(call).log, transactional_id, make, refuse)


async def ask(call: Call, begin: Callable[[Reply], None]) -> Outcome:
    """The coordinator's answer; it can be called."""
    return await call.context.waiting.answer_later(
        begin, lambda outcome: outcome, stop=lambda: _STOPPED
    )


# --- InitProducerId -------------------------------------------------------------------------------


def init_producer_id(call: Call, request: InitProducerIdRequest) -> Handled:
    """Without a transactional id a new id in each case, as Kafka gives it, also where the producer
    has one already: it begins again at epoch 0.
    """
    if request.transactional_id is not None:
        return _init_transactional(call, request, request.transactional_id)
    if refusal_of(call, (Scope.PRODUCE,)):
        return InitProducerIdResponse(error_code=Code.CLUSTER_AUTHORIZATION_FAILED)
    return InitProducerIdResponse(producer_id=new_producer_id(), producer_epoch=0)


def _init_transactional(
    call: Call, request: InitProducerIdRequest, transactional_id: str
) -> Handled:
    def refuse(code: Code) -> Answer:
        return InitProducerIdResponse(error_code=code)

    def answer(outcome: Outcome) -> Answer:
        return InitProducerIdResponse(
            error_code=_code(call, "InitProducerId", outcome.reason),
            producer_id=outcome.producer.producer_id,
            producer_epoch=outcome.producer.epoch,
        )

    if (code := check_transactional_id(call, transactional_id)) is not None:
        return refuse(code)
    given = ProducerEpoch(request.producer_id, request.producer_epoch)
    if (given.producer_id < 0) != (given.epoch < 0):
        return refuse(Code.INVALID_REQUEST)

    def begin(reply: Reply) -> None:
        _coordinator_of(call).init_producer(
            transactional_id,
            timeout_ms=request.transaction_timeout_ms,
            expected=None if given == _NO_PRODUCER else given,
            reply=reply,
        )

    return _ask(call, transactional_id, begin, answer, refuse)


# --- what takes part ------------------------------------------------------------------------------


def add_partitions_to_txn(call: Call, request: AddPartitionsToTxnRequest) -> Handled:
    if call.version >= _BATCHED_FROM:
        return _add_batched(call, request)
    topics = request.v3_and_below_topics

    def answer(codes: Callable[[TopicPartition], Code]) -> Answer:
        results = _added(topics, codes)
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results)

    transactional_id = request.v3_and_below_transactional_id
    if (code := check_transactional_id(call, transactional_id)) is not None:
        return answer(lambda _: code)
    refused = _refused_places(call, topics)
    if refused:  # all or none, as in Kafka
        return answer(lambda place: refused.get(place, Code.OPERATION_NOT_ATTEMPTED))
    producer = ProducerEpoch(request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)

    def begin(reply: Reply) -> None:
        _coordinator_of(call).add_partitions(
            transactional_id, producer, _places(topics), version=V1, reply=reply
        )

    return _ask(
        call,
        transactional_id,
        begin,
        lambda outcome: answer(lambda _: _code(call, "AddPartitionsToTxn", outcome.reason)),
        lambda code: answer(lambda _: code),
    )


async def _add_batched(call: Call, request: AddPartitionsToTxnRequest) -> Answer:
    """Between brokers: several producers' transactions, to add to or only to look at."""
    if refusal_of(call, ADMINISTERING):
        return AddPartitionsToTxnResponse(error_code=Code.CLUSTER_AUTHORIZATION_FAILED)
    results = []
    for one in request.transactions:
        codes = await _add_one(call, one)
        results.append(
            AddPartitionsToTxnResponse.AddPartitionsToTxnResult(
                transactional_id=one.transactional_id,
                topic_results=_added(one.topics, codes.__getitem__),
            )
        )
    return AddPartitionsToTxnResponse(results_by_transaction=results)


async def _add_one(
    call: Call, one: AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction
) -> dict[TopicPartition, Code]:
    coordinator, places = _coordinator_of(call), list(_places(one.topics))
    try:
        await prepare_for(call, transactions_of(call).log, one.transactional_id)
    except TierlogError as error:
        return dict.fromkeys(places, coordinator_code(error))
    producer = ProducerEpoch(one.producer_id, one.producer_epoch)
    if one.verify_only:
        return {
            place: _takes_part(coordinator, one.transactional_id, producer, place)
            for place in places
        }

    def begin(reply: Reply) -> None:
        coordinator.add_partitions(one.transactional_id, producer, places, version=V2, reply=reply)

    outcome = await ask(call, begin)
    return dict.fromkeys(places, Code[outcome.reason])


def _takes_part(
    coordinator: TransactionCoordinator,
    transactional_id: str,
    producer: ProducerEpoch,
    place: TopicPartition,
) -> Code:
    try:
        coordinator.check_takes_part(transactional_id, producer, place)
    except TierlogError as error:
        return code_of(error)
    return Code.NONE


def _places(topics: Iterable[_AddTopic]) -> Iterable[TopicPartition]:
    return ((topic.name, number) for topic in topics for number in topic.partitions)


def _refused_places(call: Call, topics: Iterable[_AddTopic]) -> dict[TopicPartition, Code]:
    refused = {}
    for name, number in _places(topics):
        try:
            topic_of(call, name, (Scope.PRODUCE,)).check_number(number)
        except TierlogError as error:
            refused[name, number] = code_of(error)
    return refused


def _added(
    topics: Iterable[_AddTopic], codes: Callable[[TopicPartition], Code]
) -> list[_AddedTopic]:
    return [
        _AddedTopic(
            name=topic.name,
            results_by_partition=[
                _AddedPartition(
                    partition_index=number, partition_error_code=codes((topic.name, number))
                )
                for number in topic.partitions
            ],
        )
        for topic in topics
    ]


async def add_offsets_to_txn(call: Call, request: AddOffsetsToTxnRequest) -> Answer | Later:
    def refuse(code: Code) -> Answer:
        return AddOffsetsToTxnResponse(error_code=code)

    code = check_transactional_id(call, request.transactional_id)
    code = code or check_group(call, request.group_id)
    if code is not None:
        return refuse(code)
    try:
        await prepare_for(call, transactions_of(call).log, request.transactional_id)
        place = await call.context.write(transactions_of(call).offsets_place, request.group_id)
    except (TierlogError, OSError) as error:
        return refuse(group_code(error))
    producer = ProducerEpoch(request.producer_id, request.producer_epoch)

    def begin(reply: Reply) -> None:
        _coordinator_of(call).add_partitions(
            request.transactional_id, producer, (place,), version=V1, reply=reply
        )

    return call.context.waiting.answer_later(
        begin,
        lambda outcome: refuse(_code(call, "AddOffsetsToTxn", outcome.reason)),
        stop=lambda: refuse(Code.NOT_COORDINATOR),
    )


# --- TxnOffsetCommit ------------------------------------------------------------------------------


async def txn_offset_commit(call: Call, request: TxnOffsetCommitRequest) -> Answer:
    checked = CheckedOffsets(call, map(_commit_topic, request.topics))
    code = check_transactional_id(call, request.transactional_id)
    code = code or check_group(call, request.group_id)
    if code is None and checked.offsets:
        try:
            await _commit_offsets(call, request, list(checked.offsets.values()))
        except (TierlogError, OSError) as error:
            code = _txn_commit_code(error)
    return TxnOffsetCommitResponse(
        topics=[
            TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic(
                name=topic.name,
                partitions=[
                    TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition(
                        partition_index=one.partition_index, error_code=one.error_code
                    )
                    for one in topic.partitions
                ],
            )
            for topic in checked.answered(code or Code.NONE)
        ]
    )


def _commit_topic(topic: TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic) -> CommitTopic:
    return CommitTopic(
        name=topic.name,
        partitions=[
            CommitPartition(
                partition_index=one.partition_index,
                committed_offset=one.committed_offset,
                committed_leader_epoch=one.committed_leader_epoch,
                committed_metadata=one.committed_metadata,
            )
            for one in topic.partitions
        ],
    )


async def _commit_offsets(
    call: Call, request: TxnOffsetCommitRequest, offsets: list[NewOffset]
) -> None:
    """Raises what commits raise, and Refused."""
    producer = ProducerEpoch(request.producer_id, request.producer_epoch)
    await call.context.write(transactions_of(call).log.prepare_for, request.transactional_id)
    place = await call.context.write(transactions_of(call).offsets_place, request.group_id)
    adds = _version(call, "TxnOffsetCommit") == V2
    if adds or not transactions_of(call).is_here(request.transactional_id):
        await begin_in(call, request.transactional_id, producer, [place], adds=adds)
    verify = transactions_of(call).verify(request.transactional_id, place)
    await call.context.write(
        call.context.broker.groups.commit_offsets,
        request.group_id,
        offsets,
        member=Identity(request.member_id, request.group_instance_id),
        generation=request.generation_id,
        within=InTransaction(*producer, verify),
    )


def _txn_commit_code(error: BaseException) -> Code:
    if isinstance(error, TooLarge):
        return Code.INVALID_COMMIT_OFFSET_SIZE
    code = group_code(error)
    if code is Code.PRODUCER_FENCED:
        return Code.INVALID_PRODUCER_EPOCH
    return Code.ILLEGAL_GENERATION if code is Code.GROUP_ID_NOT_FOUND else code


async def begin_in(
    call: Call,
    transactional_id: str,
    producer: ProducerEpoch,
    places: list[TopicPartition],
    *,
    adds: bool,
) -> None:
    """The coordinator, wherever it is, says that these partitions are in the transaction; with
    `adds`, as for V2's clients, they are from now on. Raises Refused.
    """
    transactions = transactions_of(call)
    try:
        await wrap_future(transactions.take_part(transactional_id, producer, places, adds=adds))
    except TransactionRefused as refusal:
        raise Refused(Code[refusal.reason]) from refusal
    except (LeaderUnknown, PeerUnavailable, ShuttingDown) as error:
        raise Refused(coordinator_code(error)) from error


# --- EndTxn, WriteTxnMarkers ----------------------------------------------------------------------


def end_txn(call: Call, request: EndTxnRequest) -> Handled:
    def refuse(code: Code) -> Answer:
        return EndTxnResponse(error_code=code)

    def answer(outcome: Outcome) -> Answer:
        return EndTxnResponse(
            error_code=_code(call, "EndTxn", outcome.reason),
            producer_id=outcome.producer.producer_id,
            producer_epoch=outcome.producer.epoch,
        )

    if (code := check_transactional_id(call, request.transactional_id)) is not None:
        return refuse(code)

    def begin(reply: Reply) -> None:
        _coordinator_of(call).end_transaction(
            request.transactional_id,
            ProducerEpoch(request.producer_id, request.producer_epoch),
            commit=request.committed,
            version=_version(call, "EndTxn"),
            reply=reply,
        )

    return _ask(call, request.transactional_id, begin, answer, refuse)


async def write_txn_markers(call: Call, request: WriteTxnMarkersRequest) -> Answer:
    """For an administrator who ends a transaction that hangs (KIP-664)."""
    is_refused = bool(refusal_of(call, ADMINISTERING))
    markers = []
    for marker in request.markers:
        topics = [
            WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(
                name=topic.name,
                partitions=[
                    WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult(
                        partition_index=number,
                        error_code=Code.CLUSTER_AUTHORIZATION_FAILED
                        if is_refused
                        else await _write_marker(call, marker, (topic.name, number)),
                    )
                    for number in topic.partition_indexes
                ],
            )
            for topic in marker.topics
        ]
        markers.append(
            WriteTxnMarkersResponse.WritableTxnMarkerResult(
                producer_id=marker.producer_id, topics=topics
            )
        )
    return WriteTxnMarkersResponse(markers=markers)


async def _write_marker(
    call: Call, asked: WriteTxnMarkersRequest.WritableTxnMarker, place: TopicPartition
) -> Code:
    producer = ProducerEpoch(asked.producer_id, asked.producer_epoch)
    try:
        call.session.grant.check_topic(place[0])
        is_alone = call.context.broker.cluster is None
        epoch = COORDINATOR_EPOCH if is_alone else asked.coordinator_epoch
        marker = EndMarker(asked.transaction_result, epoch)
        await wrap_future(transactions_of(call).end_here(place, producer, marker))
    except (TierlogError, OSError) as error:
        return code_of(error)
    return Code.NONE


# --- DescribeTransactions, ListTransactions -------------------------------------------------------


async def describe_transactions(call: Call, request: DescribeTransactionsRequest) -> Answer:
    not_loaded = await _load(call)
    return DescribeTransactionsResponse(
        transaction_states=[
            _described(call, name, check_transactional_id(call, name) or not_loaded)
            for name in request.transactional_ids
        ]
    )


async def _load(call: Call) -> Code | None:
    """Why the coordinator cannot be asked; None if it can."""
    try:
        await call.context.read(transactions_of(call).log.load)
    except (TierlogError, OSError) as error:
        return coordinator_code(error)
    return None


def _described(call: Call, name: str, refusal: Code | None) -> _Described:
    try:
        transactions_of(call).log.check_here(name)
    except TierlogError as error:
        refusal = refusal or coordinator_code(error)
    found = _coordinator_of(call).describe(name) if refusal is None else None
    if found is None:
        code = refusal or Code.TRANSACTIONAL_ID_NOT_FOUND
        return _Described(transactional_id=name, error_code=code)
    return _Described(
        transactional_id=name,
        transaction_state=found.state.shown,
        transaction_timeout_ms=found.timeout_ms,
        transaction_start_time_ms=found.start_ms,
        producer_id=found.producer_id,
        producer_epoch=found.epoch,
        topics=[
            DescribeTransactionsResponse.TopicData(topic, numbers)
            for topic, numbers in found.by_topic.items()
            if call.session.grant.sees_topic(topic)
        ],
    )


async def list_transactions(call: Call, request: ListTransactionsRequest) -> Answer:
    """As Kafka: what a client may not see is not there."""
    pattern = request.transactional_id_pattern
    try:
        is_match = compiled_pattern(pattern).fullmatch if pattern else bool
    except GroupRefused as refused:
        return ListTransactionsResponse(error_code=code_of(refused))
    if (code := await _load(call)) is not None:
        return ListTransactionsResponse(error_code=code)
    now_ms = call.context.broker.clock()
    return ListTransactionsResponse(
        unknown_state_filters=[one for one in request.state_filters if one not in _STATES],
        transaction_states=[
            ListTransactionsResponse.TransactionState(
                transactional_id=one.transactional_id,
                producer_id=one.producer_id,
                transaction_state=one.state.shown,
            )
            for one in _coordinator_of(call).transactions()
            if check_transactional_id(call, one.transactional_id) is None
            and is_match(one.transactional_id)
            and _is_wanted(one, request, now_ms)
        ],
    )


def _is_wanted(one: Transaction, request: ListTransactionsRequest, now_ms: int) -> bool:
    states, producers = request.state_filters, request.producer_id_filters
    return (
        (not states or one.state.shown in states)
        and (not producers or one.producer_id in producers)
        and (
            request.duration_filter < 0
            or (one.start_ms >= 0 and now_ms - one.start_ms > request.duration_filter)
        )
    )
