"""A consumer's progress in a partition: its next offset, its next fetch, and when it is done.

* A cursor moves only past records that it returned, so that a failed fetch is repeated, and its
  next offset is what a group may commit.
* Without an `end_offset`, the first response fixes `initial_end`: records appended meanwhile do not
  keep a consumer from ending. A given end is waited for.
* A consumer of committed records is also at the end at the last stable offset: the response then
  makes no progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import index

from tierlog.client import calls
from tierlog.client.calls import DEFAULT_LIMITS, Limits, Start, normalize_start
from tierlog.client.exchange import Call
from tierlog.client.records import ConsumedRecord, decode_fetched, from_timestamp
from tierlog.client.responses import FetchedBatches
from tierlog.record_format.errors import InvalidRequest, UnknownTopic


@dataclass(slots=True)
class PartitionCursor:
    """One consumer's progress in one partition. `follow`: never done. `topic_id`: None until it is
    known.

    Raises InvalidRequest for a follower with an end.
    """

    topic: str
    partition: int = 0
    topic_id: str | None = None
    next_offset: Start = "earliest"
    timestamp: int | None = None
    end_offset: int | None = None
    follow: bool = False
    limits: Limits = DEFAULT_LIMITS
    initial_end: int | None = None
    at_end: bool = False
    has_fetched: bool = False

    def __post_init__(self) -> None:
        if self.follow and self.end_offset is not None:
            raise InvalidRequest("a follower never ends: give either follow or end_offset")

    def for_partitions(
        self, partitions: Iterable[int], offset: Start | Mapping[int, Start]
    ) -> list[PartitionCursor]:
        """One cursor like this for each partition, also if it is named twice, at its offset;
        "earliest" for partitions that a mapping leaves out.

        Raises TypeError for a single number, and for anything that is not a number.
        """
        if isinstance(partitions, int):
            raise TypeError(f"partitions: expected a list of numbers, as in [{partitions}]")
        if self.timestamp is not None:
            offset = "earliest"  # not used: the first fetch is by the timestamp
        end_offset = None if self.end_offset is None else index(self.end_offset)
        return [
            replace(
                self,
                partition=partition,
                next_offset=normalize_start(
                    offset.get(partition, "earliest") if isinstance(offset, Mapping) else offset
                ),
                end_offset=end_offset,
            )
            for partition in dict.fromkeys(map(index, partitions))
        ]

    @property
    def reached_offset(self) -> int:
        """Where the next fetch begins. Only after the first one."""
        assert isinstance(self.next_offset, int), "a response has resolved it"
        return self.next_offset

    def next_fetch(self, *, wait_ms: int = 0) -> Call[FetchedBatches]:
        """The next fetch; only a consumer at the end should wait."""
        return calls.fetch_batches(
            self.topic,
            self.partition,
            offset=self.next_offset,
            timestamp=self.timestamp,
            limits=self.limits._replace(wait_ms=wait_ms),
        )

    def advance(self, fetched: FetchedBatches) -> list[ConsumedRecord]:
        """Return the records of a response to `next_fetch`, and move past them. Raises UnknownTopic
        if the topic was re-created.
        """
        self.check_topic_id(fetched.topic_id)
        self.has_fetched = True
        if self.initial_end is None and not self.follow:
            self.initial_end = fetched.high_watermark
        end = self.initial_end if self.end_offset is None else self.end_offset
        records, corrupt_from = decode_fetched(
            fetched.batches,
            partial(ConsumedRecord, self.topic, self.partition),
            of=f"{self.topic}-{self.partition}",
            from_offset=self.next_offset
            if isinstance(self.next_offset, int)
            else fetched.log_start_offset,
            end_offset=end if self.timestamp is None else None,
            next_offset=fetched.next_offset,
        )
        if self.timestamp is not None:
            # Before the cut at the end: the first record at that time may lie beyond it.
            found = from_timestamp(records, self.timestamp)
            records = [one for one in found if end is None or one.offset < end]
        self.at_end = fetched.up_to_date or fetched.next_offset == self.next_offset
        self.next_offset, self.timestamp = fetched.next_offset, None
        if corrupt_from is not None:
            self.at_end, self.next_offset = False, corrupt_from
        if end is not None:
            self.next_offset = min(self.next_offset, end)
        return records

    def check_topic_id(self, topic_id: str) -> None:
        """Raises UnknownTopic if the topic was re-created under its name."""
        if self.topic_id not in (None, topic_id):
            raise UnknownTopic.recreated(self.topic)
        self.topic_id = topic_id

    @property
    def done(self) -> bool:
        """Whether there is nothing left to fetch."""
        if self.follow or self.timestamp is not None or not isinstance(self.next_offset, int):
            return False
        if self.end_offset is not None:
            return self.next_offset >= self.end_offset
        return self.at_end or (
            self.initial_end is not None and self.next_offset >= self.initial_end
        )
