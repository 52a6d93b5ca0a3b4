"""Transactions whose coordinator, or some of whose partitions, another broker of the cluster has.

* A partition's leader asks the coordinator before it appends what begins a transaction, as Kafka's
  does (KIP-890). What it was told is good until the transaction's marker is written here: one that
  is written while it asks makes the answer worthless, or the append would begin a transaction that
  nobody ends.
* A coordinator sends the markers of one broker's partitions gathered. Whoever asked repeats what
  failed; a marker that is written twice ends nothing twice.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Final

from tierlog.broker.data_folder.data_folder import TopicPartition
from tierlog.broker.membership.gathered_calls import GatheredCalls
from tierlog.broker.membership.peers import Marker, Peers, TransactionPart
from tierlog.broker.transaction_coordinator.transaction import ProducerEpoch
from tierlog.host.threads import Threads, begun
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
        self._markers: GatheredCalls[str, Marker, None] = GatheredCalls(
            self._send_markers, threads=self._threads, most=MARKERS_MAX
        )
        self._lock = threading.Lock()
        self._told: dict[tuple[TopicPartition, int], _Told] = {}  # by producer id

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- asking a coordinator ---------------------------------------------------------------------

    def was_told(self, place: TopicPartition, producer: ProducerEpoch) -> bool:
        """Whether a coordinator has said that the partition is in this producer's transaction."""
        found = self._told.get((place, producer.producer_id))
        return found is not None and found.producer == producer

    def ask(self, url: str, part: TransactionPart) -> Future[None]:
        """Does not wait. The future raises TransactionRefused, PeerUnavailable."""
        done: Future[None] = begun()
        try:
            self._threads.submit(self._ask, done, url, part)
        except ShuttingDown as error:
            done.set_exception(error)
        return done

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
        return self._markers.give(url, marker)

    def _send_markers(self, url: str, markers: list[Marker]) -> list[TierlogError | None]:
        reasons = self._peers.write_markers(url, markers)
        if len(reasons) != len(markers):
            raise PeerUnavailable(f"{url}: {len(reasons)} answers to {len(markers)} markers")
        return [_refusal(url, reason) for reason in reasons]


def _refusal(url: str, reason: str) -> TierlogError | None:
    if reason == NONE:
        return None
    if reason == FENCED:
        return ProducerFenced(f"the broker at {url} knows a later epoch")
    return TransactionRefused(reason, f"the broker at {url} says {reason}")
