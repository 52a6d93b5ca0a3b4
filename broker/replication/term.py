"""A term of leadership: what its followers have said, and how far the log is committed by it.

* What follows from that is decided by `in_sync`, on a value (`Leadership`) that one lock guards.
* The log's watermark is raised outside of the lock: whoever waits for it is called from there, and
  it never goes back.
* A follower lags that has not reached the log's end for `replica.lag.time.max.ms`. As in Kafka,
  one that had reached the end as it was at its last fetch was there then. The bucket lags if for
  so long nothing of what it lacks came to be there.
* By `replication.store` the bucket is in the set always, and then it never leaves; or as a
  stand-in, while too few replicas are in sync without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import Final, NamedTuple

from tierlog.broker.replication import in_sync
from tierlog.broker.replication.election import may_hand_over, must_claim_anew
from tierlog.broker.replication.in_sync import Fetch, InForce, Leadership, Progress
from tierlog.broker.replication.store_writer import Feed, Said
from tierlog.broker.replication.waiters import Waiters
from tierlog.host.clock import monotonic_ms
from tierlog.hot_tier.log import PartitionLog
from tierlog.record_format.errors import LeaderUnknown, NotEnoughReplicas, NotReplicated

NEVER_MS: Final = -(2**63)
ALL: Final = 2**63 - 1  # above every offset
CONFIRM_MAX_MS: Final = 5_000  # a follower is asked at once, and answers after a flush


class StoreRole(StrEnum):
    """`replication.store`: whether the bucket is a member of the in-sync set."""

    NONE = "none"
    STAND_IN = "stand-in"
    ALWAYS = "always"


class _Heard(NamedTuple):
    """Of a replica that fetches. `log_end`: the leader's, at its last fetch."""

    node_id: int
    fetched_ms: int
    log_end: int
    caught_up_ms: int


class _Asked(NamedTuple):
    """Whether this was the leader when it gave that answer, and what it had then is committed."""

    answer: int
    up_to: int
    began_ms: int
    future: Future[None]


