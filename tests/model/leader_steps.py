"""What a leader does: it appends, hears its followers, shows what is committed, changes the set."""

from __future__ import annotations

from tests.model.claim_steps import ClaimSteps
from tests.model.turns import gone, is_replica, lead_of, spend, with_own_progress
from tests.model.world import NODES, Replica, Role, Violation, World
from tierlog.broker.replication import election, in_sync
from tierlog.broker.replication.in_sync import STORE


class LeaderSteps(ClaimSteps):
    def hear_fetch(self, w: World, r: Replica) -> World | None:
        """The leader takes note of a fetch, of now or of long ago."""
        if r.lead is None:
            return None
        theirs = [f for f in w.fetches if f.node != r.node]
        if not theirs:
            return None
        fetch = self.choose(sorted(theirs))
        if self.rules.must_claim_anew(r.lead, fetch.seen):
            return self.claim_anew(w, r, fetch.seen)
        at = election.diverging(
            r.epochs,
            log_end_offset=len(r.log),
            last_epoch=fetch.last_epoch,
            end_offset=fetch.end_offset,
        )
        lead = self.rules.note_fetch(r.lead, fetch, diverges=at is not None)
        return None if lead == r.lead else w.with_replica(r._replace(lead=lead))

    def append(self, w: World, r: Replica) -> World | None:
        left = spend(w, "records")
        if r.lead is None or r.role is not Role.LEADER or left is None:
            return None
        record = (r.lead.epoch, w.next_record)
        at = len(r.log)
        others = [one.log for one in w.replicas] + [w.committed]
        if any(len(log) > at and log[at][0] == record[0] for log in others):
            raise Violation(f"{r.me} gives offset {at} twice under epoch {record[0]}")
        return w.with_replica(
            r._replace(log=(*r.log, record)), left=left, next_record=w.next_record + 1
        )

    def advance(self, w: World, r: Replica) -> World | None:
        """The watermarks: what is shown to readers, and what a trim is answered with."""
        if r.lead is None:
            return None
        high = self.rules.high_watermark(r.lead)
        low = min(r.log_start, self.rules.low_watermark(r.lead))
        trimmed = max(w.trimmed, low)
        if (high, trimmed) == (r.lead.high_watermark, w.trimmed):
            return None
        shown, known = r.log[:high], w.committed
        k = min(len(shown), len(known))
        if shown[:k] != known[:k]:
            raise Violation(f"{r.me} shows {shown}, committed is {known}")
        r = r._replace(lead=r.lead._replace(high_watermark=high), shown=high)
        committed = shown if len(shown) > len(known) else known
        return w.with_replica(r, committed=committed, trimmed=trimmed)

    def change(self, w: World, r: Replica) -> World | None:
        """Somebody lags, or has caught up."""
        left = spend(w, "changes")
        if r.lead is None or r.sent is not None or left is None:
            return None
        others = sorted(r.lead.in_force.in_sync - {r.me})
        lagging = self.choose([frozenset(), *({one} for one in others), frozenset(others)])
        members = self.next_members(w, r, frozenset(lagging))
        if members is None:
            return None
        after = in_sync.change_in_sync(r.lead, members)
        return self.send(w._replace(left=left), r, after)

    def next_members(self, w: World, r: Replica, lagging: frozenset[str]) -> frozenset[str] | None:
        lead = lead_of(r)
        outsiders = {m for m, _ in lead.progress if m == STORE or is_replica(lead, m)}
        if not w.has_store:
            outsiders -= {STORE}
        return self.rules.next_in_sync(
            lead, outsiders=outsiders, lagging=lagging, min_in_sync=w.min_in_sync
        )

    def resign(self, w: World, r: Replica) -> World | None:
        left = spend(w, "resignations")
        if r.lead is None or r.sent is not None or left is None or not r.lead.is_claimed:
            return None
        failing = self.choose([False, True])
        after = election.resign(
            r.lead, lagging=gone(w), min_in_sync=w.min_in_sync, is_failing=failing
        )
        return self.send(w._replace(left=left), r, after)

    def reassign(self, w: World, r: Replica) -> World | None:
        left = spend(w, "reassignments")
        if r.lead is None or r.sent is not None or left is None or not r.lead.is_claimed:
            return None
        there = r.lead.in_force.replicas
        node = self.choose([one.node for one in w.replicas if one.node != r.node])
        gone = frozenset(m for m in r.lead.in_force.in_sync if m[0] == NODES[node])
        after = in_sync.change_replicas(
            r.lead, there ^ {node}, gone=gone, min_in_sync=w.min_in_sync
        )
        if after is None:
            return None
        return self.send(w._replace(left=left), r, after)

    def trim(self, w: World, r: Replica) -> World | None:
        left = spend(w, "trims")
        if r.lead is None or left is None or r.log_start >= r.lead.high_watermark:
            return None
        to = self.choose(range(r.log_start + 1, r.lead.high_watermark + 1))
        return w.with_replica(with_own_progress(r._replace(log_start=to)), left=left)

    def ask(self, w: World, r: Replica) -> World | None:
        """A linearizable read begins."""
        left = spend(w, "reads")
        if r.lead is None or left is None or r.asked is not None:
            return None
        asked = (r.round + 1, len(w.committed))
        return w.with_replica(r._replace(round=r.round + 1, asked=asked), left=left)

    def confirm(self, w: World, r: Replica) -> World | None:
        if r.lead is None or r.asked is None or r.lead.high_watermark < r.lead.began_at:
            return None
        answer, committed = r.asked
        if not self.rules.is_confirmed(r.lead, answer=answer):
            return None
        if r.lead.high_watermark < committed:
            raise Violation(f"{r.me} answers a linearizable read with what was old when it began")
        return w.with_replica(r._replace(asked=None))
