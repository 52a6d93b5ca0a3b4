"""The page about a topic's table in an Iceberg catalog: what it has, how far it is behind the
topic, and what it refused.

* The catalog is a setting of the broker's; without it, or PyIceberg, the page says what to set.
* A catalog may hang, and PyIceberg has no time limit: one thread asks it, and only pages wait.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from tierlog.api.console.all_brokers import ask_all, part_response
from tierlog.api.console.record_browser import summary
from tierlog.api.console.rendering import fragment
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.responses import Response
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.topics.topics import Topic
from tierlog.record_format.errors import TierlogError

ANSWER_S: Final = 15.0
_ALL_PARTITIONS_MAX: Final = 1000


class PartitionLag(NamedTuple):
    """`end_offset`: None while its leader does not answer."""

    partition: int
    next_offset: int | None
    end_offset: int | None

    @property
    def lag(self) -> int | None:
        if self.end_offset is None:
            return None
        return max(0, self.end_offset - (self.next_offset or 0))


async def topic_table(context: Context, exchange: Exchange) -> Response:
    topic = context.broker.topic(exchange.topic)
    own = {n: (one.log_start_offset, one.high_watermark) for n, one in topic.partitions.items()}
    if exchange.is_forwarded:
        return part_response(own)
    page: dict[str, Any] = {"found": None, "lags": [], "silent": [], "refused": [], "problem": ""}
    if (missing := _missing(context.settings)) == "":
        page |= await _look(context, exchange, topic, own)
    return fragment(
        "table.html",
        **page,
        name=topic.record.name,
        mode=topic.effective_config()["iceberg.mode"],
        missing=missing,
    )


def _missing(settings: HttpSettings) -> str:
    if find_spec("pyiceberg") is None:
        return "pyiceberg"
    return "" if settings.find_table else "catalog"


async def _look(
    context: Context, exchange: Exchange, topic: Topic, own: dict[int, tuple[int, int]]
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(ANSWER_S):
            find, record = context.settings.find_table, topic.record
            assert find is not None, "the page says what is missing"
            found = await context.run_in(
                context.workers.tables, lambda: find(record.name, record.topic_id)
            )
    except TimeoutError:
        return {"problem": f"The catalog does not answer within {ANSWER_S:.0f} s."}
    except TierlogError as error:
        return {"problem": str(error)}
    if found is None:
        return {}
    asked = await ask_all(context, exchange, dict[int, tuple[int, int]])
    ends = {n: one for part in (*asked.found.values(), own) for n, one in part.items()}
    at = {one.partition: one.next_offset for one in found.status.partitions}
    lags = []
    for number in topic.numbers[:_ALL_PARTITIONS_MAX]:
        start, end = ends.get(number, (None, None))
        lags.append(PartitionLag(number, at.get(number, start), end))
    refused = [(one, summary(one.value)) for one in found.refused]
    return {"found": found, "refused": refused, "lags": lags, "silent": asked.silent}
