"""What a caller may do, whichever door it came through.

* `admin` includes the other scopes. A token with a prefix sees no other topic, in any call.
* `cluster` is for what the brokers of a cluster ask of each other, and reads no record.
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
    CLUSTER = "cluster"


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

    @property
    def is_broker(self) -> bool:
        """Of the cluster."""
        return bool(self.name) and Scope.CLUSTER in self.scopes

    def sees_topic(self, topic: str) -> bool:
        return topic.startswith(self.topics)

    def check_topic(self, topic: str) -> None:
        """Raises Forbidden, whether or not the topic exists."""
        if not self.sees_topic(topic):
            raise Forbidden(f"this token is limited to topics that begin with {self.topics!r}")

    def check_transactional_id(self, transactional_id: str) -> None:
        """Raises Forbidden unless the token may produce, and the id has the prefix that the token's
        topics have: or it could fence producers of others.
        """
        self.check_scopes((Scope.PRODUCE,))
        if not self.sees_topic(transactional_id):
            raise Forbidden(
                f"this token is limited to transactional ids that begin with {self.topics!r}"
            )


EVERYTHING: Final = Grant("", frozenset(Scope))  # where no tokens are required
NOBODY: Final = Grant("", frozenset())
