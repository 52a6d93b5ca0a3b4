"""What a caller may do, whichever door it came through.

* `admin` includes the other scopes. A token with a prefix sees no other topic, in any call.
* Whoever may produce to a topic may describe it, as with Kafka, where Write implies Describe: a
  producer has to know the partitions.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from tierlog.record_format.errors import Forbidden


class Scope(StrEnum):
    READ = "read"
    PRODUCE = "produce"
    ADMIN = "admin"


class Grant(NamedTuple):
    """`name`: of the token; `topics`: the prefix that every topic's name must have."""

    name: str
    scopes: frozenset[Scope]
    topics: str = ""

    def check_scopes(self, scopes: tuple[Scope, ...]) -> None:
        """Raises Forbidden unless the token has one of `scopes`."""
        if self.scopes.isdisjoint(scopes) and Scope.ADMIN not in self.scopes:
            named = " or ".join(scopes)
            raise Forbidden(f"this call needs a token with the scope {named}")

    def sees_topic(self, topic: str) -> bool:
        return topic.startswith(self.topics)

    def check_topic(self, topic: str) -> None:
        """Raises Forbidden, whether or not the topic exists."""
        if not self.sees_topic(topic):
            raise Forbidden(f"this token is limited to topics that begin with {self.topics!r}")


EVERYTHING: Final = Grant("", frozenset(Scope))  # where no tokens are required
NOBODY: Final = Grant("", frozenset())
