"""What the steps have in common: whose rules they follow, what is left to chance, what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.model.rules import Rules
from tests.model.world import NODES, Replica, Role, WalObject, World, Writer, node_of
from tierlog.broker.replication import in_sync
from tierlog.broker.replication.in_sync import STORE, Fetch, InForce, Leadership, Progress
from tierlog.broker.replication.write_ahead import Slice

T = TypeVar("T")
MAX_EPOCH = 99


class Turns:
    """`pick` takes one of several options, never of none."""

    def __init__(
        self, rules: Rules, pick: Callable[[Sequence[Any]], Any], *, max_epoch: int = MAX_EPOCH
    ) -> None:
        self.rules, self._pick, self.max_epoch = rules, pick, max_epoch

    def choose(self, options: Sequence[T]) -> T:
        return self._pick(options) if len(options) > 1 else options[0]

    def send(self, w: World, r: Replica, version: InForce) -> World:
        """Record a version of the set, then send it."""
        kept = self.rules.keep_sent(r.kept, w.newest, version)
        lead = r.lead and in_sync.send_change(r.lead, version)
        r = r._replace(kept=kept, sent=version, lead=lead)
        return w.with_replica(r, puts=w.puts | {version})


def gone(w: World) -> frozenset[str]:
    """Members that are no replica any more: another disk, or removed."""
    there = {r.me for r in w.replicas if r.node in w.newest.replicas}
    return w.newest.in_sync - there - {STORE}


def chain_of(r: Replica) -> str:
    return f"{NODES[r.node]}-{r.life}"


def in_order(put: InForce) -> tuple[Any, ...]:
    """The same in each run: a set has no order."""
    return put.version, put.epoch, put.leader or "", sorted(put.in_sync), sorted(put.replicas)


def spend(w: World, what: str) -> Any:
    count = getattr(w.left, what)
    return w.left._replace(**{what: count - 1}) if count else None


def step_down(r: Replica) -> Replica:
    return as_candidate(r)._replace(role=Role.IDLE, sent=None)


def as_candidate(r: Replica) -> Replica:
    return r._replace(
        role=Role.CANDIDATE,
        lead=None,
        leader=None,
        reading=None,
        asked=None,
        manifest=None,
        offered=None,
    )


def write_tail(w: World, r: Replica, rules: Rules, *, epoch: int) -> tuple[World, Replica]:
    """Write what the manifest lacks of the log into its own chain, under the epoch that it is going
    to claim: nothing refers to it before that. A chain that may be fenced, or of which objects are
    on their way, is given up for another.
    """
    writer = r.writer if r.writer and r.writer.chain == chain_of(r) else Writer(chain_of(r))
    if writer.is_fenced or writer.sent or writer.next_number in w.wal(writer.chain):
        r = r._replace(life=r.life + 1)
        writer = Writer(chain_of(r))
    base, end = len(w.cold), len(r.log)
    if not rules.writes_tail:
        end = base
    tail = WalObject(Slice(writer.next_number, epoch, base, end), r.log[base:end])
    objects = {**w.wal(writer.chain), writer.next_number: tail}
    writer = writer._replace(next_number=writer.next_number + 1, end_offset=end, acked=end)
    return w.with_wal(writer.chain, objects), r._replace(writer=writer)


def lead_of(r: Replica) -> Leadership:
    assert r.lead is not None
    return r.lead


def is_replica(lead: Leadership, member: str) -> bool:
    return node_of(member) in lead.in_force.replicas


def with_own_progress(r: Replica) -> Replica:
    if r.lead is None:
        return r
    own = Progress(r.flushed, r.log_start)
    return r._replace(lead=in_sync.note_progress(r.lead, r.me, own))


def leading(w: World, r: Replica, in_force: InForce, epoch: int) -> Replica:
    """It begins to lead; what it wrote for the bucket before its claim counts (`write_tail`)."""
    own = ((r.me, Progress(r.flushed, r.log_start)),)
    lead = Leadership(r.me, epoch, in_force, len(r.log), min(r.shown, len(r.log)), own)
    writer = r.writer
    if writer is None or writer.chain != chain_of(r):
        writer = Writer(chain_of(r))
    lead = in_sync.begin_chain(lead, None if writer.is_fenced else writer.chain)
    if in_force.wal is None or in_force.wal != writer.chain:
        writer = writer._replace(end_offset=len(w.cold), acked=len(w.cold))
    if not writer.is_fenced:
        lead = in_sync.note_store(lead, writer.chain, Progress(writer.acked))
    return r._replace(
        role=Role.LEADER, epoch=epoch, leader=None, lead=lead, writer=writer, round=r.round
    )


def on_the_way(w: World, fetch: Fetch) -> frozenset[Fetch]:
    """A later fetch says all that an earlier one of the same epoch said."""
    same = {f for f in w.fetches if (f.replica_id, f.epoch) == (fetch.replica_id, fetch.epoch)}
    return (w.fetches - same) | {fetch}
