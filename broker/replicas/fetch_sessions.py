"""Fetches that name only what has changed: a session between a broker that follows and one that
leads (KIP-227; docs/cluster.md has the argument).

* The fetch that begins a session names every partition that is followed there. Each later one names
  those of which there is something else to say than was said last, and those not followed any more.
* A fetch counts if it is the next of its session: the leader has taken in all before it, and the
  follower their answers. Nothing of any other one counts, and the follower begins another session.
* A fetch acknowledges what it names, and nothing else. Of the others it says that they are there
  still, where they were: what they lag, and for how long they are silent, is measured by that.
* What is refused is in the session no more, so that the follower names it again.
* A broker has one session, and in it partitions of which it is to have a replica: that bounds them.

`Said` is the follower's side, `FetchSession` the leader's.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final

from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.replicas.replica import Replica
from tierlog.broker.replication.in_sync import Fetch
from tierlog.broker.replication.messages import (
    NO_SESSION,
    Answered,
    FetchedRows,
    PartitionFetch,
    ReplicaFetch,
)
from tierlog.broker.replication.term import NEVER_MS, Term

LOOK_PACE_MS: Final = 250  # at all of a session's partitions, while some of them have records


# --- the follower's side --------------------------------------------------------------------------


class Said:
    """What a broker has said to one leader of each replica that it has there. For one thread.

    While some have records, the others are looked at every LOOK_PACE_MS: one that has stopped
    following is said to be there for so long, and acknowledges nothing by that.
    """

    def __init__(self) -> None:
        self._rows: dict[TopicIdPartition, tuple[Replica, PartitionFetch]] = {}
        self._session_id, self._number = NO_SESSION, 0
        self._touched: list[Replica] = []  # by the last answer
        self._is_whole, self._look_again_ms = True, NEVER_MS

    @property
    def places(self) -> Collection[TopicIdPartition]:
        return self._rows.keys()

    def replica_at(self, place: TopicIdPartition) -> Replica | None:
        found = self._rows.get(place)
        return None if found is None else found[0]

    def next_fetch(
        self,
        replicas: Callable[[], Iterable[Replica]],
        *,
        me: int,
        leader: int,
        now_ms: int,
        wait_ms: int,
        max_bytes: int,
    ) -> ReplicaFetch | None:
        """What to ask that leader; None if no replica follows it. There is no session any more
        unless the answer is noted.
        """
        session_id, self._session_id = self._session_id, NO_SESSION
        if session_id == NO_SESSION:
            self._rows, self._number = {}, 0
        self._is_whole = not (session_id and self._touched and now_ms < self._look_again_ms)
        if self._is_whole:
            self._look_again_ms = now_ms + LOOK_PACE_MS
        looked_at = list(replicas() if self._is_whole else self._touched)
        named, gone = list[PartitionFetch](), set(self._rows if self._is_whole else ())
        for replica in looked_at:
            fetch, known = replica.next_fetch(leader), self._rows.get(replica.place)
            if fetch is None:
                gone.add(replica.place)
                continue
            gone.discard(replica.place)
            if known is None or known[0] is not replica or known[1] != fetch:
                self._rows[replica.place] = replica, fetch
                named.append(fetch)
        forgotten = [place for place in gone if self._rows.pop(place, None) is not None]
        if not self._rows:
            return None
        return ReplicaFetch(
            node_id=me,
            session_id=session_id,
            number=self._number,
            wait_ms=wait_ms,
            max_bytes=max_bytes,
            partitions=named,
            forgotten=forgotten,
        )

    def note_answer(self, request: ReplicaFetch, fetched: FetchedRows) -> bool:
        """False if the leader does not know the session: the next fetch begins another one."""
        if request.session_id not in (NO_SESSION, fetched.session_id):
            return False
        self._session_id, self._number = fetched.session_id, self._number + 1
        rows = {(one.answer.topic_id, one.answer.partition): one.answer for one in fetched.rows}
        self._touched = [self._rows[place][0] for place in rows if place in self._rows]
        if self._is_whole:
            for place, (replica, _) in self._rows.items():
                if place not in rows:
                    replica.note_heard()
        for place, answer in rows.items():
            if answer.is_refusal:
                self._rows.pop(place, None)
        return True


# --- the leader's side ----------------------------------------------------------------------------


class Entry:
    """A partition of a session, as the follower said last. `is_named`: by the fetch that is being
    answered, which has not been taken note of; `is_ready`: there may be something to answer.
    `is_idle`: there was nothing, in `term`; `is_unreadable`: nothing that could be read.
    `local_start`: of the log, as told in this session, which ends with an answer that is lost; with
    batches it does not count, as what they commit is deleted later.
    """

    def __init__(self, fetch: PartitionFetch) -> None:
        self.place = fetch.topic_id, fetch.partition
        self.is_ready = self.is_idle = self.is_unreadable = False
        self.term: Term | None = None
        self.local_start = fetch.log_start_offset
        self.stop: Callable[[], object] | None = None

    def ask(self, fetch: PartitionFetch, node_id: int) -> None:
        self.fetch, self.is_named = fetch, True
        self.said = Fetch(
            replica_id=fetch.replica_id,
            node=node_id,
            epoch=fetch.leader_epoch,
            seen=fetch.seen,
            last_epoch=fetch.last_epoch,
            end_offset=fetch.end_offset,
            flushed_end=fetch.flushed_end,
            log_start_offset=fetch.log_start_offset,
            answered=fetch.answered,
        )

    def lacks(self, log_start: int, local_start: int) -> bool:
        """Whether it is news to the follower that the log, or the local log, starts there."""
        return self.fetch.log_start_offset < log_start or self.local_start != local_start

    def stop_waiting(self) -> None:
        if self.stop is not None:
            self.stop()
            self.stop = None


class FetchSession:
    """Thread-safe. `answer_entry`: what there is to say of one partition, with so many bytes at
    most; it says whether the entry `is_idle`.
    """

    def __init__(
        self,
        node_id: int,
        answer_entry: Callable[[Entry, int], Answered | None],
        monotonic: Callable[[], int],
    ) -> None:
        self._answer_entry, self._monotonic = answer_entry, monotonic
        self.id, self._node_id, self._number = secrets.randbelow(2**62) + 1, node_id, 0
        self._entries: dict[TopicIdPartition, Entry] = {}
        self._ready: deque[Entry] = deque()  # in the order of their turns
        self._lock = threading.Lock()  # of all but `_ready` and the flags, which appends change
        self._look_again_ms = NEVER_MS
        self.heard_ms = NEVER_MS  # a fetch, or that one is answered
        self._on_ready: Callable[[], None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it that a later fetch could leave out."""
        return not self._entries

    def take_in(self, request: ReplicaFetch) -> TakenFetch | None:
        """What the fetch changes; None if it is not the next one."""
        with self._lock:
            if request.number != self._number:
                return None
            self._number += 1
            self.heard_ms = self._monotonic()
            for place in request.forgotten:
                self._drop(place)
            for fetch in request.partitions:
                place = fetch.topic_id, fetch.partition
                entry = self._entries.get(place)
                if entry is None:
                    entry = self._entries[place] = Entry(fetch)
                entry.stop_waiting()
                entry.ask(fetch, self._node_id)
                self._set_ready(entry)
            return TakenFetch(self, request, self._number)

    def close(self) -> None:
        """Another one has begun: nothing of this one counts any more."""
        with self._lock:
            self._number = -1
            for place in list(self._entries):
                self._drop(place)

    def _drop(self, place: TopicIdPartition) -> None:
        entry = self._entries.pop(place, None)
        if entry is not None:
            entry.stop_waiting()

    def answer(self, number: int, *, max_bytes: int, is_over: bool) -> list[Answered]:
        """What is new; nothing if the next fetch has come already. May block."""
        with self._lock:
            if number != self._number:
                return []
            due = [self._ready.popleft() for _ in range(len(self._ready))]
            rows = self._answer_all(due, max_bytes)
            now_ms = self.heard_ms = self._monotonic()
            if is_over or not rows or now_ms >= self._look_again_ms:
                self._look_again_ms = now_ms + LOOK_PACE_MS
                left = max_bytes - sum(one.answer.size_bytes for one in rows.values())
                changed = self._look_at_idle(rows, is_over=is_over)
                rows |= self._answer_all(changed, max(0, left))
            is_due = is_over or any(not one.may_wait for one in rows.values())
            return list(rows.values()) if is_due else []

    def _answer_all(self, due: list[Entry], left: int) -> dict[TopicIdPartition, Answered]:
        """Each has its share of the bytes; who had records is the last to have some again."""
        rows, unsent, sent = dict[TopicIdPartition, Answered](), list[Entry](), list[Entry]()
        share = max(1, left // len(due)) if due else 0
        for entry in due:
            entry.is_ready = False
            if self._entries.get(entry.place) is not entry or entry.place in rows:
                continue
            answered = self._answer_entry(entry, min(share, left))
            if answered is not None:
                rows[entry.place] = answered
                left = max(0, left - answered.answer.size_bytes)
            if answered is not None and answered.answer.is_refusal:
                self._drop(entry.place)
            elif entry.is_idle:
                self._wait(entry)
            else:
                (unsent if answered is None else sent).append(entry)
        for entry in (*unsent, *sent):
            self._set_ready(entry)
        return rows

    def _look_at_idle(self, rows: Collection[TopicIdPartition], *, is_over: bool) -> list[Entry]:
        """Note that they are there; those of which there is something to say all the same."""
        return [
            entry
            for place, entry in self._entries.items()
            if entry.is_idle and place not in rows and not _is_quiet(entry, is_over=is_over)
        ]

    def _wait(self, entry: Entry) -> None:
        entry.stop_waiting()
        if entry.is_unreadable:
            return  # tried again whenever what is idle is looked at
        assert entry.term is not None, "it is idle"
        fetch, wake = entry.fetch, partial(self._wake, entry)
        entry.stop = entry.term.wait_for_news(fetch.replica_id, fetch.end_offset, wake)

    def _wake(self, entry: Entry) -> None:
        self._set_ready(entry)
        if (on_ready := self._on_ready) is not None:
            on_ready()

    def _set_ready(self, entry: Entry) -> None:
        if not entry.is_ready:
            entry.is_ready = True
            self._ready.append(entry)

    def wait_for_news(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._on_ready = callback
        if self._ready:
            callback()
        return self._stop_waiting

    def _stop_waiting(self) -> None:
        self._on_ready = None


def _is_quiet(entry: Entry, *, is_over: bool) -> bool:
    term, fetch = entry.term, entry.fetch
    if term is None or entry.is_unreadable or term.note_unchanged(entry.said) is None:
        return False
    log = term.log
    is_behind = fetch.high_watermark < min(log.high_watermark, fetch.flushed_end)
    is_news = entry.lacks(log.log_start_offset, log.first_local_offset)
    return not is_news and not (is_over and is_behind)


class TakenFetch:
    """A fetch that its session has taken in."""

    def __init__(self, session: FetchSession, request: ReplicaFetch, number: int) -> None:
        self._session, self._request, self._number = session, request, number

    @property
    def session_id(self) -> int:
        return self._session.id

    def answer(self, *, is_over: bool) -> list[Answered]:
        """What is new for the replicas; `is_over`: it waits no longer. May block."""
        most = self._request.max_bytes
        is_over = is_over or not self._request.wait_ms
        return self._session.answer(self._number, max_bytes=most, is_over=is_over)

    def wait_for_news(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call it when there may be something new, from any thread. Returns how to stop that."""
        return self._session.wait_for_news(callback)
