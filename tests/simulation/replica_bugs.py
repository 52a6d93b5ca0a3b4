"""What brokers do about replicas, with one mistake each: in the decisions, as in the model's table,
and in the code around them. Every one is caught, or the simulation is no proof of anything.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tierlog.broker.bucket.cold_reads import ColdReads
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas import replica
from tierlog.broker.replicas.elections import Elections
from tierlog.broker.replicas.fetch_answers import FetchAnswers
from tierlog.broker.replicas.replica import Replica, Role
from tierlog.broker.replicas.store_member import StoreMember
from tierlog.broker.replication import election, in_sync, write_ahead_chain
from tierlog.broker.replication.in_sync import Leadership
from tierlog.broker.replication.term import Term
from tierlog.broker.replication.write_ahead_chain import ChainWriter
from tierlog.hot_tier import replica_append, sealed_segments
from tierlog.hot_tier.cleaner import Cleanable
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.log_writer import LogWriter
from tierlog.hot_tier.planned_records import PlannedRecords

Plant = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Plant], None]] = {}


def bug(name: str) -> Callable[[Callable[[Plant], None]], None]:
    def register(plant: Callable[[Plant], None]) -> None:
        BUGS[name] = plant

    return register


# --- what is committed ----------------------------------------------------------------------------


@bug("a follower acknowledges what it has not flushed")
def _(plant: Plant) -> None:
    take, ask = Replica.take, Replica.next_fetch

    def takes(self: Replica, answer: Any, body: memoryview) -> bool:
        take(self, answer, body)
        return False

    def next_fetch(self: Replica, node_id: int) -> Any:
        fetch = ask(self, node_id)
        return fetch and msgspec.structs.replace(fetch, flushed_end=fetch.end_offset)

    plant.setattr(Replica, "take", takes)
    plant.setattr(Replica, "next_fetch", next_fetch)


@bug("the watermark counts the new set only")
def _(plant: Plant) -> None:
    plant.setattr(in_sync, "counted", lambda lead: (lead.pending or lead.in_force).in_sync)


@bug("the watermark is what the leader flushed")
def _(plant: Plant) -> None:
    plant.setattr(in_sync, "counted", lambda lead: frozenset((lead.me,)))


@bug("a fetch whose log parts from the leader's counts")
def _(plant: Plant) -> None:
    note = in_sync.note_fetch
    plant.setattr(in_sync, "note_fetch", lambda lead, fetch, **_: note(lead, fetch, diverges=False))


@bug("acknowledgements of an earlier epoch count")
def _(plant: Plant) -> None:
    note = in_sync.note_fetch
    plant.setattr(
        in_sync,
        "note_fetch",
        lambda lead, fetch, **_: note(lead, fetch._replace(epoch=lead.epoch), diverges=False),
    )


@bug("a flush that failed is taken for done")
def _(plant: Plant) -> None:
    sync = LogWriter._sync

    def syncs(self: LogWriter, target: Any) -> None:
        with suppress(OSError):
            sync(self, target)

    plant.setattr(LogWriter, "_sync", syncs)


@bug("an append is answered once the leader has flushed it")
def _(plant: Plant) -> None:
    flushed = Term.note_flushed

    def note_flushed(self: Term, flushed_end: int) -> None:
        flushed(self, flushed_end)
        self.log.writer.tell_high_watermark(flushed_end)

    plant.setattr(Term, "note_flushed", note_flushed)


# --- the set --------------------------------------------------------------------------------------


@bug("a replica joins that lacks what the leader began with")
def _(plant: Plant) -> None:
    joins = in_sync.may_join

    def may_join(lead: Leadership, member: str) -> bool:
        return joins(lead._replace(began_at=0, high_watermark=0), member)

    plant.setattr(in_sync, "may_join", may_join)


@bug("a replica joins that lacks a trim")
def _(plant: Plant) -> None:
    joins = in_sync.may_join

    def may_join(lead: Leadership, member: str) -> bool:
        progress = tuple((name, one._replace(log_start_offset=0)) for name, one in lead.progress)
        return joins(lead._replace(progress=progress), member)

    plant.setattr(in_sync, "may_join", may_join)


@bug("the set shrinks below the minimum")
def _(plant: Plant) -> None:
    decide = in_sync.next_in_sync
    plant.setattr(
        in_sync,
        "next_in_sync",
        lambda lead, **facts: decide(lead, **{**facts, "min_in_sync": 1}),
    )


@bug("a trim is answered when the leader made it")
def _(plant: Plant) -> None:
    plant.setattr(Term, "wait_for_trim", lambda self, *, timeout_s: None)


# --- the bucket as a replica ----------------------------------------------------------------------


@bug("the bucket has what was sent to it")
def _(plant: Plant) -> None:
    send = ChainWriter.send

    def sends(self: ChainWriter, parts: Any) -> Future[None]:
        send(self, parts)
        done = Future[None]()
        done.set_result(None)
        return done

    plant.setattr(ChainWriter, "send", sends)


@bug("objects count in any order")
def _(plant: Plant) -> None:
    def acknowledge(self: ChainWriter, done: Future[None]) -> None:
        with suppress(ValueError):  # it is there no more once it was given up
            self._sent.remove(done)
            done.set_result(None)

    plant.setattr(ChainWriter, "_acknowledge", acknowledge)


@bug("a number that another object has counts")
def _(plant: Plant) -> None:
    write = ChainWriter._try_write
    plant.setattr(ChainWriter, "_try_write", lambda *all_of_it: write(*all_of_it) or True)


@bug("a chain is read that is written")
def _(plant: Plant) -> None:
    plant.setattr(write_ahead_chain, "next_fence", lambda listed: None)


@bug("a claim keeps the bucket in the set without the log's tail")
def _(plant: Plant) -> None:
    plant.setattr(StoreMember, "write_tail", lambda self, *to: self.open_feed(*to).chain)


# --- claims ---------------------------------------------------------------------------------------


@bug("whoever is not in the set claims too")
def _(plant: Plant) -> None:
    decide = election.claim

    def claim(kept: election.Kept, in_force: in_sync.InForce, **facts: Any) -> Any:
        with_it = in_force._replace(in_sync=in_force.in_sync | {kept.replica_id})
        return decide(kept, with_it, **facts)

    plant.setattr(election, "claim", claim)


@bug("what a replica keeps is not on the medium")
def _(plant: Plant) -> None:
    plant.setattr(Replica, "keep", lambda self, kept: setattr(self, "kept", kept))


@bug("a claim of a former life is led")
def _(plant: Plant) -> None:
    done = Elections._do_as_said

    def do_as_said(self: Elections, one: Replica, in_force: Any, *, is_named: bool) -> None:
        if in_force.leader == one.kept.replica_id and one.role is not Role.LEADER:
            self._leading.lead(one, in_force)
            return
        done(self, one, in_force, is_named=is_named)

    plant.setattr(Elections, "_do_as_said", do_as_said)


# --- following ------------------------------------------------------------------------------------


@bug("a follower is never told to cut")
def _(plant: Plant) -> None:
    plant.setattr(FetchAnswers, "_diverging", lambda self, one, partition: None)


@bug("a follower cuts to its watermark")
def _(plant: Plant) -> None:
    plant.setattr(replica, "cut_offset", lambda starts, at, *, log_end_offset: at[1] // 2)


@bug("a follower forgets the producers of what it appends")
def _(plant: Plant) -> None:
    class Forgetful(PlannedRecords):
        def note_producer(self, header: Any, marker: Any) -> None:
            pass

    plant.setattr(replica_append, "PlannedRecords", Forgetful)


@bug("a replica begins at its leader's local start without the bucket's producers")
def _(plant: Plant) -> None:
    plant.setattr(ColdReads, "producers_at", lambda self, offset, manifest=None: None)


@bug("what is not committed is uploaded")
def _(plant: Plant) -> None:
    claim = Partition.claim

    def claimed(self: Partition) -> None:
        claim(self)
        log = self._log
        log._state.committed = log.flushed_end

    plant.setattr(Partition, "claim", claimed)


@bug("what is not committed replaces what is")
def _(plant: Plant) -> None:
    found = sealed_segments.find_cleanable

    def find_cleanable(state: LogState, checkpoint: int | None, *, now_ms: int) -> Cleanable:
        committed, state.committed = state.committed, state.log_end_offset
        try:
            return found(state, checkpoint, now_ms=now_ms)
        finally:
            state.committed = committed

    plant.setattr(sealed_segments, "find_cleanable", find_cleanable)
