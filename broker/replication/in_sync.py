"""The in-sync set as its leader sees it: what counts, who joins, who leaves, what is refused.

* Values in, values out: no I/O, no clock, no randomness. `docs/cluster.md` has the argument, and
  `tests/model` walks through what may happen with these very functions.
* A set is in force once a version names it. A version that was sent and is not decided may
  be in force already, or be so later: everything here counts the union of both (R2).
* Only a number that is taken decides what was sent for it: a version's absence decides nothing.

| question                             | answer                                                   |
|--------------------------------------|----------------------------------------------------------|
| what is committed (R4)               | what every member counted has flushed under this epoch   |
| which members are counted (R2)       | those in force, and those of a version not yet decided   |
| which fetch is an acknowledgement    | one under the leader's epoch whose log does not diverge  |
| who may join (R5)                    | who flushed, in this epoch, all that is committed and    |
|                                      | all that the leader began with, and has its log start    |
| who leaves (R3)                      | who lags, while `min.insync.replicas` members remain:    |
|                                      | the last stay although they are dead, until another      |
|                                      | takes their place in the same version                    |
| when is acks=all refused (R3)        | fewer members that do not lag than the minimum           |
| when is a trim answered              | every member counted has recorded the log start          |
| when is a linearizable read answered | every member counted has begun a fetch after it (H8)     |
| when does the leader step down       | a version of another leader or epoch is in force         |
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from tierlog.manifest import replica_sets

STORE: Final = replica_sets.STORE
"""The bucket as a member: it has what the manifest names, and the leader's write-ahead objects."""


class InForce(NamedTuple):
    """What a version of the set says.

    `replicas`: node ids. `in_sync`: replica ids, or STORE. `leader`: None if it resigned. `wal`:
    the write-ahead chain that belongs to STORE's log, None without one.
    """

    version: int
    epoch: int
    leader: str | None
    replicas: frozenset[int]
    in_sync: frozenset[str]
    wal: str | None = None


class Fetch(NamedTuple):
    """What a replica says when it asks for records.

    `epoch`: of the leader that it follows, 0 if it follows none. `seen`: the highest that it ever
    adopted, claimed, or found in force. `answered`: the number of the last answer that it had from
    this leader.
    """

    replica_id: str
    node: int
    epoch: int
    seen: int
    last_epoch: int
    end_offset: int
    flushed_end: int
    log_start_offset: int
    answered: int = 0


class Progress(NamedTuple):
    """The furthest that a member has come, under the leader's epoch."""

    flushed_end: int = 0
    log_start_offset: int = 0
    answered: int = 0


class Leadership(NamedTuple):
    """A leader's memory. `began_at`: its log end when it became the leader. `progress` has itself.

    `pending`: a version that was sent and is not decided. `wal`: the chain that it writes for
    STORE, and that STORE's progress is of; None without one, and once it is fenced.
    """

    me: str
    epoch: int
    in_force: InForce
    began_at: int
    high_watermark: int
    progress: tuple[tuple[str, Progress], ...] = ()
    pending: InForce | None = None
    wal: str | None = None

    def progress_of(self, member: str) -> Progress:
        for name, there in self.progress:
            if name == member:
                return there
        return NOTHING

    @property
    def is_claimed(self) -> bool:
        """Not where it began without the bucket: then its epoch is not in force yet."""
        return (self.in_force.epoch, self.in_force.leader) == (self.epoch, self.me)


NOTHING: Final = Progress()


def counted(lead: Leadership) -> frozenset[str]:
    """Without whom nothing is committed: the members in force, and those that may be."""
    return lead.in_force.in_sync | (lead.pending.in_sync if lead.pending else frozenset())


def high_watermark(lead: Leadership) -> int:
    """What is committed, as far as this leader knows. Never goes back."""
    flushed = min(lead.progress_of(member).flushed_end for member in counted(lead))
    return max(lead.high_watermark, flushed)


def low_watermark(lead: Leadership) -> int:
    """Below it no member returns a record, whoever leads next: trims up to there are answered."""
    return min(lead.progress_of(member).log_start_offset for member in counted(lead))


def note_progress(lead: Leadership, member: str, there: Progress) -> Leadership:
    """Messages may be late or come twice: the furthest counts."""
    further = Progress(*map(max, lead.progress_of(member), there))
    if (member, further) in lead.progress:
        return lead
    others = [item for item in lead.progress if item[0] != member]
    return lead._replace(progress=tuple(sorted([*others, (member, further)])))


def note_fetch(lead: Leadership, fetch: Fetch, *, diverges: bool) -> Leadership:
    """A fetch of another epoch says nothing; nor does one whose log has yet to be cut (R7)."""
    if fetch.epoch != lead.epoch or diverges:
        return lead
    there = Progress(fetch.flushed_end, fetch.log_start_offset, fetch.answered)
    return note_progress(lead, fetch.replica_id, there)


