"""Regular expressions of clients, of topics that they subscribe to and of transactional ids: RE2's,
whose time is linear in the names, as the RE2J of Kafka's broker.

* An expression has a limit of length, and RE2 one of memory: nobody holds up the broker by one.
* It matches a whole name, of those that the client may see; Kafka's own topics too, as there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from tierlog.api.serving.grants import Grant
from tierlog.broker.group_coordinator.group_events import GroupError
from tierlog.record_format.errors import GroupRefused

PATTERN_MAX_LENGTH: Final = 4_096
PATTERN_MAX_MEMORY: Final = 1 << 20
_COMPILED_MAX: Final = 64


class TopicPatterns:
    """`Patterns` for one client."""

    def __init__(self, grant: Grant) -> None:
        self._grant = grant

    def check(self, pattern: str) -> None:
        """Raises GroupRefused for what is none."""
        compiled_pattern(pattern)

    def resolve(self, patterns: Iterable[str], topics: Iterable[str]) -> dict[str, frozenset[str]]:
        """One that is none, which a Kafka let pass, matches nothing."""
        names = list(filter(self._grant.sees_topic, topics))
        return {one: frozenset(_matched(one, names)) for one in patterns}


def _matched(pattern: str, names: list[str]) -> list[str]:
    try:
        compiled = compiled_pattern(pattern)
    except GroupRefused:
        return []
    return [name for name in names if compiled.fullmatch(name)]


@lru_cache(_COMPILED_MAX)
def compiled_pattern(pattern: str) -> Any:
    """Raises GroupRefused for what is none."""
    # Here, as hardly any consumer subscribes by a pattern, and a start has no time to spare.
    import re2

    options = re2.Options()
    options.max_mem, options.log_errors = PATTERN_MAX_MEMORY, False
    if len(pattern) > PATTERN_MAX_LENGTH:
        raise _refused(f"it is longer than {PATTERN_MAX_LENGTH} characters")
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise _refused(str(error.args[0])) from error


def _refused(why: str) -> GroupRefused:
    return GroupRefused(
        GroupError.INVALID_REGULAR_EXPRESSION,
        f"not a valid regular expression: {why}",
    )
