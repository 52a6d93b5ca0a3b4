"""Where a read starts: `offset` (a number or a keyword) or `timestamp`, resolved to an offset."""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

from msgspec import UNSET, UnsetType

from tierlog.api.http import strict_json
from tierlog.api.http.context import Context
from tierlog.api.http.request.times import parse_time
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.broker.partition import Fetched, Partition
from tierlog.hot_tier.log_state import Offsets

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
EARLIEST_LOCAL: Final = "earliest-local"
KEYWORDS: Final = (EARLIEST, LATEST, EARLIEST_LOCAL)


class Position(NamedTuple):
    """Exactly one of a keyword, an offset, or a time."""

    keyword: str = ""
    offset: int = -1
    timestamp: int = -1


def parse_position(
    offset: str | int | UnsetType, timestamp: str | UnsetType, *, default: str, within: str = ""
) -> Position:
    """Raises InvalidRequest. `within` is the path of the two members in a body."""
    if timestamp is not UNSET:
        if offset is not UNSET:
            strict_json.refuse_field(
                strict_json.join(within, "timestamp"), "give offset or timestamp, not both"
            )
        assert isinstance(timestamp, str)
        return Position(
            timestamp=parse_timestamp(timestamp, loc=strict_json.join(within, "timestamp"))
        )
    if offset is UNSET:
        return Position(keyword=default)
    text = str(offset)
    if text in KEYWORDS:
        return Position(keyword=text)
    value = strict_json.parse_natural(text)  # segment files have 20 digits
    if value is None or value > MAX_OFFSET:
        strict_json.refuse_field(
            strict_json.join(within, "offset"),
            f"expected a non-negative offset or one of {', '.join(KEYWORDS)}, not {text[:64]!r}",
        )
    return Position(offset=value)


def parse_timestamp(text: str, *, loc: str) -> int:
    try:
        return parse_time(text)
    except ValueError as error:
        strict_json.refuse_field(loc, str(error))


async def resolve(
    context: Context, partition: Partition, position: Position, *, committed: bool
) -> int:
    """The offset to read from. A time after the last record resolves to the end of the log."""
    if position.offset >= 0:
        return position.offset
    now = partition.offsets()  # before the lookup: records appended during it are not skipped
    if position.timestamp >= 0:
        found = await find_time(context, partition, position.timestamp)
        if found is not None:
            return found[0]
    if position.keyword == EARLIEST:
        return now.log_start_offset
    if position.keyword == EARLIEST_LOCAL:
        return max(now.local_log_start_offset, now.log_start_offset)
    return end_of(now, committed=committed)


async def find_time(
    context: Context, partition: Partition, timestamp: int
) -> tuple[int, int] | None:
    """`Partition.offset_for_timestamp` in a thread of the tier in which the log begins."""
    look = partial(partition.offset_for_timestamp, timestamp)
    return await context.read_at(partition, partition.offsets().log_start_offset, look)


def end_of(offsets: Offsets, *, committed: bool) -> int:
    return offsets.last_stable_offset if committed else offsets.high_watermark


def check_within(partition: Partition, offset: int) -> None:
    """Raise OffsetTrimmed or OffsetPastEnd without reading.

    FencedError comes first: this broker does not know the end of a partition that was taken over.
    """
    partition.check_leadership()
    now = partition.offsets()
    if now.log_start_offset <= offset <= now.high_watermark:
        return
    bounds = f"[{now.log_start_offset}, {now.high_watermark}]"
    error = now.trimmed if offset < now.log_start_offset else now.past_end
    raise error(f"offset {offset} of {partition} is outside the log, {bounds}")


def nothing_at(offset: int, now: Offsets, *, committed: bool) -> Fetched:
    """A read of no records, which the next one continues at `offset`."""
    return Fetched(
        slices=(),
        next_offset=offset,
        end_offset=end_of(now, committed=committed),
        log_start_offset=now.log_start_offset,
        high_watermark=now.high_watermark,
        tier="hot" if offset >= now.local_log_start_offset else "cold",
    )
