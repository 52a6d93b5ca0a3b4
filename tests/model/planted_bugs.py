"""The protocol with one mistake each. Every one is caught, or the model is no proof of anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tests.model.rules import Rules
from tests.model.world import WINDOW, Log, Manifest, Replica, WalObject, World, epochs_of
from tierlog.broker.replication import election, in_sync
from tierlog.broker.replication.election import Kept, Refused
from tierlog.broker.replication.in_sync import (
    STORE,
    Fetch,
    InForce,
    Leadership,
    Progress,
)
from tierlog.broker.replication.write_ahead import Slice, next_fence

BUGS: dict[str, type[Rules]] = {}


def bug(name: str) -> Callable[[type[Rules]], type[Rules]]:
    def register(rules: type[Rules]) -> type[Rules]:
        BUGS[name] = rules
        return rules

    return register


def _flushed(lead: Leadership, members: Iterable[str]) -> int:
    return max(lead.high_watermark, min(lead.progress_of(m).flushed_end for m in members))


# --- the set --------------------------------------------------------------------------------------


@bug("the watermark counts the new set only")
class NewSetOnly(Rules):
    def high_watermark(self, lead: Leadership) -> int:
        return _flushed(lead, (lead.pending or lead.in_force).in_sync)


@bug("the watermark counts the old set only")
class OldSetOnly(Rules):
    def high_watermark(self, lead: Leadership) -> int:
        return _flushed(lead, lead.in_force.in_sync)


@bug("the watermark is what the leader flushed")
class LeaderOnly(Rules):
    def high_watermark(self, lead: Leadership) -> int:
        return _flushed(lead, [lead.me])


@bug("a 404 is taken for the loss of what was sent")
class AbsenceDecides(Rules):
    def settle_change(self, lead: Leadership, newest: InForce) -> Leadership | None:
        settled = in_sync.settle_change(lead, newest)
        return settled and settled._replace(pending=None)


@bug("what was sent is taken for done")
class TakenForDone(Rules):
    def settle_change(self, lead: Leadership, newest: InForce) -> Leadership | None:
        if lead.pending and newest.version < lead.pending.version and lead.pending.leader:
            return lead._replace(in_force=lead.pending, pending=None)
        return in_sync.settle_change(lead, newest)


@bug("a replica joins that lacks what the leader began with")
class JoinsBelowStart(Rules):
    def next_in_sync(self, lead: Leadership, **facts: Any) -> frozenset[str] | None:
        return in_sync.next_in_sync(lead._replace(began_at=0), **facts)


@bug("a replica joins that lacks a trim")
class JoinsUntrimmed(Rules):
    def next_in_sync(self, lead: Leadership, **facts: Any) -> frozenset[str] | None:
        progress = tuple((m, p._replace(log_start_offset=0)) for m, p in lead.progress)
        return in_sync.next_in_sync(lead._replace(progress=progress), **facts)


@bug("the set shrinks below the minimum")
class BelowMinimum(Rules):
    def next_in_sync(self, lead: Leadership, **facts: Any) -> frozenset[str] | None:
        return in_sync.next_in_sync(lead, **{**facts, "min_in_sync": 1})


@bug("a trim is answered when the leader made it")
class TrimAlone(Rules):
    def low_watermark(self, lead: Leadership) -> int:
        return lead.progress_of(lead.me).log_start_offset


@bug("acknowledgements of an earlier epoch count")
class StaleAcknowledgements(Rules):
    def note_fetch(self, lead: Leadership, fetch: Fetch, *, diverges: bool) -> Leadership:
        return in_sync.note_fetch(lead, fetch._replace(epoch=lead.epoch), diverges=False)


@bug("a fetch acknowledges what has yet to be cut")
class DivergingAcknowledges(Rules):
    def note_fetch(self, lead: Leadership, fetch: Fetch, *, diverges: bool) -> Leadership:
        return in_sync.note_fetch(lead, fetch, diverges=False)


@bug("a follower acknowledges before it has flushed")
class AcknowledgesUnflushed(Rules):
    def acknowledged_end(self, replica: Replica) -> int:
        return len(replica.log)


@bug("a linearizable read is confirmed by a look at the bucket")
class ConfirmedByBucket(Rules):
    def is_confirmed(self, lead: Leadership, *, answer: int) -> bool:
        return True  # the look found this leader in force: `Steps.look` would have stepped it down


@bug("a linearizable read counts fetches that began before it")
class ConfirmedBefore(Rules):
    def is_confirmed(self, lead: Leadership, *, answer: int) -> bool:
        return in_sync.is_confirmed(lead, answer=answer - 1)


@bug("a replica outside the set claims")
class UncleanClaim(Rules):
    def claim(self, kept: Kept, in_force: InForce, **facts: Any) -> InForce | Refused:
        members = in_force.in_sync | {kept.replica_id}
        return election.claim(kept, in_force._replace(in_sync=members), **facts)


@bug("PUT without a condition")
class BlindPut(Rules):
    def lands(self, put: InForce, world: World) -> bool:
        return put.version >= world.newest.version and put not in world.chain


@bug("a PUT is not confirmed by a LIST")
class NoList(Rules):
    def found(self, sent: InForce, world: World) -> InForce:
        return sent if sent in world.stray else world.newest


@bug("a new leader cuts its log")
class NewLeaderCuts(Rules):
    def log_when_leading(self, replica: Replica) -> Log:
        return replica.log[: replica.shown]


@bug("a follower cuts its log at its own watermark")
class CutsAtWatermark(Rules):
    def log_when_adopting(self, replica: Replica) -> Log:
        return replica.log[: replica.shown]

    def cut(self, replica: Replica, leader: Replica) -> int:
        return len(replica.log)


@bug("a follower cuts nothing")
class CutsNothing(Rules):
    def cut(self, replica: Replica, leader: Replica) -> int:
        return len(replica.log)


@bug("a replica follows an epoch below the one that it has seen")
class FollowsDeposed(Rules):
    def may_follow(self, kept: Kept, *, leader: str | None, epoch: int) -> bool:
        return leader not in (None, kept.replica_id)


@bug("a leader does not claim anew when a higher epoch was seen")
class NeverClaimsAnew(Rules):
    def must_claim_anew(self, lead: Leadership, seen: int) -> bool:
        return False


@bug("another disk has the old replica id")
class OldIdOnNewDisk(Rules):
    def lost_disk(self, kept: Kept) -> Kept:
        return Kept(kept.replica_id)


@bug("a replica that is added again has its old id and forgot what it saw")
class OldIdWhenAddedAgain(Rules):
    def renew(self, kept: Kept) -> Kept:
        return Kept(kept.replica_id)


@bug("what is sent is recorded when it is decided")
class RecordedLate(Rules):
    def keep_sent(self, kept: Kept, in_force: InForce, after: InForce) -> Kept:
        return election.keep_sent(kept, in_force, after)._replace(
            version=kept.version, members=kept.members
        )


@bug("a restart forgets what a former life sent")
class FormerLifeForgotten(Rules):
    def keep_sent(self, kept: Kept, in_force: InForce, after: InForce) -> Kept:
        return election.keep_sent(kept._replace(members=frozenset()), in_force, after)


@bug("a look before the PUT lands forgets what was sent")
class SettledEarly(Rules):
    def keep_settled(self, kept: Kept, newest: InForce) -> Kept:
        return kept._replace(version=newest.version, members=newest.in_sync)


@bug("a version that is deleted while it is read is taken for a void one")
class DeletedTakenForVoid(Rules):
    def read_newest(self, world: World) -> InForce:
        below = [one for one in world.chain[:-1] if one.version <= world.collected]
        return below[-1]._replace(version=world.newest.version) if below else world.newest


@bug("a replica that gives up its log keeps its id")
class OldIdAnew(Rules):
    def give_up(self, kept: Kept) -> Kept:
        return Kept(kept.replica_id, kept.seen, kept.version)


@bug("a leader that began in the middle does not know the epochs below")
class ForgetsEpochs(Rules):
    def known_epochs(self, leader: Replica) -> list[tuple[int, int]]:
        above = epochs_of(leader.log[leader.local_start :])
        return [(epoch, start + leader.local_start) for epoch, start in above]


# --- the manifest ---------------------------------------------------------------------------------


@bug("what is above the watermark is offloaded")
class OffloadsFlushed(Rules):
    def offload_end(self, replica: Replica) -> int:
        return replica.flushed


@bug("the manifest is claimed under an epoch that nobody was elected for")
class ClaimsUnelected(Rules):
    def manifest_epoch(self, replica: Replica, world: World) -> int:
        return max(super().manifest_epoch(replica, world), world.manifest.epoch + 1)


@bug("the manifest is claimed under an epoch below the one in force")
class LowerEpoch(Rules):
    def may_claim_manifest(self, newest: Manifest, epoch: int) -> bool:
        return True


@bug("what was sent to the manifest is deleted before it is read back")
class DeletesUnread(Rules):
    def removable_end(self, replica: Replica) -> int:
        return max(len(one.cold) for one in (replica.manifest, replica.offered, Manifest()) if one)


# --- the bucket as a member -----------------------------------------------------------------------


@bug("no fence")
class NoFence(Rules):
    fences_before_claim = False


@bug("no LIST after the fence")
class NoSecondList(Rules):
    fences_again = False


@bug("the fence goes above the highest number, whatever is missing below")
class FenceAboveHoles(Rules):
    def next_fence(self, listed: Mapping[int, bool]) -> int | None:
        return next_fence(listed, window=1)


@bug("numbers below the lowest listed are taken for collected")
class LowestListed(Rules):
    def next_fence(self, listed: Mapping[int, bool]) -> int | None:
        found = next_fence(listed, window=WINDOW)
        is_hole = found is not None and found < min(listed, default=0)
        return next_fence(listed, window=1) if is_hole else found


@bug("a fence is collected")
class FenceCollected(Rules):
    fences_are_kept = False


@bug("a chain's highest object is collected")
class HighestCollected(Rules):
    def collectable(self, listed: Mapping[int, bool], covered: Mapping[int, bool]) -> list[int]:
        return [n for n, fence in listed.items() if not fence and covered[n]]


@bug("the writer takes the next free number")
class NextFreeNumber(Rules):
    def wal_number(self, replica: Replica, world: World) -> int:
        assert replica.writer
        there = world.wal(replica.writer.chain)
        sent = [n for n, _ in replica.writer.sent]
        return max([*there, *sent], default=-1) + 1


@bug("an object is acknowledged before it is read back")
class AcknowledgedBeforePut(Rules):
    def wal_acknowledges(self, number: int, world: World, replica: Replica) -> bool:
        return True


@bug("a claim keeps the bucket in the set without the log's tail")
class KeptWithoutTail(Rules):
    writes_tail = False


@bug("the manifest is read before the last LIST of the chain")
class ManifestBeforeList(Rules):
    manifest_after_list = False


@bug("slices of another epoch are of the bucket's log")
class SlicesOfAnyEpoch(Rules):
    def store_slices(
        self, slices: Iterable[Slice], *, epoch: int, end_offset: int
    ) -> Iterator[Slice]:
        of_now = {one._replace(epoch=epoch): one for one in slices}
        for one in Rules.store_slices(of_now, epoch=epoch, end_offset=end_offset):
            yield of_now[one]


@bug("a trim is the bucket's once the manifest has it")
class TrimWithoutObject(Rules):
    def store_log_start(self, replica: Replica, acknowledged: WalObject) -> int:
        return replica.manifest.log_start if replica.manifest else 0


@bug("who claims for the bucket does not take its log start")
class StoreUntrimmed(Rules):
    def log_start_for_store(self, replica: Replica, manifest: Manifest) -> int:
        return replica.log_start


@bug("what a chain has counts before the version that names it")
class UnnamedChainCounts(Rules):
    def note_store(self, lead: Leadership, wal: str, there: Progress) -> Leadership:
        return in_sync.note_progress(lead, STORE, there)
