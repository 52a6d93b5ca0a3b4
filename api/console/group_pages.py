"""The data of the page on consumer groups. May wait: run in a thread."""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

from api.http.access.scopes import Grant
from broker.groups.groups import Groups, OffsetState

GROUPS_SHOWN: Final = 200


class GroupLine(NamedTuple):
    """`offsets`: in topics visible to the token, by falling lag."""

    name: str
    offsets: list[OffsetState]

    @property
    def lag(self) -> int:
        return sum(one.lag for one in self.offsets)


def group_lines(groups: Groups, grant: Grant) -> list[GroupLine]:
    """At most GROUPS_SHOWN, plus one to indicate that there are more."""
    lines = (
        GroupLine(name, sorted(seen, key=lambda one: (-one.lag, one.topic, one.partition)))
        for name, offsets in groups.all_groups()
        if (seen := [one for one in offsets if grant.sees_topic(one.topic)])
    )
    return list(islice(lines, GROUPS_SHOWN + 1))
