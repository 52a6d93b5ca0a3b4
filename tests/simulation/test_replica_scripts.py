"""Single stories of replicas, in the world of `replica_world`, with nothing else that fails."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.simulation.failing_disk import FailingDisk
from tests.simulation.replica_healing import go_round, state_of
from tests.simulation.replica_node import Killed, Node
from tests.simulation.replica_world import World
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.replica import Replica, Role
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
        go_round(world, writes=False)
    raise AssertionError(state_of(world))


def leading(world: World) -> Partition | None:
    awake = [one for one in world.nodes if one is not None and not one.is_frozen]
    return next((one.partition for one in awake if one.partition), None)


def leader(world: World) -> Partition:
    rounds_until(world, lambda: leading(world) is not None)
    partition = leading(world)
    assert partition is not None
    return partition


def append(world: World, partition: Partition) -> int:
    """The first batch of a producer, or once more."""
    encoded = world.clients.encoded([b"value"], producer_id=100, sequence=0)
    asked = partition.append(encoded, acks=Acks.ALL)
    rounds_until(world, asked.done)
    return asked.result().base_offset


def append_next(world: World, partition: Partition) -> None:
    partition.append(world.clients.encoded([b"of the next segment"]), acks=Acks.LEADER)


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
    to.replicas.settle(world.place, is_named=True)
    assert to.partition is leader(world)


def test_a_replica_does_not_begin_without_the_producers_that_the_bucket_has(world, monkeypatch):
    partition = leader(world)
    first = append(world, partition)
    partition.upkeep.roll()
    append_next(world, partition)
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


def test_a_follower_does_not_take_what_it_deleted_for_trimmed_once_it_restarts(world):
    """It has read no manifest, and has saved no checkpoint since."""
    partition = leader(world)
    first = append(world, partition)
    partition.upkeep.roll()
    append_next(world, partition)
    node = next(one for one in world.nodes if one and one.partition is None)
    rounds_until(world, lambda: node.replica.log.first_local_offset > first)
    world.end(node, power_fails=False)
    world._start(node.number)
    restarted = world.nodes[node.number].replica.log
    assert (restarted.log_start_offset, restarted.first_local_offset) == (0, first + 1)


def test_a_replica_begins_anew_whose_broker_dies_while_it_makes_the_log(world):
    """Twice: what was saved about the log that is gone says nothing about this one."""
    partition = leader(world)
    append(world, partition)
    partition.upkeep.roll()
    append_next(world, partition)
    node = next(one for one in world.nodes if one and one.partition is None)
    rounds_until(world, lambda: node.replica.log.flushed_end > 0)
    node.topics.checkpoints.save()
    world.end(node, power_fails=False)
    number = node.number
    shutil.rmtree(world.folders[number] / "t-0")

    for was_opened in (False, True):

        def dies(call, was_opened=was_opened):
            folder = world.folders[number]
            kept = (folder / f"tierlog/replicas/{world.record.topic_id}-0.json").read_bytes()
            is_due = (b'"was_opened":true' in kept) == was_opened
            if call == "rename" and is_due and (folder / "t-0").exists():
                world.end(world.nodes[number], power_fails=False)
                raise Killed

        world.disk.before_call = dies
        world._start(number)
        assert world.nodes[number] is None
    world.disk.before_call = lambda call: None
    world._start(number)
    replica = replica_of(world, world.nodes[number])
    rounds_until(world, lambda: replica.kept.replica_id in world.truth.newest.in_sync)


@pytest.mark.parametrize("start", [1, 2], ids=["below its end", "at its end"])
@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_deposed_leader_begins_anew_once_nobody_knows_its_epoch(
    world, monkeypatch, start, is_claimed
):
    """What it appended alone is gone, and so is its producer. `is_claimed`: the manifest knows when
    its epoch began, and not when the next one did.
    """
    deposed = leader(world)
    if is_claimed:
        deposed.claim()
    monkeypatch.setattr(Node, "copy", lambda self: None)  # the manifest would know of the next
    assert append(world, deposed) == 0
    node = next(one for one in world.nodes if one and one.partition is deposed)
    sent = {"producer_id": 101, "sequence": 0}
    deposed.append(world.clients.encoded([b"of nobody else"], **sent), acks=Acks.LEADER)
    while node.has("appends"):
        world.act(node, "appends")
    assert deposed.log_end_offset == 2
    node.is_frozen = True

    partition = leader(world)
    asked = partition.append(world.clients.encoded([b"committed"]), acks=Acks.ALL)
    rounds_until(world, asked.done)
    partition.upkeep.roll()
    now = next(one for one in world.nodes if one and one.partition is partition)
    now.janitor.trim_partition(partition, start)
    rounds_until(world, lambda: partition.first_local_offset == start)
    node.is_frozen = False
    rounds_until(world, lambda: node.replica.kept.replica_id in world.truth.newest.in_sync)
    hand_over(world, node)
    again = leader(world).append(world.clients.encoded([b"of nobody else"], **sent), acks=Acks.ALL)
    rounds_until(world, again.done)
    assert again.result() == again.result()._replace(base_offset=2, duplicate=False)


def test_a_change_is_settled_again_after_the_disk_failed(world, monkeypatch):
    partition, failed = leader(world), []
    append(world, partition)
    led = next(one.replica for one in world.nodes if one and one.partition is partition)
    keep = Replica.keep

    def keeps(self, kept):
        if self is led and self.term.lead.pending is not None and not failed:
            failed.append(kept)
            raise OSError("the disk fails")
        keep(self, kept)

    monkeypatch.setattr(Replica, "keep", keeps)
    node = next(one for one in world.nodes if one and one.partition is not partition)
    node.is_frozen = True
    rounds_until(world, lambda: node.replica.kept.replica_id not in world.truth.newest.in_sync)
    node.is_frozen = False
    rounds_until(world, lambda: node.replica.kept.replica_id in world.truth.newest.in_sync)
    assert failed
