"""The pages from which the console acts: forms that its script sends to the API, and what a form
needs before it is sent.

* Nothing is changed here: the API has the one implementation of each act, with its scopes and its
  problems. These calls only read.
* Whether a form is shown follows from the table of scopes, as the API's answer would.
* Settings are words on a page, and Kafka's numbers in a request: `numbers` translates.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta
from msgspec.structs import replace

from tierlog.api.console.all_brokers import ask_all, part_response
from tierlog.api.console.rendering import HEADERS, fragment
from tierlog.api.http import strict_json
from tierlog.api.http.access.scopes import NEEDS
from tierlog.api.http.admin.pins import listed_pins
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch.reading import (
    KEYWORDS,
    LATEST,
    Position,
    check_within,
    parse_position,
    resolve,
)
from tierlog.api.http.responses import Response, json_response
from tierlog.api.serving.grants import Grant
from tierlog.broker.group_coordinator.groups import lag_of
from tierlog.broker.topics.topics import Topic
from tierlog.hot_tier.config_words import from_words
from tierlog.hot_tier.log_config import KEYS
from tierlog.record_format.errors import (
    ELSEWHERE,
    FieldProblem,
    Forbidden,
    InvalidConfig,
    InvalidRequest,
    TierlogError,
    UnknownGroup,
)
from tierlog.record_format.units import in_utc

PARTITIONS_MAX: Final = 1000  # of a plan, each of which may be a lookup in the bucket
_WORDS: Final = msgspec.json.Decoder(dict[str, str | None])
_TOPIC: Final = "/v1/topics/{topic}"


class NumbersQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`words`: a JSON object of settings in words; null resets a setting."""

    words: Annotated[str, Meta(max_length=20_000)]


class OffsetsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`partition`: empty for all. `at`: earliest, latest, an offset or a time."""

    group: Annotated[str, Meta(max_length=255)] = ""
    topic: Annotated[str, Meta(max_length=249)] = ""
    partition: str = ""
    at: Annotated[str, Meta(max_length=100)] = ""


class PlannedOffset(NamedTuple):
    """`committed`: None without a commit so far."""

    partition: int
    committed: int | None
    offset: int
    start_offset: int
    end_offset: int
    lag: int


class PlanPart(msgspec.Struct, frozen=True):
    """What a broker knows of a plan: of the partitions that were `chosen`, those that it leads;
    `committed`, by partition, if it coordinates the group. `problem`: why there is no plan.
    """

    chosen: list[int]
    planned: list[PlannedOffset]
    committed: dict[int, int]
    problem: str = ""


def refusal(grant: Grant, method: str, path: str) -> str:
    """Why the token may not make a call of the API; empty if it may."""
    try:
        grant.check_scopes(NEEDS[method, path].scopes)
    except Forbidden as error:
        return str(error)
    return ""


async def create_page(_: Context, exchange: Exchange) -> Response:
    return fragment(
        "create.html",
        refusal=refusal(exchange.grant, "POST", "/v1/topics"),
        prefix=exchange.grant.topics,
        keys=KEYS,
    )


async def produce_page(context: Context, exchange: Exchange) -> Response:
    topic = context.broker.topic(exchange.topic)
    return fragment(
        "produce.html",
        name=topic.record.name,
        numbers=topic.numbers,
        refusal=refusal(exchange.grant, "POST", _TOPIC + "/records"),
        max_bytes=context.settings.body_max_bytes,
    )


async def settings_page(context: Context, exchange: Exchange) -> Response:
    topic = context.broker.topic(exchange.topic)
    return fragment(
        "settings.html",
        name=topic.record.name,
        partitions=len(topic.numbers),
        internal=topic.record.internal,
        refusal=refusal(exchange.grant, "PATCH", _TOPIC),
        overrides=topic.config.overrides,
        keys=KEYS,
    )


async def storage_page(context: Context, exchange: Exchange) -> Response:
    topic = context.broker.topic(exchange.topic)
    pins, problem = {}, ""
    try:  # those of the first partition that has one: a name is pinned in all
        listed = await context.read_cold(listed_pins, context, topic.record.name)
        pins = {one.name: one for one in reversed(listed.pins)}
    except TierlogError as error:
        problem = str(context.problem(exchange, error).document["detail"])
    return fragment(
        "storage.html",
        pins=sorted(pins.values(), key=lambda one: one.name),
        problem=problem,
        name=topic.record.name,
        refusal=refusal(exchange.grant, "POST", _TOPIC + "/offload"),
        has_bucket=context.broker.bucket is not None,
    )


async def numbers(_: Context, exchange: Exchange) -> Response:
    """Settings as the API takes them: text of Kafka's numbers, which no script rounds."""
    try:
        given = _WORDS.decode(exchange.query(NumbersQuery).words)
    except msgspec.DecodeError as error:
        strict_json.refuse_field("words", str(error))
    found: dict[str, str | None] = {}
    problems = []
    for name, text in given.items():
        try:
            found[name] = None if text is None else str(from_words(name, text))
        except ValueError as error:
            problems.append(FieldProblem(f"config.{name}", str(error)))
    if problems:
        raise InvalidConfig("; ".join(one.msg for one in problems), problems=tuple(problems))
    return json_response(found, headers=HEADERS)


