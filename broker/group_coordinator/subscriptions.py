"""What the members of a consumer group read: topics by name, and by regular expressions that are
resolved to names all together, now and then.

* Pure: the topics are a view (`TopicView`), and what expressions match comes from outside.
* A topic that does not exist is read by nobody until it is created.
"""

from __future__ import annotations

import hashlib
import math
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tierlog.broker.group_coordinator.assignors import Partitions, TopicPartition
from tierlog.broker.group_coordinator.consumer_members import ConsumerMember

PATTERNS_AGAIN_MS: Final = 10_000  # Kafka's REGEX_BATCH_REFRESH_MIN_INTERVAL_MS
_NO_NAMES: Final[frozenset[str]] = frozenset()


class TopicFacts(NamedTuple):
    topic_id: bytes
    partitions: Sequence[int]


class TopicView(typing.Protocol):
    """The topics that there are now. `version` rises when one is created, deleted, or grows."""

    @property
    def version(self) -> int: ...
    def find(self, name: str) -> TopicFacts | None: ...
    def name_of(self, topic_id: bytes) -> str | None: ...
    def names(self) -> list[str]: ...


class Subscriptions:
    """`matched`: the names by pattern, as last resolved. `users`: the members by pattern."""

    def __init__(self, topics: TopicView) -> None:
        self.topics = topics
        self.matched: dict[str, frozenset[str]] = {}
        self.users: Counter[str] = Counter()
        self.version = 0  # of the topics that were resolved
        self._names: Counter[str] = Counter()  # members by topic
        self._resolved_ms: float = -math.inf
        self._is_resolving = False

    def change(self, old: ConsumerMember | None, new: ConsumerMember | None) -> None:
        for member, step in ((old, -1), (new, 1)):
            if member is not None:
                _count(self._names, member.topics, step)
                _count(self.users, {member.pattern} - {""}, step)

    def names(self) -> frozenset[str]:
        """Whether there are such topics or not."""
        return frozenset(self._names).union(*self.matched.values())

    def names_of(self, member: ConsumerMember) -> frozenset[str]:
        return member.topics | self.matched.get(member.pattern, _NO_NAMES)

    def ids(self, member: ConsumerMember) -> frozenset[bytes]:
        """Of the topics that a member reads."""
        found = (self.topics.find(name) for name in self.names_of(member))
        return frozenset(facts.topic_id for facts in found if facts is not None)

    def partitions(self) -> Partitions:
        found = (self.topics.find(name) for name in sorted(self.names()))
        return {facts.topic_id: facts.partitions for facts in found if facts is not None}

    def hash(self) -> int:
        """Of what is known of the topics. Kafka's is another one: it and we each find what the
        other wrote out of date, and assign once more.
        """
        known = [(topic, len(numbers)) for topic, numbers in self.partitions().items()]
        if not known:
            return 0
        text = repr(known)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)

    def by_name(self, places: typing.Iterable[TopicPartition]) -> dict[str, list[int]]:
        """Partitions by topic, without those of deleted topics."""
        found: dict[str, list[int]] = {}
        for topic_id, number in sorted(places):
            name = self.topics.name_of(topic_id)
            if name is not None:
                found.setdefault(name, []).append(number)
        return found

    # --- patterns ---------------------------------------------------------------------------------

    def begin_to_resolve(self, now_ms: int, refresh_ms: int) -> tuple[str, ...]:
        """The patterns to be resolved now, for which the answer is `resolve` or `give_up`: for new
        ones, for new topics, and after a time.
        """
        is_wanted = (
            len(self.users) != len(self.matched)
            or self.version != self.topics.version
            or now_ms > self._resolved_ms + refresh_ms
        )
        may = not self.matched or now_ms > self._resolved_ms + PATTERNS_AGAIN_MS
        if self._is_resolving or not (is_wanted and may and self.users):
            return ()
        self._is_resolving = True
        return tuple(self.users)

    def resolve(
        self, found: Mapping[str, frozenset[str]], version: int, now_ms: int
    ) -> tuple[list[str], bool]:
        """Returns the patterns that are still used, and whether one matches others than before."""
        self._is_resolving, self._resolved_ms, self.version = False, now_ms, version
        used = [pattern for pattern in found if pattern in self.users]
        is_other = any(self.matched.get(one, _NO_NAMES) != found[one] for one in used)
        self.matched.update((one, found[one]) for one in used)
        return used, is_other

    def give_up(self) -> None:
        self._is_resolving = False

    def forget_unused(self) -> list[str]:
        unused = [pattern for pattern in self.matched if pattern not in self.users]
        for pattern in unused:
            del self.matched[pattern]
        return unused


def _count(counts: Counter[str], of: frozenset[str] | set[str], step: int) -> None:
    for one in of:
        counts[one] += step
        if not counts[one]:
            del counts[one]
