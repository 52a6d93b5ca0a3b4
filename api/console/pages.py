"""The console's calls: one page, and the HTML fragments that it swaps in.

* These calls only read. The console changes something by calling the API: see `actions.py`.
* A fragment's path is the part of the page's address after `#`: `/console/topics/flights` is shown
  at `/#/topics/flights`.
* The page itself contains no data, so it needs no token; it asks for one and sends it with every
  request for a fragment.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Awaitable, Iterable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.console import actions, topic_pages
from tierlog.api.console.record_browser import RecordsQuery, record_page, time_axis
from tierlog.api.console.rendering import HEADERS, NOTHING_NEW, fragment, page
from tierlog.api.console.samples import Sampler, series
from tierlog.api.console.search import SearchQuery
from tierlog.api.console.search_pages import DownloadQuery, Searches, record
from tierlog.api.console.topic_samples import topic_series
from tierlog.api.http.access.scopes import CONSOLE_NAMES
from tierlog.api.http.admin.groups import group_state
from tierlog.api.http.admin.topics import FromOffset
from tierlog.api.http.calls import Call, Handler
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.problems import corruption_detail
from tierlog.api.http.responses import Response, json_response
from tierlog.api.http.schemas import GroupState
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.api.http.static_pages import PackagedFiles
from tierlog.api.serving.grants import Grant
from tierlog.broker.groups import Groups, OffsetState
from tierlog.broker.partition import Partition
from tierlog.broker.reports import StorageReport
from tierlog.object_store.ledger import FREE, PriceTable
from tierlog.record_format.errors import CorruptDataError, TierlogError, UnknownGroup

_STATIC: Final = PackagedFiles("tierlog.api.console", "static", CONSOLE_NAMES, HEADERS)
_FILES: Final = Call(
    method="GET",
    path="/console/static/{file}",
    endpoint=_STATIC.serve,
    tag="console",
    summary="",
)
_DEFAULT_HOSTS: Final = ("127.0.0.1:8640", "localhost:8640")
_TOPIC: Final = "/console/topics/{topic}"
_PARTITION: Final = _TOPIC + "/partitions/{partition}"
GROUPS_SHOWN: Final = 200
GROUP_KEYS: Final = {field: attrgetter(field) for field in ("name", "lag")}
TROUBLES_SHOWN: Final = 5  # a broker that was replaced has one per partition
PageNumber = Annotated[int, Meta(ge=1, le=1_000_000)]


def _sort_of(keys: Iterable[str]) -> Meta:
    """One of `keys`, with a minus for descending."""
    return Meta(pattern=f"^-?({'|'.join(keys)})$")


class TopicsQuery(msgspec.Struct, forbid_unknown_fields=True):
    filter: Annotated[str, Meta(max_length=249)] = ""
    sort: Annotated[str, _sort_of(topic_pages.TOPIC_KEYS)] = "name"
    page: PageNumber = 1


class TopicQuery(msgspec.Struct, forbid_unknown_fields=True):
    sort: Annotated[str, _sort_of(topic_pages.PARTITION_KEYS)] = "partition"
    page: PageNumber = 1


class SegmentsQuery(msgspec.Struct, forbid_unknown_fields=True):
    from_offset: FromOffset = 0


class ManifestQuery(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`seen`: the version in force that the page shows already."""

    version: Annotated[int, Meta(ge=1, le=MAX_OFFSET)] | UnsetType = UNSET
    from_offset: FromOffset = 0
    seen: Annotated[int, Meta(ge=0, le=MAX_OFFSET)] = 0


class GroupsQuery(msgspec.Struct, forbid_unknown_fields=True):
    sort: Annotated[str, _sort_of(GROUP_KEYS)] = "name"


class SamplesQuery(msgspec.Struct, forbid_unknown_fields=True):
    after_ms: Annotated[int, Meta(ge=0)] = 0


