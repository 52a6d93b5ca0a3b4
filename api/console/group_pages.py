"""The pages about groups: all of them, and one: who is in it, and who reads what.

* In a cluster each broker says of which groups it knows; the page of one is its coordinator's.
* A group's name is any text, so it is not in a path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tierlog.api.console.actions import refusal
from tierlog.api.console.all_brokers import ALONE, ask_all, own_node, part_response
from tierlog.api.console.rendering import fragment, server_flag
from tierlog.api.console.topic_pages import sort_of, sorted_by
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.groups.handlers import check_here, group_state, known_group_state
from tierlog.api.http.responses import Response
from tierlog.api.http.schemas import AssignedTopic, GroupMember, GroupState
from tierlog.api.serving.grants import Grant
from tierlog.broker.broker import Broker
from tierlog.broker.group_coordinator.group_states import SHARE
from tierlog.broker.group_coordinator.groups import OffsetState, check_group_name
from tierlog.record_format.errors import ELSEWHERE, NotLeader, RetriableError, UnknownGroup

GROUPS_SHOWN: Final = 200
MEMBERS_SHOWN: Final = 200
ROWS_SHOWN: Final = 500  # partitions of a group
KEYS: Final = {field: attrgetter(field) for field in ("name", "members", "partitions", "lag")}


class GroupsQuery(msgspec.Struct, forbid_unknown_fields=True):
    sort: Annotated[str, sort_of(KEYS)] = "name"


class GroupQuery(msgspec.Struct, forbid_unknown_fields=True):
    group: Annotated[str, Meta(max_length=255)]


class GroupLine(msgspec.Struct, frozen=True):
    """As far as it is visible to the token. `lag`: of all partitions whose leader is known.
    `is_known`: false if whoever keeps a share group's state does not answer.
    """

    name: str
    type: str
    state: str
    members: int
    partitions: int
    lag: int
    is_known: bool = True


class GroupRow(msgspec.Struct, frozen=True):
    """A partition of a group: where it reads, if that is known, and which members have it: several
    in a share group.
    """

    topic: str
    partition: int
    committed: OffsetState | None
    readers: list[GroupMember]

    @property
    def lag(self) -> int:
        return 0 if self.committed is None else max(0, self.committed.lag)

    @property
    def reader_names(self) -> str:
        return ", ".join(map(short_name, self.readers))


def short_name(member: GroupMember) -> str:
    """Its instance, or as much of its id (client id and uuid) as tells it from others."""
    return member.instance_id or member.member_id[: len(member.client_id) + 9]


def in_spans(assignment: Iterable[AssignedTopic]) -> str:
    """`flights 0-2, 5; delays 1`."""
    return "; ".join(f"{one.topic} {_spans(one.partitions)}" for one in assignment)


def _spans(numbers: Iterable[int]) -> str:
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in spans)


# --- all ------------------------------------------------------------------------------------------


async def groups(context: Context, exchange: Exchange) -> Response:
    sort = exchange.query(GroupsQuery).sort
    own = await context.read(_group_lines, context.broker, exchange.grant, sort=sort)
    if exchange.is_forwarded:
        return part_response(own)
    asked = await ask_all(context, exchange, list[GroupLine])
    every = [*own, *(one for part in asked.found.values() for one in part)]
    return fragment(
        "groups.html",
        groups=sorted_by(sort, every, KEYS)[: GROUPS_SHOWN + 1],
        sort=sort,
        shown_max=GROUPS_SHOWN,
        silent=asked.silent,
        server_flag=server_flag(exchange),
    )


def _group_lines(broker: Broker, grant: Grant, *, sort: str) -> list[GroupLine]:
    """At most GROUPS_SHOWN, plus one to indicate that there are more."""
    lines = list(_lines(broker, grant))
    ordered = lines if sort == "name" else sorted_by(sort, lines, KEYS)
    return list(islice(ordered, GROUPS_SHOWN + 1))


def _lines(broker: Broker, grant: Grant) -> Iterator[GroupLine]:
    for name in broker.groups.names():
        with contextlib.suppress(UnknownGroup, *ELSEWHERE):  # deleted meanwhile, or of others
            yield _line(broker, grant, name)


def _line(broker: Broker, grant: Grant, name: str) -> GroupLine:
    """Raises UnknownGroup, NotLeader, LeaderUnknown."""
    try:
        found = group_state(broker, grant, name)
    except (RetriableError, NotLeader):
        now = broker.groups.coordinator.describe(name)
        if now is None or now.type != SHARE or grant.topics:
            raise
        return GroupLine(name, now.type, now.state, len(now.members), 0, 0, is_known=False)
    rows = _rows(found)
    lag = sum(row.lag for row in rows)
    return GroupLine(name, found.type, found.state, len(found.members), len(rows), lag)


def _rows(found: GroupState) -> list[GroupRow]:
    """By falling lag."""
    readers: dict[tuple[str, int], list[GroupMember]] = {}
    for member in found.members:
        for row in member.assignment:
            for number in row.partitions:
                readers.setdefault((row.topic, number), []).append(member)
    committed = {(one.topic, one.partition): one for one in found.offsets}
    rows = [
        GroupRow(*place, committed.get(place), readers.get(place, []))
        for place in sorted(committed.keys() | readers.keys())
    ]
    return sorted(rows, key=lambda row: -row.lag)


# --- one ------------------------------------------------------------------------------------------


async def group(context: Context, exchange: Exchange) -> Response:
    name = exchange.query(GroupQuery).group
    check_group_name(name)
    await context.read(context.broker.groups.log.load_home, name)
    check_here(context, name)
    found, failures = await context.read(known_group_state, context.broker, exchange.grant, name)
    now = context.broker.groups.coordinator.describe(name)
    rows, coordinator = _rows(found), own_node(context)
    return fragment(
        "group.html",
        group=found,
        assignor="" if now is None else now.protocol,
        coordinator=None if coordinator == ALONE else coordinator,
        is_share=found.type == SHARE,
        failures=failures,
        members=[(one, short_name(one), in_spans(one.assignment)) for one in found.members],
        members_max=MEMBERS_SHOWN,
        rows=rows,
        rows_max=ROWS_SHOWN,
        lag=sum(row.lag for row in rows),
        refusal=refusal(exchange.grant, "PUT", "/v1/groups/{group}/offsets"),
        server_flag=server_flag(exchange),
    )
