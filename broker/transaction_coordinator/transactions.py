"""Transactions over the broker's partitions, in `__transaction_state`, in Kafka's format.

* The topic is created by the first transactional producer. It is an ordinary topic: compacted,
  offloaded, restored, adopted from a Kafka folder.
* The coordinator's state is read from it in the background (`coordinator_log`); until then calls
  fail with a retriable error. What was decided before is carried out then.
* A marker in `__consumer_offsets` makes the transaction's offsets visible (`Groups`).

Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

import structlog

from tierlog.broker.data_folder.data_folder import TopicPartition
from tierlog.broker.group_coordinator.coordinator import error_of
from tierlog.broker.group_coordinator.groups import Groups
from tierlog.broker.membership.peers import Marker, Peers, TransactionPart
from tierlog.broker.partition.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.coordinator_log import CoordinatorLog, append_records, stored_records
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topic_replicas import NewTopic
from tierlog.broker.transaction_coordinator.coordinator import (
    NONE,
    Outcome,
    TransactionCoordinator,
)
from tierlog.broker.transaction_coordinator.transaction import V2, ProducerEpoch
from tierlog.broker.transaction_coordinator.transaction_peers import FENCED, TransactionPeers
from tierlog.host.clock import monotonic_ms
from tierlog.host.threads import begun, failed
from tierlog.hot_tier.log_writer import AppendResult
from tierlog.hot_tier.producer_state import ALONE, Verify
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.consumer_offsets import TOPIC as CONSUMER_OFFSETS
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import (
    NotLeader,
    ProducerFenced,
    Starting,
    TierlogError,
    TransactionRefused,
    UnknownTopicOrPartition,
)
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import TransactionLogKey
from tierlog.record_format.kafka_messages.source import MessageError
from tierlog.record_format.produced import build_marker
from tierlog.record_format.topic_rules import ConfigValue

log = structlog.get_logger(__name__)

TOPIC: Final = "__transaction_state"
# Of the one coordinator that there is without a cluster. A Kafka that is given the folder counts
# its own from 0, and its markers would be refused after a later one. In a cluster it is, as in
# Kafka, the leader epoch of the id's partition, which fences a coordinator that another replaced.
COORDINATOR_EPOCH: Final = ALONE
PART_TIMEOUT_S: Final = 4.0  # for a state to be written that another broker waits for
MARKER_TIMEOUT_S: Final = 4.0
_RECORD_OVERHEAD_BYTES: Final = 100  # at most, with the batch's head
EXPIRY_INTERVAL_MS: Final = 3_600_000  # Kafka's own
LATE_AFTER_MS: Final = 300_000  # Kafka's own, beyond transaction.max.timeout.ms
# Kafka's own for this topic; one partition, as one broker reads it all at each start.
CONFIG: Final[Mapping[str, ConfigValue]] = {
    "cleanup.policy": "compact",
    "segment.bytes": 100 << 20,
    "compression.type": "uncompressed",
}


class Transactions:
    """`coordinator` may be called once `log` is ready."""

    def __init__(
        self,
        topics: LiveTopics,
        groups: Groups,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        call_after: Callable[[int, Callable[[], None]], None],
        peers: Peers | None = None,
    ) -> None:
        """`peers`: in a cluster."""
        self._topics, self._groups, self._settings = topics, groups, settings
        self._clock = clock
        self._peers = None if peers is None else TransactionPeers(peers)
        self.coordinator = TransactionCoordinator(
            self,
            max_timeout_ms=settings.transaction_max_timeout_ms,
            call_after=call_after,
            now_ms=clock,
        )
        self.log = CoordinatorLog(
            topics,
            NewTopic(
                TOPIC,
                settings.transaction_state_log_num_partitions or 1,
                CONFIG,
                settings.transaction_state_log_replication_factor,
            ),
            load=lambda partition: self.coordinator.load(_newest_values(partition)),
            forget=self.coordinator.forget_ids,
            clock=clock,
        )
        self._has_looked = peers is not None  # for what hangs: in a cluster others may know it
        self._expire_again_ms = monotonic_ms() + EXPIRY_INTERVAL_MS

    # --- its state --------------------------------------------------------------------------------

    def run_round(self) -> None:
        """In the background: load the state, and forget ids that nobody uses."""
        with suppress(TierlogError, OSError):  # markers of what was decided may be due there
            self._groups.log.load()
        self.log.load()
        if not self._has_looked:
            self._name_what_hangs()
            self._has_looked = True
        if monotonic_ms() >= self._expire_again_ms:
            self._expire_again_ms = monotonic_ms() + EXPIRY_INTERVAL_MS
            self.coordinator.expire(idle_ms=self._settings.transactional_id_expiration_ms)

    def _name_what_hangs(self) -> None:
        """Transactions that no coordinator will end: its state is older than the log, or gone."""
        known = {one.producer_id for one in self.coordinator.transactions() if one.is_open}
        for partition in self._topics.partitions():
            now = partition.offsets()
            if now.last_stable_offset == now.high_watermark:
                continue
            for producer in partition.producers():
                if producer.is_in_transaction and producer.producer_id not in known:
                    log.warning(
                        "a transaction hangs: consumers with read_committed wait for its end",
                        partition=str(partition),
                        offset=producer.transaction_first_offset,
                        producer_id=producer.producer_id,
                        remedy="kafka-transactions.sh abort",
                    )

    def count_late(self) -> int:
        """The partitions here in which a transaction goes on although none may take so long, as
        Kafka's `hasLateTransaction`.
        """
        until_ms = self._clock() - self._settings.transaction_max_timeout_ms - LATE_AFTER_MS
        return sum(_is_late(one, until_ms) for one in self._topics.partitions())

    # --- what the coordinator writes --------------------------------------------------------------

    def append_state(
        self, transactional_id: str, key: bytes, value: bytes | None
    ) -> Future[AppendResult]:
        return self.log.append(transactional_id, [(key, value)])

    def append_together(self, states: Mapping[str, tuple[bytes, bytes]]) -> Future[AppendResult]:
        homes = set(map(self.log.home, states))
        if len(homes) > 1:
            detail = f"the ids are in {len(homes)} partitions of {TOPIC}"
            raise TransactionRefused("INVALID_REQUEST", detail)
        (home,) = homes
        rows = list(states.values())
        size_bytes = sum(len(key) + len(value) + _RECORD_OVERHEAD_BYTES for key, value in rows)
        if size_bytes > home.config.max_message_bytes:  # two batches: a crash may leave one
            detail = f"{len(rows)} transactions do not fit one batch of {TOPIC}"
            raise TransactionRefused("INVALID_REQUEST", detail)
        return append_records(home, rows, now_ms=self._clock())

    def append_marker(
        self,
        transactional_id: str,
        place: TopicPartition,
        producer: ProducerEpoch,
        *,
        commit: bool,
    ) -> Future[Any] | None:
        """Queue it, here or for the broker that leads; None if there is no such partition."""
        epoch = COORDINATOR_EPOCH
        if self._peers is not None:
            epoch = self.log.home(transactional_id).offsets().leader_epoch
        try:
            return self.end_here(place, producer, EndMarker(commit, epoch))
        except UnknownTopicOrPartition:
            return None
        except NotLeader as elsewhere:
            assert self._peers is not None, "it is the cluster that says so"
            marker = Marker(
                topic=place[0],
                partition=place[1],
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                committed=commit,
                coordinator_epoch=epoch,
            )
            return self._peers.send_marker(elsewhere.url, marker)

    def end_here(
        self, place: TopicPartition, producer: ProducerEpoch, marker: EndMarker
    ) -> Future[AppendResult]:
        """Queue a marker in a partition of this broker. Raises UnknownTopicOrPartition, NotLeader,
        LeaderUnknown, Starting, and what an append raises.
        """
        partition = self._topics.find(place[0]).partition(place[1])
        if place[0] == CONSUMER_OFFSETS:
            self._groups.log.check_loaded(partition)  # or what is read might miss it
        if self._peers is not None:
            self._peers.note_end(place, producer.producer_id)
        batches = build_marker(
            marker,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            timestamp=self._clock(),
        )
        ended = partition.append_marker(batches, marker)
        if place[0] == CONSUMER_OFFSETS:
            self._groups.follow_end(producer.producer_id, marker, ended)
        return ended

    # --- what takes part --------------------------------------------------------------------------

    def verify(self, transactional_id: str, place: TopicPartition) -> Verify:
        """For an append to this partition by a producer with this id. It waits for nothing: where
        another broker coordinates, `take_part` has to be done before.
        """

        def check(header: BatchHeader) -> None:
            producer = ProducerEpoch(header.producer_id, header.producer_epoch)
            self.check_takes_part(transactional_id, producer, place)

        return check

    def is_here(self, transactional_id: str) -> bool:
        """Whether this broker coordinates it: always, without a cluster."""
        if self._peers is None:
            return True
        try:
            self.log.check_here(transactional_id)
        except TierlogError:
            return False
        return True

    def check_takes_part(
        self, transactional_id: str, producer: ProducerEpoch, place: TopicPartition
    ) -> None:
        """As far as is known here. Raises TransactionRefused."""
        if self._peers is not None:
            if self._peers.was_told(place, producer):
                return
            self._check_ready_for_log(transactional_id)
        try:
            self.coordinator.check_takes_part(transactional_id, producer, place)
        except TransactionRefused:
            if self._peers is not None:  # it may have left meanwhile
                self._check_ready_for_log(transactional_id)
            raise

    def _check_ready_for_log(self, transactional_id: str) -> None:
        try:
            self.log.check_ready(transactional_id)
        except TierlogError as error:
            raise TransactionRefused(reason_of(error), str(error)) from error

    def take_part(
        self,
        transactional_id: str,
        producer: ProducerEpoch,
        places: Sequence[TopicPartition],
        *,
        adds: bool,
    ) -> Future[None]:
        """Have the coordinator, wherever it is, say that the partitions, which are here, are in the
        producer's transaction; with `adds` they are from then on. Does not wait.

        The future raises TransactionRefused, PeerUnavailable; this raises LeaderUnknown.
        """
        part = TransactionPart(
            transactional_id=transactional_id,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            partitions=list(places),
            adds=adds,
        )
        try:
            self.log.check_here(transactional_id)
        except NotLeader as elsewhere:
            assert self._peers is not None, "it is the cluster that says so"
            return self._peers.ask(elsewhere.url, part)
        return self._take_part_here(part)

    def _take_part_here(self, part: TransactionPart) -> Future[None]:
        done, producer = begun(), ProducerEpoch(part.producer_id, part.producer_epoch)

        def reply(outcome: Outcome) -> None:
            if outcome.reason == NONE:
                done.set_result(None)
            else:
                detail = str(outcome.cause or outcome.reason)
                done.set_exception(TransactionRefused(outcome.reason, detail))

        try:
            if self._peers is not None:
                self._check_ready_for_log(part.transactional_id)
            if part.adds:
                self.coordinator.add_partitions(
                    part.transactional_id, producer, part.partitions, version=V2, reply=reply
                )
                return done
            for place in part.partitions:
                self.coordinator.check_takes_part(part.transactional_id, producer, place)
            done.set_result(None)
        except TransactionRefused as refusal:
            done.set_exception(refusal)
        return done

    # --- for other brokers ------------------------------------------------------------------------

    def answer_part(self, part: TransactionPart) -> str:
        """Kafka's name of the reason why not, or NONE. Waits for the log."""
        try:
            self.log.prepare_for(part.transactional_id)
            for topic, number in part.partitions:  # its marker has to reach it
                self._topics.find(topic).check_number(number)
            self._take_part_here(part).result(PART_TIMEOUT_S)
        except TransactionRefused as refusal:
            return refusal.reason
        except TimeoutError:
            return "COORDINATOR_NOT_AVAILABLE"
        except (TierlogError, OSError) as error:
            return reason_of(error)
        return NONE

    def write_markers(self, markers: Sequence[Marker]) -> list[str]:
        """For each NONE once it is durable, or Kafka's name of an error. Waits for the logs."""
        return [_written(one) for one in [self._begin_marker(marker) for marker in markers]]

    def _begin_marker(self, marker: Marker) -> Future[AppendResult]:
        producer = ProducerEpoch(marker.producer_id, marker.producer_epoch)
        end = EndMarker(marker.committed, marker.coordinator_epoch)
        try:
            return self.end_here((marker.topic, marker.partition), producer, end)
        except (TierlogError, OSError) as error:
            return failed(error)

    def note_moved(self, place: TopicPartition) -> None:
        """A partition came to this broker of the cluster, or left it."""
        if self._peers is not None:
            self._peers.note_moved(place)

    def close(self) -> None:
        self.coordinator.close()
        if self._peers is not None:
            self._peers.close()

    def offsets_place(self, group: str) -> TopicPartition:
        """The partition of a group's offsets, wherever it is. Raises what creating a topic does."""
        return self._groups.offsets_place(group)


