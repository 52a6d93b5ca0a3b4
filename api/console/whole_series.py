"""Charts over all brokers of a cluster: the sum of all their samples, at this broker's times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, TypeVar

from msgspec.structs import replace

from tierlog.api.console.all_brokers import ask_all
from tierlog.api.console.samples import Series
from tierlog.api.console.topic_samples import TopicSeries
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange

S = TypeVar("S", Series, TopicSeries)
HELD_MS: Final = 60_000  # a sample counts until the next one, for so long
_GREATEST: Final = ("lag_ms", "lag")  # ages, and the group that is furthest behind; not sums


async def with_others(context: Context, exchange: Exchange, own: S, *, after_ms: int) -> S:
    """`own`: the samples after `after_ms`."""
    if not own.at_ms:
        return own
    path = exchange.scope["raw_path"].decode("ascii")
    earlier = f"{path}?after_ms={max(0, after_ms - HELD_MS)}"
    asked = await ask_all(context, exchange, type(own), target=earlier)
    return added_series(own, asked.found.values())


def added_series(own: S, others: Iterable[S]) -> S:
    """At the times of `own`. A broker whose last sample is too old adds nothing."""
    columns = {name: list(getattr(own, name)) for name in own.__struct_fields__ if name != "at_ms"}
    for other in others:
        places = [_at(other.at_ms, at_ms) for at_ms in own.at_ms]
        for name, column in columns.items():
            theirs, both = getattr(other, name), max if name in _GREATEST else _sum
            for at, place in enumerate(places):
                if place is not None:
                    column[at] = both(column[at], theirs[place])
    return replace(own, **columns)


def _sum(one: float, two: float) -> float:
    return round(one + two, 1)


def _at(times: list[int], at_ms: int) -> int | None:
    """Of the last sample until then, unless it is too old."""
    place = bisect_right(times, at_ms) - 1
    return place if place >= 0 and at_ms - times[place] <= HELD_MS else None
