"""What the coordinators say: of groups, of share groups, of transactions. Names are Kafka's.

Rates and averages are Prometheus' to compute: what Kafka has as a rate is a counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from tierlog.api.http.metrics.registry import Labels, counter, gauge, histogram
from tierlog.broker.broker import Broker
from tierlog.broker.group_coordinator.consumer_protocol import CONSUMER
from tierlog.broker.group_coordinator.group_states import CLASSIC, SHARE
from tierlog.broker.group_coordinator.groups import Groups
from tierlog.broker.share_coordinator.share_groups import ShareGroups
from tierlog.broker.share_coordinator.share_partition import Ack
from tierlog.broker.transaction_coordinator.transaction import State
from tierlog.broker.transaction_coordinator.transactions import Transactions
from tierlog.host.latency_histogram import HistogramSnapshot

_TYPES: Final = (CLASSIC, CONSUMER, SHARE)
_ACKS: Final = (Ack.ACCEPT, Ack.RELEASE, Ack.REJECT)


class CoordinatorMetrics(Collector):
    """A scrape loads nothing, and asks no other broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Family]:
        broker = self._broker
        groups, shares, transactions = broker.groups, broker.share_groups, broker.transactions
        yield from _groups(groups)
        yield from _share_groups(shares)
        yield from _transactions(transactions)
        logs = (groups.log, transactions.log, shares.log)
        states: dict[Labels, float] = {
            (log.name, state): count
            for log in logs
            for state, count in log.count_by_state().items()
        }
        yield gauge("tierlog_coordinator_num_partitions", states)
        times: dict[Labels, HistogramSnapshot] = {
            (log.name,): log.load_times.snapshot() for log in logs
        }
        yield histogram("tierlog_partition_load_time_seconds", times)


def _groups(groups: Groups) -> Iterator[Family]:
    """Each type has a series, also without a group."""
    rebalances, offsets = groups.coordinator.rebalances, groups.counts
    found: dict[Labels, float] = {(kind, "Empty"): 0 for kind in _TYPES}
    yield gauge("tierlog_group_count", found | groups.count_by_state())
    yield counter("tierlog_group_rebalances_total", {(kind,): rebalances[kind] for kind in _TYPES})
    yield gauge("tierlog_num_offsets", {(): groups.count_offsets()})
    yield counter("tierlog_offset_commits_total", {(): offsets.committed})
    yield counter("tierlog_offset_expirations_total", {(): offsets.expired})
    yield counter("tierlog_offset_deletions_total", {(): offsets.deleted})


def _share_groups(shares: ShareGroups) -> Iterator[Family]:
    read = shares.partitions
    yield gauge("tierlog_share_in_flight_message_count", {(): read.count_in_flight()})
    yield counter("tierlog_share_acquisition_lock_timeouts_total", {(): read.late_count})
    yield counter(
        "tierlog_share_record_acknowledgements_total",
        {(ack.name.title(),): read.acknowledged[ack] for ack in _ACKS},
    )


def _transactions(transactions: Transactions) -> Iterator[Family]:
    coordinator = transactions.coordinator
    found = Counter(one.state for one in coordinator.transactions())
    yield gauge("tierlog_transactional_ids", {(state.shown,): found[state] for state in State})
    yield counter("tierlog_transaction_timeouts_total", {(): coordinator.late_count})
    late = transactions.count_late()
    yield gauge("tierlog_partitions_with_late_transactions_count", {(): late})
