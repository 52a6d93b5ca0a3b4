"""Claims, and what becomes of the versions of the set that were sent."""

from __future__ import annotations

from tests.model.turns import (
    Turns,
    as_candidate,
    chain_of,
    in_order,
    lead_of,
    leading,
    spend,
    step_down,
    with_own_progress,
    write_tail,
)
from tests.model.world import Replica, Role, World
from tierlog.broker.replication import election
from tierlog.broker.replication.in_sync import STORE, InForce, Progress


class ClaimSteps(Turns):
    def claim(self, w: World, r: Replica) -> World | None:
        """A member claims on what it finds in the bucket."""
        left = spend(w, "claims")
        if r.role not in (Role.IDLE, Role.FOLLOWER) or r.sent or r.reading or left is None:
            return None
        newest = w.newest
        r = r._replace(kept=self.rules.keep_settled(r.kept, newest))
        r = with_own_progress(r._replace(flushed=len(r.log)))
        dead = self.choose([False, True])
        upload = self.choose([False, True]) if STORE in newest.in_sync else False
        return self._send_claim(w._replace(left=left), r, dead=dead, upload=upload)

    def _send_claim(self, w: World, r: Replica, *, dead: bool, upload: bool) -> World | None:
        """With `upload` the bucket has its log, in its own chain, before it claims."""
        if upload:
            w, r = write_tail(w, r, self.rules, epoch=election.new_epoch(r.kept, w.newest))
        after = self.rules.claim(
            r.kept,
            w.newest,
            is_leader_dead=dead,
            min_in_sync=w.min_in_sync,
            wal=chain_of(r) if upload else None,
        )
        if not isinstance(after, InForce) or after.epoch > self.max_epoch:
            return None
        return self.send(w, as_candidate(r), after)

    def claim_anew(self, w: World, r: Replica, seen: int) -> World | None:
        left = spend(w, "claims")
        if left is None or r.sent is not None or lead_of(r).in_force != w.newest:
            return None
        kept = r.kept._replace(seen=max(r.kept.seen, seen))
        r = r._replace(kept=kept, flushed=len(r.log))
        upload = STORE in w.newest.in_sync
        return self._send_claim(w._replace(left=left), r, dead=False, upload=upload)

    def lead_alone(self, w: World, r: Replica) -> World | None:
        """Begin without the bucket (H3)."""
        left = spend(w, "alone")
        if r.role is not Role.IDLE or r.sent or left is None:
            return None
        if not self.rules.may_lead_alone(r.kept):
            return None
        epoch = r.kept.seen + 1
        if epoch > self.max_epoch:
            return None
        r = r._replace(kept=r.kept._replace(seen=epoch), flushed=len(r.log))
        known = InForce(r.kept.version, 0, None, frozenset({r.node}), frozenset({r.me}))
        return w.with_replica(leading(w, r, known, epoch), left=left)

    def claim_alone(self, w: World, r: Replica) -> World | None:
        """The bucket is back: the claim of the epoch that it leads under already."""
        newest = w.newest
        if r.lead is None or r.sent or r.lead.is_claimed or newest.epoch >= r.lead.epoch:
            return None
        if r.me not in newest.in_sync:
            return w.with_replica(step_down(r))
        after = newest._replace(
            version=newest.version + 1,
            epoch=r.lead.epoch,
            leader=r.me,
            in_sync=frozenset({r.me}),
            wal=None,
        )
        r = r._replace(lead=r.lead._replace(in_force=newest))
        return self.send(w, r, after)

    # --- what is sent to the bucket ---------------------------------------------------------------

    def land(self, w: World, _: Replica | None = None) -> World | None:
        waited_for = {r.sent for r in w.replicas} - w.stray
        able = [
            put
            for put in w.puts
            if self.rules.lands(put, w) or (put.version <= w.collected and put in waited_for)
        ]
        if not able:
            return None
        put = self.choose(sorted(able, key=in_order))
        if self.rules.lands(put, w):
            return w._replace(chain=(*w.chain, put))
        return w._replace(stray=w.stray | {put})

    def settle(self, w: World, r: Replica) -> World | None:
        """Find out what became of what was sent; if that is open, it stays on the way."""
        if r.sent is None:
            return None
        found = self.rules.found(r.sent, w)
        if r.lead is not None:
            return self._settle_change(w, r, found)
        stands = self.rules.claim_stands(r.sent, found)
        if stands is None:
            return None
        r = r._replace(sent=None, kept=self.rules.keep_settled(r.kept, found))
        if not stands:
            return w.with_replica(step_down(r))
        log = self.rules.log_when_leading(r)
        r = r._replace(log=log, flushed=len(log))
        return w.with_replica(leading(w, r, found, found.epoch))

    def _settle_change(self, w: World, r: Replica, found: InForce) -> World | None:
        lead = self.rules.settle_change(lead_of(r), found)
        if lead is not None and lead.pending is not None:
            return None
        r = r._replace(sent=None, kept=self.rules.keep_settled(r.kept, found))
        if lead is None:
            return w.with_replica(step_down(r))
        r = r._replace(lead=lead)
        if r.writer and lead.in_force.wal == r.writer.chain:
            there = Progress(r.writer.acked)
            r = r._replace(lead=self.rules.note_store(lead, r.writer.chain, there))
        return w.with_replica(r)

    def collect(self, w: World, _: Replica | None = None) -> World | None:
        """Old versions are deleted: their numbers are free."""
        newest = w.newest.version
        left = spend(w, "collections")
        if left is None or w.collected >= newest - 1:
            return None
        return w._replace(left=left, collected=newest - 1)