class GroupLine(NamedTuple):
    """`offsets`: in topics visible to the token, by falling lag. `readers`: the client id of the
    member that reads a partition, by topic and partition.
    """

    name: str
    offsets: list[OffsetState]
    state: str
    members: int
    readers: dict[tuple[str, int], str]

    @property
    def lag(self) -> int:
        return sum(one.lag for one in self.offsets)


class Console:
    """The console's calls, and the sampler that runs between `start` and `stop`."""

    def __init__(self, context: Context) -> None:
        self._sampler = Sampler(context, interval_ms=context.settings.console_sample_ms)
        self._searches = Searches()
        self._sampling: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sampling = asyncio.get_running_loop().create_task(self._sampler.keep_sampling())

    async def stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling

    def calls(self) -> tuple[Call, ...]:
        handlers: dict[str, tuple[Handler, type[msgspec.Struct] | None]] = {
            "/": (shell, None),
            "/console/overview": (self.overview, TopicsQuery),
            "/console/summary": (self.summary, None),
            "/console/samples": (self.samples, SamplesQuery),
            "/console/topics": (topics, TopicsQuery),
            "/console/groups": (groups, GroupsQuery),
            "/console/store": (store, None),
            "/console/create": (actions.create_page, None),
            "/console/numbers": (actions.numbers, actions.NumbersQuery),
            "/console/group": (actions.group_page, actions.GroupQuery),
            _TOPIC: (topic, TopicQuery),
            _TOPIC + "/samples": (self.topic_samples, SamplesQuery),
            _TOPIC + "/search": (self._searches.form, SearchQuery),
            _TOPIC + "/found": (self._searches.found, SearchQuery),
            _TOPIC + "/download": (self._searches.download, DownloadQuery),
            _TOPIC + "/tail": (topic_tail, None),
            _TOPIC + "/produce": (actions.produce_page, None),
            _TOPIC + "/settings": (actions.settings_page, None),
            _TOPIC + "/storage": (actions.storage_page, None),
            _PARTITION + "/records": (records, RecordsQuery),
            _PARTITION + "/records/{offset}": (record, None),
            _PARTITION + "/segments": (segments, SegmentsQuery),
            _PARTITION + "/manifest": (manifest, ManifestQuery),
            _PARTITION + "/tail": (partition_tail, None),
        }
        views = (
            Call(method="GET", path=path, handler=handler, query=query, tag="console", summary="")
            for path, (handler, query) in handlers.items()
        )
        return (_FILES, *views)

    async def overview(self, context: Context, exchange: Exchange) -> Response:
        query = exchange.query(TopicsQuery)
        listed = await _listed(context, exchange, query)
        facts: dict[str, Any] = {"report": None}
        if not exchange.grant.topics:
            facts = await self._facts(context)
        return fragment("overview.html", **facts, **listed, **_server_flag(exchange))

    async def summary(self, context: Context, _: Exchange) -> Response:
        return fragment("summary.html", **await self._facts(context))

    async def samples(self, _: Context, exchange: Exchange) -> Response:
        query = exchange.query(SamplesQuery)
        return json_response(series(self._sampler.samples, after_ms=query.after_ms))

    async def topic_samples(self, context: Context, exchange: Exchange) -> Response:
        query, topic = exchange.query(SamplesQuery), context.broker.topic(exchange.topic)
        samples = self._sampler.topics.look_at(topic.record.name)
        return json_response(topic_series(samples, after_ms=query.after_ms))

    async def _facts(self, context: Context) -> dict[str, Any]:
        """As of the last sample, so that showing the page does not sum up all partitions."""
        report = self._sampler.report or await self._sampler.take()
        reasons, degraded = await context.read(context.broker.readiness)
        troubles = [context.shorten_paths(one) for one in (*reasons, *degraded)]
        return {"report": report, "hit_rate": _hit_rate(report), **_troubles(troubles)}


