"""The console's calls: one page, and the HTML fragments that it swaps in.

* These calls only read. The console changes something by calling the API: see `actions.py`.
* A fragment's path is the part of the page's address after `#`: `/console/topics/flights` is shown
  at `/#/topics/flights`.
* The page itself contains no data, so it needs no token; it asks for one and sends it with every
  request for a fragment.
* In a cluster each page shows what all brokers have (`all_brokers`); a request for a page of one
  partition is passed on to its leader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from functools import partial
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from tierlog.api.console import (
    actions,
    broker_pages,
    group_pages,
    schema_pages,
    table_pages,
    topic_pages,
    transaction_pages,
)
from tierlog.api.console.all_brokers import ALONE, ask_all, own_node, part_response
from tierlog.api.console.record_browser import RecordsQuery, record_page, time_axis
from tierlog.api.console.rendering import HEADERS, NOTHING_NEW, fragment, page, server_flag
from tierlog.api.console.replicas import lacking, replicas_of
from tierlog.api.console.samples import Sampler, series
from tierlog.api.console.search import SearchQuery
from tierlog.api.console.search_pages import DownloadQuery, Searches, record
from tierlog.api.console.topic_samples import topic_series
from tierlog.api.console.whole_series import with_others
from tierlog.api.http.access.scopes import CONSOLE_NAMES
from tierlog.api.http.admin.operations import whole_storage
from tierlog.api.http.admin.topics import FromOffset
from tierlog.api.http.calls import Call, Handler
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.problems import corruption_detail
from tierlog.api.http.responses import Response, json_response
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.api.http.static_pages import PackagedFiles
from tierlog.api.serving.grants import Grant
from tierlog.broker.partition.partition import Partition
from tierlog.broker.reports import StorageReport
from tierlog.broker.topics.topics import Topic
from tierlog.object_store.ledger import FREE, PriceTable
from tierlog.record_format.errors import (
    CorruptDataError,
    LeaderUnknown,
    NotLeader,
    TierlogError,
)

_STATIC: Final = PackagedFiles("tierlog.api.console", "static", CONSOLE_NAMES, HEADERS)
_FILES: Final = Call(
    method="GET",
    path="/console/static/{file}",
    endpoint=_STATIC.serve,
    tag="console",
    summary="",
)
_TOPIC: Final = "/console/topics/{topic}"
_PARTITION: Final = _TOPIC + "/partitions/{partition}"
TROUBLES_SHOWN: Final = 5  # a broker that was replaced has one per partition
PageNumber = Annotated[int, Meta(ge=1, le=1_000_000)]


class TopicsQuery(msgspec.Struct, forbid_unknown_fields=True):
    filter: Annotated[str, Meta(max_length=249)] = ""
    sort: Annotated[str, topic_pages.sort_of(topic_pages.TOPIC_KEYS)] = "name"
    page: PageNumber = 1


class TopicQuery(msgspec.Struct, forbid_unknown_fields=True):
    sort: Annotated[str, topic_pages.sort_of(topic_pages.PARTITION_KEYS)] = "partition"
    page: PageNumber = 1


class SegmentsQuery(msgspec.Struct, forbid_unknown_fields=True):
    from_offset: FromOffset = 0


class ManifestQuery(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`seen`: the version in force that the page shows already."""

    version: Annotated[int, Meta(ge=1, le=MAX_OFFSET)] | UnsetType = UNSET
    from_offset: FromOffset = 0
    seen: Annotated[int, Meta(ge=0, le=MAX_OFFSET)] = 0


class SamplesQuery(msgspec.Struct, forbid_unknown_fields=True):
    after_ms: Annotated[int, Meta(ge=0)] = 0


