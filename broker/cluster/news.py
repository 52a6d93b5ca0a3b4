"""Tells the other brokers what has changed, and keeps what they say that they lead.

* News only saves time: who is not told finds out by its next look at the bucket, or from what the
  others report.
* Brokers are spoken with in parallel, since one that is down answers nothing for seconds. Its
  report is waited for as long once: until it answers again, only briefly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any

import structlog

from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.membership.leaders import Leaders, Report
from tierlog.broker.membership.members import Member, Members
from tierlog.broker.membership.peers import LeaderReport, Peers
from tierlog.host.threads import Threads
from tierlog.record_format.errors import ShuttingDown, TierlogError

log = structlog.get_logger(__name__)

THREADS_MAX = 32
BRIEFLY_S = 0.25


class News:
    """Thread-safe. `settle` claims what was assigned to this broker; `led_here` reports what it
    leads.
    """

    def __init__(
        self,
        members: Members,
        leaders: Leaders,
        peers: Peers,
        *,
        settle: Callable[[Iterable[TopicIdPartition]], None],
        led_here: Callable[[], Report],
    ) -> None:
        self._members, self._leaders, self._peers = members, leaders, peers
        self._settle, self._led_here = settle, led_here
        self._threads = Threads(THREADS_MAX, name="cluster")
        self._silent = set[int]()  # those that did not answer the last time
        self._asked: dict[int, Future[bool]] = {}  # for their reports, at last

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def in_threads(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Make the calls in parallel. Raises the first error, once all have ended.

        A single call needs no thread: two brokers that hand partitions to each other would wait for
        each other's threads.
        """
        if len(calls) == 1:
            calls[0]()
            return
        made = [self._threads.submit(call) for call in calls]
        wait(made)
        for one in made:
            _result_of(one)

    def folders(self) -> dict[int, str]:
        """The data folders of all brokers, by node id."""
        return {one.node_id: one.folder_id for one in self._members.members()}

    def alive(self) -> list[Member]:
        """The brokers that live, this one too."""
        return [one for one in self._members.members() if one.is_alive]

    def others(self) -> list[Member]:
        """The brokers that can be spoken with."""
        me = self._members.me.node_id
        return [one for one in self._members.members() if one.is_alive and one.node_id != me]

    def find_other(self, node_id: int) -> Member | None:
        """The broker, if it can be spoken with."""
        return next((one for one in self.others() if one.node_id == node_id), None)

    def tell_all(
        self, topics: Sequence[str], *, placed: Mapping[TopicIdPartition, int] | None = None
    ) -> set[int]:
        """These names have changed, and these partitions were assigned to brokers. Returns once all
        that are alive have looked: the node ids of those that did not answer.
        """
        for_node: defaultdict[int, list[TopicIdPartition]] = defaultdict(list)
        for place, node_id in (placed or {}).items():
            for_node[node_id].append(place)
        me = self._members.me.node_id
        silent = set(for_node) - {me, *(other.node_id for other in self.others())}

        def tell(other: Member) -> None:
            if not self._tell(other, topics, for_node[other.node_id]):
                silent.add(other.node_id)

        self.in_threads(
            [
                partial(self._settle, for_node[me]),
                *(partial(tell, other) for other in self.others()),
            ]
        )
        self.note_own()
        return silent

    def name_to_lead(self, node_id: int, places: Sequence[TopicIdPartition]) -> None:
        """That broker is to lead these partitions: returns once it has looked."""
        if (other := self.find_other(node_id)) is not None:
            self._tell(other, (), places)
        self.note_own()

    def tell_of_leading(self, node_id: int, led: Sequence[TopicIdPartition]) -> None:
        """To that broker: this one leads these partitions. Returns once it has looked."""
        if (other := self.find_other(node_id)) is not None:
            self._tell(other, (), (), led)
            self.note_own()

    def _tell(
        self,
        other: Member,
        topics: Sequence[str],
        assigned: Sequence[TopicIdPartition],
        led: Sequence[TopicIdPartition] = (),
    ) -> bool:
        news = partial(
            self._peers.send_news,
            other.url,
            sender=self._members.me.node_id,
            topics=topics,
            assigned=assigned,
            led=led,
        )
        return self._speak(other, news)

    def read_reports(self) -> None:
        """Ask all others what they lead."""
        others, silent = self.others(), frozenset(self._silent)
        for one in others:
            before = self._asked.get(one.node_id)
            if one.node_id not in silent or before is None or before.done():
                ask = partial(self._peers.read_leaders, one.url)
                self._asked[one.node_id] = self._threads.submit(self._speak, one, ask)
        for one in others:
            if one.node_id not in silent:
                _result_of(self._asked[one.node_id])
        wait([self._asked[one.node_id] for one in others], timeout=BRIEFLY_S)
        self._leaders.keep_only([one.node_id for one in self._members.members() if one.is_alive])
        self.note_own()

    def note_own(self) -> None:
        self._leaders.put_report(self._members.me.node_id, self._led_here())

    def _speak(self, other: Member, call: Callable[[], LeaderReport]) -> bool:
        """Whether it answered."""
        try:
            report = call()
        except TierlogError as error:
            if other.node_id not in self._silent:  # it is asked again and again
                log.info("a broker does not answer", node_id=other.node_id, error=str(error))
            self._silent.add(other.node_id)
            self._members.doubt()
            return False
        self._silent.discard(other.node_id)
        if report.node_id != other.node_id:
            log.error("another broker answers", node_id=other.node_id, answers=report.node_id)
            return False
        self._leaders.put_report(other.node_id, report.led)
        return True


def _result_of(call: Future[Any]) -> None:
    """Raises what the call raised, and ShuttingDown if it will not be made."""
    try:
        call.result()
    except CancelledError as error:
        raise ShuttingDown("the broker stops") from error
