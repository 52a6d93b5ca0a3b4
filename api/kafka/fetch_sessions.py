"""Fetch sessions (KIP-227): what a client fetches, kept between its requests, so that a poll over
many idle partitions costs next to nothing.

* A session knows of each partition what was last sent of it, and whether there may be something
  new: an idle partition is looked at again only after its high watermark has advanced.
* Every Fetch has a session; one that the client did not ask for ends with its answer.
* Kept are at most `max.incremental.fetch.session.cache.slots`, and `PARTITIONS_MAX` partitions of
  them all. If all are in use the newcomer replaces another by Kafka's rule (FetchSessionCache), or
  gets no session, which every client can do without.

Used on the event loop only.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tierlog.api.kafka.error_codes import Code, Refused
from tierlog.api.serving.grants import Grant
from tierlog.api.serving.waiting_requests import WaitingRequests
from tierlog.broker.partition.partition import Partition
from tierlog.record_format.kafka_messages.messages import FetchRequest

NO_SESSION: Final = 0
FIRST_EPOCH: Final = 0  # of a request that begins a session
FINAL_EPOCH: Final = -1  # of one that wants none
PARTITIONS_MAX: Final = 200_000
EVICTION_MS: Final = 120_000  # Kafka's min.incremental.fetch.session.eviction.ms
_MAX_EPOCH: Final = 2**31 - 1

TopicKey = str | bytes
"""A topic's name, or the 16 bytes of its id."""
Key = tuple[TopicKey, int]
Sent = tuple[int, int, int]
"""High watermark, last stable offset, log start offset."""


class Wanted:
    """One partition of a session."""

    __slots__ = (
        "_session",
        "_stop_waiting",
        "key",
        "last_epoch",
        "leader_epoch",
        "max_bytes",
        "offset",
        "partition",
        "sent",
    )

    def __init__(self, session: FetchSession, key: Key) -> None:
        self._session, self.key = session, key
        self.partition: Partition | None = None  # None: to be looked up
        self.sent: Sent | None = None
        self._stop_waiting: Callable[[], None] | None = None

    def ask(self, wanted: FetchRequest.FetchPartition) -> None:
        self.offset, self.max_bytes = wanted.fetch_offset, wanted.partition_max_bytes
        self.leader_epoch, self.last_epoch = wanted.current_leader_epoch, wanted.last_fetched_epoch

    def wait_beyond(self, offset: int, waiting: WaitingRequests) -> None:
        """Be ready again once the high watermark is above `offset`."""
        if self._stop_waiting is None and self.partition is not None:
            is_due = False

            def wake() -> None:
                nonlocal is_due
                is_due, self._stop_waiting = True, None
                self._session.set_ready(self)

            stop = waiting.wait_beyond(self.partition, offset, wake)
            if not is_due:
                self._stop_waiting = stop

    def close(self) -> None:
        if self._stop_waiting is not None:
            self._stop_waiting()
            self._stop_waiting = None


class FetchSession:
    """`ready`: the partitions that may have something to send, in the order of their turns.
    `on_ready`, `on_superseded`: of the request that is being answered: there is one for its
    partitions; the client has sent another. `epoch`: of the next request.
    """

    def __init__(self, *, by_id: bool, grant: Grant) -> None:
        self.id, self.epoch = NO_SESSION, 1
        self.by_id, self.grant = by_id, grant
        self.wanted: dict[Key, Wanted] = {}
        self.ready: dict[Key, Wanted] = {}
        self.on_ready: Callable[[], None] | None = None
        self.on_superseded: Callable[[], None] | None = None
        self.created_ms = self.used_ms = 0

    def update(self, request: FetchRequest) -> None:
        for topic in request.forgotten_topics_data:
            for number in topic.partitions:
                self._forget((self._topic_key(topic), number))
        for asked in request.topics:
            topic_key = self._topic_key(asked)
            for partition in asked.partitions:
                key = (topic_key, partition.partition)
                wanted = self.wanted.get(key)
                if wanted is None:
                    wanted = self.wanted[key] = Wanted(self, key)
                wanted.ask(partition)
                self.ready[key] = wanted

    def _topic_key(self, topic: FetchRequest.FetchTopic | FetchRequest.ForgottenTopic) -> TopicKey:
        return topic.topic_id if self.by_id else topic.topic

    def _forget(self, key: Key) -> None:
        if (wanted := self.wanted.pop(key, None)) is not None:
            self.ready.pop(key, None)
            wanted.close()

    def set_ready(self, wanted: Wanted) -> None:
        self.ready[wanted.key] = wanted
        if self.on_ready is not None:
            self.on_ready()

    @property
    def is_polled(self) -> bool:
        """A request is being answered, which closes the session at its end if nobody keeps it."""
        return self.on_superseded is not None

    def next_epoch(self) -> None:
        self.epoch = self.epoch + 1 if self.epoch < _MAX_EPOCH else 1

    def close(self) -> None:
        for wanted in self.wanted.values():
            wanted.close()


