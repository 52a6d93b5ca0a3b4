"""Transactions whose coordinator, or some of whose partitions, another broker of the cluster has.

* A partition's leader asks the coordinator before it appends what begins a transaction, as Kafka's
  does (KIP-890). What it was told is good until the transaction's marker is written here: one that
  is written while it asks makes the answer worthless, or the append would begin a transaction that
  nobody ends.
* A coordinator sends the markers of one broker's partitions in order, all that wait in one call,
  one call at a time: a broker that does not answer holds up one thread. Whoever asked repeats what
  failed; a marker that is written twice ends nothing twice.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from tierlog.broker.cluster.peers import Marker, Peers, TransactionPart
from tierlog.broker.data_folder import TopicPartition
from tierlog.broker.transaction_coordinator.transaction import ProducerEpoch
from tierlog.host.threads import Threads
from tierlog.record_format.errors import (
    PeerUnavailable,
    ProducerFenced,
    ShuttingDown,
    TierlogError,
    TransactionRefused,
)

THREADS_MAX: Final = 32
MARKERS_MAX: Final = 1_000  # in a call
NONE: Final = "NONE"
FENCED: Final = "INVALID_PRODUCER_EPOCH"


class _Told:
    """`producer`: whose transaction the partition is in; None until the coordinator has said so."""

    __slots__ = ("producer",)

    def __init__(self) -> None:
        self.producer: ProducerEpoch | None = None


class TransactionPeers:
    """Thread-safe. `close` ends its threads."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._threads = Threads(THREADS_MAX, name="transactions")
        self._lock = threading.Lock()
        self._told: dict[tuple[TopicPartition, int], _Told] = {}  # by producer id
        self._waiting: defaultdict[str, list[tuple[Marker, Future[None]]]] = defaultdict(list)
        self._sending: set[str] = set()  # the urls of brokers that a thread speaks with

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- asking a coordinator ---------------------------------------------------------------------

    def was_told(self, place: TopicPartition, producer: ProducerEpoch) -> bool:
        """Whether a coordinator has said that the partition is in this producer's transaction."""
        found = self._told.get((place, producer.producer_id))
        return found is not None and found.producer == producer

    def ask(self, url: str, part: TransactionPart) -> Future[None]:
        """Does not wait. The future raises TransactionRefused, PeerUnavailable."""
        return self._submit(begun(), self._ask, url, part)

    def _ask(self, done: Future[None], url: str, part: TransactionPart) -> None:
        producer = ProducerEpoch(part.producer_id, part.producer_epoch)
        keys = [(place, part.producer_id) for place in part.partitions]
        with self._lock:
            told = [self._told.setdefault(key, _Told()) for key in keys]
        try:
            reason = self._peers.take_part(url, part)
            if reason != NONE:
                raise TransactionRefused(reason, f"the coordinator at {url} says {reason}")
        except TierlogError as error:
            self._forget_unanswered(keys)
            done.set_exception(error)
            return
        for one in told:
            one.producer = producer
        done.set_result(None)

    def _forget_unanswered(self, keys: list[tuple[TopicPartition, int]]) -> None:
        with self._lock:
            for key in keys:
                if (one := self._told.get(key)) is not None and one.producer is None:
                    del self._told[key]

    def note_end(self, place: TopicPartition, producer_id: int) -> None:
        """Before the marker is queued."""
        with self._lock:
            self._told.pop((place, producer_id), None)

    def note_moved(self, place: TopicPartition) -> None:
        """The partition left this broker."""
        with self._lock:
            for key in [key for key in self._told if key[0] == place]:
                del self._told[key]

    # --- sending markers --------------------------------------------------------------------------

    def send_marker(self, url: str, marker: Marker) -> Future[None]:
        """Does not wait. The future raises ProducerFenced, TransactionRefused, PeerUnavailable."""
        done = begun()
        with self._lock:
            self._waiting[url].append((marker, done))
            if url in self._sending:
                return done
            self._sending.add(url)
        return self._submit(done, self._send_all, url)

    def _send_all(self, _: Future[None], url: str) -> None:
        while batch := self._next_batch(url):
            try:
                reasons = self._peers.write_markers(url, [marker for marker, _ in batch])
                if len(reasons) != len(batch):
                    raise PeerUnavailable(f"{url}: {len(reasons)} answers to {len(batch)} markers")
            except TierlogError as error:
                for _marker, done in batch:
                    done.set_exception(error)
                continue
            for (_marker, done), reason in zip(batch, reasons, strict=True):
                _complete(done, url, reason)

    def _next_batch(self, url: str) -> list[tuple[Marker, Future[None]]]:
        with self._lock:
            waiting = self._waiting.pop(url, [])
            batch, rest = waiting[:MARKERS_MAX], waiting[MARKERS_MAX:]
            if rest:
                self._waiting[url] = rest
            if not batch:
                self._sending.discard(url)
            return batch

    def _submit(
        self, done: Future[None], call: Callable[..., None], *arguments: object
    ) -> Future[None]:
        try:
            self._threads.submit(call, done, *arguments)
        except RuntimeError:
            done.set_exception(ShuttingDown("the broker stops"))
        return done


def begun() -> Future[None]:
    """A future that whoever waits for it cannot cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _complete(done: Future[None], url: str, reason: str) -> None:
    if reason == NONE:
        done.set_result(None)
    elif reason == FENCED:
        done.set_exception(ProducerFenced(f"the broker at {url} knows a later epoch"))
    else:
        done.set_exception(TransactionRefused(reason, f"the broker at {url} says {reason}"))
