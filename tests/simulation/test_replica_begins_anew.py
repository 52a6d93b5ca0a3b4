"""A replica whose leader has deleted what comes next from its disk: it begins there, with the
producers that the bucket has."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.simulation.failing_disk import FailingDisk
from tests.simulation.replica_node import Node
from tests.simulation.replica_world import World
from tierlog.broker.partition import Partition
from tierlog.broker.replication.replica import Replica, Role
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format.errors import StoreUnavailable

ROUNDS_MAX = 40


@pytest.fixture
def world(tmp_path: Path, failing_disk: FailingDisk) -> Iterator[World]:
    """Nothing fails in it."""
    world = World(0, tmp_path, failing_disk, [])
    config = world.record.config | {"local.retention.bytes": 1, "retention.bytes": -1}
    world.record = replace(world.record, config=config, replication_factor=world.count)
    world.begin()
    world.is_quiet = True
    yield world
    world.close()


def rounds_until(world: World, is_so: Callable[[], bool]) -> None:
    for _ in range(ROUNDS_MAX):
        if is_so():
            return
        world._quiet_round(writes=False)
    raise AssertionError(world._state())


def leading(world: World) -> Partition | None:
    return next((one.partition for one in world.nodes if one and one.partition), None)


def leader(world: World) -> Partition:
    rounds_until(world, lambda: leading(world) is not None)
    partition = leading(world)
    assert partition is not None
    return partition


def append(world: World, partition: Partition) -> int:
    """The first batch of a producer, or once more."""
    encoded = world._encoded([b"value"], producer_id=100, sequence=0)
    asked = partition.append(encoded, acks=Acks.ALL)
    rounds_until(world, asked.done)
    return asked.result().base_offset


def replace_a_follower(world: World) -> Node:
    """It comes back with an empty disk."""
    node = next(one for one in world.nodes if one is not None and one.partition is None)
    world.end(node, power_fails=False)
    world.folders[node.number] = world._new_folder(node.number)
    world._start(node.number)
    replaced = world.nodes[node.number]
    assert replaced is not None
    return replaced


def replica_of(world: World, node: Node) -> Replica:
    rounds_until(world, lambda: node.replica is not None and node.replica.role is Role.FOLLOWER)
    assert node.replica is not None
    return node.replica


def hand_over(world: World, to: Node) -> None:
    """Have it lead."""
    partition = leader(world)
    one = next(one for one in world.nodes if one and one.partition is partition)
    one.replicas.moves.hand_over(partition, to.replicas._members.me, timeout_s=0)
    to.replicas.settle(world.place)
    assert to.partition is leader(world)


def test_a_replica_does_not_begin_without_the_producers_that_the_bucket_has(world, monkeypatch):
    partition = leader(world)
    first = append(world, partition)
    partition.upkeep.roll()
    partition.append(world._encoded([b"of the next segment"]), acks=Acks.LEADER)
    rounds_until(world, lambda: partition.first_local_offset > first)
    get, failed = world.store.get, []

    def without_indexes(key, **options):
        if key.endswith(".indexes"):
            failed.append(key)
            raise StoreUnavailable(f"{key}: down")
        return get(key, **options)

    world.store.get = without_indexes
    node = replace_a_follower(world)
    replica = replica_of(world, node)
    rounds_until(world, lambda: bool(failed))
    assert (replica.log.first_local_offset, replica.role) == (0, Role.FOLLOWER)

    world.store.get = get
    rounds_until(world, lambda: replica.kept.replica_id in world.truth.newest.in_sync)
    hand_over(world, node)
    assert append(world, leader(world)) == first