def note_store(lead: Leadership, wal: str, there: Progress) -> Leadership:
    """Note what the objects of a write-ahead chain hold, in order.

    Not while a version is undecided that gives STORE another chain: it may be in force, and then
    what the old chain gets is no longer of STORE's log.
    """
    versions = [one for one in (lead.in_force, lead.pending) if one and STORE in one.in_sync]
    if wal != lead.wal or any(one.wal != wal for one in versions):
        return lead
    return note_progress(lead, STORE, there)


def begin_chain(lead: Leadership, wal: str | None) -> Leadership:
    """Write another chain, or none: what the old one had is not in it."""
    others = tuple(item for item in lead.progress if item[0] != STORE)
    return lead._replace(wal=wal, progress=others)


def may_join(lead: Leadership, member: str) -> bool:
    """Whether a replica has, flushed, all that may be committed, and all that was trimmed.

    What former leaders committed ends at or below `began_at`, which this leader's own watermark may
    not have reached yet.
    """
    if member == STORE and lead.wal is None:
        return False
    there, mine = lead.progress_of(member), lead.progress_of(lead.me)
    has_records = there.flushed_end >= max(lead.high_watermark, lead.began_at)
    return has_records and there.log_start_offset >= mine.log_start_offset


def next_in_sync(
    lead: Leadership,
    *,
    outsiders: AbstractSet[str],
    lagging: AbstractSet[str],
    min_in_sync: int,
) -> frozenset[str] | None:
    """The set to commit next; None if the one in force stays, or a version is not decided yet.

    `outsiders`: who is wanted in the set. `lagging`: who did not reach the log end for
    `replica.lag.time.max.ms`, or is known to be gone. Whoever is dead and has to stay is the one
    that had come furthest.
    """
    if lead.pending is not None or not lead.is_claimed:
        return None
    before = lead.in_force.in_sync
    ready = {one for one in outsiders - lagging if may_join(lead, one)}
    live = ((before | ready) - lagging) | {lead.me}
    dead = sorted(before - live, key=lambda one: (-lead.progress_of(one).flushed_end, one))
    after = live | set(dead[: max(0, min_in_sync - len(live))])
    return None if after == before else frozenset(after)


def change_in_sync(lead: Leadership, members: frozenset[str]) -> InForce:
    """The version with another set."""
    before = lead.in_force
    wal = (before.wal if STORE in before.in_sync else lead.wal) if STORE in members else None
    return before._replace(version=before.version + 1, in_sync=members, wal=wal)


def change_replicas(
    lead: Leadership, replicas: frozenset[int], *, gone: frozenset[str], min_in_sync: int
) -> InForce | None:
    """The version with other replicas, of which those `gone` leave the set; None if too few remain.

    One that is added joins the set later. A leader hands over before it goes.
    """
    before = lead.in_force
    members = before.in_sync - gone
    if lead.me in gone or len(members) < min(min_in_sync, len(before.in_sync)):
        return None
    return before._replace(version=before.version + 1, replicas=replicas, in_sync=members)


def change_chain(lead: Leadership, wal: str) -> InForce:
    """The version by which STORE goes on after a fence: a new chain, which has all that the
    manifest lacks.
    """
    before = lead.in_force
    return before._replace(version=before.version + 1, wal=wal)


def refuses_acks_all(lead: Leadership, *, lagging: AbstractSet[str], min_in_sync: int) -> bool:
    """Whether acks=all is refused before anything is appended (Kafka's NOT_ENOUGH_REPLICAS)."""
    return len(lead.in_force.in_sync - lagging) < min_in_sync


def is_confirmed(lead: Leadership, *, answer: int) -> bool:
    """Whether this was the leader when it gave the answer of that number (H8).

    Each member counted has since begun a fetch in this epoch, so that none had claimed another one
    before. A look at the bucket says less: a version may be on its way.
    """
    others = counted(lead) - {lead.me}
    return all(lead.progress_of(member).answered >= answer for member in others)


def send_change(lead: Leadership, after: InForce) -> Leadership:
    """Note a version before it is sent. It is repeated with the same bytes until it is decided."""
    assert lead.pending is None, "one version at a time"
    assert after.version == lead.in_force.version + 1
    return lead._replace(pending=after)


def settle_change(lead: Leadership, newest: InForce) -> Leadership | None:
    """What follows from the newest version of the bucket; None: step down.

    While the number of what was sent is free, nothing follows: a PUT may land after a GET that did
    not find it (H1).
    """
    if lead.pending is not None and newest.version < lead.pending.version:
        return lead
    if (newest.epoch, newest.leader) != (lead.epoch, lead.me):
        return None
    return lead._replace(in_force=newest, pending=None)
