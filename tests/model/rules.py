"""What the model asks the protocol. A planted bug is a subclass that answers one question wrongly.

Most are the functions that the broker runs. The others are what its edges do, which are no pure
functions: what a disk keeps, what the bucket refuses, what a process remembers.
"""

from __future__ import annotations

from functools import partial

from tests.model.world import WINDOW, Log, Manifest, Replica, WalObject, World
from tierlog.broker.replication import election, in_sync, write_ahead
from tierlog.broker.replication.election import Kept
from tierlog.broker.replication.in_sync import InForce


class Rules:
    high_watermark = staticmethod(in_sync.high_watermark)
    low_watermark = staticmethod(in_sync.low_watermark)
    note_fetch = staticmethod(in_sync.note_fetch)
    note_store = staticmethod(in_sync.note_store)
    begin_chain = staticmethod(in_sync.begin_chain)
    next_in_sync = staticmethod(in_sync.next_in_sync)
    is_confirmed = staticmethod(in_sync.is_confirmed)
    settle_change = staticmethod(in_sync.settle_change)
    claim = staticmethod(election.claim)
    must_claim_anew = staticmethod(election.must_claim_anew)
    keep_sent = staticmethod(election.keep_sent)
    keep_settled = staticmethod(election.keep_settled)
    keep_followed = staticmethod(election.keep_followed)
    may_follow = staticmethod(election.may_follow)
    renew = staticmethod(election.renew)
    next_fence = staticmethod(partial(write_ahead.next_fence, window=WINDOW))
    store_slices = staticmethod(write_ahead.store_slices)
    collectable = staticmethod(partial(write_ahead.collectable, window=WINDOW))

    fences_before_claim = True  # and again after a LIST that shows more (H4)
    fences_again = True
    fences_are_kept = True
    writes_tail = True  # before a claim that keeps the bucket in the set
    manifest_after_list = True

    def acknowledged_end(self, replica: Replica) -> int:
        """What a fetch says that this replica has."""
        return replica.flushed

    def lands(self, put: InForce, world: World) -> bool:
        """PUT If-None-Match: the number after the newest is free, and nothing else changes."""
        return put.version == world.newest.version + 1

    def found(self, sent: InForce, world: World) -> InForce:
        """What the sender finds: the newest of a LIST, whoever has the number of its own (R10)."""
        return world.newest

    def claim_stands(self, sent: InForce, newest: InForce) -> bool | None:
        """Whether this process leads; None while the number of what it sent is free.

        `newest` is from a LIST after the PUT: a number may be free only because the version that
        had it was collected. A claim of a former life that is found in force is not this one's.
        """
        if newest.version < sent.version:
            return None
        return newest == sent

    def may_lead_alone(self, kept: Kept) -> bool:
        """Whether it may lead without having read the bucket, under `kept.seen` + 1 (H3)."""
        return kept.members == {kept.replica_id}

    def read_newest(self, world: World) -> InForce:
        """A LIST, and what has the highest number: if that is gone, another LIST."""
        return world.newest

    def manifest_epoch(self, replica: Replica, world: World) -> int:
        """The epoch to claim the manifest under: the one that it leads under."""
        assert replica.lead
        return replica.lead.epoch

    def may_claim_manifest(self, newest: Manifest, epoch: int) -> bool:
        return epoch > newest.epoch

    def offload_end(self, replica: Replica) -> int:
        assert replica.lead
        return replica.lead.high_watermark

    def removable_end(self, replica: Replica) -> int:
        """What a manifest has that was read back."""
        return len(replica.manifest.cold) if replica.manifest else 0

    def give_up(self, kept: Kept) -> Kept:
        return election.renew(kept)

    def known_epochs(self, leader: Replica) -> list[tuple[int, int]]:
        """Also those below its local log: a replica that began there has the manifest's."""
        return leader.epochs

    def lost_disk(self, kept: Kept) -> Kept:
        """Another folder has another id, and remembers nothing."""
        return Kept(election.renew(kept).replica_id)

    def log_when_leading(self, replica: Replica) -> Log:
        return replica.log

    def log_when_adopting(self, replica: Replica) -> Log:
        return replica.log

    def cut(self, replica: Replica, leader: Replica) -> int:
        """Where a follower's log is cut; its end if it is a beginning of the leader's."""
        end = len(replica.log)
        last_epoch = replica.log[-1][0] if replica.log else 0
        at = election.diverging(
            self.known_epochs(leader),
            log_end_offset=len(leader.log),
            last_epoch=last_epoch,
            end_offset=end,
        )
        return end if at is None else election.cut_offset(replica.epochs, at, log_end_offset=end)

    def wal_number(self, replica: Replica, world: World) -> int:
        assert replica.writer
        return replica.writer.next_number

    def store_log_start(self, replica: Replica, acknowledged: WalObject) -> int:
        """The manifest's, when the object was written (H12)."""
        return acknowledged.log_start

    def log_start_for_store(self, replica: Replica, manifest: Manifest) -> int:
        return max(replica.log_start, min(manifest.log_start, replica.flushed))

    def wal_acknowledges(self, number: int, world: World, replica: Replica) -> bool:
        """An object counts once it is read back, in order."""
        assert replica.writer
        _, mine = replica.writer.sent[0]
        return world.wal(replica.writer.chain).get(number) == mine