class FactsPart(msgspec.Struct, frozen=True):
    """What a broker says of itself. `troubles`: of its partitions, or of its store."""

    report: StorageReport
    troubles: list[str]


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
            "/console/groups": (group_pages.groups, group_pages.GroupsQuery),
            "/console/group": (group_pages.group, group_pages.GroupQuery),
            "/console/transactions": (transaction_pages.transactions, None),
            "/console/subjects": (schema_pages.subjects, schema_pages.SubjectsQuery),
            "/console/subject": (schema_pages.subject, schema_pages.SubjectQuery),
            "/console/store": (store, None),
            "/console/brokers": (self.brokers, None),
            "/console/balance": (broker_pages.balance_page, None),
            "/console/drain": (broker_pages.drain_page, broker_pages.DrainQuery),
            "/console/create": (actions.create_page, None),
            "/console/numbers": (actions.numbers, actions.NumbersQuery),
            "/console/offsets": (actions.offsets_page, actions.OffsetsQuery),
            _TOPIC: (topic, TopicQuery),
            _TOPIC + "/samples": (self.topic_samples, SamplesQuery),
            _TOPIC + "/search": (self._searches.form, SearchQuery),
            _TOPIC + "/found": (self._searches.found, SearchQuery),
            _TOPIC + "/download": (self._searches.download, DownloadQuery),
            _TOPIC + "/tail": (topic_tail, None),
            _TOPIC + "/schemas": (schema_pages.topic_schemas, None),
            _TOPIC + "/table": (table_pages.topic_table, None),
            _TOPIC + "/produce": (actions.produce_page, None),
            _TOPIC + "/settings": (actions.settings_page, None),
            _TOPIC + "/storage": (actions.storage_page, None),
            _PARTITION + "/leader": (broker_pages.move_page, broker_pages.MoveQuery),
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
        address = f"/console/topics?{urlencode(msgspec.to_builtins(query))}"
        listed = _listed(context, exchange, query, address)
        facts: dict[str, Any] = {"report": None}
        if exchange.grant.topics:
            shown = await listed
        else:
            shown, facts = await asyncio.gather(listed, self._facts(context, exchange))
        return fragment("overview.html", **facts, **shown, server_flag=server_flag(exchange))

    async def summary(self, context: Context, exchange: Exchange) -> Response:
        if exchange.is_forwarded:
            return part_response(await self._own_facts(context))
        return fragment("summary.html", **await self._facts(context, exchange))

    async def samples(self, context: Context, exchange: Exchange) -> Response:
        after_ms = exchange.query(SamplesQuery).after_ms
        own = series(self._sampler.samples, after_ms=after_ms)
        return json_response(await with_others(context, exchange, own, after_ms=after_ms))

    async def topic_samples(self, context: Context, exchange: Exchange) -> Response:
        after_ms = exchange.query(SamplesQuery).after_ms
        samples = self._sampler.topics.look_at(context.broker.topic(exchange.topic).record.name)
        own = topic_series(samples, after_ms=after_ms)
        return json_response(await with_others(context, exchange, own, after_ms=after_ms))

    async def brokers(self, context: Context, exchange: Exchange) -> Response:
        return await broker_pages.brokers(context, exchange, self._sampler)

    async def _own_facts(self, context: Context) -> FactsPart:
        """As of the last sample, so that showing the page does not sum up all partitions."""
        report = self._sampler.report or await self._sampler.take()
        reasons, degraded = await context.read(context.broker.readiness)
        troubles = [context.shorten_paths(one) for one in (*reasons, *degraded)]
        return FactsPart(replace(report, topics=[]), troubles)

    async def _facts(self, context: Context, exchange: Exchange) -> dict[str, Any]:
        own = await self._own_facts(context)
        asked = await ask_all(context, exchange, FactsPart, target="/console/summary")
        parts = sorted({own_node(context): own, **asked.found}.items())
        report = whole_storage([one.report for _, one in parts])
        troubles = [
            _by_broker(node_id, trouble) for node_id, one in parts for trouble in one.troubles
        ]
        return {"report": report, "hit_rate": _hit_rate(report), **_troubles(troubles)}


def _by_broker(node_id: int, trouble: str) -> str:
    return trouble if node_id == ALONE else f"Broker {node_id}: {trouble}"


def _troubles(troubles: list[str]) -> dict[str, Any]:
    more = max(0, len(troubles) - TROUBLES_SHOWN)
    return {"troubles": troubles[:TROUBLES_SHOWN], "more_troubles": more}


async def shell(context: Context, _: Exchange) -> Response:
    return page("shell.html", in_cluster=context.broker.cluster is not None)


async def topics(context: Context, exchange: Exchange) -> Response:
    query = exchange.query(TopicsQuery)
    if exchange.is_forwarded:
        wanted = partial(topic_pages.topic_parts, sort=query.sort, page=query.page)
        found = partial(_visible_topics, context, exchange.grant)
        return part_response(
            await context.read(lambda: wanted(found(), wanted=query.filter.strip()))
        )
    return fragment(
        "topics.html", **await _listed(context, exchange, query), server_flag=server_flag(exchange)
    )