async def offsets_page(context: Context, exchange: Exchange) -> Response:
    """The form that sets a group's offsets and, once it is filled in, what would change."""
    query = exchange.query(OffsetsQuery)
    page: dict[str, Any] = {"query": query, "plan": None, "problem": "", "silent": []}
    if query.group and query.topic and query.at:
        own = await _plan_part(context, exchange, query)
        if exchange.is_forwarded:
            return part_response(own)
        page |= {"problem": own.problem} if own.problem else await _plan(context, exchange, own)
    return fragment(
        "offsets.html",
        **page,
        refusal=refusal(exchange.grant, "PUT", "/v1/groups/{group}/offsets"),
        topic_id=context.broker.topic(query.topic).record.topic_id if page["plan"] else "",
    )


async def _plan(context: Context, exchange: Exchange, own: PlanPart) -> dict[str, Any]:
    """Of all brokers: for no partition, unless for each that was chosen."""
    asked = await ask_all(context, exchange, PlanPart)
    parts = [own, *asked.found.values()]
    committed = {number: offset for part in parts for number, offset in part.committed.items()}
    plan = sorted(
        one._replace(committed=committed.get(one.partition))
        for part in parts
        for one in part.planned
    )
    missing = set(own.chosen) - {one.partition for one in plan}
    problem = next((part.problem for part in parts if part.problem), "")
    if missing and not problem:
        problem = f"no leader of partition {min(missing)} answers: choose others, one at a time"
    return {"plan": None if problem else plan, "problem": problem, "silent": asked.silent}


async def _plan_part(context: Context, exchange: Exchange, query: OffsetsQuery) -> PlanPart:
    part = PlanPart([], [], {})
    try:
        exchange.grant.check_topic(query.topic)
        topic = context.broker.topic(query.topic)
        position = _position(query.at)
        part.chosen.extend(_chosen(topic, query.partition))
        with suppress(*ELSEWHERE):
            part.committed.update(await context.read(_committed, context, query))
        for number in part.chosen:
            with suppress(*ELSEWHERE):
                part.planned.append(await _planned(context, topic, number, position))
    except TierlogError as error:
        return replace(part, problem=str(context.problem(exchange, error).document["detail"]))
    return part


def _committed(context: Context, query: OffsetsQuery) -> dict[int, int]:
    try:
        offsets = context.broker.groups.group(query.group)
    except UnknownGroup:
        return {}  # its first commit makes it
    return {one.partition: one.offset for one in offsets if one.topic == query.topic}


def _chosen(topic: Topic, text: str) -> Iterable[int]:
    """Partitions by number; all that are not damaged if none is given."""
    if not text.strip():
        if len(topic.numbers) > PARTITIONS_MAX:
            raise InvalidRequest(f"more than {PARTITIONS_MAX} partitions: choose one at a time")
        return sorted(set(topic.numbers) - topic.damaged.keys())
    number = strict_json.parse_natural(text.strip())
    if number is None:
        raise InvalidRequest(f"a partition is a number, not {text[:64]!r}")
    topic.check_number(number)
    return [number]


def _position(text: str) -> Position:
    text = text.strip()
    if text in KEYWORDS or text.isdecimal():
        return parse_position(text, UNSET, default=LATEST)
    return parse_position(UNSET, in_utc(text), default=LATEST)


async def _planned(
    context: Context,
    topic: Topic,
    number: int,
    position: Position,
) -> PlannedOffset:
    partition = topic.partition(number)
    offset = await resolve(context, partition, position, committed=False)
    await check_within(partition, offset)
    now = partition.offsets()
    return PlannedOffset(
        partition=number,
        committed=None,
        offset=offset,
        start_offset=now.log_start_offset,
        end_offset=now.high_watermark,
        lag=lag_of(partition, offset, now.high_watermark),
    )