def _is_late(partition: Partition, until_ms: int) -> bool:
    now = partition.offsets()
    return now.last_stable_offset < now.high_watermark and any(
        one.is_in_transaction and one.last_timestamp < until_ms for one in partition.producers()
    )


def reason_of(error: BaseException) -> str:
    """For what keeps a coordinator from answering."""
    return "COORDINATOR_LOAD_IN_PROGRESS" if isinstance(error, Starting) else error_of(error)


def _written(marker: Future[AppendResult]) -> str:
    try:
        marker.result(MARKER_TIMEOUT_S)
    except ProducerFenced:
        return FENCED
    except TransactionRefused as refusal:
        return refusal.reason
    except (TierlogError, OSError, TimeoutError) as error:
        log.warning("a transaction's marker was not written", error=str(error))
        return "NOT_LEADER_OR_FOLLOWER"
    return NONE


def _newest_values(partition: Partition) -> dict[str, bytes]:
    """By transactional id. May block; raises what reads raise."""
    values: dict[str, bytes] = {}
    for record in stored_records(partition):
        try:
            key = codec.decode_record_key(TransactionLogKey, record.key or b"")
        except MessageError as error:
            log.warning("a record cannot be read", partition=str(partition), error=str(error))
            continue
        if record.value is None:
            values.pop(key.transactional_id, None)
        else:
            values[key.transactional_id] = bytes(record.value)
    return values
