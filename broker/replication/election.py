"""Who may lead, under which epoch, and what a replica has on its disk before it says so.

* Values in, values out, as `in_sync`. Time-outs decide when somebody tries (`may_try`), never what
  is true: that is decided by which version gets the next number.
* What a replica keeps (`Kept`) is fsynced before the version or the fetch that rests on it is sent.
* A replica id is a folder's id and a generation. Whoever lacks what it once acknowledged has
  another id, and answers for nothing that the old one promised.

| question                           | answer                                                     |
|------------------------------------|------------------------------------------------------------|
| who may claim (R1)                 | a member of the set in force; for the bucket, any broker   |
|                                    | that has fenced its write-ahead chain and read it          |
| under which epoch (R1, R13)        | one above the one in force and all that it ever saw        |
| with which set                     | the one in force, without the old leader if it is presumed |
|                                    | dead and the minimum remains                               |
| when is it the leader (R9, R10)    | when its own version is the newest in a LIST after the PUT |
| whom may it follow (R6)            | a leader whose epoch is not below `seen`                   |
| what does it cut (R7)              | from where its epochs and the leader's part; a new leader  |
|                                    | cuts nothing (R8)                                          |
| when does a leader claim anew      | it hears of an epoch above its own (R13): a member that    |
|                                    | saw it will never follow this one                          |
| who may lead without the bucket    | who is the only member of every set that may be in force   |
| who writes the first version     | for new partitions, which are empty, who creates them;     |
|                                  | else the folder that has all of it, alone in the set. One  |
|                                  | that lands late says the same: nobody else may claim       |
| what becomes of `Kept` when the    | the generation rises, `seen` stays (H9)                    |
| log is gone, or a replica removed  |                                                            |
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from itertools import pairwise
from typing import Final, NamedTuple

from tierlog.broker.replication.in_sync import STORE, InForce, Leadership


class Kept(NamedTuple):
    """What a replica keeps on its disk about one partition.

    `seen`: the highest epoch that it adopted, claimed, or found in force. `members`: of every set
    that may be in force, as far as it knows. `version`: the newest that it knows of, or has sent.
    """

    replica_id: str
    seen: int = 0
    version: int = 0
    members: frozenset[str] = frozenset()


class Refused(StrEnum):
    NOT_IN_SYNC = "not in the set in force"
    NEEDS_STORE = "without the bucket too few would remain: write the log into its chain first"


class Doubt(NamedTuple):
    """What a member observed of the leader in force, on its own clock.

    `refused`: it answers that it does not lead this epoch. `beats`: its heartbeat went on.
    """

    silent_ms: int
    refused: bool
    beats: bool


EpochStarts = Sequence[tuple[int, int]]
"""(epoch, start offset), ascending: what `leader-epoch-checkpoint` has."""


# --- claims ---------------------------------------------------------------------------------------


def may_try(in_force: InForce, doubt: Doubt, *, session_timeout_ms: int) -> bool:
    """Whether a member should claim now.

    A leader that is merely cut off from this member still beats, and drops it from the set. One
    that beats and says that it does not lead lost its claim in a restart, and cannot claim again.
    """
    if in_force.leader is None:
        return True
    is_gone = doubt.refused or not doubt.beats
    return is_gone and doubt.silent_ms >= session_timeout_ms


def new_epoch(kept: Kept, in_force: InForce) -> int:
    """Never one that anybody else may have used, nor one that this replica ever claimed."""
    return max(in_force.epoch, kept.seen) + 1


def claim(
    kept: Kept,
    in_force: InForce,
    *,
    is_leader_dead: bool,
    min_in_sync: int,
    wal: str | None = None,
) -> InForce | Refused:
    """The version by which a member becomes the leader. It has what the manifest names: that is
    committed.

    `wal`: its own write-ahead chain, if that has what the manifest lacks of its log, under the
    epoch that it claims (`new_epoch`). Otherwise the bucket leaves the set.
    """
    members = in_force.in_sync
    if kept.replica_id not in members:
        return Refused.NOT_IN_SYNC
    if STORE not in members:
        wal = None
    elif wal is None and len(members) > min_in_sync:
        members -= {STORE}
    elif wal is None:
        return Refused.NEEDS_STORE
    if is_leader_dead:
        members = _without_leader(members, in_force, kept.replica_id, min_in_sync)
    return _claimed(kept, in_force, members, wal=wal)


def claim_for_store(
    kept: Kept,
    in_force: InForce,
    *,
    node: int,
    is_leader_dead: bool,
    min_in_sync: int,
    wal: str,
) -> InForce | Refused:
    """The version by which a replica becomes the leader with what the bucket has.

    It has fenced the chain in force, has made its own log that of the bucket or a continuation of
    it, and has written what the manifest lacks of it into its own chain, `wal`. If its broker, the
    `node`, is not to have a replica, it takes the place of one that is.
    """
    if STORE not in in_force.in_sync:
        return Refused.NOT_IN_SYNC
    members = in_force.in_sync | {kept.replica_id}
    if is_leader_dead:
        members = _without_leader(members, in_force, kept.replica_id, min_in_sync)
    claimed = _claimed(kept, in_force, members, wal=wal)
    if node in in_force.replicas:
        return claimed
    return claimed._replace(replicas=frozenset({node, *sorted(in_force.replicas)[1:]}))


def _without_leader(
    members: frozenset[str], in_force: InForce, me: str, min_in_sync: int
) -> frozenset[str]:
    rest = members - {in_force.leader} if in_force.leader != me else members
    return frozenset(rest) if len(rest) >= min_in_sync else members


def _claimed(kept: Kept, in_force: InForce, members: frozenset[str], *, wal: str | None) -> InForce:
    return in_force._replace(
        version=in_force.version + 1,
        epoch=new_epoch(kept, in_force),
        leader=kept.replica_id,
        in_sync=members,
        wal=wal,
    )


def must_claim_anew(lead: Leadership, seen: int) -> bool:
    """Whether a replica has seen an epoch above this leader's, which is in force all the same.

    Its claim lost, perhaps to a commit of this leader. It may never follow an epoch below.
    """
    return lead.is_claimed and lead.pending is None and seen > lead.epoch


# --- what is kept ---------------------------------------------------------------------------------


def keep_alone(folder_id: str, *, epoch: int) -> Kept:
    """What is on the disk before there is a set: the only replica, which led under this epoch."""
    replica_id = f"{folder_id}.{FIRST_GENERATION}"
    return Kept(replica_id, seen=epoch, members=frozenset({replica_id}))


def may_begin_set(kept: Kept) -> bool:
    """Whether the first version of the set is this replica's to write, if there is none."""
    return kept.version == 0 and kept.members == {kept.replica_id}