class Term:
    """Thread-safe. Call `begin` once the claim is in force, and `end` when another's is."""

    def __init__(
        self,
        log: PartitionLog,
        in_force: InForce,
        *,
        lag_ms: int,
        min_in_sync: Callable[[], int],
        store_role: Callable[[], StoreRole] = lambda: StoreRole.NONE,
        store_log_start: Callable[[], int] = lambda: 0,
        monotonic: Callable[[], int] = monotonic_ms,
    ) -> None:
        assert in_force.leader is not None, "a claim has a leader"
        self.log, self.epoch = log, in_force.epoch
        self._lag_ms, self._min_in_sync, self._monotonic = lag_ms, min_in_sync, monotonic
        self._store_role, self._store_log_start = store_role, store_log_start
        self.feed: Feed | None = None
        self._said_start = 0  # the manifest's log start, when the last object was sent
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._began_ms = monotonic()
        self._heard: dict[str, _Heard] = {}
        self._seen = 0  # the highest epoch that a replica said to have seen
        self._answers = 0
        self._asked: list[_Asked] = []
        self._wanted = 0  # the highest answer that somebody waits for
        self._is_over = False
        self._waiters = Waiters()
        self._is_short = False
        self._lead = Leadership(
            me=in_force.leader,
            epoch=in_force.epoch,
            in_force=in_force,
            began_at=log.log_end_offset,
            high_watermark=log.high_watermark,
        )

    def begin(self) -> None:
        writer = self.log.writer
        writer.on_flushed.append(self.note_flushed)
        writer.on_appended.append(self._waiters.wake)
        self.note_flushed(self.log.flushed_end)

    def end(self) -> None:
        """What was waited for is not here any more."""
        writer = self.log.writer
        writer.on_flushed.remove(self.note_flushed)
        writer.on_appended.remove(self._waiters.wake)
        self._waiters.wake(ALL)
        with self._lock:
            self._is_over = True
        if self.feed is not None:
            self.feed.on_stored = lambda: None
        self.give_up_confirming(asked_before_ms=ALL)

    # --- progress ---------------------------------------------------------------------------------

    @property
    def lead(self) -> Leadership:
        return self._lead

    def note_flushed(self, flushed_end: int) -> None:
        there = Progress(flushed_end, self.log.log_start_offset)
        with self._lock:
            self._lead = in_sync.note_progress(self._lead, self._lead.me, there)
        self._commit()

    def note_fetch(self, fetch: Fetch, *, diverges: bool) -> int:
        """What a replica says when it fetches; the number of the answer that it is given."""
        now_ms, log_end = self._monotonic(), self.log.log_end_offset
        with self._lock:
            self._seen, before = max(self._seen, fetch.seen), self._lead
            self._lead = in_sync.note_fetch(before, fetch, diverges=diverges)
            is_news = self._lead is not before
            if fetch.epoch == self.epoch and not diverges:
                self._heard[fetch.replica_id] = self._hear(fetch, now_ms, log_end)
        if is_news:
            self._commit()
        return self._next_answer()

    def _next_answer(self) -> int:
        with self._lock:
            self._answers += 1
            return self._answers

    def note_unchanged(self, fetch: Fetch) -> int | None:
        """A replica that said this is there still, and acknowledges nothing by that; the number of
        the answer that it is given. None if it has not said so as the replica that it is now, or in
        this term: it is to say it anew (H9).
        """
        now_ms, log_end = self._monotonic(), self.log.log_end_offset
        with self._lock:
            if self._is_over or fetch.replica_id not in self._heard:
                return None
            self._heard[fetch.replica_id] = self._hear(fetch, now_ms, log_end)
            self._answers += 1
            return self._answers

    def _hear(self, fetch: Fetch, now_ms: int, log_end: int) -> _Heard:
        before = self._heard.get(fetch.replica_id)
        caught_up_ms = NEVER_MS if before is None else before.caught_up_ms
        if fetch.flushed_end >= log_end:
            caught_up_ms = now_ms
        elif before is not None and fetch.flushed_end >= before.log_end:
            caught_up_ms = before.fetched_ms
        return _Heard(fetch.node, now_ms, log_end, caught_up_ms)

    def is_waited_for(self, replica_id: str) -> bool:
        """Whether somebody waits for what its next fetch says."""
        wanted = self._wanted
        return wanted > 0 and self._lead.progress_of(replica_id).answered < wanted

    def _commit(self) -> None:
        with self._lock:
            committed = in_sync.high_watermark(self._lead)
            self._lead = self._lead._replace(high_watermark=committed)
            self._progress.notify_all()
        self.log.commit_up_to(committed)
        self._confirm()

    # --- whether it leads -------------------------------------------------------------------------

    def confirm(self, *, up_to: int = 0) -> Future[None]:
        """Completes once it is known that nobody else led when this was called, and that what was
        below `up_to` is committed (H8). Fails with LeaderUnknown: ask whoever leads then. At once,
        if a member has been silent for so long that it is not waited for.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._wanted = self._answers + 1
            up_to = max(up_to, self._lead.began_at)
            self._asked.append(_Asked(self._wanted, up_to, self._monotonic(), future))
            is_over = self._is_over
        if is_over or self._is_one_silent():
            self.give_up_confirming(asked_before_ms=ALL)
        else:
            self._waiters.wake(ALL)  # those that fetch are answered, and fetch again
            if self.feed is not None:
                self.feed.ask()
            self._confirm()
        return future

    def _is_one_silent(self) -> bool:
        now_ms = self._monotonic()
        return any(now_ms - self._heard_ms(one) >= CONFIRM_MAX_MS for one in self._others())

    def _confirm(self) -> None:
        if not self._asked:
            return
        with self._lock:
            lead, asked = self._lead, self._asked
            confirmed = [
                one
                for one in asked
                if lead.high_watermark >= one.up_to
                and in_sync.is_confirmed(lead, answer=one.answer)
            ]
            self._asked = [one for one in asked if one not in confirmed]
        for one in confirmed:
            one.future.set_result(None)

    def give_up_confirming(self, *, asked_before_ms: int | None = None) -> None:
        """Fail what has waited for too long: a member is gone, or this leader is deposed."""
        if not self._asked:
            return
        if asked_before_ms is None:
            asked_before_ms = self._monotonic() - CONFIRM_MAX_MS
        with self._lock:
            given_up = [one for one in self._asked if one.began_ms <= asked_before_ms]
            self._asked = [one for one in self._asked if one.began_ms > asked_before_ms]
        for one in given_up:
            one.future.set_exception(
                LeaderUnknown(
                    f"{self.log}: not every replica in sync says that this broker still leads",
                    retry_after_s=1,
                )
            )

    def wait_until(self, is_so: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait for what followers have to say first."""
        with self._progress:
            return self._progress.wait_for(is_so, timeout_s)

    @property
    def is_settled(self) -> bool:
        """Whether all that earlier leaders committed is known to be, and read (R8)."""
        return self.log.high_watermark >= self._lead.began_at

    def wait_for_news(
        self, replica_id: str, offset: int, callback: Callable[[], None]
    ) -> Callable[[], object]:
        """Call it once when there is something to answer to this replica, whose log ends at
        `offset`; at once if there is. Returns a function that cancels it.
        """
        cancel = self._waiters.add_waiter(offset, callback)
        is_due = self.log.log_end_offset > offset or self.is_waited_for(replica_id)
        if is_due and cancel():
            callback()
        return cancel

    # --- the bucket -------------------------------------------------------------------------------

    def write_for_store(self, feed: Feed | None) -> None:
        """What is written for STORE from now on, if anything."""
        if feed is not None:
            feed.say, feed.on_stored = self._say, self.note_stored
        with self._lock:
            self.feed, self._said_start = feed, 0
            self._lead = in_sync.begin_chain(self._lead, None if feed is None else feed.chain)
        self.note_stored()

    def _say(self) -> Said:
        """With an object that is sent now. That the manifest has a log start counts once such an
        object is in the bucket (H12).
        """
        self._said_start = self._store_log_start()
        return Said(self._next_answer(), self._said_start)

    def note_stored(self) -> None:
        """The bucket has more."""
        feed = self.feed
        if feed is None:
            return
        there = Progress(feed.stored, feed.said.log_start_offset, feed.said.answered)
        with self._lock:
            self._lead = in_sync.note_store(self._lead, feed.chain, there)
        self._commit()

    def _ask_for_start(self) -> None:
        """The manifest's log start has moved since an object was sent."""
        if self.feed is not None and self._store_log_start() > self._said_start:
            self.feed.ask()

    @property
    def wants_store(self) -> bool:
        """Whether the bucket is to be in the set."""
        role = self._store_role()
        if role is not StoreRole.STAND_IN:
            return role is StoreRole.ALWAYS
        live = (self._lead.in_force.in_sync | self._ready()) - self.lagging() - {in_sync.STORE}
        return len(live) < self._min_in_sync()

    def next_chain(self) -> InForce | None:
        """The version that names the chain that is written now, once that has what the one in force
        had: which was fenced.
        """
        feed, lead = self.feed, self._lead
        if feed is None or feed.is_over or lead.pending is not None or not lead.is_claimed:
            return None
        in_force = lead.in_force
        if in_sync.STORE not in in_force.in_sync or in_force.wal == feed.chain:
            return None
        has_all = feed.stored >= max(lead.high_watermark, lead.began_at)
        return in_sync.change_chain(lead, feed.chain) if has_all else None

    # --- the set ----------------------------------------------------------------------------------

    def lagging(self) -> frozenset[str]:
        """The members that lag, and not this one."""
        now_ms = self._monotonic()
        lagging = {
            one
            for one in self._others()
            if now_ms - max(self._caught_up_ms(one), self._began_ms) > self._lag_ms
        }
        if self.feed is not None and self.feed.behind_ms() > self._lag_ms:
            lagging.add(in_sync.STORE)
        return frozenset(lagging)

    def _caught_up_ms(self, replica_id: str) -> int:
        heard = self._heard.get(replica_id)
        return NEVER_MS if heard is None else heard.caught_up_ms

    def unheard(self, *, for_ms: int) -> dict[str, int]:
        """When each other member last fetched, or this term began, if none has for so long; else
        nothing.
        """
        since_ms, others = self._monotonic() - for_ms, self._others()
        if any(self._heard_ms(one) > since_ms for one in others):
            return {}
        return {one: self._heard_ms(one) for one in others}

    @property
    def has_heard(self) -> bool:
        """Whether another member has fetched in this term."""
        return not self._others().isdisjoint(self._heard)

    def _heard_ms(self, replica_id: str) -> int:
        heard = self._heard.get(replica_id)
        return self._began_ms if heard is None else heard.fetched_ms

    def _others(self) -> frozenset[str]:
        return in_sync.counted(self._lead) - {self._lead.me, in_sync.STORE}

    def lag_of(self, node_id: int) -> int:
        """How many offsets of the log the broker's replica lacks, by what it said last; -1 if it
        has said nothing in this term.
        """
        log_end = self.log.log_end_offset
        with self._lock:
            known = [
                (one.fetched_ms, name)
                for name, one in self._heard.items()
                if one.node_id == node_id
            ]
            if not known:
                return -1
            return max(0, log_end - self._lead.progress_of(max(known)[1]).flushed_end)

    def is_replica(self, node_id: int) -> bool:
        """Whether the broker has a replica, or may have one."""
        versions = (self._lead.in_force, self._lead.pending)
        return any(one is not None and node_id in one.replicas for one in versions)

    def outsiders(self) -> frozenset[str]:
        """Replicas that fetch, are not in the set, and are of a broker that is to have one."""
        lead = self._lead
        return frozenset(
            name
            for name, heard in self._heard.items()
            if name not in lead.in_force.in_sync and heard.node_id in lead.in_force.replicas
        )

    @property
    def is_short(self) -> bool:
        """Whether acks=all is refused: too few replicas were in sync at the last look."""
        return self._is_short

    def look_for_lagging(self) -> frozenset[str]:
        """The members that lag: whether acks=all is refused from now on goes by them."""
        self._ask_for_start()
        lagging = self.lagging()
        is_behind = self._store_role() is StoreRole.ALWAYS and in_sync.STORE in lagging
        self._is_short = is_behind or in_sync.refuses_acks_all(
            self._lead, lagging=lagging, min_in_sync=self._min_in_sync()
        )
        return lagging

    def next_change(self, lagging: frozenset[str]) -> InForce | None:
        """The version to send next, if any, while these members lag."""
        outsiders, role = self._fresh(), self._store_role()
        has_store = in_sync.STORE in self._lead.in_force.in_sync
        if not (lagging or outsiders or has_store) and role is StoreRole.NONE:
            return None  # most, and most of the time
        if self.wants_store:
            outsiders |= {in_sync.STORE}
        else:
            lagging |= {in_sync.STORE}  # it stays while too few would remain
        if role is StoreRole.ALWAYS:
            lagging -= {in_sync.STORE}
        members = in_sync.next_in_sync(
            self._lead, outsiders=outsiders, lagging=lagging, min_in_sync=self._min_in_sync()
        )
        return None if members is None else in_sync.change_in_sync(self._lead, members)

    def _fresh(self) -> frozenset[str]:
        now_ms = self._monotonic()
        return frozenset(
            one for one in self.outsiders() if now_ms - self._heard[one].fetched_ms <= self._lag_ms
        )

    def _ready(self) -> frozenset[str]:
        return frozenset(one for one in self._fresh() if in_sync.may_join(self._lead, one))

    def send_change(self, after: InForce) -> None:
        """It is about to be sent: from now on both sets count."""
        with self._lock:
            self._lead = in_sync.send_change(self._lead, after)

    def settle_change(self, newest: InForce) -> bool:
        """By the newest version of the bucket; False: this term is over."""
        with self._lock:
            settled = in_sync.settle_change(self._lead, newest)
            if settled is not None:
                self._lead = settled
                # Who was removed may be another replica when it is added again (H9).
                self._heard = {
                    name: one for name, one in self._heard.items() if self.is_replica(one.node_id)
                }
        if settled is None:
            return False
        self.note_stored()  # not counted while another chain may have been in force
        self._commit()
        self.look_for_lagging()
        return True

    @property
    def must_claim_anew(self) -> bool:
        return must_claim_anew(self._lead, self._seen)

    @property
    def seen(self) -> int:
        return self._seen

    def not_replicated(self) -> NotReplicated:
        return NotReplicated(f"{self.log}: too few replicas are in sync to commit it")

    def check_enough(self) -> None:
        """Raises NotEnoughReplicas: acks=all would wait for a replica that is gone, or not for the
        bucket, which has yet to join the set.
        """
        lacks_store = self._store_role() is StoreRole.ALWAYS and (
            in_sync.STORE not in self._lead.in_force.in_sync
        )
        if self._is_short or lacks_store:
            now = len(self._lead.in_force.in_sync - self.lagging())
            raise NotEnoughReplicas(
                f"{self.log}: {now} replicas are in sync, and min.insync.replicas is "
                f"{self._min_in_sync()}"
            )

    def may_hand_over(self, target: str) -> bool:
        return may_hand_over(self._lead, target, log_end_offset=self.log.log_end_offset)

    def wait_for_trim(self, *, timeout_s: float) -> None:
        """Until every member counted has recorded the log start. Raises NotEnoughReplicas."""
        start = self.log.log_start_offset
        self.note_flushed(self.log.flushed_end)
        self._ask_for_start()
        self._waiters.wake(ALL)  # those that fetch are to hear of it
        is_so = lambda: in_sync.low_watermark(self._lead) >= start  # noqa: E731
        if not self.wait_until(is_so, timeout_s=timeout_s):
            raise NotEnoughReplicas(
                f"{self.log}: it is trimmed to {start} here, and not in each replica in sync"
            )