def _troubles(troubles: list[str]) -> dict[str, Any]:
    more = max(0, len(troubles) - TROUBLES_SHOWN)
    return {"troubles": troubles[:TROUBLES_SHOWN], "more_troubles": more}


async def shell(_: Context, __: Exchange) -> Response:
    return page("shell.html")


async def topics(context: Context, exchange: Exchange) -> Response:
    query = exchange.query(TopicsQuery)
    return fragment(
        "topics.html", **await _listed(context, exchange, query), **_server_flag(exchange)
    )


async def _listed(context: Context, exchange: Exchange, query: TopicsQuery) -> dict[str, Any]:
    """A page of the topics visible to the token."""

    def found() -> tuple[topic_pages.TopicPage, int]:
        live = [
            topic
            for topic in topic_pages.live_topics(context.broker)
            if exchange.grant.sees_topic(topic.record.name)
        ]
        wanted, sort = query.filter.strip(), query.sort
        return topic_pages.topic_page(live, wanted=wanted, sort=sort, page=query.page), len(live)

    shown, count = await context.read(found)
    return {
        "topics": shown,
        "topic_count": count,
        "filter": query.filter,
        "sort": query.sort,
        "create_refusal": actions.refusal(exchange.grant, "POST", "/v1/topics"),
    }


def _server_flag(exchange: Exchange) -> dict[str, Any]:
    """The CLI's `--server` flag for the examples on an empty broker, by the browser's address."""
    host = exchange.header(b"host") or _DEFAULT_HOSTS[0]
    flag = ""
    if host not in _DEFAULT_HOSTS or exchange.scope.get("scheme") == "https":
        flag = " --server " + shlex.quote(f"{exchange.scope.get('scheme', 'http')}://{host}")
    return {"server_flag": flag}


async def groups(context: Context, exchange: Exchange) -> Response:
    sort = exchange.query(GroupsQuery).sort
    found = await context.read(_group_lines, context.broker.groups, exchange.grant, sort=sort)
    return fragment(
        "groups.html", groups=found, sort=sort, shown_max=GROUPS_SHOWN, **_server_flag(exchange)
    )


def _group_lines(groups: Groups, grant: Grant, *, sort: str) -> list[GroupLine]:
    """At most GROUPS_SHOWN, plus one to indicate that there are more."""
    lines = list(_lines(groups, grant))
    ordered = lines if sort == "name" else topic_pages.sorted_by(sort, lines, GROUP_KEYS)
    return list(islice(ordered, GROUPS_SHOWN + 1))


def _lines(groups: Groups, grant: Grant) -> Iterator[GroupLine]:
    for name in groups.names():
        with contextlib.suppress(UnknownGroup):  # deleted meanwhile, or of others
            yield _group_line(group_state(groups, grant, name))


def _group_line(found: GroupState) -> GroupLine:
    readers = {
        (row.topic, partition): member.client_id
        for member in found.members
        for row in member.assignment
        for partition in row.partitions
    }
    offsets = sorted(found.offsets, key=lambda one: (-one.lag, one.topic, one.partition))
    return GroupLine(found.group, offsets, found.state, len(found.members), readers)


async def store(context: Context, _: Exchange) -> Response:
    report = await context.read(context.broker.storage_report)
    prices = context.broker.settings.prices
    bucket = context.broker.bucket
    return fragment(
        "store.html",
        report=report,
        trouble=bucket.store_status.trouble if bucket else None,
        hit_rate=_hit_rate(report),
        a_month=report.cold_bytes / 1e9 * prices.stored_per_gb_month,
        priced=priced_by(prices),
    )


def priced_by(prices: PriceTable) -> str | None:
    """The source of the prices; None if all are zero."""
    if prices == FREE:
        return None
    if prices == PriceTable():
        return "the list prices of S3 Standard in us-east-1"
    return "the prices in this broker's settings"


def _hit_rate(report: StorageReport) -> float | None:
    cache = report.cache
    looked_up = cache.hits + cache.misses if cache is not None else 0
    return cache.hits / looked_up if cache is not None and looked_up else None


