"""`POST /v1/fetch`: many partitions in one long poll.

* A partition that refuses is answered in its place with its problem; the others continue.
* A request waits once for a store that does not answer, or for room in the chunk cache, not once
  for each partition: afterwards partitions that are neither local nor in memory are refused like
  the first.
* A partition without a given offset that is trimmed meanwhile is read from its new start.
* The request's `max_bytes` is shared in the order of the partitions, both for what is read from the
  log and for what is shown: a partition for which nothing is left gets an empty response at its
  offset, and comes first if the client asks for that next time. The first partition with records
  always gets some.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api.http.access.grants import Grant
from api.http.context import Context
from api.http.control_requests import json_body
from api.http.exchange import Exchange
from api.http.fetch import record_json
from api.http.fetch.long_poll import AwaitedOffset, LongPoll
from api.http.fetch.positions import EARLIEST, Position, parse_position, resolve
from api.http.fetch.reading import (
    Isolation,
    MaxBytes,
    MinBytes,
    WaitMs,
    compute_text,
    work_bytes,
)
from api.http.fetch.record_json import Page
from api.http.fetch.single import FetchQuery, json_object, read_on
from api.http.responses import JSON, NO_STORE, Response
from api.http.settings import MIB
from broker.partition import Fetched, Partition
from record_format.errors import StoreUnavailable, Throttled, TierlogError

MAX_PARTITIONS: Final = 1000
STORE_ERRORS: Final = (StoreUnavailable, Throttled)
STORE_WAIT_MAX_S: Final = 5.0


class RequestedPartition(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    partition: int
    offset: int | str | UnsetType = UNSET
    max_bytes: MaxBytes = MIB


class FetchMany(msgspec.Struct, forbid_unknown_fields=True):
    partitions: Annotated[list[RequestedPartition], Meta(min_length=1, max_length=MAX_PARTITIONS)]
    max_bytes: MaxBytes = 8 * MIB
    min_bytes: MinBytes = 1
    wait_ms: WaitMs = 0
    encoding: record_json.Encoding = "utf8"
    isolation: Isolation = "read_uncommitted"


class Refused(NamedTuple):
    topic: str
    partition: int
    error: Exception


class PartitionFetch(NamedTuple):
    """A partition, where it is read from (`position` is what was asked for), and what was found
    there.
    """

    partition: Partition
    position: Position
    offset: int
    max_bytes: int
    fetched: Fetched | None = None
    page_bytes: int = 0  # of `max_bytes`, what the places before it left over


class Room:
    """What the places before have left over of what one response may show."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes, self._records = size_bytes, record_json.PAGE_RECORDS

    def fill(self, place: PartitionFetch, fetched: Fetched, *, nowait: bool) -> Page:
        if self._bytes <= 0 or self._records <= 0:
            return Page([], place.offset, 0)
        page = record_json.read_page(
            fetched,
            offset=place.offset,
            max_bytes=min(place.page_bytes, self._bytes),
            max_records=self._records,
            nowait=nowait,
        )
        self._bytes -= page.size_bytes
        self._records -= page.record_count
        return page


_DECODER: Final = msgspec.json.Decoder(FetchMany)


async def fetch_many(context: Context, exchange: Exchange) -> Response:
    wanted = await json_body(context, exchange, _DECODER)
    positions = [
        parse_position(one.offset, UNSET, default=EARLIEST, within=f"partitions[{index}]")
        for index, one in enumerate(wanted.partitions)
    ]
    places = [
        await _place(context, exchange.grant, one, position, wanted)
        for one, position in zip(wanted.partitions, positions, strict=True)
    ]
    with LongPoll(context, exchange, wait_ms=wanted.wait_ms) as poll:
        places = await _read_all(context, places, wanted)
        while not poll.over and not _is_enough(places, wanted):
            await poll.wait(_beyonds(places))
            context.access.recheck(exchange)
            places = await _read_all(context, places, wanted)
    return await _response(context, exchange, places, wanted)


async def _place(
    context: Context,
    grant: Grant,
    one: RequestedPartition,
    position: Position,
    wanted: FetchMany,
) -> PartitionFetch | Refused:
    try:
        grant.check_topic(one.topic)
        partition = context.broker.partition(one.topic, one.partition)
        committed = wanted.isolation == "read_committed"
        offset = await resolve(context, partition, position, committed=committed)
    except TierlogError as error:
        return Refused(one.topic, one.partition, error)
    return PartitionFetch(partition, position, offset, one.max_bytes)


