"""Fetch: whole batches of many partitions, from both tiers, as slices of files.

* What is in memory is read on the event loop. A partition that would wait for the disk or the
  bucket is read in a thread of its tier, all such at once, and no longer than the client waits or
  `remote.fetch.max.wait.ms`: what comes later is there for the next request.
* There is at least one batch, whatever its size, and no other beyond the limits (KIP-74); batches
  are sent whole, also the one that only contains the offset.
* A request that waits is a future, one timer, and an entry for each idle partition: neither a task
  nor a thread.
* Slices belong to the poll until they are in an answer, and are closed however it ends.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Final

from tierlog.api.kafka.calls import Answer, Call, Later
from tierlog.api.kafka.error_codes import Code, Refused, code_of
from tierlog.api.kafka.fetch_sessions import NO_SESSION, FetchSession, Key, TopicKey, Wanted
from tierlog.api.kafka.nodes import Node, node_of
from tierlog.api.kafka.partitions import NO_ID, check_leader_epoch, topic_of, topic_of_id
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.workers import close_late
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.tiered_reads import Fetched
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.record_format.errors import NotLeader, TierlogError
from tierlog.record_format.kafka_messages.messages import FetchRequest, FetchResponse

_BY_ID: Final = 13  # the first version that names topics by their ids
_WITH_LEADER, _WITH_ENDPOINTS = 12, 16  # who leads instead (KIP-951)
_READ_COMMITTED: Final = 1


def fetch(call: Call, request: FetchRequest) -> Answer | Later:
    by_id = call.version >= _BY_ID
    try:
        sessions = call.context.fetch_sessions
        session = sessions.begin(request, by_id=by_id, grant=call.session.grant)
    except Refused as refused:
        return FetchResponse(error_code=refused.code)
    return _Poll(call, request, session).begin()


class _Found:
    """What a partition has: records, or nothing, or an error. `beyond`: with a higher high
    watermark there may be more. `leader`: another broker that has it.
    """

    __slots__ = ("beyond", "data", "fetched", "leader")

    def __init__(
        self,
        data: FetchResponse.PartitionData,
        *,
        beyond: int,
        fetched: Fetched | None = None,
        leader: Node | None = None,
    ) -> None:
        self.data, self.beyond, self.fetched, self.leader = data, beyond, fetched, leader

    @property
    def size_bytes(self) -> int:
        return 0 if self.fetched is None else self.fetched.size_bytes

    def close(self) -> None:
        if self.fetched is not None:
            self.fetched.close()


class _Poll:
    """One Fetch, from its reading to its answer."""

    def __init__(self, call: Call, request: FetchRequest, session: FetchSession) -> None:
        context = self._context = call.context
        self._call, self._session = call, session
        self._is_incremental = request.session_epoch > 0
        self._committed = request.isolation_level == _READ_COMMITTED
        self._max_bytes = min(request.max_bytes, context.settings.fetch_max_bytes)
        self._min_bytes = min(request.min_bytes, self._max_bytes)
        self._wait_s = min(request.max_wait_ms, context.settings.connections_max_idle_ms) / 1000
        self._found: dict[Key, _Found] = {}
        self._size = 0
        self._blocked: list[Wanted] = []
        self._is_over = self._wait_s <= 0
        self._is_full = self._has_failed = self._is_armed = self._has_advanced = False
        self._later: Later | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> Answer | Later:
        self._session.on_ready, self._session.on_superseded = self._on_ready, self._on_superseded
        try:
            self._read_ready()
        except BaseException:
            self._end()
            raise
        if not self._blocked and self._is_enough():
            return self._answer()
        loop = asyncio.get_running_loop()
        later = self._later = loop.create_future()
        later.add_done_callback(self._on_done)
        self._deadline = loop.time() + self._wait_s
        self._timer = loop.call_at(self._deadline, self._stop_waiting)
        self._context.waiting.add_cancel(self._stop_waiting)
        self._go_on()
        return later

    # --- reading ----------------------------------------------------------------------------------

    def _read_ready(self) -> None:
        self._is_full = self._has_failed = False
        ready = list(self._session.ready.values())
        for wanted in ready:  # they are read anew
            self._drop(wanted.key)
        for wanted in ready:
            try:
                self._read(wanted)
            except WouldBlock:
                self._blocked.append(wanted)
            except (TierlogError, OSError) as error:
                self._fail(wanted, error)

    def _drop(self, key: Key) -> None:
        if (found := self._found.pop(key, None)) is not None:
            self._size -= found.size_bytes
            found.close()

    def _read(self, wanted: Wanted) -> None:
        partition = self._partition(wanted)
        check_leader_epoch(partition, wanted.leader_epoch)
        offset = wanted.offset
        is_at_end = partition.is_at_end(offset)
        if wanted.last_epoch >= 0 and self._has_parted(wanted, partition):
            return
        if is_at_end and not partition.is_defunct:
            self._found_nothing(wanted, partition, beyond=offset)
        elif self._size and self._left_bytes(wanted) <= 0:
            self._found_too_much(wanted, partition)
        else:
            fetched = partition.read(
                offset,
                max_bytes=max(self._left_bytes(wanted), 1),
                committed=self._committed,
                wait=Wait.NEVER,
            )
            self._take(wanted, partition, fetched)

    def _has_parted(self, wanted: Wanted, partition: Partition) -> bool:
        """Whether the client's records are of a history that has ended, which it is told. Raises
        Refused.
        """
        end = partition.end_of_epoch(wanted.last_epoch)
        if end.epoch < 0:
            raise Refused(Code.OFFSET_OUT_OF_RANGE)
        if end.epoch >= wanted.last_epoch and end.end_offset >= wanted.offset:
            return False
        data = _offsets_alone(wanted, partition)
        data.diverging_epoch = FetchResponse.EpochEndOffset(end.epoch, end.end_offset)
        self._has_failed = True
        self._found[wanted.key] = _Found(data, beyond=wanted.offset)
        return True

    def _left_bytes(self, wanted: Wanted) -> int:
        return min(wanted.max_bytes, self._max_bytes - self._size)

    def _partition(self, wanted: Wanted) -> Partition:
        found = wanted.partition
        if found is None or found.is_defunct:
            wanted.partition = None
            name, number = wanted.key
            topic = (
                topic_of(self._call, name, (Scope.READ,))
                if isinstance(name, str)
                else topic_of_id(self._call, name, (Scope.READ,))
            )
            found = wanted.partition = topic.partition(number)
        return found

    def _take(self, wanted: Wanted, partition: Partition, fetched: Fetched) -> None:
        size_bytes = fetched.size_bytes
        if not size_bytes:
            self._found_nothing(wanted, partition, beyond=fetched.high_watermark)
        elif self._size and size_bytes > self._left_bytes(wanted):  # its first batch is too large
            fetched.close()
            self._found_too_much(wanted, partition)
        else:
            self._is_full |= not fetched.at_end
            self._size += size_bytes
            data = _records(wanted, partition, fetched, committed=self._committed)
            beyond = fetched.high_watermark
            self._found[wanted.key] = _Found(data, beyond=beyond, fetched=fetched)

    def _found_nothing(self, wanted: Wanted, partition: Partition, *, beyond: int) -> None:
        self._session.ready.pop(wanted.key, None)
        self._found[wanted.key] = _Found(_offsets_alone(wanted, partition), beyond=beyond)

    def _found_too_much(self, wanted: Wanted, partition: Partition) -> None:
        """It has records, but the answer has no room for them."""
        self._is_full = True
        self._found[wanted.key] = _Found(_offsets_alone(wanted, partition), beyond=wanted.offset)

    def _fail(self, wanted: Wanted, error: Exception) -> None:
        self._has_failed = True
        data = FetchResponse.PartitionData(
            partition_index=wanted.key[1],
            error_code=code_of(error),
            high_watermark=-1,
            records=b"",
            aborted_transactions=None,
        )
        if isinstance(error, NotLeader) and self._call.version >= _WITH_LEADER:
            data.current_leader = FetchResponse.LeaderIdAndEpoch(error.node_id, error.leader_epoch)
        self._found[wanted.key] = _Found(data, beyond=wanted.offset, leader=node_of(error))

    # --- waiting ----------------------------------------------------------------------------------

    def _is_enough(self) -> bool:
        is_enough = self._size >= self._min_bytes or self._is_full or self._has_failed
        return is_enough or self._is_over or not self._session.wanted

    def _go_on(self) -> None:
        while not self._blocked:
            if self._is_enough():
                self._complete()
                return
            if not self._has_advanced:
                self._arm()
            if not self._has_advanced:
                self._is_armed = True
                return
            self._has_advanced = False
            self._read_ready()
        self._task = asyncio.get_running_loop().create_task(self._read_blocked())
        self._task.add_done_callback(self._on_read)

    def _on_read(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._later is not None and not self._later.done():
            self._end()
            self._later.set_exception(error)

    def _arm(self) -> None:
        """Be told of every partition that advances beyond what was found."""
        for key, found in self._found.items():
            self._session.wanted[key].wait_beyond(found.beyond, self._context.waiting)

    def _on_ready(self) -> None:
        self._has_advanced = True
        if self._is_armed:
            self._is_armed = False
            self._go_on()

    def _stop_waiting(self) -> None:
        """The time is over, or the server stops."""
        self._is_over = True
        if self._is_armed:
            self._complete()

    def _on_superseded(self) -> None:
        """The client has gone on, on another connection."""
        later = self._later
        self._end()
        if later is not None and not later.done():
            later.set_result(FetchResponse(error_code=Code.INVALID_FETCH_SESSION_EPOCH))

    def _on_done(self, later: Later) -> None:
        if later.cancelled():  # the client is gone
            self._end()

    async def _read_blocked(self) -> None:
        blocked, self._blocked = self._blocked, []
        reads = [(wanted, self._read_in_thread(wanted)) for wanted in blocked]
        waits = [asyncio.wrap_future(read) for _, read in reads]
        least_s = self._context.settings.remote_fetch_max_wait_ms / 1000
        try:
            left_s = self._deadline - asyncio.get_running_loop().time()
            await asyncio.wait(waits, timeout=max(left_s, least_s))
            while reads:
                self._take_read(*reads.pop())
        finally:
            for wait in waits:
                wait.cancel()
            for _, read in reads:
                close_late(read)
        self._task = None
        self._go_on()

    def _read_in_thread(self, wanted: Wanted) -> Future[Fetched]:
        partition = wanted.partition
        assert partition is not None, "it was found, or it would have failed"
        threads = self._context.workers.threads_for(partition, wanted.offset)
        return threads.submit(
            partition.read,
            wanted.offset,
            max_bytes=max(self._left_bytes(wanted), 1),
            committed=self._committed,
        )

    def _take_read(self, wanted: Wanted, read: Future[Fetched]) -> None:
        partition = wanted.partition
        assert partition is not None, "it was read"
        if not read.done():
            self._found_too_much(wanted, partition)
            close_late(read)
            return
        try:
            self._take(wanted, partition, read.result())
        except (TierlogError, OSError) as error:
            self._fail(wanted, error)

    # --- the answer -------------------------------------------------------------------------------

    def _complete(self) -> None:
        assert self._later is not None, "it waits"
        if not self._later.done():
            self._later.set_result(self._answer())

    def _answer(self) -> FetchResponse:
        topics: dict[TopicKey, FetchResponse.FetchableTopicResponse] = {}
        is_kept = self._session.id != NO_SESSION
        for key, found in self._found.items():
            wanted, data = self._session.wanted[key], found.data
            sent = (data.high_watermark, data.last_stable_offset, data.log_start_offset)
            is_new = found.fetched is not None or data.error_code or sent != wanted.sent
            if self._is_incremental and is_kept and not is_new:
                continue
            wanted.sent = None if data.error_code else sent
            if found.fetched is not None:
                found.fetched = None  # the answer's now
                self._session.ready[key] = self._session.ready.pop(key)  # the others' turn
            if (topic := topics.get(key[0])) is None:
                topic = topics[key[0]] = _topic(key[0])
            topic.partitions.append(data)
        response = FetchResponse(session_id=self._session.id, responses=list(topics.values()))
        if self._has_failed and self._call.version >= _WITH_ENDPOINTS:
            leaders = {one.leader for one in self._found.values() if one.leader is not None}
            response.node_endpoints = [FetchResponse.NodeEndpoint(*one) for one in leaders]
        self._end()
        return response

    def _end(self) -> None:
        """Nothing waits for it any more, and what it still has is closed."""
        session = self._session
        if session.on_ready != self._on_ready:
            return  # it has ended
        session.on_ready = session.on_superseded = None
        self._is_armed = False
        if self._timer is not None:
            self._timer.cancel()
            self._context.waiting.discard_cancel(self._stop_waiting)
        if self._task is not None:
            self._task.cancel()
        for key, found in self._found.items():
            found.close()
            if session.id != NO_SESSION and key not in session.ready:
                session.wanted[key].wait_beyond(found.beyond, self._context.waiting)
        self._found.clear()
        if session.id == NO_SESSION:
            session.close()


def _topic(key: TopicKey) -> FetchResponse.FetchableTopicResponse:
    name, topic_id = (key, NO_ID) if isinstance(key, str) else ("", key)
    return FetchResponse.FetchableTopicResponse(topic=name, topic_id=topic_id)


def _offsets_alone(wanted: Wanted, partition: Partition) -> FetchResponse.PartitionData:
    now = partition.offsets()
    return FetchResponse.PartitionData(
        partition_index=wanted.key[1],
        high_watermark=now.high_watermark,
        last_stable_offset=now.last_stable_offset,
        log_start_offset=now.log_start_offset,
        aborted_transactions=None,
        records=b"",
    )


def _records(
    wanted: Wanted, partition: Partition, fetched: Fetched, *, committed: bool
) -> FetchResponse.PartitionData:
    aborted = [
        FetchResponse.AbortedTransaction(one.producer_id, one.first_offset)
        for one in fetched.aborted
    ]
    stable = fetched.end_offset if committed else partition.offsets().last_stable_offset
    return FetchResponse.PartitionData(
        partition_index=wanted.key[1],
        high_watermark=fetched.high_watermark,
        last_stable_offset=min(stable, fetched.high_watermark),
        log_start_offset=fetched.log_start_offset,
        aborted_transactions=aborted if committed else None,
        records=fetched.slices,
    )
