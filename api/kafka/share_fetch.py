"""ShareFetch and ShareAcknowledge (KIP-932): records for the members of a share group, and what
they say of them.

* A member is given records of its session's partitions by turns, and answered as soon as there are
  any: `MinBytes` is not waited for. Slices of files are sent, as by Fetch.
* What is acknowledged with a ShareFetch is durable before the answer.
* Reads are in threads: which records are whose needs the heads of their batches. A read that was
  begun is waited for: its records are the member's. If the client is gone, they are given up.
* One who waits is woken by the log's end, and by what other members give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.error_codes import Code, Refused, code_of, text_of
from tierlog.api.kafka.groups import check_group, coordinator_code
from tierlog.api.kafka.nodes import NOBODY, Node, node_of
from tierlog.api.kafka.partitions import topic_of_id
from tierlog.api.kafka.share_groups import is_member_id
from tierlog.api.kafka.share_sessions import FINAL_EPOCH, FIRST_EPOCH, Place, ShareSession
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.workers import call_on_loop, close_late
from tierlog.broker.partition.partition import Partition
from tierlog.broker.share_coordinator.share_groups import ShareRead
from tierlog.broker.share_coordinator.share_partition import Ack, AckBatch, Wanted
from tierlog.record_format.errors import GroupRefused, NotLeader, TierlogError
from tierlog.record_format.kafka_messages.messages import (
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
    ShareFetchRequest,
    ShareFetchResponse,
)
from tierlog.record_format.share_state import ShareKey

_RENEWS_FROM: Final = 2
_STRICT: Final = 1  # ShareAcquireMode: no more records than asked for
_Row = ShareFetchResponse.PartitionData


class _Failure(NamedTuple):
    """`elsewhere`: who leads the partition instead, if that is known."""

    code: Code
    text: str | None
    elsewhere: NotLeader | None = None

    @property
    def leader(self) -> tuple[int, int]:
        """Its id and epoch, in the answer."""
        if self.elsewhere is not None:
            return self.elsewhere.node_id, self.elsewhere.leader_epoch
        return (NOBODY, NOBODY) if self.code is Code.NOT_LEADER_OR_FOLLOWER else (0, 0)


_DONE: Final = _Failure(Code.NONE, None)


def _failure_of(error: BaseException) -> _Failure:
    elsewhere = error if isinstance(error, NotLeader) else None
    return _Failure(code_of(error), text_of(error), elsewhere)


def _endpoints(failures: Iterable[_Failure]) -> set[Node]:
    """Where the leaders of these partitions are."""
    found = {node_of(one.elsewhere) for one in failures}
    return {one for one in found if one is not None}


# --- ShareFetch -----------------------------------------------------------------------------------


async def share_fetch(call: Call, request: ShareFetchRequest) -> ShareFetchResponse:
    try:
        _check(call, request.group_id, request.member_id)
        _check_renewal(call, request)
        await _prepare(call)
        session, is_new = _begin(call, request)
    except Refused as refused:
        if refused.code is Code.SHARE_SESSION_LIMIT_REACHED:  # it would come again at once
            await asyncio.sleep(max(0, request.max_wait_ms) / 1000)
        return ShareFetchResponse(error_code=refused.code, error_message=str(refused))
    asked = _asked(request.topics)
    acks = _acknowledge(call, session, asked, is_renewal=request.is_renew_ack)
    acked = asyncio.ensure_future(acks)
    poll = _Poll(call, request, session)
    try:
        if not request.is_renew_ack and request.share_session_epoch != FINAL_EPOCH:
            await poll.run()
        answers = await acked
    except BaseException:
        acked.cancel()
        poll.close()
        raise
    if request.share_session_epoch == FINAL_EPOCH:
        call.context.share_sessions.end(session.group, session.member)
    rows = poll.rows(is_new=is_new)
    for place, answer in answers.items():
        row = rows.setdefault(place, _Row(partition_index=place[1], records=b""))
        row.acknowledge_error_code, row.acknowledge_error_message = answer.code, answer.text
    return ShareFetchResponse(
        acquisition_lock_timeout_ms=_lock_ms(call, session.group),
        responses=_by_topic(rows),
        node_endpoints=[ShareFetchResponse.NodeEndpoint(*one) for one in poll.endpoints()],
    )


def _check(call: Call, group: str | None, member: str | None) -> None:
    """Raises Refused."""
    if group is None:
        raise Refused(Code.INVALID_REQUEST, "Invalid group id in the request.")
    if (code := check_group(call, group)) is not None:
        raise Refused(code)
    if not is_member_id(member):
        raise Refused(Code.INVALID_REQUEST, "Invalid member id in the request.")


def _check_renewal(call: Call, request: ShareFetchRequest) -> None:
    """Raises Refused: who renews does not read meanwhile, or what it renewed would be over."""
    if call.version < _RENEWS_FROM or not request.is_renew_ack:
        return
    given = (request.max_bytes, request.min_bytes, request.max_records, request.max_wait_ms)
    if any(given):
        names = "maxBytes, minBytes, maxRecords and maxWaitMs"
        raise Refused(Code.INVALID_REQUEST, f"{names} must be set to 0 if isRenewAck is true.")


async def _prepare(call: Call) -> None:
    """Raises Refused."""
    shares = call.context.broker.share_groups
    if not shares.is_ready:
        try:
            await call.context.write(shares.prepare)
        except (TierlogError, OSError) as error:
            raise Refused(coordinator_code(error)) from error


def _begin(call: Call, request: ShareFetchRequest) -> tuple[ShareSession, bool]:
    """Raises Refused."""
    epoch, topics = request.share_session_epoch, request.topics
    assert request.group_id is not None, "checked"
    assert request.member_id is not None, "checked"
    has_acks = any(one.acknowledgement_batches for topic in topics for one in topic.partitions)
    if epoch == FIRST_EPOCH and has_acks:
        raise Refused(Code.INVALID_REQUEST, "a first request acknowledges nothing")
    sessions = call.context.share_sessions
    session, is_new = sessions.begin(request.group_id, request.member_id, epoch, call.session)
    if epoch != FINAL_EPOCH:
        session.update(
            [(topic.topic_id, one.partition_index) for topic in topics for one in topic.partitions],
            [(one.topic_id, n) for one in request.forgotten_topics_data for n in one.partitions],
        )
    return session, is_new


class _Poll:
    """What one ShareFetch reads."""

    def __init__(self, call: Call, request: ShareFetchRequest, session: ShareSession) -> None:
        self._call, self._session, self._context = call, session, call.context
        self._shares = call.context.broker.share_groups
        settings = call.context.settings
        self._records_left = request.max_records
        self._bytes_left = min(request.max_bytes, settings.fetch_max_bytes)
        self._batch_size = max(request.batch_size, 1)
        self._is_strict = request.share_acquire_mode == _STRICT
        wait_ms = min(request.max_wait_ms, settings.connections_max_idle_ms)
        self._wait_s = max(wait_ms, 0) / 1000
        places = list(session.places)
        turn = request.share_session_epoch % len(places) if places else 0
        self._places = places[turn:] + places[:turn]
        self._found: dict[Place, ShareRead] = {}
        self._failed: dict[Place, _Failure] = {}
        self._partitions: dict[Place, Partition] = {}
        self._cancels: list[Callable[[], None]] = []
        self._changed = asyncio.Event()

    async def run(self) -> None:
        if self._records_left <= 0 or self._bytes_left <= 0 or not self._places:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        self._context.waiting.add_cancel(self._stop)
        try:
            await self._look_up()
            while True:
                self._changed.clear()
                self._arm()
                await self._read_round()
                left_s = deadline - loop.time()
                if self._found or self._failed or left_s <= 0 or self._is_stopping:
                    return
                try:
                    await asyncio.wait_for(self._changed.wait(), left_s)
                except TimeoutError:
                    return
                self._disarm()
        finally:
            self._context.waiting.discard_cancel(self._stop)
            self._disarm()

    def close(self) -> None:
        """The answer is not sent."""
        for read in self._found.values():
            read.close()
        self._found.clear()

    # --- reading ----------------------------------------------------------------------------------

    async def _look_up(self) -> None:
        """Find the partitions, and where the group begins in each."""
        for place in self._places:
            try:
                topic = topic_of_id(self._call, place[0], (Scope.READ,))
                partition = self._partitions[place] = topic.partition(place[1])
                await self._open(self._key(place), partition)
            except (TierlogError, OSError) as error:
                self._fail(place, error)

    async def _open(self, key: ShareKey, partition: Partition) -> None:
        while not self._shares.partitions.is_open(key):
            turn, asked = self._shares.begin_open(key, partition)
            state = await asyncio.wrap_future(asked)
            await self._context.read(self._shares.open, key, partition, state, turn)

    def _key(self, place: Place) -> ShareKey:
        return ShareKey(self._session.group, *place)

    def _fail(self, place: Place, error: Exception) -> None:
        self._partitions.pop(place, None)
        self._failed[place] = _failure_of(error)

    async def _read_round(self) -> None:
        ready = [one for one in self._partitions.items() if self._has_records(*one)]
        for position, (place, partition) in enumerate(ready):
            share_bytes = max(self._bytes_left // (len(ready) - position), 1)
            if self._records_left <= 0 or self._bytes_left <= 0:
                return
            try:
                read = await self._read(place, partition, share_bytes)
            except (TierlogError, OSError) as error:
                self._fail(place, error)
                continue
            if read is not None:
                self._found[place] = read
                self._records_left -= sum(one.last - one.first + 1 for one in read.acquired)
                self._bytes_left -= sum(piece.size_bytes for piece in read.slices)

    def _has_records(self, place: Place, partition: Partition) -> bool:
        try:
            offset = self._shares.partitions.next_offset(self._key(place))
        except GroupRefused as error:
            self._failed[place] = _failure_of(error)
            return False
        if offset is None:
            return False
        return offset < self._shares.end_offset(self._session.group, partition)

    async def _read(self, place: Place, partition: Partition, max_bytes: int) -> ShareRead | None:
        key, member = self._key(place), self._session.member
        wanted = Wanted(member, self._records_left, self._batch_size, is_strict=self._is_strict)
        offset = self._shares.partitions.next_offset(key)
        if offset is None:  # somebody else was faster
            return None
        reading = self._context.workers.threads_for(partition, offset).submit(
            self._shares.read, key, partition, wanted, max_bytes=max_bytes, reader=self
        )
        try:
            return await asyncio.shield(asyncio.wrap_future(reading))
        except asyncio.CancelledError:  # the client is gone
            release = partial(self._shares.release, key.group, member, [place])
            close_late(reading)
            reading.add_done_callback(lambda _: release())
            raise

    # --- waiting ----------------------------------------------------------------------------------

    @property
    def _is_stopping(self) -> bool:
        return self._context.waiting.is_stopping

    def _arm(self) -> None:
        """Be told of what changes from now on."""
        loop = asyncio.get_running_loop()
        told = partial(call_on_loop, loop, self._changed.set)
        waiting = self._context.waiting
        for place, partition in self._partitions.items():
            self._cancels.append(self._shares.partitions.watch(self._key(place), told))
            end = partition.high_watermark
            self._cancels.append(waiting.wait_beyond(partition, end, self._changed.set))

    def _disarm(self) -> None:
        for cancel in self._cancels:
            cancel()
        self._cancels.clear()

    def _stop(self) -> None:
        """The server stops."""
        self._changed.set()

    # --- the answer -------------------------------------------------------------------------------

    def rows(self, *, is_new: bool) -> dict[Place, _Row]:
        """Those with something to tell; of a new session, and of what is new in one, all."""
        places, rows = self._session.places, dict[Place, _Row]()
        for place in self._places:
            read, failure = self._found.pop(place, None), self._failed.get(place, _DONE)
            is_told = is_new or places.get(place, False)
            if read is None and failure is _DONE and not is_told:
                continue
            if place in places:
                places[place] = failure is not _DONE
            rows[place] = _Row(
                partition_index=place[1],
                error_code=failure.code,
                error_message=failure.text,
                current_leader=ShareFetchResponse.LeaderIdAndEpoch(*failure.leader),
                records=b"" if read is None else read.slices,
                acquired_records=[]
                if read is None
                else [ShareFetchResponse.AcquiredRecords(*one) for one in read.acquired],
            )
            if read is not None:
                places[place] = places.pop(place, False)  # the others' turn
        return rows

    def endpoints(self) -> set[Node]:
        return _endpoints(self._failed.values())


def _by_topic(rows: Mapping[Place, _Row]) -> list[ShareFetchResponse.ShareFetchableTopicResponse]:
    topics: dict[bytes, ShareFetchResponse.ShareFetchableTopicResponse] = {}
    for (topic_id, _), row in rows.items():
        kind = ShareFetchResponse.ShareFetchableTopicResponse
        topics.setdefault(topic_id, kind(topic_id)).partitions.append(row)
    return list(topics.values())


def _lock_ms(call: Call, group: str) -> int:
    return call.context.broker.group_configs.share_limits(group).lock_ms


# --- acknowledging --------------------------------------------------------------------------------

_Batch = ShareFetchRequest.AcknowledgementBatch | ShareAcknowledgeRequest.AcknowledgementBatch
_Topic = ShareFetchRequest.FetchTopic | ShareAcknowledgeRequest.AcknowledgeTopic


def _asked(topics: Iterable[_Topic], *, empty: bool = False) -> dict[Place, Sequence[_Batch]]:
    """What is acknowledged, by partition. `empty`: also where it is nothing."""
    return {
        (topic.topic_id, one.partition_index): one.acknowledgement_batches
        for topic in topics
        for one in topic.partitions
        if empty or one.acknowledgement_batches
    }


async def share_acknowledge(
    call: Call, request: ShareAcknowledgeRequest
) -> ShareAcknowledgeResponse:
    group, member = request.group_id, request.member_id
    try:
        _check(call, group, member)
        assert group is not None, "checked"
        assert member is not None, "checked"
        await _prepare(call)
        session = call.context.share_sessions.go_on(group, member, request.share_session_epoch)
    except Refused as refused:
        return ShareAcknowledgeResponse(error_code=refused.code, error_message=str(refused))
    asked = _asked(request.topics, empty=True)
    answers = await _acknowledge(call, session, asked, is_renewal=request.is_renew_ack)
    if request.share_session_epoch == FINAL_EPOCH:
        call.context.share_sessions.end(group, member)
    topics: dict[bytes, ShareAcknowledgeResponse.ShareAcknowledgeTopicResponse] = {}
    for (topic_id, number), answer in answers.items():
        kind = ShareAcknowledgeResponse.ShareAcknowledgeTopicResponse
        leader = ShareAcknowledgeResponse.LeaderIdAndEpoch(*answer.leader)
        row = ShareAcknowledgeResponse.PartitionData(number, answer.code, answer.text, leader)
        topics.setdefault(topic_id, kind(topic_id)).partitions.append(row)
    leaders = _endpoints(answers.values())
    return ShareAcknowledgeResponse(
        acquisition_lock_timeout_ms=_lock_ms(call, group),
        responses=list(topics.values()),
        node_endpoints=[ShareAcknowledgeResponse.NodeEndpoint(*one) for one in leaders],
    )


def _acknowledge(
    call: Call,
    session: ShareSession,
    asked: Mapping[Place, Sequence[_Batch]],
    *,
    is_renewal: bool,
) -> Awaitable[dict[Place, _Failure]]:
    """It is said when this returns, before anything else is given to the member: what is given
    anew is not what is acknowledged. The answers come once it is durable.
    """
    answers: dict[Place, _Failure] = {}
    waits: dict[Place, asyncio.Future[_Failure]] = {}
    nothing: list[Place] = []
    for place, batches in asked.items():
        try:
            topic_of_id(call, place[0], (Scope.READ,)).partition(place[1])
            acks = _checked(call, batches, is_renewal=is_renewal)
        except TierlogError as error:
            answers[place] = _failure_of(error)
            continue
        if acks:
            waits[place] = _begin_acknowledging(call, session, place, acks)
        else:
            nothing.append(place)
    if waits:  # as Kafka
        answers |= dict.fromkeys(nothing, _DONE)
    return _settled(answers, waits)


async def _settled(
    answers: dict[Place, _Failure], waits: Mapping[Place, asyncio.Future[_Failure]]
) -> dict[Place, _Failure]:
    for place, wait in waits.items():
        answers[place] = await wait
    return answers


def _begin_acknowledging(
    call: Call, session: ShareSession, place: Place, acks: Sequence[AckBatch]
) -> asyncio.Future[_Failure]:
    shares = call.context.broker.share_groups.partitions
    key = ShareKey(session.group, *place)

    def begin(reply: Callable[[BaseException | None], None]) -> None:
        shares.acknowledge(key, session.member, acks, reply)

    def build(error: BaseException | None) -> _Failure:
        return _DONE if error is None else _failure_of(error)

    stopped = _Failure(Code.NOT_LEADER_OR_FOLLOWER, None)
    return call.context.waiting.answer_later(begin, build, stop=lambda: stopped)


def _checked(call: Call, batches: Sequence[_Batch], *, is_renewal: bool) -> list[AckBatch]:
    """Raises Refused."""
    end, most = -1, Ack.RENEW if call.version >= _RENEWS_FROM else Ack.REJECT
    for one in batches:
        types = one.acknowledge_types
        is_right = (
            end <= one.first_offset <= one.last_offset
            and types
            and len(types) in (1, one.last_offset - one.first_offset + 1)
            and all(0 <= kind <= most for kind in types)
            and (is_renewal or Ack.RENEW not in types)
        )
        if not is_right:
            raise Refused(
                Code.INVALID_REQUEST, f"{one.first_offset} to {one.last_offset}: no acknowledgement"
            )
        end = one.last_offset
    return [AckBatch(one.first_offset, one.last_offset, one.acknowledge_types) for one in batches]