def keep_sent(kept: Kept, in_force: InForce, after: InForce) -> Kept:
    """What is on the disk before `after` is sent.

    `kept.members` stay: a version that a former life sent may still land in the same number.
    """
    return kept._replace(
        seen=max(kept.seen, after.epoch),
        version=after.version,
        members=kept.members | in_force.in_sync | after.in_sync,
    )


def keep_settled(kept: Kept, newest: InForce) -> Kept:
    """The set in force is the only one, once the number of what was sent is taken.

    Its epoch counts as seen, so that who leads alone later uses one that nobody had.
    """
    if newest.version < kept.version:
        return kept
    seen = max(kept.seen, newest.epoch)
    return kept._replace(seen=seen, version=newest.version, members=newest.in_sync)


def may_follow(kept: Kept, *, leader: str | None, epoch: int) -> bool:
    """Whether a leader, of the bucket's or of a hint's that may be old, is one to follow.

    One at `seen` is the one followed before: of those who claim an epoch one gets it.
    """
    return leader not in (None, kept.replica_id) and epoch >= kept.seen


def keep_followed(kept: Kept, epoch: int) -> Kept:
    return kept._replace(seen=max(kept.seen, epoch))


FIRST_GENERATION: Final = 0


def renew(kept: Kept) -> Kept:
    """Another replica in the same folder: its log is gone, given up, or was removed."""
    folder_id, _, generation = kept.replica_id.rpartition(".")
    return Kept(f"{folder_id}.{int(generation) + 1}", seen=kept.seen, version=kept.version)


# --- giving up ------------------------------------------------------------------------------------


def resign(
    lead: Leadership, *, lagging: AbstractSet[str], min_in_sync: int, is_failing: bool
) -> InForce:
    """The version by which a leader gives up: its disk fails, or another is to lead.

    One that fails leaves the set too, if enough remain that do not lag: of members that are gone
    nobody could claim. It counts itself until that is decided, as with every change.
    """
    rest = lead.in_force.in_sync - {lead.me}
    leaves = is_failing and len(rest - lagging) >= max(1, min_in_sync)
    return lead.in_force._replace(
        version=lead.in_force.version + 1,
        leader=None,
        in_sync=rest if leaves else lead.in_force.in_sync,
    )


def may_hand_over(lead: Leadership, target: str, *, log_end_offset: int) -> bool:
    """Whether the target has everything: appends have been held back since `log_end_offset`."""
    is_member = target in lead.in_force.in_sync and target != lead.me
    return is_member and lead.progress_of(target).flushed_end >= log_end_offset


# --- cutting a follower's log ---------------------------------------------------------------------


def end_of_epoch(epochs: EpochStarts, epoch: int, *, log_end_offset: int) -> tuple[int, int]:
    """(the highest epoch up to `epoch` that the log has, where it ends): OffsetForLeaderEpoch.

    (-1, 0) if the log has none of them.
    """
    found, end = -1, 0
    for (start_epoch, _), (_, next_start) in pairwise([*epochs, (0, log_end_offset)]):
        if start_epoch > epoch:
            break
        found, end = start_epoch, next_start
    return found, end


def diverging(
    epochs: EpochStarts, *, log_end_offset: int, last_epoch: int, end_offset: int
) -> tuple[int, int] | None:
    """The leader's answer to a log that ends otherwise: the epoch and the end to cut to (KIP-595).

    None if the follower's log is a beginning of the leader's.
    """
    if end_offset == 0:
        return None
    epoch, end = end_of_epoch(epochs, last_epoch, log_end_offset=log_end_offset)
    return (epoch, end) if epoch < last_epoch or end < end_offset else None


def cut_offset(epochs: EpochStarts, at: tuple[int, int], *, log_end_offset: int) -> int:
    """Where a follower cuts after the answer `at`. It asks again: there may be more to cut. If all
    that it has is of later epochs, it ended the asked one where it begins, as in Kafka's
    LeaderEpochFileCache: what was below is gone from its disk, and committed.
    """
    found, mine = end_of_epoch(epochs, at[0], log_end_offset=log_end_offset)
    if found < 0 and epochs:
        mine = epochs[0][1]
    return min(at[1], mine)