class FetchSessions:
    """Those that clients keep."""

    def __init__(self, sessions_max: int, *, clock: Callable[[], int]) -> None:
        """`clock`: monotonic, in milliseconds."""
        self._max, self._clock = sessions_max, clock
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()  # least recently used first
        self._partitions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, request: FetchRequest, *, by_id: bool, grant: Grant) -> FetchSession:
        """The session of a request, with what the request changes in it. Raises Refused."""
        if request.session_epoch in (FIRST_EPOCH, FINAL_EPOCH):
            self._remove(request.session_id)
            session = FetchSession(by_id=by_id, grant=grant)
            session.update(request)
            if request.session_epoch == FIRST_EPOCH:
                self._keep(session)
            return session
        session = self._find(request, by_id=by_id, grant=grant)
        if session.on_superseded is not None:
            session.on_superseded()
        before = len(session.wanted)
        session.update(request)
        self._partitions += len(session.wanted) - before
        session.next_epoch()
        session.used_ms = self._clock()
        self._sessions.move_to_end(session.id)
        if not session.wanted or self._partitions > PARTITIONS_MAX:
            self._remove(session.id)  # as in Kafka: what is left is answered without one
        return session

    def _find(self, request: FetchRequest, *, by_id: bool, grant: Grant) -> FetchSession:
        session = self._sessions.get(request.session_id)
        if session is None or session.grant != grant:
            raise Refused(Code.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != request.session_epoch:
            raise Refused(Code.INVALID_FETCH_SESSION_EPOCH)
        if session.by_id is not by_id:
            raise Refused(Code.FETCH_SESSION_TOPIC_ID_ERROR)
        return session

    def _keep(self, session: FetchSession) -> None:
        now_ms, size = self._clock(), len(session.wanted)
        if not size or self._partitions + size > PARTITIONS_MAX:
            return
        if len(self._sessions) >= self._max and not self._evict_for(size, now_ms):
            return
        while session.id in self._sessions or session.id == NO_SESSION:
            session.id = secrets.randbelow(2**31 - 1) + 1
        session.created_ms = session.used_ms = now_ms
        self._sessions[session.id] = session
        self._partitions += size

    def _evict_for(self, size: int, now_ms: int) -> bool:
        """Make room for a session of `size` partitions: one that was idle for long goes, otherwise
        the smallest that has existed for long, if it is not larger.
        """
        if not self._sessions:
            return False
        oldest = next(iter(self._sessions.values()))
        if now_ms - oldest.used_ms > EVICTION_MS:
            self._remove(oldest.id)
            return True
        old = [one for one in self._sessions.values() if one.used_ms - one.created_ms > EVICTION_MS]
        smallest = min(old, key=lambda one: (len(one.wanted), one.id), default=None)
        if smallest is None or len(smallest.wanted) > size:
            return False
        self._remove(smallest.id)
        return True

    def _remove(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._partitions -= len(session.wanted)
            session.id = NO_SESSION
            if not session.is_polled:
                session.close()
