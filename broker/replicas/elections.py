"""Claims, changes of the set, and what follows from the newest version of one: what the broker does
about each of its replicas. What is right is decided by `election` and `in_sync`.

* Whatever a version rests on is on this disk before the version is sent (`Replica.keep`).
* A version that was sent is sent again, with the same bytes, until its number is taken (R2); a look
  at the bucket that does not find it decides nothing.
* A claim of a former life that is found in force is followed by another one (R9).
* A member that may claim waits for whom a leader that resigned has chosen, and for those that are
  preferred, by its place among the replicas: otherwise all would claim at once, and all but one be
  refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final

import structlog

from tierlog.broker.membership.members import Members
from tierlog.broker.replicas.counts import SetCounts
from tierlog.broker.replicas.leading import Leading
from tierlog.broker.replicas.replica import (
    Leaderless,
    Replica,
    Role,
    as_version,
    folder_of,
)
from tierlog.broker.replicas.store_member import StoreMember
from tierlog.broker.replication import election, in_sync
from tierlog.broker.replication.election import Doubt, Refused
from tierlog.broker.replication.in_sync import InForce
from tierlog.broker.replication.reassigning import (
    Grow,
    HandOver,
    Shrink,
    begun,
    ended,
    next_step,
)
from tierlog.broker.replication.term import NEVER_MS, Term
from tierlog.broker.settings import BrokerSettings
from tierlog.host.clock import monotonic_ms
from tierlog.manifest.replica_sets import NewestSet, ReplicaSet, first_set
from tierlog.manifest.store import random_name
from tierlog.manifest.versions import CreateOutcome
from tierlog.record_format.errors import (
    LeaderUnknown,
    NoReassignment,
    OutcomeUnknownError,
    StoreUnavailable,
)

log = structlog.get_logger(__name__)

TURN_MS: Final = 500  # for each replica that is preferred to this one
LOOK_PACE_MS: Final = 1_000
SILENT_PACE_MS: Final = 60_000  # at most, while a leader is not heard that beats
NEW_TIMEOUTS: Final = 5  # session time-outs that the first replica has to lead a new partition
YIELDS_MS: Final = 3_000  # others have looked, and had their turn, beside a session time-out


class Elections:
    """Each call is about one replica, and made by one thread at a time for it.

    `follow`: a broker is fetched from; `remove`: this broker is not to have the replica;
    `hand_over`: one of these brokers is to lead; `heard_ms`: when a broker last fetched anything
    here, or was answered.
    """

    def __init__(
        self,
        members: Members,
        settings: BrokerSettings,
        store: StoreMember,
        leading: Leading,
        *,
        follow: Callable[[int], None],
        remove: Callable[[Replica], None],
        hand_over: Callable[[Replica, Sequence[int]], None],
        heard_ms: Callable[[int], int],
        monotonic: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._members, self._settings, self._monotonic = members, settings, monotonic
        self._store, self._leading, self._follow = store, leading, follow
        self._remove, self._hand_over = remove, hand_over
        self._heard_ms = heard_ms
        self.counts = SetCounts()

    # --- what is due ------------------------------------------------------------------------------

    def next_step(self, replica: Replica) -> Callable[[], None] | None:
        """What to do about it now; None if nothing. Asks nobody."""
        term, partition, lagging = replica.term, replica.partition, frozenset[str]()
        if term is not None and partition is not None:
            term.give_up_confirming()
            lagging = term.look_for_lagging()
            if term.is_short:
                partition.give_up_waiting(term.not_replicated)
        if replica.role is Role.OFFLINE or (replica.log.offline and term is None):
            return None
        if replica.sent is not None:
            return partial(self.send_again, replica)
        if replica.role is Role.LEADER:
            return self._next_of_leader(replica, lagging)
        if replica.role is Role.FOLLOWER and self._is_leader_gone(replica):
            return partial(self.claim, replica, is_leader_dead=True)
        if not self._is_heard(replica) and self._monotonic() >= replica.look_again_ms:
            return partial(self.look, replica)
        return None

    def _next_of_leader(
        self, replica: Replica, lagging: frozenset[str]
    ) -> Callable[[], None] | None:
        term = replica.term
        assert term is not None, "a leader has a term"
        if replica.log.offline:
            return partial(self.resign, replica, is_failing=True)
        if term.must_claim_anew:
            return partial(self._claim_anew, replica)
        if replica.partition is not None and replica.partition.leadership_lost:
            return partial(self._claim_above_manifest, replica)
        if (step := self._next_for_store(replica, term)) is not None:
            return step
        if (after := term.next_chain() or term.next_change(lagging)) is not None:
            return partial(self._change, replica, after)
        if self._is_cut_off(replica, term):
            return partial(self._resign_as_cut_off, replica)
        return self._next_of_reassignment(replica)

    def _next_for_store(self, replica: Replica, term: Term) -> Callable[[], None] | None:
        feed = term.feed
        is_counted = in_sync.STORE in in_sync.counted(term.lead)
        if is_counted or term.wants_store:
            return partial(self._begin_feed, replica) if feed is None or feed.is_over else None
        return None if feed is None else partial(self._end_feed, replica)

    def _begin_feed(self, replica: Replica) -> None:
        assert replica.term is not None
        feed = self._store.open_feed(replica, replica.term.epoch)
        replica.term.write_for_store(feed)

    def _end_feed(self, replica: Replica) -> None:
        assert replica.term is not None
        replica.term.write_for_store(None)
        self._store.close_feed(replica)

    def _is_cut_off(self, replica: Replica, term: Term) -> bool:
        """Whether no member fetches any more, without whom nothing is committed, although one of
        them beats: it may well be reached by the others. A broker that fetches other partitions
        from here is not cut off: it has yet to find out who leads this one. If nobody takes over,
        it waits twice as long the next time.
        """
        patience_ms = max(replica.patience_ms, self._settings.session_timeout_ms)
        unheard = term.unheard(for_ms=patience_ms)
        if not unheard:
            if replica.patience_ms and term.has_heard:
                replica.patience_ms = 0
            return False
        if self._leading.min_in_sync(replica) <= 1:
            return False  # it goes on alone
        found = {one: self._members.member_of(folder_of(one)) for one in unheard}
        members = {name: one for name, one in found.items() if one is not None}
        heard_ms = max((self._heard_ms(one.node_id) for one in members.values()), default=NEVER_MS)
        if heard_ms > self._monotonic() - patience_ms:
            return False
        self._members.doubt()
        beaten = self._members.has_beaten_since
        return any(
            one.state == "running" and beaten(one.node_id, unheard[name])
            for name, one in members.items()
        )

    def _resign_as_cut_off(self, replica: Replica) -> None:
        log.warning("no member in sync fetches: another is to lead", partition=str(replica))
        patience_ms = max(replica.patience_ms, self._settings.session_timeout_ms)
        replica.patience_ms = 2 * patience_ms
        self.resign(replica, is_failing=False)

    def _next_of_reassignment(self, replica: Replica) -> Callable[[], None] | None:
        term, now = replica.term, replica.newest
        if term is None or now is None or now.found is None or not now.found.target:
            return None
        in_force = term.lead.in_force
        step = next_step(
            now.found,
            leader=self._members.me.node_id,
            in_sync=nodes_of(in_force.in_sync, self._members),
        )
        if isinstance(step, HandOver):
            return partial(self._hand_over, replica, step.node_ids)
        if step is None or term.lead.pending is not None:
            return None
        return partial(self._change_replicas, replica, step)

    def _is_heard(self, replica: Replica) -> bool:
        """Whether it follows a leader that answers: one that does not may have resigned. If it has
        not beaten since it may be dead: that is decided soon, and not by looking at each partition.
        """
        following = replica.following
        if replica.role is not Role.FOLLOWER or following is None or replica.refused:
            return False
        is_silent = replica.silent_ms() >= self._settings.session_timeout_ms
        return not (
            is_silent and self._members.has_beaten_since(following.node_id, replica.heard_ms)
        )

    def _is_leader_gone(self, replica: Replica) -> bool:
        following = replica.following
        if following is None or replica.newest is None:
            return False
        if replica.silent_ms() < self._settings.session_timeout_ms:
            return False  # as `may_try` says, of most and most of the time
        member = self._members.member(following.node_id)
        beats = member is not None and member.is_alive and member.state != "stopped"
        doubt = Doubt(silent_ms=replica.silent_ms(), refused=replica.refused, beats=beats)
        timeout_ms = self._settings.session_timeout_ms + self._turn_ms(replica)
        in_force = in_force_of(replica.newest)
        return election.may_try(in_force, doubt, session_timeout_ms=timeout_ms)

    def _turn_ms(self, replica: Replica) -> int:
        """Who would claim for the bucket gives the members their turn before."""
        found = None if replica.newest is None else replica.newest.found
        order, members = ((), ()) if found is None else (found.replicas, found.in_sync)
        me = self._members.me.node_id
        turn_ms = TURN_MS * (order.index(me) if me in order else len(order))
        is_for_store = in_sync.STORE in members and replica.kept.replica_id not in members
        return turn_ms + (self._settings.session_timeout_ms if is_for_store else 0)

    # --- looking ----------------------------------------------------------------------------------

    def look(
        self, replica: Replica, *, is_named: bool = False, found: NewestSet | None = None
    ) -> None:
        """Read the newest version, and do what follows from it. `is_named`: this replica was chosen
        to lead if nobody does; `found`: what was read before it was opened, good for its first
        look. Raises StoreUnavailable, CorruptDataError, OSError.
        """
        replica.look_again_ms = self._monotonic() + LOOK_PACE_MS
        is_first = replica.newest is None
        newest = found if found is not None and is_first else replica.sets.load_newest()
        if replica.role is Role.FOLLOWER and not replica.refused and _names_leader(newest):
            pace_ms = min(replica.silent_ms() // 2, SILENT_PACE_MS)
            replica.look_again_ms += max(0, pace_ms - LOOK_PACE_MS)
        if newest.found is not None:
            self._settle(replica, newest, is_named=is_named)
        elif newest.taken == 0 and election.may_begin_set(replica.kept):
            self._begin_set(replica)

    def _begin_set(self, replica: Replica) -> None:
        """Its partition was this folder's alone, and has no set yet."""
        with replica.lock:
            replica.sent = replica.sent or first_set(
                replica.place,
                epoch=replica.kept.seen,
                replicas=[self._members.me.node_id],
                in_sync=replica.kept.members,
            )
        self.send_again(replica)
        if replica.newest is not None and replica.role is Role.IDLE:
            self.claim(replica, is_leader_dead=False)  # at once: there is nobody else

    def _settle(self, replica: Replica, newest: NewestSet, *, is_named: bool = False) -> None:
        in_force, found = in_force_of(newest), newest.found
        assert found is not None
        with replica.lock:
            sent = replica.sent
            if sent is not None and newest.taken < sent.version:
                return
            replica.keep(election.keep_settled(replica.kept, in_force))
            replica.sent, replica.newest = None, newest
            is_mine = sent is not None and found.nonce == sent.nonce
            if replica.role is Role.LEADER and self._leads_on(replica, in_force):
                return
            if replica.role is Role.CANDIDATE:
                if is_mine:
                    self._leading.lead(replica, in_force)
                    took_ms = self._monotonic() - replica.candidate_since_ms
                    self.counts.elections.observe(took_ms / 1000)
                    return
                replica.role = Role.IDLE
                self._store.close_feed(replica)
        self._do_as_said(replica, in_force, is_named=is_named)

    def _leads_on(self, replica: Replica, in_force: InForce) -> bool:
        assert replica.term is not None
        before = replica.term.lead.in_force.in_sync
        if replica.term.settle_change(in_force):
            self.counts.count_change(before, in_force.in_sync)
            return True
        self._leading.step_down(replica)
        return False

    def _do_as_said(self, replica: Replica, in_force: InForce, *, is_named: bool) -> None:
        if self._members.me.node_id not in in_force.replicas:
            if is_named and self.is_abandoned(in_force):
                self.claim(replica, is_leader_dead=True, newest=replica.newest)
            else:
                self._remove(replica)
        elif in_force.leader is None:
            replica.stop_following()
            self._claim_in_turn(replica, in_force, is_named=is_named)
        elif in_force.leader == replica.kept.replica_id:
            self.claim(replica, is_leader_dead=False, newest=replica.newest)
        elif not self._follow_leader(replica, in_force):  # or its broker is not known yet
            self._claim_in_turn(replica, in_force)

    def is_abandoned(self, in_force: InForce) -> bool:
        """Whether the bucket alone is left: no broker lives that has a replica."""
        members = map(self._members.member, in_force.replicas)
        lives = any(one is not None and one.is_alive for one in members)
        return in_sync.STORE in in_force.in_sync and not lives

    def _claim_in_turn(
        self, replica: Replica, in_force: InForce, *, is_named: bool = False
    ) -> None:
        now_ms, timeout_ms = self._monotonic(), self._settings.session_timeout_ms
        if in_force.leader is not None:  # its broker may be back
            after_ms = timeout_ms
        elif in_force.epoch:  # whoever resigned may have chosen another, and is telling it
            after_ms = TURN_MS
        elif self._has_living_before(replica):  # which may be claiming a thousand
            after_ms, replica.look_again_ms = NEW_TIMEOUTS * timeout_ms, now_ms + timeout_ms
        else:
            after_ms = 0
        if replica.leaderless is None or replica.leaderless.version != replica.newest_version:
            replica.leaderless = Leaderless(replica.newest_version, now_ms)
        turn_ms = replica.leaderless.since_ms + after_ms + self._turn_ms(replica)
        turn_ms = max(turn_ms, replica.yields_until_ms)
        if is_named or now_ms >= turn_ms:
            is_dead = in_force.leader is not None
            self.claim(replica, is_leader_dead=is_dead, newest=replica.newest)
        else:
            replica.look_again_ms = min(replica.look_again_ms, turn_ms)

    def _has_living_before(self, replica: Replica) -> bool:
        """Whether a broker that lives is preferred to this one."""
        me, order = self._members.me.node_id, replica.node_ids
        before = map(self._members.member, order[: order.index(me)])
        return any(one is not None and one.is_alive for one in before)

    def _follow_leader(self, replica: Replica, in_force: InForce) -> bool:
        """False if its broker is not known any more. One that is dead is followed too: only the
        silence says for how long.
        """
        assert in_force.leader is not None
        member = self._members.member_of(folder_of(in_force.leader))
        if member is None:
            return False
        replica.follow(member.node_id, in_force.leader, in_force.epoch)
        self._follow(member.node_id)
        return True

    # --- claiming ---------------------------------------------------------------------------------

    def claim(
        self, replica: Replica, *, is_leader_dead: bool, newest: NewestSet | None = None
    ) -> None:
        """Try to lead. `newest`: what was read just now; whether it is that still decides the
        number of the claim. Raises StoreUnavailable, CorruptDataError, OSError.
        """
        seen = newest or replica.newest
        with replica.lock:
            if replica.role is Role.LEADER or replica.sent is not None:
                return None
            replica.role, replica.following = Role.CANDIDATE, None
            replica.candidate_since_ms = self._monotonic()
        try:
            replica.log.writer.flush()
            newest = newest or replica.sets.load_newest()
            if newest.found is None:
                return None
            if seen is None or _who_leads(newest) != _who_leads(seen):
                replica.role = Role.IDLE
                return self._settle(replica, newest)
            self._send_claim(replica, newest, is_leader_dead=is_leader_dead)
        finally:
            with replica.lock:
                if replica.role is Role.CANDIDATE and replica.sent is None:
                    replica.role = Role.IDLE
                    self._store.close_feed(replica)

    def _send_claim(self, replica: Replica, newest: NewestSet, *, is_leader_dead: bool) -> None:
        in_force = in_force_of(newest)
        after = self._claim(replica, in_force, is_leader_dead=is_leader_dead)
        if isinstance(after, Refused):
            log.info("not claimed", partition=str(replica), reason=str(after))
            with replica.lock:
                replica.newest, replica.role = newest, Role.IDLE
            if in_force.leader not in (None, replica.kept.replica_id):
                self._follow_leader(replica, in_force)  # it waits for who does lead
            return
        self._send(replica, newest, after)

    def _claim(
        self, replica: Replica, in_force: InForce, *, is_leader_dead: bool
    ) -> InForce | Refused:
        is_dead, min_in_sync = is_leader_dead, self._leading.min_in_sync(replica)
        claim = partial(election.claim, is_leader_dead=is_dead, min_in_sync=min_in_sync)
        after = claim(replica.kept, in_force)
        if after is Refused.NEEDS_STORE:
            wal = self._store.write_tail(replica, election.new_epoch(replica.kept, in_force))
            return claim(replica.kept, in_force, wal=wal)
        if after is not Refused.NOT_IN_SYNC or in_sync.STORE not in in_force.in_sync:
            return after
        self._store.take_log(replica, in_force)
        return election.claim_for_store(
            replica.kept,
            in_force,
            node=self._members.me.node_id,
            is_leader_dead=is_dead,
            min_in_sync=min_in_sync,
            wal=self._store.write_tail(replica, election.new_epoch(replica.kept, in_force)),
        )

    def _claim_anew(self, replica: Replica) -> None:
        """A replica has seen a higher epoch, and will not follow this one (R13)."""
        assert replica.term is not None
        self._claim_above(replica, replica.term.seen)

    def _claim_above_manifest(self, replica: Replica) -> None:
        """Who fences it in the bucket does not lead by that: the set decides. If it leads on, it
        needs an epoch above the manifest's.
        """
        self.look(replica)
        partition = replica.partition
        if replica.role is not Role.LEADER or partition is None or replica.sent is not None:
            return
        partition.load_manifest()
        manifest = partition.manifest
        self._claim_above(replica, 0 if manifest is None else manifest.leader_epoch)

    def _claim_above(self, replica: Replica, seen: int) -> None:
        with replica.lock:
            self._leading.step_down(replica)
            replica.keep(election.keep_followed(replica.kept, seen))
        self.claim(replica, is_leader_dead=False)

    # --- sending ----------------------------------------------------------------------------------

    def _change(self, replica: Replica, after: InForce) -> None:
        assert replica.newest is not None
        self._send(replica, replica.newest, after)

    def _send(
        self,
        replica: Replica,
        newest: NewestSet,
        after: InForce,
        reassigned: ReplicaSet | None = None,
    ) -> None:
        """`reassigned`: the newest set, with what a reassignment makes of it."""
        with replica.lock:
            assert replica.sent is None, "one version at a time"
            assert newest.found is not None
            replica.keep(election.keep_sent(replica.kept, in_force_of(newest), after))
            if replica.term is not None:
                replica.term.send_change(after)
            replica.newest = newest
            replica.sent = as_version(after, reassigned or newest.found, nonce=random_name())
        self.send_again(replica)

    def send_again(self, replica: Replica) -> None:
        """Until the number is taken. Raises StoreUnavailable, CorruptDataError, OSError."""
        sent = replica.sent
        if sent is None:
            return
        try:
            outcome = replica.sets.create_version(sent)
        except (OutcomeUnknownError, StoreUnavailable) as error:
            log.warning("a version is not confirmed", partition=str(replica), error=str(error))
            if replica.term is not None:
                self.counts.count_failed()
            return
        if outcome is CreateOutcome.OURS and replica.sets.is_newest(sent.version):
            self._settle(replica, NewestSet(sent.version, sent))
        else:
            self.look(replica)

    def resign(self, replica: Replica, *, is_failing: bool) -> None:
        """Give up leading: its disk fails, or another is to lead. It leads until that is decided,
        as far as it can.
        """
        term = replica.term
        if replica.role is not Role.LEADER or term is None or replica.sent is not None:
            return
        yields_ms = self._settings.session_timeout_ms + YIELDS_MS
        replica.yields_until_ms = self._monotonic() + yields_ms
        after = election.resign(
            term.lead,
            lagging=term.lagging(),
            min_in_sync=self._leading.min_in_sync(replica),
            is_failing=is_failing,
        )
        self._change(replica, after)

    def reassign(self, replica: Replica, target: Sequence[int]) -> None:
        """Have these brokers have the replicas, and no others; none: as it was. It goes on in the
        background, whoever leads. Raises LeaderUnknown, StoreUnavailable if it is not known to have
        begun, NoReassignment.
        """
        term, newest = replica.term, replica.newest
        if term is None or newest is None or newest.found is None or replica.sent is not None:
            raise LeaderUnknown(f"{replica}: its set is being changed", retry_after_s=1)
        now = newest.found
        if not target and not now.target:
            raise NoReassignment(f"{replica}: no reassignment is in progress")
        wanted = tuple(target) or now.original
        replicas = frozenset((*now.replicas, *wanted))
        after = in_sync.change_replicas(term.lead, replicas, gone=frozenset(), min_in_sync=1)
        assert after is not None, "it only grows"
        self._send(replica, newest, after, begun(now, wanted))
        if replica.sent is not None:
            raise StoreUnavailable(f"{replica}: the reassignment is not confirmed yet")
        found = None if replica.newest is None else replica.newest.found
        if found is None or (found.target or found.replicas) != wanted:
            raise LeaderUnknown(f"{replica}: its set was changed meanwhile", retry_after_s=1)

    def _change_replicas(self, replica: Replica, step: Grow | Shrink) -> None:
        """Waits if too few would be in sync without those that are to go."""
        term, newest, replicas = replica.term, replica.newest, frozenset(step.replicas)
        assert term is not None
        assert newest is not None
        assert newest.found is not None
        members = term.lead.in_force.in_sync
        gone = frozenset(one for one in members if not nodes_of({one}, self._members) <= replicas)
        after = in_sync.change_replicas(
            term.lead, replicas, gone=gone, min_in_sync=self._leading.min_in_sync(replica)
        )
        if after is not None:
            ends = isinstance(step, Shrink)
            reassigned = ended(newest.found, step.replicas) if ends else newest.found
            self._send(replica, newest, after, reassigned)


def nodes_of(replica_ids: AbstractSet[str], members: Members) -> set[int]:
    """The brokers that have them, as far as they are known."""
    found = (members.member_of(folder_of(one)) for one in replica_ids)
    return {member.node_id for member in found if member is not None}


def in_force_of(newest: NewestSet) -> InForce:
    """What is in force; under the highest number in use, since a void version is skipped."""
    found = newest.found
    assert found is not None
    return InForce(
        version=newest.taken,
        epoch=found.leader_epoch,
        leader=found.leader,
        replicas=frozenset(found.replicas),
        in_sync=frozenset(found.in_sync),
        wal=found.wal,
    )


def _names_leader(newest: NewestSet) -> bool:
    return newest.found is not None and newest.found.leader is not None


def _who_leads(newest: NewestSet) -> tuple[int, str | None] | None:
    found = newest.found
    return None if found is None else (found.leader_epoch, found.leader)
