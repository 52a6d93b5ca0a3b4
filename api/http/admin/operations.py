"""Calls for operators: health, readiness, metrics, storage, offload, verification, repair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from tierlog.api.http import header_values
from tierlog.api.http.cluster.splitting import added, ask_leaders, ask_others
from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import (
    JsonResponse,
    TheContext,
    TheExchange,
    TheGrant,
    ThePartition,
    WithoutBody,
    body_as,
    query_as,
)
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch.reading import WaitMs
from tierlog.api.http.metrics.registry import CONTENT_TYPE
from tierlog.api.http.problems import short_path
from tierlog.api.http.schemas import Alive, Ready, RepairReport
from tierlog.api.serving.grants import NOBODY
from tierlog.broker.background.copier import Offloaded
from tierlog.broker.background.merger import Merged
from tierlog.broker.reports import StorageReport
from tierlog.record_format.findings import Problem, VerifyReport
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.repair.local_repair import LOSSLESS
from tierlog.repair.repair import repair_topic
from tierlog.repair.verify import verify_topic

T = TypeVar("T")


class OffloadQuery(msgspec.Struct, forbid_unknown_fields=True):
    wait_ms: WaitMs | UnsetType = UNSET


class MergeQuery(msgspec.Struct, forbid_unknown_fields=True):
    wait_ms: WaitMs = 0


class RepairQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`apply` carries out the steps that lose nothing; without it, the steps are only listed."""

    apply: bool = False
    deep: bool = False


class VerifyQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`deep` reads every byte of both tiers."""

    deep: bool = False


async def healthz() -> Response:
    return JsonResponse(Alive())


async def readyz(context: TheContext, grant: TheGrant) -> Response:
    reasons, degraded = context.broker.readiness()
    ready = Ready(
        not reasons,
        [context.shorten_paths(one) for one in reasons],
        [context.shorten_paths(one) for one in degraded],
    )
    if grant is NOBODY or grant.topics:  # the reasons name any topic
        ready = Ready(ready.ready, [], [])
    return JsonResponse(ready, status=200 if ready.ready else 503)


async def metrics(context: TheContext, exchange: TheExchange) -> Response:
    header_values.preferred(
        exchange.header(b"accept"), offered=("text/plain", "application/openmetrics-text")
    )
    body = await context.read(context.metrics.text)
    return Response(body, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})


async def storage(context: TheContext, exchange: TheExchange) -> Response:
    here = await context.read(context.broker.storage_report)
    others = await ask_others(context, exchange, StorageReport)
    return JsonResponse(whole_storage([here, *others]))


def whole_storage(parts: Sequence[StorageReport]) -> StorageReport:
    """Of all brokers, from what each has."""
    if len(parts) == 1:
        return parts[0]
    caches = [one.cache for one in parts if one.cache is not None]
    topics = _grouped(parts, lambda part: part.topics, lambda one: one.topic)
    uses = _grouped(
        parts, lambda part: part.store_requests, lambda one: (one.purpose, one.operation)
    )
    return replace(
        added(*parts),
        topics=[added(*rows) for rows in topics],
        store_requests=[added(*rows) for rows in uses],
        cache=added(*caches) if caches else None,
        diverged=[one for part in parts for one in part.diverged],
    )


def _grouped(
    parts: Iterable[StorageReport],
    rows: Callable[[StorageReport], Iterable[T]],
    key: Callable[[T], Any],
) -> list[list[T]]:
    """The rows of all parts that have the same key, by key."""
    found: dict[Any, list[T]] = {}
    for part in parts:
        for row in rows(part):
            found.setdefault(key(row), []).append(row)
    return [found[one] for one in sorted(found)]


async def _of_all_leaders(
    context: Context, exchange: Exchange, topic: str, call: Callable[[], T], kind: type[T]
) -> list[T]:
    """What the call returns here, then what the same call is answered by the other leaders."""
    others = ask_leaders(context, exchange, context.broker.topic(topic), kind)
    here, parts = await asyncio.gather(context.write_cold(call), others)
    return [here, *parts]


async def offload(
    context: TheContext,
    exchange: TheExchange,
    topic: str,
    query: Annotated[OffloadQuery, query_as(OffloadQuery)],
    _: Annotated[None, WithoutBody],
) -> Response:
    wait_ms = None if isinstance(query.wait_ms, UnsetType) else query.wait_ms
    call = partial(context.broker.offload, topic, wait_ms=wait_ms)
    return JsonResponse(added(*await _of_all_leaders(context, exchange, topic, call, Offloaded)))


async def merge(
    context: TheContext,
    exchange: TheExchange,
    topic: str,
    query: Annotated[MergeQuery, query_as(MergeQuery)],
    _: Annotated[None, WithoutBody],
) -> Response:
    call = partial(context.broker.merge_segments, topic, wait_ms=query.wait_ms)
    return JsonResponse(added(*await _of_all_leaders(context, exchange, topic, call, Merged)))


async def merge_plan(
    context: TheContext, topic: str, partition: ThePartition, _: Annotated[None, WithoutBody]
) -> Response:
    call = partial(context.broker.plan_merges, topic, partition.number)
    return JsonResponse(await context.write_cold(call))


async def commit_merged(
    context: TheContext,
    topic: str,
    partition: ThePartition,
    body: Annotated[SegmentEntry, body_as(SegmentEntry)],
) -> Response:
    await context.write_cold(context.broker.commit_merged, topic, partition.number, body)
    return Response(status_code=204)


async def verify(
    context: TheContext,
    exchange: TheExchange,
    topic: str,
    query: Annotated[VerifyQuery, query_as(VerifyQuery)],
    _: Annotated[None, WithoutBody],
) -> Response:
    """The problems found are the response, not an error."""
    call = partial(verify_topic, context.broker, topic, deep=query.deep)
    report, *parts = await _of_all_leaders(context, exchange, topic, call, VerifyReport)
    shown = replace(report, problems=[_shown_problem(context, one) for one in report.problems])
    return JsonResponse(_whole_report([shown, *parts]))


def _whole_report(parts: Sequence[VerifyReport]) -> VerifyReport:
    return replace(
        added(*parts),
        ok=all(one.ok for one in parts),
        checked=added(*(one.checked for one in parts)),
        problems=[one for part in parts for one in part.problems],
    )


async def repair(
    context: TheContext,
    exchange: TheExchange,
    topic: str,
    query: Annotated[RepairQuery, query_as(RepairQuery)],
    _: Annotated[None, WithoutBody],
) -> Response:
    """The steps are the response, done or not."""
    others = ask_leaders(context, exchange, context.broker.topic(topic), RepairReport)
    here = context.write_cold(
        repair_topic, context.broker, topic, apply=query.apply, deep=query.deep, among=LOSSLESS
    )
    steps, parts = await asyncio.gather(here, others)
    return JsonResponse(
        RepairReport(
            topic=topic,
            applied=query.apply,
            running=sorted(LOSSLESS),
            steps=[
                *(replace(one, detail=context.shorten_paths(one.detail)) for one in steps),
                *(one for part in parts for one in part.steps),
            ],
        )
    )


def _shown_problem(context: Context, found: Problem) -> Problem:
    """Shorten the path of a local file, as in problem documents."""
    if found.file is None:
        return found
    file, detail = short_path(found.file), context.shorten_paths(found.detail)
    return replace(found, file=file, detail=detail)
