"""ListOffsets and OffsetForLeaderEpoch: which offset belongs to a time, an end, or a leader epoch.

* What no file has to be read for is answered on the event loop; a look-up by time is made in a
  thread of the tier in which the log begins, all those of a request at once.
* A consumer is told nothing above the high watermark, or above the last stable offset if it reads
  committed records alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, NamedTuple

from tierlog.api.kafka.calls import Answer, Call
from tierlog.api.kafka.error_codes import Code, Refused, code_of
from tierlog.api.kafka.partitions import DESCRIBING, check_leader_epoch, topic_of
from tierlog.broker.partition.partition import Partition
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.kafka_messages.messages import (
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)

_READ_COMMITTED: Final = 1
_LATEST: Final = -1
_MAX_TIMESTAMP: Final = -3
_WITH_EPOCHS: Final = 4  # the first version that can carry them


class _Special(NamedTuple):
    """A time that is none: since which version, and the offset; None if it has to be looked up."""

    since: int
    offset: Callable[[Partition], int] | None


def _log_start(partition: Partition) -> int:
    return partition.offsets().log_start_offset


def _local_start(partition: Partition) -> int:
    return partition.offsets().local_log_start_offset


def _latest_tiered(partition: Partition) -> int:
    """The last offset in the bucket; -1 if nothing is."""
    return partition.cold_end_offset - 1


def _earliest_pending_upload(partition: Partition) -> int:
    """The first that only this disk has; -1 if none is ever uploaded."""
    return max(partition.cold_end_offset, _log_start(partition)) if partition.offloads else -1


def _high_watermark(partition: Partition) -> int:
    return partition.high_watermark


_BY_TIME: Final = _Special(1, None)
_SPECIAL: Final[Mapping[int, _Special]] = {
    _LATEST: _Special(1, _high_watermark),
    -2: _Special(1, _log_start),
    _MAX_TIMESTAMP: _Special(7, None),
    -4: _Special(8, _local_start),
    -5: _Special(9, _latest_tiered),
    -6: _Special(11, _earliest_pending_upload),
}
_Wanted = ListOffsetsRequest.ListOffsetsPartition
_Found = ListOffsetsResponse.ListOffsetsPartitionResponse


def list_offsets(call: Call, request: ListOffsetsRequest) -> Answer | Coroutine[Any, Any, Answer]:
    work = _ListOffsets(call, request)
    return work.look_up() if work.look_ups else work.answer()


class _ListOffsets:
    """`look_ups`: those that need a thread."""

    def __init__(self, call: Call, request: ListOffsetsRequest) -> None:
        self._call, self._committed = call, request.isolation_level == _READ_COMMITTED
        named = (
            (topic.name, it.partition_index) for topic in request.topics for it in topic.partitions
        )
        self._counts = Counter(named)
        self.look_ups: list[tuple[_Found, Partition, int]] = []
        self._topics = [
            ListOffsetsResponse.ListOffsetsTopicResponse(
                name=topic.name, partitions=[self._found(topic.name, it) for it in _once(topic)]
            )
            for topic in request.topics
        ]

    def answer(self) -> ListOffsetsResponse:
        return ListOffsetsResponse(topics=self._topics)

    def _found(self, topic: str, wanted: _Wanted) -> _Found:
        found = _Found(partition_index=wanted.partition_index)
        try:
            if self._counts[topic, wanted.partition_index] > 1:
                raise Refused(Code.INVALID_REQUEST)
            partition = topic_of(self._call, topic, DESCRIBING).partition(wanted.partition_index)
            partition.check_leadership()
            check_leader_epoch(partition, wanted.current_leader_epoch)
            self._find(found, partition, wanted.timestamp)
        except TierlogError as error:
            found.error_code = code_of(error)
        return found

    def _find(self, found: _Found, partition: Partition, timestamp: int) -> None:
        special = _BY_TIME if timestamp >= 0 else _SPECIAL.get(timestamp)
        if special is None or self._call.version < special.since:
            raise Refused(Code.UNSUPPORTED_VERSION)
        if special.offset is None:
            self.look_ups.append((found, partition, timestamp))
            return
        found.offset = special.offset(partition)
        if timestamp == _LATEST:
            partition.check_end_known()
            now = partition.offsets()
            found.offset = now.last_stable_offset if self._committed else now.high_watermark
            self._set_epoch(found, now.leader_epoch)
        elif found.offset >= 0:
            self._set_epoch(found, partition.epoch_of(found.offset))

    def _set_epoch(self, found: _Found, epoch: int) -> None:
        if self._call.version >= _WITH_EPOCHS:
            found.leader_epoch = epoch

    async def look_up(self) -> ListOffsetsResponse:
        await asyncio.gather(*(self._look_up(*one) for one in self.look_ups))
        return self.answer()

    async def _look_up(self, found: _Found, partition: Partition, timestamp: int) -> None:
        threads = self._call.context.workers.threads_for(partition, _log_start(partition))
        try:
            at = await asyncio.wrap_future(threads.submit(_first_at, partition, timestamp))
        except (TierlogError, OSError) as error:
            found.error_code = code_of(error)
            return
        now = partition.offsets()
        end = now.last_stable_offset if self._committed else now.high_watermark
        if at is not None and at[0] < end:
            found.offset, found.timestamp = at
            self._set_epoch(found, partition.epoch_of(found.offset))


def _once(topic: ListOffsetsRequest.ListOffsetsTopic) -> Iterable[_Wanted]:
    """A partition that is named twice is refused once."""
    return {wanted.partition_index: wanted for wanted in topic.partitions}.values()


def _first_at(partition: Partition, timestamp: int) -> tuple[int, int] | None:
    """(offset, timestamp) of the first record at or after the time."""
    if timestamp == _MAX_TIMESTAMP:
        greatest = partition.max_timestamp()
        if greatest is None:
            return None
        timestamp = greatest
    return partition.offset_for_timestamp(timestamp)


def offset_for_leader_epoch(
    call: Call, request: OffsetForLeaderEpochRequest
) -> OffsetForLeaderEpochResponse:
    return OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=[_epoch_end(call, topic.topic, one) for one in topic.partitions],
            )
            for topic in request.topics
        ]
    )


def _epoch_end(
    call: Call, topic: str, wanted: OffsetForLeaderEpochRequest.OffsetForLeaderPartition
) -> OffsetForLeaderEpochResponse.EpochEndOffset:
    found = OffsetForLeaderEpochResponse.EpochEndOffset(partition=wanted.partition)
    try:
        partition = topic_of(call, topic, DESCRIBING).partition(wanted.partition)
        partition.check_leadership()
        check_leader_epoch(partition, wanted.current_leader_epoch)
        found.leader_epoch, found.end_offset = partition.end_of_epoch(wanted.leader_epoch)
    except TierlogError as error:
        found.error_code = code_of(error)
    return found