async def _read_all(
    context: Context, places: Sequence[PartitionFetch | Refused], wanted: FetchMany
) -> list[PartitionFetch | Refused]:
    room, in_vain_s = wanted.max_bytes, 0.0
    impatience: TierlogError | None = None
    found: list[PartitionFetch | Refused] = []
    for place in places:
        if isinstance(place, PartitionFetch):
            began_s = time.monotonic()
            place = await _read_one(context, place, wanted, room, impatience=impatience)
            if isinstance(place, Refused) and isinstance(place.error, STORE_ERRORS):
                in_vain_s += time.monotonic() - began_s
                if in_vain_s > STORE_WAIT_MAX_S:
                    kind = Throttled if isinstance(place.error, Throttled) else StoreUnavailable
                    impatience = kind("not waited for: the partitions before did so in vain")
            if isinstance(place, PartitionFetch) and place.fetched is not None:
                room -= place.fetched.size_bytes
        found.append(place)
    return found


async def _read_one(
    context: Context,
    place: PartitionFetch,
    wanted: FetchMany,
    room: int,
    *,
    impatience: TierlogError | None,
) -> PartitionFetch | Refused:
    """With no room left only the offsets are reported; `impatience` is raised instead of waiting
    for the store.
    """
    page_bytes = max(1, min(place.max_bytes, room))
    query = FetchQuery(max_bytes=page_bytes, isolation=wanted.isolation)
    partition, position = place.partition, place.position
    try:
        if impatience is not None and _waits_for_store(place):
            raise impatience
        _, offset, fetched = await read_on(context, partition, position, place.offset, query)
    except TierlogError as error:
        return Refused(partition.topic, partition.number, error)
    if room <= 0:
        fetched = fetched._replace(slices=(), next_offset=offset)
    return place._replace(offset=offset, fetched=fetched, page_bytes=page_bytes)


def _waits_for_store(place: PartitionFetch) -> bool:
    partition, offset = place.partition, place.offset
    is_cold = offset < partition.offsets().local_log_start_offset
    return is_cold and partition.try_read(offset, max_bytes=1) is None


def _is_enough(places: Sequence[PartitionFetch | Refused], wanted: FetchMany) -> bool:
    """A refusal counts as news too: it is answered at once."""
    found = [
        place.fetched for place in places if isinstance(place, PartitionFetch) and place.fetched
    ]
    if len(found) < len(places):
        return True
    size = sum(fetched.size_bytes for fetched in found)
    full = any(fetched.slices and not fetched.at_end for fetched in found)
    return size >= min(wanted.min_bytes, wanted.max_bytes) or full


def _beyonds(places: Sequence[PartitionFetch | Refused]) -> list[AwaitedOffset]:
    return [
        AwaitedOffset(place.partition, place.fetched.high_watermark)
        for place in places
        if isinstance(place, PartitionFetch) and place.fetched is not None
    ]


async def _response(
    context: Context,
    exchange: Exchange,
    places: Sequence[PartitionFetch | Refused],
    wanted: FetchMany,
) -> Response:
    work = 0
    for place in places:
        if isinstance(place, PartitionFetch) and place.fetched is not None:
            fetched = place.fetched
            work += work_bytes(fetched, place.offset)
            records = max(0, fetched.next_offset - place.offset)
            context.metrics.requests.fetched(fetched.tier, fetched.size_bytes, records=records)

    def write(nowait: bool) -> bytes:
        room = Room(wanted.max_bytes)
        shown = [
            _shown(context, exchange, place, room, wanted=wanted, nowait=nowait) for place in places
        ]
        return b'{"partitions":[' + b",".join(shown) + b"]}"

    return Response(200, [JSON, NO_STORE], await compute_text(context, work, write))


def _shown(
    context: Context,
    exchange: Exchange,
    place: PartitionFetch | Refused,
    room: Room,
    *,
    wanted: FetchMany,
    nowait: bool,
) -> bytes:
    if isinstance(place, Refused):
        return _shown_error(context, exchange, place)
    assert place.fetched is not None, "it was read"
    try:
        page = room.fill(place, place.fetched, nowait=nowait)
    except TierlogError as error:
        refused = Refused(place.partition.topic, place.partition.number, error)
        return _shown_error(context, exchange, refused)
    records = record_json.write_array(page, wanted.encoding)
    return json_object(place.partition, place.fetched, records, next_offset=page.next_offset)


def _shown_error(context: Context, exchange: Exchange, refused: Refused) -> bytes:
    problem = context.problem(exchange, refused.error)
    return msgspec.json.encode(
        {
            "topic": refused.topic,
            "partition": refused.partition,
            "error": problem.document,
        }
    )