async def _listed(
    context: Context, exchange: Exchange, query: TopicsQuery, address: str = ""
) -> dict[str, Any]:
    """A page of the topics visible to the token. `address`: where the others' parts are."""
    asked = await ask_all(context, exchange, list[topic_pages.TopicPart], target=address)

    def found() -> tuple[topic_pages.TopicPage, int]:
        live = _visible_topics(context, exchange.grant)
        others = [one for part in asked.found.values() for one in part]
        wanted, sort = query.filter.strip(), query.sort
        page = topic_pages.topic_page(
            live,
            wanted=wanted,
            sort=sort,
            page=query.page,
            others=others,
            lacking=partial(lacking, context),
        )
        return page, len(live)

    shown, count = await context.read(found)
    return {
        "topics": shown,
        "topic_count": count,
        "filter": query.filter,
        "sort": query.sort,
        "silent": asked.silent,
        "create_refusal": actions.refusal(exchange.grant, "POST", "/v1/topics"),
    }


def _visible_topics(context: Context, grant: Grant) -> list[Topic]:
    found = topic_pages.live_topics(context.broker)
    return [topic for topic in found if grant.sees_topic(topic.record.name)]


async def store(context: Context, exchange: Exchange) -> Response:
    report = await context.read(context.broker.storage_report)
    bucket = context.broker.bucket
    trouble = bucket.store_status.trouble if bucket else None
    own = FactsPart(replace(report, topics=[]), [trouble] if trouble else [])
    if exchange.is_forwarded:
        return part_response(own)
    asked = await ask_all(context, exchange, FactsPart)
    parts = sorted({own_node(context): own, **asked.found}.items())
    report = whole_storage([one.report for _, one in parts])
    prices = context.broker.settings.prices
    return fragment(
        "store.html",
        report=report,
        troubles=[
            _by_broker(node_id, trouble) for node_id, one in parts for trouble in one.troubles
        ],
        silent=asked.silent,
        in_cluster=context.broker.cluster is not None,
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
    query, found = exchange.query(TopicQuery), context.broker.topic(exchange.topic)
    own = topic_pages.PartitionParts(
        await context.read(topic_pages.partition_parts, found, sort=query.sort, page=query.page),
        {number: _why(context, one.reason) for number, one in found.damaged.items()},
    )
    if exchange.is_forwarded:
        return part_response(own)
    asked = await ask_all(context, exchange, topic_pages.PartitionParts)
    parts = {own_node(context): own, **asked.found}
    damaged = {n: why for one in parts.values() for n, why in one.damaged.items()}
    drawn = topic_pages.partition_page(
        found,
        {node_id: one.partitions for node_id, one in parts.items()},
        {**_unled(context, found), **{n: topic_pages.damaged_line(n) for n in damaged}},
        sort=query.sort,
        page=query.page,
    )
    replicas = {one.number: replicas_of(context, found, one.number) for one in drawn.lines}
    return fragment(
        "topic.html",
        name=found.record.name,
        topic_id=found.record.topic_id,
        partitions=drawn,
        sort=query.sort,
        silent=asked.silent,
        in_cluster=found.is_shared,
        replicas=replicas,
        is_replicated=any(replicas.values()),
        lacking=lacking(context, found),
        may_move=not actions.refusal(
            exchange.grant, "POST", "/v1/topics/{topic}/partitions/{partition}/leader"
        ),
        **_troubles(
            [f"Partition {number}: {why}" for number, why in damaged.items()]
            + [
                f"Partition {line.number}: {context.shorten_paths(line.trouble.reason)}"
                for line in drawn.lines
                if isinstance(line, topic_pages.PartitionLine) and line.trouble
            ]
        ),
        overrides=found.config.overrides,
        effective=found.effective_config(),
    )


def _unled(context: Context, topic: Topic) -> dict[int, topic_pages.BareLine]:
    """Why nobody leads a partition, as far as is known here."""
    found = {}
    for number in topic.numbers:
        try:
            topic.partition(number)
        except NotLeader as error:
            reason = f"broker {error.node_id} leads it, and does not answer"
            found[number] = topic_pages.unled_line(number, reason)
        except LeaderUnknown as error:
            found[number] = topic_pages.unled_line(
                number, _gone(context, topic, number) or str(error)
            )
        except TierlogError:
            continue  # damaged
    return found


def _gone(context: Context, topic: Topic, number: int) -> str:
    cluster = context.broker.cluster
    place = (topic.record.topic_id, number)
    last = None if cluster is None else cluster.leaders.find_gone_leader(place)
    return "" if last is None else f"broker {last.node_id}, which led it, is down"


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
    topic = context.broker.topic(partition.topic)
    return {
        "name": partition.topic,
        "number": partition.number,
        "line": line,
        "replicas": replicas_of(context, topic, partition.number),
        "leader": own_node(context),
        "tab": tab,
    }


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
    found = await _found(context, exchange, record_page(context, exchange, partition, query))
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
