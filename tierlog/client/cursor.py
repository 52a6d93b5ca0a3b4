"""A reader's progress in a partition: where it is, what it asks next, and when it is done.

* A cursor moves only by what was taken from an answer, so a failed read is asked for again; and
  only past what it gave out, so its place is what a group commits.
* If no `end_offset` was given, the first answer fixes the `last_end`: what is appended meanwhile
  does not keep a reader from ending. An end that was given is waited for.
* At the last stable offset a reader of committed records is at the end too: an answer that makes no
  progress says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import index

from record_format.errors import UnknownTopic
from tierlog.client import calls
from tierlog.client.answers import FetchedBatches
from tierlog.client.calls import DEFAULT_LIMITS, Limits, Start, start_of
from tierlog.client.exchange import Call
from tierlog.client.records import ConsumedRecord, decode_fetched, from_time


@dataclass(slots=True)
class PartitionCursor:
    """One reader's place in one partition. `follow`: never done. `topic_id`: of the topic that is
    read; None until it is known.
    """

    topic: str
    partition: int = 0
    topic_id: str | None = None
    start: Start = "earliest"
    timestamp: int | None = None
    end_offset: int | None = None
    follow: bool = False
    limits: Limits = DEFAULT_LIMITS
    last_end: int | None = None
    at_end: bool = False
    is_answered: bool = False

    def spread(
        self, partitions: Iterable[int], offset: Start | Mapping[int, Start]
    ) -> list[PartitionCursor]:
        """One cursor like this for each partition; those that a mapping leaves out begin at the
        start.

        Raises TypeError for a single number, and for what is not a number.
        """
        if isinstance(partitions, int):
            raise TypeError(f"partitions: expected a list of numbers, as in [{partitions}]")
        end_offset = None if self.end_offset is None else index(self.end_offset)
        return [
            replace(
                self,
                partition=index(partition),
                start=start_of(
                    offset.get(partition, "earliest") if isinstance(offset, Mapping) else offset
                ),
                end_offset=end_offset,
            )
            for partition in partitions
        ]

    def next_call(self, *, wait_ms: int = 0) -> Call[FetchedBatches]:
        """What to ask next; only a reader at the end should wait."""
        return calls.fetch_batches(
            self.topic,
            self.partition,
            offset=self.start,
            timestamp=self.timestamp,
            limits=self.limits._replace(wait_ms=wait_ms),
        )

    def take(self, fetched: FetchedBatches) -> list[ConsumedRecord]:
        """The records of an answer to `next_call`; moves the cursor past them. Raises UnknownTopic
        if they are another topic's of the name.
        """
        self.check(fetched.topic_id)
        self.is_answered = True
        if self.last_end is None and not self.follow:
            self.last_end = fetched.high_watermark
        end = self.last_end if self.end_offset is None else self.end_offset
        records, broken_off_at = decode_fetched(
            fetched.batches,
            of=f"{self.topic}-{self.partition}",
            from_offset=self.start if isinstance(self.start, int) else fetched.log_start_offset,
            end_offset=end if self.timestamp is None else None,
        )
        if self.timestamp is not None:
            # The first at that time may lie behind the end: so it is looked for ahead of the cut.
            found = from_time(records, self.timestamp)
            records = [one for one in found if end is None or one.offset < end]
        self.at_end = fetched.up_to_date or fetched.next_offset == self.start
        self.start, self.timestamp = fetched.next_offset, None
        if broken_off_at is not None:
            self.at_end, self.start = False, broken_off_at
        if end is not None:
            self.start = min(self.start, end)
        return [ConsumedRecord(self.topic, self.partition, *record) for record in records]

    def check(self, topic_id: str) -> None:
        """Raises UnknownTopic if the name is another topic's by now."""
        if self.topic_id not in (None, topic_id):
            raise UnknownTopic.recreated(self.topic)
        self.topic_id = topic_id

    @property
    def done(self) -> bool:
        """Whether nothing more is to be asked for."""
        if self.follow or self.timestamp is not None or not isinstance(self.start, int):
            return False
        if self.end_offset is not None:
            return self.start >= self.end_offset
        return self.at_end or (self.last_end is not None and self.start >= self.last_end)
