"""Fetches from the leaders that this broker's replicas follow: a thread for each broker that leads.

* One request is on its way to a leader at a time, for all partitions that are followed there
  (`fetch_sessions`). What it brings is appended and flushed before the next one says so.
* A leader that does not answer is asked again, at a pace; who leads then is decided elsewhere
  (`elections`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import structlog

from tierlog.broker.membership.members import Members
from tierlog.broker.membership.peers import Peers
from tierlog.broker.replicas.fetch_sessions import Said
from tierlog.broker.replicas.replica import Replica
from tierlog.broker.replication.messages import Fetched, PartitionAnswer
from tierlog.broker.settings import BrokerSettings
from tierlog.record_format.errors import DiskFull, PeerUnavailable, StoreUnavailable, TierlogError

log = structlog.get_logger(__name__)

PAUSE_S: Final = 0.1
NOTHING: Final = memoryview(b"")


class Fetchers:
    """Thread-safe. `on_refused`: a leader says that it does not lead this partition. `start`: a
    fetcher's thread.
    """

    def __init__(
        self,
        members: Members,
        peers: Peers,
        settings: BrokerSettings,
        *,
        replicas: Callable[[], Iterable[Replica]],
        on_refused: Callable[[Replica], object],
        start: Callable[[Fetcher], None],
        monotonic: Callable[[], int],
    ) -> None:
        self._members, self._peers, self._settings = members, peers, settings
        self._monotonic = monotonic
        self._replicas, self._on_refused, self._start = replicas, on_refused, start
        self._lock = threading.Lock()
        self._threads: dict[int, Fetcher] = {}
        self._is_closed = False
        self._answers, self._bytes = Counter[int](), Counter[int]()  # each by one thread

    def follow(self, node_id: int) -> None:
        """There is a replica that follows this broker."""
        with self._lock:
            found = self._threads.get(node_id)
            if found is None and not self._is_closed:
                wait_ms = self._settings.replica_fetch_wait_max_ms
                found = self._threads[node_id] = Fetcher(self, node_id, wait_ms=wait_ms)
                self._start(found)
            if found is not None:
                found.wake()

    def close(self, timeout_s: float) -> None:
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.values())
        for one in threads:
            one.stop()
        for one in threads:
            if one.is_alive():
                one.join(timeout_s)

    # --- one exchange -----------------------------------------------------------------------------

    def followed(self, node_id: int) -> list[Replica]:
        return [
            one
            for one in self._replicas()
            if (to := one.following) is not None and to.node_id == node_id
        ]

    def count_answers(self) -> dict[int, tuple[int, int]]:
        """How often each broker that is followed has answered, and with how many bytes of batches,
        by node id.
        """
        return {one: (count, self._bytes[one]) for one, count in self._answers.copy().items()}

    def exchange(self, node_id: int, said: Said, *, wait_ms: int) -> bool:
        """Fetch once, append and flush; False if the next fetch may wait a little. Raises
        PeerUnavailable.
        """
        member = self._members.member(node_id)
        request = said.next_fetch(
            partial(self.followed, node_id),
            me=self._members.me.node_id,
            leader=node_id,
            now_ms=self._monotonic(),
            wait_ms=wait_ms,
            max_bytes=self._settings.replica_fetch_max_bytes,
        )
        if request is None or member is None:
            return False
        fetched = self._peers.fetch_replicas(member.url, request, asked=said.places)
        self._answers[node_id] += 1
        self._bytes[node_id] += sum(one.answer.size_bytes for one in fetched.rows)
        replicas = [said.replica_at((one.topic_id, one.partition)) for one, _ in fetched.rows]
        if not said.note_answer(request, fetched):
            return True  # from the beginning
        return self._take(zip(replicas, fetched.rows, strict=True))

    def _take(self, fetched: Iterable[tuple[Replica | None, Fetched]]) -> bool:
        """Whether all went well: otherwise the next fetch would only ask the same again."""
        to_flush: list[tuple[Replica, PartitionAnswer]] = []
        is_well = True
        for replica, (answer, batches) in fetched:
            if replica is None:
                continue
            try:
                if replica.take(answer, batches):
                    to_flush.append((replica, answer))
            except (DiskFull, StoreUnavailable) as error:
                log.warning("a replica cannot follow", partition=str(replica), error=str(error))
                is_well = False
            except (TierlogError, OSError) as error:
                replica.go_offline(str(error))
            if replica.refused:
                is_well = False
                self._on_refused(replica)
        for replica, answer in to_flush:
            try:
                replica.log.writer.flush()
                replica.commit(answer)
            except (TierlogError, OSError) as error:
                replica.go_offline(str(error))
        return is_well

    def note_silent(self) -> None:
        self._members.doubt()


class Fetcher(threading.Thread):
    """Of one broker that leads."""

    def __init__(self, fetchers: Fetchers, node_id: int, *, wait_ms: int) -> None:
        super().__init__(name=f"fetch-{node_id}", daemon=True)
        self._fetchers, self.node_id, self._wait_ms = fetchers, node_id, wait_ms
        self._said = Said()
        self._woken, self._stopping, self._is_silent = threading.Event(), False, False

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._stopping = True
        self._woken.set()

    def run(self) -> None:
        while not self._stopping:
            self._woken.clear()
            if not self.fetch_once():
                self._woken.wait(PAUSE_S)

    def fetch_once(self) -> bool:
        """Whether the next fetch may follow at once."""
        try:
            goes_on = self._fetchers.exchange(self.node_id, self._said, wait_ms=self._wait_ms)
        except PeerUnavailable as error:
            if not self._is_silent:
                log.warning("a leader does not answer", node_id=self.node_id, error=str(error))
            self._is_silent = True
            self._fetchers.note_silent()
        except (TierlogError, OSError) as error:
            log.warning("a fetch failed", node_id=self.node_id, error=str(error))
        except Exception:
            log.exception("a fetch failed: a bug", node_id=self.node_id)
        else:
            self._is_silent = False
            return goes_on
        return False