async def topic(context: Context, exchange: Exchange) -> Response:
    query = exchange.query(TopicQuery)
    found = context.broker.topic(exchange.topic)
    drawn = await context.read(topic_pages.partition_page, found, sort=query.sort, page=query.page)
    return fragment(
        "topic.html",
        name=found.record.name,
        topic_id=found.record.topic_id,
        partitions=drawn,
        sort=query.sort,
        **_troubles(
            [
                f"Partition {number}: {_why(context, one.reason)}"
                for number, one in found.damaged.items()
            ]
            + [
                f"Partition {line.number}: {context.shorten_paths(line.trouble.reason)}"
                for line in drawn.lines
                if isinstance(line, topic_pages.PartitionLine) and line.trouble
            ]
        ),
        overrides=found.config.overrides,
        effective=found.config.effective(),
    )


def _why(context: Context, reason: TierlogError) -> str:
    return (
        corruption_detail(reason)
        if isinstance(reason, CorruptDataError)
        else context.shorten_paths(str(reason))
    )


async def topic_tail(context: Context, exchange: Exchange) -> Response:
    found = context.broker.topic(exchange.topic)
    return fragment("topic_tail.html", name=found.record.name)


async def _head(context: Context, partition: Partition, tab: str) -> dict[str, Any]:
    """The values for the top of every tab of a partition."""
    line = await context.read(topic_pages.partition_line, partition)
    return {"name": partition.topic, "number": partition.number, "line": line, "tab": tab}


async def _found(context: Context, exchange: Exchange, page: Awaitable[object]) -> dict[str, Any]:
    """The body of a partition's tab, or the error that is shown in its place, below the tabs."""
    try:
        return {"found": await page, "refusal": ""}
    except TierlogError as error:
        problem = context.problem(exchange, error).document
        return {"found": None, "refusal": f"{problem['title']}: {problem['detail']}"}


async def records(context: Context, exchange: Exchange) -> Response:
    query = exchange.query(RecordsQuery)
    partition = context.broker.partition(exchange.topic, exchange.partition)
    head = await _head(context, partition, "records")
    found = await _found(context, exchange, record_page(context, partition, query))
    axis = None
    with contextlib.suppress(TierlogError):  # the page says why, or does without
        start = partition.offsets().log_start_offset
        axis = await context.read_at(partition, start, partial(time_axis, partition))
    return fragment("records.html", **head, **found, query=query, axis=axis)


async def segments(context: Context, exchange: Exchange) -> Response:
    query = exchange.query(SegmentsQuery)
    partition = context.broker.partition(exchange.topic, exchange.partition)
    head = await _head(context, partition, "segments")
    page = context.read_cold(topic_pages.segment_page, partition, from_offset=query.from_offset)
    found = await _found(context, exchange, page)
    return fragment("segments.html", **head, **found, from_offset=query.from_offset)


async def manifest(context: Context, exchange: Exchange) -> Response:
    query = exchange.query(ManifestQuery)
    partition = context.broker.partition(exchange.topic, exchange.partition)
    in_force = partition.manifest
    if in_force is not None and query.seen == in_force.version:
        return NOTHING_NEW  # an open page costs no request to the store
    head = await _head(context, partition, "manifest")
    version = None if isinstance(query.version, UnsetType) else query.version
    page = context.read_cold(
        topic_pages.manifest_page, partition, version=version, from_offset=query.from_offset
    )
    found = await _found(context, exchange, page)
    return fragment(
        "manifest.html",
        **head,
        **found,
        query=msgspec.to_builtins(query),
        has_bucket=partition.has_bucket,
    )


async def partition_tail(context: Context, exchange: Exchange) -> Response:
    partition = context.broker.partition(exchange.topic, exchange.partition)
    return fragment("partition_tail.html", **await _head(context, partition, "tail"))
