"""Calls on a cluster of brokers; any of them may be asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tierlog.client import responses
from tierlog.client.calls import partition_path
from tierlog.client.exchange import Call
from tierlog.client.responses import json_reader, no_content
from tierlog.client.wire import Request, Subject, json_request

MOVE_WAIT_S: Final = 360.0  # all that the broker has of a partition may have to be uploaded first


def describe_cluster() -> Call[responses.ClusterDescription]:
    """The brokers, and how many partitions each leads. Raises NotInCluster."""
    return Call(Request("GET", "/v1/cluster"), json_reader(responses.ClusterDescription))


def led_partitions() -> Call[responses.LedPartitions]:
    """What the broker that answers leads. Raises NotInCluster."""
    return Call(Request("GET", "/v1/cluster/leaders"), json_reader(responses.LedPartitions))


def move_leader(topic: str, partition: int, *, node_id: int) -> Call[responses.MovedLeader]:
    """Hand a partition over to another broker. Where it is already, nothing happens."""
    path = f"{partition_path(topic, partition)}/leader"
    request = json_request("POST", path, {"node_id": node_id}, Subject(topic, partition))
    return Call(request._replace(extra_wait_s=MOVE_WAIT_S), json_reader(responses.MovedLeader))


def reassign(topic: str, partition: int, replicas: Sequence[int]) -> Call[responses.Reassigned]:
    """Have these brokers, by node id, have the partition's replicas; the first is to lead. It goes
    on in the background. Raises InvalidReplicaAssignment.
    """
    path = f"{partition_path(topic, partition)}/replicas"
    body = {"replicas": list(replicas)}
    request = json_request("POST", path, body, Subject(topic, partition))
    return Call(request, json_reader(responses.Reassigned))


def cancel_reassignment(topic: str, partition: int) -> Call[responses.Reassigned]:
    """Have the replicas be those of before. Raises NoReassignment."""
    path = f"{partition_path(topic, partition)}/replicas"
    request = Request("DELETE", path, subject=Subject(topic, partition))
    return Call(request, json_reader(responses.Reassigned))


def list_reassignments() -> Call[responses.Reassignments]:
    """Those that go on. Raises NotInCluster."""
    path = "/v1/cluster/reassignments"
    return Call(Request("GET", path), json_reader(responses.Reassignments))


def rebalance(*, dry_run: bool = False, max_moves: int = 1) -> Call[responses.Moves]:
    """Make so many of the moves after which no broker leads two partitions more than another, or
    has two replicas more; `dry_run`: show them all.
    """
    body = {"dry_run": dry_run, "max_moves": max_moves}
    request = json_request("POST", "/v1/cluster/rebalance", body, Subject())
    wait_s = 0 if dry_run else MOVE_WAIT_S * max_moves
    return Call(request._replace(extra_wait_s=wait_s), json_reader(responses.Moves))


def drain_broker(node_id: int, *, dry_run: bool = False) -> Call[responses.Moves]:
    """Have a broker give away all that it leads, which it begins with at once; `dry_run`: show
    what that is. Raises UnknownBroker, BrokerInUse if it does not run.
    """
    path = f"/v1/cluster/brokers/{node_id}/drain"
    return Call(
        json_request("POST", path, {"dry_run": dry_run}, Subject()), json_reader(responses.Moves)
    )


def undrain_broker(node_id: int) -> Call[None]:
    """Let it have partitions again. Raises UnknownBroker, BrokerInUse if it does not run."""
    return Call(Request("DELETE", f"/v1/cluster/brokers/{node_id}/drain"), no_content)


def remove_broker(node_id: int) -> Call[None]:
    """Remove a broker that has stopped. Raises UnknownBroker, BrokerInUse if it runs, or has
    partitions.

    Not retried once it was sent: a retry after the removal would fail with UnknownBroker.
    """
    request = Request("DELETE", f"/v1/cluster/brokers/{node_id}")
    return Call(request, no_content, idempotent=False)
