"""The end of each run of `replica_world`: nothing fails any more, and all is to become well."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from tests.simulation.replica_node import Node, deliver
from tests.simulation.replica_truth import Wrong
from tierlog.broker.replication.in_sync import STORE
from tierlog.record_format.errors import TierlogError

if TYPE_CHECKING:
    from tests.simulation.replica_world import World

ROUNDS_MAX = 80
WAITING = ("work", "appends", "flush", "put")


def finish(world: World) -> None:
    """From here on nothing fails: somebody leads, all are in sync, and all is acknowledged."""
    world.is_quiet = True
    world.trace.append("quiet")
    world.cut.clear()
    world.loses_messages = 0.0
    world.heal_store(0)
    for _, change in world.late:
        if world.random.random() < 0.5:
            deliver(change)
    world.late.clear()
    for number, node in enumerate(world.nodes):
        if node is not None and node.disk_failed:
            world.end(node, power_fails=False)
        world.start(number)
    acked = len(world.truth.acked)
    for number in range(ROUNDS_MAX):
        go_round(world, writes=number % 4 == 0)
        if _is_well(world) and len(world.truth.acked) > acked:
            break
    else:
        raise Wrong(f"it does not heal: {world.truth.newest} {state_of(world)}")
    _check_all_is_there(world)


def go_round(world: World, *, writes: bool) -> None:
    world.now_ms += 250
    alive = [one for one in world.nodes if one is not None and not one.is_frozen]
    for node in alive:
        node.presumed_dead = set(range(world.count)) - {one.number for one in alive}
        if world.has_store and node.replica is None:
            _act_well(world, node, "adopt")
        for name in ("due", "fetch", *["produce"] * writes):
            _act_well(world, node, name)
        while able := [one for one in WAITING if node.has(one)]:
            _act_well(world, node, able[0])
        if node.alone is not None:
            _act_well(world, node, "reassign")
        for other in alive:
            if other is not node:
                with suppress(TierlogError):
                    world.hear_report(node, other)
        for name in ("fetch", "copy", "keep_up", *["compact"] * world.is_compacted):
            _act_well(world, node, name)
        world.clients.resolve(node)


def _act_well(world: World, node: Node, name: str) -> None:
    world.act(node, name)
    world.check()


def _is_well(world: World) -> bool:
    newest = world.truth.newest
    if newest is None or newest.leader is None or newest.target:
        return False
    ids = {world.replica_id(number) for number in newest.replicas}
    ends = {
        one.replica.log.flushed_end
        for one in world.nodes
        if one is not None and one.number in newest.replicas and one.replica is not None
    }
    led = [one.partition for one in world.nodes if one is not None and one.partition is not None]
    is_all_shown = {one.high_watermark for one in led} == ends
    if world.has_store and world.store_role == "always":
        ids.add(STORE)
    return is_all_shown and ids == set(newest.in_sync)


def state_of(world: World) -> list[str]:
    found = []
    for node in world.nodes:
        if node is not None and (one := node.replica) is not None:
            pending = None if one.term is None else one.term.lead.pending
            found.append(
                f"{node}: {one.role} {one.kept} {one.following} sent={one.sent} {pending} "
                f"{one.log.log_end_offset} {one.log.flushed_end} {one.log.high_watermark} "
                f"refused={one.refused} leads={one.partition is not None}"
            )
    return found


def _check_all_is_there(world: World) -> None:
    (leader,) = [one for one in world.nodes if one is not None and one.partition is not None]
    partition = leader.partition
    assert partition is not None
    offset = partition.log_start_offset
    world.truth.read.clear()
    while offset < partition.high_watermark:
        offset = world.clients.read_from(partition, offset)
    world.truth.check_was_read(partition.log_start_offset)
