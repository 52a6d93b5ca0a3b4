"""Calls on groups of consumers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from tierlog.client import responses
from tierlog.client.exchange import Call
from tierlog.client.membership import group_path
from tierlog.client.responses import json_reader, no_content
from tierlog.client.wire import Request, Subject, json_request, query


class OffsetCommit(NamedTuple):
    """The next offset that a group reads from a partition. With `topic_id` the commit is refused
    (UnknownTopic) if the topic was re-created.
    """

    topic: str
    partition: int
    offset: int
    metadata: str | None = None
    topic_id: str | None = None


def commit_offsets(
    group: str, offsets: Iterable[OffsetCommit], *, member_id: str = "", generation: int = -1
) -> Call[None]:
    """Commit a group's offsets; durable when this returns. Other partitions keep theirs.

    While a group has members they alone commit: with their id, in their generation.

    Idempotent. Raises GroupRefused, TypeError.
    """
    rows = offset_rows(offsets)
    subject = Subject(rows[0]["topic"], rows[0]["partition"]) if len(rows) == 1 else Subject()
    fields: dict[str, Any] = {"offsets": rows}
    if member_id:  # an older broker knows no members
        fields |= {"member_id": member_id, "generation": generation}
    request = json_request("PUT", f"{group_path(group)}/offsets", fields, subject)
    return Call(request, no_content)


def offset_rows(offsets: Iterable[OffsetCommit]) -> list[dict[str, Any]]:
    """As they are sent. Raises TypeError."""
    return [offset._asdict() for offset in _as_commits(offsets)]


def _as_commits(offsets: Iterable[OffsetCommit]) -> list[OffsetCommit]:
    """Refuses a single commit: as a tuple, it would be iterated by its fields."""
    if isinstance(offsets, (OffsetCommit, str, bytes, Mapping)):
        raise TypeError(
            "offsets: expected a list of OffsetCommit, "
            f"not one {type(offsets).__name__}; put it in a list"
        )
    commits: list[OffsetCommit] = []
    given: Iterable[object] = offsets
    for index, offset in enumerate(given):
        if not isinstance(offset, OffsetCommit):
            kind = type(offset).__name__
            raise TypeError(f"offsets[{index}]: expected an OffsetCommit, not {kind}")
        commits.append(offset)
    return commits


def group(name: str, *, stable: bool = False) -> Call[responses.Group]:
    """Get a group's offsets and lag. `stable`: not while a transaction in progress has some.

    Raises UnknownGroup, ConcurrentTransactions.
    """
    request = Request("GET", group_path(name), query(stable=stable or None))
    return Call(request, json_reader(responses.Group))


def groups() -> Call[tuple[responses.GroupSummary, ...]]:
    """List all groups by name."""
    read = json_reader(_Groups)
    return Call(Request("GET", "/v1/groups"), lambda response: read(response).groups)


def delete_group(name: str) -> Call[None]:
    """Delete a group's offsets. Raises UnknownGroup.

    Not retried once it was sent: a retry after the deletion would fail with UnknownGroup.
    """
    return Call(Request("DELETE", group_path(name)), no_content, idempotent=False)


class _Groups(msgspec.Struct):
    groups: tuple[responses.GroupSummary, ...]
