"""The members of a consumer group: who they are, what each has, and who has a partition.

* A member is a value: a change makes another, and `MemberTable.put` takes it in.
* A partition that a member still has to give up is its, until it says that it did.
* A member has one instance at most: one that joins again as another gives up the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from tierlog.broker.group_coordinator.assignors import TopicPartition
from tierlog.broker.group_coordinator.group_events import GroupError, Identity, Protocol
from tierlog.record_format.errors import GroupRefused

Assignment = Mapping[TopicPartition, int]
"""The epoch at which each partition was given."""


_NOTHING: Final[Assignment] = MappingProxyType({})


class MemberState(IntEnum):
    """Numbers as in Kafka's records."""

    STABLE = 0
    UNREVOKED = 1
    UNRELEASED = 2
    UNKNOWN = 127


class ClassicMember(NamedTuple):
    """Of a member that speaks the classic protocol."""

    session_timeout_ms: int
    protocols: tuple[Protocol, ...]


class ConsumerMember(NamedTuple):
    """`topics` and `pattern`: what it reads. `previous_epoch`: the last answer, which bumped the
    epoch, may have been lost. `revoking`: what it still has and must give up.
    """

    member_id: str
    epoch: int = 0
    previous_epoch: int = -1
    state: MemberState = MemberState.STABLE
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topics: frozenset[str] = frozenset()
    pattern: str = ""
    assignor: str | None = None
    classic: ClassicMember | None = None
    assigned: Assignment = _NOTHING
    revoking: Assignment = _NOTHING

    def moved_to(
        self, epoch: int, state: MemberState, assigned: Assignment, revoking: Assignment
    ) -> ConsumerMember:
        return self._replace(
            epoch=epoch,
            previous_epoch=self.epoch,
            state=state,
            assigned=assigned,
            revoking=revoking,
        )


class MemberTable:
    """`by_id`, in the order in which they came."""

    __slots__ = ("_owners", "_static", "by_id")

    def __init__(self) -> None:
        self.by_id: dict[str, ConsumerMember] = {}
        self._static: dict[str, str] = {}  # ids by instance
        self._owners: dict[TopicPartition, str] = {}

    def __iter__(self) -> Iterator[ConsumerMember]:
        return iter(self.by_id.values())

    def __len__(self) -> int:
        return len(self.by_id)

    def put(self, member: ConsumerMember) -> None:
        self._release(self.by_id.get(member.member_id))
        self.by_id[member.member_id] = member
        if member.instance_id is not None:
            self._static[member.instance_id] = member.member_id
        for place in (*member.assigned, *member.revoking):
            self._owners[place] = member.member_id

    def remove(self, member_id: str) -> None:
        self._release(self.by_id.pop(member_id))

    def _release(self, member: ConsumerMember | None) -> None:
        if member is None:
            return
        instance_id = member.instance_id
        if instance_id is not None and self._static.get(instance_id) == member.member_id:
            del self._static[instance_id]
        for place in (*member.assigned, *member.revoking):
            if self._owners.get(place) == member.member_id:
                del self._owners[place]

    def is_free(self, place: TopicPartition) -> bool:
        return place not in self._owners

    def of_instance(self, instance_id: str | None) -> ConsumerMember | None:
        member_id = None if instance_id is None else self._static.get(instance_id)
        return None if member_id is None else self.by_id[member_id]

    def known(self, who: Identity) -> ConsumerMember:
        """Raises GroupRefused: there is none, or the instance is another's now."""
        member = self.by_id.get(who.member_id)
        if who.instance_id is not None:
            current = self.of_instance(who.instance_id)
            if current is not None and current.member_id != who.member_id:
                raise GroupRefused(
                    GroupError.FENCED_INSTANCE_ID,
                    f"instance {who.instance_id} is member {current.member_id} now",
                )
            member = current
        if member is None:
            raise GroupRefused(
                GroupError.UNKNOWN_MEMBER_ID, f"{who.member_id or who.instance_id} is no member"
            )
        return member
