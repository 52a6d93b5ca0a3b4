"""A replica's disk, whom it follows, and what it fetches."""

from __future__ import annotations

from tests.model.turns import Turns, lead_of, on_the_way, spend, step_down, with_own_progress
from tests.model.world import Replica, Role, Violation, World, node_of
from tierlog.broker.replication.in_sync import Fetch


class ReplicaSteps(Turns):
    def flush(self, w: World, r: Replica) -> World | None:
        if r.flushed == len(r.log):
            return None
        return w.with_replica(with_own_progress(r._replace(flushed=len(r.log))))

    def crash(self, w: World, r: Replica) -> World | None:
        left = spend(w, "crashes")
        if left is None:
            return None
        kept = r.log[: self.choose(range(r.flushed, len(r.log) + 1))]
        shown = self.choose([0, r.shown] if r.shown else [0])
        return w.with_replica(
            Replica(
                r.node,
                r.kept,
                kept,
                len(kept),
                r.log_start,
                r.local_start,
                min(shown, len(kept)),
                r.life,
                alive=False,
            ),
            left=left,
        )

    def lose_disk(self, w: World, r: Replica) -> World | None:
        left = spend(w, "losses")
        if left is None:
            return None
        dead = Replica(r.node, self.rules.lost_disk(r.kept), life=r.life, alive=False)
        return w.with_replica(dead, left=left)

    def start(self, w: World, r: Replica) -> World | None:
        return w.with_replica(r._replace(alive=True, life=r.life + 1))

    # --- whom to follow ---------------------------------------------------------------------------

    def look(self, w: World, r: Replica) -> World | None:
        """Read the newest version of the bucket."""
        newest = self.rules.read_newest(w)
        is_alone = r.lead is not None and not r.lead.is_claimed
        if r.sent is not None or is_alone or (r.reading and r.reading.version == w.newest):
            return None
        r = r._replace(reading=None)
        if r.node not in newest.replicas:
            return self._removed(w, r)
        kept = self.rules.keep_settled(r.kept, newest)
        r = r._replace(kept=kept)
        if r.role is Role.LEADER:
            lead = self.rules.settle_change(lead_of(r), newest)
            r = step_down(r) if lead is None else r._replace(lead=lead)
        return w.with_replica(self._adopt(r, epoch=newest.epoch, leader=newest.leader))

    def _removed(self, w: World, r: Replica) -> World | None:
        """It gives its log up; added again it is another replica (H9)."""
        if r.log == () and r.role is Role.IDLE:
            return None
        gone = Replica(r.node, self.rules.renew(r.kept), life=r.life)
        return w.with_replica(gone)

    def hear(self, w: World, r: Replica) -> World | None:
        """A hint about a leader, perhaps one of long ago."""
        left = spend(w, "hints")
        if r.role is Role.LEADER or r.sent is not None or r.reading is not None or left is None:
            return None
        said = {(v.epoch, v.leader) for v in w.chain if v.leader}
        said |= {(one.lead.epoch, one.me) for one in w.replicas if one.lead}
        if not said:
            return None
        epoch, leader = self.choose(sorted(said))
        after = self._adopt(r, epoch=epoch, leader=leader)
        return None if after is r else w.with_replica(after, left=left)

    def _adopt(self, r: Replica, *, epoch: int, leader: str | None) -> Replica:
        is_same = (epoch, leader) == (r.epoch, r.leader) and r.role is Role.FOLLOWER
        if is_same or r.role is Role.LEADER:
            return r
        if not self.rules.may_follow(r.kept, leader=leader, epoch=epoch):
            return r
        log = self.rules.log_when_adopting(r)
        return r._replace(
            kept=self.rules.keep_followed(r.kept, epoch),
            log=log,
            flushed=min(r.flushed, len(log)),
            role=Role.FOLLOWER,
            epoch=epoch,
            leader=leader,
            answered=0,
        )

    # --- fetching ---------------------------------------------------------------------------------

    def fetch(self, w: World, r: Replica) -> World | None:
        """Ask; and if the leader of that epoch is there, get its answer."""
        if r.role is not Role.FOLLOWER:
            return None
        asked = w._replace(fetches=on_the_way(w, self._fetch_of(r)))
        leader = w.replicas[node_of(r.leader or "")]
        if leader.lead is None or (leader.lead.epoch, leader.me) != (r.epoch, r.leader):
            return asked
        return asked.with_replica(self._with_answer(w, r, leader))

    def _fetch_of(self, r: Replica) -> Fetch:
        following = r.role is Role.FOLLOWER
        return Fetch(
            replica_id=r.me,
            node=r.node,
            epoch=r.epoch if following else 0,
            seen=r.kept.seen,
            last_epoch=r.log[-1][0] if r.log else 0,
            end_offset=len(r.log),
            flushed_end=self.rules.acknowledged_end(r) if following else 0,
            log_start_offset=r.log_start if following else 0,
            answered=r.answered if following else 0,
        )

    def _with_answer(self, w: World, r: Replica, leader: Replica) -> Replica:
        lead = lead_of(leader)
        r = r._replace(answered=leader.round)
        if len(r.log) < max(leader.log_start, leader.local_start):
            return self._begin_anew(w, r, leader)
        cut = self.rules.cut(r, leader)
        if cut < len(r.log):
            if cut < r.shown:
                raise Violation(f"{r.me} cuts at {cut}, below its own high watermark {r.shown}")
            return r._replace(log=r.log[:cut], flushed=min(r.flushed, cut))
        log = leader.log[: len(r.log) + 1] if len(leader.log) > len(r.log) else r.log
        return r._replace(
            log=log,
            log_start=max(r.log_start, min(leader.log_start, r.flushed)),
            local_start=max(r.local_start, min(leader.local_start, r.flushed)),
            shown=max(r.shown, min(lead.high_watermark, r.flushed)),
        )

    def _begin_anew(self, w: World, r: Replica, leader: Replica) -> Replica:
        """Where the leader's local log begins, if the manifest, which it reads, reaches there."""
        log = leader.log[: leader.log_start]
        if leader.local_start > leader.log_start:
            log = w.cold[: leader.local_start]
            if len(log) < leader.local_start:
                return r
        return r._replace(
            log=log, flushed=len(log), log_start=leader.log_start, local_start=leader.local_start
        )

    def give_up(self, w: World, r: Replica) -> World | None:
        """One that is not in the set wipes its log, and begins anew: what the leader compacted away
        meanwhile would stay in it (H6).
        """
        left = spend(w, "losses")
        if r.role is not Role.FOLLOWER or r.me in w.newest.in_sync or left is None or not r.log:
            return None
        anew = Replica(r.node, self.rules.give_up(r.kept), life=r.life)
        return w.with_replica(anew, left=left)

    def knock(self, w: World, r: Replica) -> World | None:
        """A replica that may not follow the leader in force tells it why (R13)."""
        if r.role is not Role.IDLE or r.kept.seen <= w.newest.epoch:
            return None
        return w._replace(fetches=on_the_way(w, self._fetch_of(r)))
