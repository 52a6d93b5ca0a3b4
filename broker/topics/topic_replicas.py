"""How many replicas a topic has, and on which brokers: what may be asked for.

* Brokers are node ids. A partition's first replica is the one that is to lead it.
* Texts are those of Kafka's controller (ReplicationControlManager), whoever asks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tierlog.hot_tier.log_config import MIN_IN_SYNC, LogConfig
from tierlog.record_format.errors import (
    FieldProblem,
    InvalidConfig,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
)
from tierlog.record_format.topic_rules import ConfigValue

ALONE: Final = 0  # the node id of a broker that did not join a cluster
Chosen = Mapping[int, Sequence[int]]
"""The replicas of partitions for which somebody chose them."""
ANYWHERE: Final[Chosen] = {}


class NewTopic(NamedTuple):
    """What is asked for. `replication_factor`: by default that of `replicas`, or the broker's."""

    name: str
    partitions: int
    config: Mapping[str, ConfigValue]
    replication_factor: int | None = None
    replicas: Chosen = ANYWHERE


def choose_factor(
    given: int | None, replicas: Chosen, *, default: int, living: Collection[int]
) -> int:
    """The replication factor of a new topic. `living`: the brokers that may be given partitions.

    Raises InvalidReplicationFactor, InvalidReplicaAssignment.
    """
    if replicas:
        return check_replicas(replicas.values(), living=living, factor=given)
    factor = default if given is None else given
    if factor < 1:
        raise _bad_factor("Replication factor must be larger than 0.")
    if factor > len(living):
        raise _bad_factor(
            f"Unable to replicate the partition {factor} time(s): The target replication factor of "
            f"{factor} cannot be reached because only {len(living)} broker(s) are registered."
        )
    return factor


def check_replicas(
    replicas: Iterable[Sequence[int]], *, living: Collection[int], factor: int | None
) -> int:
    """The number of replicas, which all partitions have. Raises InvalidReplicaAssignment."""
    for chosen in replicas:
        if problem := _problem(chosen, living=living, factor=factor):
            raise InvalidReplicaAssignment(problem, problems=(FieldProblem("replicas", problem),))
        factor = len(chosen)
    assert factor is not None, "there are some"
    return factor


def _problem(chosen: Sequence[int], *, living: Collection[int], factor: int | None) -> str:
    what = "The manual partition assignment includes"
    if not chosen:
        return f"{what} an empty replica list."
    if unknown := [one for one in chosen if one not in living]:
        return f"{what} broker {unknown[0]}, but no such broker is registered."
    if twice := [one for one in chosen if chosen.count(one) > 1]:
        return f"{what} the broker {twice[0]} more than once."
    if factor is not None and len(chosen) != factor:
        return (
            f"{what} a partition with {len(chosen)} replica(s), but this is not consistent with "
            f"previous partitions, which have {factor} replica(s)."
        )
    return ""


def check_min_in_sync(
    config: LogConfig, *, factor: int, given: Mapping[str, ConfigValue | None]
) -> None:
    """Raises InvalidConfig if more replicas are to be in sync than there are: nobody would be told
    that fewer do. A topic that has fewer since it was given so keeps it (Kafka's effectiveMinIsr).
    """
    wanted = config.min_in_sync(factor)
    if MIN_IN_SYNC in given and wanted > factor + (config.replication_store != "none"):
        why = f"{MIN_IN_SYNC} is {wanted}, and the topic's partitions have {factor} replica(s)"
        raise InvalidConfig(why, problems=(FieldProblem(f"config.{MIN_IN_SYNC}", why),))


def _bad_factor(why: str) -> InvalidReplicationFactor:
    return InvalidReplicationFactor(why, problems=(FieldProblem("replication_factor", why),))
