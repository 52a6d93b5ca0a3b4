"""The bucket as a member: a leader's write-ahead objects, fences, and claims for the bucket."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from tests.model.claim_steps import ClaimSteps
from tests.model.turns import as_candidate, chain_of, lead_of, spend, with_own_progress, write_tail
from tests.model.world import (
    WINDOW,
    Log,
    Reading,
    Replica,
    Role,
    Violation,
    WalObject,
    World,
    Writer,
    agreed,
)
from tierlog.broker.replication import election, in_sync
from tierlog.broker.replication.in_sync import STORE, InForce, Leadership, Progress
from tierlog.broker.replication.write_ahead import Slice


class StoreSteps(ClaimSteps):
    def write_wal(self, w: World, r: Replica) -> World | None:
        left = spend(w, "wal_objects")
        if r.lead is None or r.writer is None or left is None or r.writer.is_fenced:
            return None
        writer = r.writer
        if len(writer.sent) == WINDOW:
            return None
        base = writer.end_offset  # an object may be of other partitions alone
        end = self.choose(range(base, max(base, r.flushed) + 1))
        number = self.rules.wal_number(r, w)
        part = Slice(number, r.lead.epoch, base, end)
        start = 0 if r.manifest is None else r.manifest.log_start
        put = WalObject(part, r.log[base:end], asked=r.round, log_start=start)
        writer = writer._replace(
            next_number=number + 1, end_offset=end, sent=(*writer.sent, (number, put))
        )
        puts = w.wal_puts | {(writer.chain, number, put)}
        return w.with_replica(r._replace(writer=writer), left=left, wal_puts=puts)

    def land_wal(self, w: World, _: Replica | None = None) -> World | None:
        waited_for = {
            (r.writer.chain, *one) for r in w.replicas if r.writer for one in r.writer.sent
        }
        return self._land_wal(w, w.wal_puts & waited_for)

    def land_wal_late(self, w: World, _: Replica | None = None) -> World | None:
        """A copy of an object, or one whose writer is gone."""
        return self._land_wal(w, w.wal_puts)

    def _land_wal(self, w: World, puts: AbstractSet[tuple[str, int, WalObject]]) -> World | None:
        able = [put for put in puts if put[1] not in w.wal(put[0])]
        if not able:
            return None
        chain, number, put = self.choose(sorted(able, key=repr))
        return w.with_wal(chain, w.wal(chain) | {number: put})

    def read_wal(self, w: World, r: Replica) -> World | None:
        """The writer learns what has the number of its oldest object."""
        if r.lead is None or r.writer is None or not r.writer.sent or r.writer.is_fenced:
            return None
        writer, (number, mine) = r.writer, r.writer.sent[0]
        if self.rules.wal_acknowledges(number, w, r):
            lead = self._note_store(r, mine._replace(log_start=self.rules.store_log_start(r, mine)))
            writer = writer._replace(sent=writer.sent[1:], acked=_acked(r, mine))
            return w.with_replica(r._replace(writer=writer, lead=lead))
        there = w.wal(writer.chain).get(number)
        if there is None or there == mine:
            return None
        if STORE not in in_sync.counted(r.lead):
            r = r._replace(lead=self.rules.begin_chain(r.lead, None))
        return w.with_replica(r._replace(writer=writer._replace(is_fenced=True)))

    def _note_store(self, r: Replica, mine: WalObject) -> Leadership:
        lead = lead_of(r)
        assert mine.slice
        assert r.writer
        if mine.slice.epoch != lead.epoch:
            return lead
        there = Progress(mine.slice.end_offset, mine.log_start, mine.asked)
        return self.rules.note_store(lead, r.writer.chain, there)

    def new_chain(self, w: World, r: Replica) -> World | None:
        """After a fence: another chain. Before it is named it has what the manifest lacks."""
        left = spend(w, "claims")
        if r.lead is None or r.sent or r.writer is None or not r.writer.is_fenced:
            return None
        if not r.lead.is_claimed or left is None:
            return None
        r = with_own_progress(r._replace(flushed=len(r.log)))
        w, r = write_tail(w, r, self.rules, epoch=r.lead.epoch)
        assert r.writer
        lead = self.rules.begin_chain(lead_of(r), r.writer.chain)
        r = r._replace(lead=lead)
        if STORE not in lead.in_force.in_sync:
            there = Progress(r.writer.acked)
            return w.with_replica(
                r._replace(lead=self.rules.note_store(lead, r.writer.chain, there))
            )
        after = in_sync.change_chain(lead, r.writer.chain)
        return self.send(w._replace(left=left), r, after)

    def collect_wal(self, w: World, _: Replica | None = None) -> World | None:
        """Objects go that the manifest covers."""
        options = []
        for chain, objects in w.wals:
            listed = {n: one.slice is None for n, one in objects}
            covered = {
                n: one.slice is not None
                and w.cold[: one.slice.end_offset][one.slice.base_offset :] == one.records
                for n, one in objects
            }
            options += [(chain, n) for n in self.rules.collectable(listed, covered)]
            if not self.rules.fences_are_kept:
                options += [(chain, n) for n, fence in listed.items() if fence]
        if not options:
            return None
        chain, number = self.choose(options)
        objects = w.wal(chain)
        del objects[number]
        return w.with_wal(chain, objects)

    def begin_reading(self, w: World, r: Replica) -> World | None:
        """Who is no member is to claim with what the bucket has."""
        members = w.newest.in_sync
        idle = r.role in (Role.IDLE, Role.FOLLOWER) and not r.sent and not r.reading
        if not idle or STORE not in members or r.me in members:
            return None
        r = r._replace(role=Role.IDLE, leader=None, reading=Reading(w.newest, w.manifest))
        return w.with_replica(r)

    def list_wal(self, w: World, r: Replica) -> World | None:
        if r.reading is None or r.reading.listed is not None:
            return None
        objects = w.wal(r.reading.version.wal or "")
        listed = tuple(sorted((n, one.slice is None) for n, one in objects.items()))
        return w.with_replica(r._replace(reading=r.reading._replace(listed=listed)))

    def fence(self, w: World, r: Replica) -> World | None:
        """Create the next fence; if there is none to create, claim."""
        if r.reading is None or r.reading.listed is None:
            return None
        chain = r.reading.version.wal
        number = self.rules.next_fence(dict(r.reading.listed)) if chain else None
        if number is None or chain is None or not self.rules.fences_before_claim:
            return self._claim_for_store(w, r)
        left = spend(w, "fences")
        if left is None:
            return w.with_replica(r._replace(reading=None))
        objects = w.wal(chain)
        created = number not in objects
        w = w.with_wal(chain, {number: WalObject(None), **objects})._replace(left=left)
        if created and not self.rules.fences_again:
            return self._claim_for_store(w, r)
        return w.with_replica(r._replace(reading=r.reading._replace(listed=None)))

    def _claim_for_store(self, w: World, r: Replica) -> World | None:
        left = spend(w, "claims")
        assert r.reading
        version, before = r.reading.version, r.reading.manifest
        r = r._replace(reading=None)
        if left is None:
            return w.with_replica(r)
        manifest = w.manifest if self.rules.manifest_after_list else before
        log = self.store_log(w, version, manifest.cold)
        if agreed(r.log, log) < min(r.shown, len(r.log)):
            raise Violation(f"{r.me} cuts what it shows: {r.log}, the bucket has {log}")
        r = r._replace(log=log, kept=self.rules.renew(r.kept))
        r = r._replace(flushed=len(r.log), kept=self.rules.keep_settled(r.kept, version))
        r = r._replace(log_start=self.rules.log_start_for_store(r, manifest))
        if version.wal == chain_of(r):  # it is its own, and fenced by now
            r = r._replace(writer=Writer(chain_of(r), is_fenced=True))
        w, r = write_tail(w, r, self.rules, epoch=election.new_epoch(r.kept, version))
        after = election.claim_for_store(
            r.kept,
            version,
            node=r.node,
            is_leader_dead=self.choose([True, False]),
            min_in_sync=w.min_in_sync,
            wal=chain_of(r),
        )
        if not isinstance(after, InForce) or after.epoch > self.max_epoch:
            return w.with_replica(r)
        return self.send(w._replace(left=left), as_candidate(r), after)

    def store_log(self, w: World, version: InForce, cold: Log) -> Log:
        """STORE's log: what the manifest names, and what the chain in force has above that."""
        log, objects = cold, w.wal(version.wal or "")
        slices = [one.slice for one in objects.values() if one.slice]
        for part in self.rules.store_slices(slices, epoch=version.epoch, end_offset=len(cold)):
            log = log[: part.base_offset] + objects[part.number].records
        return log


def _acked(r: Replica, mine: WalObject) -> int:
    """Up to where objects of this epoch are acknowledged."""
    assert mine.slice
    assert r.writer
    is_of_now = mine.slice.epoch == lead_of(r).epoch
    return max(r.writer.acked, mine.slice.end_offset) if is_of_now else r.writer.acked
