"""Which broker leads which partition, as the brokers themselves say: a cache for requests.

* The manifest is the truth, and its claims fence whoever is out of date; so what is wrong here
  costs a request that another broker refuses, never a record.
* A broker reports all that it leads, and a new report replaces its last one. If two say that they
  lead a partition, the one with the higher leader epoch does.
* What is being changed of a partition's replicas goes on while nobody leads it, and is remembered
  until somebody says that they do.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tierlog.broker.data_folder.data_folder import TopicIdPartition


class Leader(NamedTuple):
    """Who leads a partition, and what it said last of it. Below `cold_end_offset` all is in the
    bucket. `replicas` and those in sync are node ids, and only of a topic with several of them, as
    are those that are being added and removed; `lags`, `has_store`: as in `ShownSet`.
    """

    leader_epoch: int
    log_end_offset: int
    cold_end_offset: int
    node_id: int
    replicas: tuple[int, ...] = ()
    in_sync: tuple[int, ...] = ()
    lags: tuple[int, ...] = ()
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    has_store: bool = False

    @property
    def changes(self) -> bool:
        return bool(self.adding or self.removing)


Report = Mapping[TopicIdPartition, Leader]
"""Everything that a broker leads."""


class Leaders:
    """Thread-safe: reports are replaced as a whole, and lookups take no lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reports: dict[int, Report] = {}
        self._gone: dict[int, Report] = {}  # what brokers said last that are gone
        # What is being changed of what nobody leads.
        self._left: dict[TopicIdPartition, Leader] = {}

    def put_report(self, node_id: int, report: Report) -> None:
        with self._lock:
            self._remember(self._reports.get(node_id, {}), report)
            self._reports = {**self._reports, node_id: report}
            self._gone = {one: report for one, report in self._gone.items() if one != node_id}
            self._forget_what_is_led()

    def put_led(self, node_id: int, place: TopicIdPartition, led: Leader | None) -> None:
        """Only this has changed of what the broker leads; None: it does not lead it any more."""
        with self._lock:
            report = dict(self._reports.get(node_id, {}))
            if led is None:
                report.pop(place, None)
            else:
                report[place] = led
            self.put_report(node_id, report)

    def keep_only(self, node_ids: Iterable[int]) -> None:
        """The other brokers are gone: what they said is good for showing alone."""
        with self._lock:
            kept, reports = set(node_ids), self._reports
            gone = {one: report for one, report in reports.items() if one not in kept}
            for report in gone.values():
                self._remember(report, {})
            self._gone |= gone
            self._reports = {one: report for one, report in reports.items() if one in kept}
            self._forget_what_is_led()

    def put_replicas(
        self,
        node_id: int,
        place: TopicIdPartition,
        *,
        replicas: Iterable[int],
        adding: Iterable[int],
        removing: Iterable[int],
    ) -> None:
        """What the broker has just answered: it may not lead it any more when it reports next."""
        with self._lock:
            led = self._reports.get(node_id, {}).get(place)
            if led is not None:
                changed = led._replace(
                    replicas=tuple(replicas), adding=tuple(adding), removing=tuple(removing)
                )
                self.put_led(node_id, place, changed)

    def _remember(self, before: Report, after: Report) -> None:
        """What a broker says no more that it leads. Most reports lack nothing."""
        lost = {place: before[place] for place in before.keys() - after.keys()}
        self._left |= {place: led for place, led in lost.items() if led.changes}

    def _forget_what_is_led(self) -> None:
        reports = self._reports.values()
        self._left = {
            place: led
            for place, led in self._left.items()
            if not any(place in report for report in reports)
        }

    def find_leader(self, place: TopicIdPartition) -> Leader | None:
        return _newest(self._reports, place)

    def find_gone_leader(self, place: TopicIdPartition) -> Leader | None:
        """The last leader that is known of a partition that nobody leads, if it is gone."""
        return _newest(self._gone, place)

    def led_by(self, node_id: int) -> list[TopicIdPartition]:
        return list(self._reports.get(node_id, {}))

    def sets(self) -> dict[TopicIdPartition, Leader]:
        """What is led and has a set of replicas."""
        found: dict[TopicIdPartition, Leader] = {}
        for report in self._reports.values():
            for place, led in report.items():
                if led.replicas and (place not in found or led > found[place]):
                    found[place] = led
        return found

    def changing(self) -> dict[TopicIdPartition, Leader]:
        """Whose replicas are being changed, also of what nobody leads at the moment."""
        with self._lock:
            sets = self.sets()
            return {place: led for place, led in (self._left | sets).items() if led.changes}

    def count_replicas(self) -> Counter[int]:
        """How many partitions each broker has, by node id, of those that are led."""
        return Counter(
            one
            for node_id, report in self._reports.items()
            for led in report.values()
            for one in led.replicas or (node_id,)
        )

    def count_led(self) -> dict[int, int]:
        """How many partitions each broker leads, by node id."""
        return {node_id: len(report) for node_id, report in self._reports.items()}


def _newest(reports: Mapping[int, Report], place: TopicIdPartition) -> Leader | None:
    found = (report[place] for report in reports.values() if place in report)
    return max(found, default=None)
