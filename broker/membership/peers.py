"""How a broker speaks with the others: a port, which `api` fills in with HTTP."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.membership.leaders import Leader, Report
from tierlog.broker.replication.messages import FetchedRows, ReplicaFetch
from tierlog.record_format.schema_state import SourceOfId
from tierlog.record_format.share_state import StateAnswer, StateCall
from tierlog.record_format.topic_rules import ConfigValue


class LeaderReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a broker leads: topic id, partition, leader epoch, log end offset and the bucket's end
    of each. `sets`: of those with a set of replicas, the node ids of all and of those in sync, how
    far each replica is behind, the node ids of those that are being added and removed, and
    whether the bucket is in sync.
    """

    node_id: int
    leaders: list[tuple[str, int, int, int, int]]
    sets: list[
        tuple[
            str,
            int,
            tuple[int, ...],
            tuple[int, ...],
            tuple[int, ...],
            tuple[int, ...],
            tuple[int, ...],
            bool,
        ]
    ] = []

    @classmethod
    def of(cls, node_id: int, led: Report) -> LeaderReport:
        return cls(
            node_id=node_id,
            leaders=[(*place, *one[:3]) for place, one in led.items()],
            sets=[(*place, *one[4:]) for place, one in led.items() if one.replicas],
        )

    @property
    def led(self) -> Report:
        sets = {(one[0], one[1]): one[2:] for one in self.sets}
        return {
            place: Leader(*one[2:], self.node_id, *sets.get(place, ()))
            for one in self.leaders
            for place in [(one[0], one[1])]
        }


class Reassigned(msgspec.Struct, frozen=True, kw_only=True):
    """A partition's replicas, as its leader says; all are node ids. Nothing is being added or
    removed: it is done.
    """

    leader: int
    replicas: list[int]
    adding: list[int]
    removing: list[int]

    @property
    def is_done(self) -> bool:
        return not (self.adding or self.removing)


class TransactionPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a partition's leader asks a transaction's coordinator: are these partitions in it; with
    `adds`, have them in it.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: list[tuple[str, int]]
    adds: bool


class Marker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of a producer's transaction in a partition, from its coordinator to the leader."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    committed: bool
    coordinator_epoch: int


class GroupConfigCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """To the leader of the groups' configurations: what are those of all groups, or of one; with
    `config`, change it first. None as a value restores the default.
    """

    group: str | None = None
    config: dict[str, ConfigValue | None] = {}


class SchemaCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To the leader of `_schemas`: the schema with this id, if the subject has it, or another whose
    name begins with `prefix`, if that is given; or that of a version of the subject, where -1 is
    the latest.
    """

    subject: str
    schema_id: int | None = None
    version: int | None = None
    prefix: str | None = None


class Peers(Protocol):
    """Every call raises PeerUnavailable if the broker does not answer, or not in time."""

    def read_leaders(self, url: str) -> LeaderReport:
        """What the broker there leads."""
        ...

    def send_news(
        self,
        url: str,
        *,
        sender: int,
        topics: Sequence[str],
        assigned: Sequence[TopicIdPartition],
        led: Sequence[TopicIdPartition],
    ) -> LeaderReport:
        """`sender`, a node id, lives, and leads the partitions in `led`; these names have changed,
        and these partitions were assigned to the broker there: it answers once it has looked, and
        claimed them.
        """
        ...

    def hand_over(self, url: str, *, topic: str, partition: int, node_id: int) -> None:
        """Ask the leader there to hand the partition over to another broker."""
        ...

    def reassign(
        self, url: str, *, topic: str, partition: int, replicas: Sequence[int]
    ) -> Reassigned:
        """Ask the leader there to have these brokers, by node id, have the replicas; none: end the
        reassignment that there is.
        """
        ...

    def set_draining(self, url: str, node_id: int, *, draining: bool) -> None:
        """Tell the broker there, which has this node id, to be drained, or no longer."""
        ...

    def fetch_replicas(
        self, url: str, request: ReplicaFetch, *, asked: Collection[TopicIdPartition]
    ) -> FetchedRows:
        """What the leader there has for this broker's replicas: nothing, if it has had nothing new
        for `wait_ms`. `asked`: all that are in the session.
        """
        ...

    def take_part(self, url: str, part: TransactionPart) -> str:
        """Ask the coordinator there: NONE, or Kafka's name of the reason why not."""
        ...

    def write_markers(self, url: str, markers: Sequence[Marker]) -> list[str]:
        """Write them there: for each NONE, once it is durable, or Kafka's name of an error."""
        ...

    def call_group_configs(
        self, url: str, call: GroupConfigCall
    ) -> dict[str, dict[str, ConfigValue]]:
        """What differs from the defaults, by group."""
        ...

    def ask_share_states(self, url: str, calls: Sequence[StateCall]) -> list[StateAnswer]:
        """Have who keeps these states there carry the calls out, in order; durably."""
        ...

    def find_schema(self, url: str, call: SchemaCall) -> list[SourceOfId]:
        """The schema, or nothing."""
        ...
