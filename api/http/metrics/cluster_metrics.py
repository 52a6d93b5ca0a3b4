"""What a broker of a cluster says of it. Imported only in a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from tierlog.api.http.cluster.gateway import PassedOn
from tierlog.api.http.metrics.registry import counter, gauge, histogram
from tierlog.broker.broker import Broker
from tierlog.broker.cluster.cluster import Cluster
from tierlog.broker.data_folder.data_folder import TopicIdPartition

_STOPPED: Final = "stopped"


class ClusterMetrics(Collector):
    """A scrape asks no other broker."""

    def __init__(self, broker: Broker, cluster: Cluster, passed_on: PassedOn) -> None:
        self._broker, self._cluster, self._passed_on = broker, cluster, passed_on

    def collect(self) -> Iterator[Family]:
        cluster, hand_over = self._cluster, self._cluster.hand_over
        members, me = cluster.members.members(), cluster.members.me.node_id
        alive = sum(one.is_alive for one in members)
        fenced = sum(not one.is_alive and one.state != _STOPPED for one in members)
        short = cluster.sets.count_short(self._broker.topics(), leader=me)
        for name, value in (
            ("tierlog_active_broker_count", alive),
            ("tierlog_fenced_broker_count", fenced),
            ("tierlog_leader_count", len(cluster.leaders.led_by(me))),
            ("tierlog_offline_partitions_count", self._count_unled()),
            ("tierlog_under_replicated_partitions", short.under_replicated),
            ("tierlog_under_min_isr_partition_count", short.under_min_isr),
            ("tierlog_at_min_isr_partition_count", short.at_min_isr),
            ("tierlog_reassigning_partitions", cluster.replicas.count_reassigning()),
            ("tierlog_replica_fetcher_max_lag", cluster.replicas.max_lag(self._log_end_of)),
            ("tierlog_preferred_replica_imbalance_count", cluster.moves.count_imbalance()),
        ):
            yield gauge(name, {(): value})
        yield from self._of_sets()
        made: dict[tuple[str, ...], float] = {
            ("done",): hand_over.done,
            ("failed",): hand_over.failed,
        }
        yield counter("tierlog_hand_overs_total", made)
        yield histogram("tierlog_hand_over_pause_seconds", {(): hand_over.pauses.snapshot()})
        passed_on = self._passed_on
        yield counter(
            "tierlog_http_passed_on_total",
            {
                ("answered",): passed_on.answered,
                ("refused",): passed_on.refused,
                ("lost",): passed_on.lost,
            },
        )

    def _of_sets(self) -> Iterator[Family]:
        replicas = self._cluster.replicas
        counts = replicas.elections.counts
        for name, value in (
            ("tierlog_isr_shrinks_total", counts.shrinks),
            ("tierlog_isr_expands_total", counts.expands),
            ("tierlog_failed_isr_updates_total", counts.failed),
        ):
            yield counter(name, {(): value})
        yield histogram("tierlog_leader_election_seconds", {(): counts.elections.snapshot()})
        counted = replicas.count_fetches().items()
        for index, name in enumerate(
            ("tierlog_replica_fetches_total", "tierlog_replication_bytes_in_total")
        ):
            yield counter(name, {(str(node_id),): each[index] for node_id, each in counted})

    def _log_end_of(self, place: TopicIdPartition) -> int | None:
        leader = self._cluster.leaders.find_leader(place)
        return None if leader is None else leader.log_end_offset

    def _count_unled(self) -> int:
        find = self._cluster.find_leader
        return sum(
            find(one.topic_id, number) is None
            for one in self._broker.list_topics(internal=True)
            for number in range(one.partitions)
        )
