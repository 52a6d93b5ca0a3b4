"""The cluster, for one of its brokers: its face in `Broker`.

* Every partition has one leader. Another broker answers calls on it with NotLeader, or with
  LeaderUnknown while it is being moved or its broker is down.
* A partition that has a set of replicas in the bucket is what the set says (`replication`). One
  that has none is one folder's alone: the manifest says whose, and it moves through the bucket
  (`hand_over`), without a copy from disk to disk.
* What brokers tell each other saves time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.cluster.cluster_topics import ClusterTopics
from tierlog.broker.cluster.cold_partitions import ColdPartitions
from tierlog.broker.cluster.first_sets import FirstSets
from tierlog.broker.cluster.hand_over import STOP_S, HandOver, Moved
from tierlog.broker.cluster.moves import Moves
from tierlog.broker.cluster.news import News
from tierlog.broker.cluster.placement import Led, place_new
from tierlog.broker.cluster.reassignments import Reassignments
from tierlog.broker.cluster.settling import Settling
from tierlog.broker.cluster.shown_sets import ShownSets
from tierlog.broker.data_folder.data_folder import DataFolder, TopicIdPartition
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.membership.leaders import Leader, Leaders, Report
from tierlog.broker.membership.members import Members
from tierlog.broker.membership.own_node import Timing
from tierlog.broker.membership.peers import LeaderReport, Peers, Reassigned
from tierlog.broker.opening.log_opener import LogOpener
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.replicas import THREADS_MAX, Replicas
from tierlog.broker.replication.store_writer import StoreWriter
from tierlog.broker.replication.write_ahead_garbage import WriteAheadGarbage
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topics import Topic
from tierlog.host.threads import Threads
from tierlog.record_format.errors import (
    BrokerInUse,
    InvalidRequest,
    LeaderUnknown,
    NotLeader,
    OutcomeUnknownError,
    StoreUnavailable,
    TierlogError,
    UnknownTopicOrPartition,
)

log = structlog.get_logger(__name__)

ASK_AGAIN_S: Final = 0.1
SETS_PACE_S: Final = 1.0  # of looks at who lags of what is led here, to report it
LOOK_INTERVAL_S: Final = 30.0  # at the names, and at partitions that nobody leads


class Cluster:
    """Thread-safe."""

    def __init__(
        self,
        members: Members,
        topics: LiveTopics,
        bucket: Bucket,
        peers: Peers,
        *,
        offload: Callable[[Partition, float], bool],
        on_moved: Callable[[Partition], None],
        on_followed: Callable[[TopicRecord, bool], None],
        settings: BrokerSettings,
        folder: DataFolder,
        opener: LogOpener,
        clock: Callable[[], int],
    ) -> None:
        self.members, self._topics, self._bucket = members, topics, bucket
        self.leaders = Leaders()
        self.sets = ShownSets(self.leaders, self.find_leader)
        self.cold = ColdPartitions(bucket, self.leaders)
        self._on_moved = on_moved
        self.news = News(
            members,
            self.leaders,
            peers,
            settle=lambda places: self._settling.settle_all(places, is_named=True),
            led_here=self._led_here,
        )
        self.replicas = Replicas(
            folder,
            members,
            topics,
            bucket,
            peers,
            opener=opener,
            settings=settings,
            store_writer=StoreWriter(
                bucket.store,
                folder.owner,
                flush_ms=settings.store_flush_ms,
                object_max_bytes=settings.store_flush_max_bytes,
            ),
            on_moved=self._note_moved,
            gone=self.error_for,
            name=self.news.name_to_lead,
            tell=self.news.tell_of_leading,
            timing=Timing(clock),
            threads=Threads(THREADS_MAX, name="replicas"),
        )
        self.topics = ClusterTopics(
            topics,
            bucket,
            self.news,
            self.replicas,
            led=self._may_lead,
            has=self.leaders.count_replicas,
            on_followed=on_followed,
            clock=clock,
            default_factor=settings.default_replication_factor,
        )
        self._settling = Settling(
            topics, self.topics, self.replicas, self.news, on_led=self._note_moved
        )
        self.moves = Moves(
            members,
            self.leaders,
            self.news,
            peers,
            topics,
            may_lead=self._may_lead,
            hand_over=self.move,
            reassign=self.reassign,
            prefer=self.replicas.prefer,
            interval_ms=settings.rebalance_interval_ms,
        )
        self.hand_over = HandOver(topics, self.news, offload=offload, not_here=self.error_for)
        self._first_sets = FirstSets(topics, self.replicas, self.hand_over)
        self.reassignments = Reassignments(
            self.moves,
            self.leaders,
            topics,
            replicas=self.replicas.moves,
            begin_set=self._first_sets.begin_set,
            may_have=self._may_lead,
            look=self.news.read_reports,
        )
        self._write_ahead_garbage = WriteAheadGarbage(
            bucket.store, uploaded_end=self._uploaded_end, follow_topics=self.topics.follow_all
        )
        self._sets: dict[TopicIdPartition, tuple[int, Leader]] = {}  # by version, as reported
        self._looked_s = self._asked_s = self._sets_again_s = 0.0
        self._has_greeted = False
        self._session_timeout_s = settings.session_timeout_ms / 1000

    def is_gone(self, folder_id: str) -> bool:
        """Whether no living broker has this data folder."""
        member = self.members.member_of(folder_id)
        return member is None or not member.is_alive

    def begin(self) -> None:
        """Before anything is served: make the topics of this folder the cluster's, follow what has
        changed, and find out what became of hand-overs that a crash interrupted. Without the store
        the broker goes on with what it knows. The others are not asked: they may be starting too.

        Raises ConfigurationError if another topic of the cluster has the name of one that this
        folder had when it was alone.
        """
        try:
            self._bucket.store_status.require_store()
            self.topics.bring_own()
            self.topics.follow_all()
            self._settling.settle_all(self._topics.unsettled())
        except (StoreUnavailable, OutcomeUnknownError) as error:
            log.warning("the cluster's topics are not followed yet", error=str(error))

    # --- who leads --------------------------------------------------------------------------------

    def error_for(self, record: TopicRecord, number: int) -> TierlogError:
        """What to answer for a partition that this broker does not lead."""
        name = f"{record.name}-{number}"
        leader = self.find_leader(record.topic_id, number)
        if leader is None or leader.node_id == self.members.me.node_id:
            return LeaderUnknown(f"no broker is known to lead {name}", retry_after_s=1)
        member = self.members.member(leader.node_id)
        if member is None or not member.is_alive:
            return LeaderUnknown(
                f"broker {leader.node_id}, which led {name}, does not answer", retry_after_s=2
            )
        return NotLeader(
            name,
            node_id=member.node_id,
            url=member.url,
            kafka=member.kafka,
            leader_epoch=leader.leader_epoch,
        )

    def log_end_offset(self, record: TopicRecord, number: int) -> int | None:
        """As its leader last said; None if no leader is known."""
        leader = self.find_leader(record.topic_id, number)
        return None if leader is None else leader.log_end_offset

    def find_leader(self, topic_id: str, number: int) -> Leader | None:
        """As far as is known; None while nobody is known to lead it."""
        place = (topic_id, number)
        found, followed = self.leaders.find_leader(place), self.replicas.followed_leader(place)
        if followed is not None and (found is None or found.leader_epoch < followed[0]):
            log_end, cold_end = (0, 0) if found is None else found[1:3]
            return Leader(followed[0], log_end, cold_end, followed[1])
        return found

    def _led_here(self) -> Report:
        if time.monotonic() >= self._sets_again_s:
            self._sets, self._sets_again_s = {}, time.monotonic() + SETS_PACE_S
        return {
            (one.topic_id, one.number): led
            for one in self._topics.partitions()
            if (led := self._led(one)) is not None
        }

    def _led(self, one: Partition) -> Leader | None:
        """While its offsets and its set stay, who lags is as it was up to SETS_PACE_S ago."""
        if one.is_defunct:
            return None
        now, place = one.offsets(), (one.topic_id, one.number)
        offsets = now.leader_epoch, now.log_end_offset, one.cold_end_offset
        me = self.members.me.node_id
        version = 0 if one.term is None else one.term.lead.in_force.version
        known_version, known = self._sets.get(place, (0, None))
        if known is not None and known_version == version and known[:3] == offsets:
            return known
        if (shown := self.replicas.shown(place)) is None:
            return Leader(*offsets, me)
        led = Leader(
            *offsets,
            me,
            replicas=tuple(shown.replicas),
            in_sync=tuple(shown.in_sync),
            lags=tuple(shown.lags),
            adding=tuple(shown.adding),
            removing=tuple(shown.removing),
            has_store=shown.has_store,
        )
        self._sets[place] = version, led
        return led

    def report(self) -> LeaderReport:
        return LeaderReport.of(self.members.me.node_id, self._led_here())

    def _may_lead(self) -> Led:
        """What each broker leads that may be given more."""
        self.news.note_own()
        return {
            one.node_id: self.leaders.led_by(one.node_id)
            for one in self.members.members()
            if one.is_alive and one.state == "running"
        }

    # --- news, and what nobody has told -----------------------------------------------------------

    def hear_news(
        self,
        sender: int,
        topics: Iterable[str],
        assigned: Iterable[TopicIdPartition],
        *,
        led: Iterable[TopicIdPartition],
    ) -> LeaderReport:
        """From another broker, which may have joined just now. Raises StoreUnavailable,
        CorruptDataError.
        """
        known = self.members.member(sender)
        if known is None or not known.is_alive:
            self.members.refresh()
        self.topics.follow_names(topics)
        self.replicas.look_at(led, leader=sender)
        self._settling.settle_all(assigned, is_named=True)
        return self.report()

    def _note_moved(self, partition: Partition) -> None:
        """It is led here from now on, or no longer. It may be one of a thousand that a dead broker
        led: nothing is done for all of them here.
        """
        self._on_moved(partition)
        place = (partition.topic_id, partition.number)
        self.leaders.put_led(self.members.me.node_id, place, self._led(partition))

    def run_round(self) -> None:
        """In the background: what the others lead; and now and then, what has changed in the bucket
        that nobody told.
        """
        if self._has_greeted:
            self.news.read_reports()
        else:  # the others are to know of this broker before their next look
            self.members.beat()  # or they would see that of before a restart
            self.members.refresh()
            self.news.tell_all([])
            self._has_greeted = True
        self._settling.settle_all(self._missing_replicas())
        self.replicas.look_if_replaced(self._reported_epoch)
        pace_s = self._session_timeout_s if self._waits_for_another() else LOOK_INTERVAL_S
        if time.monotonic() >= self._looked_s + pace_s:
            self._looked_s = time.monotonic()
            self.look_after()
        self._note_factors()
        self._begin_sets()

    def _note_factors(self) -> None:
        """Of the topics whose first partition is led here, and is not being reassigned."""
        for record in [topic.record for topic in self._topics]:
            shown = self.replicas.shown((record.topic_id, 0))
            if shown is None or shown.adding or shown.removing:
                continue
            if len(shown.replicas) != record.replication_factor:
                # It was deleted meanwhile, or has partitions that nobody has had yet.
                with suppress(UnknownTopicOrPartition, LeaderUnknown):
                    self.topics.note_factor(record, len(shown.replicas))

    def _begin_sets(self) -> None:
        """Of what is led here alone, in topics that are to have the bucket as a replica by now."""
        for topic in list(self._topics):
            if not topic.record.is_replicated or topic.record.replication_factor > 1:
                continue
            for one in [one for one in topic.partitions.values() if one.term is None]:
                try:
                    self._first_sets.begin_set(one)
                except (TierlogError, OSError) as error:
                    log.warning("it has no set yet", partition=str(one), error=str(error))

    def collect_write_ahead(self) -> None:
        """In the background: delete what the manifests have, of this broker's chains and of those
        of brokers that do not live, if this one looks after them. Raises StoreUnavailable.
        """
        self._bucket.store_status.require_store()
        garbage, me = self._write_ahead_garbage, self.members.me
        deleted = garbage.collect(me.folder_id, ended=self.replicas.is_ended_chain)
        if min(self._may_lead(), default=None) == me.node_id:
            for folder in filter(self.is_gone, garbage.folders()):
                deleted += garbage.collect(folder, ended=lambda _: False)
        if deleted:
            log.info("write-ahead objects deleted", objects=deleted)

    def _uploaded_end(self, topic_id: str, number: int) -> int:
        topic = self._topics.find_by_id(topic_id)
        if (here := topic.partitions.get(number)) is not None:
            return here.cold_end_offset
        cold = self._bucket.find_cold_log(topic.record, number)
        manifest = None if cold is None else cold.load_newest()
        return 0 if manifest is None else manifest.end_offset

    def ask_who_leads(self) -> None:
        """Ask the others now, unless somebody did a moment ago: a call waits for a leader, or there
        is a key whose coordinator this broker does not know, and librdkafka asks three times within
        300 ms.
        """
        if time.monotonic() - self._asked_s >= ASK_AGAIN_S:
            self._asked_s = time.monotonic()
            self.news.read_reports()

    def _reported_epoch(self, place: TopicIdPartition) -> int:
        leader = self.leaders.find_leader(place)
        return -1 if leader is None else leader.leader_epoch

    def _missing_replicas(self) -> list[TopicIdPartition]:
        """Of which this broker is to have replicas, by what their leaders say, and has none: its
        disk was lost, or nobody told it.
        """
        return [
            place
            for place, led in self.leaders.sets().items()
            if self.members.me.node_id in led.replicas and not self.replicas.has(place)
        ]

    def look_after(self) -> None:
        """Follow the names, and find what crashes left: partitions that nobody leads. Raises
        StoreUnavailable, CorruptDataError.
        """
        self._bucket.store_status.require_store()
        self.members.refresh()  # who is not known is gone
        self.topics.follow_all()
        self._settling.settle_all(self._led_by_nobody(self._topics))
        may_lead = self._may_lead()
        if min(may_lead, default=None) == self.members.me.node_id:  # one does it, to save requests
            self._assign_again(may_lead)

    def _assign_again(self, may_lead: Led) -> None:
        """Assign to others what was assigned to a broker that does not live; what has no manifest
        yet: its creator died, nothing of it is on any disk; and what only the bucket has.
        """
        placed = place_new(self._led_by_nobody(self._topics), may_lead)
        taken = {place: one for place, one in placed.items() if self._assign_to(place, one)}
        if taken:
            self.news.tell_all([], placed=taken)

    def _assign_to(self, place: TopicIdPartition, node_id: int) -> bool:
        with suppress(UnknownTopicOrPartition):
            record, number = self._topics.find_by_id(place[0]).record, place[1]
            if self.replicas.has_set(record, number):
                return self.replicas.is_abandoned(record, number)
            if record.is_replicated and not self._bucket.folders_of(record, number):
                return self.topics.place_replicas_again(record, number)
            folder_id = self.news.folders()[node_id]
            return self._bucket.assign(record, number, folder_id, may_take_from=self.is_gone)
        return False

    def _waits_for_another(self) -> bool:
        """Whether something is led by nobody that only the bucket may have: another broker is to
        lead it soon. Those that have replicas, and live, see to it themselves.
        """
        stored = [one for one in self._topics if one.config.replication_store != "none"]
        return not all(map(self._has_living_replica, self._led_by_nobody(stored)))

    def _has_living_replica(self, place: TopicIdPartition) -> bool:
        gone = self.leaders.find_gone_leader(place)
        return gone is not None and any(map(self.news.find_other, gone.replicas))

    def _led_by_nobody(self, topics: Iterable[Topic]) -> list[TopicIdPartition]:
        return [
            (topic.record.topic_id, number)
            for topic in topics
            for number in topic.record.absent
            if self.leaders.find_leader((topic.record.topic_id, number)) is None
        ]

    # --- moving -----------------------------------------------------------------------------------

    def move(self, topic: str, number: int, *, node_id: int) -> Moved:
        """Hand a partition that this broker leads over to another. If a third has come to lead it,
        that is in the answer. Raises InvalidRequest, what `HandOver.run` does, and NotLeader.
        """
        partition = self._topics.find(topic).partition(number)
        target = self.members.member(node_id)
        if node_id == self.members.me.node_id:
            return Moved(node_id, partition.log_end_offset, 0)
        if target is None or not target.is_alive or target.state != "running":
            state = "is not known" if target is None else f"is {target.state}"
            state = "does not answer" if target is not None and not target.is_alive else state
            raise InvalidRequest(f"node_id: broker {node_id} {state}")
        if partition.term is None:
            moved = self.hand_over.run(partition, target)
            self._on_moved(partition)
            return moved
        began_s = time.monotonic()
        self.replicas.moves.hand_over(partition, target, timeout_s=STOP_S)
        paused_ms = round((time.monotonic() - began_s) * 1000)
        with suppress(StoreUnavailable):
            found = self.replicas.moves.look_who_leads(partition)
            node_id = node_id if found is None else found
        return Moved(node_id, partition.log_end_offset, paused_ms)

    def reassign(self, topic: str, number: int, replicas: Sequence[int]) -> Reassigned:
        """As `Reassignments.reassign_here`. Raises NotLeader too."""
        partition = self._topics.find(topic).partition(number)
        try:
            return self.reassignments.reassign_here(partition, replicas)
        finally:
            self.news.note_own()

    # --- brokers that leave -----------------------------------------------------------------------

    def leave(self, *, timeout_s: float) -> None:
        """Before a clean stop: give the others all that this broker leads, as long as that takes no
        longer than this.
        """
        self._give_up_leading(time.monotonic() + timeout_s)
        self.moves.leave(timeout_s=timeout_s)

    def _give_up_leading(self, deadline_s: float) -> None:
        """Hand over what other brokers have replicas in sync of."""

        def give(partition: Partition) -> None:
            try:
                targets = self.replicas.moves.may_lead_instead(partition)
                if targets and time.monotonic() < deadline_s:
                    self.move(partition.topic, partition.number, node_id=targets[0])
            except TierlogError as error:
                log.warning("a partition is led on", partition=str(partition), error=str(error))

        led = [one for one in self._topics.partitions() if one.term is not None]
        self.news.in_threads([partial(give, one) for one in led])

    def remove(self, node_id: int) -> None:
        """Have a broker that does not run, and that has no partition, leave for ever. Raises what
        `Members.remove` does.
        """
        self.members.remove(node_id, check_unused=partial(self._check_unused, node_id))

    def _check_unused(self, node_id: int, folder_id: str) -> None:
        """Raises BrokerInUse if a manifest names its folder, or a set of replicas names it.
        Whatever its owner is, new partitions are only assigned to brokers that live.
        """
        self.topics.follow_all()
        used: list[str] = []

        def look(record: TopicRecord, number: int) -> None:
            nodes = self.replicas.nodes_of_set(record, number)
            folders = self._bucket.folders_of(record, number) if nodes is None else set()
            if node_id in (nodes or ()) or folder_id in folders:
                used.append(f"{record.name}-{number}")

        self.news.in_threads(
            [partial(look, one.record, number) for one in self._topics for number in one.numbers]
        )
        if used:
            more = f" and {len(used) - 1} more" if len(used) > 1 else ""
            raise BrokerInUse(
                f"broker {node_id} has {min(used)}{more}: start and drain it first, or restore them"
            )

    def close(self, *, timeout_s: float) -> None:
        """The last step of a clean stop: the others need not wait for this broker."""
        self.moves.stop()
        self.reassignments.stop()
        self.news.close()
        self.members.leave(timeout_s)
